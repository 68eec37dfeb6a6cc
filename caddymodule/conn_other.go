//go:build !(linux || darwin || freebsd || netbsd || openbsd)

package caddymodule

const canPeek = false

func peekEnd(uintptr) bool { return false }
