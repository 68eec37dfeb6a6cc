package serve

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

var ready = mcphealth.Result{Verdict: mcphealth.Ready, Reason: mcphealth.OK}

// asker is a server whose answers take a while. Its cell keeps them for 5 s, and
// may tell them for 10 s.
type asker struct {
	*cell
	asked   atomic.Int32
	running atomic.Int32
	most    atomic.Int32
	takes   atomic.Int64
	says    atomic.Value
}

func newAsker(ctx context.Context) *asker {
	a := &asker{cell: newCell(ctx, 5*time.Second, 10*time.Second, "http://x/")}
	a.says.Store(ready)
	a.ask = func(ctx context.Context) mcphealth.Result {
		a.asked.Add(1)
		a.most.Store(max(a.most.Load(), a.running.Add(1)))
		defer a.running.Add(-1)
		select {
		case <-time.After(time.Duration(a.takes.Load())):
		case <-ctx.Done():
			return mcphealth.Result{Verdict: mcphealth.Unknown, Reason: mcphealth.Canceled}
		}
		return a.says.Load().(mcphealth.Result)
	}
	a.end = func() {}
	return a
}

// get asks as a request does.
func (a *asker) get(ctx context.Context) mcphealth.Result {
	return (&Server{}).ask(ctx, map[string]source{"a": a})["a"].last
}

func inBubble(t *testing.T, f func(t *testing.T, a *asker)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		a := newAsker(ctx)
		f(t, a)
		cancel()
		a.close()
	})
}

// However many callers there are, and however long they go on: one probe per period.
func TestOneProbePerPeriod(t *testing.T) {
	inBubble(t, func(t *testing.T, a *asker) {
		a.takes.Store(int64(20 * time.Millisecond))
		for range 5 { // for 12 s, 10,000 callers each
			var all sync.WaitGroup
			for range 10_000 {
				all.Go(func() {
					if r := a.get(t.Context()); r.Verdict != mcphealth.Ready {
						t.Errorf("%s", r.Verdict)
					}
				})
			}
			all.Wait()
			time.Sleep(3*time.Second - 20*time.Millisecond)
		}
		if n := a.asked.Load(); n != 3 {
			t.Errorf("%d probes in 12 s, want 3", n)
		}
		if a.most.Load() != 1 {
			t.Errorf("%d probes at once", a.most.Load())
		}
	})
}

// Nobody asks, nobody is asked.
func TestNoCallerNoProbe(t *testing.T) {
	inBubble(t, func(t *testing.T, a *asker) {
		time.Sleep(time.Hour)
		a.get(t.Context())
		time.Sleep(time.Hour)
		if n := a.asked.Load(); n != 1 {
			t.Errorf("%d probes, want 1", n)
		}
	})
}

// How long a caller waits, and what it is told.
func TestPatience(t *testing.T) {
	dead := mcphealth.Result{Verdict: mcphealth.Dead, Reason: mcphealth.Timeout}
	tests := []struct {
		name   string
		age    time.Duration // of the last result; 0: there is none
		takes  time.Duration
		waits  time.Duration
		hears  mcphealth.Verdict
		probes int32
	}{
		{"the first waits for its probe", 0, 5 * time.Second, 5 * time.Second, mcphealth.Dead, 1},
		{"a fresh result is told at once", 4 * time.Second, 0, 0, mcphealth.Ready, 1},
		{"an old one is replaced", 6 * time.Second, 300 * time.Millisecond, 300 * time.Millisecond, mcphealth.Dead, 2},
		{"a slow probe costs a second, not more", 6 * time.Second, 5 * time.Second, patience, mcphealth.Ready, 2},
		{"what is too old is not told", 11 * time.Second, 5 * time.Second, 5 * time.Second, mcphealth.Dead, 2},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, a *asker) {
				if tt.age > 0 {
					a.get(t.Context())
					time.Sleep(tt.age)
				}
				a.says.Store(dead)
				a.takes.Store(int64(tt.takes))
				start := time.Now()
				r := a.get(t.Context())
				if took := time.Since(start); took != tt.waits || r.Verdict != tt.hears {
					t.Errorf("heard %s after %v, want %s after %v", r.Verdict, took, tt.hears, tt.waits)
				}
				if n := a.asked.Load(); n != tt.probes {
					t.Errorf("%d probes, want %d", n, tt.probes)
				}
			})
		})
	}
}

// A server that hangs is known dead soon after the last good result, though callers
// are told that one meanwhile; and slow probes do not pile up.
func TestHungServer(t *testing.T) {
	inBubble(t, func(t *testing.T, a *asker) {
		a.get(t.Context())
		a.takes.Store(int64(5 * time.Second))
		a.says.Store(mcphealth.Result{Verdict: mcphealth.Dead, Reason: mcphealth.Timeout})
		start := time.Now()
		for a.get(t.Context()).Verdict != mcphealth.Dead {
			time.Sleep(time.Second)
		}
		if took := time.Since(start); took > 11*time.Second {
			t.Errorf("dead after %v, want at most cache + timeout + a caller's period", took)
		}
		for range 100 {
			go a.get(t.Context())
			time.Sleep(time.Second)
		}
		if n := a.most.Load(); n != 1 {
			t.Errorf("%d probes at once", n)
		}
		if n := a.asked.Load(); n > 13 {
			t.Errorf("%d probes in two minutes, want one per timeout and period", n)
		}
	})
}

// A server that hangs for good costs those who ask now and then, as kubelets do, one
// long wait, and not one each time; what it was an hour ago is not told.
func TestHungForGood(t *testing.T) {
	inBubble(t, func(t *testing.T, a *asker) {
		a.get(t.Context())
		a.takes.Store(int64(5 * time.Second))
		a.says.Store(mcphealth.Result{Verdict: mcphealth.Dead, Reason: mcphealth.Timeout})
		var waits []time.Duration
		for _, pause := range []time.Duration{30 * time.Second, 30 * time.Second, 30 * time.Second, time.Hour} {
			time.Sleep(pause)
			start := time.Now()
			if r := a.get(t.Context()); r.Verdict != mcphealth.Dead {
				t.Errorf("%s, want dead", r.Verdict)
			}
			waits = append(waits, time.Since(start))
		}
		if want := []time.Duration{5 * time.Second, patience, patience, 5 * time.Second}; !slices.Equal(waits, want) {
			t.Errorf("waited %v, want %v", waits, want)
		}
	})
}

// A caller that hangs up takes no probe with it.
func TestCallerLeaves(t *testing.T) {
	inBubble(t, func(t *testing.T, a *asker) {
		a.takes.Store(int64(3 * time.Second))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if r := a.get(ctx); r.Reason != mcphealth.NeverProbed {
			t.Errorf("%s", r.Reason)
		}
		if r := a.get(t.Context()); r.Verdict != mcphealth.Ready || a.asked.Load() != 1 {
			t.Errorf("%s after %d probes", r.Verdict, a.asked.Load())
		}
	})
}

// A server that asks to be left alone is, for five minutes at most.
func TestRetryAfter(t *testing.T) {
	for asks, waits := range map[time.Duration]time.Duration{time.Minute: time.Minute, time.Hour: maxRetryAfter, time.Second: 5 * time.Second} {
		inBubble(t, func(t *testing.T, a *asker) {
			a.says.Store(mcphealth.Result{Verdict: mcphealth.Degraded, Reason: mcphealth.RateLimited, RetryAfter: asks})
			a.get(t.Context())
			start := time.Now()
			for a.asked.Load() == 1 {
				time.Sleep(time.Second)
				a.get(t.Context())
			}
			if took := time.Since(start); took != waits {
				t.Errorf("Retry-After %v: asked again after %v, want %v", asks, took, waits)
			}
		})
	}
}

// At a stop the probe that runs ends, and says nothing of the server.
func TestStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		a := newAsker(ctx)
		a.get(t.Context())
		time.Sleep(time.Minute)
		a.takes.Store(int64(time.Hour))
		heard := make(chan mcphealth.Result)
		go func() { heard <- a.get(t.Context()) }()
		synctest.Wait()
		start := time.Now()
		cancel()
		a.close()
		if r := <-heard; r.Verdict != mcphealth.Ready || time.Since(start) > 0 {
			t.Errorf("%s after %v, want what was known, at once", r.Verdict, time.Since(start))
		}
		time.Sleep(time.Minute)
		if a.get(t.Context()); a.asked.Load() != 2 {
			t.Errorf("%d probes, want none after the stop", a.asked.Load())
		}
	})
}

// A bug in a probe is a result, and not the end.
func TestPanic(t *testing.T) {
	inBubble(t, func(t *testing.T, a *asker) {
		a.ask = func(context.Context) mcphealth.Result { panic(fmt.Errorf("oh")) }
		if r := a.get(t.Context()); r.Verdict != mcphealth.Unknown || r.Detail == "" {
			t.Errorf("%+v", r)
		}
	})
}
