package mcphealth

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// fleet is edges that check one upstream and share what they find out, as a room does
// over a store.
type fleetOf struct {
	edges  []*Checker
	away   atomic.Bool  // the store
	holder atomic.Int64 // of the lease, by number from 1
	until  atomic.Int64 // Unix nanoseconds
}

func (f *fleetOf) lease(edge int64, length time.Duration) func(bool) time.Duration {
	return func(urgent bool) time.Duration {
		now := time.Now().UnixNano()
		if f.away.Load() || urgent {
			return 0
		}
		if left := f.until.Load() - now; left > 0 && f.holder.Load() != edge {
			return time.Duration(left)
		}
		f.holder.Store(edge)
		f.until.Store(now + int64(length))
		return 0
	}
}

// newFleet starts edges, each of which sees the upstream as at says.
func newFleet(t *testing.T, at func(edge int) *bubble, size int, floor time.Duration) *fleetOf {
	f := &fleetOf{}
	for i := range size {
		tell := func(r Result) {
			if f.away.Load() {
				return
			}
			heard, err := ReadShared(r.Share())
			if err != nil {
				t.Errorf("ReadShared(Share) = %v, want what was shared", err)
			}
			for j, o := range f.edges {
				if j != i {
					o.Hear(fmt.Sprint(i), heard)
				}
			}
		}
		c := at(i).idle(t, Schedule{NoWatch: true, Floor: floor, Lease: f.lease(int64(i+1), 12*time.Second), Tell: tell})
		f.edges = append(f.edges, c)
	}
	for _, c := range f.edges {
		c.Start()
		time.Sleep(100 * time.Millisecond)
	}
	return f
}

// One edge asks, all know; when it goes, another one takes over; without a store all
// ask within an interval.
func TestShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		f := newFleet(t, func(int) *bubble { return b }, 10, 0)
		time.Sleep(10 * time.Minute)
		for _, c := range f.edges {
			wantState(t, c, Up, OK)
		}
		if n := b.probes(); n > 75 {
			t.Errorf("%d probes of ten edges in 10 minutes, want about the 63 of one", n)
		}

		b.set("refused")
		time.Sleep(12 * time.Second) // an interval, and the confirmation
		for i, c := range f.edges {
			if s := c.Snapshot(); s.State != Down || s.Reason != Refused {
				t.Errorf("edge %d: %s (%s), want down (refused)", i, s.State, s.Reason)
			}
		}
		b.set("modern")
		time.Sleep(30 * time.Second)

		leader := f.holder.Load() - 1
		f.edges[leader].Close()
		before := b.probes()
		time.Sleep(15 * time.Second) // a lease, and a bit
		if b.probes() == before {
			t.Errorf("nobody asked for 15 s after the edge that did was gone")
		}

		f.away.Store(true)
		for i, c := range f.edges {
			if i != int(leader) {
				c.ProbeWithin(5 * time.Second)
			}
		}
		before = b.probes()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if n := b.probes() - before; n < 9 {
			t.Errorf("%d probes within an interval without a store, want one of each of the 9 edges", n)
		}
	})
}

// A budget holds also when the store goes away, of which all edges learn in one instant.
func TestShareFloor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const edges, floor = 100, 50 * time.Second // 2 per second
		b := &bubble{mode: "modern"}
		f := newFleet(t, func(int) *bubble { return b }, edges, floor)
		time.Sleep(10 * time.Minute)
		f.away.Store(true)
		for _, c := range f.edges {
			c.ProbeWithin(5 * time.Second)
		}
		before := b.probes()
		time.Sleep(3 * floor)
		synctest.Wait()
		asked := b.asked[before:]
		if n := len(asked); n < 2*edges || n > 3*edges+edges/10 {
			t.Errorf("%d probes within three floors without a store, want about one of each of %d edges in each", n, edges)
		}
		for i, from := 0, 0; i < len(asked); i++ {
			for asked[i].Sub(asked[from]) >= time.Second {
				from++
			}
			if n := i - from + 1; n > 12 { // 2 on average
				t.Fatalf("%d probes within a second, %v after the store went, want about 2", n, asked[i].Sub(asked[0]))
			}
		}
	})
}

// A network breaks between some edges and the upstream: on each edge the verdict changes
// as often as what that edge can reach, and no edge takes another one's upstream away.
func TestSharePartition(t *testing.T) {
	for _, blind := range []int{1, 5, 9} {
		for _, traffic := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d of 10 edges cut off, traffic %v", blind, traffic), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { partition(t, blind, traffic) })
			})
		}
	}
}

func partition(t *testing.T, blind int, traffic bool) {
	here, there := &bubble{mode: "modern"}, &bubble{mode: "modern"} // the same upstream, over two ways
	at := func(i int) *bubble {
		if i < blind { // the first holds the lease
			return there
		}
		return here
	}
	f := newFleet(t, at, 10, 0)
	moves := make([]atomic.Int64, 10)
	for i, c := range f.edges {
		c.OnChange(func(ch Change) {
			if (ch.From == Down) != (ch.To == Down) {
				moves[i].Add(1)
			}
		})
	}
	stop := make(chan struct{})
	defer close(stop)
	for i, c := range f.edges {
		go func() {
			for traffic {
				select {
				case <-stop:
					return
				case <-time.After(3 * time.Second):
				}
				if c.Tier() == TierDown {
					continue
				}
				c.Sent()
				if at(i).is("refused") {
					c.Failed()
				} else {
					c.Answered("")
				}
			}
		}()
	}
	time.Sleep(time.Minute)
	there.set("refused")
	time.Sleep(30 * time.Second)
	probes := here.probes()
	for range 20 {
		time.Sleep(30 * time.Second)
		for i, c := range f.edges {
			want := Up
			if i < blind {
				want = Down
			}
			if s := c.Snapshot(); s.State != want && (want == Up || traffic || s.Probes > 2) { // who has not looked cannot know
				t.Errorf("edge %d of %d that are cut off: %s (%s) after %d probes, want %s", i, blind, s.State, s.Reason, s.Probes, want)
			}
		}
	}
	if n := here.probes() - probes; n > 80 {
		t.Errorf("%d probes of the edges that see it in 10 minutes, want about the 63 of one", n)
	}
	there.set("modern")
	time.Sleep(30 * time.Second)
	for i, c := range f.edges {
		wantState(t, c, Up, OK)
		most := int64(2) // down and up again
		if i >= blind && blind == 1 {
			most = 0 // one edge alone convinces nobody; several may, for an interval
		}
		if n := moves[i].Load(); n > most {
			t.Errorf("edge %d: %d moves down or up, want at most %d", i, n, most)
		}
	}
	here.set("refused")
	there.set("refused")
	time.Sleep(12 * time.Second)
	for _, c := range f.edges {
		wantState(t, c, Down, Refused)
	}
}

// An edge that never asked itself knows a lost route by what others have heard there.
func TestShareLostRoute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		f := newFleet(t, func(int) *bubble { return b }, 3, 0)
		time.Sleep(time.Minute)
		b.set("gone")
		time.Sleep(12 * time.Second)
		for i, c := range f.edges {
			if s := c.Snapshot(); s.State != Down || s.Reason != RouteAbsent {
				t.Errorf("edge %d: %s (%s), want down (route_absent)", i, s.State, s.Reason)
			}
		}
		b.set("modern")
		time.Sleep(12 * time.Second)
		for _, c := range f.edges {
			wantState(t, c, Up, OK)
		}
	})
}

// What an edge sees in its own traffic outranks what others say.
func TestHearAgainstTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		time.Sleep(time.Second)
		for range 20 {
			c.Sent()
			c.Answered("")
			c.Hear("b", Result{Verdict: Dead, Reason: Refused})
			time.Sleep(500 * time.Millisecond)
		}
		wantState(t, c, Up, OK)
		time.Sleep(5 * time.Second) // no traffic any more
		for range 2 {
			c.Hear("b", Result{Verdict: Dead, Reason: Timeout})
		}
		wantState(t, c, Up, OK) // answers within the interval
		for range 2 {
			c.Hear("b", Result{Verdict: Dead, Reason: Refused})
			c.Hear("c", Result{Verdict: Dead, Reason: Refused})
		}
		wantState(t, c, Down, Refused)
		if c.Snapshot().Probes != 1 {
			t.Errorf("%d probes, want the one of its own: what was heard is none", c.Snapshot().Probes)
		}
	})
}

// A store is as hostile as any other server.
func TestReadShared(t *testing.T) {
	good := Result{Verdict: Degraded, Reason: Slow, Detail: "answered after 2s", Era: Modern, ProtocolVersions: []string{"2026-07-28"},
		Server: ServerInfo{Name: "s", Version: "1"}, HTTPStatus: 200, LatencyMs: 2000, RetryAfter: 3 * time.Second}
	r, err := ReadShared(good.Share())
	if err != nil || r.Verdict != Degraded || r.Reason != Slow || r.Detail != good.Detail || r.Era != Modern || r.Server != good.Server || r.RetryAfter != good.RetryAfter || len(r.ProtocolVersions) != 1 {
		t.Errorf("ReadShared(Share(r)) = %+v, %v, want r", r, err)
	}
	for _, bad := range []string{
		``, `null`, `7`, `[]`, `{}`, `{"verdict":"ready"}`, `{"verdict":"ready","reason":"refused"}`, `{"verdict":"great","reason":"ok"}`,
		`{"verdict":"ready","reason":"ok","latencyMs":"x"}`, `{"verdict":"ready","reason":"ok","detail":"` + strings.Repeat("x", maxShared) + `"}`,
	} {
		if r, err := ReadShared([]byte(bad)); !errors.Is(err, ErrShared) {
			t.Errorf("ReadShared(%.60q) = %v, %v, want ErrShared", bad, r.Verdict, err)
		}
	}
	r, err = ReadShared([]byte(`{"verdict":"dead","reason":"refused","era":"<b>","detail":"` + strings.Repeat(`a\n\u0007\u202e<script>`, 100) +
		`","server":{"name":"` + strings.Repeat("n", 999) + `"},"retryAfterMs":9223372036854775807}`))
	if err != nil || strings.ContainsAny(r.Detail, "\n\a\u202e") || len(r.Detail) > 5*maxWord || len(r.Server.Name) > maxWord+3 || r.Era != EraUnknown || r.RetryAfter != 0 {
		t.Errorf("ReadShared of hostile texts = %+v, %v, want them cleaned and cut", r, err)
	}
}

// An edge that cannot ask, and says so each time, keeps no other from asking.
func TestHearNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.idle(t, Schedule{NoWatch: true})
		c.Start()
		time.Sleep(time.Minute)
		wantState(t, c, Up, OK)
		before := b.probes()
		for range 60 {
			c.Hear("x", Result{Verdict: Unknown, Reason: ProbeRejected})
			time.Sleep(time.Second)
		}
		if n := b.probes() - before; n < 5 {
			t.Errorf("%d probes in a minute in which another edge could not find out, want the 6 of every minute", n)
		}
		if s := c.Snapshot(); s.Last.Verdict != Ready {
			t.Errorf("Last = %s %s, want what this edge has found out itself", s.Last.Verdict, s.Last.Reason)
		}
	})
}

// Nor one that has just started, and does not serve before it knows something.
func TestHearNothingAtTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		leased := true
		c := b.idle(t, Schedule{NoWatch: true, Wait: true, Lease: func(bool) time.Duration {
			if leased {
				leased = false
				return 2 * time.Second
			}
			return 0
		}})
		c.Start()
		for range 5 {
			time.Sleep(time.Second)
			c.Hear("x", Result{Verdict: Unknown, Reason: ProbeRejected})
		}
		wantState(t, c, Up, OK)
	})
}

// What a probe and what another edge finds out at the same time is told one after the
// other, in order.
func TestChangesInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.idle(t, Schedule{NoWatch: true, Lease: func(bool) time.Duration { return time.Hour }})
		slow := make(chan struct{})
		var seen []State
		inside := 0
		c.OnChange(func(ch Change) {
			if inside++; inside > 1 {
				t.Errorf("told of %s while being told of another change", ch.To)
			}
			if ch.To == Up {
				<-slow
			}
			seen = append(seen, ch.To)
			inside--
		})
		c.Start()
		go c.Hear("x", Result{Verdict: Ready, Reason: OK})
		synctest.Wait()
		c.Hear("x", Result{Verdict: Dead, Reason: Refused})
		c.Hear("y", Result{Verdict: Dead, Reason: Refused})
		close(slow)
		synctest.Wait()
		if len(seen) != 2 || seen[0] != Up || seen[1] != Down {
			t.Errorf("told of %v, want up and then down", seen)
		}
	})
}

// A listener that panics keeps nobody from later news.
func TestChangesAfterAPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.idle(t, Schedule{NoWatch: true, Lease: func(bool) time.Duration { return time.Hour }})
		var seen []State
		c.OnChange(func(ch Change) {
			if seen = append(seen, ch.To); ch.To == Up {
				panic("oh")
			}
		})
		c.Start()
		func() {
			defer func() { _ = recover() }()
			c.Hear("x", Result{Verdict: Ready, Reason: OK})
		}()
		c.Hear("x", Result{Verdict: Dead, Reason: Refused})
		c.Hear("y", Result{Verdict: Dead, Reason: Refused})
		if len(seen) != 2 || seen[1] != Down {
			t.Errorf("told of %v, want up and then down", seen)
		}
	})
}

// What a server says of itself can be too long to be shared, but not what was found.
func TestShareIsReadable(t *testing.T) {
	p := &Prober{}
	long := strings.Repeat("<", 2*maxWord) // six bytes each, in JSON
	p.hear(ServerInfo{Name: long, Version: long}, []string{long, long, long, long, long, long, long, long, long, long, long, long})
	r, err := ReadShared(Result{Verdict: Ready, Reason: OK, Era: Modern, Detail: long, ProtocolVersions: p.spoken, Server: p.info}.Share())
	if err != nil || r.Verdict != Ready || r.Reason != OK || r.Era != Modern {
		t.Errorf("ReadShared = %s %s %s, %v, want ready ok modern", r.Verdict, r.Reason, r.Era, err)
	}
}

// A floor above the interval holds also where other edges tell, and after a Pause.
func TestFloorHolds(t *testing.T) {
	const floor = time.Minute
	for name, do := range map[string]func(*Checker){
		"Hear": func(c *Checker) { c.Hear("other", Result{Verdict: Ready, Reason: OK}) },
		"Start": func(c *Checker) {
			c.Pause()
			c.Start()
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := &bubble{mode: "modern"}
			c := b.checker(t, Schedule{Floor: floor, NoWatch: true})
			for i := range 20 {
				for b.probes() <= i {
					time.Sleep(time.Second)
				}
				do(c)
			}
			synctest.Wait()
			for i := 1; i < len(b.asked); i++ {
				if d := b.asked[i].Sub(b.asked[i-1]); d < floor {
					t.Fatalf("%s: probe %d %v after the one before, want at least %v", name, i, d, floor)
				}
			}
		})
	}
}
