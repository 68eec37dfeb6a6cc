package traefik

import (
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// noop is a plugin that passes everything on, in interpreted code.
const noop = `package noop

import (
	"context"
	"net/http"
)

type Config struct{}

func CreateConfig() *Config { return &Config{} }

type handler struct{ next http.Handler }

func (h *handler) ServeHTTP(rw http.ResponseWriter, req *http.Request) { h.next.ServeHTTP(rw, req) }

func New(_ context.Context, next http.Handler, _ *Config, _ string) (http.Handler, error) {
	return &handler{next: next}, nil
}
`

// TestOverhead compares requests/s without a plugin, with one that does nothing,
// and with ours, in turns. It is a measurement: run it with MCPHEALTH_BENCH=1.
func TestOverhead(t *testing.T) {
	if os.Getenv("MCPHEALTH_BENCH") == "" {
		t.Skip("set MCPHEALTH_BENCH=1")
	}
	server := e2e.Get(t, "go-sdk-v1.8.0-stateless-json").Start(t, e2e.FreePort(t))
	with := config{plugin: "hold: 10s", servers: []string{server.Addr}}.yaml()
	noopYAML := strings.Replace(with, "        mcphealth:\n          paths: [/mcp]\n          hold: 10s\n", "        noop: {}\n", 1)
	traefiks := map[string]*Traefik{
		"no plugin":    Start(t, Options{Dynamic: bare(with), NoPlugin: true, Flags: quiet}),
		"no-op plugin": Start(t, Options{Dynamic: noopYAML, Patch: installNoop, Flags: append([]string{"--experimental.localplugins.noop.modulename=example.com/noop"}, quiet...)}),
		"mcphealth":    Start(t, Options{Dynamic: with, Flags: quiet}),
	}
	rates := map[string][]float64{}
	for range 7 {
		for name, tr := range traefiks {
			const d = 2 * time.Second
			load := e2e.Load{URL: tr.URL + "/mcp", Clients: 8}.Start(t)
			time.Sleep(d)
			r := load.Stop()
			if len(r.Failures) > 0 {
				t.Errorf("%s: %v", name, r)
			}
			rates[name] = append(rates[name], float64(r.Sent)/d.Seconds())
		}
	}
	median := func(name string) float64 { s := rates[name]; sort.Float64s(s); return s[len(s)/2] }
	t.Logf("requests/s, medians of 7: no plugin %.0f, no-op plugin %.0f, mcphealth %.0f", median("no plugin"), median("no-op plugin"), median("mcphealth"))
	ratio := median("mcphealth") / median("no-op plugin")
	t.Logf("mcphealth: %.2f of a no-op plugin, %.2f of no plugin", ratio, median("mcphealth")/median("no plugin"))
	if ratio < 0.95 {
		t.Errorf("%.2f of a no-op plugin, want 0.95 or more (design.md §10)", ratio)
	}
}

// quiet: a line per request at level DEBUG would be most of what is measured.
var quiet = []string{"--log.level=INFO"}

func installNoop(t testing.TB, root string) {
	t.Helper()
	dir := filepath.Join(root, "../../../example.com/noop")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"noop.go": noop, ".traefik.yml": "displayName: noop\ntype: middleware\nimport: example.com/noop\nsummary: noop\ntestData: {a: b}\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
