package traefik

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// Without any route, a fallback with upstreams forwards to them itself, and holds
// what they cannot serve.
func TestFallbackForwardsToUpstreams(t *testing.T) {
	r := startReplicas(t)
	c := config{plugin: fmt.Sprintf("hold: 10s\nstatusPath: /status\nupstreams: ['%s', '%s']", r.a.URL, r.b.URL), noRoute: true}
	tr := Start(t, Options{Dynamic: c.yaml()})
	killAndRestart(t, tr, r)
	if status, body := get(t, tr.URL+"/status"); status != 200 || !strings.Contains(body, `"state": "up"`) {
		t.Errorf("status page: %d %s", status, body)
	}
	req, _ := http.NewRequest(http.MethodGet, tr.URL+"/status", nil)
	req.Header.Set("Accept", "text/plain;version=0.0.4")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	labels := `{upstream="` + r.a.Addr + `",path="/mcp"`
	for _, want := range []string{"upstream_up" + labels + "} 1\n", "transitions_total" + labels + `,to="up",reason="ok"} 2` + "\n", "probes_total" + labels + `,verdict="ready",reason="ok"} `,
		"probe_duration_seconds_count" + labels + "} ", "hold_seconds_count ", `burn_rate{path="/mcp",window="1h"} `, "upstream_info" + labels + `,era="modern",protocol="2026-07-28"`} {
		if !strings.Contains(string(body), "\ntraefik_mcp_health_"+want) {
			t.Errorf("no line %s in the metrics:\n%s", want, body)
		}
	}
}

// Where another middleware follows, the plugin is a gate over its upstreams.
func TestGate(t *testing.T) {
	r := startReplicas(t)
	r.b.Kill(t) // which one of two is down a gate cannot tell Traefik
	c := config{plugin: "hold: 10s\nupstreams: " + r.a.URL, servers: []string{r.a.Addr}}
	dynamic := strings.Replace(c.yaml(), "  middlewares:\n", "  middlewares:\n    again:\n      retry: {attempts: 3, initialInterval: 10ms}\n", 1)
	dynamic = strings.Replace(dynamic, "service: app\n      middlewares: [mcp]", "service: app\n      middlewares: [mcp, again]", 1)
	tr := Start(t, Options{Dynamic: dynamic})
	await(t, 5*time.Second, "gate", func() bool { return strings.Contains(tr.Output(), "gate over the configured upstreams") })
	killAndRestart(t, tr, r)
}

// What a fallback held goes on through the gate of the service's router, and through what
// comes after that. Where the fallback has something after the plugin, too, a line says so.
func TestGateBesideAFallback(t *testing.T) {
	for _, tt := range []struct {
		name, fallback string
		want           int
	}{{"last on the fallback", "[mcp]", 200}, {"not last", "[mcp, again, small, mark]", 418}} {
		t.Run(tt.name, func(t *testing.T) {
			r := startReplicas(t)
			c := config{plugin: "hold: 10s\nupstreams: ['" + r.a.URL + "']", servers: []string{r.a.Addr}}
			y := func(noRoute bool) string {
				c.noRoute = noRoute
				y := strings.Replace(entered(c, "", ""), "  middlewares:\n", "  middlewares:\n    mark:\n      headers: {customResponseHeaders: {X-Mark: after}}\n"+
					"    again:\n      retry: {attempts: 2}\n    small:\n      compress: {}\n", 1)
				y = strings.Replace(y, "noop@internal\n      middlewares: [mcp]", "noop@internal\n      middlewares: "+tt.fallback, 1)
				return strings.Replace(y, "service: app\n      middlewares: [mcp]", "service: app\n      middlewares: [mcp, mark]", 1)
			}
			tr := Start(t, Options{Dynamic: y(true)})
			awaitUp(t, tr, []*e2e.Instance{r.a})
			r.a.Kill(t)
			await(t, 5*time.Second, "down", func() bool { return strings.Contains(tr.Output(), "/mcp is down") })
			got := make(chan *http.Response)
			go func() {
				resp, err := http.DefaultClient.Do(callRequest(t.Context(), tr, tt.name))
				if err != nil {
					t.Error(err)
				} else {
					resp.Body.Close()
				}
				got <- resp
			}()
			time.Sleep(300 * time.Millisecond)
			if tt.want == 200 {
				tr.Reload(t, y(false))
			}
			r.a.Restart(t)
			if resp := <-got; resp == nil || resp.StatusCode != tt.want || resp.Header.Get("X-Mark") != "after" {
				t.Errorf("%v, want %d with the mark of what comes after the plugin", resp, tt.want)
			}
			if strings.Contains(tr.Output(), "held is refused") {
				t.Error("a line says that what was held is refused")
			}
			if said := strings.Contains(tr.Output(), "on a fallback router make this the last middleware"); said != (tt.want == 418) {
				t.Errorf("a line about the order: %v", said)
			}
		})
	}
}

// killAndRestart kills both servers under load and restarts one: calls wait.
func killAndRestart(t *testing.T, tr *Traefik, r *replicas) {
	t.Helper()
	load := e2e.Load{URL: tr.URL + "/mcp", Clients: 10, Rate: 10}.Start(t)
	time.Sleep(time.Second)
	r.a.Kill(t)
	time.Sleep(time.Second)
	if r.b.Running() {
		r.b.Kill(t)
	}
	time.Sleep(time.Second)
	r.a.Restart(t)
	time.Sleep(time.Second)
	rep := load.Stop()
	t.Log(rep)
	for _, f := range rep.Failures {
		if f.Status != 502 && f.Status != 503 {
			t.Errorf("%v", f)
		}
	}
	if len(rep.Failures) > 10 || rep.Slowest < 500*time.Millisecond {
		t.Errorf("%v: want calls that waited, few lost at the kills", rep)
	}
	r.wantOnce(t)
}
