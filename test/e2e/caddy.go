package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// Caddy is a real Caddy with our modules in it.
type Caddy struct {
	*Process
	Port   int // of the site
	admin  string
	global string // of its global options, besides those that all here have
	log    string // file of all that it says at INFO and above; WARN is in its output
}

// CaddyBinary is bin/caddy, which make builds with xcaddy; $CADDY outranks it.
func CaddyBinary(t testing.TB) string {
	t.Helper()
	if bin := os.Getenv("CADDY"); bin != "" {
		return bin
	}
	bin := filepath.Join(Root(), "bin", "caddy")
	once(t, bin, func() { run(t, Root(), "make", "-s", "bin/caddy") })
	return bin
}

// StartCaddy runs Caddy with one site, whose directives are given, on a free port.
// {PORT} in them is that port.
func StartCaddy(t testing.TB, site string) *Caddy {
	t.Helper()
	return startCaddy(t, t.TempDir(), "", site)
}

// StartCaddyWith is StartCaddy with a storage that other edges may share.
func StartCaddyWith(t testing.TB, storage, site string) *Caddy {
	t.Helper()
	return startCaddy(t, storage, "", site)
}

// StartCaddyGlobal is StartCaddy with more global options.
func StartCaddyGlobal(t testing.TB, global, site string) *Caddy {
	t.Helper()
	return startCaddy(t, t.TempDir(), global, site)
}

func startCaddy(t testing.TB, storage, global, site string) *Caddy {
	t.Helper()
	c := &Caddy{Port: FreePort(t), global: global}
	adminPort := FreePort(t)
	c.admin = fmt.Sprintf("http://127.0.0.1:%d", adminPort)
	dir := t.TempDir()
	c.log = filepath.Join(dir, "caddy.log")
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(c.config(site)), 0o644); err != nil {
		t.Fatal(err)
	}
	bin := CaddyBinary(t)
	c.Process = StartProcess(t, fmt.Sprintf("127.0.0.1:%d", c.Port), func() *exec.Cmd {
		cmd := exec.Command(bin, "run", "--config", file, "--adapter", "caddyfile")
		cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+storage)
		return cmd
	})
	t.Cleanup(func() { c.wantNoCanary(t) })
	return c
}

func (c *Caddy) config(site string) string {
	global := c.global
	if !strings.Contains(global, "mcp_health") {
		global += "\n\tmcp_health {\n\t\theader X-Probe-Token " + probeCanary + "\n\t}"
	}
	global += "\n\tlog all {\n\t\toutput file " + c.log + "\n\t\tlevel INFO\n\t}"
	return fmt.Sprintf("{\n\tadmin %s\n\tauto_https off\n\tpersist_config off\n\tgrace_period 2s\n\tlog {\n\t\tlevel WARN\n\t}\n\tservers {\n\t\tprotocols h1 h2c\n\t}\n%s\n}\nhttp://:%d {\n\tbind 127.0.0.1\n%s\n}\n",
		strings.TrimPrefix(c.admin, "http://"), global, c.Port, strings.ReplaceAll(site, "{PORT}", fmt.Sprint(c.Port)))
}

// URL is the site's MCP endpoint.
func (c *Caddy) URL() string { return fmt.Sprintf("http://127.0.0.1:%d/mcp", c.Port) }

// Reload loads another site into the running Caddy.
func (c *Caddy) Reload(t testing.TB, site string) {
	t.Helper()
	c.ask(t, http.MethodPost, "/load", c.config(site))
}

// Upstream is what the admin endpoint says of one upstream.
type Upstream struct {
	ID       string `json:"id"`
	Upstream string `json:"upstream"`
	State    string `json:"state"`
	Reason   string `json:"reason"`
	Probes   int    `json:"probes"`
}

// Upstreams asks the admin endpoint, by address.
func (c *Caddy) Upstreams(t testing.TB) map[string]Upstream {
	t.Helper()
	all := map[string]Upstream{}
	var list []Upstream
	if err := json.Unmarshal(c.get(t, "/mcp_health/upstreams"), &list); err != nil {
		t.Fatal(err)
	}
	for _, u := range list {
		all[u.Upstream] = u
	}
	return all
}

// Drain has the admin endpoint drain an upstream, or resume.
func (c *Caddy) Drain(t testing.TB, addr, action string) {
	t.Helper()
	c.ask(t, http.MethodPost, "/mcp_health/upstreams/"+c.Upstreams(t)[addr].ID+"/"+action, "")
}

// Goroutines is how many run in Caddy, idle connections of the admin client aside.
func (c *Caddy) Goroutines(t testing.TB) int {
	t.Helper()
	var n int
	first, _, _ := strings.Cut(c.Stacks(t), "\n")
	if _, err := fmt.Sscanf(first, "goroutine profile: total %d", &n); err != nil {
		t.Fatalf("%q: %v", first, err)
	}
	return n
}

// CountGoroutines counts in a profile (pprof, debug=1), those of open connections
// aside (idle ones stay open for 90 s and more) and those with a frame in but.
func CountGoroutines(t testing.TB, profile string, but ...string) (all int) {
	t.Helper()
	but = append(but, "net/http.(*persistConn)", "net/http.(*conn).serve", "net/http.(*connReader)")
	for _, group := range strings.Split(profile, "\n\n") {
		var n int
		_, list, _ := strings.Cut(group, "\n")
		if strings.HasPrefix(group, "goroutine profile") {
			group = list
		}
		if _, err := fmt.Sscanf(group, "%d @", &n); err != nil {
			continue
		}
		if !slices.ContainsFunc(but, func(s string) bool { return strings.Contains(group, s) }) {
			all += n
		}
	}
	if all == 0 {
		t.Fatalf("no goroutines in %.200q", profile)
	}
	return all
}

// Stacks are those of the goroutines, the most frequent first.
func (c *Caddy) Stacks(t testing.TB) string {
	t.Helper()
	return string(c.get(t, "/debug/pprof/goroutine?debug=1"))
}

// Metrics is what Prometheus would scrape.
func (c *Caddy) Metrics(t testing.TB) string { t.Helper(); return string(c.get(t, "/metrics")) }

func (c *Caddy) get(t testing.TB, path string) []byte {
	t.Helper()
	return c.ask(t, http.MethodGet, path, "")
}

// ask has the admin endpoint do what can be asked of it twice: each reload opens its
// socket anew, too, and a connection that was not yet accepted is reset.
func (c *Caddy) ask(t testing.TB, method, path, body string) []byte {
	t.Helper()
	client := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	var resp *http.Response
	var err error
	for range 5 {
		req, _ := http.NewRequest(method, c.admin+path, strings.NewReader(body))
		req.Header.Set("Content-Type", "text/caddyfile")
		if resp, err = client.Do(req); err == nil {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s %s: %d %s %v", method, path, resp.StatusCode, answer, err)
	}
	return answer
}

// AwaitState waits until the admin endpoint gives this state to the upstream, and
// returns how long that took.
func (c *Caddy) AwaitState(t testing.TB, addr, state string, within time.Duration) time.Duration {
	t.Helper()
	start := time.Now()
	var last Upstream
	for time.Since(start) < within {
		if last = c.Upstreams(t)[addr]; last.State == state {
			return time.Since(start)
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatalf("%s is %s (%s) after %s, want %s", addr, last.State, last.Reason, within, state)
	return 0
}
