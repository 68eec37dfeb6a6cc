//go:build go1.21

package mcphealth

import "time"

// Sent notes that a request went out to the upstream. Each is followed by one of
// Answered, Settled and Failed. If nothing comes back to any of them for the fast
// interval, the upstream is asked at once; if nothing comes back to that either for
// another one, others are preferred until the probe ends.
func (c *Checker) Sent() {
	c.waiting.Add(1)
	if c.watching.Load() || !c.watching.CompareAndSwap(false, true) {
		return
	}
	since := c.clock()
	time.AfterFunc(c.sched.Fast, func() { c.listen(since) })
}

// listen is the end of one fast interval with requests under way.
func (c *Checker) listen(since int64) {
	c.watching.Store(false)
	if c.waiting.Load() <= 0 || c.isClosed() {
		return
	}
	if c.silentSince(since) {
		c.bringForward(silence)
		time.AfterFunc(c.sched.Fast, func() { c.listenOn(since) })
		return
	}
	if c.watching.CompareAndSwap(false, true) {
		now := c.clock()
		time.AfterFunc(c.sched.Fast, func() { c.listen(now) })
	}
}

// listenOn is the end of a second one, in which a probe was under way as well. One that
// had to wait for its turn proves nothing yet.
func (c *Checker) listenOn(since int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	asking := !c.asked.IsZero() && time.Since(c.asked) >= c.sched.Fast/2
	if asking && c.waiting.Load() > 0 && c.silentSince(since) {
		c.suspect()
	}
}

// silentSince reports whether neither a request nor a probe has ended since then.
func (c *Checker) silentSince(since int64) bool {
	return c.lastSign.Load() < since && int64(c.Snapshot().LastAt.Sub(c.born)) < since
}

// Answered notes that a real JSON-RPC answer came back to a request that carried
// this Host: it proves life as well as a probe does.
func (c *Checker) Answered(host string) {
	now := c.clock()
	c.lastSign.Store(now)
	c.lastRPC.Store(now)
	c.waiting.Add(-1)
	c.p.LearnHost(host)
}

// Settled notes that a request ended in some other way that says nothing of the
// upstream: a page, a client that left.
func (c *Checker) Settled() {
	c.lastSign.Store(c.clock())
	c.waiting.Add(-1)
}

// Doubted notes, besides Settled, that the answer was one that no MCP server gives to a
// call: a web page, a bare 404. It is no vote, for it may be about one request alone: the
// upstream is asked at once, and if that was a false alarm, not again for it within an
// interval.
func (c *Checker) Doubted() {
	now, last := c.clock(), c.lastDoubt.Load()
	if last > 0 && now-last < int64(c.sched.Fast) || !c.lastDoubt.CompareAndSwap(last, now) {
		return // others have said so: no request waits for the lock because of them
	}
	c.bringForward(strange)
}

// Failed notes that a live request did not reach the upstream or got no answer.
// It is no vote: others are preferred, and a probe decides, at once.
func (c *Checker) Failed() {
	c.waiting.Add(-1)
	c.suspect()
	c.bringForward(failure)
}

// suspect has others preferred until the next result.
func (c *Checker) suspect() {
	t := c.tier.Load()
	if t == int32(TierUp) || t == int32(TierDegraded) {
		c.tier.CompareAndSwap(t, int32(TierSuspect))
	}
}

// clock is the time since the checker was made, in nanoseconds: it does not jump
// when somebody sets the machine's clock.
func (c *Checker) clock() int64 { return int64(time.Since(c.born)) }

// trafficProves reports whether the coming probe can be left out: a real answer
// passed within the last interval, the upstream is up, nothing deeper is asked
// of it, and it was probed not too long ago.
func (c *Checker) trafficProves() bool {
	t := c.p.target
	if c.sched.NoTraffic || time.Since(c.last) >= maxQuiet*c.sched.Interval-c.sched.Interval/2 || c.threshold.state != Up || c.Tier() != TierUp {
		return false
	}
	if len(t.ExpectTools) > 0 || t.CallTool != "" || t.HealthPath != "" || t.Fresh || t.RequireAuth || t.SlowAfter > 0 {
		return false
	}
	last := c.lastRPC.Load()
	return last > 0 && c.clock()-last < int64(c.sched.Interval)
}
