package traefik

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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

// heads is a plugin that gets to see each answer's head and changes nothing: what it costs
// at least to be able to. Events wait in it, which does not matter here.
var heads = strings.Replace(noop, "func (h *handler) ServeHTTP(rw http.ResponseWriter, req *http.Request) { h.next.ServeHTTP(rw, req) }", `type head struct{ http.ResponseWriter }

func (w *head) WriteHeader(status int) { w.ResponseWriter.WriteHeader(status) }

func (h *handler) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	h.next.ServeHTTP(&head{rw}, req)
}`, 1)

// side is one Traefik under measurement; sessions: the load calls in sessions.
type side struct {
	name     string
	options  Options
	sessions bool
}

// sides are what TestOverhead measures in turns. Each is compared with the no-op plugin
// of the same kind of load.
func sides(stateless, stateful string) []side {
	noopFlags := append([]string{"--experimental.localplugins.noop.modulename=example.com/noop"}, quiet...)
	withNoop := func(c config) string {
		yaml := c.yaml()
		from, to := strings.Index(yaml, "        mcphealth:\n"), strings.Index(yaml, "  routers:\n")
		return yaml[:from] + "        noop: {}\n" + yaml[to:]
	}
	plain := config{plugin: "hold: 10s", servers: []string{stateless}}
	stick := config{plugin: "hold: 10s\nsticky: true", servers: []string{stateless}, service: cookie}
	session := config{plugin: "hold: 10s\nsticky: true", servers: []string{stateful}, service: cookie}
	single := plain // as docs/traefik.md has it under "Fewer 502s"
	single.service = "serversTransport: fresh"
	again := strings.Replace(single.yaml(), "service: app\n      middlewares: [mcp]", "service: app\n      middlewares: [again, mcp]", 1)
	again = strings.Replace(again, "  middlewares:\n", "  serversTransports:\n    fresh: {maxIdleConnsPerHost: -1}\n  middlewares:\n    again:\n      retry: {attempts: 4, initialInterval: 20ms}\n", 1)
	return []side{
		{"no plugin", Options{Dynamic: bare(plain.yaml()), NoPlugin: true, Flags: quiet}, false},
		{"a plugin that does nothing", Options{Dynamic: withNoop(plain), Patch: install(noop), Flags: noopFlags}, false},
		{"mcphealth", Options{Dynamic: plain.yaml(), Flags: quiet}, false},
		{"mcphealth, `retry` and a connection per call", Options{Dynamic: again, Flags: quiet}, false},
		{"mcphealth, `sticky`, requests of no session", Options{Dynamic: stick.yaml(), Flags: quiet}, false},
		{"in sessions: no plugin", Options{Dynamic: bare(session.yaml()), NoPlugin: true, Flags: quiet}, true},
		{"in sessions: a plugin that does nothing", Options{Dynamic: withNoop(session), Patch: install(noop), Flags: noopFlags}, true},
		{"in sessions: one that is shown each answer's head", Options{Dynamic: withNoop(session), Patch: install(heads), Flags: noopFlags}, true},
		{"in sessions: mcphealth, `sticky`", Options{Dynamic: session.yaml(), Flags: quiet}, true},
	}
}

// TestOverhead compares requests/s without a plugin, with one that does nothing, and
// with ours, in turns, and writes the table of docs/benchmarks.md. It is a measurement:
// make traefik-overhead runs it.
func TestOverhead(t *testing.T) {
	file := os.Getenv("MCPHEALTH_OVERHEAD")
	if file == "" {
		t.Skip("set MCPHEALTH_OVERHEAD to docs/benchmarks.md")
	}
	const rounds, each = 40, time.Second
	stateless := e2e.Get(t, "go-sdk-v1.8.0-stateless-json").Start(t, e2e.FreePort(t))
	stateful := e2e.Get(t, "go-sdk-v1.8.0-json").Start(t, e2e.FreePort(t))
	all := sides(stateless.Addr, stateful.Addr)
	traefiks := make([]*Traefik, len(all))
	rates := make([][]float64, len(all))
	work := make([][]float64, len(all)) // the proxy's processor time per call, µs
	for i, s := range all {
		traefiks[i] = Start(t, s.options)
		await(t, 10*time.Second, "served", func() bool { status, _ := post(t, traefiks[i].URL+"/mcp"); return status < 500 && status != 404 })
	}
	for range rounds {
		for i, s := range all {
			before := cpu(t, traefiks[i].PID())
			r := rate(t, traefiks[i], s.sessions, each)
			rates[i] = append(rates[i], r)
			work[i] = append(work[i], float64((cpu(t, traefiks[i].PID())-before).Microseconds())/(r*each.Seconds()))
		}
	}
	var b strings.Builder
	b.WriteString("| | requests/s | of no plugin | of a plugin that does nothing | Traefik's processor time per call | of a plugin that does nothing |\n|---|---|---|---|---|---|\n")
	first := 0 // without a plugin, of the same load
	for i, s := range all {
		if i > 0 && s.sessions != all[i-1].sessions {
			first = i
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s µs | %s |\n", s.name, spread(rates[i], nil, "%.0f"), spread(rates[i], rates[first], "%.2f"), spread(rates[i], rates[first+1], "%.2f"),
			spread(work[i], nil, "%.0f"), spread(work[i], work[first+1], "%.2f"))
	}
	t.Log("\n" + b.String())
	replaceTable(t, file, "traefik-overhead", b.String())
}

// cpu is the processor time that a process has used.
func cpu(t *testing.T, pid int) time.Duration {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(b[strings.LastIndex(string(b), ") "):]))
	user, err1 := strconv.Atoi(fields[12])
	system, err2 := strconv.Atoi(fields[13])
	if err1 != nil || err2 != nil {
		t.Fatalf("/proc/%d/stat: %q", pid, b)
	}
	return time.Duration(user+system) * time.Second / 100 // sysconf(_SC_CLK_TCK), on every Linux that Go knows
}

// rate is how many calls of 8 clients are answered in a second.
func rate(t *testing.T, tr *Traefik, sessions bool, d time.Duration) float64 {
	t.Helper()
	if !sessions {
		load := e2e.Load{URL: tr.URL + "/mcp", Clients: 8}.Start(t)
		time.Sleep(d)
		r := load.Stop()
		if len(r.Failures) > 0 {
			t.Error(r)
		}
		return float64(r.Sent) / d.Seconds()
	}
	var n atomic.Int64
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	for range 8 {
		id, _ := open(t, tr)
		wg.Go(func() {
			c := &http.Client{Transport: &http.Transport{}}
			defer c.CloseIdleConnections()
			for time.Now().Before(end) {
				req, _ := http.NewRequest(http.MethodPost, tr.URL+"/mcp", strings.NewReader(`{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"echo","arguments":{"message":"x"}}}`))
				for k, v := range map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Mcp-Session-Id": id, "MCP-Protocol-Version": "2025-11-25"} {
					req.Header.Set(k, v)
				}
				resp, err := c.Do(req)
				if err != nil || resp.StatusCode != 200 {
					t.Errorf("%v %v", resp, err)
					return
				}
				io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				n.Add(1)
			}
		})
	}
	wg.Wait()
	return float64(n.Load()) / d.Seconds()
}

// spread is the median of the values, or of their ratios to base in the same round,
// with the least and the most.
func spread(values, base []float64, format string) string {
	all := append([]float64(nil), values...)
	for i := range base {
		all[i] /= base[i]
	}
	sort.Float64s(all)
	return fmt.Sprintf(format+" ("+format+" to "+format+")", all[len(all)/2], all[0], all[len(all)-1])
}

// quiet: a line per request at level DEBUG would be most of what is measured.
var quiet = []string{"--log.level=INFO"}

// install puts the plugin noop beside ours.
func install(source string) func(t testing.TB, root string) {
	return func(t testing.TB, root string) {
		t.Helper()
		dir := filepath.Join(root, "../../../example.com/noop")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		for name, text := range map[string]string{"noop.go": source, ".traefik.yml": "displayName: noop\ntype: middleware\nimport: example.com/noop\nsummary: noop\ntestData: {a: b}\n"} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}
