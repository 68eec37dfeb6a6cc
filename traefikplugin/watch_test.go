package traefikplugin

import (
	"crypto/tls"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// A server that hangs up idle connections, as Node's does after 5 s, is alive.
func TestHangingUpIsNoDeath(t *testing.T) {
	srv := httptest.NewUnstartedServer(http.HandlerFunc(answer))
	srv.Config.IdleTimeout = 30 * time.Millisecond
	srv.Start()
	defer srv.Close()
	b := balancerOf(fakeServer{URL: srv.URL})
	ctx, _ := onRouter(t, "app@docker")
	newHandler(t, ctx, b, Config{})
	await(t, "up", func() bool { return b.up(srv.URL) })
	time.Sleep(300 * time.Millisecond)
	b.mu.Lock()
	defer b.mu.Unlock()
	if n := slices.Index(b.said, "+"+srv.URL); slices.Contains(b.said[n:], "-"+srv.URL) {
		t.Errorf("taken out although it lives: %v", b.said)
	}
}

// A server that was up and is late once is still the only one there is: calls go
// on to it until `fall` probes have failed. One that refuses connections is out at once.
func TestLateIsNotGone(t *testing.T) {
	var hang atomic.Bool
	h := http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		if hang.Load() {
			time.Sleep(200 * time.Millisecond)
		}
		answer(rw, req)
	})
	proved := httptest.NewServer(h)
	defer proved.Close()
	set, _ := (&Config{Timeout: "50ms", Fall: "1000"}).parse()
	s, _ := acquire(set, proved.URL+"/mcp")
	defer release(s)
	await(t, "up", func() bool { return s.tier(true) == mcphealth.TierUp })
	hang.Store(true)
	s.checker.Probe()
	await(t, "late", func() bool { return s.checker.Snapshot().Last.Verdict == mcphealth.Dead })
	if got := s.tier(true); got != mcphealth.TierSuspect {
		t.Errorf("late once: tier %d, want suspect: a last resort", got)
	}
	refused, _ := acquire(set, "http://127.0.0.1:1/mcp")
	defer release(refused)
	await(t, "refused", func() bool { return refused.checker.Snapshot().Probes > 0 })
	for _, hold := range []bool{true, false} {
		if got := refused.tier(hold); got != mcphealth.TierDown {
			t.Errorf("refused once, hold %v: tier %d, want down", hold, got)
		}
	}
}

// A server that wants what only the serversTransport has cannot be asked. One that has
// answered before, and now ends handshakes, is out.
func TestServerThatWantsACertificate(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(answer))
	var lax atomic.Bool
	s.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		c := &tls.Config{Certificates: s.TLS.Certificates, ClientAuth: tls.RequireAnyClientCert}
		if lax.Load() {
			c.ClientAuth = tls.NoClientCert
		}
		return c, nil
	}}
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	defer s.Close()
	ctx, _ := onRouter(t, "app@file")
	next := balancerOf(fakeServer{URL: s.URL})
	newHandler(t, ctx, next, Config{Interval: "100ms", Fall: "1"})
	await(t, "probed", func() bool { n, _ := state(s.URL); return n > 3 })
	if !next.up(s.URL) || next.up(childName) {
		t.Error("it is out, want it left as Traefik has it")
	}
	lax.Store(true)
	awaitState(t, "up", &mcpServer{URL: s.URL})
	lax.Store(false)
	await(t, "out", func() bool { return !next.up(s.URL) && next.up(childName) })
}
