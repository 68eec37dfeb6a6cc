package reliability

import (
	"bufio"
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
	"github.com/mcphealth/mcphealth/test/traefik"
)

const (
	// settleWithin is how long the state of a server may differ from the truth: what is
	// promised is fall × timeout and one fast interval, 3 s here; the rest is two
	// cores on which all of this runs.
	settleWithin = 8 * time.Second
	// around is how long before and after a blow a call may fail because of it.
	around = 3 * time.Second
)

// Half an hour (SOAK=30m) or two minutes of mixed load while servers are killed,
// stopped, continued, terminated and drained, and the proxy reloads, at random.
// SOAK_SEED replays a run's blows. All along:
//   - no 404 and no 500 is made by the edge for a live route
//   - no call is executed twice
//   - calls fail only around a blow that could not be felt before
//   - the state of each server is the truth within settleWithin
//   - counters only grow, over reloads too
//   - in the end, goroutines and memory are what they were after the start
func TestSoak(t *testing.T) {
	lasts, err := time.ParseDuration(env("SOAK", "2m"))
	if err != nil {
		t.Fatal(err)
	}
	seed, err := strconv.ParseUint(env("SOAK_SEED", fmt.Sprint(rand.Uint64()>>32)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("SOAK=%s SOAK_SEED=%d", lasts, seed)
	for i, start := range []func(*testing.T, *soak){soakCaddy, soakTraefik} {
		t.Run([]string{"caddy", "traefik"}[i], func(t *testing.T) {
			t.Parallel()
			s := newSoak(t, seed+uint64(i))
			start(t, s)
			s.run(t, lasts)
		})
	}
}

func env(name, without string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return without
}

// hosts tell the endpoints apart: the servers take loopback names only.
var hosts = map[string]string{"pair": "127.0.0.2", "solo": "127.0.0.3"}

// soak is one proxy, its servers and its load.
type soak struct {
	rnd    *rand.Rand
	log    string // of executions
	pair   []*e2e.Instance
	solo   *e2e.Instance
	legacy []*e2e.Instance // with sessions

	url        string
	proc       *e2e.Process
	goroutines func() int
	reload     func(variant int)
	drain      func(addr, action string)
	states     func() map[string]string
	metrics    func() string
	prefix     string // of the names of our metrics

	truth    map[string]fact
	blows    []blow
	counters map[string]float64
	notes    map[string]int
}

// fact is what is so of a server, and since when.
type fact struct {
	state string // up, down, or "" while nobody can say
	since time.Time
}

type blow struct {
	what     string
	from, to time.Time
}

func newSoak(t *testing.T, seed uint64) *soak {
	s := &soak{rnd: rand.New(rand.NewPCG(seed, 9)), log: filepath.Join(t.TempDir(), "executions"), truth: map[string]fact{}, counters: map[string]float64{}, notes: map[string]int{}}
	start := func(name, server string) *e2e.Instance {
		i := e2e.Get(t, server).Start(t, e2e.FreePort(t), "--log", s.log, "--name", name)
		s.truth[i.Addr] = fact{"up", time.Now()}
		return i
	}
	s.pair = []*e2e.Instance{start("a", "go-sdk-v1.8.0-stateless-json"), start("b", "go-sdk-v1.8.0-stateless-json")}
	s.solo = start("solo", "go-sdk-v1.8.0-stateless-json")
	s.legacy = []*e2e.Instance{start("x", "go-sdk-v1.8.0-stateful"), start("y", "go-sdk-v1.8.0-stateful")}
	return s
}

func soakCaddy(t *testing.T, s *soak) {
	site := func(variant int) string {
		checks := "\t\tcheck_interval 1s\n\t\tcheck_timeout 1s\n\t\tcheck_fast 500ms\n\t\thold 15s\n" + []string{"", "\t\tretry_after 2s\n"}[variant%2]
		return fmt.Sprintf("\t@pair host %[7]s\n\tmcp_proxy @pair %[1]s %[2]s {\n%[3]s\t}\n\t@solo host %[8]s\n\tmcp_proxy @solo %[4]s {\n%[3]s\t}\n\tmcp_proxy /mcp* %[5]s %[6]s {\n%[3]s\t\tsticky\n\t}\n",
			s.pair[0].Addr, s.pair[1].Addr, checks, s.solo.Addr, s.legacy[0].Addr, s.legacy[1].Addr, hosts["pair"], hosts["solo"])
	}
	c := e2e.StartCaddy(t, site(0))
	s.url, s.proc = c.URL(), c.Process
	s.goroutines = func() int { return c.Goroutines(t) }
	s.reload = func(variant int) { c.Reload(t, site(variant)) }
	s.drain = func(addr, action string) { c.Drain(t, addr, action) }
	s.metrics, s.prefix = func() string { return c.Metrics(t) }, "caddy_mcp_health_"
	s.states = func() map[string]string {
		all := map[string]string{}
		for addr, u := range c.Upstreams(t) {
			all[addr] = u.State
		}
		return all
	}
}

func soakTraefik(t *testing.T, s *soak) {
	dynamic := func(variant int) string {
		var b strings.Builder
		b.WriteString("http:\n  middlewares:\n    status:\n      plugin:\n        mcphealth: {mode: fallback, paths: [/none], statusPath: /status}\n")
		fmt.Fprintf(&b, "    mcp:\n      plugin:\n        mcphealth: {paths: [/mcp], interval: 1s, timeout: 1s, hold: 15s, retryAfter: %[1]ds}\n    sticky:\n      plugin:\n        mcphealth: {paths: [/mcp], interval: 1s, timeout: 1s, hold: 15s, retryAfter: %[1]ds, sticky: true}\n", 1+variant%2)
		b.WriteString("  routers:\n    status: {rule: Path(`/status`), service: noop@internal, middlewares: [status]}\n    sessions: {rule: Host(`127.0.0.1`) && Path(`/mcp`), service: sessions, middlewares: [sticky]}\n")
		for name, host := range hosts {
			fmt.Fprintf(&b, "    %[1]s: {rule: Host(`%[2]s`), service: %[1]s, middlewares: [mcp]}\n    %[1]s-fallback: {rule: Host(`%[2]s`), priority: 1, service: noop@internal, middlewares: [mcp]}\n", name, host)
		}
		fmt.Fprintf(&b, "  services:\n    sessions: {loadBalancer: {sticky: {cookie: {name: stick}}, servers: [{url: 'http://%s'}, {url: 'http://%s'}]}}\n", s.legacy[0].Addr, s.legacy[1].Addr)
		fmt.Fprintf(&b, "    pair: {loadBalancer: {servers: [{url: 'http://%s'}, {url: 'http://%s'}]}}\n    solo: {loadBalancer: {servers: [{url: 'http://%s'}]}}\n", s.pair[0].Addr, s.pair[1].Addr, s.solo.Addr)
		return b.String()
	}
	e := traefikEdge{traefik.Start(t, traefik.Options{Dynamic: dynamic(0)})}
	s.url, s.proc = e.Traefik.URL+"/mcp", e.Process
	s.goroutines = func() int { return e.Goroutines(t) }
	s.reload = func(variant int) { e.Traefik.Reload(t, dynamic(variant)) }
	s.metrics, s.prefix = func() string { return fetch(t, e.Traefik.URL+"/status", "text/plain") }, "traefik_mcp_health_"
	s.states = func() map[string]string {
		all := map[string]string{}
		for _, i := range s.servers() {
			all[i.Addr], _ = e.State(t, i.Addr)
		}
		return all
	}
}

func (s *soak) servers() []*e2e.Instance {
	return append(append([]*e2e.Instance{s.solo}, s.pair...), s.legacy...)
}

func (s *soak) run(t *testing.T, lasts time.Duration) {
	await(t, 15*time.Second, "all up", func() bool { return s.wrong() == "" && s.allUp() })
	loads := map[string]*e2e.Running{
		"pair": e2e.Load{URL: s.url, Host: hosts["pair"], Clients: 6, Rate: 5}.Start(t),
		"slow": e2e.Load{URL: s.url, Host: hosts["pair"], Clients: 2, Slow: 300 * time.Millisecond}.Start(t),
		"solo": e2e.Load{URL: s.url, Host: hosts["solo"], Clients: 4, Rate: 5}.Start(t),
	}
	ctx, cancel := context.WithCancel(t.Context())
	var sessions sessionLoad
	for n := range 3 {
		sessions.wg.Go(func() { sessions.client(ctx, s.url, n) })
	}
	s.rest(t, 10*time.Second)
	goroutines, rss := s.goroutines(), s.proc.RSS(t)
	for end := time.Now().Add(lasts); time.Now().Before(end); {
		s.strike(t)
		s.rest(t, time.Duration(1000+s.rnd.IntN(3000))*time.Millisecond)
	}
	s.rest(t, 10*time.Second)
	after, memory := s.goroutines(), s.proc.RSS(t)
	cancel()
	sessions.wg.Wait()
	for name, load := range loads {
		r := load.Stop()
		t.Logf("%s: %v", name, r)
		s.judge(t, name, r)
	}
	sessions.judge(t)
	for message, n := range e2e.Executions(t, s.log) {
		if n > 1 && message != "" {
			t.Errorf("call %q was executed %d times", message, n)
		}
	}
	t.Logf("blows %v; goroutines %d, then %d; memory %d MiB, then %d; %d counters", s.notes, goroutines, after, rss, memory, len(s.counters))
	if after > goroutines+30 {
		t.Errorf("%d goroutines in the end, %d at the start", after, goroutines)
	}
	if memory > rss*3/2+48 {
		t.Errorf("memory %d MiB in the end, %d at the start", memory, rss)
	}
}

// strike does one thing at random, and undoes it.
func (s *soak) strike(t *testing.T) {
	all := s.servers()
	victim := all[s.rnd.IntN(len(all))]
	pause := time.Duration(200+s.rnd.IntN(3800)) * time.Millisecond
	if victim != s.solo && s.rnd.IntN(4) == 0 {
		pause += settleWithin // long enough for the state to be checked
	}
	what := []string{"kill", "kill", "stop", "terminate", "reload", "reload", "drain"}[s.rnd.IntN(7)]
	if s.drain == nil && what == "drain" {
		what = "kill"
	}
	s.notes[what]++
	b := blow{what: what, from: time.Now()}
	switch what {
	case "kill":
		s.truth[victim.Addr] = fact{"down", time.Now()}
		victim.Kill(t)
		s.rest(t, pause)
		victim.Restart(t)
	case "terminate":
		s.truth[victim.Addr] = fact{"", time.Now()}
		victim.Terminate(t)
		s.truth[victim.Addr] = fact{"down", time.Now()}
		s.rest(t, pause)
		victim.Restart(t)
	case "stop":
		s.truth[victim.Addr] = fact{"down", time.Now()}
		victim.Pause(t)
		s.rest(t, pause)
		victim.Continue(t)
	case "reload":
		s.reload(s.notes[what])
	case "drain":
		s.drain(victim.Addr, "drain")
		s.rest(t, pause)
		s.drain(victim.Addr, "resume")
	}
	s.truth[victim.Addr] = fact{"up", time.Now()}
	b.to = time.Now()
	s.blows = append(s.blows, b)
}

// rest lets time pass, and looks whether all is as it should be meanwhile.
func (s *soak) rest(t *testing.T, d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		if wrong := s.wrong(); wrong != "" {
			t.Errorf("%s (after %d blows)", wrong, len(s.blows))
		}
		s.checkCounters(t)
		if !s.proc.Running() {
			t.Fatalf("the proxy has ended")
		}
	}
}

// wrong is what the edge believes of a server and has been false for too long.
func (s *soak) wrong() string {
	states := s.states()
	for addr, f := range s.truth {
		state, known := states[addr]
		if !known || f.state == "" || time.Since(f.since) < settleWithin || state == f.state {
			continue
		}
		f.since = time.Now() // once per fault
		s.truth[addr] = f
		return fmt.Sprintf("%s is %s for the edge, and %s for more than %s", addr, state, f.state, settleWithin)
	}
	return ""
}

func (s *soak) allUp() bool {
	for _, state := range s.states() {
		if state != "up" {
			return false
		}
	}
	return true
}

// checkCounters: what Prometheus takes for a counter never falls.
func (s *soak) checkCounters(t *testing.T) {
	lines := bufio.NewScanner(strings.NewReader(s.metrics()))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, value, ok := cutLast(lines.Text(), " ")
		family, _, _ := strings.Cut(name, "{")
		if !ok || !strings.HasPrefix(name, s.prefix) || !(strings.HasSuffix(family, "_total") || strings.HasSuffix(family, "_count") || strings.HasSuffix(family, "_bucket")) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Errorf("metrics: %q", lines.Text())
			continue
		}
		if v < s.counters[name] {
			t.Errorf("counter %s fell from %v to %v", name, s.counters[name], v)
		}
		s.counters[name] = v
	}
}

func cutLast(s, sep string) (before, after string, ok bool) {
	at := strings.LastIndex(s, sep)
	if at < 0 {
		return s, "", false
	}
	return s[:at], s[at+len(sep):], true
}

// judge looks at the calls that failed.
func (s *soak) judge(t *testing.T, name string, r e2e.Report) {
	bad := 0
	for _, f := range r.Failures {
		why := ""
		switch {
		case f.Outcome == e2e.Wrong:
			why = "a wrong answer"
		case f.Status == 404 || f.Status == 500:
			why = "an answer that ends a client"
		case !s.felt(f):
			why = "no blow explains it"
		}
		if why != "" {
			if bad++; bad <= 10 {
				t.Errorf("%s: %v: %s", name, f, why)
			}
		}
	}
	if r.Sent == 0 || len(r.Failures) > r.Sent/10 {
		t.Errorf("%s: %d of %d calls failed", name, len(r.Failures), r.Sent)
	}
}

// felt: a blow while the call was on its way, or a moment before, may be why it failed.
func (s *soak) felt(f e2e.Failure) bool {
	return slices.ContainsFunc(s.blows, func(b blow) bool {
		return f.Start.Before(b.to.Add(around)) && f.End.After(b.from.Add(-around))
	})
}

// sessionLoad are clients of the era with sessions: a lost one is opened anew.
type sessionLoad struct {
	wg    sync.WaitGroup
	mu    sync.Mutex
	calls int
	lost  map[string]int
	stuck []string
}

func (l *sessionLoad) client(ctx context.Context, url string, n int) {
	for last := time.Now(); ctx.Err() == nil; {
		if time.Since(last) > 40*time.Second {
			l.note(func() {
				l.stuck = append(l.stuck, fmt.Sprintf("client %d was without an answer for %s", n, time.Since(last)))
			})
			last = time.Now()
		}
		within, cancel := context.WithTimeout(ctx, 20*time.Second)
		session, err := e2e.Connect(within, url)
		if err == nil {
			for k := 0; k < 30 && err == nil && ctx.Err() == nil; k++ {
				one, done := context.WithTimeout(ctx, 20*time.Second)
				if _, err = e2e.Whoami(one, session); err == nil {
					last = time.Now()
					l.note(func() { l.calls++ })
				}
				done()
				time.Sleep(100 * time.Millisecond)
			}
			session.Close()
		}
		cancel()
		if err != nil && ctx.Err() == nil {
			l.note(func() {
				if l.lost == nil {
					l.lost = map[string]int{}
				}
				l.lost[shorten(err.Error())]++
			})
			time.Sleep(200 * time.Millisecond)
		}
	}
}

func shorten(s string) string {
	if i := strings.LastIndex(s, ": "); i >= 0 {
		s = s[i+2:]
	}
	return s
}

func (l *sessionLoad) note(f func()) { l.mu.Lock(); defer l.mu.Unlock(); f() }

func (l *sessionLoad) judge(t *testing.T) {
	t.Logf("sessions: %d calls, lost %v", l.calls, slices.Sorted(maps.Keys(l.lost)))
	for _, s := range l.stuck {
		t.Error(s)
	}
	if l.calls == 0 {
		t.Error("no call in a session succeeded")
	}
}
