package caddymodule

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// What is seen of the upstreams, for the admin API, the metrics and the page alike:
// endpoints() and its parts are the one source of their numbers.

// endpointStatus is one path that clients ask for, with the upstreams that serve it.
type endpointStatus struct {
	Path string `json:"path"`

	// State is that of the best upstream.
	State mcphealth.State `json:"state"`

	// HeldRequests wait for an upstream now.
	HeldRequests int64 `json:"held_requests"`

	// Requests are those of all upstreams, also of former ones, and those that reached
	// none. Only requests that pass through mcp_guard are counted.
	Requests requestCounts `json:"requests"`

	// Objective is the share of good requests that the burn rates are measured by.
	Objective float64 `json:"objective"`

	// Severity is what the burn rates call for: `page`, `ticket` or `none`.
	Severity mcphealth.Severity `json:"severity"`

	// Availability is over 5m, 30m, 1h, 6h and 3d, in that order.
	Availability []windowStatus `json:"availability"`

	// LastHour is the availability of each of the last 60 minutes, Last3Days that of each
	// of the last 72 hours, the oldest first; null where nothing is known.
	LastHour  []*float64 `json:"last_hour"`
	Last3Days []*float64 `json:"last_3d"`

	Upstreams []upstreamDetail `json:"upstreams"`
}

// windowStatus is what an endpoint was worth over one window.
type windowStatus struct {
	Window string `json:"window"`

	// Availability is 0 to 1; null, as BurnRate, while nothing is known. BurnRate is
	// how many times faster than allowed the error budget is being spent.
	Availability *float64 `json:"availability"`
	BurnRate     *float64 `json:"burn_rate"`

	// Source is which of the two decided, `traffic` or `probes`: the worse one.
	Source  string          `json:"source"`
	Traffic mcphealth.Share `json:"traffic"` // requests
	Probes  mcphealth.Share `json:"probes"`  // seconds
}

// requestCounts are requests by outcome.
type requestCounts struct {
	OK          uint64 `json:"ok"`
	RPCError    uint64 `json:"rpc_error"`
	ToolError   uint64 `json:"tool_error"`
	HTTPError   uint64 `json:"http_error"`
	Unavailable uint64 `json:"unavailable"`
}

// upstreamStatus is one upstream in the list.
type upstreamStatus struct {
	ID       string `json:"id"`
	Upstream string `json:"upstream"`
	Path     string `json:"path"`
	Host     string `json:"host,omitempty"`

	State   mcphealth.State   `json:"state"`
	Verdict mcphealth.Verdict `json:"verdict"`
	Reason  mcphealth.Reason  `json:"reason"`
	Detail  string            `json:"detail,omitempty"`
	Since   time.Time         `json:"since"`

	Era              mcphealth.Era        `json:"era"`
	ProtocolVersions []string             `json:"protocol_versions,omitempty"`
	Server           mcphealth.ServerInfo `json:"server"`

	LastProbe *time.Time `json:"last_probe,omitempty"`
	NextProbe *time.Time `json:"next_probe,omitempty"`
	IntervalS float64    `json:"interval_seconds"`
	LatencyMs float64    `json:"latency_ms"`

	// What was counted since the address and path were first seen, by whoever asked or
	// was served. It survives reloads.
	Probes      uint64            `json:"probes"`
	ProbeCounts []probeCount      `json:"probe_counts"`
	Transitions []transitionCount `json:"transitions"`
	Requests    requestCounts     `json:"requests"`

	// Draining: it gets no new work while others can take it, since then.
	Draining      bool       `json:"draining"`
	DrainingSince *time.Time `json:"draining_since,omitempty"`

	// LostSessions is how many requests were told that their session went away with
	// this upstream.
	LostSessions int64 `json:"lost_sessions"`

	// InUse is false for an upstream that no configuration names any more; it is
	// forgotten after some minutes.
	InUse bool `json:"in_use"`
}

type probeCount struct {
	Verdict mcphealth.Verdict `json:"verdict"`
	Reason  mcphealth.Reason  `json:"reason"`
	Count   uint64            `json:"count"`
}

type transitionCount struct {
	To     mcphealth.State  `json:"to"`
	Reason mcphealth.Reason `json:"reason"`
	Count  uint64           `json:"count"`
}

// upstreamDetail is one upstream alone.
type upstreamDetail struct {
	upstreamStatus
	Warnings []string       `json:"warnings"`
	Steps    []probeStep    `json:"steps"`
	Changes  []upstreamMove `json:"changes"` // the last 20, oldest first
	History  []probeSample  `json:"history"` // the last 60 probes, oldest first
}

type probeStep struct {
	Step       string  `json:"step"`
	HTTPStatus int     `json:"http_status"`
	RPCCode    int     `json:"rpc_code"`
	Ms         float64 `json:"ms"`
	Outcome    string  `json:"outcome"`
}

// upstreamMove is one change of state, or of the reason for it.
type upstreamMove struct {
	At      time.Time         `json:"at"`
	From    mcphealth.State   `json:"from"`
	To      mcphealth.State   `json:"to"`
	Verdict mcphealth.Verdict `json:"verdict"`
	Reason  mcphealth.Reason  `json:"reason"`
	Detail  string            `json:"detail,omitempty"`
}

// probeSample is what is kept of a probe that is over.
type probeSample struct {
	At      time.Time         `json:"at"`
	Ms      float64           `json:"ms"`
	Verdict mcphealth.Verdict `json:"verdict"`
	Reason  mcphealth.Reason  `json:"reason"`
}

// endpoints are all paths that upstreams in use serve, or that clients ask for in vain
// while there is none, ordered by path, and their upstreams by address.
func endpoints() []endpointStatus {
	all := []endpointStatus{}
	at := map[*endpoint]int{}
	for _, e := range checkers.list() {
		u := detailOf(e, e.checker.Snapshot())
		if !u.InUse {
			continue
		}
		i, ok := at[e.account.endpoint]
		if !ok {
			i = len(all)
			at[e.account.endpoint] = i
			all = append(all, e.account.endpoint.status())
		}
		all[i].Upstreams = append(all[i].Upstreams, u)
		all[i].State = better(all[i].State, u.State)
	}
	for _, a := range ledger.nobodies() {
		if _, ok := at[a.endpoint]; !ok && a.endpoint.asked() {
			s := a.endpoint.status()
			s.State, s.Upstreams = mcphealth.StateUnknown, []upstreamDetail{}
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b endpointStatus) int { return cmp.Compare(a.Path, b.Path) })
	return all
}

// better is the better of two states.
func better(a, b mcphealth.State) mcphealth.State {
	order := []mcphealth.State{mcphealth.Up, mcphealth.UpDegraded, mcphealth.StateUnknown, mcphealth.Down}
	for _, s := range order {
		if a == s || b == s {
			return s
		}
	}
	return a
}

func statusOf(e *entry, s mcphealth.Snapshot) upstreamStatus {
	draining := e.drainingSince()
	u := upstreamStatus{
		ID: e.id, Upstream: e.upstream, Path: e.path, Host: e.host,
		State: s.State, Verdict: s.Last.Verdict, Reason: s.Reason, Detail: s.Last.Detail, Since: s.Since,
		Era: s.Last.Era, ProtocolVersions: s.Last.ProtocolVersions, Server: s.Last.Server,
		LastProbe: timeOrNil(s.LastAt), NextProbe: timeOrNil(s.Next), IntervalS: e.interval.Seconds(),
		LatencyMs: s.Last.LatencyMs,
		Draining:  !draining.IsZero(), DrainingSince: timeOrNil(draining), LostSessions: e.lost.Load(),
		InUse: checkers.inUse(e) > 0,
	}
	if n := len(s.Changes); n > 0 && s.Reason == mcphealth.ErrorRate {
		u.Detail = s.Changes[n-1].Detail // the probe itself went well
	}
	e.account.describe(&u)
	return u
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

func detailOf(e *entry, s mcphealth.Snapshot) upstreamDetail {
	d := upstreamDetail{
		upstreamStatus: statusOf(e, s),
		Warnings:       append([]string{}, s.Last.Warnings...),
		Steps:          []probeStep{},
		Changes:        []upstreamMove{},
		History:        e.account.history(),
	}
	for _, st := range s.Last.Steps {
		d.Steps = append(d.Steps, probeStep{Step: st.Step, HTTPStatus: st.HTTPStatus, RPCCode: st.RPCCode, Ms: st.Ms, Outcome: st.Outcome})
	}
	for _, c := range s.Changes {
		d.Changes = append(d.Changes, upstreamMove{At: c.At, From: c.From, To: c.To, Verdict: c.Verdict, Reason: c.Reason, Detail: c.Detail})
	}
	return d
}

// observers are told that what endpoints() gives has changed.
var observers watchers

type watchers struct {
	mu  sync.Mutex
	all map[chan struct{}]bool
}

// subscribe returns a channel that holds a token once something has changed since the
// last one was taken: a probe ended, a state changed, an upstream came or went.
// Requests alone give none; look again every few seconds for those.
func (w *watchers) subscribe() (changed <-chan struct{}, cancel func()) {
	c := make(chan struct{}, 1)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = make(map[chan struct{}]bool)
	}
	w.all[c] = true
	return c, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.all, c)
	}
}

// notify leaves a token for each subscriber that has none.
func (w *watchers) notify() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.all {
		select {
		case c <- struct{}{}:
		default:
		}
	}
}

// objective is the share of good requests that the configuration asks for.
var objective atomic.Uint64 // math.Float64bits; 0: the default

func objectiveNow() float64 {
	return cmp.Or(math.Float64frombits(objective.Load()), mcphealth.DefaultObjective)
}

// ledger holds what is counted, for as long as anybody refers to it: longer than a
// configuration lives.
var ledger = &book{accounts: map[accountKey]*account{}, endpoints: map[string]*endpoint{}}

type book struct {
	mu        sync.Mutex
	accounts  map[accountKey]*account
	endpoints map[string]*endpoint
}

// accountKey is what the series of a metric are told apart by.
type accountKey struct{ upstream, path string }

// open returns the account of an upstream at a path and counts a reference. The
// account of upstream "" is for requests that reached nobody.
func (b *book) open(upstream, path string) *account {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := accountKey{label(upstream), label(path)}
	a := b.accounts[key]
	if a == nil {
		ep := b.endpoints[key.path]
		if ep == nil {
			now := time.Now()
			ep = &endpoint{path: key.path, budget: mcphealth.NewBudget(now), noted: now}
			b.endpoints[key.path] = ep
		}
		ep.refs++
		a = &account{accountKey: key, endpoint: ep}
		b.accounts[key] = a
	}
	a.refs++
	return a
}

// close gives one reference back; after the last one, all is forgotten.
func (b *book) close(a *account) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if a.refs--; a.refs > 0 {
		return
	}
	delete(b.accounts, a.accountKey)
	if a.endpoint.refs--; a.endpoint.refs == 0 {
		delete(b.endpoints, a.path)
	}
}

const (
	// maxHistory is how many probes are kept of an upstream: 60, ten minutes at the
	// default interval.
	maxHistory = 60

	// tickEvery is how often an endpoint's totals are remembered: 10 s, the step of
	// the shorter windows.
	tickEvery = 10 * time.Second
)

// durationBuckets are the upper bounds of probe durations, in seconds.
var durationBuckets = [...]float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}

// account is what is counted of one upstream at one path.
type account struct {
	accountKey
	endpoint *endpoint
	refs     int // guarded by ledger.mu

	requests outcomeCounts

	mu          sync.Mutex
	probes      map[probeKind]uint64
	transitions map[transitionKind]uint64
	durations   [len(durationBuckets) + 1]uint64
	seconds     float64 // all probes took
	recent      []sample
	at          int                // where the next sample goes
	infos       map[[3]string]bool // that got a series
	infosSince  time.Time
}

type probeKind struct {
	verdict mcphealth.Verdict
	reason  mcphealth.Reason
}

type transitionKind struct {
	to     mcphealth.State
	reason mcphealth.Reason
}

type sample struct {
	at     int64 // Unix milliseconds
	ms     float32
	result *probeKind // shared
}

// probed counts a probe.
func (a *account) probed(r mcphealth.Result) {
	took := time.Since(r.At).Seconds()
	kind := probeKind{r.Verdict, r.Reason}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.probes == nil {
		a.probes = make(map[probeKind]uint64, 1)
	}
	a.probes[kind]++
	bucket, _ := slices.BinarySearch(durationBuckets[:], took)
	a.durations[bucket]++
	a.seconds += took
	s := sample{at: r.At.UnixMilli(), ms: float32(r.LatencyMs), result: kindOf(kind)}
	if len(a.recent) < maxHistory {
		a.recent = append(a.recent, s)
	} else {
		a.recent[a.at] = s
	}
	a.at = (a.at + 1) % maxHistory
}

// kinds are the probe kinds seen so far, so that 60 samples share their words.
var kinds sync.Map // of probeKind to *probeKind

func kindOf(k probeKind) *probeKind {
	if p, ok := kinds.Load(k); ok {
		return p.(*probeKind)
	}
	p, _ := kinds.LoadOrStore(k, &k)
	return p.(*probeKind)
}

// moved counts a change of state.
func (a *account) moved(c mcphealth.Change) {
	kind := transitionKind{c.To, c.Reason}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.transitions == nil {
		a.transitions = make(map[transitionKind]uint64, 1)
	}
	a.transitions[kind]++
}

// describe fills in what is counted.
func (a *account) describe(u *upstreamStatus) {
	u.Requests = a.requests.now()
	a.mu.Lock()
	defer a.mu.Unlock()
	u.ProbeCounts = make([]probeCount, 0, len(a.probes))
	for k, n := range a.probes {
		u.ProbeCounts = append(u.ProbeCounts, probeCount{k.verdict, k.reason, n})
		u.Probes += n
	}
	slices.SortFunc(u.ProbeCounts, func(a, b probeCount) int {
		return cmp.Or(cmp.Compare(a.Verdict, b.Verdict), cmp.Compare(a.Reason, b.Reason))
	})
	u.Transitions = make([]transitionCount, 0, len(a.transitions))
	for k, n := range a.transitions {
		u.Transitions = append(u.Transitions, transitionCount{k.to, k.reason, n})
	}
	slices.SortFunc(u.Transitions, func(a, b transitionCount) int {
		return cmp.Or(cmp.Compare(a.To, b.To), cmp.Compare(a.Reason, b.Reason))
	})
}

func (a *account) history() []probeSample {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := make([]probeSample, 0, len(a.recent))
	for i := range a.recent {
		s := a.recent[i]
		if len(a.recent) == maxHistory {
			s = a.recent[(a.at+i)%maxHistory]
		}
		all = append(all, probeSample{
			At: time.UnixMilli(s.at), Ms: float64(s.ms), Verdict: s.result.verdict, Reason: s.result.reason,
		})
	}
	return all
}

// outcomeCounts counts requests by outcome, in the order of mcphealth.Outcomes.
type outcomeCounts [5]atomic.Uint64

const (
	outcomeOK = iota
	outcomeRPCError
	outcomeToolError
	outcomeHTTPError
	outcomeUnavailable
)

func outcomeIndex(o mcphealth.Outcome) int {
	switch o {
	case mcphealth.OutcomeRPCError:
		return outcomeRPCError
	case mcphealth.OutcomeToolError:
		return outcomeToolError
	}
	return outcomeOK
}

func (c *outcomeCounts) now() requestCounts {
	n := func(i int) uint64 { return c[i].Load() }
	return requestCounts{
		OK: n(outcomeOK), RPCError: n(outcomeRPCError), ToolError: n(outcomeToolError),
		HTTPError: n(outcomeHTTPError), Unavailable: n(outcomeUnavailable),
	}
}

// served counts a request that ended; wasted: it cost error budget. Two atomics, and
// a third one in the worse case.
func (a *account) served(outcome int, wasted bool) {
	a.requests[outcome].Add(1)
	a.endpoint.requests[outcome].Add(1)
	if wasted {
		a.endpoint.wasted.Add(1)
	}
}

// heldNow are all requests that wait in guards, and heldFor how long they did.
var (
	heldNow atomic.Int64
	heldFor = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "caddy_mcp_health_hold_seconds",
		Help:    "How long requests waited for an upstream to come back, whatever came of it.",
		Buckets: []float64{.01, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
	})
)

// held counts a request of a group (nil: it is not known) as one that waits, until the
// function that it returns is called.
func held(g *group) (over func()) {
	start := time.Now()
	var ep *endpoint
	if g != nil && g.nobody.Load() != nil {
		ep = g.nobody.Load().endpoint
		ep.held.Add(1)
	}
	heldNow.Add(1)
	return func() {
		heldNow.Add(-1)
		if ep != nil {
			ep.held.Add(-1)
		}
		heldFor.Observe(time.Since(start).Seconds())
	}
}

// endpoint is what is counted of all upstreams that serve one path.
type endpoint struct {
	path string
	refs int // accounts; guarded by ledger.mu

	requests outcomeCounts
	wasted   atomic.Uint64 // those of them that cost error budget
	held     atomic.Int64

	mu     sync.Mutex
	states [4]int // how many upstreams in use are in each, by stateIndex
	noted  time.Time
	probes mcphealth.Share // seconds
	budget *mcphealth.Budget

	severity mcphealth.Severity // that was told last
}

// stateIndex is where a state is counted; -1: nowhere.
func stateIndex(s mcphealth.State) int {
	return slices.Index(states, s)
}

// move counts an upstream out of one state and into another; "" is none.
func (ep *endpoint) move(from, to mcphealth.State, now time.Time) {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	ep.pass(now)
	if i := stateIndex(from); i >= 0 {
		ep.states[i]--
	}
	if i := stateIndex(to); i >= 0 {
		ep.states[i]++
	}
}

// pass credits the time since it was called last to what the upstreams were. The
// caller holds ep.mu.
func (ep *endpoint) pass(now time.Time) {
	seconds := now.Sub(ep.noted).Seconds()
	if seconds <= 0 {
		return
	}
	ep.noted = now
	up := ep.states[0] + ep.states[1]
	if up > 0 {
		ep.probes.Good += seconds
	}
	if up+ep.states[2] > 0 {
		ep.probes.Total += seconds
	}
}

// asked reports whether clients have asked for it.
func (ep *endpoint) asked() bool { return ep.requests.now() != requestCounts{} || ep.held.Load() > 0 }

// totals are those of now. The caller holds ep.mu.
func (ep *endpoint) totals() mcphealth.Totals {
	var all uint64
	for i := range ep.requests {
		all += ep.requests[i].Load()
	}
	good := all - min(ep.wasted.Load(), all)
	return mcphealth.Totals{Traffic: mcphealth.Share{Good: float64(good), Total: float64(all)}, Probes: ep.probes}
}

// tick remembers the totals of now, and tells if the budget is spent too fast, or not
// any more.
func (ep *endpoint) tick(now time.Time) {
	all := ep.availability(now)
	is := mcphealth.BurnSeverity(all)
	ep.mu.Lock()
	was := cmp.Or(ep.severity, mcphealth.SeverityNone)
	ep.severity = is
	ep.mu.Unlock()
	if app := apps.current(); was != is && app != nil {
		app.announceBudget(ep.path, was, is, all)
	}
}

// availability is over all windows until now.
func (ep *endpoint) availability(now time.Time) []mcphealth.Availability {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	ep.pass(now)
	return ep.budget.Over(now, ep.totals(), objectiveNow())
}

// status is that of the endpoint without its upstreams.
func (ep *endpoint) status() endpointStatus {
	s := endpointStatus{
		Path: ep.path, HeldRequests: ep.held.Load(), Objective: objectiveNow(),
		Requests: ep.requests.now(),
	}
	all := ep.availability(time.Now())
	s.Severity = mcphealth.BurnSeverity(all)
	for _, a := range all {
		w := windowStatus{Window: a.Window, Source: a.Source, Traffic: a.Traffic, Probes: a.Probes}
		if a.Source != "" {
			w.Availability, w.BurnRate = &a.Good, &a.BurnRate
		}
		s.Availability = append(s.Availability, w)
	}
	s.LastHour, s.Last3Days = ep.past(time.Now())
	return s
}

// past is the availability of the last 60 minutes and 72 hours.
func (ep *endpoint) past(now time.Time) (minutes, hours []*float64) {
	ep.mu.Lock()
	defer ep.mu.Unlock()
	known := func(all []mcphealth.Availability) []*float64 {
		shares := make([]*float64, len(all))
		for i, a := range all {
			if a.Source != "" {
				shares[i] = &a.Good
			}
		}
		return shares
	}
	t := ep.totals()
	return known(ep.budget.Past(now, t, time.Minute, 60, objectiveNow())), known(ep.budget.Past(now, t, time.Hour, 72, objectiveNow()))
}

// keepBudgets remembers the totals of all endpoints until ctx ends.
func (b *book) keepBudgets(ctx context.Context) {
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			for _, ep := range b.all() {
				ep.tick(now)
			}
		}
	}
}

// all returns the endpoints that are counted, in no order.
func (b *book) all() []*endpoint {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Collect(maps.Values(b.endpoints))
}
