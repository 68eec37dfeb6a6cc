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

			// The next question goes over a fresh one, and this one ends in silence: of a
			// plain line, when it is old.
			line.mu.Lock()
			line.conn.born = line.conn.born.Add(-watchFor)
			line.mu.Unlock()
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

// sockets counts what a server has of connections.
type sockets struct {
	mu   sync.Mutex
	open map[net.Conn]bool
	all  int
}

func (n *sockets) note(c net.Conn, state http.ConnState) {
	n.mu.Lock()
	defer n.mu.Unlock()
	switch state {
	case http.StateNew:
		n.open[c] = true
		n.all++
	case http.StateClosed:
		delete(n.open, c)
	}
}

// settle waits until open connections are left of all that there were.
func (n *sockets) settle(t *testing.T, when string, open, all int) {
	t.Helper()
	for i := 0; ; i++ {
		n.mu.Lock()
		o, a := len(n.open), n.all
		n.mu.Unlock()
		if o == open && a == all {
			return
		}
		if i == 500 {
			t.Fatalf("%s: %d connections open of %d, want %d of %d", when, o, a, open, all)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

// A plain line goes on to watch the connection that it has, whatever the probes after it
// dial, until one of them finds another address or nothing good.
func TestPlainLineKeepsItsWatch(t *testing.T) {
	var broken atomic.Bool
	serve := func() (*httptest.Server, *sockets) {
		n := &sockets{open: map[net.Conn]bool{}}
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var m message
			_ = json.NewDecoder(r.Body).Decode(&m)
			if broken.Load() {
				w.WriteHeader(http.StatusBadGateway)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`, m.ID)
		}))
		s.Config.ConnState = n.note
		s.Start()
		t.Cleanup(s.Close)
		return s, n
	}
	first, atFirst := serve()
	second, atSecond := serve()
	var addr atomic.Value
	addr.Store(first.Listener.Addr().String())
	line := NewPlainLine(&http.Transport{DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return dialContext(ctx, network, addr.Load().(string))
	}})
	p, err := NewProber(Target{URL: first.URL}, line)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewChecker(p, Schedule{Interval: time.Hour, Fall: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	probes := make(chan Result, 9)
	c.OnResult(func(r Result) { probes <- r })
	probe := func(want Verdict) {
		t.Helper()
		c.Probe()
		if r := <-probes; r.Verdict != want {
			t.Fatalf("Probe = %s %s (%s), want %s", r.Verdict, r.Reason, r.Detail, want)
		}
	}

	c.Start()
	<-probes
	atFirst.settle(t, "after the first probe", 1, 1)
	probe(Ready)
	probe(Ready)
	atFirst.settle(t, "after two more", 1, 3)

	addr.Store(second.Listener.Addr().String())
	probe(Ready)
	atFirst.settle(t, "its name leads elsewhere", 0, 3)
	atSecond.settle(t, "its name leads here", 1, 1)

	first.CloseClientConnections()
	second.CloseClientConnections()
	if r := <-probes; r.Verdict != Ready { // which the end has brought forward
		t.Fatalf("after the end: %s %s", r.Verdict, r.Reason)
	}
	atSecond.settle(t, "after the end of the connection", 1, 2)

	broken.Store(true)
	probe(Dead)
	atSecond.settle(t, "after a bad answer", 0, 3)
}
