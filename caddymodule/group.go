package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// maxDynamic is how many upstreams of dynamic sources one handler checks:
	// 10,000, the largest fleet that the budgets speak of.
	maxDynamic = 10_000

	// forgetAfter is how long a dynamic upstream is checked after it was last
	// seen: 10 minutes, longer than any source caches.
	forgetAfter = 10 * time.Minute

	// pollTimeout bounds one look at a dynamic source: 5 s, a slow DNS lookup.
	pollTimeout = 5 * time.Second
)

// A group is the upstreams of one reverse proxy handler as one policy or source
// asks for them.
type group struct {
	app     *App
	log     *zap.Logger
	check   Check // resolved
	sched   mcphealth.Schedule
	handler *reverseproxy.Handler
	source  reverseproxy.UpstreamSource // looked at in the background; nil for none. Set by start
	varName string                      // of the path value in which a request without a guard notes the pick
	room    *room
	made    caddy.CleanerUpper // the handler's default transport, if the group made it
	sawH2   *atomic.Bool       // whether a connection of the transport spoke HTTP/2; nil: not known
	peers   *mcphealth.Peers

	// Set by start; nothing is known before.
	way       atomic.Pointer[way]
	static    atomic.Pointer[[]*member] // in the order of handler.Upstreams
	dynamic   atomic.Pointer[map[string]*member]
	retries   atomic.Bool             // the handler tries more than once
	rematches atomic.Bool             // it may do so after an answer
	nobody    atomic.Pointer[account] // of requests that reached no upstream
	sourced   atomic.Bool             // there is a dynamic source
	http1     atomic.Bool             // the transport speaks HTTP/1.1 and nothing else
	plain     atomic.Bool             // and that without TLS
	keyed     atomic.Bool             // the handler may give requests an idempotency key
	agrees    atomic.Bool             // it agrees with each server, by TLS, on HTTP/1.1 or HTTP/2
	age       atomic.Uint32

	mu      sync.Mutex
	started bool
	stopped bool
	held    int  // requests that wait in the guard
	free    bool // the checkers were given back
	buffers bool // the handler reads bodies into a buffer first
	cancel  context.CancelFunc
	wanted  chan string // addresses that a request met first
	warned  map[string]bool
}

// member is one upstream of a group.
type member struct {
	dial     string
	address  string // as reverse_proxy names it once dialled
	entry    *entry // nil: it cannot be probed, and is always tried
	learn    bool   // clients' Host is the upstream's
	unlisten []func()
	seen     atomic.Uint32             // the group's age when last seen
	refused  atomic.Pointer[time.Time] // when the proxy itself was first seen not to want it; nil: it does
	missed   atomic.Pointer[time.Time] // when its source was first seen not to name it; nil: it does
	named    atomic.Pointer[named]
	room     *room // where requests wait that nobody else may serve
}

// tier is how willingly the member should be chosen: one atomic load.
func (m *member) tier() mcphealth.Tier {
	if m.entry == nil {
		return mcphealth.TierUp
	}
	tier := m.entry.checker.Tier()
	if tier == mcphealth.TierDown && m.entry.resting.Load() {
		return mcphealth.TierSuspect // nobody would notice that it is back
	}
	return tier
}

// isUp reports whether the member was found to live, and not to die since.
func (m *member) isUp() bool {
	return m.entry != nil && m.entry.checker.Snapshot().State == mcphealth.Up
}

// foundDown reports whether the member was found dead, even if nobody asks it any more.
func (m *member) foundDown() bool {
	return m.entry != nil && m.entry.checker.Tier() == mcphealth.TierDown
}

// The group's reports to the checker. Those of a member without one go nowhere.
func (m *member) sent() {
	m.wanted()
	if m.entry != nil {
		m.entry.checker.Sent()
	}
}

func (m *member) settled() {
	if m.entry != nil {
		m.entry.checker.Settled()
	}
}

func (m *member) doubted() {
	if m.entry != nil {
		m.entry.checker.Doubted()
	}
}

func (m *member) failed() {
	if m.entry != nil {
		m.entry.checker.Failed()
	}
}

func (m *member) probe() {
	if m.entry != nil {
		m.entry.checker.Probe()
	}
}

func (m *member) answered(host string) {
	if m.entry == nil {
		return
	}
	if !m.learn {
		host = ""
	}
	m.entry.checker.Answered(host)
}

func (m *member) served(erred bool) {
	if m.entry != nil {
		m.entry.checker.Served(erred)
	}
}

// newGroup makes the group of handler for check, which the app starts.
func newGroup(ctx caddy.Context, handler *reverseproxy.Handler, check Check) (*group, error) {
	app, err := appOf(ctx)
	if err != nil {
		return nil, err
	}
	if err := check.contradictions(); err != nil {
		return nil, err
	}
	check = check.inherit(app.Check).resolved()
	if err := errors.Join(check.validate(), check.whole()); err != nil {
		return nil, err
	}
	g := &group{
		app:     app,
		log:     ctx.Logger(),
		check:   check,
		handler: handler,
		wanted:  make(chan string, 256),
		warned:  make(map[string]bool),
		peers:   mcphealth.NewPeers(),
	}
	g.sched = g.check.schedule()
	g.sched.Floor = app.ProbeBudget.floor()
	g.varName = fmt.Sprintf("mcp_health.pick.%p", g)
	g.room = newRoom(g.best, g.nudge)
	g.made, g.sawH2, err = app.keepHonest(ctx, handler)
	if err != nil {
		return nil, fmt.Errorf("provisioning default transport: %w", err)
	}
	if g.buffers = handler.RequestBuffers != 0; g.buffers {
		buffering.Add(1)
	}
	app.adopt(g)
	endWith(ctx)
	return g, nil
}

// parentProxy finds the reverse proxy that the module being provisioned is part
// of. Ask during Provision only: later, the lineage may be a sibling's.
func parentProxy(ctx caddy.Context) (*reverseproxy.Handler, error) {
	mods := ctx.Modules()
	for i := len(mods) - 1; i >= 0; i-- {
		if h, ok := mods[i].(*reverseproxy.Handler); ok {
			return h, nil
		}
	}
	return nil, errors.New("mcp_health works inside a reverse_proxy handler only")
}

// start makes checkers for the upstreams that are known. It reads what the
// handler became when it was provisioned.
func (g *group) start() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.started || g.stopped {
		return
	}
	g.started = true
	w := newWay(g.handler)
	g.way.Store(w)
	g.http1.Store(w.speaksHTTP1())
	g.plain.Store(w.isPlain())
	g.keyed.Store(addsKey(g.handler.Headers))
	g.agrees.Store(!w.speaksH2C() && w.agrees())
	if lb := g.handler.LoadBalancing; lb != nil {
		g.retries.Store(lb.TryDuration > 0 || lb.Retries > 0)
		g.rematches.Store(len(lb.RetryMatch) > 0)
	}
	g.nobody.Store(ledger.open("", g.endpointPath()))
	g.dynamic.Store(&map[string]*member{})
	if g.source == nil { // a policy: the handler's own lists
		members := make([]*member, len(g.handler.Upstreams))
		for i, u := range g.handler.Upstreams {
			members[i] = g.newMember(u.Dial)
			g.remind(members[i], u)
		}
		g.static.Store(&members)
		g.source = g.handler.DynamicUpstreams
	}
	if g.source != nil {
		g.sourced.Store(true)
		ctx, cancel := context.WithCancel(context.Background())
		g.cancel = cancel
		go g.follow(ctx)
	}
}

// endpointPath is the path that upstreams of the group are asked at, unless that
// depends on the upstream.
func (g *group) endpointPath() string {
	di, err := dialInfo("localhost:80")
	if err != nil {
		return shownPath(g.check.Path)
	}
	u, _, _, err := g.way.Load().url(di, g.check.Path)
	if err != nil {
		return shownPath(g.check.Path)
	}
	return shownPath(u.RequestURI())
}

// speaksHTTP1 reports whether no upstream of the group has spoken HTTP/2 so far.
func (g *group) speaksHTTP1() bool {
	return g.http1.Load() || g.agrees.Load() && g.sawH2 != nil && !g.sawH2.Load()
}

// stop ends the group's life in the configuration. Its checkers are given back when
// no request of it is held any more: those go on once an upstream is back. Requests
// that are still under way go on reading the states.
func (g *group) stop() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopped {
		return
	}
	g.stopped = true
	if g.cancel != nil {
		g.cancel()
	}
	if g.buffers {
		buffering.Add(-1)
	}
	if g.held == 0 || caddy.Exiting() {
		g.release()
	}
}

// enter notes that a request of the group is held, and leave that it is not any more.
func (g *group) enter() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.held++
}

func (g *group) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.held--; g.held == 0 && g.stopped {
		g.release()
	}
}

// release gives the checkers back. The caller holds g.mu.
func (g *group) release() {
	if !g.started || g.free {
		return
	}
	g.free = true
	ledger.close(g.nobody.Load())
	if s := g.static.Load(); s != nil {
		for _, m := range *s {
			m.release()
		}
	}
	for _, m := range *g.dynamic.Load() {
		m.release()
	}
}

// newMember acquires the checker for dial. An address, or a name for TLS, that depends on
// the request cannot be probed: such an upstream is always tried.
func (g *group) newMember(dial string) *member {
	m := &member{dial: dial}
	m.seen.Store(g.age.Load())
	di, err := dialInfo(dial)
	if err != nil {
		g.warnOnce(dial, err)
		return m
	}
	m.address = di.Address
	w := g.way.Load()
	if err := w.knowsName(di); err != nil {
		g.warnOnce(dial, err)
		return m
	}
	u, host, learn, err := w.url(di, g.check.Path)
	if err != nil {
		g.warnOnce(dial, err)
		return m
	}
	m.learn = learn
	check := g.check
	check.Host = or(check.Host, host)
	q := question{
		Network: di.Network, Address: di.Address,
		Target: check.target(u.String()), Schedule: g.sched, Transport: w.identity,
	}
	e, err := checkers.acquire(q, dial, g.app, func() *mcphealth.Line { return w.line(di) })
	if err != nil {
		g.warnOnce(dial, err)
		return m
	}
	m.entry = e
	m.room = newRoom(m.tier, m.probe)
	kick := func(back bool) {
		g.room.kick(back)
		m.room.kick(back)
	}
	m.unlisten = []func(){
		e.listen(func(c mcphealth.Change) { kick(isUp(c.To) && !isUp(c.From)) }),
		e.checker.OnResult(func(mcphealth.Result) { kick(false) }),
		g.peers.Join(e.checker),
	}
	return m
}

// remind has each probe of a static upstream note what else is known to be well with it:
// that it is in the list, and that the proxy itself wants it.
func (g *group) remind(m *member, u *reverseproxy.Upstream) {
	if m.entry == nil {
		return
	}
	m.unlisten = append(m.unlisten, m.entry.checker.OnResult(func(mcphealth.Result) {
		defer caught("what a probe says of a list") // the proxy may have a circuit breaker
		if serving.Load() == g.app {                // else it goes with the configuration
			m.listed()
		}
		if u.Healthy() {
			m.wanted()
		}
	}))
}

// cleanup stops the group for good.
func (g *group) cleanup() error {
	g.stop()
	if g.made != nil {
		return g.made.Cleanup()
	}
	return nil
}

func (m *member) release() {
	if m.entry == nil {
		return
	}
	for _, f := range m.unlisten {
		f()
	}
	checkers.release(m.entry)
}

func (g *group) warnOnce(dial string, err error) {
	if g.warned[dial] {
		return
	}
	g.warned[dial] = true
	g.log.Warn("upstream cannot be probed and is always tried", zap.String("upstream", dial), zap.Error(err))
}

func (g *group) warnTooMany(dial string) {
	const key = "too many" // no address
	if !g.warned[key] {
		g.warned[key] = true
		g.log.Warn("the source has more upstreams than are checked: the others are always tried", zap.Int("checked", maxDynamic), zap.String("not_checked", dial))
	}
}

// unseen is the tier of a dynamic upstream that has no checker yet.
func (g *group) unseen() mcphealth.Tier {
	if g.sched.Wait {
		return mcphealth.TierDown
	}
	return mcphealth.TierUp
}

// lookup finds the member for a dynamic upstream; nil if there is none yet, which
// is then on its way. It does not wait, and locks nothing.
func (g *group) lookup(dial string) *member {
	all := g.dynamic.Load()
	if all == nil {
		return nil // not started
	}
	m := (*all)[dial]
	if m == nil {
		select {
		case g.wanted <- dial:
		default:
		}
		return nil
	}
	if age := g.age.Load(); m.seen.Load() != age {
		m.seen.Store(age)
		m.listed()
	}
	return m
}

// follow keeps the checkers of a dynamic source in step with it, until ctx ends.
func (g *group) follow(ctx context.Context) {
	look := time.NewTicker(max(g.sched.Interval, 100*time.Millisecond))
	defer look.Stop()
	grow := time.NewTicker(forgetAfter / 10)
	defer grow.Stop()
	g.poll(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case dial := <-g.wanted:
			g.ensure(append(takeAll(g.wanted), dial))
		case <-look.C:
			g.poll(ctx)
		case <-grow.C:
			g.grow()
		}
	}
}

func takeAll(c chan string) (all []string) {
	for {
		select {
		case s := <-c:
			all = append(all, s)
		default:
			return all
		}
	}
}

// poll asks the source for its upstreams with a request that nobody sent, so that
// they are probed before the first request comes. Sources that need a real one
// are followed by the requests alone.
func (g *group) poll(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://localhost/", nil)
	if err != nil {
		return
	}
	var pool []*reverseproxy.Upstream
	func() {
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("panic: %v", p)
			}
		}()
		pool, err = g.source.GetUpstreams(fakeRequest(r, caddy.NewReplacer()))
	}()
	if err != nil {
		g.mu.Lock()
		defer g.mu.Unlock()
		if !g.warned[""] && ctx.Err() == nil {
			g.warned[""] = true
			g.log.Info("the upstream source does not answer without a request; its upstreams are probed once requests came", zap.Error(err))
		}
		return
	}
	dials := make([]string, 0, len(pool))
	for _, u := range pool {
		dials = append(dials, u.Dial)
	}
	g.ensure(dials)
}

// ensure makes members for those of dials that have none, and notes that the
// others were seen. Readers get a new map each time.
func (g *group) ensure(dials []string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopped {
		return
	}
	old := *g.dynamic.Load()
	var all map[string]*member
	for _, dial := range dials {
		if m := old[dial]; m != nil {
			m.seen.Store(g.age.Load())
			m.listed()
			continue
		}
		if all[dial] != nil {
			continue
		}
		if max(len(old), len(all)) >= maxDynamic {
			g.warnTooMany(dial)
			continue // others are known, and were seen
		}
		if all == nil {
			all = make(map[string]*member, len(old)+len(dials))
			maps.Copy(all, old)
		}
		all[dial] = g.newMember(dial)
		all[dial].listed()
	}
	if all != nil {
		g.dynamic.Store(&all)
	}
}

// grow lets a tenth of forgetAfter pass and forgets who was not seen for all of it.
func (g *group) grow() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.stopped {
		return
	}
	age := g.age.Add(1)
	old := *g.dynamic.Load()
	all := make(map[string]*member, len(old))
	for dial, m := range old {
		if age-m.seen.Load() > 10 {
			m.release()
			delete(g.warned, dial)
			continue
		}
		all[dial] = m
	}
	g.dynamic.Store(&all)
}

// each calls f for all members that are known.
func (g *group) each(f func(*member)) {
	if s := g.static.Load(); s != nil {
		for _, m := range *s {
			f(m)
		}
	}
	if d := g.dynamic.Load(); d != nil {
		for _, m := range *d {
			f(m)
		}
	}
}

// best is the best tier that a request could get now. What a dynamic source would
// give the next request is not known: it is always worth a try.
func (g *group) best() mcphealth.Tier {
	best := mcphealth.TierDown
	if g.sourced.Load() {
		best = mcphealth.TierSuspect
	}
	if s := g.static.Load(); s != nil {
		for i, m := range *s {
			if g.handler.Upstreams[i].Available() {
				best = min(best, m.tier())
			}
		}
	}
	if d := g.dynamic.Load(); d != nil {
		for _, m := range *d {
			best = min(best, m.tier())
		}
	}
	return best
}

// nudge has everything that is not up probed now: somebody waits for it.
func (g *group) nudge() {
	g.each(func(m *member) {
		if t := m.tier(); m.entry != nil && (t == mcphealth.TierDown || t == mcphealth.TierSuspect) {
			m.entry.checker.Probe()
		}
	})
}

// outage is why the group cannot serve, and when it is worth to ask again; empty
// and 0 if nothing is known.
func (g *group) outage(now time.Time) (mcphealth.Reason, time.Duration) {
	var reason mcphealth.Reason
	var soonest time.Duration
	members := 0
	g.each(func(m *member) {
		members++
		if !m.foundDown() {
			return
		}
		s := m.entry.checker.Snapshot()
		if d := s.RetryAfter(now); soonest == 0 || d < soonest {
			soonest, reason = d, s.Reason
		}
	})
	if members == 0 {
		return mcphealth.RouteAbsent, 0
	}
	if reason == "" && g.static.Load() != nil {
		return unavailability(g.handler.Upstreams), 0
	}
	return reason, soonest
}

// unavailability is why the proxy itself would use none of its upstreams, as far as
// that is known: one has all the requests that it may have, or the proxy's own
// checks (health_uri, fail_duration) are against it.
func unavailability(pool reverseproxy.UpstreamPool) mcphealth.Reason {
	switch {
	case slices.ContainsFunc(pool, (*reverseproxy.Upstream).Full):
		return mcphealth.RateLimited
	case slices.ContainsFunc(pool, func(u *reverseproxy.Upstream) bool { return !u.Healthy() }):
		return mcphealth.HealthDown
	}
	return ""
}
