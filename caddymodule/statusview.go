package caddymodule

import (
	"cmp"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/mcphealth/mcphealth/docs"
	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// overdueIntervals is how many intervals a probe may be late before the page says
	// so: 3, as the shipped alert.
	overdueIntervals = 3

	// recentChanges is how many changes of all upstreams together are listed: 12, a
	// screen of them.
	recentChanges = 12

	// maxOpen is how many broken upstreams the page shows opened: 10, a few screens.
	maxOpen = 10
)

// statusDocument is all that the page shows, and the JSON that programs get.
type statusDocument struct {
	At       time.Time       `json:"at"`
	State    mcphealth.State `json:"state"` // of the worst pool
	Headline string          `json:"headline"`
	// Since is when it became so; absent while all is well.
	Since     *time.Time       `json:"since,omitempty"`
	Counts    statusCounts     `json:"counts"`
	Endpoints []statusEndpoint `json:"endpoints"` // those that lose most first
	Pools     []statusPool     `json:"pools"`     // the worst first
	Changes   []statusChange   `json:"changes"`   // of all upstreams, the newest first

	now    time.Time // At with its monotonic reading: a clock that is set makes no probe late
	public bool
}

type statusCounts struct {
	Total    int `json:"total"`
	Up       int `json:"up"`
	Degraded int `json:"degraded"`
	Down     int `json:"down"`
	Unknown  int `json:"unknown"`
	Draining int `json:"draining"` // whatever their state
	Overdue  int `json:"overdue"`  // not probed when they should have been
}

// statusEndpoint is an endpoint as the admin API shows it, without its upstreams.
type statusEndpoint struct {
	endpointStatus
	Upstreams []upstreamDetail `json:"upstreams,omitempty"` // always empty: they stand in the pools
}

// statusPool is the upstreams of one reverse proxy.
type statusPool struct {
	Path   string          `json:"path"`
	State  mcphealth.State `json:"state"`           // down: none of them can serve; up: all can
	Since  *time.Time      `json:"since,omitempty"` // when it became so; absent while it is up
	Counts statusCounts    `json:"counts"`
	// Unchecked is how many upstreams cannot be probed, since their address depends
	// on the request. They are always tried.
	Unchecked int              `json:"unchecked,omitempty"`
	Upstreams []statusUpstream `json:"upstreams"` // the worst first

	id string // within the page
}

// statusUpstream is one upstream as the admin API shows it, and what that means.
type statusUpstream struct {
	upstreamDetail
	Meaning string `json:"meaning"`
	Advice  string `json:"advice"`
	Overdue bool   `json:"overdue"`

	History []probeSample `json:"history,omitempty"` // always empty: the admin API has it

	id   string // within the page
	open bool   // the page shows it opened
}

// statusChange is a change of any upstream.
type statusChange struct {
	ID       string `json:"id"`
	Upstream string `json:"upstream"`
	Path     string `json:"path"`
	upstreamMove
}

// statusDocument describes what the configuration's reverse proxies check. public
// leaves out what strangers must not see.
func (a *App) statusDocument(now time.Time, public bool) *statusDocument {
	d := &statusDocument{
		At: now.UTC().Round(0), Endpoints: []statusEndpoint{}, Pools: []statusPool{}, Changes: []statusChange{}, now: now, public: public,
	}
	all, details := endpoints(), map[string]upstreamDetail{}
	for _, e := range all {
		for _, u := range e.Upstreams {
			details[u.ID] = u
		}
	}
	paths, seen := map[string]bool{}, map[string]bool{}
	for _, g := range a.allGroups() {
		if a := g.nobody.Load(); a != nil {
			paths[a.path] = true // upstreams may have gone
		}
		entries, unchecked := g.entries()
		key := entriesKey(entries)
		if len(entries)+unchecked == 0 && !g.sourced.Load() || seen[key] {
			continue // a policy and a source may ask the same of the same upstreams
		}
		seen[key] = len(entries) > 0
		for _, e := range entries {
			paths[e.account.path] = true
		}
		d.addPool(g.check.Path, entries, unchecked, details)
	}
	for _, e := range all {
		if paths[e.Path] {
			d.addEndpoint(e)
		}
	}
	d.conclude()
	return d
}

// entries are the checkers of the group's upstreams in the order of the
// configuration; unchecked counts the upstreams that have none.
func (g *group) entries() (all []*entry, unchecked int) {
	var members []*member
	if s := g.static.Load(); s != nil {
		members = slices.Clone(*s)
	}
	if d := g.dynamic.Load(); d != nil {
		for _, dial := range slices.Sorted(maps.Keys(*d)) {
			members = append(members, (*d)[dial])
		}
	}
	for _, m := range members {
		if m.entry == nil {
			unchecked++
			continue
		}
		all = append(all, m.entry)
	}
	return all, unchecked
}

func entriesKey(all []*entry) string {
	var b strings.Builder
	for _, e := range all {
		b.WriteString(e.id)
	}
	return b.String()
}

func (d *statusDocument) addEndpoint(e endpointStatus) {
	d.Endpoints = append(d.Endpoints, statusEndpoint{endpointStatus: e})
}

func (d *statusDocument) addPool(path string, entries []*entry, unchecked int, details map[string]upstreamDetail) {
	p := statusPool{Path: shownPath(path), Unchecked: unchecked, Upstreams: []statusUpstream{}, id: fmt.Sprintf("p%d", len(d.Pools)+1)}
	for i, e := range entries {
		detail, ok := details[e.id]
		if !ok {
			continue // it has gone meanwhile
		}
		u := statusUpstream{upstreamDetail: detail}
		if d.public {
			u.hide(i + 1)
		}
		u.id = p.id + "-" + u.ID
		u.Meaning, u.Advice = docs.Words(string(u.Reason))
		u.Overdue = u.NextProbe != nil && d.now.Sub(*u.NextProbe).Seconds() > overdueIntervals*u.IntervalS
		p.Counts.count(u)
		p.Path = u.Path // after rewrites: the label of the metrics
		p.Upstreams = append(p.Upstreams, u)
	}
	slices.SortStableFunc(p.Upstreams, func(a, b statusUpstream) int { return cmp.Compare(a.rank(), b.rank()) })
	p.State = p.Counts.state()
	p.Since = p.since()
	d.Pools = append(d.Pools, p)
}

// hide takes out what names the upstream, and every free text, for an address may
// stand in each. It is called by its place in the configuration instead.
func (u *statusUpstream) hide(n int) {
	u.ID, u.Upstream, u.Host = publicID(u.ID), "upstream "+strconv.Itoa(n), ""
	u.Detail, u.Server, u.Warnings, u.Steps = "", mcphealth.ServerInfo{}, []string{}, []probeStep{}
	u.ProtocolVersions = nil
	for i := range u.Changes {
		u.Changes[i].Detail = ""
	}
}

// publicID is another name for an id, which is a hash of the address: without the
// key, which the process makes up, nobody can try addresses.
func publicID(id string) string {
	mac := hmac.New(sha256.New, publicKey())
	mac.Write([]byte(id))
	return hex.EncodeToString(mac.Sum(nil)[:8])
}

var publicKey = sync.OnceValue(func() []byte {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails
	return key
})

func (c *statusCounts) count(u statusUpstream) {
	c.Total++
	switch u.State {
	case mcphealth.Up:
		c.Up++
	case mcphealth.UpDegraded:
		c.Degraded++
	case mcphealth.Down:
		c.Down++
	default:
		c.Unknown++
	}
	if u.Draining {
		c.Draining++
	}
	if u.Overdue {
		c.Overdue++
	}
}

func (c *statusCounts) sum(o statusCounts) {
	c.Total += o.Total
	c.Up += o.Up
	c.Degraded += o.Degraded
	c.Down += o.Down
	c.Unknown += o.Unknown
	c.Draining += o.Draining
	c.Overdue += o.Overdue
}

// state is what a pool of such upstreams is: down if none of them can serve,
// degraded if not all can as they should.
func (c statusCounts) state() mcphealth.State {
	switch {
	case c.Total > 0 && c.Down == c.Total:
		return mcphealth.Down
	case c.Down+c.Degraded > 0:
		return mcphealth.UpDegraded
	case c.Unknown+c.Overdue > 0 || c.Total == 0:
		return mcphealth.StateUnknown
	}
	return mcphealth.Up
}

// calm: there is nothing to look at.
func (p *statusPool) calm() bool { return p.State == mcphealth.Up && p.Counts.Draining == 0 }

// calm: there is nothing to look at.
func (u *statusUpstream) calm() bool {
	return u.State == mcphealth.Up && !u.Draining && !u.Overdue
}

// broken: somebody should do something.
func (u *statusUpstream) broken() bool {
	return u.Overdue || u.State != mcphealth.Up && u.Reason != mcphealth.NeverProbed && u.Reason != mcphealth.Canceled
}

// rank is the place in the order: the worst first, the calm last.
func (u *statusUpstream) rank() int {
	if u.calm() {
		return len(worstFirst)
	}
	return slices.Index(worstFirst, u.State)
}

var worstFirst = []mcphealth.State{mcphealth.Down, mcphealth.UpDegraded, mcphealth.StateUnknown, mcphealth.Up}

// since is when the pool became what it is: down with the last of its upstreams, less
// than up with the first.
func (p *statusPool) since() (at *time.Time) {
	if p.State == mcphealth.Up {
		return nil
	}
	for i := range p.Upstreams {
		u := &p.Upstreams[i]
		if u.calm() {
			continue
		}
		if at == nil || u.Since.After(*at) == (p.State == mcphealth.Down) {
			at = &u.Since
		}
	}
	return at
}

// conclude says what all the pools together mean.
func (d *statusDocument) conclude() {
	down := 0
	for _, p := range d.Pools {
		d.Counts.sum(p.Counts)
		if p.State == mcphealth.Down {
			down++
		}
		d.Changes = append(d.Changes, p.changes()...)
	}
	slices.SortStableFunc(d.Pools, func(a, b statusPool) int {
		return cmp.Or(
			cmp.Compare(slices.Index(worstFirst, a.State), slices.Index(worstFirst, b.State)),
			cmp.Compare(b.Counts.Draining, a.Counts.Draining),
			cmp.Compare(a.Path, b.Path),
		)
	})
	slices.SortStableFunc(d.Endpoints, func(a, b statusEndpoint) int { return cmp.Compare(b.worstBurn(), a.worstBurn()) })
	slices.SortStableFunc(d.Changes, func(a, b statusChange) int { return b.At.Compare(a.At) })
	d.Changes = d.Changes[:min(len(d.Changes), recentChanges)]
	d.State = mcphealth.StateUnknown
	if len(d.Pools) > 0 {
		d.State = d.Pools[0].State
	}
	for _, p := range d.Pools {
		if p.State == d.State && p.Since != nil && (d.Since == nil || p.Since.Before(*d.Since)) {
			d.Since = p.Since
		}
	}
	d.open()
	d.Headline = d.headline(down)
}

// Spending reports whether the budget goes faster than allowed just now.
func (e statusEndpoint) Spending() bool {
	return len(e.Availability) > 0 && e.Availability[0].BurnRate != nil && *e.Availability[0].BurnRate > 1
}

func (e *statusEndpoint) worstBurn() (worst float64) {
	for _, w := range e.Availability {
		if w.BurnRate != nil {
			worst = max(worst, *w.BurnRate)
		}
	}
	return worst
}

// changes are those worth telling: not that an upstream came up as it should.
func (p *statusPool) changes() (all []statusChange) {
	for _, u := range p.Upstreams {
		all = append(all, u.changesAfter(time.Time{})...)
	}
	return all
}

func (u *statusUpstream) changesAfter(t time.Time) (all []statusChange) {
	for _, c := range u.Changes {
		if c.At.After(t) && (c.From != mcphealth.StateUnknown || c.To != mcphealth.Up) {
			all = append(all, statusChange{ID: u.ID, Upstream: u.Upstream, Path: u.Path, upstreamMove: c})
		}
	}
	return all
}

// open opens the worst.
func (d *statusDocument) open() {
	n := 0
	for i := range d.Pools {
		for j := range d.Pools[i].Upstreams {
			if u := &d.Pools[i].Upstreams[j]; n < maxOpen && u.broken() {
				u.open = true
				n++
			}
		}
	}
}

// headline is the one sentence to read from afar.
func (d *statusDocument) headline(down int) string {
	c := d.Counts
	switch {
	case len(d.Pools) == 0:
		return "No MCP endpoint is checked"
	case down == 1:
		return d.Pools[0].Path + " is down"
	case down > 1:
		return fmt.Sprintf("%d of %d pools are down", down, len(d.Pools))
	case c.Down > 0:
		return c.of(c.Down, "down")
	case c.Degraded > 0:
		return c.of(c.Degraded, "degraded")
	case c.Overdue > 0:
		return c.of(c.Overdue, "not probed any more")
	case c.Unknown > 0:
		return c.of(c.Unknown, "not known yet")
	case c.Total == 0:
		return "No upstream can be checked"
	case d.State == mcphealth.StateUnknown:
		return d.Pools[0].Path + " has no upstream that is known"
	case c.Total == 1:
		return "The upstream is up"
	}
	return fmt.Sprintf("All %d upstreams are up", c.Total)
}

// of says that n of the upstreams are something.
func (c statusCounts) of(n int, what string) string {
	switch {
	case c.Total == 1:
		return "The upstream is " + what
	case n == 1:
		return fmt.Sprintf("1 of %d upstreams is %s", c.Total, what)
	}
	return fmt.Sprintf("%d of %d upstreams are %s", n, c.Total, what)
}
