//go:build go1.21

package mcphealth

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// maxHeader is how many bytes of answer headers a probe accepts: 64 KiB, far
// above any MCP server's and far below what hurts.
const maxHeader = 64 << 10

// Line is the way to one upstream. Each question dials afresh, which proves that
// the server still accepts; the connection of the last one stays open, idle, so
// that its end tells of the server's death at once.
type Line struct {
	// Prepare, if set before the first question, may replace the request, to put
	// what the proxy's transport needs into its context.
	Prepare func(*http.Request) *http.Request

	own     *http.Transport   // ours alone; nil for a foreign transport
	foreign http.RoundTripper // anything else; it may reuse connections, and is not watched

	mu    sync.Mutex
	conn  *watchedConn // the last one dialled
	alarm func()       // called once, when conn ends while idle
}

// NewLine makes a line over t and takes t over: pass a clone of the transport
// that traffic uses. Its dialer, TLS settings and protocols stay as they are.
func NewLine(t *http.Transport) *Line {
	l := &Line{own: t}
	dial := t.DialContext
	if dial == nil {
		dial = func(ctx context.Context, network, addr string) (net.Conn, error) { // no method value: Yaegi mistypes it
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}
	}
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return l.watch(c), nil
	}
	if t.TLSNextProto != nil { // it may lead into the pool of the transport it was cloned from
		t.TLSNextProto = nil
		t.ForceAttemptHTTP2 = true
	}
	if t.MaxResponseHeaderBytes == 0 || t.MaxResponseHeaderBytes > maxHeader {
		t.MaxResponseHeaderBytes = maxHeader
	}
	t.DisableCompression = true
	t.DisableKeepAlives = false
	t.MaxIdleConnsPerHost = 1
	t.IdleConnTimeout = 0
	return l
}

// NewForeignLine makes a line over any other transport: without death watch, and
// with "Connection: close" on each question.
func NewForeignLine(rt http.RoundTripper) *Line { return &Line{foreign: rt} }

// Close closes the idle connection.
func (l *Line) Close() { l.hangUp() }

// roundTrip sends one request over a fresh connection.
func (l *Line) roundTrip(req *http.Request) (*http.Response, error) {
	if l.own == nil {
		req.Close = true
	} else {
		l.hangUp()
	}
	return l.beside(req)
}

// beside sends one request without closing what is open.
func (l *Line) beside(req *http.Request) (*http.Response, error) {
	if l.Prepare != nil {
		req = l.Prepare(req)
	}
	if l.own == nil {
		return l.foreign.RoundTrip(req)
	}
	return l.own.RoundTrip(req)
}

func (l *Line) hangUp() {
	l.onEnd(nil)
	if l.own != nil {
		l.own.CloseIdleConnections()
	}
}

// onEnd sets what is called when the open connection ends; nil disarms. Without
// an open connection there is nothing to watch, and onEnd reports false.
func (l *Line) onEnd(alarm func()) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.alarm = alarm
	if l.conn == nil || l.conn.ended {
		l.alarm = nil
	}
	return l.alarm != nil
}

// ended notes the end of w and raises the alarm if w is the one watched.
func (l *Line) ended(w *watchedConn) {
	l.mu.Lock()
	w.ended = true
	alarm := l.alarm
	if l.conn == w {
		l.alarm = nil
	} else {
		alarm = nil
	}
	l.mu.Unlock()
	if alarm != nil {
		alarm()
	}
}

func (l *Line) watch(c net.Conn) net.Conn {
	w := &watchedConn{c: c, l: l}
	l.mu.Lock()
	l.conn = w
	l.mu.Unlock()
	var conn net.Conn = w // Yaegi wraps an own type only through a variable of the interface
	return conn
}

// watchedConn tells its line when the other side ends it: net/http keeps a Read
// waiting on an idle connection. Written out, not embedded, for Yaegi.
type watchedConn struct {
	c     net.Conn
	l     *Line
	ended bool // guarded by l.mu
}

func (w *watchedConn) Read(b []byte) (int, error) {
	n, err := w.c.Read(b)
	if err != nil {
		w.l.ended(w)
	}
	return n, err
}

func (w *watchedConn) Close() error {
	w.l.mu.Lock()
	w.ended = true
	w.l.mu.Unlock()
	return w.c.Close()
}

func (w *watchedConn) Write(b []byte) (int, error)        { return w.c.Write(b) }
func (w *watchedConn) LocalAddr() net.Addr                { return w.c.LocalAddr() }
func (w *watchedConn) RemoteAddr() net.Addr               { return w.c.RemoteAddr() }
func (w *watchedConn) SetDeadline(t time.Time) error      { return w.c.SetDeadline(t) }
func (w *watchedConn) SetReadDeadline(t time.Time) error  { return w.c.SetReadDeadline(t) }
func (w *watchedConn) SetWriteDeadline(t time.Time) error { return w.c.SetWriteDeadline(t) }
