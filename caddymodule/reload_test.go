package caddymodule

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

func TestReloadKeepsState(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	b.onProbe(html)
	site := func(interval, more string) string {
		return `reverse_proxy ` + a.addr + ` ` + b.addr + ` {
			lb_policy mcp_health {
				interval ` + interval + `
				fast 20ms
				watch off
			}
			` + more + `
		}`
	}
	e := newEdge(t, "", site("1h", ""))
	waitState(t, a.addr, mcphealth.Up)
	before := waitState(t, b.addr, mcphealth.Down)
	old := checkers.list()

	e.load("", site("1h", "header_up X-Y z"))
	for range 10 {
		r, err := e.try(http.MethodPost, "/mcp", callBody("1"))
		if err != nil { // it crossed the reload, which resets what is not accepted yet
			continue
		}
		require.Equal(t, "a", r.servedBy(), "the new configuration asked a dead upstream")
	}
	require.Equal(t, old, checkers.list(), "the checkers are not the same")
	after := snapshots(b.addr)[0]
	require.Equal(t, before.Since, after.Since)
	require.Equal(t, int64(1), a.probes.Load())

	// another interval is another question; the old one is kept for a while
	e.load("", site("30m", ""))
	eventually(t, func() bool { return len(snapshots(a.addr)) == 2 }, "no new checker")
	e.load("", site("1h", ""))
	for _, o := range old {
		require.Same(t, o, checkers.get(o.id))
		require.Equal(t, 1, checkers.inUse(o))
	}
}

func TestReloadsLeaveNothingBehind(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	b.onProbe(html)
	site := `mcp_proxy ` + a.addr + ` ` + b.addr + ` {
		check_interval 1h
		check_fall 1
	}
	reverse_proxy /dyn {
		dynamic mcp_health {
			source a localhost 9
			interval 1h
		}
	}`
	e := newEdge(t, "", site)
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Down)
	for range 3 { // Caddy's own things are set up by now
		e.load("", site)
	}
	settled := func() int { runtime.GC(); return runtime.NumGoroutine() }
	time.Sleep(50 * time.Millisecond)
	before, probes := settled(), a.probes.Load()
	for range 100 {
		e.load("", site)
	}
	now := 0
	eventually(t, func() bool { now = settled(); return now <= before }, "goroutines: %d before, %d after 100 reloads", before, &now)
	require.LessOrEqual(t, a.probes.Load()-probes, int64(1), "reloads make probes")
	require.Equal(t, mcphealth.Up, snapshots(a.addr)[0].State)
	require.Equal(t, mcphealth.Down, snapshots(b.addr)[0].State)
	for _, entry := range checkers.list() {
		require.Equal(t, 1, checkers.inUse(entry), "references to %s", entry.upstream)
	}
}

// A reload that changes what is asked of many upstreams has none of them asked above the
// ceiling, at the start neither.
func TestReloadStaysUnderTheCeiling(t *testing.T) {
	const upstreams, ceiling = 100, 50
	a := newServer(t, "a")
	var mu sync.Mutex
	var asked []time.Time
	a.onProbe(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		asked = append(asked, time.Now())
		mu.Unlock()
		a.answer(w, r)
	})
	site := func(interval string) string {
		var b strings.Builder
		for i := range upstreams {
			fmt.Fprintf(&b, "reverse_proxy /p%d {\n to %s\n lb_policy mcp_health {\n path /p%d\n interval %s\n }\n}\n", i, a.addr, i, interval)
		}
		return b.String()
	}
	options := fmt.Sprintf("mcp_health {\n probe_ceiling %d/s\n}", ceiling)
	known := func(want int) {
		t.Helper()
		eventually(t, func() bool {
			n := 0
			for _, s := range snapshots(a.addr) {
				if s.State == mcphealth.Up {
					n++
				}
			}
			return n >= want
		}, "not all %d upstreams were asked", want)
	}
	e := newEdge(t, options, site("1h"))
	known(upstreams)
	e.load(options, site("30m"))
	known(2 * upstreams)
	mu.Lock()
	defer mu.Unlock()
	for i, from := 0, 0; i < len(asked); i++ {
		for asked[i].Sub(asked[from]) >= time.Second {
			from++
		}
		// the server notes a probe when it comes to that: a few may be late
		require.LessOrEqual(t, i-from+1, ceiling+ceiling/10, "probes within a second")
	}
}

func TestCheckersEndAfterTheirTime(t *testing.T) {
	checkers.keep = 30 * time.Millisecond
	defer func() { checkers.keep = keepAfter }()
	a := newServer(t, "a")
	site := func(path string) string {
		return `reverse_proxy ` + a.addr + ` {
			lb_policy mcp_health {
				path ` + path + `
				interval 20ms
			}
		}`
	}
	e := newEdge(t, "", site("/a"))
	waitState(t, a.addr, mcphealth.Up)
	old := checkers.list()[0]
	e.load("", site("/b"))
	eventually(t, func() bool { return checkers.get(old.id) == nil }, "the checker was not forgotten")
	eventually(t, func() bool {
		p := old.checker.Snapshot().Probes
		time.Sleep(60 * time.Millisecond)
		return old.checker.Snapshot().Probes == p
	}, "the forgotten checker goes on")
	require.Len(t, checkers.list(), 1)
}

// A configuration that does not start leaves the running one as it was.
func TestFailedReload(t *testing.T) {
	a := newServer(t, "a")
	site := guarded("", a.addr)
	e := newEdge(t, "", site)
	waitState(t, a.addr, mcphealth.Up)
	running := apps.current()
	taken := newServer(t, "taken")
	_, port, err := net.SplitHostPort(e.addr)
	require.NoError(t, err)
	_, takenPort, err := net.SplitHostPort(taken.addr)
	require.NoError(t, err)
	bad := strings.Replace(string(e.adapt("", site)), `":`+port+`"`, `"`+"127.0.0.1:"+takenPort+`"`, 1)
	require.Error(t, caddy.Load([]byte(bad), true))
	require.Same(t, running, apps.current())
	require.Equal(t, 1, checkers.inUse(checkers.list()[0]))
	require.Equal(t, "a", e.call("1").servedBy())
}

// Nor does it leave its own settings of the whole process behind, nor take with it what
// happened while it was being started.
func TestFailedReloadGovernsNothing(t *testing.T) {
	noted.Lock()
	noted.events = nil
	noted.Unlock()
	a := newServer(t, "a")
	options := func(objective string) string {
		return "events {\non test_event test\n}\nmcp_health {\nobjective " + objective + "\n}"
	}
	site := guarded("", a.addr)
	e := newEdge(t, options("0.99"), site)
	waitState(t, a.addr, mcphealth.Up)
	taken := newServer(t, "taken")
	_, port, err := net.SplitHostPort(e.addr)
	require.NoError(t, err)
	bad := strings.Replace(string(e.adapt(options("0.5"), site)), `":`+port+`"`, `"`+taken.addr+`"`, 1)
	require.Error(t, caddy.Load([]byte(bad), true))
	require.Equal(t, 0.99, objectiveNow())

	failing := new(App)
	require.NoError(t, failing.Start())
	failing.emit(event{"test_event", nil})
	require.NoError(t, failing.Stop())
	require.Equal(t, 0.99, objectiveNow())
	noted.Lock()
	defer noted.Unlock()
	require.Len(t, noted.events, 1)
}

// Streams outlive a reload.
func TestStreamSurvivesReload(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	next := make(chan int)
	a.on(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		rc := http.NewResponseController(w)
		rc.Flush()
		for i := range next {
			fmt.Fprintf(w, "data: %d\n\n", i)
			rc.Flush()
		}
	})
	resp, err := client.Post(e.url+"/mcp", "application/json", strings.NewReader(callBody("1")))
	require.NoError(t, err)
	defer resp.Body.Close()
	br := bufio.NewReader(resp.Body)
	for i := range 5 {
		e.load("", guarded("hold "+fmt.Sprint(i+1)+"s", a.addr))
		next <- i
		line, err := br.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("data: %d\n", i), line)
		_, err = br.ReadString('\n')
		require.NoError(t, err)
	}
	close(next)
	_, err = io.ReadAll(br)
	require.NoError(t, err)
}

// A call that is held when the configuration changes still gets through.
func TestHoldSurvivesReload(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(html)
	e := newEdge(t, "", guarded("hold 30s", a.addr))
	waitState(t, a.addr, mcphealth.Down)
	answer := make(chan reply)
	go func() { answer <- e.call("1") }()
	eventually(t, func() bool { return heldBytes.Load() > 0 }, "the call is not held")
	e.load("", guarded("hold 29s", a.addr))
	a.onProbe(nil)
	require.Equal(t, "a", (<-answer).servedBy())
}

// An upstream that no configuration names any more is left alone at once; named
// again within minutes, it starts from what was known of it.
func TestRemovedUpstreamIsLeftAlone(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	b.onProbe(html)
	site := func(upstreams string) string {
		return "reverse_proxy " + upstreams + ` {
			lb_policy mcp_health {
				interval 20ms
			}
		}`
	}
	e := newEdge(t, "", site(a.addr+" "+b.addr))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Down)

	e.load("", site(a.addr))
	var probes int64
	eventually(t, func() bool {
		probes = b.probes.Load()
		time.Sleep(60 * time.Millisecond)
		return b.probes.Load() == probes
	}, "a removed upstream is still probed")
	require.Equal(t, mcphealth.Down, snapshots(b.addr)[0].State)

	b.onProbe(nil)
	e.load("", site(a.addr+" "+b.addr))
	waitState(t, b.addr, mcphealth.Up)
	require.Greater(t, b.probes.Load(), probes)
}

// A token that is renewed in its file is taken up without a reload, and the same
// checker goes on.
func TestRenewedTokenIsTakenUp(t *testing.T) {
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("old"), 0o600))
	a := newServer(t, "a")
	var token atomic.Value
	token.Store("old")
	a.onProbe(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer "+token.Load().(string) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		a.answer(w, r)
	})
	site := `reverse_proxy ` + a.addr + ` {
		lb_policy mcp_health {
			interval 100ms
			header Authorization "Bearer {file.` + file + `}"
		}
	}`
	e := newEdge(t, "", site)
	waitState(t, a.addr, mcphealth.Up)
	checker := checkers.list()[0]

	token.Store("new")
	s := waitState(t, a.addr, mcphealth.UpDegraded)
	require.Equal(t, mcphealth.CredentialsRejected, s.Reason)
	require.NoError(t, os.WriteFile(file, []byte("new"), 0o600))
	waitState(t, a.addr, mcphealth.Up)

	e.load("", site+"\nheader X-Y z")
	require.Equal(t, []*entry{checker}, checkers.list())
}

// A token is taken from its file however the file is renewed. While there is nothing
// in it, the token stays what it was.
func TestTokenFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "token")
	write := func(path, token string) { require.NoError(t, os.WriteFile(path, []byte(token), 0o600)) }
	publish := func(version, token string) { // as the kubelet publishes a Secret
		require.NoError(t, os.Mkdir(filepath.Join(dir, version), 0o700))
		write(filepath.Join(dir, version, "token"), token)
		require.NoError(t, os.Symlink(version, filepath.Join(dir, "new")))
		require.NoError(t, os.Rename(filepath.Join(dir, "new"), filepath.Join(dir, "..data")))
	}
	publish("v1", "one\n")
	require.NoError(t, os.Symlink("..data/token", file))

	a := newServer(t, "a")
	var sent atomic.Value
	a.onProbe(func(w http.ResponseWriter, r *http.Request) {
		sent.Store(r.Header.Get("Authorization"))
		a.answer(w, r)
	})
	newEdge(t, "", `reverse_proxy `+a.addr+` {
		lb_policy mcp_health {
			interval 20ms
			header Authorization "Bearer {file.`+file+`}"
		}
	}`)
	waitState(t, a.addr, mcphealth.Up)
	sends := func(token string) {
		t.Helper()
		eventually(t, func() bool { return sent.Load() == "Bearer "+token }, "want the token %s", token)
	}
	stays := func(token string) {
		t.Helper()
		probes := a.probes.Load()
		eventually(t, func() bool { return a.probes.Load() > probes+3 }, "want some probes")
		require.Equal(t, "Bearer "+token, sent.Load())
	}
	sends("one")
	publish("v2", "two")
	sends("two")
	require.NoError(t, os.Remove(file))
	stays("two")
	write(file, "three\r\n\n")
	sends("three")
	write(file+".tmp", "four")
	require.NoError(t, os.Rename(file+".tmp", file))
	sends("four")
	write(file, "")
	stays("four")
	require.NoError(t, os.Remove(file))
	require.NoError(t, os.Mkdir(file, 0o700)) // nothing can be read from it
	stays("four")
}
