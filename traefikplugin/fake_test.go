package traefikplugin

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/internal/leak"
)

// fakeHandler and fakeBalancer have the shape of Traefik's own (pkg/server/service/
// loadbalancer/wrr): the same field and method names and signatures.
type fakeHandler struct {
	http.Handler

	name   string
	weight float64
}

type fakeServer struct {
	URL    string
	Fenced bool
}

type fakeBalancer struct {
	mu       sync.RWMutex
	handlers []*fakeHandler
	status   map[string]struct{}
	fenced   map[string]struct{}
	updaters []func(bool)

	said   []string // SetStatus calls, as "+name" and "-name"
	looped []string // what would have hung wrr for ever (traefik#13511)
}

func (b *fakeBalancer) SetStatus(_ context.Context, name string, up bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	known := false
	for _, h := range b.handlers {
		known = known || h.name == name
	}
	if !known {
		b.looped = append(b.looped, "unknown name "+name)
	}
	if up {
		b.said = append(b.said, "+"+name)
		b.status[name] = struct{}{}
	} else {
		b.said = append(b.said, "-"+name)
		delete(b.status, name)
	}
	for n := range b.status {
		if _, fenced := b.fenced[n]; !fenced {
			return
		}
	}
	if len(b.status) > 0 {
		b.looped = append(b.looped, fmt.Sprintf("only fenced servers up after %s", b.said[len(b.said)-1]))
	}
}

func (b *fakeBalancer) AddServer(name string, h http.Handler, s fakeServer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.handlers = append(b.handlers, &fakeHandler{Handler: h, name: name, weight: 1})
	b.status[name] = struct{}{}
	if s.Fenced {
		b.fenced[name] = struct{}{}
	}
}

func (b *fakeBalancer) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	b.mu.RLock()
	var h http.Handler
	for _, x := range b.handlers {
		_, up := b.status[x.name]
		if _, fenced := b.fenced[x.name]; up && !fenced {
			h = x
			break
		}
	}
	b.mu.RUnlock()
	if h == nil {
		http.Error(rw, "no available server", http.StatusServiceUnavailable)
		return
	}
	h.ServeHTTP(rw, req)
}

func (b *fakeBalancer) up(name string) bool {
	b.mu.RLock()
	defer b.mu.RUnlock()
	_, ok := b.status[name]
	return ok
}

func balancerOf(servers ...fakeServer) *fakeBalancer {
	b := &fakeBalancer{status: map[string]struct{}{}, fenced: map[string]struct{}{}}
	for _, s := range servers {
		name := s.URL
		b.AddServer(name, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			body, _ := io.ReadAll(req.Body)
			fmt.Fprintf(rw, "%s got %d bytes", name, len(body))
		}), s)
	}
	return b
}

// mcpServer is a modern MCP server that can be stopped and started again at the
// same address.
type mcpServer struct {
	t    *testing.T
	URL  string // without a path
	addr string
	srv  *http.Server
}

func startMCP(t *testing.T) *mcpServer {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &mcpServer{t: t, addr: ln.Addr().String(), URL: "http://" + ln.Addr().String()}
	m.serve(ln)
	t.Cleanup(func() { m.stop() })
	return m
}

func (m *mcpServer) serve(ln net.Listener) {
	m.srv = &http.Server{Handler: http.HandlerFunc(answer)}
	go m.srv.Serve(ln)
}

func (m *mcpServer) stop() { m.srv.Close() }

func (m *mcpServer) start() {
	m.t.Helper()
	ln, err := net.Listen("tcp", m.addr)
	if err != nil {
		m.t.Fatal(err)
	}
	m.serve(ln)
}

func answer(rw http.ResponseWriter, req *http.Request) {
	var q struct {
		ID     json.RawMessage `json:"id"`
		Method string          `json:"method"`
	}
	if req.URL.Path != "/mcp" || json.NewDecoder(req.Body).Decode(&q) != nil {
		http.NotFound(rw, req)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(rw, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28"],"capabilities":{},"serverInfo":{"name":"a\"b","version":"1"}}}`, q.ID)
}

// zerologger has the one field that routerOf reads of a zerolog.Logger.
type zerologger struct{ context []byte }

type loggerKey struct{}

// onRouter is a context as Traefik gives it to New for that router.
func onRouter(t *testing.T, router string) (context.Context, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	return routerContext(ctx, router), cancel
}

// routerContext is that of a router of ctx's configuration.
func routerContext(ctx context.Context, router string) context.Context {
	return doorContext(ctx, "web", router)
}

// doorContext is that of a router which was built for that entry point. Those above it
// come before its name.
func doorContext(ctx context.Context, door, router string) context.Context {
	l := &zerologger{context: []byte(`{"entryPointName":"` + door + `","routerName":"` + strings.ReplaceAll(router, " ", `","routerName":"`) + `","middlewareName":"mcp@file"`)}
	return context.WithValue(ctx, loggerKey{}, l)
}

// serviceContext is that of a service of the router of ctx.
func serviceContext(ctx context.Context, service string) context.Context {
	l := &zerologger{context: []byte(`{"entryPointName":"web","routerName":"app@file","serviceName":"over@file","serviceName":"` + service + `"`)}
	return context.WithValue(ctx, loggerKey{}, l)
}

// newHandler calls New and wants no error.
func newHandler(t *testing.T, ctx context.Context, next http.Handler, c Config) http.Handler {
	t.Helper()
	h, err := New(ctx, next, &c, "mcp@"+t.Name())
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// call posts a tools/call with id 7 and this much padding.
func call(h http.Handler, padding int) *httptest.ResponseRecorder {
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, newCall(padding))
	return rec
}

func newCall(padding int) *http.Request {
	return httptest.NewRequest(http.MethodPost, "/mcp", &repeated{head: `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"x":"`, n: padding, tail: `"}}`})
}

// repeated is a body of known length that is not a bytes.Reader.
type repeated struct {
	head string
	n    int
	tail string
}

func (r *repeated) Read(b []byte) (int, error) {
	n := 0
	for n < len(b) {
		switch {
		case r.head != "":
			k := copy(b[n:], r.head)
			r.head = r.head[k:]
			n += k
		case r.n > 0:
			b[n] = 'x'
			r.n--
			n++
		case r.tail != "":
			k := copy(b[n:], r.tail)
			r.tail = r.tail[k:]
			n += k
		default:
			return n, io.EOF
		}
	}
	return n, nil
}

// state is how often a server was probed, and its state.
func state(url string) (uint64, string) {
	for _, s := range servers() {
		if snap := s.checker.Snapshot(); strings.HasPrefix(snap.URL, url) {
			return snap.Probes, string(snap.State)
		}
	}
	return 0, ""
}

func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for start := time.Now(); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Since(start) > 5*time.Second {
			t.Fatalf("%s: not within 5 s", what)
		}
	}
}

func TestMain(m *testing.M) {
	linger = 20 * time.Millisecond
	leak.Main(m)
}
