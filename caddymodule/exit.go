package caddymodule

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// leaving is whether servers shut down for good: the process exits, and waits for the
// requests that it has, among them streams without an end, until somebody kills it.
var leaving atomic.Bool

var ending sync.Once

func init() {
	caddy.OnExit(func(context.Context) { end() })
}

// end stops all apps, and has the checkers end their sessions on servers. It returns when
// that is done.
func end() {
	ending.Do(func() {
		for _, a := range apps.list() {
			a.stop()
		}
		checkers.closeUnused(closeTimeout)
	})
}

// endWith has all end when the server of ctx begins to shut down because the process
// exits. Stop would be too early or too late: Caddy stops apps in any order, and the one
// with the servers waits for shutdown_delay before, and for requests after that.
func endWith(ctx caddy.Context) {
	server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server)
	if !ok {
		return
	}
	server.RegisterOnShutdown(func() {
		if caddy.Exiting() {
			leaving.Store(true)
			end()
		}
	})
}
