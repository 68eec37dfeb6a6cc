package traefik

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// The route goes away under load, with its servers, and comes back: calls wait,
// and none fails.
func TestRouteGoesAndComes(t *testing.T) {
	r := startReplicas(t)
	there := config{plugin: "hold: 10s", servers: r.servers()}
	gone := there
	gone.noRoute = true
	tr := Start(t, Options{Dynamic: there.yaml()})
	load := e2e.Load{URL: tr.URL + "/mcp", Clients: 20, Rate: 10}.Start(t)
	for range 3 {
		time.Sleep(700 * time.Millisecond)
		tr.Reload(t, gone.yaml())
		time.Sleep(time.Second)
		tr.Reload(t, there.yaml())
	}
	time.Sleep(time.Second)
	rep := load.Stop()
	t.Log(rep)
	if len(rep.Failures) > 0 || rep.Slowest < 500*time.Millisecond {
		t.Errorf("%v: want calls that waited, and none that failed", rep)
	}
	r.wantOnce(t)
}

// A hundred reloads under load, with a server killed now and then: no call fails
// but those under way, and Traefik's goroutines and memory stay.
func TestHundredReloads(t *testing.T) {
	r := startReplicas(t)
	c := config{plugin: "hold: 10s", servers: r.servers()}
	tr := Start(t, Options{Dynamic: c.yaml()})
	loads := outOfStep(t, tr, 10)
	time.Sleep(time.Second)
	goroutines, rss := tr.Goroutines(t), tr.RSS(t)
	applied := tr.applied()
	var kills []time.Time
	for i := range 100 {
		c.plugin = fmt.Sprintf("hold: %ds", 10+i%2)
		tr.write(t, c.yaml())
		if i%20 == 10 {
			kills = append(kills, time.Now())
			r.a.Kill(t)
		}
		if i%20 == 15 {
			r.a.Restart(t)
		}
		time.Sleep(100 * time.Millisecond)
	}
	time.Sleep(time.Second)
	rep := stopAll(loads)
	t.Log(rep)
	wantAtKills(t, rep, kills)
	if n := tr.applied() - applied; n < 50 {
		t.Errorf("only %d reloads were applied", n)
	}
	var after int
	for range 30 { // the last configurations linger for 10 s
		time.Sleep(time.Second)
		if after = tr.Goroutines(t); after <= goroutines+5 {
			break
		}
	}
	t.Logf("%d reloads applied: goroutines %d, then %d; memory %d MiB, then %d", tr.applied()-applied, goroutines, after, rss, tr.RSS(t))
	if after > goroutines+5 {
		_, profile := get(t, tr.API+"/debug/pprof/goroutine?debug=1")
		t.Errorf("%d goroutines after the reloads, %d before:\n%s", after, goroutines, profile)
	}
	r.wantOnce(t)
}

// A stream is passed on event by event, also when its request was held.
func TestStreamsStayLive(t *testing.T) {
	server := e2e.Get(t, "go-sdk-v1.8.0-stateless").Start(t, e2e.FreePort(t))
	tr := Start(t, Options{Dynamic: config{plugin: "hold: 10s", servers: []string{server.Addr}}.yaml()})
	stream(t, tr)
	server.Kill(t)
	time.Sleep(200 * time.Millisecond)
	done := make(chan bool)
	go func() { stream(t, tr); close(done) }()
	time.Sleep(time.Second)
	server.Restart(t)
	<-done
}

// stream calls a tool that takes a second and reports its progress meanwhile, and
// wants the first event long before the last.
func stream(t *testing.T, tr *Traefik) {
	body := `{"jsonrpc":"2.0","id":"s","method":"tools/call","params":{"name":"slow","arguments":{"ms":1000},"_meta":{"progressToken":"p",` +
		`"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/clientInfo":{"name":"t","version":"0"}}}}`
	req, _ := http.NewRequest(http.MethodPost, tr.URL+"/mcp", strings.NewReader(body))
	for k, v := range map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream",
		"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "slow"} {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Error(err)
		return
	}
	defer resp.Body.Close()
	var times []time.Time
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "data: {") {
			times = append(times, time.Now())
		}
	}
	if resp.StatusCode != 200 || len(times) < 3 || times[len(times)-1].Sub(times[0]) < 500*time.Millisecond {
		t.Errorf("status %d, %d events within %v: want them spread over a second", resp.StatusCode, len(times), times)
	}
}

// A route that has been away for longer than absentAfter is 404 again.
func TestAbsentAfter(t *testing.T) {
	tr := Start(t, Options{Dynamic: config{plugin: "hold: 0\nabsentAfter: 3s", noRoute: true}.yaml()})
	if status, _ := post(t, tr.URL+"/mcp"); status != 503 {
		t.Errorf("at first: %d, want 503", status)
	}
	await(t, 10*time.Second, "404", func() bool { status, _ := post(t, tr.URL+"/mcp"); return status == 404 })
}

// What a server says decides, not its status: who is out of the balancer, and that it
// comes back when it has recovered. With a sticky service, access log, metrics and
// tracing on.
func TestWhatTakesAServerOut(t *testing.T) {
	reply := func(status int, header, value, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodPost {
				w.WriteHeader(405)
				return
			}
			io.Copy(io.Discard, r.Body)
			w.Header().Set(header, value)
			w.WriteHeader(status)
			io.WriteString(w, body)
		}
	}
	tests := []struct {
		name    string
		handler http.HandlerFunc
		out     bool
	}{
		{"HTML 200", reply(200, "Content-Type", "text/html", "<html>hello</html>"), true},
		{"never answers", func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body); <-r.Context().Done() }, true},
		{"500", reply(500, "Content-Type", "text/plain", "oops"), true},
		{"401 with a challenge, 405 to GET", reply(401, "WWW-Authenticate", "Bearer", ""), false},
		{"-32601", reply(404, "Content-Type", "application/json", `{"jsonrpc":"2.0","id":null,"error":{"code":-32601,"message":"Method not found"}}`), false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			good := e2e.Get(t, "go-sdk-v1.8.0-stateless-json").Start(t, e2e.FreePort(t))
			to, _ := url.Parse("http://" + good.Addr)
			healthy := httputil.NewSingleHostReverseProxy(to)
			var recovered atomic.Bool
			var calls atomic.Int32
			fake := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Mcp-Name") == "echo" {
					calls.Add(1)
				}
				if recovered.Load() {
					healthy.ServeHTTP(w, r)
					return
				}
				tt.handler(w, r)
			}))
			defer fake.CloseClientConnections()
			addr := strings.TrimPrefix(fake.URL, "http://")
			tr := Start(t, Options{Flags: observed, Dynamic: config{plugin: "timeout: 1s\ninterval: 1s\nhold: 10s", servers: []string{good.Addr, addr}, service: cookie}.yaml()})
			await(t, 15*time.Second, "a verdict on both", func() bool {
				out := tr.Output()
				return strings.Contains(out, "http://"+good.Addr+"/mcp is up") &&
					(strings.Contains(out, fake.URL+"/mcp is down") || strings.Contains(out, fake.URL+"/mcp is up"))
			})
			before := calls.Load()
			rep := burst(t, tr, time.Second)
			if met := calls.Load() > before; met == tt.out || tt.out && len(rep.Failures) > 0 {
				t.Errorf("%v: calls met the other server: %v, want %v", rep, met, !tt.out)
			}
			recovered.Store(true)
			if tt.out {
				await(t, 15*time.Second, "up again", func() bool { return strings.Contains(tr.Output(), fake.URL+"/mcp is up again") })
			}
			before = calls.Load()
			if rep := burst(t, tr, time.Second); len(rep.Failures) > 0 || calls.Load() == before {
				t.Errorf("recovered: %v, %d calls met it, want some and no failure", rep, calls.Load()-before)
			}
		})
	}
}

// A panic in a probe, in a listener and in New leaves Traefik running, and its
// reloads too.
func TestPanicsLeaveTraefikRunning(t *testing.T) {
	patch := func(t testing.TB, root string) {
		edit(t, filepath.Join(root, "mcphealth/probe.go"), "at := time.Now()\n", "at := time.Now()\n\tif p.url.Path == \"/panic\" { panic(\"in the probe\") }\n")
		edit(t, filepath.Join(root, "traefikplugin/balancer.go"), "wake := r.apply()\n", "if r.hold { panic(\"in a listener\") }\n\twake := r.apply()\n")
		edit(t, filepath.Join(root, "traefikplugin/plugin.go"), "set, err := config.parse()\n", "set, err := config.parse()\n\tif config.Host == \"panic\" { panic(\"in New\") }\n")
	}
	r := startReplicas(t)
	tr := Start(t, Options{Patch: patch, Dynamic: config{plugin: "hold: 0\nhost: panic", servers: r.servers()}.yaml()})
	for _, plugin := range []string{"hold: 10s", "hold: 0\nhost: panic", "hold: 0"} {
		tr.Reload(t, config{plugin: plugin, servers: r.servers()}.yaml())
		time.Sleep(500 * time.Millisecond)
	}
	tr.Reload(t, strings.Replace(config{plugin: "hold: 0", servers: r.servers()}.yaml(), "paths: [/mcp]", "paths: [/panic, /mcp]", 1))
	time.Sleep(time.Second)
	tr.Reload(t, config{plugin: "hold: 0", servers: r.servers()}.yaml())
	await(t, 5*time.Second, "calls served", func() bool { return len(burst(t, tr, 200*time.Millisecond).Failures) == 0 })
	for _, want := range []string{"in a listener", "in New"} { // that in the probe is a result of its own
		if !strings.Contains(tr.Output(), want) {
			t.Errorf("no line about the panic %s", want)
		}
	}
}

func edit(t testing.TB, file, old, new string) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Count(string(b), old) != 1 {
		t.Fatalf("%s: %q stands there %d times, want once", file, old, strings.Count(string(b), old))
	}
	if err := os.WriteFile(file, []byte(strings.Replace(string(b), old, new, 1)), 0o644); err != nil {
		t.Fatal(err)
	}
}

// observed has Traefik wrap the answers of routers and services.
var observed = []string{"--accesslog=true", "--metrics.prometheus=true", "--metrics.prometheus.addrouterslabels=true",
	"--metrics.prometheus.addserviceslabels=true", "--tracing=true", "--tracing.otlp.http.endpoint=http://127.0.0.1:1/v1/traces"}

// With access log, metrics and tracing on, and a sticky service, it works as well;
// a client that meets our 503 keeps its server.
func TestObservedAndSticky(t *testing.T) {
	r := startReplicas(t)
	tr := Start(t, Options{Dynamic: config{plugin: "hold: 0", servers: r.servers(), service: "sticky:\n  cookie:\n    name: stick"}.yaml(),
		Flags: observed})
	await(t, 5*time.Second, "served", func() bool { status, _ := post(t, tr.URL+"/mcp"); return status == 200 })
	_, h := post(t, tr.URL+"/mcp")
	if !strings.HasPrefix(h.Get("Set-Cookie"), "stick=") {
		t.Errorf("Set-Cookie %q, want Traefik's own", h.Get("Set-Cookie"))
	}
	r.a.Kill(t)
	r.b.Kill(t)
	await(t, 5*time.Second, "503", func() bool { status, _ := post(t, tr.URL+"/mcp"); return status == 503 })
	if _, h := post(t, tr.URL+"/mcp"); h.Get("Set-Cookie") != "" || h.Get("X-Mcp-Health") == "" {
		t.Errorf("503 with %v, want no cookie", h)
	}
	if _, body := get(t, tr.API+"/api/http/services/app@file"); strings.Contains(body, "mcphealth") {
		t.Errorf("the dashboard shows our child: %s", body)
	}
}

// Under a failover service our own child stays away: the parent must see that the
// service is down, and learns it from us at once.
func TestFailoverSwitches(t *testing.T) {
	r := startReplicas(t)
	c := config{plugin: "hold: 0", servers: []string{r.a.Addr}, service: "healthCheck:\n  path: /debug/stats\n  interval: 500ms"}
	dynamic := strings.Replace(c.yaml(), "  services:\n", "    over:\n      rule: PathPrefix(`/mcp`) && Header(`X-Over`, `1`)\n      service: over\n  services:\n    over:\n      failover: {service: app, fallback: spare, healthCheck: {}}\n    spare:\n      loadBalancer:\n        healthCheck: {path: /debug/stats, interval: 500ms}\n        servers: [{url: 'http://"+r.b.Addr+"'}]\n", 1)
	tr := Start(t, Options{Dynamic: dynamic})
	over := func() int {
		req, _ := http.NewRequest(http.MethodGet, tr.URL+"/mcp", nil)
		req.Header.Set("X-Over", "1")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	await(t, 5*time.Second, "the first server answers", func() bool { s := over(); return s != 502 && s != 503 })
	r.a.Kill(t)
	await(t, 10*time.Second, "failover", func() bool { s := over(); return s != 502 && s != 503 })
	if status, h := post(t, tr.URL+"/mcp"); status != 503 {
		t.Errorf("the service itself: %d %v, want 503", status, h)
	}
}

// bare is the same configuration without the plugin and its fallback router.
func bare(yaml string) string {
	yaml = "http:" + yaml[strings.Index(yaml, "\n  routers:"):]
	yaml = strings.ReplaceAll(yaml, "      middlewares: [mcp]\n", "")
	return strings.Replace(yaml, "rule: PathPrefix(`/`)", "rule: PathPrefix(`/never`)", 1)
}
