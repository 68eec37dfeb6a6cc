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

// maxShared is how large a shared result may be: 8 KiB, far above what any server gives
// cause for that does not want to. What such a one says of itself is then left out.
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
	s := shared{Verdict: r.Verdict, Reason: r.Reason, Detail: r.Detail, Era: r.Era,
		Versions: r.ProtocolVersions, Server: r.Server, HTTPStatus: r.HTTPStatus, RPCCode: r.RPCCode,
		LatencyMs: r.LatencyMs, RetryAfterMs: r.RetryAfter.Milliseconds()}
	b, _ := json.Marshal(s) // cannot fail: plain fields
	if len(b) > maxShared {
		s.Detail = "" // one by one, for Yaegi
		s.Versions = nil
		s.Server = ServerInfo{}
		b, _ = json.Marshal(s)
	}
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

// opinions is what this edge has seen of the upstream itself, and what it has heard.
type opinions struct {
	own     int    // the sign of the last vote of its own; 0: none yet
	ownAt   int64  // when that probe began, by clock
	since   int64  // when the first of those in a row did
	heard   int    // the sign of the last vote that it heard
	heardAt int64  // when
	accuser string // who cast the last vote down in a row that was heard; "": nobody
	several bool   // more than one edge cast them, or this one
	lived   bool   // another edge had answers of an MCP server
}

// saw notes a vote of this edge's own.
func (c *Checker) saw(vote Verdict, start time.Time) {
	o, sign := &c.opinions, vote.Vote()
	if sign == 0 {
		return
	}
	o.ownAt = int64(start.Sub(c.born))
	if sign != o.own {
		o.own, o.since = sign, o.ownAt
	}
	o.accuser, o.several = "", sign < 0
}

// heard notes a vote of another edge that counts.
func (c *Checker) heard(from string, sign int) {
	o := &c.opinions
	switch {
	case sign > 0:
		o.accuser, o.several, o.lived = "", false, true
	case sign < 0:
		o.several = o.several || o.accuser != "" && o.accuser != from
		o.accuser = from
	}
}

// seen is the sign of what this edge has seen itself: by its last probe, if that was
// lately or the upstream is still down from it, or as its own traffic was in trouble. 0
// is nothing. What it is about to look at, because others took it down, stays down until
// then.
func (c *Checker) seen() int {
	switch o := c.opinions; {
	case c.alarm == failure || c.alarm == silence || c.alarm == ending || c.alarm == strange:
		return -1
	case c.threshold.state == Down && (o.own < 0 || c.alarm == dispute):
		return -1
	case o.own != 0 && c.clock()-o.ownAt < int64(c.sched.Interval+c.sched.Interval/3):
		return o.own
	}
	return 0
}

// disputed: this edge cannot reach the upstream, and others say that they can. Then it
// asks for itself: what it finds out is about its own way there.
func (c *Checker) disputed() bool {
	o := c.opinions
	return o.own < 0 && o.heard > 0 && o.heardAt > o.since && c.clock()-o.heardAt < int64(2*c.sched.Interval)
}

// contradicts: others would learn something from this vote of an edge that asked for
// itself: that the upstream lives, or a second opinion that it does not.
func (c *Checker) contradicts(vote Verdict) bool {
	sign := vote.Vote()
	return c.opinions.heard < 0 && (sign > 0 || sign < 0 && c.threshold.state != Down)
}

// Hear counts what another edge, whose name is from, found out just now as a probe of
// one's own, and puts the next one off: it is due when nothing has been heard for a fifth
// more than an interval. OnChange is told, OnResult is not. A result without a vote is no
// finding, and says nothing: that edge may lack files, or a credential. What this edge has
// seen itself outranks what it hears, which then counts for nothing and has it look again:
//
//   - A dead vote is none where clients had answers from here within the fast interval,
//     or, if it is about silence, the whole one.
//   - No vote counts against what the last probe from here found, within an interval and
//     a third.
//   - Votes of one other edge alone take nothing down: its own network may be broken. A
//     second one looks, at once. What they took down all the same is asked from here
//     within an interval.
func (c *Checker) Hear(from string, r Result) {
	c.mu.Lock()
	sign := r.Verdict.Vote()
	if c.closed || c.paused || !c.started || sign == 0 {
		c.mu.Unlock()
		return
	}
	r.URL = c.p.target.URL
	r.At = time.Now()
	look, spread := none, time.Duration(0)
	counts := true
	switch t := c.threshold; {
	case sign < 0 && (c.answeredWithin(c.sched.Fast) || noAnswer(r.Reason) && c.answeredWithin(c.sched.Interval)):
		counts = false
	case sign*c.seen() < 0:
		counts, look, spread = false, dispute, c.sched.Fast
	case sign < 0 && t.state != Down && t.downs+1 >= t.fall && !c.seconded(from):
		counts, look, spread = false, rumor, confirmAfter
		c.suspect()
	}
	c.opinions.heard = sign
	c.opinions.heardAt = c.clock()
	if counts {
		before := c.threshold.state
		c.heard(from, sign)
		c.count(r, r.Verdict, 0)
		if sign > 0 {
			c.fresh = 0
			if c.alarm != dispute {
				c.alarm = none
			}
		}
		if c.threshold.state == Down && before != Down {
			look, spread = dispute, c.sched.Interval
		}
	}
	c.put(look, spread)
	c.mu.Unlock()
	c.tellChanges()
}

// put plans the next probe after something was heard: soon, at a random moment within
// spread, if this edge has to look itself.
func (c *Checker) put(look alarm, spread time.Duration) {
	if c.running {
		if look == rumor {
			c.again, c.alarm = true, look
		}
		return
	}
	if look == none {
		if c.alarm == none {
			c.due(atLeast(c.sched.Interval+c.sched.Interval/5+c.share(c.sched.Interval/10), c.patience(none)))
		}
		return
	}
	c.alarm = look
	wait := c.patience(look) + c.share(spread)
	if time.Until(c.Snapshot().Next) > wait {
		c.due(wait)
	}
}

// seconded: what from says is not its word alone.
func (c *Checker) seconded(from string) bool {
	o := c.opinions
	return o.several || o.accuser != "" && o.accuser != from || c.seen() < 0
}

// answeredWithin: a client had an answer within the last d.
func (c *Checker) answeredWithin(d time.Duration) bool {
	last := c.lastRPC.Load()
	return last > 0 && c.clock()-last < int64(d)
}

// ProbeWithin has the upstream asked at a random moment within d, or when it is due. Under
// a floor that is one within the floor, for other edges are told the same just now.
func (c *Checker) ProbeWithin(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed || c.paused || !c.started || c.running:
	case c.sched.Floor > 0 && c.alarm == none: // what was heard has put it off by less
		c.due(c.patience(none))
	default:
		c.hurry(atLeast(c.share(d)+time.Nanosecond, c.patience(none)), none)
	}
}
