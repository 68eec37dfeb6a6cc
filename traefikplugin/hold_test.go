package traefikplugin

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// Held while there is no route, a call goes on through the balancer of the route
// that comes: its body intact, on the client's own ResponseWriter.
func TestHandOver(t *testing.T) {
	for _, padding := range []int{0, 200 << 10, 900 << 10} {
		t.Run(fmt.Sprintf("%d bytes", padding), func(t *testing.T) {
			ctx, _ := onRouter(t, "app@file")
			fallback := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback})
			rec := httptest.NewRecorder()
			done := make(chan bool)
			go func() { fallback.ServeHTTP(rec, newCall(padding)); close(done) }()
			time.Sleep(50 * time.Millisecond)
			a := startMCP(t)
			b := balancerOf(fakeServer{URL: a.URL})
			ctx2, _ := onRouter(t, "app@docker")
			newHandler(t, ctx2, b, Config{})
			<-done
			whole, _ := io.ReadAll(newCall(padding).Body)
			if want := fmt.Sprintf("%s got %d bytes", a.URL, len(whole)); rec.Code != 200 || rec.Body.String() != want {
				t.Errorf("%d %q, want %q", rec.Code, rec.Body, want)
			}
		})
	}
}

// One middleware on two services: what one's fallback holds never goes to the other.
func TestHandOverKeepsServicesApart(t *testing.T) {
	a := startMCP(t)
	ctxB, _ := onRouter(t, "b@docker")
	newHandler(t, ctxB, balancerOf(fakeServer{URL: a.URL}), Config{})
	ctxA, _ := onRouter(t, "a-fallback@file")
	h := newHandler(t, ctxA, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "0.1"})
	if rec := call(h, 0); rec.Code != 503 {
		t.Errorf("%d %s, want 503: b's servers are not a's", rec.Code, rec.Body)
	}
}

// What a fallback holds goes on to no other entry point's router, but to upstreams of its
// own. Which entry point Traefik built the two for may change, with both, from one
// configuration to the next.
func TestHandOverKeepsEntryPointsApart(t *testing.T) {
	a := startMCP(t)
	tests := []struct {
		name                  string
		before, fallback, app string // entry points
		config                Config
		want                  int
	}{
		{"the same", "web", "web", "web", Config{}, 200},
		{"the same, built for another one", "web", "websecure", "websecure", Config{}, 200},
		{"another", "web", "web", "websecure", Config{}, 503},
		{"another, built for it before", "websecure", "web", "websecure", Config{}, 503},
		{"another, with upstreams", "web", "web", "websecure", Config{Upstreams: []string{a.URL + "/mcp"}}, 200},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.config.Mode = modeFallback
			one, end := context.WithCancel(t.Context())
			h := newHandler(t, doorContext(one, tt.before, "app@file"), http.NotFoundHandler(), tt.config)
			rec := httptest.NewRecorder()
			done := make(chan bool)
			start := time.Now()
			go func() { h.ServeHTTP(rec, newCall(0)); close(done) }()
			time.Sleep(50 * time.Millisecond)
			end()
			newHandler(t, doorContext(t.Context(), tt.fallback, "app@file"), http.NotFoundHandler(), tt.config)
			newHandler(t, doorContext(t.Context(), tt.app, "app@docker"), balancerOf(fakeServer{URL: a.URL}), Config{})
			<-done
			if rec.Code != tt.want || time.Since(start) > 5*time.Second {
				t.Errorf("%d %s after %s, want %d at once", rec.Code, rec.Body, time.Since(start), tt.want)
			}
		})
	}
}

// What a fallback holds goes on to no router that requests pass others before (parentRefs,
// where authentication may be), unless those are before the fallback, too.
func TestHandOverKeepsParentsApart(t *testing.T) {
	a := startMCP(t)
	tests := []struct {
		name          string
		fallback, app string // with the routers above them
		want          int
	}{
		{"the same", "top@file app-fallback@file", "top@file app@file", 200},
		{"one for the fallback", "top-fallback@file app@file", "top@docker app@docker", 200},
		{"none above the fallback", "app-fallback@file", "top@file app@file", 503},
		{"another", "a@file app-fallback@file", "b@file app@file", 503},
		{"one more", "top@file app-fallback@file", "top@file auth@file app@file", 503},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHandler(t, routerContext(t.Context(), tt.fallback), http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "5s"})
			rec := httptest.NewRecorder()
			done := make(chan bool)
			start := time.Now()
			go func() { h.ServeHTTP(rec, newCall(0)); close(done) }()
			time.Sleep(50 * time.Millisecond)
			newHandler(t, routerContext(t.Context(), tt.app), balancerOf(fakeServer{URL: a.URL}), Config{})
			<-done
			if rec.Code != tt.want || time.Since(start) > 4*time.Second {
				t.Errorf("%d %s after %s, want %d at once", rec.Code, rec.Body, time.Since(start), tt.want)
			}
		})
	}
}

// A gate on the service's router takes what its fallback held, before the fallback's own
// way to the upstreams does, past what comes after the gate.
func TestGateTakesWhatItsFallbackHeld(t *testing.T) {
	a := startMCP(t)
	a.stop()
	config := Config{Upstreams: []string{a.URL + "/mcp"}, Hold: "5s"}
	config.Mode = modeFallback
	h := newHandler(t, routerContext(t.Context(), "app-fallback@file"), http.NotFoundHandler(), config)
	rec := httptest.NewRecorder()
	done := make(chan bool)
	go func() { h.ServeHTTP(rec, newCall(0)); close(done) }()
	time.Sleep(50 * time.Millisecond)
	config.Mode = modeGate
	newHandler(t, routerContext(t.Context(), "app@file"), http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(299) }), config)
	a.start()
	if <-done; rec.Code != 299 {
		t.Errorf("%d %s, want 299 of what comes after the gate", rec.Code, rec.Body)
	}
}

// What a fallback holds goes on through a gate at its entry point, and to no other's.
func TestHandOverToAGate(t *testing.T) {
	for door, want := range map[string]string{"web": "next", "websecure": "direct"} {
		t.Run(door, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
				answer(rw, req)
				fmt.Fprint(rw, "direct")
			}))
			defer srv.Close()
			c := Config{Mode: modeFallback, Upstreams: []string{srv.URL + "/mcp"}}
			newHandler(t, routerContext(t.Context(), "app@file"), http.NotFoundHandler(), c)
			c.Mode = modeGate
			next := http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) { fmt.Fprint(rw, "next") })
			newHandler(t, doorContext(t.Context(), door, "app@docker"), next, c)
			g := join("mcp@" + t.Name() + " on router app")
			defer g.leave()
			k := &keeper{set: &settings{hold: time.Second}, group: g, router: "app@file", door: "web", ctx: t.Context()}
			await(t, "the gate is open", func() bool { return g.pick(func(m *member) bool { return !m.direct }) != nil })
			rec := httptest.NewRecorder()
			k.serve(rec, newCall(0), func() http.Handler { return k.successor() })
			if !strings.HasSuffix(rec.Body.String(), want) {
				t.Errorf("%d %s, want it to be %s", rec.Code, rec.Body, want)
			}
		})
	}
}

func TestHoldLimits(t *testing.T) {
	tests := []struct {
		name    string
		config  Config
		waiting int // calls that wait already
		padding int
		atOnce  bool
	}{
		{"hold off", Config{Hold: "0"}, 0, 0, true},
		{"held until the end", Config{Hold: "800ms"}, 0, 0, false},
		{"too many wait", Config{Hold: "800ms", HoldMax: "2"}, 2, 0, true},
		{"one place left", Config{Hold: "800ms", HoldMax: "3"}, 2, 0, false},
		{"body over 1 MiB", Config{Hold: "800ms"}, 0, 1 << 20, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.config.Mode = modeFallback
			ctx, _ := onRouter(t, "app@file")
			h := newHandler(t, ctx, http.NotFoundHandler(), tt.config)
			var wg sync.WaitGroup
			for range tt.waiting {
				wg.Go(func() { call(h, 0) })
			}
			time.Sleep(50 * time.Millisecond)
			start := time.Now()
			rec := call(h, tt.padding)
			took := time.Since(start)
			wg.Wait()
			if rec.Code != 503 || !strings.Contains(rec.Body.String(), `"id":7`) || rec.Header().Get("Retry-After") != "2" {
				t.Errorf("%d %v %s, want 503 with id 7", rec.Code, rec.Header(), rec.Body)
			}
			if atOnce := took < 600*time.Millisecond; atOnce != tt.atOnce {
				t.Errorf("answered after %s, want at once: %v", took, tt.atOnce)
			}
		})
	}
}

// What is sent several times, as a retry in front does it, waits once, and nothing is left
// of it when it has ended.
func TestHeldOnce(t *testing.T) {
	before := nStarts.Load()
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "300ms"})
	under, end := context.WithCancel(t.Context())
	start := time.Now()
	for range 4 {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, newCall(0).WithContext(under))
		if rec.Code != 503 || !strings.Contains(rec.Body.String(), `"id":7`) || rec.Header().Get("Retry-After") != "2" {
			t.Errorf("%d %v %s, want 503 with id 7", rec.Code, rec.Header(), rec.Body)
		}
	}
	if took := time.Since(start); took < 300*time.Millisecond || took > 600*time.Millisecond {
		t.Errorf("4 attempts waited %s, want 300ms in all", took)
	}
	end()
	await(t, "nothing left of it", func() bool { _, ok := starts.Load(under.Done()); return !ok && nStarts.Load() == before })
}

// copied is the context of a copy that Traefik's mirroring sends.
type copied struct{ context.Context }

func (copied) Done() <-chan struct{} { return make(chan struct{}) }

func TestStartsAreBounded(t *testing.T) {
	before := nStarts.Load()
	for name, ctx := range map[string]context.Context{"never ends": context.Background(), "a mirror's": copied{t.Context()}} {
		if startOf(ctx); nStarts.Load() != before {
			t.Errorf("%s: it is kept, for ever", name)
		}
	}
	all, end := context.WithCancel(t.Context())
	for range maxStarts + 10 {
		ctx, cancel := context.WithCancel(all)
		defer cancel()
		startOf(ctx)
	}
	if n := nStarts.Load(); n > maxStarts {
		t.Errorf("%d are kept, want %d at most", n, maxStarts)
	}
	end()
	await(t, "none left", func() bool { return nStarts.Load() == before })
	starts.Range(func(_, _ interface{}) bool {
		t.Error("one is left that is not counted")
		return false
	})
}

// A client that leaves is not served later: its call is never executed.
func TestClientLeaves(t *testing.T) {
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback})
	left, leave := context.WithCancel(t.Context())
	rec := httptest.NewRecorder()
	done := make(chan bool)
	go func() { h.ServeHTTP(rec, newCall(0).WithContext(left)); close(done) }()
	time.Sleep(50 * time.Millisecond)
	leave()
	<-done
	if rec.Code != clientGone || rec.Body.Len() > 0 {
		t.Errorf("%d %q, want the end of the request", rec.Code, rec.Body)
	}
}

// Those who wait go on in the order in which they came, not all at once.
func TestWakeInOrder(t *testing.T) {
	g := join(t.Name())
	defer g.leave()
	var boxes []chan int
	for range 40 {
		_, box := g.enlist(0, 1000)
		boxes = append(boxes, box)
	}
	time.Sleep(20 * time.Millisecond)
	start := time.Now()
	g.wake()
	await(t, "all woken", func() bool {
		later := false
		for i := len(boxes) - 1; i >= 0; i-- { // from the end: who is woken meanwhile comes later here
			woken := len(boxes[i]) == 1
			if later && !woken {
				t.Fatalf("waiter %d sleeps, and one after it was woken", i)
			}
			later = woken
		}
		return len(boxes[len(boxes)-1]) == 1
	})
	if took := time.Since(start); took < 39*wakePause {
		t.Errorf("%d waiters were woken within %s, want a pause of %s after each", len(boxes), took, wakePause)
	}
}

// A route that has been away too long is 404 again, as are paths that are no MCP
// endpoints, from the start.
func TestNotFound(t *testing.T) {
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "0", AbsentAfter: "300ms", Paths: []string{"/mcp", "/tools/*"}})
	tests := []struct {
		path string
		want int
	}{{"/mcp", 503}, {"/mcp/", 503}, {"/tools/x", 503}, {"/else", 404}, {"/mcpx", 404}, {"/.well-known/oauth-protected-resource/mcp", 404},
		{"/tools/.well-known/openid-configuration", 404}}
	for _, tt := range tests {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequest(http.MethodPost, tt.path, nil))
		if rec.Code != tt.want {
			t.Errorf("POST %s: %d, want %d", tt.path, rec.Code, tt.want)
		}
	}
	time.Sleep(350 * time.Millisecond)
	if rec := call(h, 0); rec.Code != 404 {
		t.Errorf("after absentAfter: %d, want 404", rec.Code)
	}
}

// A route that goes after hours is absent from that instant on, and not since it was made:
// its end is noted a little later than its configuration's, in a goroutine of its own.
func TestAbsentFromTheEndOn(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // that goroutine comes after us
	a := startMCP(t)
	old, end := onRouter(t, "app@docker")
	newHandler(t, old, balancerOf(fakeServer{URL: a.URL}), Config{})
	awaitState(t, "up", a)
	g := groups.m["mcp@"+t.Name()+" on router app"]
	g.mu.Lock()
	g.since = time.Now().Add(-time.Hour)
	g.mu.Unlock()
	ctx, _ := onRouter(t, "app@file")
	end()
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "0"})
	if rec := call(h, 0); rec.Code != 503 {
		t.Errorf("as its configuration ends: %d, want 503", rec.Code)
	}
}

// A balancer whose status was changed behind our back hands a request to our child
// again and again: without an end, the stack would overflow and Traefik end.
func TestEndlessHandOver(t *testing.T) {
	ctx, _ := onRouter(t, "app@file")
	set, _ := (&Config{Hold: "1s"}).parse()
	k := &keeper{set: set, group: join(groupOf(ctx, t.Name())), ctx: ctx}
	defer k.group.leave()
	times := 0
	var self http.Handler = http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		times++
		k.serve(rw, req, func() http.Handler { return k.group.pick(anyMember) })
	})
	defer k.group.add(&member{handler: func() http.Handler { return self }})()
	rec := call(self, 0)
	if rec.Code != 503 || times > maxPasses+1 {
		t.Errorf("%d after %d passes, want 503 after %d", rec.Code, times, maxPasses)
	}
}

// While there is no route, configured upstreams serve.
func TestDirectUpstreams(t *testing.T) {
	a := startMCP(t)
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Upstreams: []string{a.URL + "/mcp"}})
	if rec := call(h, 100<<10); rec.Code != 200 || !strings.Contains(rec.Body.String(), `"id":7`) {
		t.Errorf("%d %s, want the server's answer", rec.Code, rec.Body)
	}
	a.stop()
	await(t, "down", func() bool { _, s := state(a.URL); return s == "down" })
	rec := httptest.NewRecorder()
	done := make(chan bool)
	go func() { h.ServeHTTP(rec, newCall(0)); close(done) }()
	time.Sleep(100 * time.Millisecond)
	a.start()
	<-done
	if rec.Code != 200 {
		t.Errorf("held over a restart: %d %s, want 200", rec.Code, rec.Body)
	}
}

// A server whose certificate nobody trusts cannot be served directly: calls wait for its route.
func TestDirectUpstreamThatSignedItsOwn(t *testing.T) {
	srv := httptest.NewUnstartedServer(http.HandlerFunc(answer))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	defer srv.Close()
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Upstreams: []string{srv.URL + "/mcp"}})
	await(t, "up", func() bool { _, s := state(srv.URL); return s == "up" })
	for _, what := range []string{"the first, which is tried", "another"} {
		done := make(chan *httptest.ResponseRecorder, 1)
		go func() { done <- call(h, 10) }()
		time.Sleep(700 * time.Millisecond)
		if len(done) > 0 {
			t.Fatalf("%s: %d before there is a route, want it to wait", what, (<-done).Code)
		}
		there, gone := onRouter(t, "app@docker")
		newHandler(t, there, balancerOf(fakeServer{URL: srv.URL}), Config{})
		if rec := <-done; rec.Code != 200 || !strings.HasPrefix(rec.Body.String(), srv.URL) {
			t.Errorf("%s: %d %s, want the route's answer", what, rec.Code, rec.Body)
		}
		gone()
	}
}

// A gate lets everything pass while an upstream lives, and holds calls while not.
func TestGate(t *testing.T) {
	a := startMCP(t)
	ctx, _ := onRouter(t, "app@file")
	next := http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) { fmt.Fprint(rw, req.URL.Path) })
	h := newHandler(t, ctx, next, Config{Upstreams: []string{a.URL + "/mcp"}, StatusPath: "/status"})
	if rec := call(h, 0); rec.Code != 200 || rec.Body.String() != "/mcp" {
		t.Errorf("%d %s, want next's answer", rec.Code, rec.Body)
	}
	a.stop()
	await(t, "down", func() bool { _, s := state(a.URL); return s == "down" })
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequest("GET", "/else", nil))
	if rec.Code != 200 {
		t.Errorf("another path: %d, want next's answer", rec.Code)
	}
	done := make(chan bool)
	rec = httptest.NewRecorder()
	go func() { h.ServeHTTP(rec, newCall(0)); close(done) }()
	time.Sleep(50 * time.Millisecond)
	a.start()
	<-done
	if rec.Code != 200 {
		t.Errorf("held over a restart: %d, want 200", rec.Code)
	}
}

// The status page is JSON for people and programs, and metrics for Prometheus.
func TestStatusPath(t *testing.T) {
	a := startMCP(t)
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, StatusPath: "/status", Upstreams: []string{a.URL + "/mcp"},
		Headers: map[string]string{"Authorization": "Bearer s3cret"}})
	await(t, "up", func() bool { _, s := state(a.URL); return s == "up" })
	tests := []struct{ accept, want string }{
		{"", `"state": "up"`},
		{"application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4", "\n" + `traefik_mcp_health_upstream_up{upstream="` + a.addr + `",path="/mcp"} 1` + "\n"},
		{"text/plain", `server="a\"b"`},
	}
	for _, tt := range tests {
		req := httptest.NewRequest("GET", "/status", nil)
		req.Header.Set("Accept", tt.accept)
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, req)
		if rec.Code != 200 || !strings.Contains(rec.Body.String(), tt.want) || strings.Contains(rec.Body.String(), "s3cret") {
			t.Errorf("Accept %q: %d %s, want %s", tt.accept, rec.Code, rec.Body, tt.want)
		}
	}
	ctx2, _ := onRouter(t, "other@file")
	if rec := httptest.NewRecorder(); true {
		newHandler(t, ctx2, http.NotFoundHandler(), Config{Mode: modeFallback}).ServeHTTP(rec, httptest.NewRequest("GET", "/status", bytes.NewReader(nil)))
		if rec.Code != 404 {
			t.Errorf("off by default: %d, want 404", rec.Code)
		}
	}
}

// A request may wait for longer than anything else remembers its router.
func TestHoldOutlivesItsConfiguration(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	old, end := onRouter(t, "app@docker")
	next := balancerOf(fakeServer{URL: a.URL})
	newHandler(t, old, next, Config{})
	await(t, "up", func() bool { return next.up(a.URL) })
	a.stop()
	await(t, "down", func() bool { return next.up(childName) })
	done := make(chan *httptest.ResponseRecorder)
	go func() { done <- call(next, 10) }()
	await(t, "held", func() bool { return held()["mcp@"+t.Name()+" on router app"] == 1 })
	end()
	time.Sleep(10 * linger)
	ctx, _ := onRouter(t, "app@docker")
	newHandler(t, ctx, balancerOf(fakeServer{URL: b.URL}), Config{})
	if rec := <-done; rec.Code != 200 || !strings.HasPrefix(rec.Body.String(), b.URL) {
		t.Errorf("%d %s, want an answer of the new server", rec.Code, rec.Body)
	}
}
