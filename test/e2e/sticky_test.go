package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// replicas are servers with sessions of their own behind one Caddy.
type replicas struct {
	all   []*Instance
	caddy *Caddy
	log   string // executions
}

// startReplicas starts n of them; {ALL} in site is their addresses.
func startReplicas(t *testing.T, server string, n int, site string) *replicas {
	t.Helper()
	r := &replicas{log: filepath.Join(t.TempDir(), "executions")}
	for i := range n {
		r.all = append(r.all, Get(t, server).Start(t, FreePort(t), "--log", r.log, "--name", string(rune('a'+i))))
	}
	r.caddy = StartCaddy(t, r.site(site))
	if strings.Contains(site, "mcp_proxy") {
		for _, i := range r.all {
			r.caddy.AwaitState(t, i.Addr, "up", 5*time.Second)
		}
	}
	return r
}

func (r *replicas) site(s string) string {
	var all []string
	for _, i := range r.all {
		all = append(all, i.Addr)
	}
	return strings.ReplaceAll(s, "{ALL}", strings.Join(all, " "))
}

// wantOnce checks that no message was executed twice.
func (r *replicas) wantOnce(t *testing.T) {
	t.Helper()
	n := 0
	for message, runs := range Executions(t, r.log) {
		if n++; message != "" && runs > 1 {
			t.Errorf("call %q was executed %d times, want at most once", message, runs)
		}
	}
	t.Logf("%d different messages executed", n)
}

const stickySite = "mcp_proxy /mcp* {ALL} {\n\tsticky\n}"

// 200 sessions of 5 calls: all of them land on the replica that opened the session.
// Beside it, what plain Caddy does.
func TestSessionsFindTheirOwner(t *testing.T) {
	for _, n := range []int{2, 3} {
		for _, tt := range []struct {
			name, site string
			lib        Library
		}{
			{"plain random", "reverse_proxy /mcp* {ALL} {\n\tlb_policy random\n}", GoSDK},
			{"plain header Mcp-Session-Id", "reverse_proxy /mcp* {ALL} {\n\tlb_policy header Mcp-Session-Id\n}", GoSDK},
			{"sticky", stickySite, GoSDK},
			{"sticky", stickySite, goSDKModern},
			{"sticky", stickySite, mcpGo},
			{"sticky", stickySite, mcpRemote},
		} {
			t.Run(fmt.Sprintf("%d replicas/%s/%s", n, tt.name, tt.lib.Name), func(t *testing.T) {
				r := startReplicas(t, "go-sdk-v1.8.0-stateful", n, tt.site)
				c := tt.lib.RunSessions(t, r.caddy.URL())
				t.Log(c)
				if tt.name != "sticky" {
					return // measured, not wanted
				}
				if c.Begun < 20 || c.Whole != c.Begun || c.Calls != c.Begun*Calls {
					t.Errorf("%v, want all", c)
				}
				if len(c.Owners) != n {
					t.Errorf("owners %v, want sessions on all %d", c.Owners, n)
				}
			})
		}
	}
}

// A rolling restart of all replicas under load: each session goes on, or is opened
// anew at once; nobody is lost, and nothing runs twice.
func TestRollingRestart(t *testing.T) {
	for _, lib := range goLibraries {
		t.Run(lib.Name, func(t *testing.T) {
			r := startReplicas(t, "go-sdk-v1.8.0-stateful", 3, stickySite)
			stop := lib.Work(t, 30*time.Second, r.caddy.URL())
			time.Sleep(time.Second)
			for _, i := range r.all {
				i.Terminate(t)
				time.Sleep(500 * time.Millisecond) // as long as a container takes
				i.Restart(t)
				r.caddy.AwaitState(t, i.Addr, "up", 5*time.Second)
				time.Sleep(time.Second)
			}
			restarted := time.Now()
			time.Sleep(2 * time.Second)
			all := stop()
			t.Log(Summary(all))
			for _, w := range all {
				// mcp-remote opens sessions by itself
				if w.Reopened > 3 || w.Reopened < 1 && lib.Name != mcpRemote.Name {
					t.Errorf("%s opened %d sessions anew over 3 restarts, want 1 to 3", w.Name, w.Reopened)
				}
				if w.Longest > MayWait || w.Last.Before(restarted) {
					t.Errorf("%s was without an answer for %s, and had the last one %s after the restarts", w.Name, w.Longest, w.Last.Sub(restarted))
				}
			}
			r.wantOnce(t)
		})
	}
}

// A replica that does not come back: after the grace its sessions are opened anew
// elsewhere.
func TestReplicaIsGone(t *testing.T) {
	r := startReplicas(t, "go-sdk-v1.8.0-stateful", 2, "mcp_proxy /mcp* {ALL} {\n\tsticky\n\tsession_grace 2s\n}")
	stop := GoSDK.Work(t, 30*time.Second, r.caddy.URL())
	time.Sleep(time.Second)
	r.all[0].Kill(t)
	r.caddy.AwaitState(t, r.all[0].Addr, "down", 5*time.Second)
	time.Sleep(4 * time.Second)
	all := stop()
	t.Log(Summary(all))
	moved := 0
	for _, w := range all {
		moved += w.Reopened
		if w.Longest > MayWait {
			t.Errorf("%s was without an answer for %s, want about the grace of 2 s", w.Name, w.Longest)
		}
	}
	if moved == 0 {
		t.Error("no session was lost: the test is no good")
	}
	r.wantOnce(t)
}

// Sessions are found again after a restart of Caddy, and by another Caddy with the
// same key.
func TestSessionsOverEdges(t *testing.T) {
	site := "mcp_proxy /mcp* {ALL} {\n\tsticky\n\tsession_key 0123456789abcdef0123456789abcdef\n}"
	r := startReplicas(t, "ts-sdk-v1.32.2-stateful", 3, site)
	other := StartCaddy(t, r.site(site))
	for n := range 20 {
		s := Dial(t, r.caddy.URL(), LegacyVersion, nil)
		id := s.ID()
		for k := range 6 {
			url := []string{r.caddy.URL(), other.URL()}[k%2]
			if status, body := rawEcho(t, url, id, fmt.Sprintf("edge-%d-%d", n, k)); status != 200 {
				t.Fatalf("%s: status %d %s", url, status, body)
			}
		}
		if n == 10 {
			r.caddy.Kill(t)
			r.caddy.Restart(t)
			if status, body := rawEcho(t, r.caddy.URL(), id, "restarted"); status != 200 {
				t.Fatalf("after a restart: status %d %s", status, body)
			}
		}
		s.Close()
	}
}

// A replica that hangs: it accepts, and never answers. Calls that were on their way to
// it fail by their own timeout; its sessions are opened anew elsewhere after the grace,
// and what it executes when it goes on was executed nowhere else.
func TestReplicaHangs(t *testing.T) {
	r := startReplicas(t, "go-sdk-v1.8.0-stateful", 2, "mcp_proxy /mcp* {ALL} {\n\tsticky\n\tsession_grace 2s\n\tcheck_interval 1s\n\tcheck_timeout 1s\n}")
	stop := GoSDK.Work(t, 4*time.Second, r.caddy.URL())
	time.Sleep(time.Second)
	a := r.all[0]
	a.Pause(t)
	took := r.caddy.AwaitState(t, a.Addr, "down", 10*time.Second)
	time.Sleep(7 * time.Second)
	hung := time.Now()
	a.Continue(t)
	r.caddy.AwaitState(t, a.Addr, "up", 10*time.Second)
	time.Sleep(2 * time.Second)
	all := stop()
	t.Logf("down after %s; %s", took.Round(time.Millisecond), Summary(all))
	moved := 0
	for _, w := range all {
		moved += w.Reopened
		if w.Longest > MayWait || w.Last.Before(hung) {
			t.Errorf("%s was without an answer for %s", w.Name, w.Longest)
		}
	}
	if moved == 0 {
		t.Error("no session was lost: the test is no good")
	}
	r.wantOnce(t)
}

// Edges that share a storage and start for the first time at once agree on one key.
func TestEdgesAgreeOnAKey(t *testing.T) {
	r := startReplicas(t, "go-sdk-v1.8.0-stateful", 3, "respond ok")
	storage := t.TempDir()
	edges := make([]*Caddy, 3)
	var wg sync.WaitGroup
	for i := range edges {
		wg.Go(func() { edges[i] = StartCaddyWith(t, storage, r.site(stickySite)) })
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	for n := range 30 {
		s := Dial(t, edges[n%len(edges)].URL(), LegacyVersion, nil)
		for k, e := range edges {
			if status, body := rawEcho(t, e.URL(), s.ID(), fmt.Sprintf("agree-%d-%d", n, k)); status != 200 {
				t.Errorf("session of edge %d at edge %d: status %d %s", n%len(edges), k, status, body)
			}
		}
		s.Close()
	}
	r.wantOnce(t)
}
