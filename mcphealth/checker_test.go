package mcphealth

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// bubble is a network in memory: fake time runs on while its connections wait,
// which it does not with real sockets.
type bubble struct {
	mu       sync.Mutex
	mode     string   // "modern", "sessions", "gone", "refused", "hang", "busy"
	hosts    []string // that probes carried
	asked    []time.Time
	conns    []net.Conn
	retry    string
	sessions int // that live
}

func (b *bubble) set(mode string) {
	b.mu.Lock()
	b.mode = mode
	b.mu.Unlock()
}

func (b *bubble) is(mode string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.mode == mode
}

// kill ends all connections, as the end of the process would.
func (b *bubble) kill() {
	b.mu.Lock()
	b.mode = "refused"
	conns := b.conns
	b.conns = nil
	b.mu.Unlock()
	for _, c := range conns {
		c.Close()
	}
}

func (b *bubble) probes() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.asked)
}

func (b *bubble) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = append(b.asked, time.Now())
	if b.mode == "refused" {
		return nil, errors.New("dial tcp: connect: connection refused")
	}
	client, server := net.Pipe()
	b.conns = append(b.conns, server)
	go b.serve(server, b.mode)
	return client, nil
}

func (b *bubble) serve(c net.Conn, mode string) {
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		body, _ := io.ReadAll(req.Body)
		var m message
		_ = json.Unmarshal(body, &m)
		b.mu.Lock()
		b.hosts = append(b.hosts, req.Host)
		b.mu.Unlock()
		status, head, answer := 200, "", `{"jsonrpc":"2.0","id":`+string(m.ID)+`,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`
		switch mode {
		case "sessions", "stuck":
			if mode == "stuck" && req.Method == http.MethodDelete {
				_, _ = io.Copy(io.Discard, r)
				return
			}
			status, head, answer = b.session(req, m)
		case "gone":
			status, answer = 404, `{"jsonrpc":"2.0","id":`+string(m.ID)+`,"error":{"code":-32002,"message":"not found"}}`
		case "picky":
			if req.Host != "good.example" {
				status, answer = 421, "Invalid Host header"
			}
		case "hang":
			_, _ = io.Copy(io.Discard, r)
			return
		case "page":
			answer = "<html>"
		case "busy":
			status, head, answer = 429, "Retry-After: "+b.retry+"\r\n", "{}"
		}
		fmt.Fprintf(c, "HTTP/1.1 %d X\r\nContent-Type: application/json\r\n%sContent-Length: %d\r\n\r\n%s", status, head, len(answer), answer)
	}
}

// session answers as a legacy server with sessions does.
func (b *bubble) session(req *http.Request, m message) (status int, head, answer string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	id := req.Header.Get("Mcp-Session-Id")
	switch {
	case m.Method == "initialize":
		b.sessions++
		return 200, "Mcp-Session-Id: live\r\n", `{"jsonrpc":"2.0","id":` + string(m.ID) + `,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{}}}`
	case id != "live" || b.sessions == 0:
		return 404, "", `{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Session not found"}}`
	case req.Method == http.MethodDelete:
		b.sessions--
		return 200, "", "{}"
	}
	return 200, "", `{"jsonrpc":"2.0","id":` + string(m.ID) + `,"result":{}}`
}

// checker starts a checker against b and closes it with the test.
func (b *bubble) checker(t *testing.T, s Schedule, options ...func(*Target)) *Checker {
	t.Helper()
	c := b.idle(t, s, options...)
	c.Start()
	return c
}

// idle makes a checker that is not started.
func (b *bubble) idle(t *testing.T, s Schedule, options ...func(*Target)) *Checker {
	t.Helper()
	target := Target{URL: "http://upstream.test/mcp"}
	for _, o := range options {
		o(&target)
	}
	p, err := NewProber(target, NewLine(&http.Transport{DialContext: b.dial}))
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewChecker(p, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func wantState(t *testing.T, c *Checker, state State, reason Reason) {
	t.Helper()
	synctest.Wait()
	if s := c.Snapshot(); s.State != state || s.Reason != reason {
		t.Errorf("state %s (%s), want %s (%s); last: %s", s.State, s.Reason, state, reason, s.Last.Detail)
	}
}

func TestFirstProbeIsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		wantState(t, c, Up, OK)
		if n := b.probes(); n != 1 {
			t.Errorf("probed %d times at once, want 1", n)
		}
	})
}

func TestIntervalIsNeverExceeded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		b.checker(t, Schedule{Interval: 10 * time.Second})
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		for i := 1; i < len(b.asked); i++ {
			d := b.asked[i].Sub(b.asked[i-1])
			if d > 10*time.Second || d < 5*time.Second || (i > 1 && d < 9*time.Second) {
				t.Errorf("probe %d after %v, want 9s..10s (the first 5s..10s)", i, d)
			}
		}
		if len(b.asked) < 60 || len(b.asked) > 70 {
			t.Errorf("%d probes in 10 minutes, want 60 to 70", len(b.asked))
		}
	})
}

// A killed process is known at once: its connection ends, the probe that follows
// is refused, and so is the one that confirms it.
func TestDeathWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		time.Sleep(time.Second)
		killed := time.Now()
		b.kill()
		time.Sleep(2 * confirmAfter)
		wantState(t, c, Down, Refused)
		if got := c.Snapshot().Since.Sub(killed); got > 2*confirmAfter {
			t.Errorf("down after %v, want within %v", got, 2*confirmAfter)
		}
		if c.Tier() != TierDown {
			t.Errorf("tier %v, want down", c.Tier())
		}
	})
}

func TestWatchOffWaitsForTheInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{NoWatch: true})
		time.Sleep(time.Second)
		b.kill()
		time.Sleep(2 * time.Second)
		wantState(t, c, Up, OK)
		time.Sleep(10 * time.Second)
		wantState(t, c, Down, Refused)
	})
}

// Servers that hang up on idle connections, as Node does after 5 s, are asked
// once more per interval at most.
func TestIdleHangUpsCostOneProbePerInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{Interval: 10 * time.Second})
		for range 120 { // ten minutes
			time.Sleep(5 * time.Second)
			b.mu.Lock()
			conns := b.conns
			b.conns = nil
			b.mu.Unlock()
			for _, conn := range conns {
				conn.Close()
			}
		}
		wantState(t, c, Up, OK)
		if n := b.probes(); n > 135 {
			t.Errorf("%d probes in 10 minutes, want at most two per interval", n)
		}
	})
}

func TestHungUpstreamFallsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{Interval: 10 * time.Second, Fall: 2})
		time.Sleep(time.Minute)
		hung := time.Now()
		b.set("hang")
		c.Sent() // one request that gets no answer
		for c.Tier() == TierUp {
			time.Sleep(100 * time.Millisecond)
		}
		if got := time.Since(hung); c.Tier() != TierSuspect || got > 2*time.Second+100*time.Millisecond {
			t.Errorf("tier %d after %v, want second choice after two fast intervals", c.Tier(), got)
		}
		for c.Tier() != TierDown {
			time.Sleep(100 * time.Millisecond)
		}
		// fall × timeout + one fast interval, and the time until the request was missed
		if got := time.Since(hung); got > 2*5*time.Second+time.Second+200*time.Millisecond {
			t.Errorf("out after %v, want fall × timeout + fast = 11 s", got)
		}
		wantState(t, c, Down, Timeout)
	})
}

// A server that takes its time over a call, and answers probes meanwhile, stays first
// choice.
func TestSlowCallIsNoHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		time.Sleep(time.Minute)
		c.Sent()
		staysUp(t, c, func() {})
	})
}

// staysUp does something ten times a second for a minute, in which c is first choice.
func staysUp(t *testing.T, c *Checker, do func()) {
	t.Helper()
	for range 600 {
		do()
		time.Sleep(100 * time.Millisecond)
		if got := c.Tier(); got != TierUp {
			t.Fatalf("tier %d, want up", got)
		}
	}
}

// A store of leases that takes its time is no silence of the upstream.
func TestSlowLeaseIsNoHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{Fast: 200 * time.Millisecond, Lease: func(bool) time.Duration {
			time.Sleep(500 * time.Millisecond)
			return 0
		}})
		time.Sleep(time.Minute)
		staysUp(t, c, func() { c.Sent() })
	})
}

func TestComesBackFast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "refused"}
		c := b.checker(t, Schedule{})
		time.Sleep(startGrace + 100*time.Millisecond)
		wantState(t, c, Down, Refused)
		b.set("modern")
		time.Sleep(2 * time.Second)
		wantState(t, c, Up, OK)
	})
}

// https://github.com/google/ChromeBrowserEnterprise/pull/79: the sidecar binds its port
// 2.5 s after the proxy in front is there, which took it for dead.
func TestColdStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "refused"}
		c := b.idle(t, Schedule{})
		var moves []string
		c.OnChange(func(ch Change) { moves = append(moves, string(ch.From)+">"+string(ch.To)) })
		c.Start()
		time.Sleep(2500 * time.Millisecond)
		wantState(t, c, StateUnknown, Refused)
		if got := c.Tier(); got != TierSuspect {
			t.Errorf("tier %d while it starts, want suspect: others are preferred", got)
		}
		b.set("modern")
		time.Sleep(500 * time.Millisecond)
		wantState(t, c, Up, OK)
		if got := strings.Join(moves, ", "); got != "unknown>unknown, unknown>up" {
			t.Errorf("changes %s, want unknown>unknown (refused), unknown>up: no down", got)
		}
		b.kill()
		time.Sleep(200 * time.Millisecond)
		wantState(t, c, Down, Refused) // it lived: no grace, and none after it
	})
}

func TestDownBacksOffToTheInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "refused"}
		b.checker(t, Schedule{Interval: 10 * time.Second})
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if n := b.probes(); n < 60 || n > 80 {
			t.Errorf("%d probes of a dead upstream in 10 minutes, want about one per interval and a few fast ones", n)
		}
	})
}

// Listeners may take longer than the pause until the next probe, and a Start may come
// while the probe that a Pause found is still running: neither ends the probing.
func TestSlowListenersEndNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.idle(t, Schedule{})
		c.OnResult(func(Result) { time.Sleep(3 * time.Second) })
		c.Start()
		time.Sleep(time.Minute)
		b.kill() // confirmed after 50 ms, and again each second
		time.Sleep(30 * time.Second)
		wantState(t, c, Down, Refused)
		b.set("modern")
		time.Sleep(30 * time.Second)
		wantState(t, c, Up, OK)
		b.set("hang")
		time.Sleep(10 * time.Second)
		c.Pause()
		c.Start()
		time.Sleep(time.Minute)
		wantState(t, c, Down, Timeout)
	})
}

// Answers prove life for an interval, not until the turn after the next: an upstream
// that is lost while others still say something else in its place is asked in time.
func TestTrafficProvesForAnInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{NoWatch: true})
		for range 60 {
			c.Sent()
			c.Answered("")
			time.Sleep(time.Second)
		}
		lost := time.Now()
		b.set("refused")
		for c.Tier() != TierDown && time.Since(lost) < time.Minute {
			c.Sent()
			c.Settled() // a page, say
			time.Sleep(100 * time.Millisecond)
		}
		if got := time.Since(lost); got > 11*time.Second+200*time.Millisecond {
			t.Errorf("out after %v, want an interval and the confirmation: 11 s", got)
		}
	})
}

// A page in place of an answer has the upstream asked at once, but where it is about one
// request only, once per interval at most.
func TestDoubted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		call := func(foreign bool) {
			c.Sent()
			if foreign {
				c.Doubted()
				c.Settled()
			} else {
				c.Answered("")
			}
			time.Sleep(100 * time.Millisecond)
		}
		for i := range 6000 { // ten minutes, in which every other answer is strange
			call(i%2 == 0)
		}
		wantState(t, c, Up, OK)
		if n := b.probes(); n > 63 {
			t.Errorf("%d probes in ten minutes, want at most one per interval", n)
		}
		time.Sleep(20 * time.Second)
		b.kill()
		b.set("page")
		call(true)
		call(true)
		if c.Tier() != TierDown {
			t.Errorf("tier %v after two pages and 200 ms, want down", c.Tier())
		}
	})
}

// A drain makes an upstream second choice, whatever the probes find meanwhile, and no
// better than it is.
func TestDrain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		want := func(when string, tier Tier) {
			t.Helper()
			time.Sleep(30 * time.Second)
			if got := c.Tier(); got != tier {
				t.Errorf("%s: tier %d, want %d", when, got, tier)
			}
		}
		want("up", TierUp)
		c.Drain(true)
		want("drained", TierDegraded)
		wantState(t, c, Up, OK)
		b.kill()
		want("down", TierDown)
		c.Drain(false)
		want("resumed while down", TierDown)
		b.set("modern")
		want("back", TierUp)
	})
}

func TestRetryAfterIsHonoured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "busy", retry: "30"}
		c := b.checker(t, Schedule{})
		time.Sleep(29 * time.Second)
		wantState(t, c, UpDegraded, RateLimited)
		if n := b.probes(); n != 1 {
			t.Errorf("asked %d times within the 30 s of Retry-After, want once", n)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if n := b.probes(); n != 2 {
			t.Errorf("asked %d times after 31 s, want twice", n)
		}
	})
}

// A busy upstream needs no probe; it is asked now and then all the same.
func TestTrafficStandsInForProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{Interval: 10 * time.Second})
		for range 6000 { // ten minutes
			time.Sleep(100 * time.Millisecond)
			c.Sent()
			c.Answered("mcp.example.com")
		}
		synctest.Wait()
		if n := b.probes(); n < 8 || n > 14 {
			t.Errorf("%d probes in 10 minutes of traffic, want about one in six intervals", n)
		}
	})
}

func TestTrafficDoesNotHideADeeperQuestion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{Interval: 10 * time.Second}, func(t *Target) { t.SlowAfter = time.Minute })
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			c.Sent()
			c.Answered("")
		}
		synctest.Wait()
		if n := b.probes(); n < 6 {
			t.Errorf("%d probes in a minute, want one per interval", n)
		}
	})
}

// The vote of a probe that got no answer while clients did is from before.
func TestTrafficOutranksALostProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{Interval: 10 * time.Second, Fall: 1, NoTraffic: true})
		time.Sleep(30 * time.Second)
		b.set("hang")
		for range 300 {
			time.Sleep(100 * time.Millisecond)
			c.Sent()
			c.Answered("")
		}
		wantState(t, c, Up, OK)
		time.Sleep(30 * time.Second)
		wantState(t, c, Down, Timeout)
	})
}

func TestFailedTrafficBringsAProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{NoWatch: true})
		time.Sleep(time.Second)
		b.set("refused")
		c.Sent()
		c.Failed()
		if c.Tier() != TierSuspect {
			t.Errorf("tier %v right after the failure, want suspect", c.Tier())
		}
		time.Sleep(2 * confirmAfter)
		wantState(t, c, Down, Refused)
	})
}

// A hundred failures of a living upstream bring one probe per fast interval.
func TestFalseAlarmsAreFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		for range 100 {
			time.Sleep(100 * time.Millisecond)
			c.Sent()
			c.Failed()
		}
		wantState(t, c, Up, OK)
		if n := b.probes(); n > 13 {
			t.Errorf("%d probes in 10 s of false alarms, want about one per second", n)
		}
	})
}

// Nor do alarms bring many where the probes cannot find out, as on a machine without files.
func TestAlarmsWithoutAFindingAreFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "picky"} // unknown (host_guessed)
		c := b.checker(t, Schedule{})
		for range 1000 {
			time.Sleep(10 * time.Millisecond)
			c.Sent()
			c.Failed()
		}
		wantState(t, c, StateUnknown, HostGuessed)
		if n := c.Snapshot().Probes; n > 13 {
			t.Errorf("%d probes in 10 s that found nothing out, want about one per second", n)
		}
	})
}

func TestInitialWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "hang"}
		c := b.checker(t, Schedule{Wait: true})
		if c.Tier() != TierDown {
			t.Errorf("tier %v before the first verdict, want down", c.Tier())
		}
		b.set("modern")
		time.Sleep(7 * time.Second)
		wantState(t, c, Up, OK)
	})
}

func TestCloseEndsEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		time.Sleep(time.Minute)
		c.Sent()
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		n := b.probes()
		c.Probe()
		c.Failed()
		time.Sleep(time.Hour)
		if got := b.probes() - n; got != 0 {
			t.Errorf("probed %d times after Close, want none", got)
		}
	})
}

func TestCloseInterruptsAProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "hang"}
		c := b.checker(t, Schedule{})
		time.Sleep(time.Second)
		start := time.Now()
		c.Close()
		if d := time.Since(start); d > 100*time.Millisecond {
			t.Errorf("Close took %v while a probe hung, want at once", d)
		}
		if s := c.Snapshot(); s.State == Down {
			t.Errorf("our own shutdown counted as death: %+v", s.Last)
		}
	})
}

func TestListenersHearInOrderAndCanLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.idle(t, Schedule{NoWatch: true})
		var heard []string
		cancel := c.OnChange(func(ch Change) {
			heard = append(heard, fmt.Sprint(ch.From, ">", ch.To, " ", ch.Reason))
			c.Snapshot() // no lock is held
			c.Probe()
		})
		var results atomic.Int32
		c.OnResult(func(Result) { results.Add(1) })
		c.Start()
		time.Sleep(10 * time.Second)
		b.set("refused")
		time.Sleep(20 * time.Second)
		b.set("modern")
		time.Sleep(20 * time.Second)
		cancel()
		b.set("refused")
		time.Sleep(20 * time.Second)
		synctest.Wait()
		want := "unknown>up ok, up>down refused, down>up ok"
		if got := strings.Join(heard, ", "); got != want {
			t.Errorf("heard %s, want %s", got, want)
		}
		if n := c.Snapshot().Changes; len(n) != 4 {
			t.Errorf("%d changes kept, want 4", len(n))
		}
		if uint64(results.Load()) != c.Snapshot().Probes {
			t.Errorf("%d results heard of %d probes", results.Load(), c.Snapshot().Probes)
		}
	})
}

// A bug in a probe is a result and no crash.
func TestPanickingProbe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, err := NewProber(Target{URL: "http://upstream.test/mcp"}, NewForeignLine(nil))
		if err != nil {
			t.Fatal(err)
		}
		c, _ := NewChecker(p, Schedule{})
		c.Start()
		defer c.Close()
		time.Sleep(time.Minute)
		wantState(t, c, StateUnknown, Canceled)
		if s := c.Snapshot(); s.Probes < 5 || c.Tier() != TierUp {
			t.Errorf("%d probes, tier %v: want it to go on, and the upstream tried", s.Probes, c.Tier())
		}
	})
}

func TestRequestPathDoesNotAllocate(t *testing.T) {
	b := &bubble{mode: "modern"}
	c := b.checker(t, Schedule{})
	c.Sent() // arms the suspicion timer
	if n := testing.AllocsPerRun(1000, func() {
		_ = c.Tier()
		c.Sent()
		c.Answered("")
		c.Sent()
		c.Settled()
	}); n != 0 {
		t.Errorf("%v allocations per request, want none", n)
	}
}

// A pause leaves nothing behind and forgets nothing.
func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		time.Sleep(time.Minute)
		c.Pause()
		synctest.Wait()
		n := b.probes()
		b.kill()
		c.Probe()
		c.Failed()
		time.Sleep(time.Hour)
		synctest.Wait()
		if got := b.probes() - n; got != 0 {
			t.Errorf("probed %d times while paused, want none", got)
		}
		wantState(t, c, Up, OK)
		c.Start()
		time.Sleep(2 * time.Second)
		wantState(t, c, Down, Refused)
		b.set("modern")
		time.Sleep(5 * time.Second)
		wantState(t, c, Up, OK)
	})
}

func TestPauseEndsTheSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "sessions"}
		c := b.checker(t, Schedule{})
		time.Sleep(time.Minute)
		wantState(t, c, Up, OK)
		if b.sessions != 1 {
			t.Errorf("%d sessions while probing, want 1", b.sessions)
		}
		c.Pause()
		synctest.Wait()
		if b.sessions != 0 {
			t.Errorf("%d sessions while paused, want none", b.sessions)
		}
		c.Start()
		time.Sleep(time.Minute)
		wantState(t, c, Up, OK)
		if b.sessions != 1 {
			t.Errorf("%d sessions after going on, want 1", b.sessions)
		}
	})
}

// A failed call is believed although an idle connection that ended was a false
// alarm a moment ago.
func TestFalseAlarmsAreCountedByKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		time.Sleep(time.Second)
		b.kill()
		b.set("modern")
		time.Sleep(time.Second)
		wantState(t, c, Up, OK)
		b.set("refused")
		c.Sent()
		c.Failed()
		time.Sleep(2 * confirmAfter)
		wantState(t, c, Down, Refused)
	})
}

// An alarm during a probe, of a kind that is not believed for now, must not put
// off what the probe's own result makes due.
func TestAlarmDoesNotDelayTheConfirmation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{})
		time.Sleep(time.Second)
		b.kill() // a false alarm: the next ending is not believed for an interval
		b.set("modern")
		time.Sleep(time.Second)
		wantState(t, c, Up, OK)
		b.set("hang")
		c.Probe()
		time.Sleep(2 * time.Second)
		c.bringForward(ending)      // while it runs
		time.Sleep(9 * time.Second) // 5 s for it, and 5 s for the one that confirms
		wantState(t, c, Down, Timeout)
	})
}

func TestWatchOffClosesTheConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		b.checker(t, Schedule{NoWatch: true})
		time.Sleep(time.Second)
		synctest.Wait()
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, c := range b.conns {
			if _, err := c.Write([]byte("x")); err == nil {
				t.Error("the probe's connection is still open")
			}
		}
	})
}

// A server that fails inside HTTP 200 while its peers are fine is second choice, never
// down, and is tried again after a while.
func TestErrorRate(t *testing.T) {
	const (
		idle  = "idle"  // no traffic
		fine  = "fine"  // answers well
		alike = "alike" // fails in the same way
		out   = "out"   // is second choice for its errors already
	)
	tests := []struct {
		name      string
		rate      float64
		good, bad int // answers within two seconds, bad ones last
		peers     []string
		want      State
	}{
		{"every call fails", 0.5, 0, 20, []string{fine}, UpDegraded},
		{"more than the share", 0.5, 10, 20, []string{fine}, UpDegraded},
		{"less than the share", 0.5, 100, 20, []string{fine}, Up},
		{"too few to mean anything", 0.5, 0, minErrors - 1, []string{fine}, Up},
		{"off by default", 0, 0, 100, []string{fine}, Up},
		{"nobody to compare with", 0.5, 0, 20, nil, Up},
		{"nobody who has traffic", 0.5, 0, 20, []string{idle, idle}, Up},
		{"all fail alike: it is what they are asked", 0.5, 0, 20, []string{alike, alike}, Up},
		{"one fails alike, and was first", 0.5, 0, 20, []string{alike, fine}, Up},
		{"one is out already", 0.5, 0, 20, []string{out, fine, fine}, Up},
		{"one of twenty is out already", 0.5, 0, 20, append(slices.Repeat([]string{fine}, 18), out), UpDegraded},
		{"two of twenty are", 0.5, 0, 20, append(slices.Repeat([]string{fine}, 17), out, out), Up},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := &bubble{mode: "modern"}
				serve := func(c *Checker, n int, erred bool) {
					for range n {
						c.Sent()
						c.Answered("")
						c.Served(erred)
					}
				}
				all := NewPeers()
				c := b.checker(t, Schedule{ErrorRate: tt.rate})
				leave := all.Join(c)
				for _, kind := range tt.peers {
					p := b.checker(t, Schedule{ErrorRate: tt.rate})
					all.Join(p)
					switch kind {
					case out:
						serve(p, 20, true)
						p.Probe()
						synctest.Wait()
						p.rate.until.Store(int64(time.Hour))
						all.out[len(all.all)-1] = true
					case fine, alike:
						defer time.AfterFunc(20*time.Second-time.Millisecond, func() { serve(p, 20, kind == alike) }).Stop()
					}
				}
				time.Sleep(20 * time.Second)
				serve(c, 1, true) // begins the window
				serve(c, tt.good, false)
				serve(c, tt.bad-1, true)
				reason := OK
				if tt.want == UpDegraded {
					reason = ErrorRate
				}
				wantState(t, c, tt.want, reason)
				if s := c.Snapshot(); tt.want == UpDegraded && !strings.Contains(s.Changes[len(s.Changes)-1].Detail, " calls within 10s failed inside HTTP 200") {
					t.Errorf("detail %q, want what failed", s.Changes[len(s.Changes)-1].Detail)
				}
				time.Sleep(time.Minute)
				wantState(t, c, Up, OK)
				leave()
				if len(c.peers) != 0 || all.eject(c) {
					t.Error("it may be ejected though it has left")
				}
			})
		})
	}
}

// An upstream that fails its calls each time that it is tried again is tried more and
// more rarely; one that has done well meanwhile begins anew.
func TestErrorRateRelapses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const interval = 10 * time.Second
		b := &bubble{mode: "modern"}
		all := NewPeers()
		c, peer := b.checker(t, Schedule{ErrorRate: 0.5, Interval: interval}), b.checker(t, Schedule{ErrorRate: 0.5, Interval: interval})
		defer all.Join(c)()
		defer all.Join(peer)()
		out := time.Duration(0)
		run := func(d time.Duration, erred bool) (times int, longest time.Duration) {
			for range int(d / time.Second) {
				time.Sleep(time.Second)
				for range 20 {
					peer.Sent()
					peer.Answered("")
					peer.Served(false)
				}
				if c.Snapshot().State != Up {
					out += time.Second
					longest = max(longest, out)
					continue
				}
				out = 0
				for range 20 {
					c.Sent()
					c.Answered("")
					c.Served(erred)
				}
				synctest.Wait()
				if c.Snapshot().State != Up {
					times++
				}
			}
			return times, longest
		}
		times, longest := run(30*time.Minute, true)
		if hold := errorHold * interval; times < 10 || times > 20 || longest < (maxRelapses-1)*hold || longest > (maxRelapses+1)*hold {
			t.Errorf("ejected %d times within half an hour, for %v at most; want 10 to 20 times, for about %v", times, longest, maxRelapses*hold)
		}
		run(time.Hour, false)
		if _, longest := run(errorHold*interval+10*time.Second, true); longest > (errorHold+1)*interval {
			t.Errorf("after a good hour it is out for %v, want about %v", longest, errorHold*interval)
		}
	})
}

// Review of issue 2, B1: an endpoint that says "not found" to everybody, in
// JSON-RPC, is dead under load as well: traffic outranks a probe that got no
// answer, and none that got a definite one.
func TestTrafficDoesNotOutrankADefiniteAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{NoTraffic: true})
		time.Sleep(time.Minute)
		b.set("gone")
		for range 300 {
			time.Sleep(100 * time.Millisecond)
			c.Sent()
			c.Answered("")
		}
		wantState(t, c, Down, RouteAbsent)
	})
}

// RFC 3986, 6.2.3: a port may be empty, in a URL. In a Host, servers that guard against
// DNS rebinding do not know it.
func TestHostWithoutPort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		b.checker(t, Schedule{}, func(t *Target) { t.URL = "http://upstream.test:/mcp" })
		synctest.Wait()
		if want := []string{"upstream.test"}; !slices.Equal(b.hosts, want) {
			t.Errorf("Hosts %q, want %q", b.hosts, want)
		}
	})
}

// Review of issue 2, B2: what a client writes into its Host must not change what a
// working probe asks, and the refusal of a learned Host does not count.
func TestLearnedHostIsOnlyAGuess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "modern"}
		c := b.checker(t, Schedule{NoTraffic: true})
		time.Sleep(time.Second)
		c.Sent()
		c.Answered("evil.example")
		time.Sleep(time.Minute)
		synctest.Wait()
		b.mu.Lock()
		for _, h := range b.hosts {
			if h != "upstream.test" {
				t.Errorf("a probe carried the Host %q of a client although its own worked", h)
			}
		}
		b.mu.Unlock()
		b.set("picky")
		time.Sleep(time.Minute)
		wantState(t, c, Up, OK)
		if s := c.Snapshot(); s.Last.Reason != HostGuessed {
			t.Errorf("last reason %s, want host_guessed", s.Last.Reason)
		}
		c.Sent()
		c.Answered("good.example") // learned now, for the guess did not work
		time.Sleep(time.Minute)
		wantState(t, c, Up, OK)
		if s := c.Snapshot(); s.Last.Reason != OK {
			t.Errorf("last reason %s, want ok with the learned Host", s.Last.Reason)
		}
	})
}

// Review of issue 2, B7: a server that asked not to be probed for minutes, and then
// hangs, is found out by its clients' calls.
func TestRetryAfterDoesNotHideAHang(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "busy", retry: "300"}
		c := b.checker(t, Schedule{})
		time.Sleep(20 * time.Second)
		wantState(t, c, UpDegraded, RateLimited)
		b.set("hang")
		c.Sent()
		time.Sleep(12 * time.Second)
		wantState(t, c, Down, Timeout)
	})
}

// A DELETE that is not answered holds nobody longer than the caller allows.
func TestCloseKeepsToItsDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bubble{mode: "stuck"}
		p, err := NewProber(Target{URL: "http://upstream.test/mcp"}, NewLine(&http.Transport{DialContext: b.dial}))
		if err != nil {
			t.Fatal(err)
		}
		if r := p.Probe(t.Context()); r.Verdict != Ready || !r.SessionOpened {
			t.Fatalf("%+v, want a session", r)
		}
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		p.Close(ctx)
		if d := time.Since(start); d != 500*time.Millisecond {
			t.Errorf("Close took %v, want the 500 ms it was given", d)
		}
	})
}

// A farewell ends the session that is held, once: Close has nothing left to end.
func TestFarewell(t *testing.T) {
	d := serveDepth(t, saySessions(nothing))
	p, err := NewProber(Target{URL: d.URL}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewChecker(p, Schedule{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.Farewell() != nil {
		t.Error("a farewell to no session, want nil")
	}
	p.Probe(context.Background())
	way := &http.Transport{}
	defer way.CloseIdleConnections()
	for _, end := range []func(){func() { c.Farewell()(way) }, func() { _ = c.Close() }} {
		end()
		if n := d.count(func(a inquiry) bool { return a.verb == http.MethodDelete && a.session == "s-1" }); n != 1 {
			t.Errorf("asked %s, want one DELETE of the session", d.methods())
		}
	}
}
