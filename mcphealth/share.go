//go:build go1.21

package mcphealth

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// ErrShared is the class of shared results that are not to be believed.
var ErrShared = errors.New("bad shared result")

// maxShared is how large a shared result may be: 8 KiB; those that Share writes are a
// quarter of it at most.
const maxShared = 8 << 10

// shared is a result as edges pass it on to each other.
type shared struct {
	Verdict      Verdict    `json:"verdict"`
	Reason       Reason     `json:"reason"`
	Detail       string     `json:"detail"`
	Era          Era        `json:"era"`
	Versions     []string   `json:"versions"`
	Server       ServerInfo `json:"server"`
	HTTPStatus   int        `json:"httpStatus"`
	RPCCode      int        `json:"rpcCode"`
	LatencyMs    float64    `json:"latencyMs"`
	RetryAfterMs int64      `json:"retryAfterMs"`
}

// Share is r as JSON for other edges that check the same upstream: what it says, not
// how it was found out, and not where.
func (r Result) Share() []byte {
	b, _ := json.Marshal(shared{Verdict: r.Verdict, Reason: r.Reason, Detail: r.Detail, Era: r.Era,
		Versions: r.ProtocolVersions, Server: r.Server, HTTPStatus: r.HTTPStatus, RPCCode: r.RPCCode,
		LatencyMs: r.LatencyMs, RetryAfterMs: r.RetryAfter.Milliseconds()}) // cannot fail: plain fields
	return b
}

// ReadShared reads what Share wrote, and believes nothing: the words must be of the
// closed lists, texts are cleaned and cut. The error wraps ErrShared.
func ReadShared(b []byte) (Result, error) {
	if len(b) > maxShared {
		return Result{}, fmt.Errorf("%w: %d bytes, want at most %d", ErrShared, len(b), maxShared)
	}
	var s shared
	if err := json.Unmarshal(b, &s); err != nil {
		return Result{}, fmt.Errorf("%w: no JSON object of the kind", ErrShared)
	}
	known := false
	for _, r := range reasons[s.Verdict] {
		known = known || r == s.Reason
	}
	if !known {
		return Result{}, fmt.Errorf("%w: verdict %q with reason %q: no such words", ErrShared, clean(string(s.Verdict)), clean(string(s.Reason)))
	}
	r := Result{Verdict: s.Verdict, Reason: s.Reason, Detail: cleanDetail(s.Detail), Era: EraUnknown,
		ProtocolVersions: []string{}, Warnings: []string{}, Steps: []Step{},
		Server:     ServerInfo{Name: clean(s.Server.Name), Version: clean(s.Server.Version)},
		HTTPStatus: s.HTTPStatus, RPCCode: s.RPCCode, LatencyMs: s.LatencyMs}
	for _, era := range []Era{Modern, Legacy, SSE} {
		if s.Era == era {
			r.Era = era
		}
	}
	for i := 0; i < len(s.Versions) && i < 16; i++ {
		r.ProtocolVersions = append(r.ProtocolVersions, clean(s.Versions[i]))
	}
	if ms := int64(maxRetryAfter / time.Millisecond); s.RetryAfterMs > 0 && s.RetryAfterMs <= ms {
		r.RetryAfter = time.Duration(s.RetryAfterMs) * time.Millisecond
	}
	return r, nil
}

// cleanDetail is s on one line, of at most four times what is kept of a server's words.
func cleanDetail(s string) string {
	runes := []rune(s)
	if len(runes) > 4*maxWord {
		runes = runes[:4*maxWord]
	}
	s = ""
	for len(runes) > maxWord-1 {
		s += clean(string(runes[:maxWord-1])) + " "
		runes = runes[maxWord-1:]
	}
	return s + clean(string(runes))
}

// Hear counts what another edge found out just now as a probe of one's own, and puts
// the next one off: it is due when nothing has been heard for a fifth more than an
// interval. OnChange is told, OnResult is not. A dead vote is none where clients had
// answers from here within the fast interval, or, if it is about silence, the whole one.
func (c *Checker) Hear(r Result) {
	c.mu.Lock()
	if c.closed || c.paused || !c.started {
		c.mu.Unlock()
		return
	}
	r.URL = c.p.target.URL
	r.At = time.Now()
	vote := r.Verdict
	if vote == Dead && (c.answeredWithin(c.sched.Fast) || noAnswer(r.Reason) && c.answeredWithin(c.sched.Interval)) {
		vote = Unknown
	}
	change, changed := c.count(r, vote, 0)
	if vote.Vote() > 0 {
		c.alarm = none
		c.fresh = 0
	}
	if !c.running && c.alarm == none {
		c.due(c.sched.Interval + c.sched.Interval/5 + c.share(c.sched.Interval/10))
	}
	changes, _ := c.listeners()
	c.mu.Unlock()
	for i := 0; changed && i < len(changes); i++ {
		changes[i](change)
	}
}

// answeredWithin: a client had an answer within the last d.
func (c *Checker) answeredWithin(d time.Duration) bool {
	last := c.lastRPC.Load()
	return last > 0 && c.clock()-last < int64(d)
}

// ProbeWithin has the upstream asked at a random moment within d, or when it is due.
func (c *Checker) ProbeWithin(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed && !c.paused && c.started && !c.running {
		c.hurry(c.share(d)+time.Nanosecond, none)
	}
}
