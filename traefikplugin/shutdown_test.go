package traefikplugin

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	neturl "net/url"
	"os"
	"os/signal"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// startStateful runs a server of before 2026-07-28, and counts its sessions and what it is asked.
func startStateful(t *testing.T) (url string, sessions, asked *atomic.Int32) {
	t.Helper()
	sessions, asked = &atomic.Int32{}, &atomic.Int32{}
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		var q struct {
			ID     json.RawMessage `json:"id"`
			Method string          `json:"method"`
		}
		_ = json.NewDecoder(req.Body).Decode(&q)
		switch {
		case req.Method == http.MethodDelete:
			sessions.Add(-1)
			return
		case q.Method != "initialize":
			asked.Add(1)
			http.Error(rw, "Bad Request: No valid session ID provided", http.StatusBadRequest)
			return
		}
		rw.Header().Set("Mcp-Session-Id", fmt.Sprint(sessions.Add(1)))
		rw.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(rw, `{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"a","version":"1"}}}`, q.ID)
	}))
	t.Cleanup(srv.Close)
	return srv.URL, sessions, asked
}

// likeTraefik has the test listen for the signal, as Traefik does, beside the plugin.
func likeTraefik(t *testing.T) chan os.Signal {
	t.Helper()
	traefik := make(chan os.Signal, 1)
	signal.Notify(traefik, syscall.SIGTERM)
	t.Cleanup(func() { signal.Stop(traefik); stopping.Store(false) })
	return traefik
}

// terminate tells this process to stop, and returns when.
func terminate(t *testing.T) time.Time {
	t.Helper()
	if err := syscall.Kill(syscall.Getpid(), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	return time.Now()
}

// Traefik is told to stop: no session of ours stays behind, who waits in vain is told so at
// once, and while Traefik still serves, what was up is, and nothing is probed.
func TestShutdown(t *testing.T) {
	traefik := likeTraefik(t)
	var urls [3]string
	var sessions, asked [3]*atomic.Int32
	for i := range urls {
		urls[i], sessions[i], asked[i] = startStateful(t)
	}
	ctx, _ := onRouter(t, "app@docker")
	b := balancerOf(fakeServer{URL: urls[0]}, fakeServer{URL: urls[1]})
	h := newHandler(t, ctx, b, Config{Interval: "100ms"})
	await(t, "sessions held", func() bool {
		return b.up(urls[0]) && b.up(urls[1]) && sessions[0].Load() == 1 && sessions[1].Load() == 1
	})
	away, _ := onRouter(t, "away@file")
	fallback := newHandler(t, away, http.NotFoundHandler(), Config{Mode: modeFallback})
	g := join("mcp@TestShutdown on router away")
	defer g.leave()
	held := make(chan int)
	go func() { held <- call(fallback, 0).Code }()
	await(t, "a call waits", func() bool { return g.held() == 1 })

	start := terminate(t)
	if code := <-held; code != 503 || time.Since(start) > 3*time.Second {
		t.Errorf("the held call got %d after %s, want 503 at once", code, time.Since(start))
	}
	<-traefik
	if n, m := sessions[0].Load(), sessions[1].Load(); n != 0 || m != 0 {
		t.Errorf("%d and %d sessions are left, want none", n, m)
	}
	before := asked[0].Load()
	reloaded, _ := onRouter(t, "late@docker")
	late := newHandler(t, reloaded, balancerOf(fakeServer{URL: urls[2]}), Config{})
	for _, h := range []http.Handler{h, late} {
		if rec := call(h, 0); rec.Code != 200 {
			t.Errorf("%d %s, want it served while Traefik does", rec.Code, rec.Body)
		}
	}
	time.Sleep(300 * time.Millisecond)
	if n := asked[0].Load() - before + asked[2].Load() + sessions[2].Load(); n != 0 {
		t.Errorf("%d questions of probes after the signal, want none", n)
	}
}

// A server that hangs as its session is ended keeps those who wait for another one no longer.
func TestShutdownBesideOneThatHangs(t *testing.T) {
	likeTraefik(t)
	url, sessions, _ := startStateful(t)
	there, _ := neturl.Parse(url)
	proxy := httputil.NewSingleHostReverseProxy(there)
	over := make(chan bool)
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodDelete {
			<-over
			return
		}
		proxy.ServeHTTP(rw, req)
	}))
	t.Cleanup(srv.Close)
	ctx, _ := onRouter(t, "app@docker")
	newHandler(t, ctx, balancerOf(fakeServer{URL: srv.URL}), Config{})
	await(t, "a session", func() bool { _, s := state(srv.URL); return s == "up" && sessions.Load() == 1 })
	away, _ := onRouter(t, "away@file")
	fallback := newHandler(t, away, http.NotFoundHandler(), Config{Mode: modeFallback})
	g := join("mcp@" + t.Name() + " on router away")
	defer g.leave()
	held := make(chan int)
	go func() { held <- call(fallback, 0).Code }()
	await(t, "a call waits", func() bool { return g.held() == 1 })
	start := terminate(t)
	if code, took := <-held, time.Since(start); code != 503 || took > time.Second {
		t.Errorf("the held call got %d after %s, want 503 within a second", code, took)
	}
	close(over)
	await(t, "all given up", func() bool {
		groups.mu.Lock()
		defer groups.mu.Unlock()
		return groups.signals == nil
	})
}

// Calls wait for a route, and there are no servers at all, as Traefik is told to stop.
func TestShutdownWithoutServers(t *testing.T) {
	likeTraefik(t)
	await(t, "no servers", func() bool { return len(servers()) == 0 })
	ctx, _ := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, Hold: "5s"})
	g := join("mcp@" + t.Name() + " on router app")
	defer g.leave()
	held := make(chan int)
	go func() { held <- call(h, 0).Code }()
	await(t, "a call waits", func() bool { return g.held() == 1 })
	start := terminate(t)
	if code, took := <-held, time.Since(start); code != 503 || took > time.Second {
		t.Errorf("the held call got %d after %s, want 503 at once", code, took)
	}
}
