package serve

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// patience is how long a caller waits for a slow probe before it is told what the
	// one before found: 900 ms, less than the shortest timeout that health checks have
	// by default (1 s: Kubernetes).
	patience = 900 * time.Millisecond
	// deadFor is how long a dead server may be told dead while the next probe runs: 1
	// min, more than the period of any health check in use (Docker's is 30 s). One
	// that hangs for good must not have those wait who ask for all servers, each time.
	deadFor = time.Minute
	// maxRetryAfter caps how long a server may ask not to be probed.
	maxRetryAfter = 5 * time.Minute
	// endWithin is how long ending a session may take at a stop.
	endWithin = 2 * time.Second
)

// A cell keeps the last result of one target, and asks when somebody wants to know
// and it is too old. However many callers there are, one probe runs at a time: it
// belongs to the cell and not to the caller who began it, and another begins no
// sooner than keep after its end.
//
// While it runs, callers wait for it: for patience, where the last result may still
// be told, and else until its end.
type cell struct {
	ctx   context.Context
	ask   func(context.Context) mcphealth.Result
	end   func()        // ends what ask holds
	keep  time.Duration // how long a result is told without asking
	stale time.Duration // and how long at most, while a slow probe runs

	mu      sync.Mutex
	last    mcphealth.Result
	at      time.Time     // when last came; zero before the first
	next    time.Time     // not to be asked before
	running chan struct{} // closed when the probe ends; nil while none runs
}

func newCell(ctx context.Context, keep, stale time.Duration, url string) *cell {
	return &cell{ctx: ctx, keep: keep, stale: stale, last: mcphealth.Result{URL: url, Verdict: mcphealth.Unknown,
		Reason: mcphealth.NeverProbed, Detail: "no probe has ended yet", Era: mcphealth.EraUnknown}}
}

// begin starts a probe where one is due. wait is closed when the one that runs ends;
// nil, if none does. tellable: meanwhile the last result is still good for those who
// cannot wait.
func (c *cell) begin() (wait <-chan struct{}, tellable bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if c.ctx.Err() != nil || !c.at.IsZero() && now.Before(c.next) {
		return nil, true
	}
	if c.running == nil {
		c.running = make(chan struct{})
		go c.probe(c.running)
	}
	age := now.Sub(c.at)
	return c.running, !c.at.IsZero() && (age < c.stale || c.last.Verdict == mcphealth.Dead && age < deadFor)
}

func (c *cell) status() status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return status{last: c.last}
}

// probe asks once. A bug in it is a result like any other.
func (c *cell) probe(done chan struct{}) {
	r := mcphealth.Result{URL: c.last.URL, Verdict: mcphealth.Unknown, Reason: mcphealth.Canceled, Era: mcphealth.EraUnknown}
	defer func() {
		if v := recover(); v != nil {
			r.Detail = fmt.Sprintf("the probe itself failed, please report it: %v", v)
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.ctx.Err() == nil || c.at.IsZero() { // a canceled probe says nothing of the server
			c.last, c.at = r, time.Now()
		}
		c.next = time.Now().Add(c.keep)
		if r.Verdict == mcphealth.Degraded {
			c.next = time.Now().Add(max(c.keep, min(r.RetryAfter, maxRetryAfter)))
		}
		c.running = nil
		close(done)
	}()
	r = c.ask(c.ctx)
}

// close waits for the probe that runs, which the cell's context has ended, and ends
// the session. None begins another one after that.
func (c *cell) close() {
	c.mu.Lock()
	running := c.running
	c.mu.Unlock()
	if running != nil {
		<-running
	}
	c.end()
}
