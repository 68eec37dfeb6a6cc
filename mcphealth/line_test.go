package mcphealth

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
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

// counter is a server on pipes, that counts those which are open.
type counter struct {
	single chan bool     // holds one while a connection is served, if one is served at a time
	idle   time.Duration // after which it hangs up; 0: never

	mu      sync.Mutex
	open    int
	hangups int
}

func (n *counter) dial(context.Context, string, string) (net.Conn, error) {
	ours, theirs := net.Pipe()
	n.add(1, 0)
	go n.serve(theirs)
	return ours, nil
}

func (n *counter) add(open, hangups int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.open += open
	n.hangups += hangups
}

func (n *counter) serve(c net.Conn) {
	defer n.add(-1, 0)
	defer c.Close()
	if n.single != nil {
		n.single <- true
		defer func() { <-n.single }()
	}
	for r := bufio.NewReader(c); ; {
		if n.idle > 0 {
			_ = c.SetReadDeadline(time.Now().Add(n.idle))
		}
		req, err := http.ReadRequest(r)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			n.add(0, 1)
		}
		if err != nil {
			return
		}
		question, _ := io.ReadAll(req.Body)
		body := strings.ReplaceAll(discovery.body, "$ID", RequestID(question).JSON())
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	}
}

// probed has n probed over a plain line of t for a while, and returns what was found.
func (n *counter) probed(t *testing.T, transport *http.Transport, d time.Duration) []Result {
	t.Helper()
	transport.DialContext = n.dial
	p, err := NewProber(Target{URL: "http://upstream.test/mcp"}, NewPlainLine(transport))
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewChecker(p, Schedule{Fall: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	var mu sync.Mutex
	var all []Result
	c.OnResult(func(r Result) { mu.Lock(); all = append(all, r); mu.Unlock() })
	c.Start()
	time.Sleep(d)
	synctest.Wait()
	mu.Lock()
	defer mu.Unlock()
	return all
}

// A plain line whose transport has bounds, or a proxy, of its own goes through that, and
// leaves no more than one connection open either.
func TestPlainLineThroughTransport(t *testing.T) {
	for name, transport := range map[string]*http.Transport{
		"bounds": {ResponseHeaderTimeout: time.Second},
		"proxy":  {Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: "proxy.test:3128"})},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n := &counter{}
				n.probed(t, transport, 10*time.Minute+time.Second)
				n.mu.Lock()
				defer n.mu.Unlock()
				if n.open != 1 {
					t.Errorf("%d connections are open, want 1", n.open)
				}
			})
		})
	}
}

// A server that serves one connection at a time does not come to the next question while
// one is watched. That is found out once.
func TestWatchMakesRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &counter{single: make(chan bool, 1)}
		bad := 0
		for _, r := range n.probed(t, &http.Transport{}, 10*time.Minute) {
			if r.Verdict != Ready {
				bad++
			}
		}
		if bad > 1 {
			t.Errorf("%d probes found nothing good, want 1", bad)
		}
	})
}

// A server that hangs up on idle connections does so once: later ones are replaced
// before.
func TestWatchLearnsIdleTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &counter{idle: 75 * time.Second}
		n.probed(t, &http.Transport{}, time.Hour)
		n.mu.Lock()
		defer n.mu.Unlock()
		if n.hangups != 1 {
			t.Errorf("the server hung up %d times, want once", n.hangups)
		}
	})
}

// That a line closes what a probe left behind is not the other side's doing.
func TestOwnEndIsNoEnd(t *testing.T) {
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }))
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	line := NewLine(&http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()})
	var ended atomic.Int32
	line.Ended = func(string, time.Time) { ended.Add(1) }
	p, err := NewProber(Target{URL: s.URL, Timeout: 200 * time.Millisecond}, line)
	if err != nil {
		t.Fatal(err)
	}
	if r := p.Probe(context.Background()); r.Reason != Timeout {
		t.Fatalf("Probe = %s %s (%s), want timeout", r.Verdict, r.Reason, r.Detail)
	}
	p.hangUpLine(false)
	time.Sleep(50 * time.Millisecond)
	if n := ended.Load(); n != 0 {
		t.Errorf("the other side ended %d connections, want none", n)
	}
}

// A server that talks on over a connection that is only watched keeps nobody busy: that
// counts as its end.
func TestWatchedConnectionIsQuiet(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, theirs := net.Pipe()
		said := 0
		go func() {
			for err := error(nil); err == nil; said++ {
				_, err = theirs.Write(make([]byte, 64))
			}
		}()
		l := NewPlainLine(&http.Transport{})
		w := &watchedConn{c: ours, l: l, born: time.Now(), taken: true}
		l.replace(w)
		ended := 0
		l.watchIdle(nil, func() { ended++ })
		synctest.Wait()
		if read := 64 * said; ended != 1 || read > 2*maxChatter {
			t.Errorf("after %d bytes the end was told %d times, want once after %d", read, ended, maxChatter)
		}
	})
}
