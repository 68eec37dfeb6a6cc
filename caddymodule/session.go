package caddymodule

import (
	"net/http"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// The header fields by which a request says what session it belongs to, spelled as
// Go spells them.
const (
	sessionField = "Mcp-Session-Id"
	versionField = "Mcp-Protocol-Version"
)

// A ticket is what a request says of the session that it belongs to.
type ticket struct {
	guard  *Guard                // nil: it is not sticky
	key    *mcphealth.SessionKey // what the tag was made with
	given  string                // the id as the client has it; "": none, or none that is looked at
	id     string                // as the upstream has it
	owner  mcphealth.Owner
	pinned bool // the owner is known, and nobody else is asked
}

// readTicket finds out what session r belongs to, and takes our tag off its id. A
// request of the era without sessions goes anywhere, whatever else it carries.
func (t *transit) readTicket(g *Guard, r *http.Request) {
	t.ticket.guard = g
	values := r.Header[sessionField]
	if len(values) == 0 {
		return
	}
	t.ticket.given, t.ticket.id = values[0], values[0]
	if v := r.Header[versionField]; len(v) > 0 && !mcphealth.HasSessions(v[0]) {
		return
	}
	for _, t.ticket.key = range g.keys {
		t.ticket.id, t.ticket.owner, t.ticket.pinned = t.ticket.key.Split(values[0])
		if t.ticket.pinned {
			break
		}
	}
	t.showTicket(r)
}

// showTicket has r carry the id that the upstream knows.
func (t *transit) showTicket(r *http.Request) {
	switch {
	case t.ticket.given == "":
	case t.ticket.id == "":
		delete(r.Header, sessionField)
	default:
		rename(r.Header[sessionField], t.ticket.given, t.ticket.id)
	}
}

// hideTicket has r carry the id that the client knows, as it came: another guard, or
// an error route, may look at it next.
func (t *transit) hideTicket(r *http.Request) {
	switch {
	case t.ticket.given == "" || t.ticket.given == t.ticket.id:
	case t.ticket.id == "":
		r.Header[sessionField] = []string{t.ticket.given}
	default:
		rename(r.Header[sessionField], t.ticket.id, t.ticket.given)
	}
}

// rename changes a field's value wherever it stands: some say a field twice.
func rename(values []string, from, to string) {
	for i, v := range values {
		if v == from {
			values[i] = to
		}
	}
}

// takeOver has the innermost of several guards around one proxy see to the session:
// it alone learns who was picked. If it is not sticky itself, it does so for the one
// that is.
func (t *transit) takeOver(outer *transit, g *Guard) {
	if outer == nil || outer.over || outer.ticket.guard == nil {
		return
	}
	if g.key != nil {
		outer.hideTicket(t.req)
	} else {
		t.ticket = outer.ticket
	}
	outer.ticket = ticket{}
}

// letGo makes the request one of no session: it opens a new one.
func (k *ticket) letGo() { k.id, k.pinned = "", false }

// stampTicket writes the owner into the id that an answer gives out. Who has an id
// gets back what it sent: clients take any other one for a foreign session.
func (t *transit) stampTicket() {
	g := t.ticket.guard
	if g == nil {
		return
	}
	values := t.Header()[sessionField]
	for i, id := range values {
		switch id {
		case "":
			continue
		case t.ticket.id:
			values[i] = t.ticket.given
			continue
		}
		owner, ok := t.picked.ownerUnder(g.key, t.req)
		if !ok {
			g.warnUntagged()
			return
		}
		values[i] = g.key.Tag(id, owner)
	}
}

// ownerUnder is the upstream that was picked, as the key names it.
func (p *pick) ownerUnder(key *mcphealth.SessionKey, r *http.Request) (mcphealth.Owner, bool) {
	switch {
	case p.group == nil:
		return 0, false
	case p.member != nil:
		return p.member.owner(key), true
	case p.dial != "":
		return key.Owner(ownerName(p.dial)), true
	}
	address := upstreamOf(r, "address")
	return key.Owner(address), address != ""
}

// upstreamOf is what reverse_proxy says of the upstream to which it sent r last: its
// address, or its hostport, without the network; "" if there is none.
func upstreamOf(r *http.Request, what string) string {
	repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return ""
	}
	s, _ := repl.GetString("http.reverse_proxy.upstream." + what)
	return s
}

// ownerName is the address by which all edges call an upstream in tags.
func ownerName(dial string) string {
	if di, err := dialInfo(dial); err == nil {
		return di.String()
	}
	return dial // it depends on the request
}

// named is an upstream's name under one key. There are as many as the configuration
// has keys.
type named struct {
	key   *mcphealth.SessionKey
	owner mcphealth.Owner
	next  *named
}

// owner is the member's name under the key.
func (m *member) owner(key *mcphealth.SessionKey) mcphealth.Owner {
	all := m.named.Load()
	for n := all; n != nil; n = n.next {
		if n.key == key {
			return n.owner
		}
	}
	n := &named{key, key.Owner(ownerName(m.dial)), all}
	m.named.Store(n)
	return n.owner
}

// selectOwner finds the owner of t's session in pool, by its position, and reports
// whether it can take the request. It notes in t what keeps it from that: nobody
// else may be asked, for nobody else knows the session.
func (g *group) selectOwner(t *transit, pool []*reverseproxy.Upstream, members []*member) (int, bool) {
	guard, key := t.ticket.guard, t.ticket.key
	for i, u := range pool {
		m := g.memberAt(members, i, u)
		owner := mcphealth.Owner(0)
		if m != nil {
			owner = m.owner(key)
		} else {
			owner = key.Owner(ownerName(u.Dial))
		}
		if owner != t.ticket.owner {
			continue
		}
		p := pick{group: g, none: true, owner: m, gone: m.goneSince()}
		missing.Found(owner)
		if since := m.refusedSince(u); !since.IsZero() {
			p.goneBy(since, mcphealth.HealthDown) // says the proxy
		}
		switch {
		case !p.gone.IsZero(), g.tierOf(members, i, u) == mcphealth.TierDown:
		case u.Full():
			p.why = mcphealth.RateLimited
		case !guard.keepLost && m.drainOver(guard.drainTimeout) && g.othersUp(pool, members, i):
			p.goneBy(longAgo, mcphealth.Draining)
		default:
			return i, true
		}
		p.others = g.othersUp(pool, members, i)
		t.picked = p
		return i, false
	}
	p := pick{group: g, none: true, owner: g.unlisted(key, t.ticket.owner), others: g.othersUp(pool, members, -1)}
	p.gone = p.owner.goneSince() // it may have been down before it left the list
	switch next := serving.Load(); {
	case next != nil && next != g.app && next.has(key, t.ticket.owner):
		p.elsewhere, p.gone, p.why = true, time.Time{}, mcphealth.RouteAbsent
	case p.owner == nil && g.app.has(key, t.ticket.owner):
		p.goneBy(longAgo, mcphealth.RouteAbsent) // another proxy's: the session never was here
	default:
		p.goneBy(missing.Since(t.ticket.owner), mcphealth.RouteAbsent)
		p.goneBy(p.owner.missedSince(), mcphealth.RouteAbsent)
	}
	t.picked = p
	return -1, false
}

// missedSince is when a look first found that its own source does not name the upstream
// any more, though others may: now, if nothing is known.
func (m *member) missedSince() time.Time {
	if m == nil {
		return time.Now()
	}
	return firstNoted(&m.missed)
}

// refusedSince is when a look first found that the proxy itself does not want the
// upstream (health_uri, fail_duration); zero: it does.
func (m *member) refusedSince(u *reverseproxy.Upstream) time.Time {
	if u.Healthy() {
		if m != nil {
			m.wanted()
		}
		return time.Time{}
	}
	if m == nil {
		return time.Now()
	}
	return firstNoted(&m.refused)
}

// firstNoted is the time that stands there; if none does, now, which stands there then.
func firstNoted(at *atomic.Pointer[time.Time]) time.Time {
	now := time.Now()
	at.CompareAndSwap(nil, &now)
	if first := at.Load(); first != nil {
		return *first
	}
	return now // somebody has just taken it away
}

// wanted notes that the proxy has nothing against the upstream.
func (m *member) wanted() {
	if m.refused.Load() != nil {
		m.refused.Store(nil)
	}
}

// listed notes that the upstream is in a list, so that the next time it is missing is
// not taken for the last one. It costs nothing while nobody is missing.
func (m *member) listed() {
	if m.missed.Load() != nil {
		m.missed.Store(nil)
	}
	if missing.Len() == 0 {
		return
	}
	keys.Range(func(_, key any) bool {
		missing.Found(m.owner(key.(*mcphealth.SessionKey)))
		return true
	})
}

// goneBy notes that the owner is gone since then for a reason that is not its
// checker's, unless it was gone before.
func (p *pick) goneBy(since time.Time, why mcphealth.Reason) {
	if p.gone.IsZero() || since.Before(p.gone) {
		p.gone, p.why = since, why
	}
}

// has reports whether a proxy of this configuration has the owner.
func (a *App) has(key *mcphealth.SessionKey, owner mcphealth.Owner) (found bool) {
	a.mu.Lock()
	groups := a.groups
	a.mu.Unlock()
	for _, g := range groups {
		g.each(func(m *member) { found = found || m.owner(key) == owner })
	}
	return found
}

// unlisted finds an owner that a dynamic source gave until a while ago.
func (g *group) unlisted(key *mcphealth.SessionKey, owner mcphealth.Owner) *member {
	all := g.dynamic.Load()
	if all == nil {
		return nil
	}
	for _, m := range *all {
		if m.owner(key) == owner {
			return m
		}
	}
	return nil
}

// memberAt is the member for the upstream at a position of pool; nil: none yet.
func (g *group) memberAt(members []*member, i int, u *reverseproxy.Upstream) *member {
	if members != nil {
		return members[i]
	}
	return g.lookup(u.Dial)
}

// othersUp reports whether an upstream other than that at position not would take a
// new session now.
func (g *group) othersUp(pool []*reverseproxy.Upstream, members []*member, not int) bool {
	for i, u := range pool {
		if i != not && g.tierOf(members, i, u) <= mcphealth.TierDegraded && u.Available() {
			return true
		}
	}
	return false
}

// longAgo is when an owner went away whose sessions get no grace.
var longAgo = time.Unix(1, 0)

// goneSince is when the upstream went down; zero: it did not.
func (m *member) goneSince() time.Time {
	if m == nil || m.entry == nil || m.entry.checker.Tier() != mcphealth.TierDown {
		return time.Time{}
	}
	if s := m.entry.checker.Snapshot(); s.State == mcphealth.Down {
		return s.Since
	}
	return time.Time{}
}

// drainOver reports whether the upstream has been draining for longer than that: its
// sessions have had their time.
func (m *member) drainOver(timeout time.Duration) bool {
	if m == nil || m.entry == nil {
		return false
	}
	since := m.entry.drainingSince()
	return !since.IsZero() && time.Since(since) > timeout
}

// ownersOutage is why the owner of a session cannot serve, and when it is worth to
// ask again; empty if nothing is known.
func (p *pick) ownersOutage(now time.Time) (mcphealth.Reason, time.Duration) {
	m := p.owner
	if m == nil {
		m = p.member
	}
	if p.why != "" || m == nil || !m.foundDown() {
		return p.why, 0
	}
	s := m.entry.checker.Snapshot()
	return s.Reason, s.RetryAfter(now)
}

// missing are owners of sessions that no list of upstreams has, and since when. They
// are the process's: a reload is when owners vanish. Who is in a list again is taken off
// once a configuration has started, as a source names it, and after each of its probes,
// since its own sessions may be idle.
var missing mcphealth.Absentees

// lostSessions counts the requests that were told so; entries count their own.
var lostSessions atomic.Int64

// lost reports whether the session of t ended with its owner: that is gone for
// longer than the grace, and somebody else could open a new one.
func (t *transit) lost() bool {
	p := &t.picked
	return t.ticket.mayBeLost() && p.none && p.others && !p.gone.IsZero() && time.Since(p.gone) >= t.ticket.guard.grace
}

// mayBeLost reports whether the session is given up once its owner is gone for good.
func (k *ticket) mayBeLost() bool { return k.pinned && !k.guard.keepLost }

// sessionLost answers 404: the client is to open a new session.
func (g *Guard) sessionLost(t *transit, was *before, body []byte) error {
	reason, _ := t.picked.ownersOutage(time.Now())
	reason = or(reason, mcphealth.RouteAbsent)
	upstream := ""
	if m := t.picked.owner; m != nil && m.entry != nil {
		m.entry.lost.Add(1)
		upstream = m.entry.upstream
	}
	g.logLost(lostSessions.Add(1), upstream, reason)
	was.restore(t, t.req)
	if body == nil {
		body = t.firstBytes(true)
	}
	id := mcphealth.RequestID(body[:min(len(body), mcphealth.MaxIDBody)])
	t.refuse(mcphealth.SessionLost(t.req.Method, id, reason))
	return nil
}

// logLost writes at most one line a second: a server takes hundreds of sessions with
// it.
func (g *Guard) logLost(total int64, upstream string, reason mcphealth.Reason) {
	now := clock()
	last := g.lostAt.Load()
	if now-last < int64(time.Second) || !g.lostAt.CompareAndSwap(last, now) {
		return
	}
	if ce := g.log.Check(zapcore.InfoLevel, "session lost with its upstream, the client is told to open a new one"); ce != nil {
		ce.Write(zap.String("upstream", upstream), zap.String("reason", string(reason)), zap.Int64("lost_in_all", total))
	}
}

// warnUntagged says once that nobody tells the guard who owns a session.
func (g *Guard) warnUntagged() {
	if g.untagged.CompareAndSwap(false, true) {
		g.log.Warn("sticky has no effect: behind mcp_guard there is no reverse_proxy with lb_policy mcp_health (or dynamic mcp_health); session ids pass as they are")
	}
}
