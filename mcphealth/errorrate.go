//go:build go1.21

package mcphealth

import (
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// minErrors is how many errors within an interval are a burst: 10, so that a
	// client which calls a tool wrongly a few times degrades nothing.
	minErrors = 10
	// errorHold is for how many intervals a burst counts. A degraded upstream gets
	// no traffic by which it could prove itself, so it is tried again after that.
	errorHold = 2
	// maxRelapses is how many times as long a burst counts at most, if each tries again
	// what failed before: 10, as Envoy's max_ejection_time is to its base_ejection_time.
	maxRelapses = 10
	// maxEjected is how many of 100 peers may be second choice for their errors at
	// once, and at least one: Envoy's default for outlier detection
	// (max_ejection_percent, 10 %).
	maxEjected = 10
)

// errorRate counts what JSON-RPC answers inside traffic say: a server may fail
// every call and answer each with HTTP 200. Atomics only. Times are as Checker.clock
// says.
type errorRate struct {
	since     atomic.Int64 // begin of the window
	good, bad atomic.Int64 // answers in it
	burst     atomic.Int64 // a burst was seen that can be acted on until then
	until     atomic.Int64 // it makes the upstream second choice until then
	relapses  int64        // bursts in a row, that one included; guarded by Checker.mu
}

// add counts an answer that reports a failure, and reports whether a burst begins:
// more than the given share of at least minErrors answers within the window do.
func (e *errorRate) add(now int64, window time.Duration, share float64) bool {
	if now-e.since.Load() > int64(window) {
		e.since.Store(now)
		e.good.Store(0)
		e.bad.Store(0)
	}
	bad := e.bad.Add(1)
	if bad < minErrors || float64(bad) <= share*float64(bad+e.good.Load()) {
		return false
	}
	before := e.burst.Load()
	return now >= before && e.burst.CompareAndSwap(before, now+int64(window))
}

// eject makes the upstream second choice for hold, and for longer each time that it
// fails again before it did well for as long as it had been out: else it would fail
// its clients' calls, ten at a time, for as long as it is broken.
func (e *errorRate) eject(now, hold int64) {
	if now-e.until.Load() > e.relapses*hold {
		e.relapses = 0
	}
	if e.relapses < maxRelapses {
		e.relapses++
	}
	e.until.Store(now + e.relapses*hold)
}

// Served notes what the JSON-RPC answer to a request said in the end, besides that
// the server lives (Answered). erred: it was an internal error, or a failed tool call.
// With a Schedule that sets an ErrorRate, a burst of them makes the upstream degraded,
// never down, if it has Peers that are fine.
func (c *Checker) Served(erred bool) {
	if !erred {
		c.rate.good.Add(1)
		return
	}
	if c.sched.ErrorRate > 0 && c.rate.add(c.clock(), c.sched.Interval, c.sched.ErrorRate) {
		c.bringForward(failure)
	}
}

// outlier reports whether errors make the upstream second choice: still, or from now
// on. The caller holds c.mu.
func (c *Checker) outlier() bool {
	now := c.clock()
	if now < c.rate.until.Load() {
		return true
	}
	if now >= c.rate.burst.Load() {
		return false
	}
	for i := 0; i < len(c.peers); i++ {
		if c.peers[i].eject(c) {
			c.rate.eject(now, errorHold*int64(c.sched.Interval))
			return true
		}
	}
	return false
}

// errorDetail is what an outlier did, in a sentence.
func (c *Checker) errorDetail() string {
	bad := c.rate.bad.Load()
	return fmt.Sprintf("%d of %d calls within %v failed inside HTTP 200 (internal errors, failed tool calls), while other upstreams answer well",
		bad, bad+c.rate.good.Load(), c.sched.Interval)
}

// wellServed reports whether clients got answers lately, and hardly any of them
// reported a failure.
func (c *Checker) wellServed(share float64) bool {
	now := c.clock()
	window := int64(c.sched.Interval)
	last := c.lastRPC.Load()
	if last == 0 || now-last > errorHold*window || c.Tier() != TierUp {
		return false
	}
	if now-c.rate.since.Load() > window {
		return true // no error within the window
	}
	bad := float64(c.rate.bad.Load())
	return bad <= share/2*(bad+float64(c.rate.good.Load()))
}

// Peers are upstreams that serve the same requests: what clients do wrong shows at
// all of them, and what one does wrong at that one.
type Peers struct {
	mu   sync.Mutex
	all  map[int]*Checker
	next int
	out  map[int]bool // were ejected; whether they still are, their checkers know
}

// NewPeers makes an empty set.
func NewPeers() *Peers { return &Peers{all: map[int]*Checker{}, out: map[int]bool{}} }

// Join makes c one of the peers, until leave is called.
func (p *Peers) Join(c *Checker) (leave func()) {
	p.mu.Lock()
	id := p.next
	p.next++
	p.all[id] = c
	p.mu.Unlock()
	c.mu.Lock()
	c.peers = append(c.peers, p)
	c.mu.Unlock()
	return func() {
		c.mu.Lock()
		var rest []*Peers
		for i := 0; i < len(c.peers); i++ {
			if c.peers[i] != p {
				rest = append(rest, c.peers[i])
			}
		}
		c.peers = rest
		c.mu.Unlock()
		p.mu.Lock()
		delete(p.all, id)
		delete(p.out, id)
		p.mu.Unlock()
	}
}

// eject reports whether c may be second choice for its errors: a peer is fine, and
// not too many are out already.
func (p *Peers) eject(c *Checker) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	most := len(p.all) * maxEjected / 100
	if most < 1 {
		most = 1
	}
	out := 0
	self := -1
	fine := false
	for id, o := range p.all {
		switch {
		case o == c:
			self = id
		case p.out[id] && o.clock() < o.rate.until.Load():
			out++
		default:
			delete(p.out, id)
			fine = fine || o.wellServed(c.sched.ErrorRate)
		}
	}
	if !fine || out >= most || self < 0 {
		return false
	}
	p.out[self] = true
	return true
}
