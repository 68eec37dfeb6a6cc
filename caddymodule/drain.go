package caddymodule

import (
	"sync/atomic"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// A drain is whether an upstream is to get no new work, and since when: because the
// admin API or the server itself said so. It belongs to the pool's entry, and so
// survives reloads.
type drain struct {
	since atomic.Int64 // Unix nanoseconds; 0: it does not drain
}

// tier is how willingly the upstream should be chosen for new work. One that drains
// is second choice.
func (e *entry) tier() mcphealth.Tier {
	tier := e.checker.Tier()
	if tier == mcphealth.TierUp && e.drain.since.Load() != 0 {
		return mcphealth.TierDegraded
	}
	return tier
}

// drainingSince is since when the upstream drains, by whatever source; zero: it does
// not.
func (e *entry) drainingSince() time.Time {
	if ns := e.drain.since.Load(); ns != 0 {
		return time.Unix(0, ns)
	}
	if e.checker.Tier() != mcphealth.TierDegraded {
		return time.Time{}
	}
	if s := e.checker.Snapshot(); s.Reason == mcphealth.Draining {
		return s.Since
	}
	return time.Time{}
}
