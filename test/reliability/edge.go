// Package reliability breaks the promises of the README on purpose: hostile peers,
// faults on the wire, kills at random, old releases and bad days of the machine,
// against real proxies with our modules. Linux, loopback only.
package reliability

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
	"github.com/mcphealth/mcphealth/test/traefik"
)

// A Route is one MCP endpoint of an edge, /NAME/mcp, with its upstreams.
type Route struct {
	Name      string
	Upstreams []string      // host:port
	Interval  time.Duration // 0 = 1 s
	Timeout   time.Duration // of a probe; 0 = 1 s
	Hold      time.Duration // 0 = requests do not wait
	HoldMax   int           // 0 = the default
	Caddy     string        // more lines of mcp_proxy
	Traefik   string        // more lines of the plugin, in YAML
	Service   string        // more lines of Traefik's load balancer, in YAML
	Scheme    string        // of Traefik's servers; "" = http
}

func (r Route) path() string { return "/" + r.Name + "/mcp" }

// An Edge is a proxy with our modules in it, as a process.
type Edge interface {
	URL(route string) string // of its MCP endpoint
	Reload(t testing.TB, routes ...Route)
	State(t testing.TB, upstream string) (state, reason string)
	Goroutines(t testing.TB) int
	Proc() *e2e.Process
}

// A proxy is what the tables run against.
type proxy struct {
	name   string
	start  func(t testing.TB, routes ...Route) Edge
	broken string // what clients get for an answer that is no HTTP
}

var edges = []proxy{
	{"caddy", startCaddy, "502"},
	{"traefik", startTraefik, "500"},
}

type caddyEdge struct{ *e2e.Caddy }

func startCaddy(t testing.TB, routes ...Route) Edge {
	t.Helper()
	return caddyEdge{e2e.StartCaddy(t, caddySite(routes))}
}

func (c caddyEdge) Proc() *e2e.Process { return c.Process }

func (c caddyEdge) URL(route string) string {
	return fmt.Sprintf("http://%s/%s/mcp", c.Addr, route)
}

func (c caddyEdge) Reload(t testing.TB, routes ...Route) {
	t.Helper()
	c.Caddy.Reload(t, caddySite(routes))
}

func (c caddyEdge) Goroutines(t testing.TB) int {
	t.Helper()
	return e2e.CountGoroutines(t, c.Stacks(t))
}

func (c caddyEdge) State(t testing.TB, upstream string) (state, reason string) {
	t.Helper()
	u := c.Upstreams(t)[upstream]
	return u.State, u.Reason
}

func caddySite(routes []Route) string {
	var b strings.Builder
	for _, r := range routes {
		fmt.Fprintf(&b, "\tmcp_proxy /%s/* %s {\n\t\tcheck_path %s\n\t\tcheck_interval %s\n\t\tcheck_timeout %s\n\t\thold %s\n",
			r.Name, strings.Join(r.Upstreams, " "), r.path(), or(r.Interval, time.Second), or(r.Timeout, time.Second), r.Hold)
		if r.HoldMax > 0 {
			fmt.Fprintf(&b, "\t\thold_max %d\n", r.HoldMax)
		}
		for line := range strings.Lines(r.Caddy) {
			b.WriteString("\t\t" + line)
		}
		b.WriteString("\n\t}\n")
	}
	return b.String()
}

// long: take the time that a run by hand has, not CI's.
func long() bool { return os.Getenv("RELIABILITY_LONG") != "" }

func or(d, without time.Duration) time.Duration {
	if d == 0 {
		return without
	}
	return d
}

type traefikEdge struct{ *traefik.Traefik }

func startTraefik(t testing.TB, routes ...Route) Edge {
	t.Helper()
	return traefikEdge{traefik.Start(t, traefik.Options{Dynamic: traefikDynamic(routes)})}
}

func (tr traefikEdge) Proc() *e2e.Process { return tr.Process }

func (tr traefikEdge) URL(route string) string { return tr.Traefik.URL + "/" + route + "/mcp" }

func (tr traefikEdge) Reload(t testing.TB, routes ...Route) {
	t.Helper()
	tr.Traefik.Reload(t, traefikDynamic(routes))
}

func (tr traefikEdge) State(t testing.TB, upstream string) (state, reason string) {
	t.Helper()
	var doc struct {
		Servers []struct{ URL, State, Reason string }
	}
	if _, body := get(t, tr.Traefik.URL+"/status"); json.Unmarshal([]byte(body), &doc) != nil {
		t.Fatalf("status: %s", body)
	}
	for _, s := range doc.Servers {
		if strings.Contains(s.URL, "//"+upstream+"/") {
			return s.State, s.Reason
		}
	}
	return "", ""
}

func traefikDynamic(routes []Route) string {
	var mw, routers, services strings.Builder
	mw.WriteString("    status:\n      plugin:\n        mcphealth: {mode: fallback, paths: [/none], statusPath: /status}\n")
	routers.WriteString("    status:\n      rule: Path(`/status`)\n      service: noop@internal\n      middlewares: [status]\n")
	for _, r := range routes {
		fmt.Fprintf(&mw, "    %s:\n      plugin:\n        mcphealth:\n          paths: [%s]\n          interval: %s\n          timeout: %s\n          hold: %s\n",
			r.Name, r.path(), or(r.Interval, time.Second), or(r.Timeout, time.Second), r.Hold)
		if r.HoldMax > 0 {
			fmt.Fprintf(&mw, "          holdMax: %d\n", r.HoldMax)
		}
		indent(&mw, 10, r.Traefik)
		fmt.Fprintf(&routers, "    %[1]s:\n      rule: PathPrefix(`/%[1]s/`)\n      service: %[1]s\n      middlewares: [%[1]s]\n", r.Name)
		fmt.Fprintf(&services, "    %s:\n      loadBalancer:\n        servers:\n", r.Name)
		scheme := r.Scheme
		if scheme == "" {
			scheme = "http"
		}
		for _, u := range r.Upstreams {
			fmt.Fprintf(&services, "          - url: %s://%s\n", scheme, u)
		}
		indent(&services, 8, r.Service)
	}
	text := "http:\n  middlewares:\n" + mw.String() + "  routers:\n" + routers.String()
	if services.Len() > 0 {
		text += "  services:\n" + services.String()
	}
	return text
}

func indent(b *strings.Builder, n int, text string) {
	for line := range strings.Lines(text) {
		b.WriteString(strings.Repeat(" ", n) + strings.TrimRight(line, "\n") + "\n")
	}
}

// alone is a client that opens a connection for each request.
var alone = http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}

func get(t testing.TB, url string) (int, string) {
	t.Helper()
	resp, err := alone.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// await waits until ok, and returns how long that took.
func await(t testing.TB, within time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > within {
			t.Fatalf("%s: not within %s", what, within)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return time.Since(start)
}
