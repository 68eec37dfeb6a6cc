//go:build !linux

package caddymodule

import "net"

// idleWatch cannot watch here: a goroutine for each connection does.
type idleWatch struct{}

func (*idleWatch) watch(net.Conn, func()) (stop func()) { return nil }
