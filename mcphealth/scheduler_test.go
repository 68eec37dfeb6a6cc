package mcphealth

import (
	"container/heap"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// town is many upstreams behind one network that can be lost.
type town struct {
	mu    sync.Mutex
	lost  bool
	took  time.Duration // an answer
	asked []time.Time
	by    map[string][]time.Time
	busy  int // probes under way, and the most that ever were
	most  int
}

func (n *town) RoundTrip(r *http.Request) (*http.Response, error) {
	now := time.Now()
	n.mu.Lock()
	n.asked = append(n.asked, now)
	n.by[r.URL.Host] = append(n.by[r.URL.Host], now)
	n.busy++
	n.most = max(n.most, n.busy)
	lost, took := n.lost, n.took
	n.mu.Unlock()
	time.Sleep(took)
	defer func() {
		n.mu.Lock()
		n.busy--
		n.mu.Unlock()
	}()
	if lost {
		return nil, errors.New("dial tcp: connect: connection refused")
	}
	b, _ := io.ReadAll(r.Body)
	answer := fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`, parseMessageID(b))
	return &http.Response{StatusCode: 200, Proto: "HTTP/1.1", Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(answer)), Request: r}, nil
}

// parseMessageID is the id of a question of ours, as it stands there.
func parseMessageID(b []byte) string {
	_, rest, _ := strings.Cut(string(b), `"id":`)
	id, _, _ := strings.Cut(rest, ",")
	return id
}

func (n *town) set(f func()) {
	n.mu.Lock()
	f()
	n.mu.Unlock()
}

// forget drops what was recorded.
func (n *town) forget() {
	n.set(func() { n.asked, n.by, n.most = nil, map[string][]time.Time{}, n.busy })
}

// perSecond is the most probes that began within any second.
func (n *town) perSecond() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	most, from := 0, 0
	for i, at := range n.asked {
		for at.Sub(n.asked[from]) >= time.Second {
			from++
		}
		most = max(most, i-from+1)
	}
	return most
}

// populate starts size checkers that share a scheduler.
func (n *town) populate(t *testing.T, size int, s Schedule) []*Checker {
	t.Helper()
	n.by = map[string][]time.Time{}
	var all []*Checker
	for i := range size {
		p, err := NewProber(Target{URL: fmt.Sprintf("http://u%d.test/mcp", i)}, NewForeignLine(n))
		if err != nil {
			t.Fatal(err)
		}
		c, err := NewChecker(p, s)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		all = append(all, c)
	}
	for _, c := range all {
		c.Start()
	}
	return all
}

func count(all []*Checker, state State) int {
	n := 0
	for _, c := range all {
		if c.Snapshot().State == state {
			n++
		}
	}
	return n
}

// until sleeps until all are in that state, and returns how long that took.
func until(t *testing.T, all []*Checker, state State, limit time.Duration) time.Duration {
	t.Helper()
	start := time.Now()
	for count(all, state) < len(all) {
		if time.Since(start) > limit {
			t.Fatalf("after %v %d of %d are %s", limit, count(all, state), len(all), state)
		}
		time.Sleep(200 * time.Millisecond)
	}
	return time.Since(start)
}

// Ten thousand upstreams are lost and come back in one instant: never do more probes
// begin within a second than the ceiling allows, and nobody is asked again before those
// that wait longer were.
func TestAllLostAndBack(t *testing.T) {
	size, ceiling := 10_000, 2000
	if raceEnabled {
		size, ceiling = 1000, 200
	}
	synctest.Test(t, func(t *testing.T) {
		n := &town{took: time.Millisecond}
		s := NewScheduler(Limits{PerSecond: ceiling})
		all := n.populate(t, size, Schedule{Scheduler: s})
		round := time.Duration(size/ceiling) * time.Second * 10 / 9
		took := until(t, all, Up, round+time.Second)
		t.Logf("start: all up after %v", took)
		time.Sleep(10 * time.Second)
		if got := n.perSecond(); got > ceiling {
			t.Errorf("start: %d probes within a second, want at most %d", got, ceiling)
		}
		n.forget()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if got, want := len(n.asked), 2*size; got < want || got > want*11/10 {
			t.Errorf("steady: %d probes in 20 s, want %d, or up to a tenth more", got, want)
		}

		n.forget()
		n.set(func() { n.lost = true })
		for _, c := range all { // every watched connection ends
			c.bringForward(ending)
		}
		t.Logf("lost: all down after %v", until(t, all, Down, 3*round))
		time.Sleep(20 * time.Second)
		if got := n.perSecond(); got > ceiling {
			t.Errorf("lost: %d probes within a second, want at most %d", got, ceiling)
		}

		n.forget()
		n.set(func() { n.lost = false })
		for _, c := range all { // somebody waits for each
			c.Probe()
		}
		t.Logf("back: all up after %v", until(t, all, Up, round+time.Second))
		if got := n.perSecond(); got > ceiling {
			t.Errorf("back: %d probes within a second, want at most %d", got, ceiling)
		}
		synctest.Wait()
		for host, at := range n.by {
			if len(at) != 1 {
				t.Errorf("%s was asked %d times until all were up, want once", host, len(at))
				break
			}
		}
	})
}

// Probes that are due at nearly the same time begin together, and late by little.
func TestDueTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 1000
		n := &town{took: time.Millisecond}
		all := n.populate(t, size, Schedule{Scheduler: NewScheduler(Limits{})})
		time.Sleep(time.Minute)
		n.forget()
		due := all[0].Snapshot().Next
		time.Sleep(time.Minute)
		synctest.Wait()
		moments := map[time.Time]bool{}
		for _, at := range n.asked {
			moments[at] = true
		}
		if most := int(time.Minute/(10*time.Second/slack/2)) + 1; len(moments) > most {
			t.Errorf("%d probes began at %d moments of a minute, want at most %d", len(n.asked), len(moments), most)
		}
		if got, want := len(n.asked), 6*size; got < want || got > want*11/10 {
			t.Errorf("%d probes in a minute, want %d, or up to a tenth more", got, want)
		}
		if at := n.by["u0.test"][0]; !at.Equal(due) {
			t.Errorf("the first began %v after the snapshot's Next", at.Sub(due))
		}
	})
}

// Many edges lose one upstream in one instant. The longer it is away the less they ask
// in step, so that it does not come back to all of them at once.
func TestBackOffOutOfStep(t *testing.T) {
	edges := 1000
	if raceEnabled {
		edges = 200
	}
	synctest.Test(t, func(t *testing.T) {
		n := &town{}
		all := n.populate(t, edges, Schedule{}) // each with a scheduler of its own
		time.Sleep(time.Minute)
		n.set(func() { n.lost = true })
		for _, c := range all {
			c.bringForward(ending)
		}
		time.Sleep(20 * time.Second) // 1 + 1.5 + 2.25 + 3.4 + 5.1 s of pauses, or less
		n.forget()
		time.Sleep(20 * time.Second)
		if got := n.perSecond(); got > edges/2 {
			t.Errorf("%d of %d edges asked within one second, want them out of step", got, edges)
		}
		if got, want := len(n.asked), 2*edges; got < want || got > want*5/4 {
			t.Errorf("%d probes in 20 s, want %d, or up to a quarter more", got, want)
		}
	})
}

// A process that stood still, as a machine that was suspended, finds all probes due at
// once.
func TestAfterAStandstill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &town{took: time.Millisecond}
		s := NewScheduler(Limits{PerSecond: 100, AtOnce: 20})
		all := n.populate(t, 300, Schedule{Scheduler: s})
		until(t, all, Up, 10*time.Second)
		time.Sleep(time.Minute)
		n.forget()
		n.set(func() { n.took = time.Hour }) // the first of them hold all places, past their timeouts
		time.Sleep(30 * time.Second)
		n.set(func() { n.took = time.Millisecond })
		time.Sleep(10 * time.Minute)
		if n.most > 20 {
			t.Errorf("%d probes at once, want at most 20", n.most)
		}
		if got := n.perSecond(); got > 100 {
			t.Errorf("%d probes within a second, want at most 100", got)
		}
		if got := count(all, Up); got != len(all) {
			t.Errorf("%d of %d up, want all", got, len(all))
		}
	})
}

// A machine that was suspended, or whose clock was set forward, finds everything overdue
// at once: the ceiling holds, who was due first is asked first, and nobody twice before
// all others were once. Nothing goes down of it.
func TestClockJump(t *testing.T) {
	size, ceiling := 10_000, 2000
	if raceEnabled {
		size, ceiling = 1000, 200
	}
	synctest.Test(t, func(t *testing.T) {
		n := &town{took: time.Millisecond}
		s := NewScheduler(Limits{PerSecond: ceiling})
		all := n.populate(t, size, Schedule{Scheduler: s})
		time.Sleep(time.Minute)
		n.forget()
		now := time.Now()
		s.mu.Lock()
		var overdue []string // hosts, in the order of their turns
		for i, c := range all {
			if c.turn.at >= 0 { // not asked at this very moment
				c.turn.due = now.Add(-time.Hour + time.Duration(i)*time.Millisecond)
				overdue = append(overdue, fmt.Sprintf("u%d.test", i))
			}
		}
		heap.Init(&s.queue)
		s.arm()
		s.mu.Unlock()
		time.Sleep(time.Duration(size/ceiling)*time.Second*10/9 + 100*time.Millisecond)
		synctest.Wait()
		if got := n.perSecond(); got > ceiling {
			t.Errorf("%d probes within a second, want at most %d", got, ceiling)
		}
		var before time.Time
		for _, host := range overdue {
			at := n.by[host]
			if len(at) == 0 || at[0].Before(before) {
				t.Fatalf("%s was asked at %v, want once, and after the one that was due before it at %v", host, at, before)
			}
			if before = at[0]; len(at) > 1 && at[1].Sub(now) < time.Duration(size/ceiling)*time.Second {
				t.Fatalf("%s was asked at %v, want not twice before all others were", host, at)
			}
		}
		if got := count(all, Up); got != size {
			t.Errorf("%d of %d up, want all", got, size)
		}
	})
}

// Under a backlog an upstream that requests wait for does not stand in line, and
// cannot push itself before one that is late by more than an interval.
func TestWhoIsWaitedForComesFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &town{took: time.Millisecond}
		s := NewScheduler(Limits{PerSecond: 10})
		all := n.populate(t, 300, Schedule{Scheduler: s}) // 30 s and more for one round
		time.Sleep(time.Second)
		for _, c := range []*Checker{all[299], all[150]} {
			if c.Snapshot().Probes != 0 {
				t.Fatal("the last ones have been asked already: the ceiling does not hold")
			}
			c.bringForward(ending)
			time.Sleep(500 * time.Millisecond)
			if c.Snapshot().Probes != 0 {
				t.Error("one that nobody waits for was asked before its turn")
			}
			c.bringForward(failure)
			time.Sleep(500 * time.Millisecond)
			if c.Snapshot().Probes != 1 {
				t.Error("an upstream with a failed request was not asked within half a second")
			}
		}
		first := all[0]
		n.forget()
		for range 600 { // it fails on and on
			first.bringForward(failure)
			time.Sleep(100 * time.Millisecond)
		}
		waited := time.Duration(0)
		for _, c := range all {
			waited = max(waited, time.Since(c.Snapshot().LastAt))
		}
		if waited > 45*time.Second {
			t.Errorf("one upstream was not asked for %v, want about the 33 s that a round takes", waited)
		}
	})
}

// Under a floor, many edges together stay under what one upstream is to be asked, also
// when all of them notice its death in one instant.
func TestFloor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const edges, floor = 100, 20 * time.Second // 5 per second
		n := &town{by: map[string][]time.Time{}}
		var all []*Checker
		for range edges {
			p, err := NewProber(Target{URL: "http://u.test/mcp"}, NewForeignLine(n))
			if err != nil {
				t.Fatal(err)
			}
			c, err := NewChecker(p, Schedule{Floor: floor, Fall: 1})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
			c.Start()
			all = append(all, c)
		}
		check := func(when string) {
			t.Helper()
			if got := n.perSecond(); got > 16 { // 5 on average; each moment is a matter of chance
				t.Errorf("%s: %d probes within a second, want about 5", when, got)
			}
			for _, c := range all {
				if ago := time.Since(c.Snapshot().LastAt); ago > floor+time.Second {
					t.Errorf("%s: an edge last asked %v ago, want at most %v", when, ago, floor)
				}
			}
			n.forget()
		}
		time.Sleep(2 * time.Minute)
		check("steady")
		n.set(func() { n.lost = true })
		for _, c := range all {
			c.bringForward(ending)
			c.bringForward(failure)
		}
		until(t, all, Down, floor+time.Second)
		time.Sleep(2 * time.Minute)
		check("lost")
	})
}

// However long a wait is, its moment is found.
func TestTogetherInCenturies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		due := time.Now().Add(math.MaxInt64)
		if got := NewScheduler(Limits{}).together(due); got.Before(due) {
			t.Errorf("together(%v) = %v, want no earlier", due, got)
		}
	})
}
