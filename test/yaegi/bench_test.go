package yaegi_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/traefik/yaegi/interp"
	"github.com/traefik/yaegi/stdlib"
)

// BenchmarkSticky is what interpreted code costs a request of a session, on top of
// nothing and of a plugin that passes everything on.
func BenchmarkSticky(b *testing.B) {
	srv := httptest.NewServer(http.HandlerFunc(sums))
	b.Cleanup(func() { _ = srv.Listener.Close() })
	bal := &balancer{up: map[string]bool{}, sticky: &stickiness{&stickyCookie{"stick"}}}
	bal.AddServer(srv.URL, proxyWithout(b), serverOptions{})
	h, err := loadPlugin(b).middleware(b.Context(), bal, map[string]interface{}{"sticky": true})
	if err != nil {
		b.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); ; {
		bal.mu.Lock()
		up := bal.up[srv.URL] && !bal.up["mcphealth://hold"]
		bal.mu.Unlock()
		if up {
			break
		}
		if time.Now().After(end) {
			b.Fatal("never up")
		}
	}
	id := visit(h, "open", "")
	if len(id) != len("id-of-its-own")+24 {
		b.Fatalf("session %q", id)
	}
	if got := visit(h, "json", id); got != id {
		b.Fatalf("session %q, want %q", got, id)
	}
	i := interp.New(interp.Options{})
	_ = i.Use(stdlib.Symbols)
	if _, err := i.Eval(noop); err != nil {
		b.Fatal(err)
	}
	v, err := i.Eval("noop.New")
	if err != nil {
		b.Fatal(err)
	}
	pass := v.Interface().(func(http.Handler) http.Handler)(bal)
	sides := []struct {
		name, body, id string
		h              http.Handler
	}{
		{"nothing", "json", id, bal},
		{"no-op", "json", id, pass},
		{"json", "json", id, h},
		{"silent", "silent", id, h},
		{"stream", "stream", id, h},
		{"open", "open", "", h},
		{"modern", "json", "modern", h},
	}
	for _, s := range sides {
		b.Run(s.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				visit(s.h, s.body, s.id)
			}
		})
	}
}

const noop = `package noop

import "net/http"

type handler struct{ next http.Handler }

func (h *handler) ServeHTTP(rw http.ResponseWriter, req *http.Request) { h.next.ServeHTTP(rw, req) }

func New(next http.Handler) http.Handler { return &handler{next: next} }
`

// answer is a connection to a client.
type answer struct {
	h      http.Header
	status int
}

func (a *answer) Header() http.Header         { return a.h }
func (a *answer) WriteHeader(status int)      { a.status = status }
func (a *answer) Write(p []byte) (int, error) { return len(p), nil }
func (a *answer) Flush()                      {}

func visit(h http.Handler, body, id string) string {
	req, _ := http.NewRequestWithContext(context.Background(), http.MethodPost, "http://edge/mcp", strings.NewReader(body))
	req.RemoteAddr = "127.0.0.1:1"
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	switch id {
	case "":
	case "modern":
		req.Header["Mcp-Protocol-Version"] = []string{"2026-07-28"}
	default:
		req.Header["Mcp-Session-Id"] = []string{id}
		req.Header["Mcp-Protocol-Version"] = []string{"2025-11-25"}
	}
	rw := &answer{h: http.Header{}}
	h.ServeHTTP(rw, req)
	return rw.h.Get("Mcp-Session-Id")
}

type trip func(req *http.Request) (*http.Response, error)

func (t trip) RoundTrip(req *http.Request) (*http.Response, error) { return t(req) }

// proxyWithout is Traefik's proxy to a server, without the network.
func proxyWithout(t testing.TB) http.Handler {
	const text = `{"jsonrpc":"2.0","id":2,"result":{"content":[{"type":"text","text":"x"}]}}`
	return &httputil.ReverseProxy{
		Rewrite:    func(*httputil.ProxyRequest) {},
		BufferPool: onePool{},
		Transport: trip(func(req *http.Request) (*http.Response, error) {
			body, _ := io.ReadAll(req.Body)
			resp := &http.Response{StatusCode: 200, ProtoMajor: 1, ProtoMinor: 1, Request: req, ContentLength: -1,
				Header: http.Header{"Content-Type": {"text/event-stream"}, "Date": {"x"}, "Mcp-Session-Id": {"id-of-its-own"}}}
			switch string(body) {
			case "stream":
				resp.Body = io.NopCloser(strings.NewReader("event: message\ndata: " + text + "\n\n"))
			case "silent":
				delete(resp.Header, "Mcp-Session-Id")
				fallthrough
			default:
				resp.Header["Content-Length"] = []string{"75"}
				resp.Header["Content-Type"] = []string{"application/json"}
				resp.ContentLength = int64(len(text))
				resp.Body = io.NopCloser(strings.NewReader(text))
			}
			return resp, nil
		}),
	}
}

// onePool is a pool of buffers, as Traefik's.
type onePool struct{}

var buffers = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

func (onePool) Get() []byte  { return *buffers.Get().(*[]byte) }
func (onePool) Put(b []byte) { buffers.Put(&b) }
