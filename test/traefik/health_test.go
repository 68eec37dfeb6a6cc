package traefik

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// config is a dynamic configuration with one service and its fallback router.
type config struct {
	plugin  string // settings of the middleware, one a line, in YAML
	servers []string
	service string // more of its load balancer, one a line
	noRoute bool   // the service's router is away

}

func (c config) yaml() string {
	var b strings.Builder
	b.WriteString("http:\n  middlewares:\n    mcp:\n      plugin:\n        mcphealth:\n          paths: [/mcp]\n")
	indent(&b, 10, c.plugin)
	b.WriteString("  routers:\n    app-fallback:\n      rule: PathPrefix(`/`)\n      priority: 1\n      service: noop@internal\n      middlewares: [mcp]\n")
	if !c.noRoute {
		b.WriteString("    app:\n      rule: PathPrefix(`/mcp`)\n      service: app\n      middlewares: [mcp]\n")
	}
	b.WriteString("  services:\n    app:\n      loadBalancer:\n")
	indent(&b, 8, c.service)
	if len(c.servers) == 0 {
		b.WriteString("        servers: []\n")
	} else {
		b.WriteString("        servers:\n")
	}
	for _, s := range c.servers {
		fmt.Fprintf(&b, "          - url: http://%s\n", s)
	}
	return b.String()
}

func indent(b *strings.Builder, n int, text string) {
	for line := range strings.Lines(text) {
		b.WriteString(strings.Repeat(" ", n) + strings.TrimRight(line, "\n") + "\n")
	}
}

// replicas are two modern servers that write executions into one log.
type replicas struct {
	a, b *e2e.Instance
	log  string
}

func startReplicas(t *testing.T) *replicas {
	t.Helper()
	r := &replicas{log: filepath.Join(t.TempDir(), "executions")}
	s := e2e.Get(t, "go-sdk-v1.8.0-stateless-json")
	r.a = s.Start(t, e2e.FreePort(t), "--log", r.log, "--name", "a")
	r.b = s.Start(t, e2e.FreePort(t), "--log", r.log, "--name", "b")
	return r
}

func (r *replicas) servers() []string { return []string{r.a.Addr, r.b.Addr} }

// wantOnce checks that no call ran twice.
func (r *replicas) wantOnce(t *testing.T) {
	t.Helper()
	for message, n := range e2e.Executions(t, r.log) {
		if n > 1 {
			t.Errorf("call %q was executed %d times, want at most once", message, n)
		}
	}
}

// want503 checks the answer of design.md §4.
func want503(t *testing.T, f e2e.Failure) {
	t.Helper()
	var body struct {
		ID    string `json:"id"`
		Error struct {
			Code int `json:"code"`
			Data struct {
				Reason       string `json:"reason"`
				RetryAfterMs int    `json:"retryAfterMs"`
			} `json:"data"`
		} `json:"error"`
	}
	err := json.Unmarshal(f.Body, &body)
	if f.Status != 503 || err != nil || body.ID != f.ID || body.Error.Code != 503 || body.Error.Data.Reason == "" || body.Error.Data.RetryAfterMs < 1000 ||
		f.Header.Get("Retry-After") == "" || f.Header.Get("Cache-Control") != "no-store" || f.Header.Get("X-Mcp-Health") != body.Error.Data.Reason ||
		f.Header.Get("Set-Cookie") != "" || strings.Contains(string(f.Body), "127.0.0.1") {
		t.Errorf("answer %d %v %s, want the 503 of the edge with id %q", f.Status, f.Header, f.Body, f.ID)
	}
}

// All four strategies: one of two killed, both killed, one back.
func TestStrategies(t *testing.T) {
	for _, strategy := range []string{"wrr", "p2c", "hrw", "leasttime"} {
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			r := startReplicas(t)
			c := config{plugin: "hold: 10s", servers: r.servers(), service: "strategy: " + strategy}
			if strategy != "hrw" {
				c.service += "\nsticky:\n  cookie:\n    name: stick"
			}
			tr := Start(t, Options{Dynamic: c.yaml()})
			loads := outOfStep(t, tr, 10)
			time.Sleep(time.Second)
			kills := []time.Time{time.Now()}
			r.a.Kill(t)
			time.Sleep(time.Second)
			kills = append(kills, time.Now())
			r.b.Kill(t)
			time.Sleep(1500 * time.Millisecond)
			r.a.Restart(t)
			time.Sleep(time.Second)
			rep := stopAll(loads)
			t.Log(rep)
			if rep.Count[e2e.OK] < 50 {
				t.Errorf("only %d calls succeeded", rep.Count[e2e.OK])
			}
			wantAtKills(t, rep, kills)
			r.wantOnce(t)
		})
	}
}

// wellNoticed is within what a killed server is out of the balancer on a machine that
// has other things to do: a few ms on a quiet one.
const wellNoticed = 500 * time.Millisecond

// wantAtKills wants no failures but 502 of calls that met a server as it was killed.
func wantAtKills(t *testing.T, rep e2e.Report, kills []time.Time) {
	t.Helper()
	for _, f := range rep.Failures {
		at := false
		for _, k := range kills {
			at = at || f.End.After(k) && f.Start.Before(k.Add(wellNoticed))
		}
		if f.Status != 502 || !at {
			t.Errorf("%v: want at most 502 of calls at a kill, killed at %v", f, kills)
		}
	}
}

// Hold off, all down: every answer is the rich 503, at once.
func TestAllDown(t *testing.T) {
	r := startReplicas(t)
	tr := Start(t, Options{Dynamic: config{plugin: "hold: 0", servers: r.servers(), service: "sticky:\n  cookie:\n    name: stick"}.yaml()})
	if rep := burst(t, tr, time.Second); len(rep.Failures) > 0 {
		t.Fatal(rep)
	}
	r.a.Kill(t)
	r.b.Kill(t)
	time.Sleep(500 * time.Millisecond)
	rep := burst(t, tr, time.Second)
	if rep.Count[e2e.OK] != 0 || rep.Count[e2e.Status] != rep.Sent || rep.Sent == 0 {
		t.Fatalf("%v, want a 503 each", rep)
	}
	for _, f := range rep.Failures {
		want503(t, f)
	}
	r.b.Restart(t)
	await(t, 5*time.Second, "up again", func() bool { return len(burst(t, tr, 100*time.Millisecond).Failures) == 0 })
}

func burst(t *testing.T, tr *Traefik, d time.Duration) e2e.Report {
	t.Helper()
	load := e2e.Load{URL: tr.URL + "/mcp", Clients: 10, Rate: 10}.Start(t)
	time.Sleep(d)
	return load.Stop()
}

// Paths that are no MCP endpoint, and well-known ones, keep Traefik's 404.
func TestOtherPathsKeep404(t *testing.T) {
	tr := Start(t, Options{Dynamic: config{plugin: "hold: 0", noRoute: true}.yaml()})
	for _, path := range []string{"/", "/else", "/.well-known/oauth-protected-resource/mcp"} {
		if status, body := get(t, tr.URL+path); status != 404 || body != "404 page not found\n" {
			t.Errorf("GET %s: %d %q, want Traefik's 404", path, status, body)
		}
	}
	resp, err := http.Post(tr.URL+"/mcp", "application/json", strings.NewReader(`{"jsonrpc":"2.0","id":7,"method":"tools/list"}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 503 || resp.Header.Get("X-Mcp-Health") != "route_absent" || resp.Header.Get("Retry-After") == "" {
		t.Errorf("POST /mcp: %d %v, want 503 route_absent", resp.StatusCode, resp.Header)
	}
}
