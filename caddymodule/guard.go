package caddymodule

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/mcphealth/mcphealth/mcphealth"
)

func init() {
	caddy.RegisterModule(new(Guard))
	httpcaddyfile.RegisterHandlerDirective("mcp_guard", parseGuard)
	// Before what contains a reverse_proxy: invoke, handle, handle_path and route.
	httpcaddyfile.RegisterDirectiveOrder("mcp_guard", httpcaddyfile.Before, "invoke")
}

const (
	defaultHold    = 10 * time.Second
	defaultHoldMax = 1024

	defaultGrace        = 30 * time.Second
	defaultDrainTimeout = 10 * time.Minute
)

// statusClientGone is what a request ends with whose client has left; Caddy's
// reverse proxy logs the same.
const statusClientGone = 499

// Guard is a handler that keeps MCP clients working while no upstream behind it
// can serve. It stands in front of a reverse proxy.
//
// A request that provably was not executed, because there was no upstream or no
// connection, waits for one to come back; if none does, the client gets 503 with
// Retry-After and a JSON-RPC error that carries the request's id. A request that
// may have been executed is never sent twice: the client gets 502 with a JSON-RPC
// error that says so. Answers of the upstream itself pass untouched, whatever
// they are, and streams pass as they come.
type Guard struct {
	// How long a request waits for an upstream to come back. 0 turns waiting
	// off. Default: `10s`
	Hold *caddy.Duration `json:"hold,omitempty"`

	// How many requests wait at once; further ones get 503 at once. Their bodies
	// are held in memory, up to 1 MiB each and 64 MiB in all. Requests whose
	// body is not in yet take no place. Default: 1024
	HoldMax int `json:"hold_max,omitempty"`

	// The least Retry-After of a 503. Default: computed from when the next probe
	// is due, at least `1s`
	RetryAfter caddy.Duration `json:"retry_after,omitempty"`

	// Whether requests of a session (protocol versions before 2026-07-28) go to the
	// upstream that opened it. The guard appends a tag to `Mcp-Session-Id` on the way
	// out, up to 24 bytes, and takes it off on the way in. Needs the `mcp_health`
	// selection policy or upstream source behind it. Default: false
	Sticky bool `json:"sticky,omitempty"`

	// The secret of the tags: 16 bytes or more, the same on all edges that serve the
	// same upstreams. Global placeholders such as `{env.*}` and `{file.*}` are
	// replaced. Default: one that is generated and kept in Caddy's storage
	SessionKey string `json:"session_key,omitempty"`

	// Secrets of before, newest first: their tags are still read, so that a new key
	// ends no session. Default: none
	OldSessionKeys []string `json:"old_session_keys,omitempty"`

	// How long the requests of a session wait for their upstream, counted from when
	// it went down or was missing first, before they are lost. Default: `30s`
	SessionGrace *caddy.Duration `json:"session_grace,omitempty"`

	// What a client gets whose session is lost while another upstream is up: `404`,
	// which has it open a new one, or `503`. Default: `404`
	OnLost string `json:"on_lost,omitempty"`

	// How long the sessions of an upstream that drains go on. After that they are lost
	// while another upstream is up, unless `on_lost` is `503`. Default: `10m`
	DrainTimeout caddy.Duration `json:"drain_timeout,omitempty"`

	log     *zap.Logger
	hold    time.Duration
	holding atomic.Int64
	budget  budget
	room    *room // for reverse proxies without health of ours
	counted bool
	seen    map[string]bool // options that the Caddyfile gave

	key          *mcphealth.SessionKey   // nil: not sticky
	keys         []*mcphealth.SessionKey // that one, and those whose tags are read, too
	grace        time.Duration
	keepLost     bool // on_lost 503
	nobody       bool // sticky, and nobody tells who owns a session
	drainTimeout time.Duration
	untagged     atomic.Bool  // said so
	lostAt       atomic.Int64 // when a lost session was logged last
}

// CaddyModule returns the Caddy module information.
func (*Guard) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.mcp_guard",
		New: func() caddy.Module { return new(Guard) },
	}
}

// Provision sets up the handler.
func (g *Guard) Provision(ctx caddy.Context) error {
	g.log = ctx.Logger()
	if err := g.contradictions(); err != nil {
		return err
	}
	g.hold = defaultHold
	if g.Hold != nil {
		g.hold = time.Duration(*g.Hold)
	}
	if g.HoldMax == 0 {
		g.HoldMax = defaultHoldMax
	}
	g.room = newRoom(nil, nil)
	endWith(ctx)
	if err := g.provisionSessions(ctx); err != nil {
		return err
	}
	guards.Add(1)
	g.counted = true
	return nil
}

func (g *Guard) provisionSessions(ctx caddy.Context) (err error) {
	g.grace = defaultGrace
	if g.SessionGrace != nil {
		g.grace = time.Duration(*g.SessionGrace)
	}
	g.drainTimeout = time.Duration(or(g.DrainTimeout, caddy.Duration(defaultDrainTimeout)))
	g.keepLost = g.OnLost == onLost503
	if g.Sticky {
		if g.keys, err = sessionKeys(ctx, g.SessionKey, g.OldSessionKeys); err != nil {
			return err
		}
		g.key = g.keys[0]
		g.nobody, err = nobodyPicks(ctx)
		return err
	}
	if g.SessionKey != "" || g.OldSessionKeys != nil || g.SessionGrace != nil || g.OnLost != "" || g.DrainTimeout != 0 {
		g.log.Warn("options for sessions have no effect without sticky")
	}
	return nil
}

var errNobodyPicks = errors.New("sticky needs 'lb_policy mcp_health' (or 'dynamic mcp_health') in the reverse_proxy behind mcp_guard, " +
	"which tells who owns a session, and there is none in the whole configuration: add it, or use mcp_proxy, which has it")

// nobodyPicks reports whether there is no mcp_health policy and no such source in all of
// the HTTP configuration. Which proxies are behind which guard is known when requests are
// routed; then, a guard warns.
func nobodyPicks(ctx caddy.Context) (bool, error) {
	app, err := appOf(ctx)
	if err != nil || len(app.allGroups()) > 0 {
		return false, err
	}
	for _, m := range ctx.Modules() {
		if h, ok := m.(*caddyhttp.App); ok {
			raw, err := json.Marshal(h.Servers) // without what is loaded, which made a group
			return err == nil && !bytes.Contains(raw, []byte(`"mcp_health"`)), nil
		}
	}
	return false, nil
}

// The values of OnLost.
const (
	onLost404 = "404"
	onLost503 = "503"
)

// contradictions refuses what cannot be meant together.
func (g *Guard) contradictions() error {
	if g.Hold != nil && *g.Hold == 0 && g.HoldMax > 0 {
		return fmt.Errorf("hold_max %d contradicts hold 0, with which no request waits: leave one of them out", g.HoldMax)
	}
	if g.seen["sticky"] {
		return nil // off, maybe, for a while
	}
	for _, name := range sessionOptions {
		if g.seen[name] {
			return fmt.Errorf("%s has no effect without sticky: add that, or 'sticky off' if sessions are meant to go anywhere", name)
		}
	}
	return nil
}

// sessionOptions are those of guardOptions that need sticky.
var sessionOptions = []string{"session_key", "old_session_keys", "session_grace", "on_lost", "drain_timeout"}

// Validate checks the settings.
func (g *Guard) Validate() error {
	switch {
	case g.hold < 0:
		return fmt.Errorf("hold %v: want 0 or more", g.hold)
	case g.HoldMax < 0:
		return fmt.Errorf("hold_max %d: want 1 or more", g.HoldMax)
	case g.RetryAfter < 0:
		return fmt.Errorf("retry_after %v: want 0 or more", time.Duration(g.RetryAfter))
	case g.grace < 0:
		return fmt.Errorf("session_grace %v: want 0 or more", g.grace)
	case g.OnLost != "" && g.OnLost != onLost404 && g.OnLost != onLost503:
		return fmt.Errorf("on_lost '%s': want 404 or 503", g.OnLost)
	case g.DrainTimeout < 0:
		return fmt.Errorf("drain_timeout %v: want 0 or more", time.Duration(g.DrainTimeout))
	case g.nobody:
		return errNobodyPicks
	}
	return nil
}

// Cleanup takes the guard off the count.
func (g *Guard) Cleanup() error {
	if g.counted {
		g.counted = false
		guards.Add(-1)
	}
	return nil
}

// ServeHTTP passes the request on, and steps in if it fails before an answer.
func (g *Guard) ServeHTTP(w http.ResponseWriter, r *http.Request, next caddyhttp.Handler) error {
	if isMetadata(r.URL.Path) {
		return next.ServeHTTP(w, r)
	}
	t := &transit{ResponseWriterWrapper: caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, req: r}
	t.takeOver(transitOf(w, r), g)
	setContext(r, context.WithValue(r.Context(), transitKey{}, t))
	was := remember(w, r)
	defer was.forget()
	t.watchBody(r)
	defer t.end()
	if g.key != nil {
		t.readTicket(g, r)
	}

	err := next.ServeHTTP(t, r)
	if err == nil && t.unanswered() {
		err = g.conclude(t, was, sent, mcphealth.NotMCP, errNoAnswer)
	}
	if err != nil && t.status == 0 {
		err = g.rescue(t, was, next, err)
	}
	t.hideTicket(r)
	t.returned = true
	return err
}

// errNoAnswer: reverse_proxy gave up without an error, as it does where an upstream
// switches protocols that nobody asked for. The client would get an empty 200.
var errNoAnswer = errors.New("the upstream's answer was no answer to the request")

// unanswered reports whether a call went to an upstream, and nothing came of it.
func (t *transit) unanswered() bool {
	g := t.picked.group
	return t.status == 0 && g != nil && !t.picked.none && t.req.Method == http.MethodPost &&
		len(g.handler.HandleResponse) == 0 && t.req.Context().Err() == nil
}

// isMetadata reports whether it is the path of a document about the server, such as OAuth
// metadata. What it gets is the proxy's, also in an outage: clients ask for several
// and go on from a plain error, and a held one would keep them from connecting.
func isMetadata(path string) bool { return strings.Contains(path, "/.well-known/") }

// wasMetadata reports whether r, which was rewritten since, asks for one.
func wasMetadata(r *http.Request) bool {
	came, ok := r.Context().Value(caddyhttp.OriginalRequestCtxKey).(http.Request)
	return ok && isMetadata(came.URL.Path)
}

// fate is what became of a request that got no answer.
type fate int

const (
	foreign fate = iota // an error that is not the proxy's
	gone                // the client has left
	broken              // the client's body broke off
	unsent              // it was not executed
	sent                // it may have been executed
)

// fateOf judges an error of the handlers behind the guard. reverse_proxy's errors
// are told by where they were made, since other handlers use the same statuses.
func fateOf(t *transit, err error) (fate, mcphealth.Reason) {
	var he caddyhttp.HandlerError
	if !errors.As(err, &he) || !strings.HasPrefix(he.Trace, proxyTrace) {
		return foreign, ""
	}
	reason := reasonOf(err, he.StatusCode)
	var dial reverseproxy.DialError
	switch he.StatusCode {
	case http.StatusServiceUnavailable:
		if !t.picked.none && !saysNoUpstream(he) {
			return foreign, ""
		}
		reason = ""
	case http.StatusBadGateway, http.StatusGatewayTimeout:
	default:
		return foreign, ""
	}
	switch {
	case t.req.Context().Err() != nil:
		return gone, ""
	case t.body != nil && t.replay == nil && t.body.broken() != nil:
		return broken, ""
	case t.mayHaveRun:
		return sent, reason
	case t.picked.group == nil && t.bodyWasRead() && wasAnswered(t.req):
		return sent, reason // by a proxy that no policy of ours is in
	case he.StatusCode == http.StatusServiceUnavailable, errors.As(err, &dial):
		return unsent, reason
	case provesUnwritten(he, t.picked.group):
		return unsent, reason
	case saysNotProcessed(he):
		return unsent, reason
	case t.body == nil && failedHandshake(he):
		return unsent, reason
	case t.body != nil && !t.bodyWasRead():
		return unsent, reason // the call is in the body, and nobody has read that
	}
	return sent, reason
}

// provesUnwritten reports whether an error which is no dial's is one that net/http
// gives only before it wrote anything of the request.
func provesUnwritten(he caddyhttp.HandlerError, g *group) bool {
	var never unwrittenError
	switch {
	case errors.As(he, &never):
		return true // it was a fresh connection, to which nothing was written
	case he.Err == errEnded && g != nil && g.speaksHTTP1():
		return true // bare: net/http has counted what it wrote, and wraps it otherwise
	case errors.Is(he, errNotHeld):
		return true // it wanted the body again, which it gets in these cases only
	}
	return saysClosedIdle(he)
}

// reasonOf finds the word for an error of the reverse proxy. Its DialError hides
// what it wraps, hence the texts.
func reasonOf(err error, status int) mcphealth.Reason {
	var dial reverseproxy.DialError
	switch {
	case saysDNS(err):
		return mcphealth.DNS
	case saysTLS(err):
		return mcphealth.TLS
	case errors.As(err, &dial) && saysTimeout(err):
		return mcphealth.ConnectTimeout
	case errors.As(err, &dial):
		return mcphealth.Refused
	case status == http.StatusGatewayTimeout:
		return mcphealth.Timeout
	}
	return mcphealth.Reset
}

// rescue deals with a request that failed before an answer began.
func (g *Guard) rescue(t *transit, was *before, next caddyhttp.Handler, err error) error {
	if wasMetadata(t.req) {
		t.settle()
		return err
	}
	f, reason := fateOf(t, err)
	if f != unsent {
		return g.conclude(t, was, f, reason, err)
	}
	t.failed()
	group := t.picked.group
	reopen := false
	if t.ticket.pinned && t.picked.none && t.picked.others {
		switch body := t.firstBytes(true); {
		case mcphealth.OpensSession(t.req.Method, body):
			reopen = true // its client has understood, and only kept the old id
			t.ticket.letGo()
		case t.lost():
			return g.sessionLost(t, was, body)
		case t.picked.elsewhere:
			return g.unavailable(t, was, group, reason, body, err)
		}
	}
	// A connection that was found dead says little about the upstream, and nothing
	// about the others: there is one more turn at once, also where nobody is held.
	// Failed dials were retried.
	var dial reverseproxy.DialError
	atOnce := reopen || reason != "" && !errors.As(err, &dial)
	over, arrived, ok := g.terms(reopen, atOnce)
	if !ok {
		return g.unavailable(t, was, group, reason, nil, err)
	}
	var body []byte
	if t.body != nil {
		t.readUntil(arrived)
		held, herr := t.body.hold(t.req.ContentLength, &g.budget, arrived)
		switch {
		case herr == errNotHeld:
			return g.unavailable(t, was, group, reason, nil, err)
		case herr != nil:
			return g.unreadable(t, herr)
		}
		t.readUntil(time.Time{})
		body = held
		defer g.budget.unhold(len(held))
	}
	defer g.holding.Add(-1) // a place is for who has arrived: the slow take none
	if g.holding.Add(1) > int64(g.HoldMax) && !atOnce {
		return g.unavailable(t, was, group, reason, body, err)
	}
	return g.wait(t, was, next, body, over, reason, atOnce, err)
}

// terms are until when a request that was not sent may wait, and its body may come
// in; not ok: it is not held at all. One that has a turn at once may lack a place.
func (g *Guard) terms(reopen, atOnce bool) (over, arrived time.Time, ok bool) {
	now := time.Now()
	over = now.Add(g.hold)
	arrived = over
	if atOnce {
		arrived = now.Add(max(g.hold, idWait))
	}
	noPlace := g.hold == 0 || g.holding.Load() >= int64(g.HoldMax)
	switch {
	case reopen:
		over = arrived
	case noPlace:
		over = now
	}
	return over, arrived, atOnce || !noPlace
}

// wait holds the request until it is served, the hold has passed, or the client
// has left. The first turn is at once, or when the room says so.
func (g *Guard) wait(t *transit, was *before, next caddyhttp.Handler, body []byte, over time.Time, reason mcphealth.Reason, atOnce bool, err error) error {
	r, group, room := t.req, t.picked.group, g.roomOf(t)
	if group != nil {
		group.enter()
		defer group.leave()
	}
	defer held(group)()
	place := room.enter()
	looked := !t.ticket.pinned // others are not worth a last look
	for atOnce || t.waitTurn(room, place, over) || !looked && !place.turned && r.Context().Err() == nil {
		atOnce = false
		looked = looked || !time.Now().Before(over)
		was.restore(t, r)
		t.showTicket(r)
		t.sendAgain(body)
		if err = next.ServeHTTP(t, r); err == nil || t.status != 0 {
			room.through()
			return err
		}
		var f fate
		if f, reason = fateOf(t, err); f != unsent {
			return g.conclude(t, was, f, reason, err)
		}
		t.failed()
		if t.lost() {
			return g.sessionLost(t, was, body)
		}
		if t.picked.elsewhere {
			break
		}
	}
	if r.Context().Err() != nil {
		return g.conclude(t, was, gone, reason, err)
	}
	return g.unavailable(t, was, group, reason, body, err)
}

// roomOf is where t waits: with those that wait for anybody, or for its owner.
func (g *Guard) roomOf(t *transit) *room {
	p := &t.picked
	m := p.owner
	if m == nil {
		m = p.member // the dial failed
	}
	switch {
	case t.ticket.pinned && m != nil && m.room != nil:
		return m.room
	case p.group != nil:
		return p.group.room
	}
	return g.room
}

// waitTurn blocks until it is t's turn, and reports false if the hold is over before.
// It is time for a look, too, when the session of t may have been given up.
func (t *transit) waitTurn(room *room, place *waiter, over time.Time) bool {
	until := over
	if t.ticket.mayBeLost() {
		left := t.ticket.guard.grace
		if !t.picked.gone.IsZero() {
			left -= time.Since(t.picked.gone)
		}
		if left <= 0 {
			left = lastWait // nobody else was up
		}
		if given := time.Now().Add(left); given.Before(over) {
			until = given
		}
	}
	ctx, cancel := context.WithDeadline(t.req.Context(), until)
	defer cancel()
	return room.wait(ctx, place) || until.Before(over) && !place.turned && t.req.Context().Err() == nil
}

// sendAgain makes the request ready to be sent on once more.
func (t *transit) sendAgain(body []byte) {
	t.picked, t.mayHaveRun = pick{}, false
	if t.body == nil {
		return
	}
	t.replay = newReplay(body)
	t.req.Body = t.replay
}

// conclude ends a request that is not to be held.
func (g *Guard) conclude(t *transit, was *before, f fate, reason mcphealth.Reason, err error) error {
	switch f {
	case gone:
		t.settle()
		t.clientLeft()
		return nil
	case broken:
		return g.unreadable(t, t.body.broken())
	case sent:
		t.failed()
		was.restore(t, t.req)
		if ce := g.log.Check(zapcore.ErrorLevel, "upstream did not answer, the request may have been executed"); ce != nil {
			ce.Write(zap.String("upstream", upstreamOf(t.req, "hostport")), zap.String("reason", string(reason)), zap.Error(err))
		}
		t.hurry()
		t.standIn(mcphealth.MayHaveRun(t.req.Method, mcphealth.RequestID(t.firstBytes(false)), reason))
		return nil
	}
	t.settle()
	return err
}

// unreadable ends a request whose body could not be read.
func (g *Guard) unreadable(t *transit, err error) error {
	t.settle()
	var he caddyhttp.HandlerError
	switch {
	case t.req.Context().Err() != nil:
		t.clientLeft()
		return nil
	case errors.As(err, &he): // as from request_body with a limit
		return err
	}
	return caddyhttp.Error(http.StatusBadRequest, fmt.Errorf("reading request body: %w", err))
}

// unavailable answers 503. body is the held one, if there is.
func (g *Guard) unavailable(t *transit, was *before, group *group, reason mcphealth.Reason, body []byte, err error) error {
	if body == nil {
		body = t.firstBytes(true)
	}
	was.restore(t, t.req)
	if t.req.Context().Err() != nil && !t.tooSlow() {
		t.clientLeft()
		return nil
	}
	var soonest time.Duration
	if group != nil {
		var why mcphealth.Reason
		if t.ticket.pinned {
			why, soonest = t.picked.ownersOutage(time.Now())
		} else {
			why, soonest = group.outage(time.Now())
		}
		reason = or(why, reason)
	}
	reason = or(reason, mcphealth.GatewayError) // the proxy's own 503, for reasons of its own
	if ce := g.log.Check(zapcore.DebugLevel, "no upstream can serve"); ce != nil {
		ce.Write(zap.String("reason", string(reason)), zap.Error(err))
	}
	id := mcphealth.RequestID(body[:min(len(body), mcphealth.MaxIDBody)])
	t.refuse(mcphealth.Unavailable(t.req.Method, id, reason, max(soonest, time.Duration(g.RetryAfter))))
	return nil
}

// firstBytes are those in which the id of the request is found. read: nobody else
// reads from the client now.
func (t *transit) firstBytes(read bool) []byte {
	switch {
	case t.body == nil:
		return nil
	case t.replay != nil:
		first := make([]byte, min(t.replay.Size(), mcphealth.MaxIDBody))
		n, _ := t.replay.ReadAt(first, 0)
		return first[:n]
	}
	if read {
		t.readUntil(time.Now().Add(idWait))
		t.body.readID()
	}
	return t.body.first()
}

// parseGuard reads the directive mcp_guard; see UnmarshalCaddyfile.
func parseGuard(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	g := new(Guard)
	return g, g.UnmarshalCaddyfile(h.Dispenser)
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	mcp_guard [<matcher>] {
//	    hold        <duration>
//	    hold_max    <count>
//	    retry_after <duration>
//
//	    sticky        [on|off]
//	    session_key   <key>
//	    old_session_keys <keys...>
//	    session_grace <duration>
//	    on_lost       404|503
//	    drain_timeout <duration>
//	}
//
// hold 0 turns waiting off.
func (g *Guard) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the name
	if d.NextArg() {
		return d.ArgErr()
	}
	for d.NextBlock(0) {
		known, err := g.unmarshalOption(d)
		if err != nil {
			return err
		}
		if !known {
			return d.Errf("unrecognized option '%s'", d.Val())
		}
	}
	return atLine(d, g.contradictions())
}

// guardOptions are the names that the guard knows.
var guardOptions = []string{"hold", "hold_max", "retry_after", "sticky", "session_key", "old_session_keys", "session_grace", "on_lost", "drain_timeout"}

// unmarshalOption reads the option that d stands on, if it is one of the guard's.
func (g *Guard) unmarshalOption(d *caddyfile.Dispenser) (known bool, err error) {
	name := d.Val()
	if !slices.Contains(guardOptions, name) {
		return false, nil
	}
	if g.seen[name] {
		return true, d.Errf("option '%s' is given twice", name)
	}
	if g.seen == nil {
		g.seen = make(map[string]bool)
	}
	g.seen[name] = true
	args := d.RemainingArgs()
	switch {
	case name == "sticky" && len(args) == 0:
		args = []string{"on"}
	case name == "old_session_keys" && len(args) > 0:
		for _, secret := range args {
			if err := validSecret(secret); err != nil {
				return true, d.Errf("bad value of '%s': %v", name, err)
			}
		}
		g.OldSessionKeys = args
		return true, nil
	}
	if len(args) != 1 {
		return true, d.Errf("wrong argument count after '%s': want one value", name)
	}
	if err := g.setOption(name, args[0]); err != nil {
		return true, d.Errf("bad value of '%s': %v", name, err)
	}
	return true, nil
}

var errNoSecret = errors.New("'': want a secret, or a placeholder such as {env.MCP_SESSION_KEY}")

// validSecret refuses what no session key can be. Its error does not show it.
func validSecret(s string) error {
	if s == "" {
		return errNoSecret
	}
	if n := len(strings.TrimSpace(s)); n < minSecret && withoutPlaceholders(s) == s {
		return fmt.Errorf("%d bytes, want at least %d", n, minSecret)
	}
	return nil
}

func (g *Guard) setOption(name, arg string) (err error) {
	switch name {
	case "hold":
		g.Hold, err = parseDurationOrZero(arg)
	case "hold_max":
		n, aerr := strconv.Atoi(arg)
		if aerr != nil || n < 1 {
			return fmt.Errorf("'%s': want a number, 1 or more; 'hold 0' turns waiting off", arg)
		}
		g.HoldMax = n
	case "retry_after":
		g.RetryAfter, err = parseDuration(arg)
	case "sticky":
		var on *bool
		if on, err = parseSwitch(arg); err == nil {
			g.Sticky = *on
		}
	case "session_key":
		g.SessionKey, err = arg, validSecret(arg)
	case "session_grace":
		g.SessionGrace, err = parseDurationOrZero(arg)
	case "on_lost":
		if arg != onLost404 && arg != onLost503 {
			return fmt.Errorf("'%s': want 404 or 503", arg)
		}
		g.OnLost = arg
	case "drain_timeout":
		g.DrainTimeout, err = parseDuration(arg)
	}
	return err
}

func parseDurationOrZero(s string) (*caddy.Duration, error) {
	dur, err := caddy.ParseDuration(s)
	if err != nil || dur < 0 {
		return nil, fmt.Errorf("'%s': want a duration such as 10s, or 0", s)
	}
	return (*caddy.Duration)(&dur), nil
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Guard)(nil)
	_ caddy.Validator             = (*Guard)(nil)
	_ caddy.CleanerUpper          = (*Guard)(nil)
	_ caddyhttp.MiddlewareHandler = (*Guard)(nil)
	_ caddyfile.Unmarshaler       = (*Guard)(nil)
)
