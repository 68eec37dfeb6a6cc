//go:build go1.21

package mcphealth

import (
	"context"
	"fmt"
	"hash/fnv"
	"math/rand"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// confirmAfter is how soon a death that the watch or traffic announced is
	// confirmed: 50 ms, for a refused connection seldom heals, and clients wait.
	confirmAfter = 50 * time.Millisecond
	// maxQuiet is how many intervals traffic may stand in for probes before the
	// upstream is asked all the same.
	maxQuiet = 6
	// startGrace is how long an upstream that was never seen alive may refuse
	// connections before that takes it down, and startRetry how soon it is asked again
	// meanwhile: a sidecar that binds its port 2.5 s after its proxy is starting, not
	// down. https://github.com/google/ChromeBrowserEnterprise/pull/79
	startGrace = 5 * time.Second
	startRetry = 500 * time.Millisecond
	// maxRetryAfter caps how long a server may ask not to be probed.
	maxRetryAfter = 5 * time.Minute
	// minGap is the shortest pause between two probes of one upstream.
	minGap = 10 * time.Millisecond
)

// A Checker keeps the state of one upstream: it probes when its Scheduler says so,
// counts the verdicts, and hears from traffic. It holds no goroutine between probes. Tier,
// Snapshot, Sent, Answered and Settled neither lock nor wait.
type Checker struct {
	p     *Prober
	sched Schedule

	tier atomic.Int32
	snap atomic.Value // Snapshot

	// Traffic: requests without an answer yet, when one last came (any, and a
	// JSON-RPC one) by clock, and whether the suspicion timer runs.
	born      time.Time
	waiting   atomic.Int64
	lastSign  atomic.Int64
	lastRPC   atomic.Int64
	lastDoubt atomic.Int64 // when Doubted was believed
	watching  atomic.Bool
	rate      errorRate

	mu        sync.Mutex
	turn      *turn
	started   bool
	closed    bool
	cancel    context.CancelFunc // ends the probe that runs, or ran last
	last      time.Time          // when the last probe began, or another edge had the lease for it
	asked     time.Time          // when the one that is under way began; zero: none is
	paused    bool
	drained   bool // Drain
	running   bool
	idle      *sync.Cond          // running became false
	alarm     alarm               // why the next probe was brought forward
	again     bool                // asked for while one was running
	missed    bool                // was due while one was running, or its listeners were
	doubt     map[alarm]time.Time // an alarm of this kind was false: none brings a probe before
	skipped   int                 // intervals in a row that traffic stood in for
	fresh     int                 // probes since the upstream went down, or none found out
	threshold threshold
	opinions  opinions
	peers     []*Peers
	nextID    int
	onChange  map[int]func(Change)
	onResult  map[int]func(Result)
	news      []Change // that the listeners have yet to hear of
	telling   bool     // they are being told
}

// alarm is what brought a probe forward.
type alarm int

const (
	none    alarm = iota
	asked         // Probe
	failure       // a live request failed, or many report failures
	silence       // live requests get no answers
	ending        // the watched connection ended
	strange       // a live answer was none of an MCP server
	rumor         // one other edge alone says that it is dead
	dispute       // another edge says otherwise than this one has seen, or than it could know
)

// NewChecker makes a checker that Start sets going. The error wraps ErrSchedule.
func NewChecker(p *Prober, s Schedule) (*Checker, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	s = s.WithDefaults()
	c := &Checker{p: p, sched: s, doubt: map[alarm]time.Time{}, onChange: map[int]func(Change){}, onResult: map[int]func(Result){}}
	if c.sched.Scheduler == nil {
		c.sched.Scheduler = NewScheduler(Limits{})
	}
	c.turn = newTurn(s.Interval, func() bool { return c.run() })
	c.idle = sync.NewCond(&c.mu)
	c.born = time.Now()
	c.threshold = threshold{rise: s.Rise, fall: s.Fall, state: StateUnknown}
	if s.Wait {
		c.tier.Store(int32(TierDown))
	}
	c.snap.Store(Snapshot{URL: p.target.URL, State: StateUnknown, Reason: NeverProbed, Since: time.Now(),
		Last: Result{URL: p.target.URL, Verdict: Unknown, Reason: NeverProbed, Era: EraUnknown}})
	return c, nil
}

// Target is what is asked.
func (c *Checker) Target() Target { return c.p.target }

// Start begins to probe, or goes on after a Pause, at once or as the floor allows. Where it probes
// already it does nothing.
func (c *Checker) Start() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	if !c.started || c.paused {
		c.started, c.paused = true, false
		c.due(c.patience(none))
	}
}

// due has the next probe after wait.
func (c *Checker) due(wait time.Duration) {
	s := c.Snapshot()
	s.Next = c.sched.Scheduler.set(c.turn, time.Now().Add(wait))
	c.snap.Store(s)
}

// share is a random part of d.
func (c *Checker) share(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return time.Duration(rand.Int63n(int64(d)))
}

// Pause stops probing and has the held session ended, in the background. What is
// known stays, for a Start to go on from.
func (c *Checker) Pause() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || !c.started || c.paused {
		return
	}
	c.paused = true
	c.sched.Scheduler.drop(c.turn)
	go c.rest()
}

// rest waits for the probe that a Pause found running, and ends the session.
func (c *Checker) rest() {
	c.mu.Lock()
	for c.running {
		c.idle.Wait()
	}
	still := c.paused && !c.closed
	c.mu.Unlock()
	if still {
		c.endSession()
	}
}

func (c *Checker) endSession() {
	ctx, cancel := context.WithTimeout(context.Background(), endTimeout)
	defer cancel()
	c.p.Close(ctx)
}

// Farewell prepares the end of the session that is held now, for a process that will have
// no time for Close's: what it returns ends the session by way, once, and Close does not
// again. It is nil if there is no session.
func (c *Checker) Farewell() func(way http.RoundTripper) { return c.p.farewell() }

// Tier is how willingly the request path should choose the upstream.
func (c *Checker) Tier() Tier { return Tier(c.tier.Load()) }

// Snapshot is all that is known now.
func (c *Checker) Snapshot() Snapshot { return c.snap.Load().(Snapshot) }

// OnChange has f called after each change of state or reason, in order and never twice at
// once, with no lock held. f must not block for long: the next probe waits for it.
func (c *Checker) OnChange(f func(Change)) (cancel func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := c.nextID
	c.nextID++
	c.onChange[id] = f
	return func() {
		c.mu.Lock()
		delete(c.onChange, id)
		c.mu.Unlock()
	}
}

// OnResult has f called after each probe, as OnChange does.
func (c *Checker) OnResult(f func(Result)) (cancel func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	id := c.nextID
	c.nextID++
	c.onResult[id] = f
	return func() {
		c.mu.Lock()
		delete(c.onResult, id)
		c.mu.Unlock()
	}
}

// SetLine has later probes go another way, as after a reload.
func (c *Checker) SetLine(l *Line) { c.p.SetLine(l) }

// SetHeader has later probes send other headers, as when a token was renewed.
func (c *Checker) SetHeader(h http.Header) { c.p.SetHeader(h) }

// Probe has the upstream asked now; it does not wait for the answer. It reports false if
// the checker asks nobody: it is paused, closed or not started.
func (c *Checker) Probe() bool { return c.bringForward(asked) }

// Drain makes the upstream second choice, as if it were degraded, until it is called
// with false. State and reason stay what the probes found.
func (c *Checker) Drain(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drained = on
	c.tier.Store(int32(c.tierOf(c.Snapshot().State)))
}

// Close stops probing, waits for a probe that runs, and ends the held session. It
// may be called more than once.
func (c *Checker) Close() error {
	c.mu.Lock()
	first := !c.closed
	c.closed = true
	if c.cancel != nil {
		c.cancel()
	}
	c.sched.Scheduler.drop(c.turn)
	for c.running {
		c.idle.Wait()
	}
	c.mu.Unlock()
	if first {
		c.endSession()
	}
	return nil
}

func (c *Checker) isClosed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed
}

// bringForward moves the next probe to now, or to when an alarm of this kind is
// believed again.
func (c *Checker) bringForward(why alarm) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed || c.paused || !c.started {
		return false
	}
	if c.running {
		c.again, c.alarm = true, why
		return true
	}
	if c.hurry(c.patience(why), why) {
		c.alarm = why
	}
	return true
}

// hurry has the next probe at the end of wait, if it is not due before. Where live
// requests wait for what it finds, it goes before those of others that are late, unless
// by more than an interval.
func (c *Checker) hurry(wait time.Duration, why alarm) bool {
	s, at := c.Snapshot(), time.Now().Add(wait)
	sooner := s.Next.After(at)
	urgent := wait <= 0 && why != ending
	if !sooner && !urgent {
		return false
	}
	if sooner {
		s.Next = at
		c.snap.Store(s)
	}
	if urgent {
		at = at.Add(-c.sched.Interval)
	}
	c.sched.Scheduler.hasten(c.turn, at)
	return true
}

// patience is how long an alarm has to wait for its probe. Under a floor, what many
// edges notice in one instant has them ask one after the other.
func (c *Checker) patience(why alarm) time.Duration {
	wait := atLeast(time.Until(c.doubt[why]), 0)
	if c.sched.Floor > 0 {
		wait = atLeast(atLeast(c.share(c.sched.Floor), time.Until(c.last.Add(c.sched.Floor))), wait)
	}
	return wait
}

// run is one turn of the schedule, and reports whether it took a probe. No two run
// at once.
func (c *Checker) run() bool {
	c.mu.Lock()
	if c.closed || c.paused || c.running {
		c.missed = c.running
		c.mu.Unlock()
		return false
	}
	if c.alarm == none && c.trafficProves() {
		c.skipped++
		left := c.sched.Interval - time.Duration(c.clock()-c.lastRPC.Load()) // for which the last answer proves life
		c.plan(time.Now(), atMostD(c.pause(), left))
		c.mu.Unlock()
		return false
	}
	why, start := c.alarm, time.Now()
	alone := why == dispute || c.disputed()
	c.running, c.again, c.alarm, c.skipped = true, false, none, 0
	c.last = start
	ctx, cancel := context.WithCancel(context.Background())
	c.cancel = cancel
	c.mu.Unlock()
	defer cancel()

	if c.sched.Lease != nil && !alone {
		if wait := c.sched.Lease(why != none); wait > 0 {
			c.leave(wait, why)
			return false
		}
	}
	c.mu.Lock()
	c.asked = time.Now()
	c.mu.Unlock()
	c.conclude(c.ask(ctx), start, why, alone)
	return true
}

// leave is the end of a turn in which another edge probes.
func (c *Checker) leave(wait time.Duration, why alarm) {
	c.mu.Lock()
	if c.alarm == none {
		c.alarm = why
	}
	c.plan(time.Now(), wait)
	c.done()
	c.mu.Unlock()
}

// ask probes; a bug in it is a result like any other and never a crash.
func (c *Checker) ask(ctx context.Context) (r Result) {
	defer func() {
		if v := recover(); v != nil {
			r = Result{URL: c.p.target.URL, Verdict: Unknown, Reason: Canceled, Era: EraUnknown, At: time.Now(),
				Detail: clean(fmt.Sprintf("the probe itself failed, please report it: %v", v))}
		}
	}()
	return c.p.Probe(ctx)
}

// conclude counts a result, plans the next probe and tells the listeners.
func (c *Checker) conclude(r Result, start time.Time, why alarm, alone bool) {
	c.mu.Lock()
	c.asked = time.Time{}
	if r.Reason == EndpointNotFound && c.opinions.lived {
		r.Verdict, r.Reason = Dead, RouteAbsent // another edge had answers here
	}
	vote := r.Verdict
	if vote == Dead && noAnswer(r.Reason) && c.lastRPC.Load() > int64(start.Sub(c.born)) {
		vote = Unknown // clients got answers meanwhile: this vote is from before
	}
	news := !alone || c.contradicts(vote)
	c.saw(vote, start)
	c.count(r, vote, 1)
	c.after(r, start, why)
	_, results := c.listeners()
	c.mu.Unlock()

	if r.Verdict.Vote() > 0 && !c.sched.NoWatch {
		c.p.watch(c.sched.Scheduler.Watch, func() { c.bringForward(ending) })
	} else {
		c.p.hangUpLine(noAnswer(r.Reason)) // also a watched one: there are servers that serve one at a time
	}
	for i := 0; i < len(results); i++ {
		results[i](r)
	}
	c.tellChanges()
	if news && c.sched.Tell != nil {
		c.sched.Tell(r)
	}

	c.mu.Lock()
	c.done()
	c.mu.Unlock()
}

// done is the end of a turn, and makes up for what came up meanwhile.
func (c *Checker) done() {
	c.running = false
	again, missed := c.again, c.missed
	c.again, c.missed = false, false
	if c.closed || c.paused {
		again, missed = false, false
	}
	if missed {
		c.due(minGap)
	} else if again {
		c.hurry(atLeast(c.patience(c.alarm), minGap), c.alarm)
	}
	c.idle.Broadcast()
}

// noAnswer tells a probe that got none from one that got a definite answer, which
// traffic does not outrank: an endpoint may be gone for new clients while others
// are still served.
func noAnswer(r Reason) bool {
	return r == Timeout || r == Stalled || r == Reset || r == ConnectTimeout
}

// starting reports whether an upstream that cannot be reached may just not be there
// yet: nothing listens, or its name is not known, and it never lived here.
func (c *Checker) starting(r Reason) bool {
	return (r == Refused || r == DNS) && c.threshold.state == StateUnknown && time.Since(c.born) < startGrace
}

// count moves the state by the vote and stores the snapshot; tellChanges tells of it.
func (c *Checker) count(r Result, vote Verdict, probes uint64) {
	s := c.Snapshot()
	before := s.State
	c.threshold.lenient = c.starting(r.Reason)
	c.threshold.observe(vote)
	s.State, s.Last, s.LastAt = c.threshold.state, r, r.At
	s.Probes += probes
	reason := s.Reason
	if vote.Vote() != 0 && !c.threshold.unconfirmed() || s.State == StateUnknown {
		reason = r.Reason
	}
	detail := r.Detail
	if s.State == Up && c.outlier() {
		s.State = UpDegraded
		reason = ErrorRate
		detail = c.errorDetail()
	}
	moved := s.State != before
	change := Change{URL: r.URL, From: before, To: s.State, Verdict: r.Verdict, Reason: reason, Detail: detail, At: time.Now()}
	if moved {
		s.Since = change.At
	}
	if moved || reason != s.Reason {
		c.news = append(c.news, change)
		keep := s.Changes
		if len(keep) >= maxChanges {
			keep = keep[len(keep)-maxChanges+1:]
		}
		s.Changes = append(append([]Change(nil), keep...), change)
	}
	s.Reason = reason
	c.snap.Store(s)
	c.tier.Store(int32(c.tierOf(s.State)))
}

// tellChanges tells the listeners of the changes so far. Where a probe and another edge
// (Hear) make some at the same time, one of the two goroutines does so for both.
func (c *Checker) tellChanges() {
	c.mu.Lock()
	for !c.telling && len(c.news) > 0 {
		news := c.news
		c.news = nil
		changes, _ := c.listeners()
		c.telling = true
		c.mu.Unlock()
		c.announce(news, changes)
		c.mu.Lock()
	}
	c.mu.Unlock()
}

// announce calls the listeners. One that panics keeps nobody from later news.
func (c *Checker) announce(news []Change, changes []func(Change)) {
	defer c.announced()
	for i := 0; i < len(news); i++ {
		for j := 0; j < len(changes); j++ {
			changes[j](news[i])
		}
	}
}

func (c *Checker) announced() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.telling = false
}

func (c *Checker) tierOf(s State) Tier {
	switch {
	case s == Down || s == StateUnknown && c.sched.Wait:
		return TierDown
	case c.threshold.downs > 0:
		return TierSuspect
	case s == UpDegraded || c.drained:
		return TierDegraded
	}
	return TierUp
}

// after plans the next probe from what this one found.
func (c *Checker) after(r Result, start time.Time, why alarm) {
	pause := c.pause()
	switch {
	case c.threshold.unconfirmed():
		pause = c.sched.Fast
		if c.threshold.lenient {
			pause = atMostD(startRetry, pause)
		}
		if why != none && why != asked && r.Verdict == Dead {
			pause = atMostD(confirmAfter, c.sched.Fast)
			c.alarm = why // the confirmation may need another one
			start = time.Now()
		}
	case c.threshold.state == Down || r.Verdict == Unknown && !c.threshold.up():
		pause = c.backOff()
	}
	switch {
	case r.Verdict.Vote() > 0:
		c.fresh = 0
		c.falseAlarm(why)
	case r.Verdict == Unknown && why > asked: // asking at once again would find out no more
		c.doubt[why] = time.Now().Add(c.sched.Fast)
	}
	if (why == rumor || why == dispute) && r.Verdict.Vote()*c.opinions.heard < 0 {
		c.doubt[why] = time.Now().Add(c.sched.Interval) // this edge has made sure
	}
	if d := atMostD(r.RetryAfter, maxRetryAfter); r.Verdict == Degraded && d > pause {
		pause = d
		c.doubtAll() // it is asked before only if live requests fail, and then seldom
	}
	c.plan(start, pause)
}

// falseAlarm: an alarm of this kind is not believed again at once. Servers that
// hang up on idle connections cost at most one probe more per interval.
func (c *Checker) falseAlarm(why alarm) {
	switch why {
	case failure:
		c.doubt[why] = time.Now().Add(c.sched.Fast)
	case silence, ending, strange:
		c.doubt[why] = time.Now().Add(c.sched.Interval)
	}
}

func (c *Checker) doubtAll() {
	for _, why := range []alarm{failure, silence, ending, strange} {
		c.doubt[why] = time.Now().Add(c.sched.Interval)
	}
}

// pause is the interval, less up to 10 % so that edges do not probe in step, of which
// the scheduler may take back its slack; the first is spread by the target's name, so
// that neighbours do not either.
func (c *Checker) pause() time.Duration {
	d := c.sched.Interval
	if c.Snapshot().Probes <= 1 && c.skipped == 0 {
		h := fnv.New32a()
		_, _ = h.Write([]byte(c.p.target.URL))
		return d/2 + time.Duration(h.Sum32()%1000)*((d/2-d/slack)/1000)
	}
	return d - d/slack - c.share(d/10-d/slack)
}

// backOff grows from the fast interval to the full one: an upstream that has
// just gone is often back within seconds. It is less by up to a third: what many edges,
// or one edge of many upstreams, lost in one instant is not asked in step from then on.
func (c *Checker) backOff() time.Duration {
	d := c.sched.Fast
	for i := 0; i < c.fresh && d < c.sched.Interval; i++ {
		d += d / 2
	}
	c.fresh++
	if d >= c.sched.Interval {
		return c.pause()
	}
	return d - c.share(d/3)
}

// plan says when the next probe is due, counted from the start of this one.
func (c *Checker) plan(start time.Time, pause time.Duration) {
	if c.closed || c.paused {
		return
	}
	c.due(atLeast(time.Until(start.Add(atLeast(pause, c.sched.Floor))), minGap))
}

func (c *Checker) listeners() ([]func(Change), []func(Result)) {
	var changes []func(Change)
	var results []func(Result)
	for id := 0; id < c.nextID; id++ { // in the order of registration
		if f := c.onChange[id]; f != nil {
			changes = append(changes, f)
		}
		if f := c.onResult[id]; f != nil {
			results = append(results, f)
		}
	}
	return changes, results
}

func atLeast(d, least time.Duration) time.Duration {
	if d < least {
		return least
	}
	return d
}

func atMostD(d, most time.Duration) time.Duration {
	if d > most {
		return most
	}
	return d
}
