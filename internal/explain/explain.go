// Package explain shows, side by side, what the health checks that people usually
// configure conclude about an MCP server, what our own probe concludes, and why
// they differ.
package explain

import (
	"context"
	"net/http"
	"sync"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// Report is what all of them found. It is also the JSON document of the command.
type Report struct {
	URL string `json:"url"`
	// Checks are what others would conclude.
	Checks []Check `json:"checks"`
	// MCPHealth is our own probe, as `mcphealth probe --json` prints it.
	MCPHealth mcphealth.Result `json:"mcphealth"`
	// Meaning and Advice are for a person: what our reason says, and what to do.
	Meaning string `json:"meaning"`
	Advice  string `json:"advice"`
}

// Check is one naive check and what it found.
type Check struct {
	Check string `json:"check"` // get, ping, initialize or any_2xx
	Rule  string `json:"rule"`  // what it does, and what it takes for up
	// Got is what came, in a few words.
	Got        string  `json:"got"`
	HTTPStatus int     `json:"httpStatus"`
	RPCCode    int     `json:"rpcCode"`
	Ms         float64 `json:"ms"`
	// Concludes is "up", "down", or "not asked".
	Concludes string `json:"concludes"`
	// Wrong: it says up of a server that our probe calls dead, or down of another.
	Wrong bool `json:"wrong"`
	// Why says why it is wrong or was not asked, or what else to try; mostly "".
	Why string `json:"why"`
}

// The conclusions of a check.
const (
	up       = "up"
	down     = "down"
	notAsked = "not asked"
)

// Target is the server and how it is reached.
type Target struct {
	mcphealth.Target
	// Transport makes a transport that nobody else uses.
	Transport func() *http.Transport
}

// Run asks with our own probe first, then with all the others at once. It ends
// every session and stream that it opened, and takes three times the target's
// timeout at most.
func Run(ctx context.Context, t Target) (Report, error) {
	p, err := mcphealth.NewProber(t.Target, mcphealth.NewLine(t.Transport()))
	if err != nil {
		return Report{}, err
	}
	t.Target = p.Target()
	ours := p.Probe(ctx)
	ours.SessionClosed = p.Close(ctx)
	r := Report{URL: t.URL, MCPHealth: ours, Checks: make([]Check, len(checks))}
	r.Meaning, r.Advice = Words(ours.Reason)
	var all sync.WaitGroup
	for i, c := range checks {
		if why := untouchable(c, ours); why != "" {
			r.Checks[i] = Check{Check: c.name, Rule: c.rule, Got: "-", Concludes: notAsked, Why: why}
			continue
		}
		all.Add(1)
		go func() {
			defer all.Done()
			r.Checks[i] = c.run(ctx, t, ours)
		}()
	}
	all.Wait()
	return r, nil
}

// untouchable says why a check must not be made: it would hurt.
func untouchable(c check, ours mcphealth.Result) string {
	if ours.Reason == mcphealth.RateLimited {
		return "The server asks to be left alone for a while (429); asking four times more would be rude."
	}
	if c.name == "initialize" && leftAlone(ours) {
		return "This server has one session for all its clients. Who initializes it takes it away from them, and who then ends the session ends the server's service for good. The probe has left it alone, and so does this."
	}
	return ""
}

// leftAlone: our probe found a legacy server alive and did not initialize it, which
// it does to every other one that does not answer a ping.
func leftAlone(r mcphealth.Result) bool {
	if r.Verdict != mcphealth.Alive || r.Era != mcphealth.Legacy {
		return false
	}
	for _, s := range r.Steps {
		if s.Step == "initialize" {
			return false
		}
	}
	return true
}

// run makes one check within the target's timeout.
func (c check) run(ctx context.Context, t Target, ours mcphealth.Result) Check {
	ctx, cancel := context.WithTimeout(ctx, t.Timeout)
	defer cancel()
	start := time.Now()
	o := c.ask(ctx, t)
	took := time.Since(start)
	k := Check{Check: c.name, Rule: c.rule, Got: o.String(), HTTPStatus: o.status, RPCCode: o.code,
		Ms: float64(took.Microseconds()) / 1000, Concludes: down}
	if c.up(o) {
		k.Concludes = up
	}
	vote := ours.Verdict.Vote()
	k.Wrong = vote > 0 && k.Concludes == down || vote < 0 && k.Concludes == up
	switch {
	case k.Wrong:
		k.Why = why(c, o)
	case o.open && k.Concludes == up:
		k.Why = "The answer came, and the stream stays open. A check that waits for its end hangs until its own timeout, and then says down."
	case c.name == "get" && vote > 0 && o.media == "text/event-stream":
		k.Why = "Each check of this kind opens an event stream that does not end by itself, and some servers keep a session for every one of them."
	case c.name == "get" && vote <= 0 && o.status == http.StatusOK && o.media == "text/event-stream" && t.Era != mcphealth.SSE:
		k.Why = "There is an event stream at this path. A server of 2024-11-05 (HTTP+SSE) looks like this: ask it with --era sse."
	}
	return k
}
