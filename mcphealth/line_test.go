package mcphealth

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A connection that is only watched is a bare socket: the transport's goroutines,
// buffers and TLS state are gone, and the server notices nothing.
func TestWatchedConnectionIsBare(t *testing.T) {
	for _, tt := range []struct {
		name  string
		start func(*httptest.Server)
		line  func(*http.Transport) *Line
		fewer int // goroutines
	}{
		{"http", (*httptest.Server).Start, NewLine, 2},
		{"plain", (*httptest.Server).Start, NewPlainLine, 0},
		{"https", (*httptest.Server).StartTLS, NewLine, 2},
		{"h2", func(s *httptest.Server) { s.EnableHTTP2 = true; s.StartTLS() }, NewLine, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var mu sync.Mutex
			states := map[http.ConnState]int{}
			s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				var m message
				_ = json.NewDecoder(r.Body).Decode(&m)
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`, m.ID)
			}))
			s.Config.ConnState = func(_ net.Conn, c http.ConnState) {
				mu.Lock()
				states[c]++
				mu.Unlock()
			}
			tt.start(s)
			defer s.Close()
			transport := &http.Transport{ForceAttemptHTTP2: tt.name == "h2"}
			if s.TLS != nil {
				transport.TLSClientConfig = s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
			}
			line := tt.line(transport)
			p, err := NewProber(Target{URL: s.URL}, line)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close(context.Background())
			if r := p.Probe(context.Background()); r.Verdict != Ready {
				t.Fatalf("Probe = %s %s (%s), want ready", r.Verdict, r.Reason, r.Detail)
			}
			before := runtime.NumGoroutine()
			ended, stopped := make(chan bool, 9), atomic.Int32{}
			watched := make(chan net.Conn, 9)
			by := func(c net.Conn, _ func()) func() {
				watched <- c
				return func() { stopped.Add(1) }
			}
			if !p.line.watchIdle(by, func() { ended <- true }) {
				t.Fatal("nothing is watched after a good probe")
			}
			for i := 0; runtime.NumGoroutine() > before-tt.fewer && i < 500; i++ {
				time.Sleep(2 * time.Millisecond)
			}
			if got := runtime.NumGoroutine(); got > before-tt.fewer {
				t.Errorf("%d goroutines, want %d less than the %d with a connection in the transport", got, tt.fewer, before)
			}
			c := <-watched
			if _, plain := c.(*net.TCPConn); !plain {
				t.Errorf("watched is a %T, want the socket", c)
			}
			time.Sleep(20 * time.Millisecond)
			mu.Lock()
			if states[http.StateClosed] != 0 {
				t.Errorf("the server saw %d connections end, want none yet", states[http.StateClosed])
			}
			mu.Unlock()

			// The next question goes over a fresh one, and this one ends in silence.
			if r := p.Probe(context.Background()); r.Verdict != Ready {
				t.Fatalf("second Probe = %s %s (%s), want ready", r.Verdict, r.Reason, r.Detail)
			}
			if stopped.Load() != 1 {
				t.Errorf("the watch was given up %d times, want once", stopped.Load())
			}
			if !p.line.watchIdle(nil, func() { ended <- true }) { // by a goroutine
				t.Fatal("nothing is watched after the second probe")
			}
			time.Sleep(20 * time.Millisecond)
			s.CloseClientConnections()
			select {
			case <-ended:
			case <-time.After(5 * time.Second):
				t.Fatal("the end of the connection was not noticed")
			}
			select {
			case <-ended:
				t.Error("the end was told twice")
			case <-time.After(20 * time.Millisecond):
			}
		})
	}
}
