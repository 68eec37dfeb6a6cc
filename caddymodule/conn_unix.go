//go:build linux || darwin || freebsd || netbsd || openbsd

package caddymodule

import "syscall"

// canPeek: this system can say without reading whether a connection has ended.
const canPeek = true

// peekEnd reports whether the next read from the socket would find its end.
func peekEnd(fd uintptr) bool {
	var one [1]byte
	n, _, err := syscall.Recvfrom(int(fd), one[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	switch err {
	case nil:
		return n == 0
	case syscall.EAGAIN, syscall.EINTR:
		return false
	}
	return true
}
