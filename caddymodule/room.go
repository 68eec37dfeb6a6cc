package caddymodule

import (
	"context"
	"runtime"
	"sync"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// A room lets batchSize requests go per batchEvery once an upstream is back:
	// 50 per 20 ms, so that a server that just started is not met by a thousand
	// calls in one instant.
	batchSize  = 50
	batchEvery = 20 * time.Millisecond

	// A request that was let go in vain waits firstWait before its next turn,
	// twice as long each time up to lastWait. So does the room between looks.
	firstWait = 50 * time.Millisecond
	lastWait  = time.Second
)

// A room is where requests wait, in order, for an upstream to come back. Its one
// goroutine runs while somebody waits. When the process is to exit, nobody waits longer
// than lastWait: Caddy waits for them, and whoever waits for Caddy kills it.
type room struct {
	look  func() mcphealth.Tier // the best tier that a request could get now; nil: not known
	nudge func()                // have upstreams probed now; nil: no way to

	mu      sync.Mutex
	queue   []*waiter // by seq
	nextSeq uint64
	running bool
	back    uint64        // how often an upstream came back
	woken   chan struct{} // cap 1
	proven  time.Time     // without look: when a request last got through
}

// waiter is the place of one request in the queue. It keeps its place when it was
// let go in vain and waits again.
type waiter struct {
	seq    uint64
	tries  int
	after  time.Time // not before, unless an upstream came back since
	back   uint64
	let    chan struct{}
	turned bool // away: the process exits
}

func newRoom(look func() mcphealth.Tier, nudge func()) *room {
	return &room{look: look, nudge: nudge, woken: make(chan struct{}, 1)}
}

// enter takes a place at the end of the queue.
func (r *room) enter() *waiter {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.nextSeq++
	return &waiter{seq: r.nextSeq}
}

// wait blocks until it is w's turn, and reports false if ctx ends before, or w is turned
// away.
func (r *room) wait(ctx context.Context, w *waiter) bool {
	r.mu.Lock()
	w.let = make(chan struct{})
	w.after = time.Now().Add(min(firstWait<<min(w.tries, 10), lastWait))
	w.back = r.back
	w.tries++
	at := len(r.queue)
	for at > 0 && r.queue[at-1].seq > w.seq {
		at--
	}
	r.queue = append(r.queue, nil)
	copy(r.queue[at+1:], r.queue[at:])
	r.queue[at] = w
	if !r.running {
		r.running = true
		go r.run()
	}
	r.mu.Unlock()

	select {
	case <-w.let:
		return !w.turned
	case <-ctx.Done():
		r.leave(w)
		return false
	}
}

func (r *room) leave(w *waiter) {
	r.mu.Lock()
	for i, q := range r.queue {
		if q == w {
			r.queue = append(r.queue[:i], r.queue[i+1:]...)
			break
		}
	}
	r.mu.Unlock()
	r.wake()
}

// kick has the room look again; back says that an upstream came back.
func (r *room) kick(back bool) {
	r.mu.Lock()
	if back {
		r.back++
	}
	running := r.running
	r.mu.Unlock()
	if running {
		r.wake()
	}
}

// through notes that a request which had waited was served.
func (r *room) through() {
	r.mu.Lock()
	r.proven = time.Now()
	r.back++
	r.mu.Unlock()
	r.wake()
}

func (r *room) wake() {
	select {
	case r.woken <- struct{}{}:
	default:
	}
}

// run lets requests go until none waits.
func (r *room) run() {
	pause, looked := firstWait, time.Time{}
	var back uint64
	for {
		tier := r.tier()
		if tier >= mcphealth.TierSuspect && time.Since(looked) >= pause {
			if looked = time.Now(); r.nudge != nil {
				r.nudge()
			}
			pause = min(pause*2, lastWait)
		}
		r.mu.Lock()
		if len(r.queue) == 0 {
			r.running = false
			r.mu.Unlock()
			return
		}
		if r.back != back {
			back, pause = r.back, firstWait
		}
		let, next := r.release(tier)
		r.mu.Unlock()
		begin := time.Now()
		for i, c := range let {
			close(c)
			if time.Since(begin) < time.Duration(i+1)*batchEvery/batchSize { // unless the machine is too busy for it
				runtime.Gosched() // or those let go last would be the first
			}
		}

		if len(let) == batchSize {
			time.Sleep(batchEvery)
			continue
		}
		timer := time.NewTimer(min(pause, next))
		select {
		case <-timer.C:
		case <-r.woken:
		}
		timer.Stop()
	}
}

// turnAway lets all go that wait, without a turn.
func (r *room) turnAway() (let []chan struct{}) {
	for _, w := range r.queue {
		w.turned = true
		let = append(let, w.let)
	}
	r.queue = nil
	return let
}

// tier is what the room goes by. Where nothing is known of the upstreams, a
// request that got through proves for a second that others will.
func (r *room) tier() (tier mcphealth.Tier) {
	if r.look != nil {
		defer caught("a look for upstreams") // the proxy may have a circuit breaker
		tier = mcphealth.TierSuspect         // if that panics
		return r.look()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.proven) < time.Second {
		return mcphealth.TierUp
	}
	return mcphealth.TierSuspect
}

// release lets the first ones go that may: a batch if an upstream is up, one as a
// scout if one might be, none if all are down. Unless one is up, all are turned away if
// the process exits. It returns their channels, for a waiter may be back with another one
// by the time that they are closed, and how long until the next one may.
func (r *room) release(tier mcphealth.Tier) (let []chan struct{}, next time.Duration) {
	most := batchSize
	switch {
	case tier >= mcphealth.TierSuspect && leaving.Load():
		return r.turnAway(), lastWait
	case tier == mcphealth.TierSuspect:
		most = 1
	case tier == mcphealth.TierDown:
		return nil, lastWait
	}
	now, next := time.Now(), lastWait
	rest := r.queue[:0]
	for _, w := range r.queue {
		wait := w.after.Sub(now)
		if len(let) < most && (w.back != r.back || wait <= 0) {
			let = append(let, w.let)
			continue
		}
		next = min(next, max(wait, time.Millisecond))
		rest = append(rest, w)
	}
	clear(r.queue[len(rest):])
	r.queue = rest
	if tier == mcphealth.TierSuspect {
		next = max(next, firstWait)
	}
	return let, next
}
