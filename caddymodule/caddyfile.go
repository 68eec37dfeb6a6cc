package caddymodule

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
)

func init() {
	httpcaddyfile.RegisterDirective("mcp_proxy", parseProxy)
	httpcaddyfile.RegisterDirectiveOrder("mcp_proxy", httpcaddyfile.Before, "reverse_proxy")
}

const (
	// mcp_proxy tries another upstream at once if the connection to one fails:
	// 3 more tries, 20 ms apart, which only dial errors (and GET) get.
	proxyRetries     = 3
	proxyTryInterval = 20 * time.Millisecond
)

// parseProxy reads the directive mcp_proxy, which is mcp_guard and reverse_proxy
// with the mcp_health policy in one. Syntax:
//
//	mcp_proxy [<matcher>] [<upstreams...>] {
//	    # waiting, as in mcp_guard
//	    hold        <duration>
//	    hold_max    <count>
//	    retry_after <duration>
//	    sticky
//	    ...
//
//	    # the check: the options of lb_policy mcp_health, with a prefix
//	    check_path     <path>
//	    check_interval <duration>
//	    check_header   <name> <value>
//	    ...
//
//	    # who chooses among the living upstreams; default random
//	    lb_policy <name> [<options...>]
//
//	    # and everything else that reverse_proxy knows
//	    ...
//	}
//
// A directive such as
//
//	mcp_proxy /mcp* app1:8000 app2:8000
//
// is the same as
//
//	mcp_guard /mcp*
//	reverse_proxy /mcp* app1:8000 app2:8000 {
//	    lb_policy mcp_health
//	    lb_retries 3
//	    lb_try_interval 20ms
//	}
//
// The last two lines are left out if lb_retries or lb_try_duration is given.
func parseProxy(h httpcaddyfile.Helper) ([]httpcaddyfile.ConfigValue, error) {
	if !h.Next() {
		return nil, h.ArgErr()
	}
	matcher, err := h.ExtractMatcherSet()
	if err != nil {
		return nil, err
	}
	h.Next() // the name again: taking the matcher out rewinds
	p := new(proxyParser)
	rest, err := p.split(h.NewFromNextSegment())
	if err != nil {
		return nil, err
	}
	rp := &reverseproxy.Handler{LoadBalancing: new(reverseproxy.LoadBalancing)}
	if err := rp.UnmarshalCaddyfile(rest); err != nil {
		return nil, err
	}
	if err := rp.FinalizeUnmarshalCaddyfile(h); err != nil {
		return nil, err
	}
	if rp.LoadBalancing.SelectionPolicyRaw, err = p.policyJSON(); err != nil {
		return nil, err
	}
	if !p.tries {
		rp.LoadBalancing.Retries = proxyRetries
		if rp.LoadBalancing.TryInterval == 0 {
			rp.LoadBalancing.TryInterval = caddy.Duration(proxyTryInterval)
		}
	}
	guard, err := moduleJSON(&p.guard, "handler", "mcp_guard")
	if err != nil {
		return nil, err
	}
	proxy, err := moduleJSON(rp, "handler", "reverse_proxy")
	if err != nil {
		return nil, err
	}
	route := caddyhttp.Route{HandlersRaw: []json.RawMessage{guard, proxy}}
	switch {
	case matcher != nil:
		route.MatcherSetsRaw = []caddy.ModuleMap{matcher}
	case h.Option("named_routes") == nil: // set once all named routes are read: this is one of them
		both, err := moduleJSON(&caddyhttp.Subroute{Routes: caddyhttp.RouteList{route}}, "handler", "subroute")
		if err != nil {
			return nil, err
		}
		route.HandlersRaw = []json.RawMessage{both} // of a route without a matcher, Caddy keeps the first handler there
	}
	return []httpcaddyfile.ConfigValue{{Class: "route", Value: route}}, nil
}

// proxyParser takes out of a mcp_proxy segment what reverse_proxy does not know.
type proxyParser struct {
	guard  Guard
	policy Policy
	tries  bool // the user says how often, or how long, to try
	seen   map[string]bool
}

// split reads the segment that d holds. It returns a dispenser with what is left
// for reverse_proxy: built anew, since deleting nested blocks from a dispenser
// leaves it in disorder.
func (p *proxyParser) split(d *caddyfile.Dispenser) (*caddyfile.Dispenser, error) {
	p.seen = make(map[string]bool)
	d.Next() // the name
	rest := []caddyfile.Token{d.Token()}
	rest = append(rest, d.RemainingArgsAsTokens()...)
	open := false
	for d.NextBlock(0) {
		if !open {
			d.Prev()
			rest = append(rest, d.Token()) // the brace
			d.Next()
			open = true
		}
		segment := d.NextSegment()
		taken, err := p.take(segment)
		if err != nil {
			return nil, err
		}
		if !taken {
			rest = append(rest, segment...)
		}
	}
	if err := atLine(d, errors.Join(p.guard.contradictions(), p.policy.contradictions())); err != nil {
		return nil, err
	}
	if open {
		rest = append(rest, d.Token()) // the closing brace
	}
	return caddyfile.NewDispenser(rest), nil
}

// take reads one subdirective if it is ours.
func (p *proxyParser) take(segment caddyfile.Segment) (bool, error) {
	d := caddyfile.NewDispenser(segment)
	d.Next()
	name := d.Val()
	if option, ok := strings.CutPrefix(name, "check_"); ok {
		if err := p.policy.unmarshalOption(d, option, p.seen); err != nil {
			return true, err
		}
		return true, noMore(d)
	}
	switch name {
	case "lb_policy":
		return true, p.takePolicy(d)
	case "lb_retries", "lb_try_duration":
		p.tries = true
		return false, nil
	}
	known, err := p.guard.unmarshalOption(d)
	if known && err == nil {
		err = noMore(d)
	}
	return known, err
}

// noMore refuses a block after an option that has none.
func noMore(d *caddyfile.Dispenser) error {
	if d.Next() {
		return d.Errf("unexpected token '%s'", d.Val())
	}
	return nil
}

func (p *proxyParser) takePolicy(d *caddyfile.Dispenser) error {
	if p.policy.FallbackRaw != nil {
		return d.Err("load balancing selection policy already specified")
	}
	if !d.NextArg() {
		return d.ArgErr()
	}
	if d.Val() == "mcp_health" {
		return d.Err("mcp_proxy always uses the policy mcp_health: set its options with check_…, and with lb_policy who chooses among the living")
	}
	raw, err := unmarshalFallback(d)
	p.policy.FallbackRaw = raw
	return err
}

func (p *proxyParser) policyJSON() (json.RawMessage, error) {
	return moduleJSON(&p.policy, "policy", "mcp_health")
}

// moduleJSON is what becomes of a module in the configuration. One that is no JSON would
// be left out of it without a word.
func moduleJSON(module any, key, name string) (json.RawMessage, error) {
	var warnings []caddyconfig.Warning
	raw := caddyconfig.JSONModuleObject(module, key, name, &warnings)
	if raw == nil {
		return nil, fmt.Errorf("%s %s cannot be written as JSON: %v", key, name, warnings)
	}
	return raw, nil
}
