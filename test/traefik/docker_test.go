package traefik

import (
	"fmt"
	"net/http"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// setup is one way to run Traefik before a container.
type setup struct {
	name   string
	plugin string // settings; "" = without the plugin
	labels []string
	flags  []string
	retry  bool // Traefik's retry middleware in front of the plugin, and a connection per call
	file   bool // the service is the file provider's, and stays
}

var (
	ours      = setup{name: "the plugin, hold 10 s", plugin: "hold: 10s"}
	oursRetry = setup{name: "… `retry` in front, a connection per call", plugin: "hold: 10s", retry: true}
	oursFile  = setup{name: "… the service in the file provider", plugin: "hold: 10s", retry: true, file: true}
)

var setups = []setup{
	{name: "plain Traefik"},
	{name: "label `allownonrunning`", labels: []string{"traefik.docker.allownonrunning=true"}},
	{name: "`allowEmptyServices`", flags: []string{"--providers.docker.allowemptyservices=true"}},
	{name: "`healthCheck` of Traefik", labels: []string{
		"traefik.http.services.app.loadbalancer.healthcheck.path=/debug/stats", "traefik.http.services.app.loadbalancer.healthcheck.interval=1s"}},
	{name: "the plugin, hold 0", plugin: "hold: 0"},
	ours,
	{name: "… and `allownonrunning`", plugin: "hold: 10s", labels: []string{"traefik.docker.allownonrunning=true"}},
	{name: "… and `providersThrottleDuration: 200ms`", plugin: "hold: 10s", flags: []string{"--providers.providersthrottleduration=200ms"}},
	oursRetry,
	oursFile,
}

// recreations are ways to replace the only container.
var recreations = []struct {
	name string
	do   func(t testing.TB, d *Docker, port int, labels []string)
}{
	{"rm -f, run", func(t testing.TB, d *Docker, port int, l []string) {
		d.Run(t, "rm", "-f", "app")
		time.Sleep(500 * time.Millisecond)
		d.Run(t, d.args("run", "app", port, l...)...)
	}},
	{"compose: create, stop, rm, rename, start", func(t testing.TB, d *Docker, port int, l []string) {
		d.Run(t, d.args("create", "app-new", port, l...)...)
		d.Run(t, "stop", "app")
		d.Run(t, "rm", "app")
		d.Run(t, "rename", "app-new", "app")
		d.Run(t, "start", "app")
	}},
	{"kill -9, start at once", func(t testing.TB, d *Docker, port int, l []string) {
		d.Run(t, "kill", "app")
		d.Run(t, "start", "app")
	}},
}

func (s setup) start(t testing.TB, d *Docker, port int) *Traefik {
	t.Helper()
	o := Options{NoPlugin: s.plugin == "", Throttled: true, Flags: append([]string{"--providers.docker.endpoint=unix://" + d.socket,
		"--providers.docker.exposedbydefault=false"}, s.flags...)}
	if s.plugin != "" {
		var b strings.Builder
		b.WriteString("http:\n  serversTransports:\n    fresh: {maxIdleConnsPerHost: -1}\n" +
			"  middlewares:\n    again:\n      retry: {attempts: 4, initialInterval: 100ms}\n    mcp:\n      plugin:\n        mcphealth:\n")
		indent(&b, 10, s.plugin)
		if s.file {
			fmt.Fprintf(&b, "  routers:\n    app:\n      rule: PathPrefix(`/mcp`)\n      service: app\n      middlewares: [again, mcp]\n"+
				"  services:\n    app:\n      loadBalancer:\n        serversTransport: fresh\n        servers: [{url: 'http://127.0.0.1:%d'}]\n", port)
		} else {
			b.WriteString("  routers:\n    app:\n      rule: PathPrefix(`/mcp`)\n      priority: 1\n      service: noop@internal\n      middlewares: [mcp]\n")
		}
		o.Dynamic = b.String()
	}
	return Start(t, o)
}

// all are the container's labels in this setup.
func (s setup) all(port int) []string {
	if s.file {
		return nil
	}
	l := append(labels(port), s.labels...)
	switch {
	case s.retry:
		l = append(l, "traefik.http.routers.app.middlewares=again@file,mcp@file", "traefik.http.services.app.loadbalancer.serverstransport=fresh@file")
	case s.plugin != "":
		l = append(l, "traefik.http.routers.app.middlewares=mcp@file")
	}
	return l
}

// outcome is what became of the calls of one recreation.
type outcome struct {
	sent, ok     int
	status       map[int]int // 502 without those under way
	underWay     int         // written to the server as it died
	executed     int         // failed, and yet executed
	broken       int         // connections that broke
	slowest      time.Duration
	duplicates   []string
	failureLines []string
}

func (o *outcome) add(p outcome) {
	o.sent, o.ok, o.underWay, o.broken = o.sent+p.sent, o.ok+p.ok, o.underWay+p.underWay, o.broken+p.broken
	o.executed += p.executed
	for k, v := range p.status {
		if o.status == nil {
			o.status = map[int]int{}
		}
		o.status[k] += v
	}
	o.slowest = max(o.slowest, p.slowest)
	o.duplicates = append(o.duplicates, p.duplicates...)
	o.failureLines = append(o.failureLines, p.failureLines...)
}

func (o outcome) String() string {
	var parts []string
	for k, v := range o.status {
		parts = append(parts, fmt.Sprintf("%d × %d", v, k))
	}
	sort.Strings(parts)
	return fmt.Sprintf("%d calls, %d ok, %s, %d under way (%d of the failed were executed), %d broken, slowest %s, %d executed twice", o.sent, o.ok,
		strings.Join(parts, ", "), o.underWay, o.executed, o.broken, o.slowest.Round(10*time.Millisecond), len(o.duplicates))
}

// recreate puts load on a container and replaces it.
func recreate(t testing.TB, d *Docker, s setup, how int) outcome {
	t.Helper()
	port := e2e.FreePort(t)
	tr := s.start(t, d, port)
	defer tr.Kill(t)
	d.try("rm", "-f", "app", "app-new")
	d.Run(t, d.args("run", "app", port, s.all(port)...)...)
	await(t, 20*time.Second, "served", func() bool { status, _ := post(t, tr.URL+"/mcp"); return status == http.StatusOK })
	loads := outOfStep(t, tr, 20)
	time.Sleep(2 * time.Second)
	began := time.Now()
	recreations[how].do(t, d, port, s.all(port))
	for time.Since(began) < 9*time.Second {
		time.Sleep(50 * time.Millisecond)
	}
	rep := stopAll(loads)
	if !listens(port) {
		t.Fatalf("the new container does not listen: %s", d.Run(t, "logs", "app"))
	}
	o := classify(rep, tr.Output(), d.duplicates(t))
	executed := e2e.Executions(t, d.log)
	for _, f := range rep.Failures {
		if executed[f.ID] > 0 {
			o.executed++
		}
	}
	return o
}

// outOfStep is a load of clients with 10 calls a second each, out of step: in step,
// all would be under way at a kill, or none.
func outOfStep(t testing.TB, tr *Traefik, clients int) (loads []*e2e.Running) {
	t.Helper()
	for range clients {
		loads = append(loads, e2e.Load{URL: tr.URL + "/mcp", Rate: 10}.Start(t))
		time.Sleep(100 * time.Millisecond / time.Duration(clients))
	}
	return loads
}

// stopAll stops all loads and adds up their reports.
func stopAll(loads []*e2e.Running) e2e.Report {
	all := e2e.Report{Count: map[e2e.Outcome]int{}}
	reports := make([]e2e.Report, len(loads))
	var wg sync.WaitGroup
	for i, l := range loads {
		wg.Go(func() { reports[i] = l.Stop() })
	}
	wg.Wait()
	for _, r := range reports {
		all.Sent += r.Sent
		all.Slowest = max(all.Slowest, r.Slowest)
		all.Failures = append(all.Failures, r.Failures...)
		for k, n := range r.Count {
			all.Count[k] += n
		}
	}
	return all
}

// post asks once and returns the status.
func post(t testing.TB, url string) (int, http.Header) {
	t.Helper()
	req, _ := http.NewRequest(http.MethodPost, url, strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"ping"}`))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode, resp.Header
}

// classify reads Traefik's log to tell a 502 of a refused dial from one of a call
// that the server had been given.
func classify(r e2e.Report, log string, duplicates []string) outcome {
	o := outcome{sent: r.Sent, ok: r.Count[e2e.OK], status: map[int]int{}, slowest: r.Slowest, duplicates: duplicates, broken: r.Count[e2e.Transport] + r.Count[e2e.Wrong]}
	for _, f := range r.Failures {
		if f.Status != 0 && f.Status != 200 {
			o.status[f.Status]++
		}
		o.failureLines = append(o.failureLines, f.String())
	}
	for line := range strings.Lines(log) {
		if !strings.Contains(line, "502 Bad Gateway") {
			continue
		}
		if !strings.Contains(line, "connect: ") {
			o.underWay++
		}
		_, cause, _ := strings.Cut(line, "502 Bad Gateway")
		o.failureLines = append(o.failureLines, strings.TrimSpace(cause))
	}
	o.underWay = min(o.underWay, o.status[502])
	return o
}

// The promise: the only container is recreated under load, and of the calls none
// gets 404 or 500, none runs twice, and fewer than one in 1,000 gets 502, the calls
// apart that the server had when it was killed. With retry in front of the plugin
// and a connection per call none does. Docker's provider, and the file provider's.
func TestRecreateTheOnlyContainer(t *testing.T) {
	d := StartDocker(t)
	for _, tt := range []struct {
		setup setup
		hows  []int
		most  int // 502 in 1,000 calls
	}{{ours, []int{0, 1, 2}, 1}, {oursRetry, []int{0, 1}, 0}, {oursFile, []int{0, 1}, 0}} {
		t.Run(tt.setup.name, func(t *testing.T) { keepsItsPromise(t, d, tt.setup, tt.hows, tt.most) })
	}
}

func keepsItsPromise(t *testing.T, d *Docker, s setup, hows []int, most int) {
	var all outcome
	defer func() {
		t.Logf("together: %v", all)
		if (all.status[502]-all.underWay)*1000 > most*all.sent {
			t.Errorf("%v: want at most %d × 502 in 1,000, calls under way apart", all, most)
		}
	}()
	for _, how := range hows {
		t.Run(recreations[how].name, func(t *testing.T) {
			o := recreate(t, d, s, how)
			t.Log(o)
			if len(o.failureLines) > 0 {
				t.Log(strings.Join(o.failureLines, "\n"))
			}
			all.add(o)
			if o.status[404]+o.status[500]+o.status[503]+o.broken > 0 || len(o.duplicates) > 0 {
				t.Errorf("%v: want no 404, 500, 503, broken connection or second execution\n%s\n%v", o, strings.Join(o.failureLines, "\n"), o.duplicates)
			}
		})
	}
}

// TestTable measures all setups, five rounds in turns, and writes the table of
// docs/benchmarks.md: make traefik-table runs it. The ways to recreate run side by side,
// each with an engine of its own.
func TestTable(t *testing.T) {
	file := os.Getenv("MCPHEALTH_TABLE")
	if file == "" {
		t.Skip("set MCPHEALTH_TABLE to docs/benchmarks.md")
	}
	const rounds = 5
	rows := make([][]outcomes, len(setups))
	for i := range rows {
		rows[i] = make([]outcomes, len(recreations))
	}
	t.Run("measure", func(t *testing.T) {
		for how, r := range recreations {
			t.Run(r.name, func(t *testing.T) {
				t.Parallel()
				d := StartDocker(t)
				for range rounds {
					for i, s := range setups {
						o := recreate(t, d, s, how)
						t.Logf("%s, %s: %v", s.name, r.name, o)
						rows[i][how] = append(rows[i][how], o)
					}
				}
			})
		}
	})
	if t.Failed() {
		return
	}
	var b strings.Builder
	b.WriteString("| |")
	for _, r := range recreations {
		b.WriteString(" " + r.name + " |")
	}
	b.WriteString("\n|---|" + strings.Repeat("---|", len(recreations)) + "\n")
	for i, s := range setups {
		b.WriteString("| " + s.name + " |")
		for _, o := range rows[i] {
			b.WriteString(" " + o.cell() + " |")
		}
		b.WriteString("\n")
	}
	replaceTable(t, file, "traefik-table", b.String())
}

// replaceTable puts a table into a page, between the comments that name it.
func replaceTable(t *testing.T, file, name, table string) {
	t.Helper()
	page, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(page), "<!-- "+name+" -->\n")
	_, after, ended := strings.Cut(rest, "<!-- /"+name+" -->")
	if !ok || !ended {
		t.Fatalf("%s has no comments %q; the table is\n%s", file, name, table)
	}
	if err := os.WriteFile(file, []byte(before+"<!-- "+name+" -->\n"+table+"<!-- /"+name+" -->"+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// outcomes are those of the rounds of one cell.
type outcomes []outcome

// cell says how many calls failed in a round, by which statuses, and the slowest answer.
func (all outcomes) cell() string {
	var sum outcome
	var failed, slowest []float64
	for _, o := range all {
		sum.add(o)
		failed = append(failed, float64(o.sent-o.ok))
		slowest = append(slowest, o.slowest.Seconds())
	}
	how := sum.how()
	if how != "" {
		how = ": " + how
	}
	sort.Float64s(slowest)
	return fmt.Sprintf("%s%s; %.1f s", spread(failed, nil, "%.0f"), how, slowest[len(slowest)/2])
}

// how is by what calls failed.
func (o outcome) how() string {
	var parts []string
	for _, code := range []int{404, 500, 502, 503, 504} {
		n := o.status[code]
		switch {
		case n == 0:
		case code == 502:
			parts = append(parts, fmt.Sprintf("502 (%d of %d under way, %d executed)", o.underWay, n, o.executed))
		default:
			parts = append(parts, strconv.Itoa(code))
		}
	}
	if o.broken > 0 {
		parts = append(parts, fmt.Sprintf("%d broken", o.broken))
	}
	if n := len(o.duplicates); n > 0 {
		parts = append(parts, fmt.Sprintf("%d executed twice", n))
	}
	return strings.Join(parts, ", ")
}
