package main

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	interval = 10 * time.Second
	latency  = 2 * time.Millisecond // of an answer

	// As caddymodule/share.go has them.
	leased     = interval + interval/5
	alarmLease = time.Second

	// What mcphealth.Limits has by default.
	leastCeiling = 1000
	atOnce       = 512

	// standIns is how many upstreams stand for many: 20, the fewest whose part of the
	// ceiling is still more than they ask for.
	standIns = 20
	// losses is how many upstreams are lost at once: of many one in ten.
	losses = 5

	// callEach is how often an edge has a call for an upstream, if there is traffic:
	// more would change nothing.
	callEach = 4 * time.Second
)

// upstream is what all edges see of one server.
type upstream struct {
	asked  atomic.Int64
	absent atomic.Bool // answers a bare 404, of which no connection tells

	mu     sync.Mutex
	starts []time.Time // of probes, if they are to be kept
	keep   bool

	regular, alarm lease // of the store
}

// lease is the right to probe, as a store keeps it.
type lease struct {
	mu     sync.Mutex
	holder int
	until  time.Time
}

// RoundTrip answers as a server of 2026-07-28 does.
func (u *upstream) RoundTrip(r *http.Request) (*http.Response, error) {
	u.asked.Add(1)
	u.note()
	time.Sleep(latency)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	status, kind, answer := http.StatusNotFound, "text/plain", "404 page not found"
	if !u.absent.Load() {
		_, rest, _ := strings.Cut(string(body), `"id":`)
		id, _, _ := strings.Cut(rest, ",")
		status, kind = http.StatusOK, "application/json"
		answer = `{"jsonrpc":"2.0","id":` + id + `,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`
	}
	return &http.Response{StatusCode: status, Proto: "HTTP/1.1", Header: http.Header{"Content-Type": {kind}},
		Body: io.NopCloser(strings.NewReader(answer)), Request: r}, nil
}

// note keeps the moment at which a probe began.
func (u *upstream) note() {
	if u.keep {
		u.mu.Lock()
		u.starts = append(u.starts, time.Now())
		u.mu.Unlock()
	}
}

// take is 0 for the edge that has the lease now, and how long others have to wait.
func (l *lease) take(edge int, length time.Duration) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if left := l.until.Sub(now); left > 0 && l.holder != edge {
		return left + left/10
	}
	l.holder, l.until = edge, now.Add(length)
	return 0
}

// newChecker checks what is at url, at the end of way.
func newChecker(url string, way http.RoundTripper, s mcphealth.Schedule) *mcphealth.Checker {
	p, err := mcphealth.NewProber(mcphealth.Target{URL: url}, mcphealth.NewForeignLine(way))
	if err != nil {
		panic(err)
	}
	c, err := mcphealth.NewChecker(p, s)
	if err != nil {
		panic(err)
	}
	return c
}

// observed is what a fleet showed.
type observed struct {
	setting   setting
	edges     int
	perSecond float64 // probes of one upstream
	half, all time.Duration
	disagree  time.Duration // from the first edge that knew to the last
	back      time.Duration // until all knew that it was back
}

// watchFleet runs a fleet of edges in steady state, and then takes the route to each
// upstream away. Of many upstreams it runs a few, each edge with as much of the ceiling
// and of the places for probes as is their part, rounded down.
func watchFleet(s setting, edges, upstreams int) observed {
	o := observed{setting: s, edges: edges}
	sample := max(1, min(5, 300/edges)) // upstreams that stand for all
	if upstreams > 0 {
		sample = min(standIns, upstreams)
	}
	schedulers := make([]*mcphealth.Scheduler, edges)
	for e := range edges {
		schedulers[e] = mcphealth.NewScheduler(partOf(sample, upstreams))
	}
	var ups []*upstream
	checkers := make([][]*mcphealth.Checker, sample) // by upstream
	for i := range sample {
		u := new(upstream)
		ups = append(ups, u)
		for e := range edges {
			sched := schedule(s, u, e, edges, schedulers[e])
			if s.share {
				sched.Tell = tellAll(&checkers[i], e)
			}
			checkers[i] = append(checkers[i], newChecker("http://upstream.test/mcp", u, sched))
		}
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i, all := range checkers {
		for e, c := range all {
			wg.Go(func() {
				sleepOr(stop, interval*time.Duration(e)/time.Duration(edges)) // edges were not started together
				c.Start()
				for s.traffic && sleepOr(stop, callEach) {
					c.Sent()
					if ups[i].absent.Load() {
						c.Settled()
					} else {
						c.Answered("")
					}
				}
			})
		}
	}
	floor := s.floor(edges)
	time.Sleep(max(time.Minute, 2*floor)) // by then every edge has asked, and again
	before := make([]int64, sample)
	for i, u := range ups {
		before[i] = u.asked.Load()
	}
	watched := max(2*time.Minute, floor)
	if s.traffic {
		watched = max(watched, 10*time.Minute) // that they ask once in a minute is to be seen
	}
	time.Sleep(watched)
	for i, u := range ups {
		o.perSecond += float64(u.asked.Load()-before[i]) / watched.Seconds() / float64(sample)
	}
	gone := min(sample, losses)
	if upstreams > 0 {
		gone = max(1, sample/10)
	}
	var mu sync.Mutex
	var lost sync.WaitGroup
	for i, u := range ups[:gone] {
		lost.Go(func() {
			half, all, disagree := change(u, checkers[i], true)
			time.Sleep(time.Minute + floor)
			_, back, _ := change(u, checkers[i], false)
			mu.Lock()
			defer mu.Unlock()
			n := time.Duration(gone)
			o.half, o.all, o.disagree, o.back = o.half+half/n, o.all+all/n, o.disagree+disagree/n, o.back+back/n
		})
	}
	lost.Wait()
	close(stop)
	for _, all := range checkers {
		for _, c := range all {
			_ = c.Close()
		}
	}
	wg.Wait()
	return o
}

// partOf is the limits of an edge with that many upstreams, for a sample of them.
func partOf(sample, upstreams int) mcphealth.Limits {
	if upstreams == 0 {
		return mcphealth.Limits{}
	}
	ceiling := max(leastCeiling, 2*upstreams/int(interval.Seconds()))
	return mcphealth.Limits{PerSecond: max(1, ceiling*sample/upstreams), AtOnce: max(1, atOnce*sample/upstreams)}
}

func schedule(s setting, u *upstream, edge, edges int, scheduler *mcphealth.Scheduler) mcphealth.Schedule {
	sched := mcphealth.Schedule{Interval: interval, Floor: s.floor(edges), Scheduler: scheduler}
	if s.share {
		sched.Lease = func(urgent bool) time.Duration {
			if urgent {
				return u.alarm.take(edge, alarmLease)
			}
			return u.regular.take(edge, leased)
		}
	}
	return sched
}

// tellAll has all but edge hear what edge finds out.
func tellAll(all *[]*mcphealth.Checker, edge int) func(mcphealth.Result) {
	from := fmt.Sprint(edge)
	return func(r mcphealth.Result) {
		heard, err := mcphealth.ReadShared(r.Share())
		if err != nil {
			panic(err)
		}
		for i, c := range *all {
			if i != edge {
				c.Hear(from, heard)
			}
		}
	}
}

// sleepOr sleeps, and reports false if stop was closed meanwhile.
func sleepOr(stop chan struct{}, d time.Duration) bool {
	select {
	case <-stop:
		return false
	case <-time.After(d):
		return true
	}
}

// change takes the route to u away, or brings it back, and measures when edges know.
func change(u *upstream, all []*mcphealth.Checker, absent bool) (half, last, disagree time.Duration) {
	start := time.Now()
	var mu sync.Mutex
	var at []time.Duration
	done := make(chan struct{})
	for _, c := range all {
		var once sync.Once
		cancel := c.OnChange(func(ch mcphealth.Change) {
			if (ch.To == mcphealth.Down) == absent && ch.To != ch.From {
				once.Do(func() {
					mu.Lock()
					defer mu.Unlock()
					if at = append(at, time.Since(start)); len(at) == len(all) {
						close(done)
					}
				})
			}
		})
		defer cancel()
	}
	u.absent.Store(absent)
	select {
	case <-done:
	case <-time.After(24 * time.Hour):
		panic(fmt.Sprintf("after a day %d of %d edges know", len(at), len(all)))
	}
	slices.Sort(at)
	return at[len(at)/2], at[len(at)-1], at[len(at)-1] - at[0]
}

// storm is what one edge does when all of its upstreams go and come back at once.
type storm struct {
	upstreams int
	steady    float64 // probes per second
	down      time.Duration
	half, up  time.Duration // back, and nobody waits
	awaited   time.Duration // back, and a call waits for each
	most      int           // probes in any second
}

// errLost is a network that is not there.
var errLost = errors.New("dial tcp: connect: network is unreachable")

type cable struct {
	*upstream
	cut *atomic.Bool
}

// RoundTrip goes through the cable, if it is not cut.
func (c cable) RoundTrip(r *http.Request) (*http.Response, error) {
	if c.cut.Load() {
		c.note()
		return nil, errLost
	}
	return c.upstream.RoundTrip(r)
}

func watchStorm(n int) storm {
	s := storm{upstreams: n}
	net := cable{&upstream{keep: true}, new(atomic.Bool)}
	scheduler := mcphealth.NewScheduler(mcphealth.Limits{})
	var all []*mcphealth.Checker
	for i := range n {
		c := newChecker(fmt.Sprintf("http://u%d.test/mcp", i), net, mcphealth.Schedule{Interval: interval, Scheduler: scheduler})
		all = append(all, c)
		c.Start()
	}
	time.Sleep(30 * time.Second)
	before := net.asked.Load()
	time.Sleep(20 * time.Second)
	s.steady = float64(net.asked.Load()-before) / 20

	lose := func() {
		net.cut.Store(true)
		for _, c := range all { // every watched connection has ended
			c.Probe()
		}
		s.down = until(all, n, mcphealth.Down)
		time.Sleep(20 * time.Second)
		net.cut.Store(false)
	}
	lose()
	s.half = until(all, (n+1)/2, mcphealth.Up)
	s.up = s.half + until(all, n, mcphealth.Up)
	time.Sleep(time.Minute)
	lose()
	for _, c := range all { // each held call asks
		c.Probe()
	}
	s.awaited = until(all, n, mcphealth.Up)
	for _, c := range all {
		_ = c.Close()
	}
	net.mu.Lock()
	defer net.mu.Unlock()
	slices.SortFunc(net.starts, time.Time.Compare)
	for i, from := 0, 0; i < len(net.starts); i++ {
		for net.starts[i].Sub(net.starts[from]) >= time.Second {
			from++
		}
		s.most = max(s.most, i-from+1)
	}
	return s
}

// partition is what a fleet that shares does when some of its edges are cut off from the
// upstream.
type partition struct {
	setting    setting
	edges, cut int
	see, blind int     // the most moves down or up of an edge that sees it, and of one that does not
	wrong      int     // edges that do not know what they could see, half a minute after
	perSecond  float64 // probes that the upstream gets, meanwhile
}

// watchPartition cuts edges off for ten minutes. All have calls, where they are up.
func watchPartition(s setting, edges, cut int) partition {
	o := partition{setting: s, edges: edges, cut: cut}
	u, lost := new(upstream), new(atomic.Bool)
	var all []*mcphealth.Checker
	moves := make([]atomic.Int64, edges)
	for e := range edges {
		sched := schedule(s, u, e, edges, nil)
		sched.Tell = tellAll(&all, e)
		var way http.RoundTripper = u
		if e < cut {
			way = cable{u, lost}
		}
		c := newChecker("http://upstream.test/mcp", way, sched)
		c.OnChange(func(ch mcphealth.Change) {
			if (ch.From == mcphealth.Down) != (ch.To == mcphealth.Down) {
				moves[e].Add(1)
			}
		})
		all = append(all, c)
	}
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for e, c := range all {
		wg.Go(func() {
			sleepOr(stop, interval*time.Duration(e)/time.Duration(edges))
			c.Start()
			for sleepOr(stop, callEach) {
				switch {
				case c.Tier() == mcphealth.TierDown: // other upstreams get the call
				case e < cut && lost.Load():
					c.Sent()
					c.Failed()
				default:
					c.Sent()
					c.Answered("")
				}
			}
		})
	}
	time.Sleep(time.Minute)
	lost.Store(true)
	time.Sleep(30 * time.Second)
	for e, c := range all {
		if down := c.Snapshot().State == mcphealth.Down; down != (e < cut) {
			o.wrong++
		}
	}
	const watched = 10 * time.Minute
	before := u.asked.Load()
	time.Sleep(watched)
	o.perSecond = float64(u.asked.Load()-before) / watched.Seconds()
	lost.Store(false)
	time.Sleep(time.Minute)
	close(stop)
	for e, c := range all {
		_ = c.Close()
		if n := int(moves[e].Load()); e < cut {
			o.blind = max(o.blind, n)
		} else {
			o.see = max(o.see, n)
		}
	}
	wg.Wait()
	return o
}

// until waits until that many are in a state.
func until(all []*mcphealth.Checker, many int, state mcphealth.State) time.Duration {
	start := time.Now()
	for {
		in := 0
		for _, c := range all {
			if c.Snapshot().State == state {
				in++
			}
		}
		if in >= many {
			return time.Since(start)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
