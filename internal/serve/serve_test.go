package serve

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/internal/mcpfake"
	"github.com/mcphealth/mcphealth/mcphealth"
)

// serverFunc is a server that calls f with the id of each question.
func serverFunc(t *testing.T, f func(w http.ResponseWriter, r *http.Request, id string)) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var m struct{ ID json.RawMessage }
		_ = json.NewDecoder(r.Body).Decode(&m)
		w.Header().Set("Content-Type", "application/json")
		f(w, r, string(m.ID))
	}))
	t.Cleanup(s.Close)
	return s.URL + "/mcp"
}

// modern answers server/discover in the name of a server.
func modern(w io.Writer, id, name string) {
	info, _ := json.Marshal(map[string]string{"name": name, "version": "1"})
	fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28"],"capabilities":{},"serverInfo":%s}}`, id, info)
}

// Servers of each kind.
func good(t *testing.T) string {
	return serverFunc(t, func(w http.ResponseWriter, _ *http.Request, id string) { modern(w, id, "good") })
}

func limited(t *testing.T) string {
	return serverFunc(t, func(w http.ResponseWriter, _ *http.Request, _ string) { w.WriteHeader(http.StatusTooManyRequests) })
}

func absent(t *testing.T) string { // the probe cannot find out
	return serverFunc(t, func(w http.ResponseWriter, _ *http.Request, _ string) { w.WriteHeader(http.StatusNotFound) })
}

func html(t *testing.T) string {
	return serverFunc(t, func(w http.ResponseWriter, _ *http.Request, _ string) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<!doctype html><title>Sign in</title>")
	})
}

// by makes a target of a URL. A server that is good gets time for it: the machine may
// be busy.
func by(name, url string) Target {
	return Target{Name: name, Target: mcphealth.Target{URL: url, Timeout: 10 * time.Second}}
}

func start(t *testing.T, o Options, targets ...Target) *Server {
	t.Helper()
	s, err := New(targets, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// ask asks s. header are names and values.
func ask(s *Server, method, path string, header ...string) *httptest.ResponseRecorder {
	r := httptest.NewRequest(method, path, nil)
	for i := 0; i < len(header); i += 2 {
		r.Header.Add(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	s.Handler().ServeHTTP(w, r)
	return w
}

func docOf(t *testing.T, w *httptest.ResponseRecorder) (d Document) {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(w.Body.Bytes()))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&d); err != nil {
		t.Fatalf("%d %s: %v", w.Code, w.Body, err)
	}
	return d
}

func TestStatus(t *testing.T) {
	kinds := map[string]func(*testing.T) string{"good": good, "limited": limited, "absent": absent, "html": html}
	tests := []struct {
		servers string
		status  string
		code    int
	}{
		{"good good", "healthy", 200},
		{"good html", "degraded", 200},
		{"html html", "unhealthy", 503},
		{"html limited", "degraded", 200},
		{"html absent", "degraded", 200},
		{"good", "healthy", 200},
		{"limited", "degraded", 200},
		{"absent", "degraded", 200}, // a probe that could not find out takes nobody out of service
		{"html", "unhealthy", 503},
	}
	for _, tt := range tests {
		t.Run(tt.servers, func(t *testing.T) {
			var targets []Target
			for i, kind := range strings.Fields(tt.servers) {
				targets = append(targets, by(fmt.Sprint(kind, i), kinds[kind](t)))
			}
			s := start(t, Options{}, targets...)
			w := ask(s, "GET", "/health")
			d := docOf(t, w)
			if w.Code != tt.code || d.Status != tt.status || len(d.Checks) != len(targets) {
				t.Errorf("%d %+v, want %d %s", w.Code, d, tt.code, tt.status)
			}
			for name, c := range d.Checks {
				if c.OK != strings.HasPrefix(name, "good") || c.OK != (c.Error == "") || c.LatencyMs <= 0 {
					t.Errorf("%s: %+v", name, c)
				}
				one := ask(s, "GET", "/health/"+name)
				if own := docOf(t, one); len(own.Checks) != 1 || (one.Code == 503) != strings.HasPrefix(name, "html") {
					t.Errorf("/health/%s: %d %+v", name, one.Code, own)
				}
			}
		})
	}
}

// The document is what design.md §8 says, key by key.
func TestContract(t *testing.T) {
	s := start(t, Options{}, by("good", good(t)), by("bad", "http://127.0.0.1:1/"))
	w := ask(s, "GET", "/health")
	if !regexp.MustCompile(`^\{"status":"degraded","uptime":[0-9.]+,"checks":\{"bad":\{"ok":false,"latencyMs":[0-9.]+,"error":"dead \(refused\): [^"]+"\},"good":\{"ok":true,"latencyMs":[0-9.]+,"error":""\}\}\}\n$`).Match(w.Body.Bytes()) {
		t.Errorf("%s", w.Body)
	}
	for name, want := range map[string]string{"Content-Type": "application/json", "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"} {
		if got := w.Header().Get(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

// Only what is configured is asked for, by whatever name.
func TestWhoIsMeant(t *testing.T) {
	a, b := good(t), html(t)
	addr := func(url string) string { return strings.TrimSuffix(strings.TrimPrefix(url, "http://"), "/mcp") }
	s := start(t, Options{}, by("a", a), by("b", b), by("b2", strings.TrimSuffix(b, "mcp")+"two"))
	tests := []struct {
		method, path string
		upstream     []string
		code         int
		names        string
	}{
		{"GET", "/health", nil, 200, "a b b2"},
		{"GET", "/health/a", nil, 200, "a"},
		{"GET", "/health/b", nil, 503, "b"},
		{"GET", "/health", []string{addr(a)}, 200, "a"},
		{"GET", "/health", []string{"tcp/" + addr(a)}, 200, "a"},
		{"GET", "/health", []string{addr(a) + "/mcp"}, 200, "a"},
		{"GET", "/health", []string{"a"}, 200, "a"},
		{"GET", "/health", []string{addr(b)}, 503, "b b2"},
		{"GET", "/health", []string{addr(b) + "/two"}, 503, "b2"},
		{"GET", "/health/b2", []string{addr(b)}, 503, "b2"},
		{"GET", "/health/a", []string{addr(b)}, 404, ""},
		{"GET", "/health/c", nil, 404, ""},
		{"GET", "/health/A", nil, 404, ""},
		{"GET", "/health/", nil, 404, ""},
		{"GET", "/health/a/b", nil, 404, ""},
		{"GET", "/health/%61", nil, 200, "a"},
		{"GET", "/health/a%2f..%2fb", nil, 404, ""},
		{"GET", "/health", []string{""}, 404, ""},
		{"GET", "/health", []string{"127.0.0.1:1"}, 404, ""},
		{"GET", "/health", []string{"169.254.169.254:80"}, 404, ""},
		{"GET", "/health", []string{"http://" + addr(a) + "/mcp"}, 404, ""},
		{"GET", "/health", []string{addr(a) + "/other"}, 404, ""},
		{"GET", "/health", []string{addr(a) + ", " + addr(b)}, 404, ""},
		{"GET", "/health", []string{addr(a), addr(a)}, 400, ""},
		{"GET", "/", nil, 404, ""},
		{"POST", "/health", nil, 405, ""},
		{"DELETE", "/health/a", nil, 405, ""},
		{"GET", "/livez", nil, 200, ""},
	}
	for _, tt := range tests {
		var header []string
		for _, u := range tt.upstream {
			header = append(header, "X-Upstream", u)
		}
		w := ask(s, tt.method, tt.path, header...)
		var names []string
		if w.Code == 200 || w.Code == 503 {
			for name := range docOf(t, w).Checks {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		if got := strings.Join(names, " "); w.Code != tt.code || got != tt.names {
			t.Errorf("%s %s, X-Upstream %q: %d %q, want %d %q", tt.method, tt.path, tt.upstream, w.Code, got, tt.code, tt.names)
		}
		if strings.Contains(w.Body.String(), "169.254") {
			t.Errorf("the answer repeats what was asked: %s", w.Body)
		}
	}
}

// HEAD is GET without the body, over the wire.
func TestHead(t *testing.T) {
	s := start(t, Options{}, by("a", good(t)), by("b", html(t)))
	edge := httptest.NewServer(s.Handler())
	defer edge.Close()
	for path, want := range map[string]int{"/health": 200, "/health/b": 503, "/health/c": 404, "/livez": 200} {
		resp, err := http.Head(edge.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != want || len(body) > 0 {
			t.Errorf("HEAD %s: %d with %d bytes, want %d", path, resp.StatusCode, len(body), want)
		}
	}
}

// An address is one however it is written.
func TestAddresses(t *testing.T) {
	for url, want := range map[string]string{
		"http://App1/mcp":          "app1:80 app1:80/mcp",
		"https://app1":             "app1:443",
		"http://app1:8000/":        "app1:8000",
		"http://[::1]:8000/a%2Fb":  "[::1]:8000 [::1]:8000/a%2Fb",
		"http://[2001:DB8:0::1]":   "[2001:db8::1]:80",
		"http://[fe80::1%25eth0]/": "[fe80::1%eth0]:80",
		"http://127.0.0.1:80/Mcp/": "127.0.0.1:80 127.0.0.1:80/Mcp/",
	} {
		if got := strings.Join(by("x", url).addresses(), " "); got != want {
			t.Errorf("addresses(%s) = %s, want %s", url, got, want)
		}
	}
	s := &Server{called: map[string][]string{"app1:80": {"x"}, "app1:80/Mcp": {"y"}, "[2001:db8::1]:80": {"z"}, "[2001:db8::1]:80/mcp": {"v"}}}
	for said, want := range map[string]string{"APP1:80": "x", "tcp/App1:80": "x", "App1:80/Mcp": "y", "app1:80/mcp": "",
		"[2001:DB8::1]:80": "z", "tcp/[2001:db8:0:0::1]:80": "z", "[2001:db8:0:0::1]:80/mcp": "v", "2001:db8::1:80": "", "[2001:db8::1]": ""} {
		if got := strings.Join(s.named(said), " "); got != want {
			t.Errorf("named(%s) = %q, want %q", said, got, want)
		}
	}
}

// 10,000 callers at once are one probe of each target, also while one hangs, and
// cost no goroutine that stays.
func TestManyCallers(t *testing.T) {
	var asked [3]atomic.Int32
	var targets []Target
	for i := range asked {
		targets = append(targets, by(fmt.Sprint("t", i), serverFunc(t, func(w http.ResponseWriter, r *http.Request, id string) {
			asked[i].Add(1)
			if i == 2 { // it hangs
				<-r.Context().Done()
				return
			}
			modern(w, id, "x")
		})))
	}
	targets[2].Timeout = 2 * time.Second
	s := start(t, Options{Cache: time.Minute}, targets...)
	before := runtime.NumGoroutine()
	codes := map[int]int{}
	var mu sync.Mutex
	var all sync.WaitGroup
	for i := range 10_000 {
		all.Go(func() {
			path := "/health"
			if i%4 > 0 {
				path = fmt.Sprint("/health/t", i%3)
			}
			w := ask(s, "GET", path)
			mu.Lock()
			codes[w.Code]++
			mu.Unlock()
		})
	}
	all.Wait()
	for i := range asked {
		if n := asked[i].Load(); n != 1 {
			t.Errorf("target %d was asked %d times, want once", i, n)
		}
	}
	if codes[200] != 7500 || codes[503] != 2500 {
		t.Errorf("%v, want 503 for the target that hangs and 200 for the others", codes)
	}
	if after := runtime.NumGoroutine(); after > before+20 {
		t.Errorf("%d goroutines, had %d", after, before)
	}
}

// docs/command.md has each metric with its labels, and no other.
func TestMetricsAreDocumented(t *testing.T) {
	s := start(t, Options{}, by("a", good(t)), Target{Name: "b", Command: sed()})
	ask(s, "GET", "/health")
	families, err := s.metrics.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range families {
		var labels []string
		for _, l := range f.Metric[0].Label {
			labels = append(labels, l.GetName())
		}
		slices.Sort(labels)
		got = append(got, fmt.Sprint(f.GetName(), labels))
	}
	page, err := os.ReadFile("../../docs/command.md")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, m := range regexp.MustCompile("(?m)^\\| `(mcp_health_\\w+)\\{(.*)\\}` \\|").FindAllStringSubmatch(string(page), -1) {
		labels := strings.Split(m[2], ",")
		slices.Sort(labels)
		want = append(want, fmt.Sprint(m[1], labels))
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("metrics %q\ndocs    %q", got, want)
	}
}

// A server that calls itself something else each time gets no series for each.
func TestMetricsOfMoodyServer(t *testing.T) {
	n := 0
	s := start(t, Options{Cache: time.Nanosecond}, by("a", serverFunc(t, func(w http.ResponseWriter, _ *http.Request, id string) {
		n++
		modern(w, id, fmt.Sprint("name-", n))
	})))
	seen := map[string]bool{}
	for range 3 * maxInfos {
		ask(s, "GET", "/health")
		infos := regexp.MustCompile(`(?m)^mcp_health_target_info.*$`).FindAllString(ask(s, "GET", "/metrics").Body.String(), -1)
		if len(infos) != 1 {
			t.Fatalf("%q, want one", infos)
		}
		seen[infos[0]] = true
	}
	if len(seen) > maxInfos+1 {
		t.Errorf("%d series, want %d and %q", len(seen), maxInfos, otherInfo)
	}
}

// A legacy server is left without a session, and what it is held for is one.
func TestSessionEnds(t *testing.T) {
	c, err := mcpfake.Load("../../mcphealth/testdata/captures/ts-sdk-v1.32.2-stateful.txtar")
	if err != nil {
		t.Fatal(err)
	}
	replay, err := mcpfake.Play(c)
	if err != nil {
		t.Fatal(err)
	}
	defer replay.Close()
	s := start(t, Options{Cache: time.Nanosecond}, by("legacy", replay.URL()))
	for range 5 {
		if w := ask(s, "GET", "/health"); w.Code != 200 || docOf(t, w).Status != "healthy" {
			t.Fatalf("%d %s", w.Code, w.Body)
		}
	}
	s.Close()
	opened, ended := 0, 0
	for _, r := range replay.Requests() {
		if r.Issued != "" {
			opened++
		}
		if r.Verb == http.MethodDelete {
			ended++
		}
	}
	if opened != 1 || ended != 1 {
		t.Errorf("%d sessions opened, %d ended; want one", opened, ended)
	}
	if w := ask(s, "GET", "/health"); docOf(t, w).Status != "healthy" {
		t.Errorf("after Close: %s, want what was known", w.Body)
	}
}

// An endpoint that answered as MCP and then is gone is dead: what was learned of a
// server stays from one probe to the next.
func TestRouteGone(t *testing.T) {
	var gone atomic.Bool
	s := start(t, Options{Cache: time.Nanosecond}, by("a", serverFunc(t, func(w http.ResponseWriter, _ *http.Request, id string) {
		if gone.Load() {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		modern(w, id, "x")
	})))
	if w := ask(s, "GET", "/health"); w.Code != 200 {
		t.Fatalf("%d %s", w.Code, w.Body)
	}
	gone.Store(true)
	if w := ask(s, "GET", "/health"); w.Code != 503 || !strings.Contains(w.Body.String(), "dead (route_absent)") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
}

// Credentials are read anew for each probe, the old ones stay where that fails, and
// they show nowhere.
func TestCredentials(t *testing.T) {
	const secret = "hunter2-hunter2"
	var mu sync.Mutex
	token, fails := secret+"-1", false
	var seen []string
	echo := by("echo", serverFunc(t, func(w http.ResponseWriter, r *http.Request, id string) {
		mu.Lock()
		seen = append(seen, r.Header.Get("Authorization"))
		mu.Unlock()
		modern(w, id, r.Header.Get("Authorization"))
	}))
	echo.Header = func() (http.Header, error) {
		mu.Lock()
		defer mu.Unlock()
		if fails {
			return nil, errors.New("the file is empty")
		}
		return http.Header{"Authorization": {"Bearer " + token}}, nil
	}
	angry := echo
	angry.Name = "angry"
	angry.URL = serverFunc(t, func(w http.ResponseWriter, r *http.Request, id string) {
		w.WriteHeader(500)
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32603,"message":%q}}`, id, r.Header.Get("Authorization"))
	})
	var log bytes.Buffer
	s := start(t, Options{Cache: time.Nanosecond, Logger: slog.New(slog.NewTextHandler(&log, nil))}, echo, angry)
	out := ""
	ask(s, "GET", "/health/echo")
	mu.Lock()
	token = secret + "-2"
	mu.Unlock()
	ask(s, "GET", "/health/echo")
	mu.Lock()
	fails = true
	mu.Unlock()
	out += ask(s, "GET", "/health").Body.String() + ask(s, "GET", "/metrics").Body.String()
	mu.Lock()
	defer mu.Unlock()
	if want := []string{"Bearer " + secret + "-1", "Bearer " + secret + "-2", "Bearer " + secret + "-2"}; !slices.Equal(seen[:3], want) {
		t.Errorf("sent %q, want %q", seen, want)
	}
	if !strings.Contains(log.String(), "credentials cannot be read") {
		t.Errorf("log %s: want that they cannot be read", &log)
	}
	if all := out + log.String(); strings.Contains(all, "hunter2") {
		t.Errorf("the secret shows: %s", all)
	}
}

// The way is another one when the files that it was made of have changed; between
// probes no connection is open.
func TestWayChanges(t *testing.T) {
	var mu sync.Mutex
	open, ways := map[net.Conn]bool{}, []int{}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var m struct{ ID json.RawMessage }
		_ = json.NewDecoder(r.Body).Decode(&m)
		modern(w, string(m.ID), "x")
	}))
	s.Config.ConnState = func(c net.Conn, state http.ConnState) {
		mu.Lock()
		defer mu.Unlock()
		if open[c] = state != http.StateClosed; !open[c] {
			delete(open, c)
		}
	}
	s.Start()
	defer s.Close()
	way := func(n int) *http.Transport {
		return &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			mu.Lock()
			ways = append(ways, n)
			mu.Unlock()
			return (&net.Dialer{}).DialContext(ctx, network, addr)
		}}
	}
	now := way(1)
	target := by("a", s.URL)
	target.Transport = func() (*http.Transport, error) {
		if now == nil {
			return nil, errors.New("no certificate")
		}
		return now, nil
	}
	srv := start(t, Options{Cache: time.Nanosecond}, target)
	for _, next := range []*http.Transport{now, way(2), nil} {
		now = next
		if w := ask(srv, "GET", "/health"); w.Code != 200 {
			t.Errorf("%d %s", w.Code, w.Body)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(ways, []int{1, 2, 2}) {
		t.Errorf("ways %v, want 1, 2, and 2 again", ways)
	}
	for range 100 {
		if len(open) == 0 {
			return
		}
		mu.Unlock()
		time.Sleep(10 * time.Millisecond)
		mu.Lock()
	}
	t.Errorf("%d connections are open between probes", len(open))
}

// What a server calls itself cannot break the metrics.
func TestMetrics(t *testing.T) {
	name := "a\"b\\\n{target=\"x\"} 1\n<script>\xff"
	s := start(t, Options{Cache: time.Nanosecond}, by("odd-1.a_b", serverFunc(t, func(w http.ResponseWriter, _ *http.Request, id string) { modern(w, id, name) })), by("gone", "http://127.0.0.1:1/"))
	ask(s, "GET", "/metrics") // a scrape is a caller
	ask(s, "GET", "/health")
	text := ask(s, "GET", "/metrics").Body.String()
	for _, want := range []string{
		`mcp_health_target_up{target="odd-1.a_b"} 1`,
		`mcp_health_target_up{target="gone"} 0`,
		`mcp_health_probes_total{reason="refused",target="gone",verdict="dead"} 3`,
		`mcp_health_transitions_total{reason="ok",target="odd-1.a_b",to="ready"} 1`,
		`mcp_health_probe_duration_seconds_count{target="gone"} 3`,
		`mcp_health_last_probe_timestamp_seconds{target="gone"} 1.`,
		`mcp_health_target_info{era="modern",protocol="2026-07-28",server="a\"b\\ {target=\"x\"} 1 <script>",target="odd-1.a_b",version="1"} 1`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in:\n%s", want, text)
		}
	}
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "#") && !strings.HasPrefix(line, "mcp_health_") {
			t.Errorf("a line of its own: %q", line)
		}
	}
}

// A change is told once, with from and to.
func TestLog(t *testing.T) {
	var log bytes.Buffer
	var gone atomic.Bool
	s := start(t, Options{Cache: time.Nanosecond, Logger: slog.New(slog.NewTextHandler(&log, nil))}, by("a", serverFunc(t, func(w http.ResponseWriter, _ *http.Request, id string) {
		if gone.Load() {
			w.WriteHeader(502)
			return
		}
		modern(w, id, "x")
	})))
	for range 3 {
		ask(s, "GET", "/health")
	}
	gone.Store(true)
	for range 3 {
		ask(s, "GET", "/health")
	}
	lines := regexp.MustCompile(`level=(\w+) msg="target changed" target=a from=(\w+) to=(\w+) reason=(\w+)`).FindAllString(log.String(), -1)
	want := []string{`level=INFO msg="target changed" target=a from=unknown to=ready reason=ok`, `level=WARN msg="target changed" target=a from=ready to=dead reason=gateway_error`}
	if !slices.Equal(lines, want) || strings.Count(log.String(), "\n") != 2 {
		t.Errorf("log:\n%s", &log)
	}
}

// sed is an MCP server: it answers each question as discovered, and nothing else.
func sed(extra ...string) []string {
	return append([]string{"sed", "-u", "-n", `s/.*"id":\("[^"]*"\).*/{"jsonrpc":"2.0","id":\1,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}/p`}, extra...)
}

// A command over stdio is kept running, and its state is shown.
func TestCommand(t *testing.T) {
	r, w := io.Pipe()
	t.Cleanup(func() { _ = w.Close() })
	stderr := make(chan string, 1)
	go func() {
		line, _ := bufio.NewReader(r).ReadString('\n')
		stderr <- line
		_, _ = io.Copy(io.Discard, r)
	}()
	s := start(t, Options{Stderr: w}, Target{Name: "works", Command: sed(), Heartbeat: 50 * time.Millisecond},
		Target{Name: "fails", Command: []string{"sh", "-c", "echo why >&2; exit 1", "secret-argument"}})
	if line := <-stderr; line != "fails stderr: why\n" {
		t.Errorf("%q, want that it names the target", line)
	}
	var d Document
	for range 500 {
		if d = docOf(t, ask(s, "GET", "/health")); d.Checks["works"].OK && d.Checks["fails"].State == "waiting" {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	works, fails := d.Checks["works"], d.Checks["fails"]
	if !works.OK || works.State != "running" || works.Restarts == nil || *works.Restarts != 0 || d.Status != "degraded" {
		t.Errorf("%+v", d)
	}
	if !regexp.MustCompile(`^dead \(reset\): .*exit status 1.*; it is started again in \d+s$`).MatchString(fails.Error) {
		t.Errorf("%+v", fails)
	}
	if w := ask(s, "GET", "/health/fails"); w.Code != 503 {
		t.Errorf("%d", w.Code)
	}
	text := ask(s, "GET", "/metrics").Body.String()
	for _, want := range []string{`mcp_health_child_state{state="running",target="works"} 1`, `mcp_health_child_state{state="running",target="fails"} 0`, `mcp_health_child_restarts_total{target="works"} 0`} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in:\n%s", want, text)
		}
	}
	if strings.Contains(text+ask(s, "GET", "/health").Body.String(), "secret-argument") {
		t.Error("an argument shows")
	}
}

func TestBadTargets(t *testing.T) {
	const url = "http://127.0.0.1:1/"
	tests := []struct {
		want    string
		o       Options
		targets []Target
	}{
		{"0 targets: want 1 to 1000", Options{}, nil},
		{"1001 targets", Options{}, make([]Target, 1001)},
		{`target 1: name "": want letters`, Options{}, []Target{by("", url)}},
		{`target 1: name "..": want letters`, Options{}, []Target{by("..", url)}},
		{`target 1: name "a b"`, Options{}, []Target{by("a b", url)}},
		{`target 1: name "ä"`, Options{}, []Target{by("ä", url)}},
		{`target 1: name "a\nb"`, Options{}, []Target{by("a\nb", url)}},
		{`target 1: name "xxx`, Options{}, []Target{by(strings.Repeat("x", 65), url)}},
		{"target 2: the name a is another target's already", Options{}, []Target{by("a", url), by("a", url)}},
		{"target 1: bad target: url: credentials belong into a header", Options{}, []Target{by("a", "http://u:p@x/")}},
		{"heartbeat 1ns: want at least 10ms", Options{}, []Target{{Name: "a", Heartbeat: 1, Command: []string{"x"}}}},
		{"stdio: want a program", Options{}, []Target{{Name: "a", Command: []string{"", "x"}}}},
		{"stdio: want a program", Options{}, []Target{{Name: "a", Command: []string{"x", "a\x00b"}}}},
		{"heartbeat 1s: want at least 10ms, and a command", Options{}, []Target{{Name: "a", Heartbeat: time.Second, Target: mcphealth.Target{URL: url}}}},
		{"belong to HTTP", Options{}, []Target{{Name: "a", Command: []string{"x"}, Target: mcphealth.Target{Host: "x"}}}},
		{"cache -1s", Options{Cache: -time.Second}, []Target{by("a", url)}},
	}
	for _, tt := range tests {
		if s, err := New(tt.targets, tt.o); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("New = %v, %v, want %s", s, err, tt.want)
		}
	}
}

// What cannot be read at the start is an error, and leaves nothing running.
func TestUnreadable(t *testing.T) {
	bad := by("b", "http://127.0.0.1:1/")
	bad.Header = func() (http.Header, error) { return nil, errors.New("no such file") }
	way := by("b", "http://127.0.0.1:1/")
	way.Transport = func() (*http.Transport, error) { return nil, errors.New("no certificate") }
	before := runtime.NumGoroutine()
	for _, b := range []Target{bad, way} {
		if _, err := New([]Target{{Name: "a", Command: sed()}, b}, Options{}); err == nil || !strings.HasPrefix(err.Error(), "target b: no ") {
			t.Errorf("%v", err)
		}
	}
	for range 100 {
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d goroutines, had %d", runtime.NumGoroutine(), before)
}

// All captures: what the probe calls dead is 503, and nothing else is.
func TestCaptures(t *testing.T) {
	files, err := filepath.Glob("../../mcphealth/testdata/captures/*.txtar")
	if err != nil || len(files) < 50 {
		t.Fatalf("%d captures, %v", len(files), err)
	}
	var targets []Target
	wants := map[string]string{}
	for _, file := range files {
		c, err := mcpfake.Load(file)
		if err != nil {
			t.Fatal(err)
		}
		want := c.Get("want")
		if want == "" {
			continue // it needs more than a URL
		}
		replay, err := mcpfake.Play(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(replay.Close)
		target := by(c.Name, replay.URL())
		target.Timeout = mcphealth.DefaultTimeout
		targets = append(targets, target)
		wants[c.Name], _, _ = strings.Cut(want, " ")
	}
	s := start(t, Options{Cache: time.Minute}, targets...)
	for name, c := range docOf(t, ask(s, "GET", "/health")).Checks {
		w := ask(s, "GET", "/health/"+name)
		verdict, _, _ := strings.Cut(c.Error, " ")
		if c.OK && (wants[name] == "ready" || wants[name] == "alive") {
			verdict = wants[name]
		}
		if verdict != wants[name] || (w.Code == 503) != (verdict == "dead") {
			t.Errorf("%s: %d %+v, want %s", name, w.Code, c, wants[name])
		}
	}
}
