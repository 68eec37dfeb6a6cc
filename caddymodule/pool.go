package caddymodule

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// keepAfter is how long what is known of an upstream outlives the last reference
	// to it: 5 minutes, for generated configurations drop a site while its container
	// restarts.
	keepAfter = 5 * time.Minute

	// closeTimeout bounds how long an exiting process waits for its checkers to
	// end their sessions.
	closeTimeout = 3 * time.Second
)

// scheduler runs the probes of all checkers of the process.
var scheduler = newScheduler()

func newScheduler() *mcphealth.Scheduler {
	s := mcphealth.NewScheduler(mcphealth.Limits{})
	s.Watch = new(idleWatch).watch
	return s
}

// checkers holds the checkers of all configurations of the process, so that
// state survives a reload.
var checkers = &pool{entries: make(map[string]*entry), keep: keepAfter}

// A pool keeps one checker for each distinct question: upstreams of several
// handlers, and of one configuration and the next, share a checker if everything
// that changes a verdict is the same.
type pool struct {
	mu      sync.Mutex
	entries map[string]*entry
	shares  map[string][]*entry // by entry.shared
	keep    time.Duration
}

// question is everything that changes a verdict: the key of a checker. Headers are
// as they were written: a renewed token is no other question.
type question struct {
	Network, Address string // where to dial
	Target           mcphealth.Target
	Schedule         mcphealth.Schedule
	Transport        string // way.identity
}

// id is a short stable name of q which gives nothing of it away.
func (q question) id() string {
	q.Schedule.Scheduler = nil
	target, err := json.Marshal(q.Target) // a map's order is fixed in JSON
	if err != nil {
		target = fmt.Appendf(nil, "%+v", q.Target) // cannot happen: all fields are plain
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %s %+v", q.Network, q.Address, q.Transport, target, q.Schedule))
	return hex.EncodeToString(sum[:8])
}

// entry is one shared checker.
type entry struct {
	id       string
	upstream string // the address as the configuration says it
	path     string
	host     string
	network  string
	address  string
	interval time.Duration
	shared   string // its name among edges; "" = what is found out is not shared
	own      bool   // its address is another server's on each machine
	checker  *mcphealth.Checker
	account  *account     // what is counted of it
	lost     atomic.Int64 // sessions that went away with it
	drain    drain
	upAgain  atomic.Int64 // when it last came back, as clock says; 0: never

	resting atomic.Bool // nobody refers to it: the checker asks nothing

	// The state that the endpoint counts it in; "": none, for nobody refers to it.
	counting sync.Mutex
	counted  mcphealth.State

	// Who wants to know of changes, besides the log and the events.
	listening sync.Mutex
	listeners map[*func(mcphealth.Change)]struct{}

	header http.Header // as it was written
	sent   http.Header // as probes carry it; used by the checker's goroutine only

	// guarded by pool.mu
	refs  int
	owner *App // whose line the checker probes through
	timer *time.Timer
}

// acquire returns the checker for q and counts a reference. line makes the way
// to the upstream: for a new checker, and for one that comes from an earlier
// configuration and so probes through that one's transport.
func (p *pool) acquire(q question, upstream string, owner *App, line func() *mcphealth.Line) (*entry, error) {
	id := q.id()
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.entries[id]; e != nil {
		e.refs++
		if e.timer != nil {
			e.timer.Stop()
			e.timer = nil
		}
		if e.owner != owner {
			e.owner = owner
			e.checker.SetLine(line())
		}
		e.checker.Start() // it rests if nobody referred to it
		e.resting.Store(false)
		e.count()
		return e, nil
	}
	target := q.Target
	target.Header = headerNow(q.Target.Header, nil)
	prober, err := mcphealth.NewProber(target, line())
	if err != nil {
		return nil, err
	}
	e := &entry{}
	q.Schedule.Scheduler, q.Schedule.Lease, q.Schedule.Tell = scheduler, e.lease, e.tell
	checker, err := mcphealth.NewChecker(prober, q.Schedule)
	if err != nil {
		return nil, err
	}
	*e = entry{
		id: id, upstream: upstream, path: pathOf(q.Target.URL), host: q.Target.Host,
		network: q.Network, address: q.Address, interval: q.Schedule.Interval, shared: q.share(), own: isOwn(q.Network, q.Address),
		header: q.Target.Header, sent: target.Header,
		checker: checker, refs: 1, owner: owner,
		account: ledger.open(upstream, pathOf(q.Target.URL)),
	}
	e.drainSince(p.drainOf(q, e.path))
	e.count()
	checker.OnChange(e.changed)
	checker.OnResult(e.probed)
	if len(e.header) > 0 {
		checker.OnResult(e.renew)
	}
	checker.Start()
	p.entries[id] = e
	p.index(e, true)
	return e, nil
}

// listen has f called on each change, until cancel is.
func (e *entry) listen(f func(mcphealth.Change)) (cancel func()) {
	key := &f
	e.listening.Lock()
	defer e.listening.Unlock()
	if e.listeners == nil {
		e.listeners = make(map[*func(mcphealth.Change)]struct{})
	}
	e.listeners[key] = struct{}{}
	return func() {
		e.listening.Lock()
		defer e.listening.Unlock()
		delete(e.listeners, key)
	}
}

// changed tells of a change: first those at whom requests wait, for handlers of
// events take their time.
func (e *entry) changed(c mcphealth.Change) {
	defer caught("a change of state")
	e.noteRecovery(c)
	if c.From != c.To {
		e.account.moved(c)
		e.count()
	}
	e.listening.Lock()
	all := slices.Collect(maps.Keys(e.listeners))
	e.listening.Unlock()
	for _, f := range all {
		(*f)(c)
	}
	announce(e, c)
}

// probed counts a probe.
func (e *entry) probed(r mcphealth.Result) {
	defer caught("counting a probe")
	e.account.probed(r)
	e.count()
}

// tell passes on what a probe found out.
func (e *entry) tell(r mcphealth.Result) {
	defer caught("sharing a result")
	if s := currentSharer(); s != nil {
		s.tell(e, r)
	}
}

// lease is how long e is not to be probed here, because another edge does.
func (e *entry) lease(urgent bool) time.Duration {
	defer caught("asking for a lease")
	if s := currentSharer(); s != nil {
		return s.lease(e, urgent)
	}
	return 0
}

// count has the endpoint count e in the state that it is in now.
func (e *entry) count() {
	e.counting.Lock()
	defer e.counting.Unlock()
	now := mcphealth.State("")
	if !e.resting.Load() {
		now = e.checker.Snapshot().State
	}
	e.account.endpoint.move(e.counted, now, time.Now())
	e.counted = now
	observers.notify()
}

// renew has later probes carry what the header's placeholders are now. One that
// was refused for an old token asks again at once.
func (e *entry) renew(r mcphealth.Result) {
	defer caught("renewing a header")
	now := headerNow(e.header, e.sent)
	if maps.EqualFunc(now, e.sent, slices.Equal) {
		return
	}
	e.sent = now
	e.checker.SetHeader(now)
	if r.Reason == mcphealth.CredentialsRejected {
		e.checker.Probe()
	}
}

// drainOf is since when the same endpoint drains, asked in another way: a reload that
// changes the question does not end a drain. The caller holds p.mu.
func (p *pool) drainOf(q question, path string) int64 {
	if !everDrained.Load() {
		return 0 // the usual case, of 10,000 upstreams at the start, too
	}
	for _, e := range p.entries {
		if ns := e.drain.since.Load(); ns != 0 && e.network == q.Network && e.address == q.Address && e.path == path {
			return ns
		}
	}
	return 0
}

// release gives one reference back. After the last one the checker rests: it asks
// nothing any more and ends its session, but what it knows is kept for keepAfter.
func (p *pool) release(e *entry) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e.refs--
	if e.refs > 0 || e.timer != nil {
		return
	}
	e.resting.Store(true)
	e.count()
	e.checker.Pause()
	var t *time.Timer
	t = time.AfterFunc(p.keep, func() { p.drop(e, &t) })
	e.timer = t
}

// drop closes e unless it was acquired again since timer was set.
func (p *pool) drop(e *entry, timer **time.Timer) {
	p.mu.Lock()
	if e.refs > 0 || e.timer != *timer {
		p.mu.Unlock()
		return
	}
	delete(p.entries, e.id)
	p.index(e, false)
	p.mu.Unlock()
	_ = e.checker.Close()
	ledger.close(e.account)
	observers.notify()
}

// closeUnused closes what nobody refers to, at once: the process exits. Sessions
// held on servers end here.
func (p *pool) closeUnused(wait time.Duration) {
	p.mu.Lock()
	var unused []*entry
	for id, e := range p.entries {
		if e.refs > 0 {
			continue
		}
		if e.timer != nil {
			e.timer.Stop()
		}
		delete(p.entries, id)
		p.index(e, false)
		unused = append(unused, e)
	}
	p.mu.Unlock()

	done := make(chan struct{})
	go func() {
		var all sync.WaitGroup
		for _, e := range unused {
			all.Go(func() {
				_ = e.checker.Close()
				ledger.close(e.account)
			})
		}
		all.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(wait):
	}
}

// list returns what is referred to, or was until a moment ago, ordered by address.
func (p *pool) list() []*entry {
	p.mu.Lock()
	all := make([]*entry, 0, len(p.entries))
	for _, e := range p.entries {
		all = append(all, e)
	}
	p.mu.Unlock()
	sort.Slice(all, func(i, j int) bool {
		if all[i].upstream != all[j].upstream {
			return all[i].upstream < all[j].upstream
		}
		return all[i].id < all[j].id
	})
	return all
}

// index puts e among those that share what they find out, or takes it out. The caller
// holds p.mu.
func (p *pool) index(e *entry, in bool) {
	if e.shared == "" {
		return
	}
	if p.shares == nil {
		p.shares = make(map[string][]*entry)
	}
	rest := slices.DeleteFunc(slices.Clone(p.shares[e.shared]), func(o *entry) bool { return o == e })
	if in {
		rest = append(rest, e)
	}
	if len(rest) == 0 {
		delete(p.shares, e.shared)
	} else {
		p.shares[e.shared] = rest
	}
}

// sharing returns the entries of that name. They must not be changed.
func (p *pool) sharing(name string) []*entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.shares[name]
}

func (p *pool) get(id string) *entry {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.entries[id]
}

// inUse reports how many references there are to e.
func (p *pool) inUse(e *entry) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return e.refs
}

// announce tells of a change of state, once per checker, through the app that
// runs now: the checker may be older than it. Nobody cares for one that no
// configuration uses any more.
func announce(e *entry, c mcphealth.Change) {
	if c.From == c.To || checkers.inUse(e) == 0 {
		return
	}
	if app := apps.current(); app != nil {
		app.announce(e, c)
		return
	}
	logChange(caddy.Log().Named("mcp_health"), e, c)
}
