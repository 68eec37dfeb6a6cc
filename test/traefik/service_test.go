package traefik

import (
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// mirrored has the plugin as a middleware of two services, one of which gets a copy of all
// that the other gets.
func mirrored(plugin string, r *replicas) string {
	y := "http:\n  middlewares:\n    mcp:\n      plugin:\n        mcphealth:\n          paths: [/mcp]\n          " + plugin + "\n" +
		"  routers:\n    app:\n      rule: PathPrefix(`/mcp`)\n      service: both\n" +
		"  services:\n    both:\n      mirroring: {service: main, mirrors: [{name: shadow, percent: 100}]}\n"
	for name, i := range map[string]*e2e.Instance{"main": r.a, "shadow": r.b} {
		y += "    " + name + ":\n      middlewares: [mcp]\n      loadBalancer:\n        sticky: {cookie: {name: stick}}\n        servers: [{url: 'http://" + i.Addr + "'}]\n"
	}
	return y
}

// As a middleware of services the plugin holds what came to each of them for that one alone.
func TestServicesAreKeptApart(t *testing.T) {
	for _, dead := range []string{"main", "shadow"} {
		t.Run(dead+" is down", func(t *testing.T) {
			r := startReplicas(t)
			tr := Start(t, Options{Dynamic: mirrored("hold: 1s", r)})
			await(t, 10*time.Second, "both up", func() bool { return strings.Count(tr.Output(), "/mcp is up") == 2 })
			want := 200
			if dead == "main" {
				r.a.Kill(t)
				want = 503
			} else {
				r.b.Kill(t)
			}
			await(t, 5*time.Second, "down", func() bool { return strings.Contains(tr.Output(), "is down") })
			if status := callAt(t, tr, tr.URL, "m"); status != want {
				t.Errorf("%d, want %d", status, want)
			}
			time.Sleep(1500 * time.Millisecond) // the copy is held
			if n := e2e.Executions(t, r.log)["m"]; n != 1 {
				t.Errorf("executed %d times, want once, by the one that lives", n)
			}
		})
	}
}

// Sessions are for a router's middleware.
func TestStickyOnAService(t *testing.T) {
	r := startReplicas(t)
	tr := Start(t, Options{Dynamic: mirrored("sticky: true", r)})
	await(t, 5*time.Second, "the refusal", func() bool {
		return strings.Contains(tr.Output(), "sticky on mcp@file on service main@file: it is a middleware of a service")
	})
}
