package caddymodule

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/mcphealth/mcphealth/mcphealth"
)

func init() {
	caddy.RegisterModule(new(Policy))
}

// Policy is a selection policy that chooses only among upstreams whose MCP server
// lives. It asks each upstream in the MCP protocol, through the reverse proxy's own
// transport, and hands those that are up to another policy; if none is, those
// that are degraded; if none is, those that failed a moment ago. If all are down,
// there is no upstream to choose, and the reverse proxy answers 503.
//
// Static upstreams are checked from the start. Those of a dynamic source are
// checked from the start if the source gives them without a request, else from
// the first request on.
type Policy struct {
	// The policy that chooses among the living upstreams. Default: `random`
	//
	// `weighted_round_robin` is refused: its weights belong to positions in the
	// list, and positions change when an upstream is left out.
	FallbackRaw json.RawMessage `json:"fallback,omitempty" caddy:"namespace=http.reverse_proxy.selection_policies inline_key=policy"`

	Check

	fallback reverseproxy.Selector
	group    *group
}

// CaddyModule returns the Caddy module information.
func (*Policy) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.selection_policies.mcp_health",
		New: func() caddy.Module { return new(Policy) },
	}
}

// Provision sets up the policy.
func (p *Policy) Provision(ctx caddy.Context) error {
	handler, err := parentProxy(ctx)
	if err != nil {
		return err
	}
	if err := mayFallBackTo(p.FallbackRaw); err != nil {
		return err
	}
	p.fallback = reverseproxy.RandomSelection{}
	if p.FallbackRaw != nil {
		mod, err := ctx.LoadModule(p, "FallbackRaw")
		if err != nil {
			return fmt.Errorf("loading fallback selection policy: %w", err)
		}
		p.fallback = mod.(reverseproxy.Selector)
	}
	p.group, err = newGroup(ctx, handler, p.Check)
	return err
}

// mayFallBackTo refuses the policies that cannot choose from a part of the list, also as
// the fallback of the fallback.
func mayFallBackTo(raw json.RawMessage) error {
	for raw != nil {
		var policy struct {
			Name     string          `json:"policy"`
			Fallback json.RawMessage `json:"fallback"`
		}
		_ = json.Unmarshal(raw, &policy) // what is no policy is refused as it is loaded
		switch policy.Name {
		case "weighted_round_robin":
			return errors.New("weighted_round_robin cannot be the fallback: its weights belong to positions in the list of upstreams, which change when one is left out")
		case "mcp_health":
			return errors.New("mcp_health cannot be its own fallback")
		}
		raw = policy.Fallback
	}
	return nil
}

// Cleanup gives the checkers back.
func (p *Policy) Cleanup() error {
	if p.group == nil {
		return nil
	}
	return p.group.cleanup()
}

// Select chooses one of the living upstreams in pool, or none. On the usual path,
// where the guard is in front and nothing failed before, it neither locks nor waits,
// and allocates no more than the leave to read the body again.
func (p *Policy) Select(pool reverseproxy.UpstreamPool, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	g := p.group
	members := g.membersOf(pool)
	t := transitOf(w, r)
	last := g.lastPick(t, r)
	if t != nil && t.ticket.pinned {
		if i, ok := g.selectOwner(t, pool, members); ok {
			g.notePick(t, r, pool, members, pool[i])
			return pool[i]
		}
		return nil
	}

	roll := g.roll()
	tier, all := g.survey(roll, pool, members, last)
	if last != "" && tier == mcphealth.TierDown { // no other one remains
		last = ""
		tier, all = g.survey(roll, pool, members, last)
	}
	var chosen *reverseproxy.Upstream
	switch {
	case all:
		chosen = p.fallback.Select(pool, r, w)
	case tier != mcphealth.TierDown:
		chosen = p.selectFrom(roll, pool, members, tier, last, r, w)
	}
	g.notePick(t, r, pool, members, chosen)
	return chosen
}

// pools are for the parts of upstream lists that are handed to other policies.
var pools = sync.Pool{New: func() any { return new(reverseproxy.UpstreamPool) }}

// selectFrom has the fallback choose among the upstreams of one tier.
func (p *Policy) selectFrom(roll roll, pool reverseproxy.UpstreamPool, members []*member, tier mcphealth.Tier, last string, r *http.Request, w http.ResponseWriter) *reverseproxy.Upstream {
	part := pools.Get().(*reverseproxy.UpstreamPool)
	for i, u := range pool {
		if u.Dial != last && p.group.tierFor(roll, members, i, u) == tier {
			*part = append(*part, u)
		}
	}
	chosen := p.fallback.Select(*part, r, w)
	clear(*part)
	*part = (*part)[:0]
	pools.Put(part)
	return chosen
}

// membersOf returns the members for pool, by position, if pool is the handler's
// own list; nil for lists of a dynamic source, which are looked up by address.
func (g *group) membersOf(pool reverseproxy.UpstreamPool) []*member {
	s := g.static.Load()
	if s == nil || len(pool) != len(*s) || len(pool) == 0 || &pool[0] != &g.handler.Upstreams[0] {
		return nil
	}
	return *s
}

func (g *group) tierOf(members []*member, i int, u *reverseproxy.Upstream) mcphealth.Tier {
	if members != nil {
		return members[i].tier()
	}
	if m := g.lookup(u.Dial); m != nil {
		return m.tier()
	}
	return g.unseen()
}

// survey finds the best tier in which pool has an upstream that can take a
// request, the one that failed this request last aside. all: every one is up, so
// that pool can be handed on as it is.
func (g *group) survey(roll roll, pool reverseproxy.UpstreamPool, members []*member, last string) (best mcphealth.Tier, all bool) {
	if last == "" && g.allUp(roll, pool, members) {
		return mcphealth.TierUp, true
	}
	best = mcphealth.TierDown
	for i, u := range pool {
		if u.Dial == last {
			continue
		}
		if tier := g.tierFor(roll, members, i, u); tier < best && u.Available() {
			best = tier
		}
	}
	return best, false
}

// allUp is the usual case, and as short as can be.
func (g *group) allUp(roll roll, pool reverseproxy.UpstreamPool, members []*member) bool {
	if members != nil && roll.now == 0 {
		for _, m := range members {
			if m.tier() != mcphealth.TierUp {
				return false
			}
		}
		return len(members) > 0
	}
	for i, u := range pool {
		if g.tierFor(roll, members, i, u) != mcphealth.TierUp {
			return false
		}
	}
	return len(pool) > 0
}

// lastPick returns the address that was chosen for this request before, if any:
// being asked again means that it failed. Its checker is told.
func (g *group) lastPick(t *transit, r *http.Request) string {
	switch {
	case t != nil:
		if t.picked.group != g {
			t.goesOn(r)
			return ""
		}
		if t.picked.dial == "" {
			return ""
		}
		g.noteTry(t)
		g.failedPick(r, t.picked.member)
		return t.picked.dial
	case g.retries.Load():
		dial := r.PathValue(g.varName)
		if dial == "" {
			return ""
		}
		if m := g.memberOf(dial); m != nil {
			m.sent() // without a guard nobody has counted it
			g.failedPick(r, m)
		}
		return dial
	}
	return ""
}

// noteTry notes whether the try before may have sent the request. If it did not, the
// body can be read from the start.
//
// The proxy tries again, unless it is told to by lb_retry_match, only where the dial
// failed; net/http may have read the body by then, for a connection that it found
// dead (honestConn). With HTTP/2 it may still be reading.
func (g *group) noteTry(t *transit) {
	buffered := g.handler.RequestBuffers != 0 // by the proxy, which sends it again by itself
	sent := false
	switch {
	case g.rematches.Load():
		sent = buffered || t.bodyWasRead()
	case buffered:
	case t.whole != nil && t.replay == nil && t.wholeFor == g: // in memory, over HTTP/1.1
	case g.http1.Load():
		t.rewind()
	default:
		sent = t.bodyWasRead()
	}
	t.mayHaveRun = t.mayHaveRun || sent
}

// failedPick reports an upstream that another is chosen for. If answers can lead to
// a retry, it may have answered; and no dial succeeds for a client that has left.
func (g *group) failedPick(r *http.Request, m *member) {
	switch {
	case m == nil:
	case r.Context().Err() != nil:
		m.settled()
	case g.rematches.Load():
		m.settled()
		m.doubted() // the tries of many clients bring few probes
	default:
		m.failed()
	}
}

// notePick tells the guard, or the next call for this request, what was chosen.
func (g *group) notePick(t *transit, r *http.Request, pool reverseproxy.UpstreamPool, members []*member, chosen *reverseproxy.Upstream) {
	if t == nil {
		if g.retries.Load() && chosen != nil {
			r.SetPathValue(g.varName, chosen.Dial) // the proxy's copy, which it keeps over its tries
		}
		return
	}
	t.picked = pick{group: g, none: chosen == nil}
	if chosen == nil {
		return
	}
	t.picked.dial = chosen.Dial
	if members == nil {
		t.picked.member = g.lookup(chosen.Dial)
	} else {
		for i, u := range pool {
			if u == chosen {
				t.picked.member = members[i]
				break
			}
		}
	}
	t.chosen(r, g)
	if t.picked.member != nil {
		t.picked.member.sent()
	}
}

// memberOf finds the member for an address wherever it is.
func (g *group) memberOf(dial string) *member {
	if s := g.static.Load(); s != nil {
		for _, m := range *s {
			if m.dial == dial {
				return m
			}
		}
	}
	return g.lookup(dial)
}

// UnmarshalCaddyfile sets up the policy from Caddyfile tokens. Syntax:
//
//	lb_policy mcp_health {
//	    fallback    <policy> [<args...>]
//	    path        <path>
//	    host        <host>
//	    header      <name> <value>
//	    interval    <duration>
//	    timeout     <duration>
//	    fall        <count>
//	    rise        <count>
//	    fast        <duration>
//	    initial     optimistic|wait
//	    era         auto|modern|legacy|sse
//	    alive_if    mcp|any_response
//	    deep        on|off
//	    expect_tool <name>
//	    call        <tool> [<json>]
//	    slow_after  <duration>
//	    health_path <path>
//	    fresh       on|off
//	    require_auth on|off
//	    error_rate  <percent>|off
//	    watch       on|off
//	    passive     on|off
//	    slow_start   <duration>
//	}
//
// header and expect_tool may be given more than once. What is not given is taken
// from the global option mcp_health.
func (p *Policy) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the name
	if d.NextArg() {
		return d.Errf("unexpected argument '%s': the policy among the living upstreams is set with the option 'fallback'", d.Val())
	}
	return p.unmarshalBlock(d, func(name string) (bool, error) {
		if name != "fallback" {
			return false, nil
		}
		if p.FallbackRaw != nil {
			return true, d.Err("option 'fallback' is given twice")
		}
		if !d.NextArg() {
			return true, d.ArgErr()
		}
		raw, err := unmarshalFallback(d)
		p.FallbackRaw = raw
		return true, err
	})
}

// unmarshalFallback reads the policy that d stands on.
func unmarshalFallback(d *caddyfile.Dispenser) (json.RawMessage, error) {
	name := d.Val()
	id := "http.reverse_proxy.selection_policies." + name
	mod, err := caddyfile.UnmarshalModule(d, id)
	if err != nil {
		return nil, err
	}
	sel, ok := mod.(reverseproxy.Selector)
	if !ok {
		return nil, d.Errf("module %s (%T) is not a reverseproxy.Selector", id, mod)
	}
	raw, err := moduleJSON(sel, "policy", name)
	if err == nil {
		err = mayFallBackTo(raw)
	}
	return raw, atLine(d, err)
}

// Interface guards
var (
	_ caddy.Provisioner     = (*Policy)(nil)
	_ caddy.CleanerUpper    = (*Policy)(nil)
	_ reverseproxy.Selector = (*Policy)(nil)
	_ caddyfile.Unmarshaler = (*Policy)(nil)
)
