package reliability

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
)

// toxic is one fault on the way between edge and server, as toxiproxy names them.
type toxic struct {
	Type       string         `json:"type"`
	Stream     string         `json:"stream"`
	Attributes map[string]int `json:"attributes"`
}

// wire is the way to one server, with faults.
type wire struct {
	*toxiproxy.Proxy
	addr string
}

func newWire(t testing.TB, to string) *wire {
	t.Helper()
	api := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	p := toxiproxy.NewProxy(api, "wire", nowhere(t), to)
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	w := &wire{p, p.Listen}
	t.Cleanup(w.cut)
	return w
}

// poison adds a fault, to connections that are open as well.
func (w *wire) poison(t testing.TB, x toxic) {
	t.Helper()
	b, _ := json.Marshal(x)
	if _, err := w.Toxics.AddToxicJson(strings.NewReader(string(b))); err != nil {
		t.Fatal(err)
	}
}

// cure takes all faults away.
func (w *wire) cure() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	w.Toxics.ResetToxics(ctx)
}

// cut has nobody listen there any more, and ends all connections.
func (w *wire) cut() {
	w.Stop()
}

// mend listens again.
func (w *wire) mend(t testing.TB) {
	t.Helper()
	if err := w.Start(); err != nil {
		t.Errorf("the wire cannot be mended: %v", err)
	}
}

// faults are what happens on the way to one of two servers for a while.
var faults = []struct {
	name   string
	toxics []toxic
	state  string // in which the faulty one settles; "" = up or down, it is at the edge
	worst  string // how a call may fail, beside success: statuses
}{
	{"latency", []toxic{{"latency", "downstream", map[string]int{"latency": 200}}}, "up", ""},
	{"latency beyond the timeout", []toxic{{"latency", "downstream", map[string]int{"latency": 3000}}}, "down", ""},
	{"jitter", []toxic{{"latency", "downstream", map[string]int{"latency": 150, "jitter": 140}}}, "up", ""},
	{"a thin line", []toxic{{"bandwidth", "downstream", map[string]int{"rate": 2}}}, "up", ""},
	{"crumbs", []toxic{{"slicer", "downstream", map[string]int{"average_size": 20, "size_variation": 10, "delay": 1000}}}, "up", ""},
	{"resets", []toxic{{"reset_peer", "downstream", map[string]int{"timeout": 0}}}, "down", "502"},
	{"half-closed", []toxic{{"slow_close", "downstream", map[string]int{"delay": 800}}}, "up", ""},
	{"an answer cut short", []toxic{{"limit_data", "downstream", map[string]int{"bytes": 60}}}, "down", "502"},
	{"a black hole", []toxic{{"timeout", "downstream", map[string]int{"timeout": 0}}, {"timeout", "upstream", map[string]int{"timeout": 0}}}, "down", "502"},
}

// One of two servers is behind a faulty wire. Its state settles and is right, it
// changes once at most on the way there and once on the way back, the other one
// serves, and no call is executed twice or lost without having been sent.
func TestFaultsOnTheWire(t *testing.T) {
	for _, edge := range edges {
		t.Run(edge.name, func(t *testing.T) {
			t.Parallel()
			type bed struct {
				w        *wire
				bad, ok  *Server
				before   int64
				failures []string
			}
			beds := make([]*bed, len(faults))
			var routes []Route
			for i := range faults {
				b := &bed{bad: newServer(t), ok: newServer(t)}
				b.w = newWire(t, b.bad.Addr)
				beds[i] = b
				routes = append(routes, Route{Name: fmt.Sprintf("f%d", i), Upstreams: []string{b.w.addr, b.ok.Addr}, Interval: 500 * time.Millisecond, Timeout: time.Second, Hold: 10 * time.Second})
			}
			e := edge.start(t, routes...)
			for _, b := range beds {
				awaitUp(t, e, b.w.addr)
				awaitUp(t, e, b.ok.Addr)
			}
			const spell = 8 * time.Second
			var all sync.WaitGroup
			for i, f := range faults {
				b := beds[i]
				b.before = b.bad.Probes.Load()
				for _, x := range f.toxics {
					b.w.poison(t, x)
				}
				all.Go(func() { b.failures = callFor(spell, e.URL(routes[i].Name), fmt.Sprintf("%s %d", edge.name, i)) })
			}
			time.Sleep(spell - 2*time.Second)
			for i, f := range faults {
				state, reason := e.State(t, beds[i].w.addr)
				if f.state != "" && state != f.state {
					t.Errorf("%s: the faulty server is %s (%s), want %s", f.name, state, reason, f.state)
				}
				t.Logf("%-28s %s (%s), %d probes in %s", f.name, state, reason, beds[i].bad.Probes.Load()-beds[i].before, spell-2*time.Second)
			}
			all.Wait()
			for i, f := range faults {
				b := beds[i]
				if n := b.bad.Probes.Load() - b.before; n > int64(spell/(100*time.Millisecond)) {
					t.Errorf("%s: %d probes in %s, want no storm", f.name, n, spell)
				}
				for _, failed := range b.failures {
					if id, word, _ := strings.Cut(failed, ": "); !mayFail(b.bad, b.ok, id, word) {
						t.Errorf("%s: %s", f.name, failed)
					}
				}
				wantOnce(t, b.bad, b.ok)
				b.w.cure()
			}
			for i, b := range beds {
				await(t, 15*time.Second, faults[i].name+": up again", func() bool { state, _ := e.State(t, b.w.addr); return state == "up" })
			}
		})
	}
}

// mayFail: a call that failed may have been lost only on its way back, or while it
// was on its way: it got a 502, or no answer at all. A 503 says that it was not
// executed, and then it was not.
func mayFail(a, b *Server, id, word string) bool {
	ran := a.Runs()[id] + b.Runs()[id]
	if strings.HasPrefix(word, "503") {
		return ran == 0
	}
	return true
}

// callFor makes calls one after another for a while, and returns those that failed.
func callFor(d time.Duration, url, name string) (failures []string) {
	for n, end := 0, time.Now().Add(d); time.Now().Before(end); n++ {
		id := fmt.Sprintf(`"%s %d"`, name, n)
		ctx, cancel := context.WithTimeout(context.Background(), 15*time.Second)
		req, _ := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(callBody(id)))
		req.Header.Set("Content-Type", "application/json")
		resp, err := alone.Do(req)
		if err != nil {
			failures = append(failures, id+": "+err.Error())
		} else {
			b, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != http.StatusOK || err != nil {
				failures = append(failures, fmt.Sprintf("%s: %d %.200s %v", id, resp.StatusCode, b, err))
			}
		}
		cancel()
		time.Sleep(20 * time.Millisecond)
	}
	return failures
}

// The only server goes away and comes back, at periods from a tenth of the interval to
// ten times it. Every call is answered: executed once, or refused with a reason;
// none is lost that was not executed. The state changes at most twice per flap, and
// there is at most one probe per fast interval and one for each flap.
func TestFlapping(t *testing.T) {
	const interval = 500 * time.Millisecond
	factors := []float64{0.1, 0.3, 1, 3, 10}
	for _, edge := range edges {
		t.Run(edge.name, func(t *testing.T) {
			t.Parallel()
			var routes []Route
			var wires []*wire
			var servers []*Server
			for i := range factors {
				s := newServer(t)
				w := newWire(t, s.Addr)
				servers, wires = append(servers, s), append(wires, w)
				routes = append(routes, Route{Name: fmt.Sprintf("p%d", i), Upstreams: []string{w.addr}, Interval: interval, Timeout: time.Second, Hold: 20 * time.Second})
			}
			e := edge.start(t, routes...)
			for _, w := range wires {
				awaitUp(t, e, w.addr)
			}
			const spell = 10 * time.Second
			var all sync.WaitGroup
			flaps := make([]atomic.Int64, len(factors))
			failures := make([][]string, len(factors))
			before := make([]int64, len(factors))
			begun := make([]int, len(factors))
			for i, f := range factors {
				before[i], begun[i] = servers[i].Probes.Load(), transitions(t, e, wires[i].addr)
				half := time.Duration(f * float64(interval) / 2)
				all.Go(func() {
					for end := time.Now().Add(spell); time.Now().Before(end); flaps[i].Add(1) {
						wires[i].cut()
						time.Sleep(half)
						wires[i].mend(t)
						time.Sleep(half)
					}
				})
				all.Go(func() { failures[i] = callFor(spell, e.URL(routes[i].Name), fmt.Sprintf("%s p%d", edge.name, i)) })
			}
			all.Wait()
			for i, f := range factors {
				await(t, 10*time.Second, "up in the end", func() bool { state, _ := e.State(t, wires[i].addr); return state == "up" })
				n, probes, moves := flaps[i].Load(), servers[i].Probes.Load()-before[i], transitions(t, e, wires[i].addr)-begun[i]
				t.Logf("period %4.1f × interval: %3d flaps, %3d transitions, %3d probes arrived, %d calls executed, %d failed", f, n, moves, probes, len(servers[i].Runs()), len(failures[i]))
				if moves > int(2*n)+2 {
					t.Errorf("period %v × interval: %d transitions in %d flaps", f, moves, n)
				}
				if most := int64(spell/(100*time.Millisecond)) + 2*n; probes > most {
					t.Errorf("period %v × interval: %d probes in %s and %d flaps, want at most %d", f, probes, spell, n, most)
				}
				for _, failed := range failures[i] {
					id, word, _ := strings.Cut(failed, ": ")
					if runs := servers[i].Runs()[id]; runs == 0 && !strings.HasPrefix(word, "502") {
						t.Errorf("period %v × interval: lost, and not executed: %s", f, failed)
					}
				}
				wantOnce(t, servers[i])
			}
		})
	}
}

// transitions is how often the log says that this upstream changed between up and down.
func transitions(t testing.TB, e Edge, upstream string) (n int) {
	t.Helper()
	for line := range strings.Lines(e.Proc().Output()) {
		if strings.Contains(line, upstream) && (strings.Contains(line, "upstream is ") || strings.Contains(line, "/mcp is down") || strings.Contains(line, "/mcp is up")) {
			n++
		}
	}
	return n
}
