package serve

import (
	"fmt"
	"math"
	"time"

	"github.com/mcphealth/mcphealth/internal/stdio"
	"github.com/mcphealth/mcphealth/mcphealth"
)

// The statuses of a document; the same words as those of package deephealth.
const (
	healthy   = "healthy"   // every check is ok
	degraded  = "degraded"  // some are not, and somebody may serve
	unhealthy = "unhealthy" // nobody can serve
)

// Document is what GET /health answers.
type Document struct {
	Status string           `json:"status"`
	Uptime float64          `json:"uptime"` // of serve, in seconds
	Checks map[string]Check `json:"checks"` // by target
}

// Check is one target.
type Check struct {
	// OK: the verdict is ready or alive.
	OK bool `json:"ok"`
	// LatencyMs is how long the answer that decided took; 0 if none came.
	LatencyMs float64 `json:"latencyMs"`
	// Error is "verdict (reason): one sentence", empty if OK. It holds no credentials.
	Error string `json:"error"`
	// State and Restarts are those of a command over stdio.
	State    stdio.State `json:"state,omitempty"`
	Restarts *int        `json:"restarts,omitempty"`
}

func check(s status) Check {
	r := s.last
	c := Check{OK: r.Verdict == mcphealth.Ready || r.Verdict == mcphealth.Alive, LatencyMs: r.LatencyMs}
	if !c.OK {
		c.Error = fmt.Sprintf("%s (%s): %s", r.Verdict, r.Reason, r.Detail)
	}
	if s.child == nil {
		return c
	}
	c.State, c.Restarts = s.child.State, &s.child.Restarts
	if c.State == stdio.Waiting {
		c.Error += fmt.Sprintf("; it is started again in %v", time.Until(s.child.Next).Round(time.Second))
	}
	return c
}

// document sums the statuses up. Only dead targets cannot serve: a probe that could
// not find out must take nobody out of service.
func document(up time.Duration, all map[string]status) Document {
	d := Document{Status: healthy, Uptime: math.Round(up.Seconds()*1000) / 1000, Checks: map[string]Check{}}
	serving := len(all) == 0
	for name, s := range all {
		c := check(s)
		d.Checks[name] = c
		serving = serving || s.last.Verdict != mcphealth.Dead
		if !c.OK {
			d.Status = degraded
		}
	}
	if !serving {
		d.Status = unhealthy
	}
	return d
}
