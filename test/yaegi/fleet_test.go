package yaegi_test

import (
	"encoding/json"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// station is a server that can be killed and started again at one address. Even
// paths are modern, odd ones stateful: each checker of a fleet has its own path.
type station struct {
	t      *testing.T
	addr   string
	server *http.Server
	hang   time.Duration

	mu  sync.Mutex
	odd *scripted // of the present start; sessions die with the process
}

func newStation(t *testing.T) *station {
	s := &station{t: t, addr: closedPort(t)}
	t.Cleanup(s.stop)
	return s
}

func (s *station) url() string { return "http://" + s.addr }

func (s *station) start() {
	s.t.Helper()
	odd, even := serve(legacy(refusedText)), serve(modern())
	s.mu.Lock()
	s.odd = odd
	s.mu.Unlock()
	l, err := net.Listen("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(s.hang)
		if last := r.URL.Path[len(r.URL.Path)-1]; (last-'0')%2 == 1 {
			odd.ServeHTTP(w, r)
			return
		}
		even.ServeHTTP(w, r)
	})}
	go s.server.Serve(l)
}

// stop kills the server with all its connections.
func (s *station) stop() {
	if s.server != nil {
		s.server.Close()
	}
}

// left is how many sessions the server still holds.
func (s *station) left() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.odd.left()
}

// eventually waits until f holds, and says how long that took.
func eventually(t *testing.T, limit time.Duration, what string, f func() bool) time.Duration {
	t.Helper()
	for start := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		if f() {
			return time.Since(start)
		}
		if time.Since(start) > limit {
			t.Fatalf("after %v not yet: %s", limit, what)
		}
	}
}

// bothWays runs f compiled and interpreted, one after the other: package driver
// holds one fleet.
func bothWays(t *testing.T, f func(t *testing.T, d drive)) {
	i := interpreted(t)
	t.Run("compiled", func(t *testing.T) { f(t, compiled) })
	t.Run("interpreted", func(t *testing.T) { f(t, i) })
}

// noGoroutines runs f and checks that it left no goroutine behind.
func noGoroutines(t *testing.T, f func()) {
	t.Helper()
	before := runtime.NumGoroutine()
	f()
	eventually(t, 5*time.Second, "no more goroutines than before", func() bool { return runtime.NumGoroutine() <= before })
}

const fleetSize = 50

// TestFleet: many checkers at once, against a server that dies and comes back.
// Yaegi's traps with goroutines show here: shared loop variables, shared frames
// of closures, lost wake-ups.
func TestFleet(t *testing.T) {
	bothWays(t, func(t *testing.T, d drive) {
		s := newStation(t)
		s.start()
		noGoroutines(t, func() {
			if err := d.StartFleet(s.url(), fleetSize, 200, 50, 5000, 0); err != "" {
				t.Fatal(err)
			}
			defer d.CloseFleet()
			all := func(state string) func() bool { return func() bool { return d.FleetIn(state) == fleetSize } }
			t.Logf("all up after %v", eventually(t, 20*time.Second, "all up", all("up")))
			time.Sleep(2 * time.Second)
			s.stop()
			t.Logf("all down after %v", eventually(t, 20*time.Second, "all down", all("down")))
			time.Sleep(500 * time.Millisecond)
			s.start()
			t.Logf("all up again after %v", eventually(t, 20*time.Second, "all up again", all("up")))
			time.Sleep(time.Second)
			checkFleet(t, d)
			d.CloseFleet()
			if n := s.left(); n != 0 {
				t.Errorf("Close left %d sessions on the server, want none", n)
			}
			before := sum(d.FleetProbes())
			time.Sleep(500 * time.Millisecond)
			if after := sum(d.FleetProbes()); after != before {
				t.Errorf("probed %d times after Close, want none", after-before)
			}
			s.stop()
		})
	})
}

// checkFleet: every checker went the same way, and heard nothing of another's.
func checkFleet(t *testing.T, d drive) {
	t.Helper()
	for _, mixed := range d.FleetMixed() {
		t.Error(mixed)
	}
	probes := d.FleetProbes()
	for i, states := range d.FleetStates() {
		if states != "unknown>up>down>up" {
			t.Errorf("checker %d went %s, want unknown>up>down>up", i, states)
		}
		if probes[i] < 10 {
			t.Errorf("checker %d probed %d times in more than 3 s at intervals of 200 ms", i, probes[i])
		}
	}
	t.Logf("%d probes", sum(probes))
	var snapshot struct {
		State, Reason string
		Last          struct{ Verdict, URL string }
		Changes       []struct{ From, To, Reason string }
	}
	text := d.FleetSnapshot(7)
	if err := json.Unmarshal([]byte(text), &snapshot); err != nil || snapshot.State != "up" || snapshot.Reason != "ok" ||
		snapshot.Last.Verdict != "ready" || !strings.HasSuffix(snapshot.Last.URL, "/7") || len(snapshot.Changes) < 3 {
		t.Errorf("snapshot as JSON: %v, %s", err, text)
	}
	if n := d.FleetTier(0); n != fleetSize {
		t.Errorf("%d of %d checkers are in the first tier, want all", n, fleetSize)
	}
}

func sum(all []int) int {
	n := 0
	for _, x := range all {
		n += x
	}
	return n
}

// TestDeathWatch: with a minute between probes, only the end of the open
// connection can tell of a death. The core's own net.Conn raises the alarm from
// a goroutine of net/http.
func TestDeathWatch(t *testing.T) {
	bothWays(t, func(t *testing.T, d drive) {
		s := newStation(t)
		s.start()
		noGoroutines(t, func() {
			if err := d.StartFleet(s.url(), 20, 60_000, 100, 5000, 4); err != "" {
				t.Fatal(err)
			}
			defer d.CloseFleet()
			eventually(t, 20*time.Second, "all up", func() bool { return d.FleetIn("up") == 20 })
			time.Sleep(200 * time.Millisecond)
			s.stop()
			t.Logf("all down after %v", eventually(t, 10*time.Second, "all down", func() bool { return d.FleetIn("down") == 20 }))
			for i := range 20 {
				d.FleetProbe(i)
			}
			s.start()
			eventually(t, 20*time.Second, "all up again", func() bool { return d.FleetIn("up") == 20 })
		})
	})
}

// TestTraffic: a failed request makes its upstream suspect, and a probe clears it
// at once; silence brings a probe forward too.
func TestTraffic(t *testing.T) {
	bothWays(t, func(t *testing.T, d drive) {
		s := newStation(t)
		s.start()
		if err := d.StartFleet(s.url(), 2, 60_000, 100, 5000, 0); err != "" {
			t.Fatal(err)
		}
		defer d.CloseFleet()
		eventually(t, 10*time.Second, "both up", func() bool { return d.FleetIn("up") == 2 })
		d.FleetTraffic(0, "failed")
		if d.FleetTier(2) != 1 {
			t.Error("a failed request did not make its upstream suspect")
		}
		eventually(t, 10*time.Second, "a probe clears the suspicion", func() bool { return d.FleetTier(0) == 2 && d.FleetProbes()[0] == 2 })
		d.FleetTraffic(1, "answered")
		d.FleetTraffic(1, "settled")
		time.Sleep(300 * time.Millisecond)
		if n := d.FleetProbes()[1]; n != 1 {
			t.Errorf("answered requests brought %d probes, want none", n-1)
		}
		d.FleetTraffic(1, "hanging")
		eventually(t, 10*time.Second, "silence brings a probe", func() bool { return d.FleetProbes()[1] == 2 })
	})
}

// TestCloseWhileProbing: Close does not wait for a server that does not answer.
func TestCloseWhileProbing(t *testing.T) {
	bothWays(t, func(t *testing.T, d drive) {
		s := newStation(t)
		s.hang = 2 * time.Second
		s.start()
		noGoroutines(t, func() {
			if err := d.StartFleet(s.url(), 20, 1000, 1000, 30_000, 0); err != "" {
				t.Fatal(err)
			}
			time.Sleep(300 * time.Millisecond)
			start := time.Now()
			d.CloseFleet()
			if took := time.Since(start); took > time.Second {
				t.Errorf("Close took %v while probes hung, want less than a second", took)
			}
			s.stop()
		})
	})
}
