package traefik

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

var insecure = &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}

// callAt sends a call to one of Traefik's entry points.
func callAt(t *testing.T, tr *Traefik, edge, message string) int {
	t.Helper()
	req := callRequest(t.Context(), tr, message)
	req.URL, _ = req.URL.Parse(edge + "/mcp")
	resp, err := insecure.Do(req)
	if err != nil {
		t.Error(err)
		return 0
	}
	resp.Body.Close()
	return resp.StatusCode
}

// entered is a configuration with that text for the entry points of the service's router,
// and of the fallback.
func entered(c config, app, fallback string) string {
	y := strings.Replace(c.yaml(), "rule: PathPrefix(`/mcp`)\n", "rule: PathPrefix(`/mcp`)\n"+app, 1)
	return strings.Replace(y, "rule: PathPrefix(`/`)\n", "rule: PathPrefix(`/mcp`)\n"+fallback, 1)
}

const (
	onWeb    = "      entryPoints: [web]\n"
	onSecure = "      entryPoints: [websecure]\n"
)

// websecure is the flags of a second entry point, and its URL.
func websecure(t *testing.T, more string) (flags []string, edge string) {
	t.Helper()
	port := e2e.FreePort(t)
	return []string{fmt.Sprintf("--entrypoints.websecure.address=127.0.0.1:%d", port), "--entrypoints.websecure.http." + more}, fmt.Sprintf("https://127.0.0.1:%d", port)
}

// A call that is held at one entry point does not go on to the router of another, past the
// middlewares of that entry point: here one lets nobody in.
func TestHeldCallsStayAtTheirEntryPoint(t *testing.T) {
	r := startReplicas(t)
	c := config{plugin: "hold: 5s", servers: r.servers()}
	y := func(noRoute bool, app string) string {
		c.noRoute = noRoute
		return strings.Replace(entered(c, app, onWeb), "  middlewares:\n", "  middlewares:\n    auth:\n      ipAllowList: {sourceRange: [10.9.9.9]}\n", 1)
	}
	flags, secure := websecure(t, "middlewares=auth@file")
	for _, tt := range []struct {
		name, app string
		want      int
	}{{"another", onSecure + "      tls: {}\n", 503}, {"the same", onWeb, 200}} {
		t.Run(tt.name, func(t *testing.T) {
			tr := Start(t, Options{Dynamic: y(true, tt.app), Flags: flags})
			got := make(chan int)
			go func() { got <- callAt(t, tr, tr.URL, tt.name) }()
			time.Sleep(500 * time.Millisecond)
			tr.Reload(t, y(false, tt.app))
			if status := <-got; status != tt.want {
				t.Errorf("held at web: %d, want %d", status, tt.want)
			}
			if status := callAt(t, tr, secure, "asked"); tt.want == 503 && status != 403 {
				t.Errorf("at websecure: %d, want 403", status)
			}
			line := "app-fallback@file (entry point web) held is refused, for router app@file is on another entry point (websecure)"
			if said := strings.Contains(tr.Output(), line); said != (tt.want == 503) {
				t.Errorf("a line about the entry points: %v", said)
			}
		})
	}
	if all := e2e.Executions(t, r.log); all["another"] > 0 || all["the same"] != 1 {
		t.Errorf("executed %v, want the second call alone", all)
	}
}

// A call that is held by a fallback which stands for itself does not go on to a router below
// another one (parentRefs), past that one's middlewares: here one lets nobody in. Below the
// same one it does, and below one of its own: without one that it names it is none.
func TestHeldCallsStayBelowTheirRouters(t *testing.T) {
	r := startReplicas(t)
	const (
		below = "      parentRefs: [top]\n"
		own   = "    top-fallback:\n      rule: PathPrefix(`/`)\n      priority: 1\n      middlewares: [auth]\n"
	)
	for _, tt := range []struct {
		name, fallback, more, auth string
		stays                      bool // what is above, without what is below
		want                       int
	}{
		{"beside", "", "", "10.9.9.9", false, 503},
		{"below", below, "", "127.0.0.1", true, 200},
		{"below one that goes", below, "", "127.0.0.1", false, 404},
		{"below its own", "      parentRefs: [top-fallback]\n", own, "127.0.0.1", false, 200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := config{plugin: "hold: 5s", servers: r.servers()}
			y := func(noRoute bool) string {
				c.noRoute = noRoute
				top := "  routers:\n    top:\n      rule: PathPrefix(`/`)\n      middlewares: [auth]\n"
				if noRoute && !tt.stays {
					top = "  routers:\n"
				}
				y := strings.Replace(entered(c, below, tt.fallback), "  routers:\n", top+tt.more, 1)
				return strings.Replace(y, "  middlewares:\n", "  middlewares:\n    auth:\n      ipAllowList: {sourceRange: ["+tt.auth+"]}\n", 1)
			}
			tr := Start(t, Options{Dynamic: y(true)})
			got := make(chan int)
			go func() { got <- callAt(t, tr, tr.URL, tt.name) }()
			time.Sleep(500 * time.Millisecond)
			tr.Reload(t, y(false))
			if status := <-got; status != tt.want {
				t.Errorf("%d, want %d", status, tt.want)
			}
			if said := strings.Contains(tr.Output(), "requests pass other routers before app@file. Give both the same parentRefs"); said != (tt.want == 503) {
				t.Errorf("a line about the routers: %v", said)
			}
		})
	}
	if all := e2e.Executions(t, r.log); len(all) != 2 || all["below"] != 1 || all["below its own"] != 1 {
		t.Errorf("executed %v, want the calls that got 200", all)
	}
}

// Routers that have the same two entry points find each other at both, though Traefik builds
// them for one, and which one is chance.
func TestHeldCallsOfTwoEntryPoints(t *testing.T) {
	r := startReplicas(t)
	c := config{plugin: "hold: 5s", servers: r.servers()}
	port := e2e.FreePort(t)
	tr := Start(t, Options{Dynamic: entered(c, "", ""), Flags: []string{fmt.Sprintf("--entrypoints.other.address=127.0.0.1:%d", port)}})
	for n := range 6 {
		c.noRoute = true
		tr.Reload(t, entered(c, "", ""))
		got := make(chan int)
		for _, edge := range []string{tr.URL, fmt.Sprintf("http://127.0.0.1:%d", port)} {
			go func() { got <- callAt(t, tr, edge, fmt.Sprint(n, edge)) }()
		}
		time.Sleep(200 * time.Millisecond)
		c.noRoute = false
		tr.Reload(t, entered(c, "", ""))
		if one, two := <-got, <-got; one != 200 || two != 200 {
			t.Errorf("reload %d: %d, %d, want 200", n, one, two)
		}
	}
}

// Where an entry point has TLS of its own Traefik renames a router of several, which then
// is not found: a line says so.
func TestRenamedRouters(t *testing.T) {
	r := startReplicas(t)
	c := config{plugin: "hold: 2s", servers: r.servers(), noRoute: true}
	flags, secure := websecure(t, "tls=true")
	tr := Start(t, Options{Dynamic: entered(c, onSecure, ""), Flags: flags})
	got := make(chan int)
	go func() { got <- callAt(t, tr, secure, "m") }()
	time.Sleep(500 * time.Millisecond)
	c.noRoute = false
	tr.Reload(t, entered(c, onSecure, ""))
	if status := <-got; status != 503 {
		t.Errorf("%d, want 503", status)
	}
	await(t, 2*time.Second, "a line about the names", func() bool { // the log may be behind the answer
		return strings.Contains(tr.Output(), "router websecure-app-fallback@file stands for no router, but there is app@file on its entry point websecure")
	})
}
