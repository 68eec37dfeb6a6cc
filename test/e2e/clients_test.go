package e2e

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"
)

// driven is a client library that does one thing at a time. What it answers is what
// an application would see.
type driven interface {
	open() (string, error)
	call(message string) (string, error)
	whoami() (string, error)
}

// goClient is one of the libraries in Go.
type goClient struct {
	Library
	t       *testing.T
	url     string
	session Session
}

func (c *goClient) open() (_ string, err error) {
	if c.session != nil {
		c.session.Close()
	}
	c.session, err = c.Library.Open(c.t.Context(), c.t, c.url)
	return "ok", err
}

func (c *goClient) call(message string) (string, error) {
	return message, echo(c.t.Context(), c.session, message)
}

func (c *goClient) whoami() (string, error) { return Whoami(c.t.Context(), c.session) }

// nodeClient is a client of the TypeScript SDKs.
type nodeClient struct{ *NodeClient }

func startNode(t *testing.T, lib, url string) *nodeClient {
	return &nodeClient{StartNode(t, lib, url)}
}

func (c *nodeClient) open() (s string, err error) { err = c.Do("open", &s); return s, err }
func (c *nodeClient) call(message string) (s string, e error) {
	e = c.Do("call "+message, &s)
	return s, e
}
func (c *nodeClient) whoami() (s string, err error) { err = c.Do("whoami", &s); return s, err }

// clientLibraries are those of docs/clients.md.
type clientLibrary struct {
	name  string
	start func(t *testing.T, url string) driven
}

var clientLibraries = []clientLibrary{
	inGo(GoSDK),
	inGo(goSDKModern),
	inGo(mcpGo),
	{"@modelcontextprotocol/sdk 1.32.2", func(t *testing.T, url string) driven { return startNode(t, "sdk1", url) }},
	{"@modelcontextprotocol/client 2.4.0", func(t *testing.T, url string) driven { return startNode(t, "sdk2", url) }},
	inGo(mcpRemote),
}

func inGo(lib Library) clientLibrary {
	return clientLibrary{lib.Name, func(t *testing.T, url string) driven { return &goClient{Library: lib, t: t, url: url} }}
}

// What each client library does with what the edge says. The log is where
// docs/clients.md is from; wanted is only that nobody is lost for good.
func TestClientLibraries(t *testing.T) {
	for _, lib := range clientLibraries {
		t.Run(lib.name, func(t *testing.T) {
			site := "mcp_proxy /mcp* {ALL} {\n\tsticky\n\thold %s\n\tsession_grace %s\n\tcheck_interval 1s\n\tcheck_timeout 1s\n}"
			r := startReplicas(t, "ts-sdk-v1.32.2-stateful", 2, fmt.Sprintf(site, "0", "2s"))
			c := lib.start(t, r.caddy.URL())
			say, must, call := diary(t, c)
			owner := func() *Instance {
				t.Helper()
				who, err := c.whoami()
				if err != nil {
					t.Fatal(err)
				}
				return r.all[who[0]-'a']
			}
			must("open", c.open)
			must("call", call)
			first := owner()
			first.Kill(t)
			r.caddy.AwaitState(t, first.Addr, "down", 5*time.Second)
			say("503: call", call)
			time.Sleep(2500 * time.Millisecond)
			say("404 of the edge: call", call)
			say("404 of the edge: the next call", call)
			must("open anew", c.open)
			must("call", call)
			first.Restart(t)
			r.caddy.AwaitState(t, first.Addr, "up", 5*time.Second)

			second := owner()
			second.Kill(t)
			second.Restart(t)
			r.caddy.AwaitState(t, second.Addr, "up", 5*time.Second)
			say("404 of the restarted server: call", call)
			say("… the next call", call)
			must("open anew", c.open)
			must("call", call)

			r.caddy.Reload(t, r.site(fmt.Sprintf(site, "10s", "20s")))
			r.whileAway(t, func() { must("held: open", c.open) })
			must("call", call)

			third := owner()
			third.Pause(t) // a server that forgets no session while it is away
			r.caddy.AwaitState(t, third.Addr, "down", 10*time.Second)
			var back sync.WaitGroup
			back.Go(func() {
				time.Sleep(time.Second)
				third.Continue(t)
			})
			must("held: call", call)
			back.Wait()
			r.wantOnce(t)
		})
	}
}

// diary is what c does, and what comes of it, one line each. must fails the test if
// nothing came.
func diary(t *testing.T, c driven) (say func(string, func() (string, error)) bool, must func(string, func() (string, error)), call func() (string, error)) {
	say = func(what string, did func() (string, error)) bool {
		start := time.Now()
		got, err := did()
		if err != nil {
			got = "ERROR " + err.Error()
		}
		t.Logf("%-34s %5d ms  %s", what, time.Since(start).Milliseconds(), got)
		return err == nil
	}
	must = func(what string, did func() (string, error)) {
		t.Helper()
		if !say(what, did) {
			t.Errorf("%s failed", what)
		}
	}
	n := 0
	call = func() (string, error) {
		n++
		return c.call(fmt.Sprintf("%s-%d", strings.ReplaceAll(t.Name(), " ", "-"), n))
	}
	return say, must, call
}

// whileAway kills all replicas, has them back after 1.5 s, and does something meanwhile.
func (r *replicas) whileAway(t *testing.T, do func()) {
	t.Helper()
	for _, i := range r.all {
		i.Kill(t)
	}
	time.Sleep(300 * time.Millisecond)
	var back sync.WaitGroup
	back.Go(func() {
		time.Sleep(1500 * time.Millisecond)
		for _, i := range r.all {
			i.Restart(t)
		}
	})
	do()
	back.Wait()
}

// Clients of the era without sessions: what they do with 503, and with a held call.
func TestModernClientLibraries(t *testing.T) {
	for _, lib := range []Library{goSDKModern, mcpGoModern} {
		t.Run(lib.Name, func(t *testing.T) {
			site := "mcp_proxy /mcp* {ALL} {\n\tsticky\n\thold %s\n}"
			r := startReplicas(t, "go-sdk-v1.8.0-stateless", 2, fmt.Sprintf(site, "0"))
			c := &goClient{Library: lib, t: t, url: r.caddy.URL()}
			say, must, call := diary(t, c)
			must("open", c.open)
			r.whileAway(t, func() { say("503: call", call) })
			for _, i := range r.all {
				r.caddy.AwaitState(t, i.Addr, "up", 5*time.Second)
			}
			must("the next call", call)
			r.caddy.Reload(t, r.site(fmt.Sprintf(site, "10s")))
			r.whileAway(t, func() { must("held: call", call) })
			r.wantOnce(t)
		})
	}
}

// 200 sessions of 5 calls with the TypeScript clients.
func TestTypeScriptSessionsFindTheirOwner(t *testing.T) {
	for _, lib := range []string{"sdk1", "sdk2"} {
		for _, n := range []int{2, 3} {
			t.Run(fmt.Sprintf("%s/%d replicas", lib, n), func(t *testing.T) {
				r := startReplicas(t, "ts-sdk-v1.32.2-stateful", n, "mcp_proxy /mcp* {ALL} {\n\tsticky\n}")
				var got struct {
					Whole, Calls int
					Owners       map[string]int
					Errors       map[string]int
				}
				if err := startNode(t, lib, r.caddy.URL()).Do(fmt.Sprintf("many %d %d", Sessions, Calls), &got); err != nil {
					t.Fatal(err)
				}
				t.Logf("%+v", got)
				if got.Whole != Sessions || len(got.Owners) != n {
					t.Errorf("%d of %d sessions whole on %d replicas, want all on %d", got.Whole, Sessions, len(got.Owners), n)
				}
			})
		}
	}
}

// A rolling restart under the load of 40 TypeScript clients.
func TestTypeScriptRollingRestart(t *testing.T) {
	for _, lib := range []string{"sdk1", "sdk2"} {
		t.Run(lib, func(t *testing.T) {
			r := startReplicas(t, "ts-sdk-v1.32.2-stateful", 3, "mcp_proxy /mcp* {ALL} {\n\tsticky\n}")
			c := startNode(t, lib, r.caddy.URL())
			var begun string
			if err := c.Do("work 40", &begun); err != nil {
				t.Fatal(err)
			}
			time.Sleep(1500 * time.Millisecond)
			begin := time.Now()
			for _, i := range r.all {
				i.Terminate(t)
				time.Sleep(500 * time.Millisecond)
				i.Restart(t)
				r.caddy.AwaitState(t, i.Addr, "up", 20*time.Second)
				time.Sleep(1500 * time.Millisecond)
			}
			took := time.Since(begin)
			var got struct {
				Calls, Reopened, Longest, Lost int
				Errors                         map[string]int
			}
			if err := c.Do("stop", &got); err != nil {
				t.Fatal(err)
			}
			t.Logf("restarted in %s: %+v", took, got)
			// These servers take 4 s to restart, on a busy machine twice that, and a new
			// session may land on the one that goes next, and its next one again.
			longest := time.Duration(got.Longest) * time.Millisecond
			if got.Lost > 0 || got.Reopened < 40 || longest > took+5*time.Second {
				t.Errorf("%d clients lost, %d sessions opened anew, %s the longest without an answer; want each of 40 clients to go on", got.Lost, got.Reopened, longest)
			}
			r.wantOnce(t)
		})
	}
}

// Drained, a replica loses no session: its clients go on, new ones go elsewhere, and
// once they have left it can be taken away unnoticed.
func TestDrainBeforeARestart(t *testing.T) {
	r := startReplicas(t, "go-sdk-v1.8.0-stateful", 2, "mcp_proxy /mcp* {ALL} {\n\tsticky\n}")
	var old []Session
	for len(old) < 20 {
		s, err := Connect(t.Context(), r.caddy.URL())
		if err != nil {
			t.Fatal(err)
		}
		old = append(old, s)
	}
	r.caddy.Drain(t, r.all[0].Addr, "drain")
	for n := range 20 {
		s, err := Connect(t.Context(), r.caddy.URL())
		if err != nil {
			t.Fatal(err)
		}
		if who, err := Whoami(t.Context(), s); who != "b" {
			t.Errorf("a new session went to %q (%v) while a drains", who, err)
		}
		if err := echo(t.Context(), old[n], fmt.Sprint("old ", n)); err != nil {
			t.Errorf("an old session: %v", err)
		}
		s.Close()
		old[n].Close()
	}
	r.all[0].AwaitSessions(t, 1) // the prober's
	r.all[0].Terminate(t)
	r.all[0].Restart(t)
	r.caddy.AwaitState(t, r.all[0].Addr, "up", 5*time.Second)
	r.caddy.Drain(t, r.all[0].Addr, "resume")
	c := RunSessions(t, r.caddy.URL())
	if c.Whole != c.Begun || c.Owners["a"] == 0 {
		t.Errorf("%v, want all whole, on both", c)
	}
}
