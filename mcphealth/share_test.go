package mcphealth

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// fleet is edges that check one upstream and share what they find out, as a room does
// over a store.
type fleetOf struct {
	edges  []*Checker
	away   atomic.Bool  // the store
	holder atomic.Int64 // of the lease, by number from 1
	until  atomic.Int64 // Unix nanoseconds
}

func (f *fleetOf) lease(edge int64, length time.Duration) func(bool) time.Duration {
	return func(urgent bool) time.Duration {
		now := time.Now().UnixNano()
		if f.away.Load() || urgent {
			return 0
		}
		if left := f.until.Load() - now; left > 0 && f.holder.Load() != edge {
			return time.Duration(left)
		}
		f.holder.Store(edge)
		f.until.Store(now + int64(length))
		return 0
	}
}

func newFleet(t *testing.T, b *bubble, size int) *fleetOf {
	f := &fleetOf{}
	for i := range size {
		c := b.idle(t, Schedule{NoWatch: true, Lease: f.lease(int64(i+1), 12*time.Second)})
		f.edges = append(f.edges, c)
	}
	for i, c := range f.edges {
		c.OnResult(func(r Result) {
			if f.away.Load() {
				return
			}
			heard, err := ReadShared(r.Share())
			if err != nil {
				t.Errorf("ReadShared(Share) = %v, want what was shared", err)
			}
			for j, o := range f.edges {
				if j != i {
					o.Hear(heard)
				}
			}
		})
		c.Start()
		time.Sleep(100 * time.Millisecond)
	}
	return f
}

// One edge asks, all know; when it goes, another one takes over; without a store all
// ask within an interval.
func TestShare(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		f := newFleet(t, b, 10)
		time.Sleep(10 * time.Minute)
		for _, c := range f.edges {
			wantState(t, c, Up, OK)
		}
		if n := b.probes(); n > 75 {
			t.Errorf("%d probes of ten edges in 10 minutes, want about the 63 of one", n)
		}

		b.set("refused")
		time.Sleep(12 * time.Second) // an interval, and the confirmation
		for i, c := range f.edges {
			if s := c.Snapshot(); s.State != Down || s.Reason != Refused {
				t.Errorf("edge %d: %s (%s), want down (refused)", i, s.State, s.Reason)
			}
		}
		b.set("modern")
		time.Sleep(30 * time.Second)

		leader := f.holder.Load() - 1
		f.edges[leader].Close()
		before := b.probes()
		time.Sleep(15 * time.Second) // a lease, and a bit
		if b.probes() == before {
			t.Errorf("nobody asked for 15 s after the edge that did was gone")
		}

		f.away.Store(true)
		for i, c := range f.edges {
			if i != int(leader) {
				c.ProbeWithin(5 * time.Second)
			}
		}
		before = b.probes()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if n := b.probes() - before; n < 9 {
			t.Errorf("%d probes within an interval without a store, want one of each of the 9 edges", n)
		}
	})
}

// What an edge sees in its own traffic outranks what others say.
func TestHearAgainstTraffic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		time.Sleep(time.Second)
		for range 20 {
			c.Sent()
			c.Answered("")
			c.Hear(Result{Verdict: Dead, Reason: Refused})
			time.Sleep(500 * time.Millisecond)
		}
		wantState(t, c, Up, OK)
		time.Sleep(5 * time.Second) // no traffic any more
		for range 2 {
			c.Hear(Result{Verdict: Dead, Reason: Timeout})
		}
		wantState(t, c, Up, OK) // answers within the interval
		for range 2 {
			c.Hear(Result{Verdict: Dead, Reason: Refused})
		}
		wantState(t, c, Down, Refused)
		if c.Snapshot().Probes != 1 {
			t.Errorf("%d probes, want the one of its own: what was heard is none", c.Snapshot().Probes)
		}
	})
}

// A store is as hostile as any other server.
func TestReadShared(t *testing.T) {
	good := Result{Verdict: Degraded, Reason: Slow, Detail: "answered after 2s", Era: Modern, ProtocolVersions: []string{"2026-07-28"},
		Server: ServerInfo{Name: "s", Version: "1"}, HTTPStatus: 200, LatencyMs: 2000, RetryAfter: 3 * time.Second}
	r, err := ReadShared(good.Share())
	if err != nil || r.Verdict != Degraded || r.Reason != Slow || r.Detail != good.Detail || r.Era != Modern || r.Server != good.Server || r.RetryAfter != good.RetryAfter || len(r.ProtocolVersions) != 1 {
		t.Errorf("ReadShared(Share(r)) = %+v, %v, want r", r, err)
	}
	for _, bad := range []string{
		``, `null`, `7`, `[]`, `{}`, `{"verdict":"ready"}`, `{"verdict":"ready","reason":"refused"}`, `{"verdict":"great","reason":"ok"}`,
		`{"verdict":"ready","reason":"ok","latencyMs":"x"}`, `{"verdict":"ready","reason":"ok","detail":"` + strings.Repeat("x", maxShared) + `"}`,
	} {
		if r, err := ReadShared([]byte(bad)); !errors.Is(err, ErrShared) {
			t.Errorf("ReadShared(%.60q) = %v, %v, want ErrShared", bad, r.Verdict, err)
		}
	}
	r, err = ReadShared([]byte(`{"verdict":"dead","reason":"refused","era":"<b>","detail":"` + strings.Repeat(`a\n\u0007\u202e<script>`, 100) +
		`","server":{"name":"` + strings.Repeat("n", 999) + `"},"retryAfterMs":9223372036854775807}`))
	if err != nil || strings.ContainsAny(r.Detail, "\n\a\u202e") || len(r.Detail) > 5*maxWord || len(r.Server.Name) > maxWord+3 || r.Era != EraUnknown || r.RetryAfter != 0 {
		t.Errorf("ReadShared of hostile texts = %+v, %v, want them cleaned and cut", r, err)
	}
}
