package caddymodule

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// promtool runs Prometheus's tool. `make rules` installs it; where it is missing, and
// not called for, the test says so.
func promtool(t *testing.T, stdin []byte, args ...string) {
	t.Helper()
	bin, err := exec.LookPath("promtool")
	if err != nil {
		t.Skip("no promtool here: run make rules")
	}
	cmd := exec.Command(bin, args...)
	cmd.Stdin = bytes.NewReader(stdin)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "promtool %v: %s", args, out)
}

// metricLabels are the metrics that we have, and their labels.
func metricLabels() map[string][]string {
	descs := make(chan *prometheus.Desc, 64)
	collector{}.Describe(descs)
	close(descs)
	all := map[string][]string{}
	for d := range descs {
		m := regexp.MustCompile(`fqName: "(\w+)".*variableLabels: \{([\w,]*)\}`).FindStringSubmatch(d.String())
		labels := strings.Split(m[2], ",")
		all[m[1]] = labels
		if strings.HasSuffix(m[1], "_seconds") { // some are histograms
			all[m[1]+"_bucket"] = append([]string{"le"}, labels...)
		}
	}
	return all
}

// requireKnown checks that an expression speaks of metrics and labels that exist.
func requireKnown(t *testing.T, expr string) {
	t.Helper()
	known := metricLabels()
	names := regexp.MustCompile(`caddy_mcp_health_\w+(?:\{[^}]*\})?`).FindAllString(expr, -1)
	require.NotEmpty(t, names, expr)
	for _, n := range names {
		name, selector, _ := strings.Cut(n, "{")
		require.Contains(t, known, name, expr)
		for _, l := range regexp.MustCompile(`(\w+)(?:=~|!~|!=|=)"`).FindAllStringSubmatch(selector, -1) {
			require.Contains(t, known[name], l[1], "%s has no such label: %s", name, expr)
		}
	}
}

// The names and labels of design.md §9 are a contract.
func TestMetricNames(t *testing.T) {
	known := metricLabels()
	for name, labels := range map[string]string{
		"upstream_up":                  "upstream,path",
		"upstream_state":               "upstream,path,state",
		"upstream_info":                "upstream,path,era,protocol,server,version",
		"probes_total":                 "upstream,path,verdict,reason",
		"probe_duration_seconds":       "upstream,path",
		"last_probe_timestamp_seconds": "upstream,path",
		"transitions_total":            "upstream,path,to,reason",
		"requests_total":               "upstream,path,outcome",
		"held_requests":                "",
		"hold_seconds":                 "",
		"burn_rate":                    "path,window",
	} {
		require.Equal(t, labels, strings.Join(known["caddy_mcp_health_"+name], ","), name)
	}
}

// What a Prometheus gets it likes.
func TestMetricsAreWellFormed(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	e.call("1")
	ctx := caddy.ActiveContext()
	registry := prometheus.NewRegistry()
	require.NoError(t, registry.Register(collector{}))
	w := httptest.NewRecorder()
	promhttp.HandlerFor(prometheus.Gatherers{registry}, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	require.Contains(t, w.Body.String(), "caddy_mcp_health_upstream_up{")
	families, err := ctx.GetMetricsRegistry().Gather()
	require.NoError(t, err)
	got := map[string]bool{}
	for _, f := range families {
		got[f.GetName()] = true
	}
	for name := range metricLabels() {
		if !strings.HasSuffix(name, "_bucket") && !strings.HasSuffix(name, "_warning") && !strings.HasSuffix(name, "burn_rate") {
			require.True(t, got[name], "%s is not there", name)
		}
	}
	promtool(t, w.Body.Bytes(), "check", "metrics")
}

// The rules speak of what there is.
func TestRules(t *testing.T) {
	text, err := os.ReadFile("../examples/prometheus/rules.yml")
	require.NoError(t, err)
	exprs := regexp.MustCompile(`(?ms)^ {8}expr: (.*?)^ {8}(?:for|labels):`).FindAllStringSubmatch(string(text), -1)
	require.GreaterOrEqual(t, len(exprs), 10)
	for _, e := range exprs {
		requireKnown(t, e[1])
	}
	series, err := os.ReadFile("../examples/prometheus/rules_test.yml")
	require.NoError(t, err)
	for _, s := range regexp.MustCompile(`series: (.*)`).FindAllStringSubmatch(string(series), -1) {
		requireKnown(t, s[1])
	}
	promtool(t, nil, "check", "rules", "../examples/prometheus/rules.yml")
	promtool(t, nil, "test", "rules", "../examples/prometheus/rules_test.yml")
}

// dashboard is what Grafana's dashboard model (schema version 39) needs of a panel.
type dashboard struct {
	UID           string `json:"uid"`
	Title         string `json:"title"`
	SchemaVersion int    `json:"schemaVersion"`
	Templating    struct {
		List []struct {
			Name, Type string
			Query      any
		} `json:"list"`
	} `json:"templating"`
	Panels []struct {
		ID      int    `json:"id"`
		Title   string `json:"title"`
		Type    string `json:"type"`
		GridPos struct{ H, W, X, Y int }
		Targets []struct {
			RefID      string `json:"refId"`
			Expr       string `json:"expr"`
			Datasource struct{ Type, UID string }
		} `json:"targets"`
		FieldConfig struct {
			Defaults  map[string]any `json:"defaults"`
			Overrides []any          `json:"overrides"`
		} `json:"fieldConfig"`
		Options map[string]any `json:"options"`
	} `json:"panels"`
}

// Grafana itself is in no package of Debian: this is what can be said without it. The
// model's fields are those that Grafana requires, every expression is one that
// Prometheus reads, and speaks of metrics and variables that exist.
func TestDashboard(t *testing.T) {
	text, err := os.ReadFile("../examples/grafana/mcphealth.json")
	require.NoError(t, err)
	var d dashboard
	require.NoError(t, json.Unmarshal(text, &d))
	require.NotEmpty(t, d.UID)
	require.NotEmpty(t, d.Title)
	require.GreaterOrEqual(t, d.SchemaVersion, 36)
	variables := map[string]bool{"__rate_interval": true}
	for _, v := range d.Templating.List {
		variables[v.Name] = true
		if v.Type == "query" {
			q := v.Query.(map[string]any)["query"].(string)
			requireKnown(t, q)
		}
	}
	taken, ids, used := map[[2]int]string{}, map[int]bool{}, map[string]bool{}
	rules := "groups:\n- name: dashboard\n  rules:\n"
	for _, p := range d.Panels {
		require.False(t, ids[p.ID], "two panels with id %d", p.ID)
		ids[p.ID] = true
		require.Contains(t, []string{"stat", "timeseries", "state-timeline", "table"}, p.Type, p.Title)
		require.NotEmpty(t, p.Targets, p.Title)
		require.NotNil(t, p.FieldConfig.Defaults, p.Title)
		require.NotNil(t, p.FieldConfig.Overrides, p.Title)
		require.NotEmpty(t, p.Options, p.Title)
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			require.Less(t, x, 24, p.Title)
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				require.Empty(t, taken[[2]int{x, y}], "%s covers it", p.Title)
				taken[[2]int{x, y}] = p.Title
			}
		}
		for _, target := range p.Targets {
			require.NotEmpty(t, target.RefID, p.Title)
			require.Equal(t, "prometheus", target.Datasource.Type, p.Title)
			require.Equal(t, "${datasource}", target.Datasource.UID, p.Title)
			requireKnown(t, target.Expr)
			for _, v := range regexp.MustCompile(`\$(\w+)`).FindAllStringSubmatch(target.Expr, -1) {
				require.True(t, variables[v[1]], "no variable %s: %s", v[1], target.Expr)
			}
			for _, n := range regexp.MustCompile(`caddy_mcp_health_\w+`).FindAllString(target.Expr, -1) {
				used[n] = true
			}
			expr := strings.ReplaceAll(target.Expr, "$__rate_interval", "5m")
			rules += fmt.Sprintf("  - record: panel:%d:%s\n    expr: %s\n", p.ID, strings.ToLower(target.RefID), must(json.Marshal(expr)))
		}
	}
	require.GreaterOrEqual(t, len(used), 12, "metrics that the dashboard shows: %v", slices.Sorted(maps.Keys(used)))
	file := filepath.Join(t.TempDir(), "dashboard.yml")
	require.NoError(t, os.WriteFile(file, []byte(rules), 0o644))
	promtool(t, nil, "check", "rules", file)
}
