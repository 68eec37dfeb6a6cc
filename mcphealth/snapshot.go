//go:build go1.21

package mcphealth

import "time"

// Tier is how willingly the request path should choose an upstream: the lowest
// tier that any upstream has is the one to choose from.
type Tier int32

const (
	TierUp       Tier = iota // up, or not probed yet
	TierDegraded             // alive, but prefer another
	TierSuspect              // something just failed; the next probe decides
	TierDown                 // not to be chosen
)

// Change is one change of an upstream's state, or of the reason for it.
type Change struct {
	URL     string    `json:"url"`
	From    State     `json:"from"`
	To      State     `json:"to"`
	Verdict Verdict   `json:"verdict"`
	Reason  Reason    `json:"reason"`
	Detail  string    `json:"detail"`
	At      time.Time `json:"at"`
}

// Snapshot is all that is known of one upstream at one moment.
type Snapshot struct {
	URL   string `json:"url"`
	State State  `json:"state"`
	// Reason is why: that of the last verdict that voted, or of the last one at
	// all while none has.
	Reason Reason    `json:"reason"`
	Since  time.Time `json:"since"`
	// Last is the last probe's result; its Verdict is unknown, never_probed before
	// the first has ended.
	Last Result `json:"last"`
	// LastAt and Next are when the last probe began and the next is due.
	LastAt time.Time `json:"lastAt"`
	Next   time.Time `json:"next"`
	Probes uint64    `json:"probes"`
	// Changes are the last 20, oldest first.
	Changes []Change `json:"changes"`
}

// DrainingSince is since when the server says that it drains; zero: it does not.
func (s Snapshot) DrainingSince() time.Time {
	if s.Reason != Draining {
		return time.Time{}
	}
	since := s.Since
	for i := len(s.Changes) - 1; i >= 0; i-- {
		if s.Changes[i].Reason != Draining {
			break
		}
		since = s.Changes[i].At
	}
	return since
}

// maxChanges is how many changes a snapshot keeps.
const maxChanges = 20

// RetryAfter is what a client should be told to wait: until the next probe, at
// least a second.
func (s Snapshot) RetryAfter(now time.Time) time.Duration {
	if d := s.Next.Sub(now); d > time.Second {
		return d
	}
	return time.Second
}
