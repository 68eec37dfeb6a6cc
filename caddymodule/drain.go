package caddymodule

import (
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// hintEvery is how often traffic may have a server asked whether it drains: 1 s, for
// a header that its answer to the probe does not carry.
const hintEvery = time.Second

// A drain is whether somebody said, by the admin API, that an upstream is to get no
// new work. It belongs to the pool's entry, and so survives reloads. What the server
// itself says of it the checker knows, as the reason draining.
type drain struct {
	since  atomic.Int64 // as clock says; 0: it does not drain
	hinted atomic.Int64 // when traffic last had the server asked
}

// everDrained: something has been drained in this process.
var everDrained atomic.Bool

// drainSince starts the drain, or ends it (0), and reports whether that changed
// anything.
func (e *entry) drainSince(ns int64) bool {
	if ns == 0 {
		if e.drain.since.Swap(0) == 0 {
			return false
		}
	} else if !e.drain.since.CompareAndSwap(0, ns) {
		return false
	}
	everDrained.Store(true)
	e.checker.Drain(ns != 0)
	return true
}

// drainingSince is since when the upstream drains, by whoever's word; zero: it does
// not.
func (e *entry) drainingSince() time.Time {
	if ns := e.drain.since.Load(); ns != 0 {
		return atClock(ns)
	}
	if e.checker.Tier() != mcphealth.TierDegraded {
		return time.Time{}
	}
	return e.checker.Snapshot().DrainingSince()
}

// drainSeen hears that an answer in traffic said that the server drains: a probe finds
// out at once, so that everybody knows it by the same word.
func (e *entry) drainSeen() {
	now, last := clock(), e.drain.hinted.Load()
	if e.checker.Tier() != mcphealth.TierUp || now-last < int64(hintEvery) {
		return
	}
	if e.drain.hinted.CompareAndSwap(last, now) {
		e.checker.Probe()
	}
}

// setDrain is what the admin API does: to the endpoint, however it is asked.
func (p *pool) setDrain(e *entry, on bool) {
	since, changed := int64(0), false
	if on {
		since = clock()
	}
	p.mu.Lock()
	for _, o := range p.entries {
		if o.network == e.network && o.address == e.address && o.path == e.path {
			changed = o.drainSince(since) || changed
		}
	}
	p.mu.Unlock()
	if !changed {
		return
	}
	observers.notify()
	message := "upstream drains"
	if !on {
		message = "upstream takes new work again"
	}
	caddy.Log().Named("mcp_health").Info(message, zap.String("upstream", e.upstream), zap.String("path", e.path))
}

// hearDrain takes the server's word that it drains out of an answer: it is meant for
// the edge.
func (t *transit) hearDrain() {
	values := t.Header()[mcphealth.DrainHeader]
	if len(values) == 0 {
		return
	}
	delete(t.Header(), mcphealth.DrainHeader)
	if m := t.picked.member; m != nil && m.entry != nil && values[0] == "1" {
		m.entry.drainSeen()
	}
}
