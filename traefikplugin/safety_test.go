package traefikplugin

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// counting answers probes as answer does, and calls with the sum of their body.
type counting struct{ calls atomic.Int32 }

func (c *counting) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if !bytes.Contains(body[:atMost(len(body), 200)], []byte("tools/call")) {
		req.Body = io.NopCloser(bytes.NewReader(body))
		answer(rw, req)
		return
	}
	if err == nil {
		c.calls.Add(1)
	}
	fmt.Fprintf(rw, "%x of %d", sha256.Sum256(body), len(body))
}

func atMost(a, b int) int {
	if a < b {
		return a
	}
	return b
}

// A body of unknown length goes to configured upstreams as it came, also where it is
// too large to keep.
func TestDirectBodies(t *testing.T) {
	c := &counting{}
	srv := httptest.NewServer(c)
	defer srv.Close()
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Upstreams: []string{srv.URL + "/mcp"}})
	edge := httptest.NewServer(h)
	defer edge.Close()
	frame, _ := io.ReadAll(newCall(0).Body)
	for _, size := range []int{len(frame), maxHeldBody - 1, maxHeldBody, maxHeldBody + 1, 3 << 20} {
		sent, _ := io.ReadAll(newCall(size - len(frame)).Body)
		want := fmt.Sprintf("%x of %d", sha256.Sum256(sent), size)
		for _, length := range []int64{-1, int64(size)} {
			req, _ := http.NewRequest(http.MethodPost, edge.URL+"/mcp", io.NopCloser(bytes.NewReader(sent)))
			req.ContentLength = length
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			got, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 200 || string(got) != want {
				t.Errorf("%d bytes, Content-Length %d: %d %.120s, want %s", size, length, resp.StatusCode, got, want)
			}
		}
	}
	k := groupNamed(t, "app")
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.bytes != 0 {
		t.Errorf("%d bytes are still accounted", k.bytes)
	}
}

func groupNamed(t *testing.T, router string) *group {
	t.Helper()
	g := join("mcp@" + t.Name() + " on router " + router)
	t.Cleanup(func() { g.leave() })
	return g
}

// What a client has not sent in full is not forwarded.
func TestDirectClientAborts(t *testing.T) {
	c := &counting{}
	srv := httptest.NewServer(c)
	defer srv.Close()
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Upstreams: []string{srv.URL + "/mcp"}})
	rec := httptest.NewRecorder()
	req := httptest.NewRequest("POST", "/mcp", io.MultiReader(strings.NewReader(`{"jsonrpc":"2.0","id":7,"method":"tools/call"`), broken{}))
	h.ServeHTTP(rec, req)
	if n := c.calls.Load(); n != 0 || rec.Code != 503 {
		t.Errorf("%d, %d calls, want none", rec.Code, n)
	}
}

type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("gone") }

// A failed TLS handshake has executed nothing, as a refused dial has not.
func TestDirectHandshakeFails(t *testing.T) {
	c := &counting{}
	srv := httptest.NewTLSServer(c) // its certificate is nobody's
	defer srv.Close()
	srv.Config.ErrorLog = nil
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "500ms", Upstreams: []string{srv.URL + "/mcp"}})
	await(t, "up", func() bool { _, s := state(srv.URL); return s == "up" })
	for _, padding := range []int{0, 2 << 20} {
		req := newCall(padding)
		req.ContentLength = int64(len(`{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"x":"`+`"}}`) + padding)
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, req)
		if rec.Code != 503 || c.calls.Load() != 0 || rec.Header().Get("X-Mcp-Health") == "" {
			t.Errorf("%d bytes more: %d %s, want 503", padding, rec.Code, rec.Body)
		}
	}
}

// A fallback with upstreams forwards to one path, and says so.
func TestFallbackRefusesWildcards(t *testing.T) {
	ctx, _ := onRouter(t, "app@file")
	c := Config{Mode: modeFallback, Paths: []string{"/mcp", "/tools/*"}, Upstreams: []string{"http://127.0.0.1:1/mcp"}}
	if _, err := New(ctx, http.NotFoundHandler(), &c, "mcp"); !errors.Is(err, errConfig) || !strings.Contains(err.Error(), "/tools/*") {
		t.Errorf("error %v, want one that names the path", err)
	}
	c.Mode = modeGate
	if _, err := New(ctx, http.NotFoundHandler(), &c, "mcp"); err != nil {
		t.Errorf("a gate does not forward: %v", err)
	}
}

// While the service's router is there, what comes to the fallback is what that did
// not match: it goes nowhere.
func TestFallbackWhileRouteIsThere(t *testing.T) {
	a := startMCP(t)
	up := balancerOf(fakeServer{URL: a.URL})
	route, endRoute := onRouter(t, "app@docker")
	newHandler(t, route, up, Config{})
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "100ms"})
	await(t, "up", func() bool { return !up.up(childName) })
	if rec := call(h, 0); rec.Code != 404 {
		t.Errorf("the route is there: %d %s, want 404", rec.Code, rec.Body)
	}
	a.stop()
	await(t, "down", func() bool { return up.up(childName) })
	if rec := call(h, 0); rec.Code != 404 {
		t.Errorf("the route is there, its server is not: %d %s, want 404", rec.Code, rec.Body)
	}
	endRoute()
	if rec := call(h, 0); rec.Code != 503 {
		t.Errorf("the route is gone: %d %s, want 503", rec.Code, rec.Body)
	}
}

// A fallback whose configuration has ended gets requests for which the new one's
// routers have not been asked: what it had itself counts.
func TestEndedFallback(t *testing.T) {
	a := startMCP(t)
	for _, had := range []bool{false, true} {
		t.Run(fmt.Sprintf("it had the route: %v", had), func(t *testing.T) {
			old, end := onRouter(t, "app@file")
			h := newHandler(t, old, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "3s"})
			if had { // the contexts of one configuration end together
				newHandler(t, routerContext(old, "app@docker"), balancerOf(fakeServer{URL: a.URL}), Config{})
			}
			end()
			b := balancerOf(fakeServer{URL: a.URL})
			ctx, _ := onRouter(t, "app@docker")
			newHandler(t, ctx, b, Config{})
			want := map[bool]int{false: 200, true: 404}[had]
			if rec := call(h, 0); rec.Code != want {
				t.Errorf("%d %s, want %d", rec.Code, rec.Body, want)
			}
		})
	}
}

// Where a fallback's name fits two routers, what it holds goes to neither.
func TestFallbackOfTwoRouters(t *testing.T) {
	a := startMCP(t)
	ctx, _ := onRouter(t, "app-fallback@docker")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "3s"})
	x := balancerOf(fakeServer{URL: a.URL})
	rec := httptest.NewRecorder()
	done := make(chan bool)
	go func() { h.ServeHTTP(rec, newCall(0)); close(done) }()
	await(t, "held", func() bool { return groupNamed(t, "app").held() == 1 })
	groupNamed(t, "app").add(&member{router: "app@file", handler: func() http.Handler { return nil }})
	one, _ := onRouter(t, "app@docker")
	newHandler(t, one, x, Config{})
	<-done
	if rec.Code != 503 || !strings.Contains(rec.Body.String(), `"id":7`) {
		t.Errorf("%d %s, want 503", rec.Code, rec.Body)
	}
}

// What a balancer holds goes on to the next configuration's balancer of the same
// router, and to no other router's, however alike their names are.
func TestBalancerHandsOverToItsRouter(t *testing.T) {
	a := startMCP(t)
	for _, tt := range []struct {
		name, router string
		want         int
	}{{"the same", "app@docker", 200}, {"another provider's", "app@file", 503}, {"a real router named fallback", "app-fallback@docker", 503}} {
		t.Run(tt.name, func(t *testing.T) {
			down := balancerOf(fakeServer{URL: "http://127.0.0.1:1"})
			ctx, _ := onRouter(t, "app@docker")
			newHandler(t, ctx, down, Config{Hold: "600ms"})
			rec := httptest.NewRecorder()
			done := make(chan bool)
			go func() { down.ServeHTTP(rec, newCall(0)); close(done) }()
			await(t, "held", func() bool { return groupNamed(t, "app").held() == 1 })
			other, _ := onRouter(t, tt.router)
			newHandler(t, other, balancerOf(fakeServer{URL: a.URL}), Config{})
			<-done
			if rec.Code != tt.want {
				t.Errorf("%d %s, want %d", rec.Code, rec.Body, tt.want)
			}
		})
	}
}

// Two routers on one balancer: what it holds may be of either, and so the next
// balancer must have both.
func TestSharedBalancerHandsOver(t *testing.T) {
	a := startMCP(t)
	down := balancerOf(fakeServer{URL: "http://127.0.0.1:1"})
	up := balancerOf(fakeServer{URL: a.URL})
	for _, router := range []string{"app@docker", "app-tls@docker"} {
		ctx, _ := onRouter(t, router)
		newHandler(t, ctx, down, Config{Hold: "3s"})
	}
	rec := httptest.NewRecorder()
	done := make(chan bool)
	go func() { down.ServeHTTP(rec, newCall(0)); close(done) }()
	await(t, "held", func() bool { return groupNamed(t, "app").held() == 1 })
	ctx, _ := onRouter(t, "app@docker")
	newHandler(t, ctx, up, Config{})
	await(t, "up", func() bool { return !up.up(childName) })
	time.Sleep(200 * time.Millisecond)
	if n := groupNamed(t, "app").held(); n != 1 {
		t.Errorf("%d held after one of the routers is back, want it to wait", n)
	}
	ctx2, _ := onRouter(t, "app-tls@docker")
	newHandler(t, ctx2, up, Config{})
	<-done
	if rec.Code != 200 {
		t.Errorf("both are back: %d %s, want 200", rec.Code, rec.Body)
	}
}

// Upstreams that are configured are there for good, also after a quiet time.
func TestUpstreamsAreNeverAbsent(t *testing.T) {
	a := startMCP(t)
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "0", AbsentAfter: "100ms", Upstreams: []string{a.URL + "/mcp"}})
	await(t, "up", func() bool { _, s := state(a.URL); return s == "up" })
	a.stop()
	await(t, "down", func() bool { _, s := state(a.URL); return s == "down" })
	time.Sleep(200 * time.Millisecond)
	if rec := call(h, 0); rec.Code != 503 {
		t.Errorf("%d, want 503", rec.Code)
	}
}

// A place is taken before the body is read, with 1 MiB where its length is unknown,
// and is free again at the end of the hold, whatever the client does.
func TestPlaceBeforeBody(t *testing.T) {
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "400ms", HoldMax: "1"})
	r, w := io.Pipe()
	slow := httptest.NewRecorder()
	done := make(chan bool)
	go func() {
		h.ServeHTTP(slow, httptest.NewRequest("POST", "/mcp", r))
		close(done)
	}()
	g := groupNamed(t, "app")
	await(t, "a place", func() bool { return g.held() == 1 })
	g.mu.Lock()
	if g.bytes != maxHeldBody {
		t.Errorf("%d bytes accounted, want 1 MiB", g.bytes)
	}
	g.mu.Unlock()
	start := time.Now()
	if rec := call(h, 0); rec.Code != 503 || time.Since(start) > 300*time.Millisecond {
		t.Errorf("%d after %s, want 503 at once: the place is taken", rec.Code, time.Since(start))
	}
	time.Sleep(450 * time.Millisecond)
	if n := g.held(); n != 0 || g.bytes != 0 {
		t.Errorf("%d held, %d bytes after the hold: no byte has come", n, g.bytes)
	}
	_, _ = w.Write([]byte(`{"id":7,`))
	<-done
	if slow.Code != 503 {
		t.Errorf("the slow one: %d, want 503", slow.Code)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.bytes != 0 || len(g.late) != 0 {
		t.Errorf("%d bytes, %d late at the end", g.bytes, len(g.late))
	}
}

// What has come of a body stays accounted for as long as its client stalls.
func TestStalledBytes(t *testing.T) {
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "300ms"})
	r, w := io.Pipe()
	done := make(chan bool)
	go func() {
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "/mcp", r))
		close(done)
	}()
	g := groupNamed(t, "app")
	_, _ = w.Write(make([]byte, 5000))
	bytes := func() int { g.mu.Lock(); defer g.mu.Unlock(); return g.bytes }
	await(t, "the end of the hold", func() bool { return g.held() == 0 && bytes() < maxHeldBody })
	if n := bytes(); n != 5000 {
		t.Errorf("%d bytes accounted, want the 5000 that came", n)
	}
	_ = w.Close()
	<-done
	if n := bytes(); n != 0 {
		t.Errorf("%d bytes at the end", n)
	}
}

// A call is read while it is held, also behind Traefik's retry, so that a client
// that leaves is noticed, and its call never executed.
func TestClientLeavesItsConnection(t *testing.T) {
	c := &counting{}
	srv := httptest.NewServer(c)
	defer srv.Close()
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "5s"})
	edge := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		req.Body = io.NopCloser(req.Body) // as retry does
		h.ServeHTTP(struct{ http.ResponseWriter }{rw}, req.Clone(req.Context()))
	}))
	defer edge.Close()
	left, leave := context.WithCancel(t.Context())
	done := make(chan bool)
	go func() {
		req, _ := http.NewRequestWithContext(left, "POST", edge.URL+"/mcp", newCall(0).Body)
		if resp, err := http.DefaultClient.Do(req); err == nil {
			resp.Body.Close()
		}
		close(done)
	}()
	g := groupNamed(t, "app")
	await(t, "held", func() bool { return g.held() == 1 })
	leave()
	<-done
	await(t, "noticed", func() bool { return g.held() == 0 })
	if c.calls.Load() != 0 {
		t.Error("executed")
	}
}

// A retry sends again what another attempt has read: nothing. That is not a call.
func TestEmptyReplay(t *testing.T) {
	a := startMCP(t)
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Upstreams: []string{a.URL + "/mcp"}})
	await(t, "up", func() bool { _, s := state(a.URL); return s == "up" })
	for _, length := range []int64{-1, 100} {
		req := httptest.NewRequest("POST", "/mcp", io.NopCloser(strings.NewReader("")))
		req.ContentLength = length
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, req)
		if rec.Code != 503 {
			t.Errorf("Content-Length %d: %d %s, want 503", length, rec.Code, rec.Body)
		}
	}
}

// A probe that began before a refused dial does not undo it.
func TestOlderProbe(t *testing.T) {
	s := &server{}
	now := time.Now()
	s.left(now)
	s.answered(now.Add(-time.Millisecond))
	if !s.gone.Load() {
		t.Error("an older probe brought it back")
	}
	s.answered(now.Add(time.Millisecond))
	if s.gone.Load() {
		t.Error("a later probe did not")
	}
}

// Requests for other paths are answered by our child as Traefik's balancer would.
func TestChildOnOtherPaths(t *testing.T) {
	b := balancerOf(fakeServer{URL: "http://127.0.0.1:1"})
	ctx, _ := onRouter(t, "app@docker")
	newHandler(t, ctx, b, Config{Hold: "2s"})
	for _, path := range []string{"/", "/health", "/.well-known/oauth-protected-resource", "/mcp/.well-known/openid-configuration"} {
		rec := httptest.NewRecorder()
		start := time.Now()
		b.ServeHTTP(rec, httptest.NewRequest("GET", path, nil))
		if rec.Code != 503 || rec.Body.String() != "no available server\n" || time.Since(start) > time.Second {
			t.Errorf("%s: %d %q after %s, want Traefik's 503 at once", path, rec.Code, rec.Body, time.Since(start))
		}
	}
}

// Mode health in front of noop@internal, which says 418, is a fallback.
func TestHealthOnNoop(t *testing.T) {
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.HandlerFunc(fakeInternalHandlers), Config{Mode: modeHealth, Hold: "0"})
	if rec := call(h, 0); rec.Code != 503 {
		t.Errorf("%d, want 503", rec.Code)
	}
}

func fakeInternalHandlers(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusTeapot) }
