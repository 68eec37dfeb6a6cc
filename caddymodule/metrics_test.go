package caddymodule

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// scrape is what the registry of the running configuration has of ours, by name and
// labels as Prometheus writes them.
func scrape(t testing.TB) map[string]float64 {
	t.Helper()
	ctx := caddy.ActiveContext()
	families, err := ctx.GetMetricsRegistry().Gather()
	require.NoError(t, err)
	all := map[string]float64{}
	for _, f := range families {
		name, ours := strings.CutPrefix(f.GetName(), "caddy_mcp_health_")
		if !ours {
			continue
		}
		for _, m := range f.GetMetric() {
			var labels []string
			for _, l := range m.GetLabel() {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			key := name
			if labels != nil {
				key += "{" + strings.Join(labels, ",") + "}"
			}
			switch {
			case m.GetHistogram() != nil:
				all[key] = float64(m.GetHistogram().GetSampleCount())
			case m.GetCounter() != nil:
				all[key] = m.GetCounter().GetValue()
			default:
				all[key] = m.GetGauge().GetValue()
			}
		}
	}
	return all
}

// answering answers clients with one status, type and body.
func answering(status int, media, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", media)
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

// events answers with this event, its bytes one by one.
func events(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := range len(body) {
			io.WriteString(w, body[i:i+1])
			http.NewResponseController(w).Flush()
		}
	}
}

// The outcome of each request is counted by what its answer says, and what it says
// reaches the client as it was.
func TestOutcomes(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	const (
		toolError = `{"jsonrpc":"2.0","id":1,"result":{"content":[],"isError":true}}`
		internal  = `{"jsonrpc":"2.0","id":1,"error":{"code":-32603,"message":"x"}}`
		notOurs   = `{"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"x"}}`
	)
	tests := []struct {
		name    string
		answer  http.HandlerFunc
		outcome mcphealth.Outcome
		wasted  bool // it costs error budget
	}{
		{"a result", nil, mcphealth.OutcomeOK, false},
		{"a tool that fails", answering(200, "application/json", toolError), mcphealth.OutcomeToolError, false},
		{"an internal error", answering(200, "application/json; charset=utf-8", internal), mcphealth.OutcomeRPCError, true},
		{"a wrong call", answering(200, "application/json", notOurs), mcphealth.OutcomeRPCError, false},
		{"a tool that fails, as an event", events(": hi\r\n\r\nevent: message\r\ndata: " + toolError + "\r\n\r\n"), mcphealth.OutcomeToolError, false},
		{"an internal error, as an event", events("data: {\"jsonrpc\":\"2.0\",\"method\":\"x\"}\n\ndata: " + internal + "\n\n"), mcphealth.OutcomeRPCError, true},
		{"accepted", answering(202, "", ""), mcphealth.OutcomeOK, false},
		{"not found", answering(404, "application/json", notOurs), mcphealth.OutcomeHTTPError, false},
		{"a crash", answering(500, "text/plain", "oops"), mcphealth.OutcomeHTTPError, true},
		{"a page", answering(200, "text/html", internal), mcphealth.OutcomeOK, false},
		{"compressed", func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "x-ours")
			answering(200, "application/json", internal)(w, nil)
		}, mcphealth.OutcomeOK, false},
		{"it breaks off", func(w http.ResponseWriter, _ *http.Request) {
			answering(200, "application/json", internal[:20])(w, nil)
			http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}, mcphealth.OutcomeHTTPError, true},
	}
	series := func(o mcphealth.Outcome) string {
		return fmt.Sprintf(`requests_total{outcome=%q,path="/mcp",upstream=%q}`, o, a.addr)
	}
	for _, tt := range tests {
		a.on(tt.answer)
		before, wasted := scrape(t), endpointAt(t, "/mcp").wasted.Load()
		e.try(http.MethodPost, "/mcp", callBody("1"))
		eventually(t, func() bool { return scrape(t)[series(tt.outcome)] == before[series(tt.outcome)]+1 }, "%s is not counted as %s", tt.name, tt.outcome)
		after := scrape(t)
		for _, o := range mcphealth.Outcomes() {
			if o != tt.outcome {
				require.Equal(t, before[series(o)], after[series(o)], "%s counts as %s, too", tt.name, o)
			}
		}
		if tt.wasted {
			wasted++
		}
		require.Equal(t, wasted, endpointAt(t, "/mcp").wasted.Load(), tt.name)
	}
}

func endpointAt(t *testing.T, path string) *endpoint {
	t.Helper()
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	require.NotNil(t, ledger.endpoints[path], path)
	return ledger.endpoints[path]
}

// What no upstream answered is counted, too: with the one that was at fault, or with
// none.
func TestUnavailableIsCounted(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", guarded("hold 0", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	a.kill()
	waitState(t, a.addr, mcphealth.Down)
	require.Equal(t, http.StatusServiceUnavailable, e.call("1").status)
	got := scrape(t)
	require.EqualValues(t, 1, got[`requests_total{outcome="unavailable",path="/mcp",upstream=""}`])
	require.EqualValues(t, 0, got[`requests_total{outcome="unavailable",path="/mcp",upstream="`+a.addr+`"}`])
	require.EqualValues(t, 0, got[`upstream_up{path="/mcp",upstream="`+a.addr+`"}`])
	require.EqualValues(t, 1, got[`upstream_state{path="/mcp",state="down",upstream="`+a.addr+`"}`])
	require.EqualValues(t, 1, got[`transitions_total{path="/mcp",reason="refused",to="down",upstream="`+a.addr+`"}`])
	require.Greater(t, got[`probes_total{path="/mcp",reason="refused",upstream="`+a.addr+`",verdict="dead"}`], 0.)
	require.Greater(t, got[`burn_rate{path="/mcp",window="5m"}`], 0., "the outage burns no budget")

	a.revive()
	a.on(func(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) })
	waitState(t, a.addr, mcphealth.Up)
	require.Equal(t, http.StatusBadGateway, e.call("1").status)
	require.EqualValues(t, 1, scrape(t)[`requests_total{outcome="unavailable",path="/mcp",upstream="`+a.addr+`"}`])
}

func TestHeldIsMeasured(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", guarded("hold 10s", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	before := scrape(t)["hold_seconds"]
	a.kill()
	waitState(t, a.addr, mcphealth.Down)
	done := make(chan reply, 1)
	go func() { done <- e.call("1") }()
	eventually(t, func() bool { return scrape(t)["held_requests"] == 1 }, "nothing is held")
	require.EqualValues(t, 1, endpoints()[0].HeldRequests)
	a.revive()
	require.Equal(t, http.StatusOK, (<-done).status)
	eventually(t, func() bool { return scrape(t)["held_requests"] == 0 }, "still held")
	require.Equal(t, before+1, scrape(t)["hold_seconds"])
	require.EqualValues(t, 1, scrape(t)[`requests_total{outcome="ok",path="/mcp",upstream="`+a.addr+`"}`])
}

// Counters go on over a reload, also where the settings change; the series of an
// upstream go with it.
func TestMetricsOverReloads(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	site := func(interval string, addrs ...string) string {
		return "mcp_proxy " + strings.Join(addrs, " ") + " {\ncheck_interval " + interval + "\n}"
	}
	e := newEdge(t, "", site("1h", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	for range 10 {
		e.call("1")
	}
	count := func(got map[string]float64, name, addr string) (n float64) {
		for key, v := range got {
			if strings.HasPrefix(key, name+"{") && strings.Contains(key, strconv.Quote(addr)) {
				n += v
			}
		}
		return n
	}
	before := scrape(t)
	require.EqualValues(t, 10, count(before, "requests_total", a.addr)+count(before, "requests_total", b.addr))
	e.load("", site("2h", a.addr)) // another question to a, none to b
	eventually(t, func() bool {
		got := scrape(t)
		return count(got, "probes_total", a.addr) == 2 && count(got, "upstream_up", a.addr) == 1
	}, "probes are not counted on: %v", scrape(t))
	got := scrape(t)
	require.Equal(t, count(before, "requests_total", a.addr), count(got, "requests_total", a.addr))
	for key := range got {
		require.NotContains(t, key, b.addr, "a series of an upstream that is gone")
	}
	e.load("", site("2h", b.addr))
	eventually(t, func() bool { return count(scrape(t), "upstream_up", b.addr) == 1 }, "it did not come back")
	require.Equal(t, count(before, "requests_total", b.addr), count(scrape(t), "requests_total", b.addr))
	e.load("", `respond "no upstreams"`)
	require.Zero(t, count(scrape(t), "upstream_up", b.addr))
}

// Two sites that ask one upstream in different ways share its series, and the worse
// state shows.
func TestOneSeriesForEachUpstream(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "b.example" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		a.answer(w, r)
	})
	newEdge(t, "", `mcp_proxy /a* `+a.addr+` {
		check_host a.example
	}
	mcp_proxy /b* `+a.addr+` {
		check_host b.example
	}`)
	eventually(t, func() bool {
		up := 0
		for _, s := range snapshots(a.addr) {
			if s.State == mcphealth.Up {
				up++
			}
		}
		return len(snapshots(a.addr)) == 2 && up == 1
	}, "want two checkers")
	eventually(t, func() bool {
		return scrape(t)[`probe_duration_seconds{path="/mcp",upstream="`+a.addr+`"}`] >= 2
	}, "probes are not counted together")
	require.EqualValues(t, 0, scrape(t)[`upstream_up{path="/mcp",upstream="`+a.addr+`"}`])
}

// Several reverse proxies may have different servers under one path: each says whether
// it has an upstream left.
func TestPeersUp(t *testing.T) {
	a, b, c := newServer(t, "a"), newServer(t, "b"), newServer(t, "c")
	newEdge(t, "", "mcp_proxy /a* "+a.addr+"\nmcp_proxy /b* "+b.addr+" "+c.addr)
	for _, s := range []*server{a, b, c} {
		waitState(t, s.addr, mcphealth.Up)
	}
	a.kill()
	b.kill()
	waitState(t, a.addr, mcphealth.Down)
	waitState(t, b.addr, mcphealth.Down)
	got := scrape(t)
	for addr, want := range map[string]float64{a.addr: 0, b.addr: 1, c.addr: 1} {
		n, ok := got[`upstream_peers_up{path="/mcp",upstream="`+addr+`"}`]
		require.True(t, ok, "no series for %s", addr)
		require.Equal(t, want, n, addr)
	}
}

// An endpoint whose source gives no upstream any more fails its clients all the same:
// its budget burns where everybody looks.
func TestEndpointWithoutUpstreams(t *testing.T) {
	list()
	e := newEdge(t, "", `mcp_status /status
	mcp_guard {
		hold 0
	}
	reverse_proxy {
		dynamic test
		lb_policy mcp_health
	}`)
	require.Empty(t, endpoints(), "nobody has asked")
	for range 2 { // one alone burns nothing
		require.Equal(t, http.StatusServiceUnavailable, e.call("1").status)
	}
	eventually(t, func() bool { eps := endpoints(); return len(eps) == 1 && eps[0].Requests.Unavailable == 2 }, "it is not there")
	eps := endpoints()
	require.Equal(t, mcphealth.StateUnknown, eps[0].State)
	require.NotNil(t, eps[0].Upstreams)
	require.Greater(t, *eps[0].Availability[0].BurnRate, 14.4)
	require.Equal(t, *eps[0].Availability[0].BurnRate, scrape(t)[`burn_rate{path="/mcp",window="5m"}`])
	var doc statusDocument
	require.NoError(t, json.Unmarshal([]byte(e.do(http.MethodGet, "/status", "", "Accept", "application/json").body), &doc))
	require.Len(t, doc.Pools, 1)
	require.Equal(t, "No upstream can be checked", doc.Headline)
	require.Contains(t, e.do(http.MethodGet, "/status", "", "Accept", "text/html").body, "Its source names no upstream")
	require.Len(t, doc.Endpoints, 1)
	require.EqualValues(t, 2, doc.Endpoints[0].Requests.Unavailable)
}

// A server that calls itself something else in each answer gets no new series each
// time, and none that Prometheus could not read.
func TestNamesOfServersAreBounded(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(func(w http.ResponseWriter, r *http.Request) {
		name := fmt.Sprint(a.probes.Load(), "\"\\\n<script>\x00", strings.Repeat("é", 500))
		result := `{"supportedVersions":["2026-07-28"],"capabilities":{},"serverInfo":{"name":` + string(must(json.Marshal(name))) + `,"version":"\ud800"}}`
		var m struct{ ID json.RawMessage }
		require.NoError(t, json.NewDecoder(r.Body).Decode(&m))
		answering(200, "application/json", `{"jsonrpc":"2.0","id":`+string(m.ID)+`,"result":`+result+`}`)(w, r)
	})
	newEdge(t, "", `mcp_proxy `+a.addr+` {
		check_interval 10ms
	}`)
	seen := map[string]bool{}
	eventually(t, func() bool {
		for key := range scrape(t) {
			if strings.HasPrefix(key, "upstream_info{") {
				seen[key] = true
			}
		}
		return a.probes.Load() > 3*maxInfos && len(seen) > maxInfos
	}, "want more than %d names, have %d", maxInfos, len(seen))
	time.Sleep(50 * time.Millisecond)
	for key := range scrape(t) {
		if strings.HasPrefix(key, "upstream_info{") {
			seen[key] = true
		}
	}
	for key := range seen {
		require.NotContains(t, key, "\x00")
		require.Less(t, len(key), 500)
	}
	require.LessOrEqual(t, len(seen), 2*maxInfos, "each name is a series: %v", slices.Collect(maps.Keys(seen)))
}

// Admin API and metrics have the same numbers.
func TestNumbersAreTheSame(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	e := newEdge(t, "", guarded("hold 0", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	b.on(answering(200, "application/json", `{"jsonrpc":"2.0","id":1,"result":{"isError":true}}`))
	for range 20 {
		e.call("1")
	}
	b.kill()
	waitState(t, b.addr, mcphealth.Down)
	a.kill()
	waitState(t, a.addr, mcphealth.Down)
	e.call("1")
	eventually(t, func() bool { return adminAgainstMetrics(t) == "" }, "admin and metrics differ: %v", lazy(func() string { return adminAgainstMetrics(t) }))
}

// lazy is a text that is made when it is needed.
type lazy func() string

func (l lazy) String() string { return l() }

// adminAgainstMetrics says where they differ; probes go on meanwhile.
func adminAgainstMetrics(t *testing.T) string {
	want := map[string]float64{}
	_, body := admin(t, http.MethodGet, "/mcp_health/endpoints")
	var eps []endpointStatus
	require.NoError(t, json.Unmarshal([]byte(body), &eps))
	require.Len(t, eps, 1)
	require.Len(t, eps[0].Upstreams, 2)
	require.Len(t, eps[0].Availability, 5)
	requests := requestCounts{}
	for _, u := range eps[0].Upstreams {
		key := func(name, labels string) string {
			return fmt.Sprintf(`%s{%s,upstream=%q}`, name, labels, u.Upstream)
		}
		want[key("upstream_up", `path="/mcp"`)] = 0
		for _, p := range u.ProbeCounts {
			want[fmt.Sprintf(`probes_total{path="/mcp",reason=%q,upstream=%q,verdict=%q}`, p.Reason, u.Upstream, p.Verdict)] = float64(p.Count)
		}
		for _, c := range u.Transitions {
			want[fmt.Sprintf(`transitions_total{path="/mcp",reason=%q,to=%q,upstream=%q}`, c.Reason, c.To, u.Upstream)] = float64(c.Count)
		}
		want[key("probe_duration_seconds", `path="/mcp"`)] = float64(u.Probes)
		want[key("probe_interval_seconds", `path="/mcp"`)] = u.IntervalS
		for o, n := range map[string]uint64{"ok": u.Requests.OK, "tool_error": u.Requests.ToolError, "unavailable": u.Requests.Unavailable} {
			want[key("requests_total", fmt.Sprintf(`outcome=%q,path="/mcp"`, o))] = float64(n)
		}
		requests.OK += u.Requests.OK
		requests.ToolError += u.Requests.ToolError
		require.NotEmpty(t, u.History)

		_, body := admin(t, http.MethodGet, "/mcp_health/upstreams/"+u.ID)
		var one upstreamDetail
		require.NoError(t, json.Unmarshal([]byte(body), &one))
		if !reflect.DeepEqual(u, one) {
			return fmt.Sprintf("upstream %+v in the list of endpoints, %+v alone", u, one)
		}
	}
	require.Equal(t, eps[0].Requests.OK, requests.OK)
	require.Equal(t, eps[0].Requests.ToolError, requests.ToolError)
	require.EqualValues(t, 1, eps[0].Requests.Unavailable)
	require.EqualValues(t, 20, requests.OK+requests.ToolError)
	for _, w := range eps[0].Availability {
		require.NotNil(t, w.BurnRate)
		require.EqualValues(t, 21, w.Traffic.Total)
		want[`burn_rate{path="/mcp",window="`+w.Window+`"}`] = *w.BurnRate
	}
	got := scrape(t)
	for key, v := range want {
		if have, ok := got[key]; !ok || have != v && !(strings.HasPrefix(key, "burn_rate") && math.Abs(have-v) < 0.05*v) {
			return fmt.Sprintf("%s = %v, want %v", key, have, v)
		}
	}
	return ""
}

// Whoever subscribes is told once of any number of changes.
func TestObserversAreTold(t *testing.T) {
	changed, cancel := observers.subscribe()
	a := newServer(t, "a")
	newEdge(t, "", guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	<-changed
	for range 1000 {
		observers.notify()
	}
	<-changed
	cancel()
	observers.notify()
	select {
	case <-changed:
		t.Error("told after the subscription ended")
	default:
	}
}
