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
	leased   = interval + interval/5

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

	lease struct { // of the store
		sync.Mutex
		holder int
		until  time.Time
	}
}

// RoundTrip answers as a server of 2026-07-28 does.
func (u *upstream) RoundTrip(r *http.Request) (*http.Response, error) {
	u.asked.Add(1)
	u.mu.Lock()
	if u.keep {
		u.starts = append(u.starts, time.Now())
	}
	u.mu.Unlock()
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

// permit is the lease as a store keeps it.
func (u *upstream) permit(edge int) time.Duration {
	u.lease.Lock()
	defer u.lease.Unlock()
	now := time.Now()
	if left := u.lease.until.Sub(now); left > 0 && u.lease.holder != edge {
		return left + left/10
	}
	u.lease.holder, u.lease.until = edge, now.Add(leased)
	return 0
}

// checker is edge's checker of u.
func (u *upstream) checker(s mcphealth.Schedule) *mcphealth.Checker {
	p, err := mcphealth.NewProber(mcphealth.Target{URL: "http://upstream.test/mcp"}, mcphealth.NewForeignLine(u))
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
}

// watchFleet runs a fleet of edges in steady state, and then takes the route to each
// upstream away.
func watchFleet(s setting, edges int) observed {
	o := observed{setting: s, edges: edges}
	sample := max(1, min(5, 300/edges)) // upstreams that stand for all
	var ups []*upstream
	checkers := make([][]*mcphealth.Checker, sample) // by upstream
	for i := range sample {
		u := new(upstream)
		ups = append(ups, u)
		for e := range edges {
			checkers[i] = append(checkers[i], u.checker(schedule(s, u, e, edges)))
		}
		if s.share {
			tellEachOther(checkers[i])
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
	time.Sleep(time.Minute)
	before := make([]int64, sample)
	for i, u := range ups {
		before[i] = u.asked.Load()
	}
	const watched = 2 * time.Minute
	time.Sleep(watched)
	for i, u := range ups {
		o.perSecond += float64(u.asked.Load()-before[i]) / watched.Seconds() / float64(sample)
	}
	for i, u := range ups {
		half, all, disagree := lose(u, checkers[i])
		n := time.Duration(sample)
		o.half, o.all, o.disagree = o.half+half/n, o.all+all/n, o.disagree+disagree/n
	}
	close(stop)
	for _, all := range checkers {
		for _, c := range all {
			_ = c.Close()
		}
	}
	wg.Wait()
	return o
}

func schedule(s setting, u *upstream, edge, edges int) mcphealth.Schedule {
	sched := mcphealth.Schedule{Interval: interval}
	if s.budget > 0 {
		sched.Floor = time.Duration(float64(edges) / s.budget * float64(time.Second))
	}
	if s.share {
		sched.Lease = func(urgent bool) time.Duration {
			if urgent {
				return 0
			}
			return u.permit(edge)
		}
	}
	return sched
}

// tellEachOther has each hear what one of them finds out.
func tellEachOther(all []*mcphealth.Checker) {
	for i, c := range all {
		c.OnResult(func(r mcphealth.Result) {
			heard, err := mcphealth.ReadShared(r.Share())
			if err != nil {
				panic(err)
			}
			for j, o := range all {
				if j != i {
					o.Hear(heard)
				}
			}
		})
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

// lose takes the route to u away and measures when edges know.
func lose(u *upstream, all []*mcphealth.Checker) (half, last, disagree time.Duration) {
	start := time.Now()
	var mu sync.Mutex
	var at []time.Duration
	done := make(chan struct{})
	for _, c := range all {
		c.OnChange(func(ch mcphealth.Change) {
			if ch.To == mcphealth.Down && ch.From != mcphealth.Down {
				mu.Lock()
				defer mu.Unlock()
				if at = append(at, time.Since(start)); len(at) == len(all) {
					close(done)
				}
			}
		})
	}
	u.absent.Store(true)
	<-done
	slices.Sort(at)
	return at[len(at)/2], at[len(at)-1], at[len(at)-1] - at[0]
}

// storm is what one edge does when all of its upstreams go and come back at once.
type storm struct {
	upstreams int
	steady    float64 // probes per second
	down, up  time.Duration
	most      int // probes in any second
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
		c.mu.Lock()
		c.starts = append(c.starts, time.Now())
		c.mu.Unlock()
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
		p, err := mcphealth.NewProber(mcphealth.Target{URL: fmt.Sprintf("http://u%d.test/mcp", i)}, mcphealth.NewForeignLine(net))
		if err != nil {
			panic(err)
		}
		c, err := mcphealth.NewChecker(p, mcphealth.Schedule{Interval: interval, Scheduler: scheduler})
		if err != nil {
			panic(err)
		}
		all = append(all, c)
		c.Start()
	}
	time.Sleep(30 * time.Second)
	before := net.asked.Load()
	time.Sleep(20 * time.Second)
	s.steady = float64(net.asked.Load()-before) / 20

	net.cut.Store(true)
	for _, c := range all { // every watched connection has ended
		c.Probe()
	}
	s.down = until(all, mcphealth.Down)
	time.Sleep(20 * time.Second)
	net.cut.Store(false)
	s.up = until(all, mcphealth.Up)
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

// until waits until all are in a state.
func until(all []*mcphealth.Checker, state mcphealth.State) time.Duration {
	start := time.Now()
	for _, c := range all {
		for c.Snapshot().State != state {
			time.Sleep(10 * time.Millisecond)
		}
	}
	return time.Since(start)
}
