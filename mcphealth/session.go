//go:build go1.21

package mcphealth

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// session is the one legacy session that a prober holds: opened once per upstream
// and process, pinged, renewed when lost, ended by Close.
type session struct {
	open    bool
	id      string   // "" where the server hands out none
	version string   // as negotiated
	at      *url.URL // where it was opened, and is to be ended
	renewed int      // probes in a row that had to renew it
	doubted bool     // the last ping in it got an error that is about no session
	told    bool     // of notifications/initialized
	heard   bool     // and it said so

	fails   int // initializes that failed in a row
	next    time.Time
	talked  bool    // the server answered the cheap question while they did
	failure finding // what the last one said; it stands until the next is due
}

const (
	// maxRenewals is how many probes in a row may renew a lost session before the
	// prober stops holding one: such a server keeps none for long.
	maxRenewals = 3
	// initPause and maxInitPause bound how often a failing initialize is repeated.
	// The first repetition may come at once, so that `fall` can confirm it.
	initPause    = 10 * time.Second
	maxInitPause = time.Minute
)

func (s *session) tooSoon(now time.Time) bool { return s.fails > 1 && now.Before(s.next) }

// failed notes a failed initialize; one that was called off says nothing.
func (s *session) failed(now time.Time, f finding, talked bool) {
	if f.reason == Canceled {
		return
	}
	s.talked = talked
	s.fails++
	pause := initPause
	for i := 2; i < s.fails && pause < maxInitPause; i++ {
		pause *= 2
	}
	if pause > maxInitPause {
		pause = maxInitPause
	}
	s.next = now.Add(pause)
	s.failure = f
}

// initialize opens a session, with a version the server lists if it refuses ours.
func (p *Prober) initialize(ctx context.Context) finding {
	p.offered = true
	old := p.session
	p.session = session{renewed: old.renewed, fails: old.fails, next: old.next, talked: old.talked}
	f := p.offer(ctx, legacyVersion)
	if f.verdict != Ready && !f.final {
		if v := olderThan(legacyVersion, f.versions()); v != "" {
			f = p.offer(ctx, v)
		}
	}
	switch {
	case !old.open:
	case f.verdict == Ready: // the way to the old one was lost; it may still be there
		p.session.renewed = old.renewed + 1
		p.end(ctx, old)
	case !p.session.open: // the way that comes back may lead to it
		p.session.open, p.session.id, p.session.version, p.session.at = true, old.id, old.version, old.at
	}
	return f
}

func olderThan(than string, versions []string) string {
	best := ""
	for i := 0; i < len(versions); i++ {
		if v := versions[i]; v < than && v > best {
			best = v
		}
	}
	return best
}

func (p *Prober) offer(ctx context.Context, version string) finding {
	f := p.judge(p.ask(ctx, question{method: "initialize",
		params: `{"protocolVersion":` + quote(version) + `,"capabilities":{},"clientInfo":` + clientInfo + `}`}))
	id := ""
	if f.a.header != nil {
		id = f.a.header.Get("Mcp-Session-Id")
	}
	negotiated := ""
	if f.verdict == Ready {
		negotiated = p.heard(f.a.msg.Result)
	}
	if f.verdict == Ready && negotiated == "" {
		f = finding{verdict: Dead, reason: NotMCP, a: f.a, detail: "initialize: a JSON-RPC result without protocolVersion, which is no InitializeResult"}
	}
	if id != "" {
		p.opened = true
		p.session.open, p.session.id, p.session.version, p.session.at = true, id, version, f.a.at
	}
	if f.verdict != Ready {
		p.hangUp(ctx) // an error answer may carry a fresh session too (Python SDK 2)
		return f
	}
	p.session = session{open: true, id: id, version: negotiated, at: f.a.at, renewed: p.session.renewed}
	p.habit = stateful
	if id == "" {
		p.habit = stateless // nothing to hold: ask without a session from now on
	}
	return f
}

// heard reads an InitializeResult and returns the version it settles on, or "".
func (p *Prober) heard(result json.RawMessage) string {
	var r struct {
		ProtocolVersion string     `json:"protocolVersion"`
		ServerInfo      ServerInfo `json:"serverInfo"`
	}
	_ = json.Unmarshal(result, &r) // as in discover
	if r.ProtocolVersion == "" {
		return ""
	}
	p.hear(r.ServerInfo, []string{r.ProtocolVersion})
	return clean(r.ProtocolVersion)
}

// holds: a session is to be held, as it is not by choice, and where the server
// keeps none for long.
func (p *Prober) holds() bool { return !p.target.Shallow && p.session.renewed < maxRenewals }

// inSession pings the held session. A lost one is renewed once in the same probe
// and does not count: servers drop idle sessions as a matter of course. A bare 404
// is more likely the loss of the route, which the ladder finds out.
func (p *Prober) inSession(ctx context.Context) finding {
	if !p.holds() {
		return p.askRouter(ctx)
	}
	f := p.judge(p.ask(ctx, question{method: "ping", session: p.session.id, version: p.session.version}))
	if !f.sessionLost() {
		p.session.renewed = 0
		if f.verdict == Ready {
			p.session.fails = 0
		}
		if f.reason == MethodNotFound {
			f.mcp = true
		}
		return f
	}
	if f.bare {
		return f
	}
	lost := f
	p.session.open = false
	if p.session.renewed++; !p.holds() {
		p.warn("session_unstable: the server lost our session %d probes in a row; it is no longer held", p.session.renewed)
		return p.askRouter(ctx)
	}
	f = p.initialize(ctx)
	switch {
	case f.verdict == Ready:
		p.warn("session_renewed: the server no longer knew our session (HTTP %d) and gave a new one", lost.a.status)
	case f.final:
		p.session.failed(time.Now(), f, true)
	default: // the ladder finds out what became of this server, with this answer
		p.session.failure = f
		f.mcp = false
	}
	return f
}

// successor asks the first question where the held session is answered by an error that
// is about no session: a modern server may have taken the place of this one, whose
// errors prove life as well. Once, until a ping is answered again.
func (p *Prober) successor(ctx context.Context, f finding) finding {
	asked := p.session.doubted
	p.session.doubted = f.mcp && f.verdict == Alive && !f.final && f.a.q.session != ghostID
	if asked || !p.session.doubted || p.target.Era == Legacy {
		return finding{}
	}
	if d := p.discover(ctx); p.habit == modern {
		return d
	}
	return finding{}
}

// askRouter asks the session router alone, what it is known to answer itself: a
// bridge to stdio would spawn a child for the other question.
func (p *Prober) askRouter(ctx context.Context) finding {
	if p.router == "" {
		return p.ghost(ctx, "server/discover")
	}
	return p.ghost(ctx, p.router)
}

// endTimeout bounds the DELETE that ends a session: it must not hold a verdict,
// a reload or a shutdown back for long.
const endTimeout = 2 * time.Second

// minEnd is what it gets though the time of its context is over, or the context
// was canceled: a session must not stay behind for that.
const minEnd = 200 * time.Millisecond

// tell ends the handshake of the held session, before more than a ping is asked in it:
// until then the Python SDK has for all else "Received request before initialization was
// complete". The next question shows whether it was heard: if it fails, the next probe says
// again what was not taken.
func (p *Prober) tell(ctx context.Context) {
	if !p.session.open || p.session.id == "" || p.session.told {
		return
	}
	p.session.told = true
	wait := endTimeout
	if at, ok := ctx.Deadline(); ok {
		wait = atMostD(time.Until(at)/2, endTimeout) // the question itself needs the rest
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.session.at.String(), strings.NewReader(initialized))
	if err != nil {
		return
	}
	p.inHeld(req, p.session)
	req.Header.Set("Content-Type", "application/json")
	if resp, err := p.line.roundTrip(req); err == nil {
		_ = resp.Body.Close()
		p.session.heard = resp.StatusCode < 300
	}
}

// hangUp ends the held session.
func (p *Prober) hangUp(ctx context.Context) {
	s := p.session
	p.session.open, p.session.id = false, ""
	if s.open {
		p.end(ctx, s)
	}
}

// end ends a session of ours. Whether the server allows that is its business:
// 404 and 405 are fine (MCP 2025-11-25 "Session Management").
func (p *Prober) end(ctx context.Context, s session) {
	if left, _ := p.left.Load().(string); s.id == "" || s.id == left {
		return
	}
	wait := endTimeout
	if at, ok := ctx.Deadline(); ok {
		wait = atLeast(atMostD(time.Until(at), endTimeout), minEnd)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), wait)
	defer cancel()
	req, err := p.ending(ctx, s)
	if err != nil {
		return
	}
	resp, err := p.line.roundTrip(req)
	if err != nil {
		return
	}
	_ = resp.Body.Close()
	p.closed = resp.StatusCode < 300
}

// ending is the request that ends a session.
func (p *Prober) ending(ctx context.Context, s session) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodDelete, s.at.String(), nil)
	if err != nil {
		return nil, err
	}
	p.inHeld(req, s)
	return req, nil
}

// inHeld gives req the headers of session s.
func (p *Prober) inHeld(req *http.Request, s session) {
	p.common(req)
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("Mcp-Session-Id", s.id)
	req.Header.Set("MCP-Protocol-Version", s.version)
}

// farewell prepares the end of the held session; nil: none is held.
func (p *Prober) farewell() func(way http.RoundTripper) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.session
	if !s.open || s.id == "" {
		return nil
	}
	req, err := p.ending(context.Background(), s)
	if err != nil {
		return nil
	}
	req.Close = true
	return func(way http.RoundTripper) {
		ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
		defer cancel()
		if resp, err := way.RoundTrip(req.WithContext(ctx)); err == nil {
			_ = resp.Body.Close()
			p.left.Store(s.id)
		}
	}
}
