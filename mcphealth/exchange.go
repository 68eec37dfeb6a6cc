//go:build go1.21

package mcphealth

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"sync"
	"time"
)

// errHeaderTooLong is an answer whose header, with those of interim answers before it
// (1xx), does not end within maxHeader bytes.
var errHeaderTooLong = fmt.Errorf("server response headers exceeded %d bytes", maxHeader)

// NewPlainLine makes a line as NewLine does, of a transport that speaks HTTP/1.1 without
// TLS and nothing else. Where no proxy is in the way, and t has no bounds of its own for
// an answer's header, it asks for half of the processor time and memory: net/http's
// Transport keeps what a connection needs that is used again. Its Ended hears of
// connections that were idle.
func NewPlainLine(t *http.Transport) *Line { return &Line{base: t, plain: true} }

// isDirect reports whether req needs no transport. One to a name in another script does:
// net/http's knows how to dial it (RFC 3492).
func (l *Line) isDirect(req *http.Request) bool {
	if !l.plain || req.URL.Scheme != "http" || !isASCII(req.URL.Host) || l.base.ResponseHeaderTimeout != 0 || l.base.MaxResponseHeaderBytes != 0 {
		return false
	}
	if l.base.Proxy == nil {
		return true
	}
	proxy, err := l.base.Proxy(req)
	return proxy == nil && err == nil
}

// exchange sends one request over a fresh connection and reads the head of its answer.
// The connection lasts until the body ends or is closed, or the request's context ends.
func (l *Line) exchange(req *http.Request) (*http.Response, error) {
	if err := checkHeader(req.Header); err != nil {
		return nil, err
	}
	ctx, dial := req.Context(), l.base.DialContext
	if dial == nil {
		dial = dialContext
	}
	c, err := dial(ctx, "tcp", hostPort(req.URL))
	if err != nil {
		return nil, err
	}
	if trace := httptrace.ContextClientTrace(ctx); trace != nil && trace.GotConn != nil {
		trace.GotConn(httptrace.GotConnInfo{Conn: c})
	}
	x := &exchange{l: l, ctx: ctx, c: c, born: time.Now()}
	x.stop = context.AfterFunc(ctx, func() { _ = c.Close() }) // a deadline is set anew by each Read under Caddy's read_timeout
	resp, err := x.run(req)
	if err != nil {
		x.end(false)
		return nil, x.orEnded(err)
	}
	x.body = resp.Body
	if resp.ContentLength == 0 {
		x.err = io.EOF
		x.end(true)
	}
	resp.Body = x.reader()
	return resp, nil
}

func isASCII(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] > 0x7f {
			return false
		}
	}
	return true
}

// hostPort is where a plain URL leads.
func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = "80"
	}
	return net.JoinHostPort(u.Hostname(), port)
}

// checkHeader refuses, as net/http's Transport does, what would be another header on the
// wire (RFC 9110, 5.5).
func checkHeader(h http.Header) error {
	for name, values := range h {
		for _, v := range values {
			for i := 0; i < len(v); i++ {
				if v[i] < ' ' && v[i] != '\t' || v[i] == 0x7f {
					return fmt.Errorf("net/http: invalid header field value for %q", name)
				}
			}
		}
		if strings.ContainsAny(name, " \t\r\n:") {
			return fmt.Errorf("net/http: invalid header field name %q", name)
		}
	}
	return nil
}

// Buffers of exchanges, and of answers that are read: small, but at a thousand probes a
// second most of what there would be to collect.
var (
	readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, smallBuffer) }}
	writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, smallBuffer) }}
)

func putReader(r *bufio.Reader) {
	r.Reset(nil)
	readers.Put(r)
}

// exchange is one request on its connection, and then the body of its answer.
type exchange struct {
	l    *Line
	ctx  context.Context // of the request
	c    net.Conn
	born time.Time
	in   *bufio.Reader
	body io.ReadCloser
	err  error // with which the body ended
	keep bool  // the connection may stay open when the body has ended
	over bool
	stop func() bool // has the end of the context mean nothing any more
}

// run writes the request and reads the answer's head.
func (x *exchange) run(req *http.Request) (*http.Response, error) {
	out := writers.Get().(*bufio.Writer)
	out.Reset(x.c)
	werr := req.Write(out)
	if werr == nil {
		werr = out.Flush()
	}
	out.Reset(nil)
	writers.Put(out)
	limited := &io.LimitedReader{R: x.c, N: maxHeader}
	x.in = readers.Get().(*bufio.Reader)
	x.in.Reset(limited)
	resp, err := http.ReadResponse(x.in, req)
	for err == nil && resp.StatusCode < 200 && resp.StatusCode != http.StatusSwitchingProtocols {
		resp, err = http.ReadResponse(x.in, req)
	}
	switch {
	case err == nil: // whether the server read the whole request or not
		x.keep = werr == nil && !resp.Close && resp.StatusCode >= 200
		limited.N = math.MaxInt64
		return resp, nil
	case limited.N <= 0:
		return nil, errHeaderTooLong
	case werr != nil:
		return nil, werr
	}
	return nil, err
}

// reader is the body, whose end is that of the exchange.
func (x *exchange) reader() io.ReadCloser {
	var r io.ReadCloser = x // Yaegi wraps an own type only through a variable of the interface
	return r
}

// Read reads on.
func (x *exchange) Read(p []byte) (int, error) {
	if x.err != nil {
		return 0, x.err
	}
	n, err := x.body.Read(p)
	if err != nil {
		x.end(err == io.EOF)
		x.err = x.orEnded(err)
	}
	return n, x.err
}

// orEnded is the end of the context, if that is why there was err.
func (x *exchange) orEnded(err error) error {
	if err != io.EOF && x.ctx.Err() != nil {
		return x.ctx.Err()
	}
	return err
}

// Close gives up what was not read.
func (x *exchange) Close() error {
	x.end(false)
	return nil
}

// end ends the exchange. Its connection stays open, for the watch, if the answer was
// read to its end and nothing followed.
func (x *exchange) end(whole bool) {
	if x.over {
		return
	}
	x.over = true
	if !x.stop() || !whole || !x.keep || x.in.Buffered() > 0 {
		_ = x.c.Close()
		return
	}
	x.l.rest(x.c, x.born)
	putReader(x.in)
}
