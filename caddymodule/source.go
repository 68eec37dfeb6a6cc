package caddymodule

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/mcphealth/mcphealth/mcphealth"
)

func init() {
	caddy.RegisterModule(new(Source))
}

// Source is an upstream source that passes on only those upstreams of another
// source whose MCP server lives: those that are up; if none is, those that are
// degraded; if none is, those that failed a moment ago; else none. Use it if a
// selection policy that cannot be the fallback of `mcp_health` has to choose.
type Source struct {
	// The source whose upstreams are checked. Required.
	UpstreamsRaw json.RawMessage `json:"upstreams,omitempty" caddy:"namespace=http.reverse_proxy.upstreams inline_key=source"`

	Check

	upstreams reverseproxy.UpstreamSource
	group     *group
}

// CaddyModule returns the Caddy module information.
func (*Source) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.reverse_proxy.upstreams.mcp_health",
		New: func() caddy.Module { return new(Source) },
	}
}

// Provision sets up the source.
func (s *Source) Provision(ctx caddy.Context) error {
	handler, err := parentProxy(ctx)
	if err != nil {
		return err
	}
	if s.UpstreamsRaw == nil {
		return errors.New("upstreams: want the source whose upstreams are checked")
	}
	mod, err := ctx.LoadModule(s, "UpstreamsRaw")
	if err != nil {
		return fmt.Errorf("loading upstream source: %w", err)
	}
	s.upstreams = mod.(reverseproxy.UpstreamSource)
	s.group, err = newGroup(ctx, handler, s.Check)
	if err != nil {
		return err
	}
	s.group.source = s.upstreams
	return nil
}

// Cleanup gives the checkers back.
func (s *Source) Cleanup() error {
	if s.group == nil {
		return nil
	}
	return s.group.cleanup()
}

// GetUpstreams returns the living upstreams. If all are down the list is empty,
// which is no error: an error would make the reverse proxy take its static list.
func (s *Source) GetUpstreams(r *http.Request) ([]*reverseproxy.Upstream, error) {
	all, err := s.upstreams.GetUpstreams(r)
	if err != nil {
		return nil, err
	}
	g := s.group
	t := transitOf(nil, r)
	last := g.lastDialled(t, r)
	if t != nil && t.ticket.pinned {
		if i, ok := g.selectOwner(t, all, nil); ok {
			t.picked = pick{group: g, byName: true}
			t.chosen(r, g)
			return all[i : i+1 : i+1], nil
		}
		return nil, nil
	}
	roll := g.roll()
	best, others := mcphealth.TierDown, false
	for _, u := range all {
		if g.isLast(u, last) {
			continue
		}
		others = true
		best = min(best, g.tierFor(roll, nil, 0, u))
	}
	if !others || best == mcphealth.TierDown {
		last = nil
		for _, u := range all {
			best = min(best, g.tierFor(roll, nil, 0, u))
		}
	}
	living := make([]*reverseproxy.Upstream, 0, len(all))
	for _, u := range all {
		if best != mcphealth.TierDown && !g.isLast(u, last) && g.tierFor(roll, nil, 0, u) == best {
			living = append(living, u)
		}
	}
	if t != nil {
		t.picked = pick{group: g, none: len(living) == 0, byName: true}
		t.chosen(r, g)
	}
	return living, nil
}

func (g *group) isLast(u *reverseproxy.Upstream, last *member) bool {
	return last != nil && u.Dial == last.dial
}

// lastDialled finds the upstream that this request was sent to before, by the
// name that the proxy left in the request's placeholders: being asked again means
// that it failed. Its checker is told.
func (g *group) lastDialled(t *transit, r *http.Request) *member {
	if t == nil {
		return nil
	}
	if t.picked.group != g {
		t.goesOn(r)
		return nil
	}
	if !t.picked.byName {
		return nil
	}
	m := g.dialled(r)
	if m == nil {
		return nil
	}
	m.sent()
	g.noteTry(t)
	g.failedPick(r, m)
	return m
}

// dialled is the member that the reverse proxy dialled last for r.
func (g *group) dialled(r *http.Request) *member {
	repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return nil
	}
	address, _ := repl.GetString("http.reverse_proxy.upstream.hostport")
	all := g.dynamic.Load()
	if address == "" || all == nil {
		return nil
	}
	if m := (*all)[address]; m != nil {
		return m
	}
	for _, m := range *all {
		if m.address == address {
			return m
		}
	}
	return nil
}

// ResetCache passes the wish on if the wrapped source has a cache.
func (s *Source) ResetCache(r *http.Request) error {
	if c, ok := s.upstreams.(cachingSource); ok {
		return c.ResetCache(r)
	}
	return nil
}

// UnmarshalCaddyfile sets up the source from Caddyfile tokens. Syntax:
//
//	dynamic mcp_health {
//	    source <module> [<args...>] {
//	        ...
//	    }
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
// source is required. header and expect_tool may be given more than once. What is
// not given is taken from the global option mcp_health.
func (s *Source) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the name
	if d.NextArg() {
		return d.Errf("unexpected argument '%s': the wrapped source is set with the option 'source'", d.Val())
	}
	err := s.unmarshalBlock(d, func(name string) (bool, error) {
		if name != "source" {
			return false, nil
		}
		if s.UpstreamsRaw != nil {
			return true, d.Err("option 'source' is given twice")
		}
		if !d.NextArg() {
			return true, d.ArgErr()
		}
		module := d.Val()
		id := "http.reverse_proxy.upstreams." + module
		mod, err := caddyfile.UnmarshalModule(d, id)
		if err != nil {
			return true, err
		}
		src, ok := mod.(reverseproxy.UpstreamSource)
		if !ok {
			return true, d.Errf("module %s (%T) is not an UpstreamSource", id, mod)
		}
		s.UpstreamsRaw, err = moduleJSON(src, "source", module)
		return true, atLine(d, err)
	})
	if err == nil && s.UpstreamsRaw == nil {
		err = d.Err("option 'source' is required")
	}
	return err
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Source)(nil)
	_ caddy.CleanerUpper          = (*Source)(nil)
	_ reverseproxy.UpstreamSource = (*Source)(nil)
	_ cachingSource               = (*Source)(nil)
	_ caddyfile.Unmarshaler       = (*Source)(nil)
)
