package caddymodule

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"sync/atomic"
	"syscall"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

// errEnded is a write to a connection that the upstream had ended before. Nothing
// was written, and net/http may send the request over another one.
var errEnded = errors.New("the upstream has ended this connection")

// unwrittenError is the end of a connection to which nothing was ever written: the
// request that it was made for was not sent. net/http tries another connection only
// for those that had served before.
type unwrittenError struct{ error }

// Unwrap returns what ended it.
func (e unwrittenError) Unwrap() error { return e.error }

// keepHonest has the handler's own connections say before a request is written
// that the upstream has ended them. net/http notices that only when it gets to run
// the goroutine that reads from them; a request written until then is lost, and
// nobody can know whether it was executed. It happens to each idle connection of a
// process that is killed, and whenever a server hangs up on an idle connection.
//
// It is part of provisioning, before there is traffic. The transport of a handler
// that names none is made here, the way the handler would make it after its policy.
// made has to be cleaned up; it is nil for a transport that Caddy does. sawH2 tells
// from then on whether a connection spoke HTTP/2; it is nil where nobody looks.
func (a *App) keepHonest(ctx caddy.Context, h *reverseproxy.Handler) (made caddy.CleanerUpper, sawH2 *atomic.Bool, err error) {
	if h.Transport == nil && h.TransportRaw == nil {
		t := new(reverseproxy.HTTPTransport)
		if err := t.Provision(ctx); err != nil {
			return nil, nil, err
		}
		h.Transport, made = t, t
	}
	t, ok := h.Transport.(*reverseproxy.HTTPTransport)
	if !ok || t.Transport == nil || t.Transport.DialContext == nil || !canPeek {
		return made, nil, nil
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.honest == nil {
		a.honest = make(map[*http.Transport]*atomic.Bool)
	}
	if sawH2 = a.honest[t.Transport]; sawH2 != nil {
		return made, sawH2, nil
	}
	sawH2 = new(atomic.Bool)
	a.honest[t.Transport] = sawH2
	if c := t.Transport.TLSClientConfig; c != nil {
		c.VerifyConnection = noteHTTP2(c.VerifyConnection, sawH2)
	}
	dial := t.Transport.DialContext
	t.Transport.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil || ctx.Value(probeKey{}) != nil { // probes use no connection twice
			return c, err
		}
		return newHonestConn(c), nil
	}
	return made, sawH2, nil
}

// noteHTTP2 has saw say whether a TLS handshake agreed on HTTP/2.
func noteHTTP2(verify func(tls.ConnectionState) error, saw *atomic.Bool) func(tls.ConnectionState) error {
	return func(s tls.ConnectionState) error {
		if s.NegotiatedProtocol == "h2" {
			saw.Store(true)
		}
		if verify != nil {
			return verify(s)
		}
		return nil
	}
}

// socket is what an honest connection is made of: TCP and unix sockets.
type socket interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// honestConn refuses a request, which is the first write of all or after a read, if
// the other side has ended the connection, and says of its end whether anything was
// written before.
type honestConn struct {
	socket
	raw   syscall.RawConn
	wrote atomic.Bool   // something was written, or is being written
	rest  atomic.Bool   // the last thing that happened was a read, or the dial
	look  func(uintptr) // peek, made once
	ended bool          // what look found
}

func newHonestConn(c net.Conn) net.Conn {
	s, ok := c.(socket)
	if !ok {
		return c
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return c
	}
	h := &honestConn{socket: s, raw: raw}
	h.rest.Store(true) // net/http also keeps connections that it dialled and then did not need
	h.look = func(fd uintptr) { h.ended = peekEnd(fd) }
	return h
}

// Read reads.
func (c *honestConn) Read(p []byte) (int, error) {
	n, err := c.socket.Read(p)
	c.rest.Store(true)
	if err != nil && !c.wrote.Load() {
		// io.EOF has a meaning of its own only within an answer: there is none.
		err = unwrittenError{err}
	}
	return n, err
}

// Write writes, unless this begins a request that nobody would read. It looks by
// Control, which unlike RawConn.Read does not wait for the Read that net/http keeps
// going on an idle connection.
func (c *honestConn) Write(p []byte) (int, error) {
	if c.rest.Load() {
		c.rest.Store(false)
		if c.raw.Control(c.look) == nil && c.ended {
			return 0, errEnded
		}
	}
	first := !c.wrote.Swap(true)
	n, err := c.socket.Write(p)
	if err != nil && n == 0 && first {
		err = unwrittenError{err}
	}
	return n, err
}
