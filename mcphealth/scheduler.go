//go:build go1.21

package mcphealth

import (
	"container/heap"
	"math/rand"
	"net"
	"sync"
	"time"
)

const (
	// defaultAtOnce is how many probes run at once: 512, so that ten thousand
	// upstreams of which every tenth hangs for 5 s are still asked in time.
	defaultAtOnce = 512
	// leastCeiling is the lowest ceiling that is not set by hand: 1,000 probes per
	// second, a fifth of a core, so that a few hundred upstreams start at once.
	leastCeiling = 1000
	// slack is by which part of its wait a probe may be late, to begin together with
	// others: a 256th, 40 ms of 10 s, beside the tenth that is left to chance.
	slack = 256
)

// Limits bound the probes of all checkers that share a Scheduler. Zero values mean
// the defaults.
type Limits struct {
	// AtOnce is how many probes run at the same time. Default 512.
	AtOnce int
	// PerSecond is how many probes begin within one second. Default: twice what the
	// intervals of all started checkers ask for, at least 1,000.
	PerSecond int
}

// A Scheduler runs the probes of the checkers that share it: one timer, a bounded
// number of probes at once, and a ceiling on how many begin per second, whatever
// happens to all upstreams at once. Who waits longest comes first; an upstream that
// live requests wait for goes before those that are late by less than an interval.
// It holds no goroutine while nothing is due.
type Scheduler struct {
	// Watch, if set before the first Start, watches an idle connection without a
	// goroutine: it calls ended once when the other side has ended c. It returns how to
	// give that up just before c is closed, or nil if it cannot watch this one.
	Watch func(c net.Conn, ended func()) (stop func())

	born time.Time // an hour ago at most: its moments are counted from then

	mu      sync.Mutex
	limits  Limits
	queue   turns
	seq     uint64
	perHour int64     // probes that the intervals ask for
	working int       // probes that run
	next    time.Time // when the ceiling, without burst, lets the next one begin
	timer   *time.Timer
	armed   time.Time // when the timer fires; zero: it does not
}

// NewScheduler makes a scheduler.
func NewScheduler(l Limits) *Scheduler {
	s := &Scheduler{born: time.Now().Add(-time.Duration(rand.Int63n(int64(time.Hour))))}
	s.SetLimits(l)
	return s
}

// SetLimits changes the limits for the probes that begin from now on.
func (s *Scheduler) SetLimits(l Limits) {
	if l.AtOnce <= 0 {
		l.AtOnce = defaultAtOnce
	}
	s.mu.Lock()
	s.limits = l
	s.mu.Unlock()
	s.wake()
}

// turn is the place of one checker in the queue.
type turn struct {
	due     time.Time
	seq     uint64      // which was set first
	at      int         // in the queue; -1: not in it
	perHour int64       // how often it comes, by its interval
	counted bool        // in Scheduler.perHour
	run     func() bool // probes, or reports that it did not
}

func newTurn(every time.Duration, run func() bool) *turn {
	return &turn{at: -1, perHour: int64(time.Hour / every), run: run}
}

// set has t run when due, or a little later, which it returns, in place of when it was
// due before.
func (s *Scheduler) set(t *turn, due time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !t.counted {
		t.counted = true
		s.perHour += t.perHour
	}
	t.due = s.together(due)
	s.seq++
	t.seq = s.seq
	if t.at >= 0 {
		heap.Fix(&s.queue, t.at)
	} else {
		heap.Push(&s.queue, t)
	}
	s.arm()
	return t.due
}

// together moves due, by less than the slack of what is left until then, to a moment at
// which others are due as well: probes in a row cost less than apart, for what they need
// is in the processor's caches. Each scheduler has moments of its own, so that many edges
// do not ask in step.
func (s *Scheduler) together(due time.Time) time.Time {
	step := time.Duration(1)
	for wait := time.Until(due); step < wait/(2*slack); { // no product: it could overflow
		step *= 2
	}
	if late := due.Sub(s.born) % step; late > 0 {
		return due.Add(step - late)
	}
	return due
}

// hasten has t run when due, if it waits for later.
func (s *Scheduler) hasten(t *turn, due time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.at >= 0 && due.Before(t.due) {
		t.due = due
		heap.Fix(&s.queue, t.at)
		s.arm()
	}
}

// drop takes t out.
func (s *Scheduler) drop(t *turn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.counted {
		t.counted = false
		s.perHour -= t.perHour
	}
	if t.at >= 0 {
		heap.Remove(&s.queue, t.at)
	}
}

// wake starts what may begin now.
func (s *Scheduler) wake() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed = time.Time{}
	for t := s.take(); t != nil; t = s.take() {
		go s.work(t)
	}
	s.arm()
}

// work is one probe, on a goroutine of its own.
func (s *Scheduler) work(t *turn) {
	probed := t.run()
	s.mu.Lock()
	s.working--
	if !probed {
		step, _ := s.pace()
		s.next = s.next.Add(-step)
	}
	s.mu.Unlock()
	s.wake()
}

// take is the first turn that may begin now, or nil. The caller holds s.mu.
func (s *Scheduler) take() *turn {
	at, ok := s.free()
	now := time.Now()
	if !ok || at.After(now) {
		return nil
	}
	t := heap.Pop(&s.queue).(*turn)
	step, _ := s.pace()
	if s.next.Before(now) {
		s.next = now
	}
	s.next = s.next.Add(step)
	s.working++
	return t
}

// free is when the first turn may begin: when it is due, and the ceiling allows it.
// It is not known while as many run as may.
func (s *Scheduler) free() (time.Time, bool) {
	if len(s.queue) == 0 || s.working >= s.limits.AtOnce {
		return time.Time{}, false
	}
	at := s.queue[0].due
	_, burst := s.pace()
	if ceiling := s.next.Add(-burst); ceiling.After(at) {
		at = ceiling
	}
	return at, true
}

// pace is the time from one probe to the next under the ceiling, and how much of it
// may be borrowed: a tenth of a second's worth at once, so that no second sees more
// than the ceiling.
func (s *Scheduler) pace() (step, burst time.Duration) {
	n := s.limits.PerSecond
	if n <= 0 {
		n = int(2 * s.perHour / 3600)
		if n < leastCeiling {
			n = leastCeiling
		}
	}
	atOnce := n / 10
	if atOnce < 1 {
		atOnce = 1
	}
	if n > 1 {
		n -= atOnce
	}
	step = time.Second / time.Duration(n)
	return step, step * time.Duration(atOnce-1)
}

// arm sets the timer for the first turn. The caller holds s.mu.
func (s *Scheduler) arm() {
	at, ok := s.free()
	if !ok || !s.armed.IsZero() && !at.Before(s.armed) {
		return
	}
	s.armed = at
	if s.timer == nil {
		s.timer = time.AfterFunc(time.Until(at), func() { s.wake() })
		return
	}
	s.timer.Reset(time.Until(at))
}

// turns is a heap, the one due first on top, of several the one that was set first.
type turns []*turn

func (q turns) Len() int { return len(q) }
func (q turns) Less(i, j int) bool {
	return q[i].due.Before(q[j].due) || q[i].due.Equal(q[j].due) && q[i].seq < q[j].seq
}
func (q turns) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].at = i
	q[j].at = j
}

// Push adds x, a *turn, at the end, for package heap.
func (q *turns) Push(x any) {
	t := x.(*turn)
	t.at = len(*q)
	*q = append(*q, t)
}

// Pop takes the last one out, for package heap.
func (q *turns) Pop() any {
	last := len(*q) - 1
	t := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	t.at = -1
	return t
}
