package traefikplugin

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// stickyBalancer is a fakeBalancer with a sticky cookie: the same field names as
// Traefik's, and the same manners.
type stickyBalancer struct {
	fakeBalancer
	handlers []*fakeHandler
	sticky   *fakeSticky
	turn     atomic.Int32
	before   func() // each request, if set
}

type fakeSticky struct{ cookie *fakeCookie }
type fakeCookie struct{ name string }

func (b *stickyBalancer) AddServer(name string, h http.Handler, s fakeServer) {
	b.fakeBalancer.AddServer(name, h, s)
	b.handlers = b.fakeBalancer.handlers
}

func (b *stickyBalancer) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	if b.before != nil {
		b.before()
	}
	if c, err := req.Cookie(b.sticky.cookie.name); err == nil {
		for _, h := range b.handlers {
			if cookieOf(h.name) == c.Value && b.up(h.name) {
				h.ServeHTTP(rw, req)
				return
			}
		}
	}
	for range b.handlers {
		h := b.handlers[int(b.turn.Add(1))%len(b.handlers)]
		if b.up(h.name) {
			http.SetCookie(rw, &http.Cookie{Name: b.sticky.cookie.name, Value: cookieOf(h.name), Path: "/"})
			h.ServeHTTP(rw, req)
			return
		}
	}
	http.Error(rw, "no available server", http.StatusServiceUnavailable)
}

// stickyOf is a balancer of stateful servers: each says what it got, and knows the
// sessions that begin with its URL.
func stickyOf(servers ...*mcpServer) *stickyBalancer {
	b := &stickyBalancer{sticky: &fakeSticky{cookie: &fakeCookie{name: "stick"}}}
	b.status, b.fenced = map[string]struct{}{}, map[string]struct{}{}
	for _, s := range servers {
		name := s.URL
		b.AddServer(name, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			id := req.Header.Get(sessionField)
			body, _ := io.ReadAll(req.Body)
			switch {
			case strings.Contains(string(body), "open"):
				rw.Header().Set(sessionField, name+"/1")
			case req.Header.Get("X-Echo") != "":
				rw.Header().Set(sessionField, id)
			}
			if own := req.Header.Get("X-Cookie"); own != "" {
				rw.Header().Add("Set-Cookie", own)
			}
			status := http.StatusOK
			if id != "" && !strings.HasPrefix(id, name) {
				status = http.StatusNotFound
			}
			rw.WriteHeader(status)
			fmt.Fprintf(rw, "%s got %s, %d bytes, cookies %q", name, id, len(body), req.Header["Cookie"])
		}), fakeServer{URL: name})
	}
	return b
}

// ask posts, with header fields in pairs.
func ask(h http.Handler, body string, header ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(http.MethodPost, "/mcp", strings.NewReader(body))
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, req)
	return rec
}

func openSession(t *testing.T, h http.Handler) (id, owner string) {
	t.Helper()
	rec := ask(h, "open")
	id = rec.Header().Get(sessionField)
	owner, _, _ = strings.Cut(rec.Body.String(), " ")
	if !strings.HasPrefix(id, owner+"/1.") || len(id) != len(owner)+2+24 || rec.Header().Get("Set-Cookie") != "" {
		t.Fatalf("opened %q on %s, Set-Cookie %q", id, owner, rec.Header().Get("Set-Cookie"))
	}
	return id, owner
}

func awaitState(t *testing.T, want string, servers ...*mcpServer) {
	t.Helper()
	for _, s := range servers {
		await(t, s.URL+" "+want, func() bool { _, is := state(s.URL); return is == want })
	}
}

func TestStickySessions(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	next := stickyOf(a, b)
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, next, Config{Sticky: true})
	awaitState(t, "up", a, b)
	owners := map[string]bool{}
	for range 10 {
		id, owner := openSession(t, h)
		owners[owner] = true
		for _, more := range [][]string{nil, {"Cookie", "x=y; stick=" + cookieOf(a.URL) + "; z=1"}, {"Cookie", "stick=" + cookieOf(b.URL)},
			{"Cookie", "stick; stick =" + cookieOf(a.URL) + "; stick\t=" + cookieOf(b.URL)}} { // as net/http reads them
			rec := ask(h, "call", append([]string{sessionField, id, versionField, "2025-11-25"}, more...)...)
			if rec.Code != 200 || !strings.HasPrefix(rec.Body.String(), owner+" got "+owner+"/1,") {
				t.Errorf("call in %s: %d %s", id, rec.Code, rec.Body)
			}
		}
		if rec := ask(h, "call", sessionField, id, "X-Echo", "1"); rec.Header().Get(sessionField) != id {
			t.Errorf("a repeated id: %q, want the client's %q", rec.Header().Get(sessionField), id)
		}
		rec := ask(h, "call", sessionField, id, "X-Echo", "1", "X-Cookie", "own=1")
		if got := rec.Header().Get(sessionField); got != id || rec.Header().Get("Set-Cookie") != "own=1" {
			t.Errorf("a repeated id beside the server's own cookie: %q and %q, want the client's %q", got, rec.Header().Get("Set-Cookie"), id)
		}
		req := httptest.NewRequest(http.MethodPost, "/mcp", strings.NewReader("call"))
		req.Header.Set(sessionField, id)
		h.ServeHTTP(httptest.NewRecorder(), req)
		if len(req.Header) != 1 || req.Header.Get(sessionField) != id {
			t.Errorf("after a call its header is %v, want it as it came", req.Header)
		}
	}
	if len(owners) != 2 {
		t.Errorf("owners %v, want both", owners)
	}
	if rec := ask(h, "call"); rec.Code != 200 || rec.Header().Get("Set-Cookie") != "" {
		t.Errorf("a call of no session: %d, Set-Cookie %q, want none: it would bind the client", rec.Code, rec.Header().Get("Set-Cookie"))
	}
	id, owner := openSession(t, h)
	other := map[string]string{a.URL: b.URL, b.URL: a.URL}[owner]
	tests := []struct {
		name   string
		header []string
		want   string // in the answer
	}{
		{"other cookies stay", []string{sessionField, id, "Cookie", "x=y; stick=1", "Cookie", "z=1"}, `cookies ["x=y; z=1; stick=` + cookieOf(owner) + `"]`},
		{"a forged id goes as it came", []string{sessionField, "x" + id}, "got x" + id + ","},
		{"a server's own id too, with its cookie", []string{sessionField, other + "/9", "Cookie", "stick=" + cookieOf(other)}, other + " got " + other + "/9,"},
		{"a modern request is never pinned", []string{sessionField, id, versionField, "2026-07-28", "Cookie", "stick=1"}, "got " + id + ", 4 bytes, cookies []"},
		{"two ids are none", []string{sessionField, id, sessionField, id}, "got " + id},
	}
	for _, tt := range tests {
		if rec := ask(h, "call", tt.header...); !strings.Contains(rec.Body.String(), tt.want) {
			t.Errorf("%s: %d %s, want %s", tt.name, rec.Code, rec.Body, tt.want)
		}
	}
}

// While the owner is away its sessions wait, then get 503 with its reason; after the
// grace they are lost, if somebody else is up. Back again, it answers itself.
func TestStickyOwnerIsAway(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	ctx, _ := onRouter(t, "app@file")
	next := stickyOf(a, b)
	h := newHandler(t, ctx, next, Config{Sticky: true, Hold: "300ms", SessionGrace: "1h"})
	awaitState(t, "up", a, b)
	id, owner := openSession(t, h)
	for owner != a.URL {
		id, owner = openSession(t, h)
	}
	if rec := ask(h, "call", sessionField, id); rec.Code != 200 {
		t.Fatalf("before it: %d", rec.Code)
	}
	a.stop()
	awaitState(t, "down", a)
	start := time.Now()
	rec := ask(h, `{"jsonrpc":"2.0","id":9,"method":"x"}`, sessionField, id)
	if rec.Code != 503 || rec.Header().Get("X-Mcp-Health") != "refused" || !strings.Contains(rec.Body.String(), `"id":9`) || time.Since(start) < 250*time.Millisecond {
		t.Errorf("within the grace: %d %s after %s", rec.Code, rec.Body, time.Since(start))
	}
	h = newHandler(t, ctx, next, Config{Sticky: true, Hold: "10s", SessionGrace: "0"})
	rec = ask(h, `{"jsonrpc":"2.0","id":9,"method":"x"}`, sessionField, id)
	if rec.Code != 404 || !strings.Contains(rec.Body.String(), `"sessionLost":true`) || !strings.Contains(rec.Body.String(), `"id":9`) {
		t.Errorf("after it: %d %s", rec.Code, rec.Body)
	}
	if _, owner := openSession(t, h); owner != b.URL {
		t.Errorf("a new session on %s", owner)
	}
	done := make(chan *httptest.ResponseRecorder)
	b.stop()
	awaitState(t, "down", b)
	go func() { done <- ask(h, "call", sessionField, id) }() // nobody else could open one: it waits
	time.Sleep(50 * time.Millisecond)
	a.start()
	if rec := <-done; rec.Code != 200 || !strings.HasPrefix(rec.Body.String(), a.URL+" got "+a.URL+"/1, 4 bytes") {
		t.Errorf("its owner is back: %d %s", rec.Code, rec.Body)
	}
}

// The owner left the service while another router's still has it: that is no owner here,
// and the other router's requests do not put off the end of its sessions.
func TestStickyOwnerLeaves(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	config := Config{Sticky: true, Hold: "0", SessionGrace: "200ms"}
	old, end := onRouter(t, "app@file")
	h := newHandler(t, old, stickyOf(a, b), config)
	other, _ := onRouter(t, "other@file")
	elsewhere := newHandler(t, other, stickyOf(a), config)
	awaitState(t, "up", a, b)
	id, owner := openSession(t, h)
	for owner != a.URL {
		id, owner = openSession(t, h)
	}
	end()
	ctx, _ := onRouter(t, "app@file")
	h = newHandler(t, ctx, stickyOf(b), config)
	awaitState(t, "up", b)
	if rec := ask(h, "call", sessionField, id); rec.Code != 503 {
		t.Errorf("at first: %d %s, want 503", rec.Code, rec.Body)
	}
	for range 6 {
		if rec := ask(elsewhere, "call", sessionField, id); rec.Code != 200 {
			t.Fatalf("at the other router: %d", rec.Code)
		}
		time.Sleep(50 * time.Millisecond)
	}
	if rec := ask(h, "call", sessionField, id); rec.Code != 404 || !strings.Contains(rec.Body.String(), "sessionLost") {
		t.Errorf("after the grace: %d %s, want 404", rec.Code, rec.Body)
	}
}

// What a fallback holds finds its session's owner in the next configuration.
func TestStickyHandOver(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	old, end := onRouter(t, "app@file")
	h := newHandler(t, old, stickyOf(a, b), Config{Sticky: true})
	awaitState(t, "up", a, b)
	var ids, owners []string
	for range 4 {
		id, owner := openSession(t, h)
		ids, owners = append(ids, id), append(owners, owner)
	}
	ctx, _ := onRouter(t, "app-fallback@file")
	fallback := newHandler(t, ctx, http.HandlerFunc(fakeInternalHandlers), Config{Sticky: true})
	end()
	done := make(chan string)
	for i, id := range ids {
		go func() {
			rec := ask(fallback, "call", sessionField, id)
			done <- fmt.Sprint(rec.Code, strings.HasPrefix(rec.Body.String(), owners[i]+" got "+owners[i]+"/1, 4 bytes"))
		}()
	}
	time.Sleep(100 * time.Millisecond)
	ctx2, _ := onRouter(t, "app@file")
	newHandler(t, ctx2, stickyOf(b, a), Config{Sticky: true})
	for range ids {
		if got := <-done; got != "200true" && got != "200 true" {
			t.Errorf("%s, want an answer of the owner", got)
		}
	}
	if rec := ask(fallback, "open"); rec.Code != 404 { // the route is there again
		t.Errorf("%d %s", rec.Code, rec.Body)
	}
}

// Where sticky cannot be, New says so.
func TestStickyRefused(t *testing.T) {
	a := startMCP(t)
	tests := []struct {
		name string
		next http.Handler
		c    Config
		want string
	}{
		{"no cookie", balancerOf(fakeServer{URL: a.URL}), Config{}, "the service has no sticky cookie"},
		{"no balancer", http.NotFoundHandler(), Config{Upstreams: []string{a.URL + "/mcp"}}, "not Traefik's load balancer"},
		{"a gate", http.NotFoundHandler(), Config{Mode: modeGate, Upstreams: []string{a.URL + "/mcp"}}, "not Traefik's load balancer"},
		{"a fallback that forwards", http.NotFoundHandler(), Config{Mode: modeFallback, Upstreams: []string{a.URL + "/mcp"}}, "no upstreams"},
		{"a short key", stickyOf(a), Config{SessionKey: "short"}, "sessionKey has 5 bytes"},
		{"a bad grace", stickyOf(a), Config{SessionGrace: "soon"}, "sessionGrace"},
	}
	for _, tt := range tests {
		ctx, _ := onRouter(t, "app@file")
		tt.c.Sticky = true
		if _, err := New(ctx, tt.next, &tt.c, "mcp@file"); err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "short,") {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
	}
	ctx, _ := onRouter(t, "app@file")
	if _, err := New(ctx, http.HandlerFunc(fakeInternalHandlers), &Config{Sticky: true}, "mcp@file"); err != nil {
		t.Errorf("a fallback: %v", err)
	}
}

// A stream of a session goes on event by event, and its headers at once.
func TestStickyStreams(t *testing.T) {
	a := startMCP(t)
	next := stickyOf()
	more := make(chan bool)
	next.AddServer(a.URL, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		rw.Header().Set("Content-Type", "text/event-stream")
		rw.WriteHeader(http.StatusEarlyHints)
		rw.WriteHeader(http.StatusOK)
		for range more {
			_, _ = io.WriteString(rw, "data: x\n\n")
		}
	}), fakeServer{URL: a.URL})
	ctx, _ := onRouter(t, "app@file")
	edge := httptest.NewServer(newHandler(t, ctx, next, Config{Sticky: true}))
	defer edge.Close()
	awaitState(t, "up", a)
	c, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	req, _ := http.NewRequestWithContext(c, http.MethodPost, edge.URL+"/mcp", strings.NewReader("call"))
	resp, err := http.DefaultClient.Do(req) // the headers come though nothing has been sent
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for range 3 {
		more <- true
		b := make([]byte, 9)
		if _, err := io.ReadFull(resp.Body, b); err != nil || string(b) != "data: x\n\n" {
			t.Fatalf("%q %v", b, err)
		}
	}
	close(more)
}

// An owner that goes down as its session's request is on the short way to it is waited for.
func TestStickyOwnerGoesMeanwhile(t *testing.T) {
	a := startMCP(t)
	next := stickyOf(a)
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, next, Config{Sticky: true})
	awaitState(t, "up", a)
	id, _ := openSession(t, h)
	call := []string{sessionField, id, versionField, "2025-11-25", "X-Echo", "1"}
	for range 2 { // the second goes the short way
		if rec := ask(h, "call", call...); rec.Code != 200 || rec.Header().Get(sessionField) != id {
			t.Fatalf("%d, session %q", rec.Code, rec.Header().Get(sessionField))
		}
	}
	var once sync.Once
	next.before = func() {
		once.Do(func() {
			a.stop()
			awaitState(t, "down", a)
			time.AfterFunc(50*time.Millisecond, a.start)
		})
	}
	if rec := ask(h, "call", call...); rec.Code != 200 || rec.Header().Get(sessionField) != id || !strings.Contains(rec.Body.String(), "got "+a.URL+"/1, 4 bytes") {
		t.Errorf("%d %s, session %q, want %q", rec.Code, rec.Body, rec.Header().Get(sessionField), id)
	}
}

// The short way is for calls of a session that is known, to the path on which it is:
// a websocket needs the ResponseWriter as it is, and what is no MCP nothing at all.
func TestStickyShortWayIsForItsCalls(t *testing.T) {
	a := startMCP(t)
	next := stickyOf()
	next.AddServer(a.URL, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		_, ours := rw.(*stamp)
		fmt.Fprintf(rw, "%v %s", ours, req.Header.Get(sessionField))
	}), fakeServer{URL: a.URL})
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, next, Config{Sticky: true})
	awaitState(t, "up", a)
	s := stickyBehind(next)
	id := s.names.key.Tag("1", s.names.owner[0])
	for range 2 { // the second goes the short way
		if rec := ask(h, "call", sessionField, id); rec.Body.String() != "true 1" {
			t.Fatalf("a call: %s", rec.Body)
		}
	}
	tests := []struct {
		name, method, path string
		header             []string
		want               string
	}{
		{"a websocket", http.MethodGet, "/mcp", []string{"Connection", "Upgrade", "Upgrade", "websocket"}, "false " + id},
		{"another path", http.MethodPost, "/other", nil, "false " + id},
		{"another MCP path", http.MethodPost, "/mcp/", nil, "true 1"},
		{"no version at all", http.MethodPost, "/mcp", []string{versionField, "draft"}, "true 1"},
		{"its stream", http.MethodGet, "/mcp", nil, "true 1"},
		{"its end", http.MethodDelete, "/mcp", nil, "true 1"},
	}
	for _, tt := range tests {
		req := httptest.NewRequest(tt.method, tt.path, nil)
		req.Header.Set(sessionField, id)
		for i := 0; i < len(tt.header); i += 2 {
			req.Header.Set(tt.header[i], tt.header[i+1])
		}
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, req)
		if rec.Body.String() != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, rec.Body, tt.want)
		}
	}
}

// stickyBehind is what brings sessions to the servers of that balancer.
func stickyBehind(next http.Handler) *sticky {
	routes.mu.Lock()
	defer routes.mu.Unlock()
	return routes.m[reflect.ValueOf(next).Pointer()].stuck[0]
}

// A client that opens a session anew, whose request was on the short way to the owner of
// its old one, gets the tag of who opened it, and not of that owner.
func TestStickyReopensFromTheShortWay(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	ctx, _ := onRouter(t, "app@file")
	next := stickyOf(a, b)
	h := newHandler(t, ctx, next, Config{Sticky: true, Interval: "1h"})
	awaitState(t, "up", a, b)
	s := stickyBehind(next)
	id := s.names.key.Tag(a.URL+"/0", s.names.owner[0])
	ask(h, "call", sessionField, id)
	found, ok := s.known.Load(id)
	if !ok {
		t.Fatal("the session is not known")
	}
	known := found.(*ticket)
	req := httptest.NewRequest(http.MethodPost, "/mcp", strings.NewReader("open"))
	req.Header[sessionField], req.Header["Cookie"] = known.sent, known.cookie
	pass := s.resume(req)
	s.route.stands.Store(&standing{up: []bool{false, true}, prefer: []int{1}})
	next.SetStatus(ctx, a.URL, false)
	rec := httptest.NewRecorder()
	s.reopen(&stamp{ResponseWriter: rec, t: known}, req, pass)
	got, owner, ok := s.names.key.Split(rec.Header().Get(sessionField))
	if !ok || got != b.URL+"/1" || owner != s.names.owner[1] || rec.Header().Get("Set-Cookie") != "" {
		t.Errorf("opened %q, owner %d, Set-Cookie %q; want one of %s", rec.Header().Get(sessionField), owner, rec.Header().Get("Set-Cookie"), b.URL)
	}
}

// Who is refused hears so at once, though it is still sending.
func TestStickyRefusesAtOnce(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	ctx, _ := onRouter(t, "app@file")
	next := stickyOf(a, b)
	for _, grace := range []string{"30s", "0"} {
		h := newHandler(t, ctx, next, Config{Sticky: true, Hold: "0", SessionGrace: grace})
		awaitState(t, "up", a, b)
		s := stickyBehind(next)
		id := s.names.key.Tag(a.URL+"/0", s.names.owner[0])
		a.stop()
		awaitState(t, "down", a)
		edge := httptest.NewServer(h)
		c, err := net.Dial("tcp", edge.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		fmt.Fprintf(c, "POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nMcp-Session-Id: %s\r\n\r\n%s", id, strings.Repeat(" ", 300<<10))
		_ = c.SetReadDeadline(start.Add(drainTime))
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil || resp.StatusCode != map[string]int{"30s": 503, "0": 404}[grace] {
			t.Errorf("grace %s: %v %v after %s", grace, resp, err, time.Since(start))
		}
		c.Close()
		edge.Close()
		a.start()
	}
}

// Only so many sessions are known, and all others are found all the same.
func TestStickyManySessions(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	ctx, _ := onRouter(t, "app@file")
	next := stickyOf(a, b)
	h := newHandler(t, ctx, next, Config{Sticky: true})
	awaitState(t, "up", a, b)
	s := stickyBehind(next)
	for i := range maxKnown + 10 {
		id := s.names.key.Tag(fmt.Sprint(a.URL, "/", i), s.names.owner[0])
		if rec := ask(h, "call", sessionField, id); rec.Code != 200 {
			t.Fatalf("session %d: %d %s", i, rec.Code, rec.Body)
		}
	}
	n := 0
	s.known.Range(func(any, any) bool { n++; return true })
	if n != maxKnown {
		t.Errorf("%d sessions known, want %d", n, maxKnown)
	}
}

// What an old configuration held is answered as the new one's servers are named: its
// session's id gets their tag, and their cookie is taken back.
func TestStickyOpensInTheNextConfiguration(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	old, end := onRouter(t, "app@file")
	h := newHandler(t, old, stickyOf(a), Config{Sticky: true})
	awaitState(t, "up", a)
	a.stop()
	awaitState(t, "down", a)
	done := make(chan *httptest.ResponseRecorder)
	go func() { done <- ask(h, "open") }()
	time.Sleep(100 * time.Millisecond)
	end()
	ctx, _ := onRouter(t, "app@file")
	h = newHandler(t, ctx, stickyOf(b), Config{Sticky: true})
	rec := <-done
	id := rec.Header().Get(sessionField)
	if !strings.HasPrefix(id, b.URL+"/1.") || rec.Header().Get("Set-Cookie") != "" {
		t.Errorf("opened %q with Set-Cookie %q, want a tag and no cookie", id, rec.Header().Get("Set-Cookie"))
	}
	if rec := ask(h, "call", sessionField, id); rec.Code != 200 {
		t.Errorf("a call in it: %d %s", rec.Code, rec.Body)
	}
}

// A client that opens a session anew with the id of the old one, whose owner is away,
// opens it elsewhere: at once where requests are held, else after the grace.
func TestStickyReopens(t *testing.T) {
	for _, hold := range []string{"5s", "0"} {
		t.Run(hold, func(t *testing.T) {
			a, b := startMCP(t), startMCP(t)
			ctx, _ := onRouter(t, "app@file")
			h := newHandler(t, ctx, stickyOf(a, b), Config{Sticky: true, Hold: hold, SessionGrace: "300ms"})
			awaitState(t, "up", a, b)
			id, owner := openSession(t, h)
			for owner != a.URL {
				id, owner = openSession(t, h)
			}
			a.stop()
			awaitState(t, "down", a)
			if hold == "0" {
				time.Sleep(300 * time.Millisecond)
			}
			anew := `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"x":"open` + strings.Repeat(" ", 100<<10) + `"}}`
			start := time.Now()
			rec := ask(h, anew, sessionField, id)
			if got := rec.Header().Get(sessionField); rec.Code != 200 || !strings.HasPrefix(got, b.URL+"/1.") || time.Since(start) > 2*time.Second {
				t.Errorf("%d %s, session %q after %s, want one of the other server at once", rec.Code, rec.Body, got, time.Since(start))
			}
			if want := fmt.Sprintf("%s got , %d bytes", b.URL, len(anew)); !strings.HasPrefix(rec.Body.String(), want) {
				t.Errorf("%s, want %s", rec.Body, want)
			}
		})
	}
}

// A server that ends (fenced) opens no session: with nobody else, none is lost.
func TestStickyOnlyFencedIsLeft(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	next := stickyOf(a, b)
	ctx, _ := onRouter(t, "app@kubernetes")
	next.fenced[b.URL] = struct{}{}
	h := newHandler(t, ctx, &fencedBalancer{stickyBalancer: next, handlers: next.handlers, fenced: next.fenced, sticky: next.sticky}, Config{Sticky: true, Hold: "0", SessionGrace: "0"})
	awaitState(t, "up", a, b)
	id, owner := openSession(t, h)
	for owner != a.URL {
		id, owner = openSession(t, h)
	}
	a.stop()
	awaitState(t, "down", a)
	if rec := ask(h, "call", sessionField, id); rec.Code != 503 {
		t.Errorf("%d %s, want 503", rec.Code, rec.Body)
	}
}

// fencedBalancer has all fields at its top, as Traefik's have.
type fencedBalancer struct {
	*stickyBalancer
	handlers []*fakeHandler
	fenced   map[string]struct{}
	sticky   *fakeSticky
}

// A session is known by its id and for one path: many paths of one take no room, and no id
// and path together are taken for another's.
func TestStickyKnowsOnePath(t *testing.T) {
	a := startMCP(t)
	next := stickyOf(a)
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, next, Config{Sticky: true, Paths: []string{"/mcp*"}})
	awaitState(t, "up", a)
	s := stickyBehind(next)
	id := s.names.key.Tag(a.URL+"/0", s.names.owner[0])
	call := func(path, id string) string {
		req := httptest.NewRequest(http.MethodPost, "/mcp", strings.NewReader("call"))
		req.URL.Path = path
		req.Header.Set(sessionField, id)
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, req)
		return rec.Body.String()
	}
	for i := range 100 {
		call(fmt.Sprintf("/mcp/%d", i), id)
	}
	if n := s.n.Load(); n != 1 {
		t.Errorf("%d of one session are known, want 1", n)
	}
	for _, tt := range []struct{ path, id string }{{"/mcp/", "0" + id}, {"/mcp/0" + id[:3], id[3:]}, {"", "/mcp/0" + id}, {"/else", id}} {
		if got := call(tt.path, tt.id); !strings.Contains(got, "got "+tt.id+",") {
			t.Errorf("path %q, id %q: %s, want the id as it came", tt.path, tt.id, got)
		}
	}
}

// What is known of a session is small, whatever paths and queries its clients choose.
func TestStickyKnowsNoLongPaths(t *testing.T) {
	a := startMCP(t)
	next := stickyOf(a)
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, next, Config{Sticky: true, Paths: []string{"/mcp*"}})
	awaitState(t, "up", a)
	s := stickyBehind(next)
	long := strings.Repeat("x", 1<<20-1<<12)
	size := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	for _, target := range []string{"/mcp/" + long, "/mcp?" + long} {
		before := size()
		for i := range 50 {
			req := httptest.NewRequest(http.MethodPost, target, strings.NewReader("call"))
			req.Header.Set(sessionField, s.names.key.Tag(fmt.Sprint(a.URL, target[:5], i), s.names.owner[0]))
			h.ServeHTTP(httptest.NewRecorder(), req)
		}
		if more := size() - before; more > 10<<20 {
			t.Errorf("50 sessions at %.8s…: %d MiB more, want none", target, more>>20)
		}
	}
	runtime.KeepAlive(h)
}

// A request on the short way whose owner goes, and that opens a session in the next
// configuration, gets no tag of who did not open it, and no cookie of Traefik's.
func TestStickyShortWayIntoTheNextConfiguration(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	old, end := onRouter(t, "app@file")
	next := stickyOf(a)
	h := newHandler(t, old, next, Config{Sticky: true})
	awaitState(t, "up", a)
	id, _ := openSession(t, h)
	ask(h, "call", sessionField, id)
	var once sync.Once
	next.before = func() {
		once.Do(func() {
			a.stop()
			awaitState(t, "down", a)
			time.AfterFunc(50*time.Millisecond, func() {
				end()
				ctx, _ := onRouter(t, "app@file")
				newHandler(t, ctx, stickyOf(a, b), Config{Sticky: true})
			})
		})
	}
	rec := ask(h, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"x":"open"}}`, sessionField, id)
	if got := rec.Header().Get(sessionField); rec.Code != 200 || got != b.URL+"/1" || rec.Header().Get("Set-Cookie") != "" {
		t.Errorf("%d opened %q, Set-Cookie %q, want the server's own id and no cookie", rec.Code, got, rec.Header().Get("Set-Cookie"))
	}
}
