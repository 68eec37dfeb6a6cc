//go:build go1.21

package mcphealth

import (
	"sync"
	"sync/atomic"
	"time"
)

// maxAbsentees is how many owners may be missing at once: 10,000, the largest fleet.
const maxAbsentees = 10_000

// Absentees are owners of sessions that no list of upstreams has, and since when. The
// zero value is ready; it must not be copied.
type Absentees struct {
	n  atomic.Int32
	mu sync.RWMutex
	at map[Owner]time.Time
}

// Since is when the owner was first found missing: now, if it was not. With 10,000 of
// them all begin anew.
func (a *Absentees) Since(o Owner) time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	since, ok := a.at[o]
	if !ok {
		if a.at == nil || len(a.at) >= maxAbsentees {
			a.at = map[Owner]time.Time{}
		}
		since = time.Now()
		a.at[o] = since
		a.n.Store(int32(len(a.at)))
	}
	return since
}

// Found says that the owner is there. It takes no lock while nobody is missing.
func (a *Absentees) Found(o Owner) {
	if a.n.Load() == 0 {
		return
	}
	a.mu.RLock()
	_, missed := a.at[o]
	a.mu.RUnlock()
	if !missed {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.at, o)
	a.n.Store(int32(len(a.at)))
}

// Len is how many owners are missing.
func (a *Absentees) Len() int { return int(a.n.Load()) }
