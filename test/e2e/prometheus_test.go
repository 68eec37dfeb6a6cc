package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// A real Prometheus scrapes a real Caddy, with the rules that we ship, and its alerts
// say what is broken, since when and where to read on. Only their patience is shorter.
func TestAlertsFire(t *testing.T) {
	p := startPair(t, `mcp_proxy {A} {B} {
		check_interval 1s
		check_fast 100ms
		hold 0
	}`)
	rules, err := os.ReadFile(filepath.Join(Root(), "examples/prometheus/rules.yml"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, text string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return file
	}
	write("rules.yml", regexp.MustCompile(`(?m)^( +for:) .*$`).ReplaceAllString(string(rules), "$1 1s"))
	config := write("prometheus.yml", fmt.Sprintf(`global:
  scrape_interval: 500ms
  scrape_timeout: 500ms
  evaluation_interval: 500ms
rule_files: [rules.yml]
scrape_configs:
  - job_name: caddy
    static_configs:
      - targets: [%q]
`, strings.TrimPrefix(p.caddy.admin, "http://")))
	addr := fmt.Sprintf("127.0.0.1:%d", FreePort(t))
	StartProcess(t, addr, func() *exec.Cmd {
		return exec.Command("prometheus", "--config.file="+config, "--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+addr, "--log.level=warn")
	})

	p.a.Kill(t)
	down := awaitAlert(t, addr, "McpUpstreamDown", map[string]string{"upstream": p.a.Addr})
	if !strings.HasPrefix(down.Annotations["description"], "down: refused since 20") || !strings.HasSuffix(down.Annotations["runbook_url"], "docs/runbook.md#mcpupstreamdown") {
		t.Errorf("%s is announced as %v, want what is broken, since when and where to read on", p.a.Addr, down.Annotations)
	}
	for _, a := range alerts(t, addr) {
		if a.Labels["alertname"] != "McpUpstreamDown" && a.State == "firing" {
			t.Errorf("one of two is down, and %v fires", a.Labels)
		}
	}
	p.b.Kill(t)
	all := awaitAlert(t, addr, "McpEndpointDown", map[string]string{"path": "/mcp"})
	for _, u := range []string{p.a.Addr, p.b.Addr} {
		if !strings.Contains(all.Annotations["description"], u+": refused since 20") {
			t.Errorf("the outage is announced as %q, want the reason of %s in it", all.Annotations["description"], u)
		}
	}
	// 5 s without anybody are more than 14.4 times what five minutes may have, and 52 s
	// what an hour may: requests tell sooner.
	for range 20 {
		resp, err := http.Post(p.caddy.URL(), "application/json", strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	awaitAlert(t, addr, "McpErrorBudgetBurnsFast", map[string]string{"path": "/mcp", "severity": "page"})

	p.caddy.Reload(t, `respond "nothing of ours"`)
	awaitAlert(t, addr, "McpNothingChecked", map[string]string{"severity": "page"})
}

type alert struct {
	Labels, Annotations map[string]string
	State               string
}

func alerts(t *testing.T, prometheus string) []alert {
	t.Helper()
	resp, err := http.Get("http://" + prometheus + "/api/v1/alerts")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusServiceUnavailable {
		return nil // it is still reading its own log
	}
	var m struct{ Data struct{ Alerts []alert } }
	if err := json.NewDecoder(resp.Body).Decode(&m); err != nil {
		t.Fatal(err)
	}
	return m.Data.Alerts
}

// awaitAlert waits until an alert of this name fires with these labels.
func awaitAlert(t *testing.T, prometheus, name string, labels map[string]string) alert {
	t.Helper()
	var last []alert
	for start := time.Now(); time.Since(start) < 2*time.Minute; time.Sleep(200 * time.Millisecond) {
		last = alerts(t, prometheus)
	next:
		for _, a := range last {
			if a.Labels["alertname"] != name || a.State != "firing" {
				continue
			}
			for k, v := range labels {
				if a.Labels[k] != v {
					continue next
				}
			}
			return a
		}
	}
	t.Fatalf("no alert %s %v fires; there are %v", name, labels, last)
	return alert{}
}

// The curl lines of the docs do what they say.
func TestDocumentedCurl(t *testing.T) {
	p := startPair(t, `mcp_proxy {A} {B}`)
	id := p.caddy.Upstreams(t)[p.a.Addr].ID
	want := map[string]string{ // of what a line asks for, a piece of its answer
		"/mcp_health/upstreams":           `"upstream":"` + p.a.Addr + `"`,
		"/mcp_health/upstreams/ID":        `"history":[`,
		"/mcp_health/endpoints":           `"availability":[{"window":"5m"`,
		"/mcp_health/upstreams/ID/probe":  `"id":"` + id + `"`,
		"/mcp_health/upstreams/ID/drain":  `"draining":true`,
		"/mcp_health/upstreams/ID/resume": `"draining":false`,
		"/mcp_health/sessions":            `"lost":0`,
		"/metrics":                        `caddy_mcp_health_upstream_up{path="/mcp",upstream="` + p.a.Addr + `"} 1`,
	}
	ran := map[string]bool{}
	for _, page := range []string{"observability.md", "runbook.md", "caddy.md"} {
		text, err := os.ReadFile(filepath.Join(Root(), "docs", page))
		if err != nil {
			t.Fatal(err)
		}
		for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
			for _, line := range strings.Split(strings.TrimSpace(block[1]), "\n") {
				path := regexp.MustCompile(`^curl .*http://127\.0\.0\.1:2019(\S+)$`).FindStringSubmatch(line)
				if path == nil {
					continue
				}
				ran[path[1]] = true
				line = strings.NewReplacer("http://127.0.0.1:2019", p.caddy.admin, "/ID", "/"+id).Replace(line)
				out, err := exec.Command("sh", "-c", strings.Replace(line, "curl ", "curl --fail-with-body ", 1)).CombinedOutput()
				if err != nil || !strings.Contains(string(out), want[path[1]]) || want[path[1]] == "" {
					t.Errorf("%s: %s: %v\n%.2000s\nwant %s in it", page, line, err, out, want[path[1]])
				}
			}
		}
	}
	for path := range want {
		if !ran[path] {
			t.Errorf("the docs show no curl line for %s", path)
		}
	}
}

// What /metrics gives is there without a Caddyfile's word for it, on a site as well.
func TestMetricsOnASite(t *testing.T) {
	p := startPair(t, "mcp_proxy /mcp* {A} {B}\nmetrics /metrics")
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", p.caddy.Port))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil || !strings.Contains(string(body), `caddy_mcp_health_probes_total{path="/mcp",reason="ok",upstream="`+p.a.Addr+`",verdict="ready"} `) {
		t.Errorf("%d %v: no metrics of ours", resp.StatusCode, err)
	}
}
