package caddymodule

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/docs"
	"github.com/mcphealth/mcphealth/mcphealth"
)

// statusSite is a site with the page and a proxy to these upstreams.
func statusSite(options string, addrs ...string) string {
	return `mcp_status /status {
		` + options + `
	}
	reverse_proxy ` + strings.Join(addrs, " ") + ` {
		lb_policy mcp_health {
			path /mcp?key=hidden-in-query
			header Authorization "Bearer hidden-in-header"
			interval 1h
			fast 20ms
			fall 1
			watch off
		}
	}`
}

func hostile(w http.ResponseWriter, r *http.Request) {
	var m struct {
		ID json.RawMessage `json:"id"`
	}
	_ = json.NewDecoder(r.Body).Decode(&m)
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28","</style><script>alert(2)</script>"],"capabilities":{},
		"serverInfo":{"name":"<script>alert(1)</script>","version":"\"><img src=x onerror=alert(3)>"}}}`, m.ID)
}

func TestStatusEscapes(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	a.onProbe(hostile)
	b.onProbe(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "<script>alert(4)</script>", http.StatusBadRequest)
	})
	e := newEdge(t, "", statusSite("", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	eventually(t, func() bool { return b.probes.Load() > 0 && snapshots(b.addr)[0].Probes > 0 }, "b was not probed")

	page := e.do(http.MethodGet, "/status?q="+`%22%3E%3Cscript%3Ealert(5)%3C/script%3E`, "")
	require.Equal(t, http.StatusOK, page.status)
	require.Equal(t, 1, strings.Count(page.body, "<script>"), "only the page's own")
	require.Contains(t, page.body, "&lt;script&gt;alert(1)&lt;/script&gt;")
	require.NotContains(t, page.body, "<img")
	for _, accept := range []string{"text/html", "application/json"} {
		body := e.do(http.MethodGet, "/status", "", "Accept", accept).body
		require.NotContains(t, body, "<script>alert", accept)
		require.NotContains(t, body, "hidden-in", "a secret in %s", accept)
	}
	for _, path := range []string{"/mcp_health/upstreams", "/mcp_health/upstreams/" + endpoints()[0].Upstreams[0].ID, "/mcp_health/endpoints"} {
		_, body := admin(t, http.MethodGet, path)
		require.Contains(t, body, "/mcp?…")
		require.NotContains(t, body, "hidden-in", "a secret in %s", path)
	}
	require.EqualValues(t, 1, scrape(t)[`upstream_up{path="/mcp?…",upstream="`+a.addr+`"}`])
	for series := range scrape(t) {
		require.NotContains(t, series, "hidden-in", "a secret in the metrics")
	}
	frame := listen(t, e, "/status").next(t, "render")
	require.NotContains(t, frame, "<script>")
	require.NotContains(t, frame, "hidden-in")
}

// The page says by its policy that nothing but what is in it may run, and nothing in
// it needs more.
func TestStatusPolicy(t *testing.T) {
	e := newEdge(t, "", statusSite("", newServer(t, "a").addr))
	r := e.do(http.MethodGet, "/status", "")
	policy := r.header.Get("Content-Security-Policy")
	require.NotContains(t, policy, "unsafe")
	require.Contains(t, policy, "default-src 'none'")
	for _, tag := range []string{"style", "script"} {
		blocks := regexp.MustCompile(`(?s)<`+tag+`>(.*?)</`+tag+`>`).FindAllStringSubmatch(r.body, -1)
		require.Len(t, blocks, 1)
		require.Contains(t, policy, tag+"-src 'sha256-"+hashOf(blocks[0][1])+"'")
	}
	markup := regexp.MustCompile(`(?s)<(style|script)>.*?</(style|script)>`).ReplaceAllString(r.body, "")
	require.NotRegexp(t, `\s(style|on[a-z]+)=`, markup)
	require.NotRegexp(t, `(src|action)="(?:https?:)?//`, markup)
	for _, m := range regexp.MustCompile(`<(\w+)[^>]* href="(?:https?:)?//`).FindAllStringSubmatch(markup, -1) {
		require.Equal(t, "a", m[1], "a link to follow, and nothing to load")
	}
	require.NotContains(t, r.body, "ZgotmplZ")
	require.Equal(t, "no-store", r.header.Get("Cache-Control"))
	require.Equal(t, "nosniff", r.header.Get("X-Content-Type-Options"))
}

func TestStatusPublic(t *testing.T) {
	a := newServer(t, "a")
	gone := freeAddr(t)
	e := newEdge(t, "", statusSite("public on", a.addr, gone))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, gone, mcphealth.Down)
	stream := listen(t, e, "/status")
	texts := map[string]string{
		"page": e.do(http.MethodGet, "/status", "").body, "JSON": e.do(http.MethodGet, "/status", "", "Accept", "application/json").body,
		"stream": stream.next(t, "render"),
	}
	a.onProbe(html)
	checkers.list()[0].checker.Probe()
	checkers.list()[1].checker.Probe()
	texts["change"] = stream.next(t, "change")
	require.Contains(t, texts["change"], "not_mcp")
	for what, text := range texts {
		require.NotContains(t, text, "127.0.0.1", what)
		require.NotContains(t, text, `"fake"`, what)
		for _, entry := range checkers.list() {
			require.NotContains(t, text, entry.id, what)
			_, port, _ := strings.Cut(entry.upstream, ":")
			require.NotContains(t, text, port, what)
		}
	}
	require.Contains(t, texts["page"], "upstream 2")
	require.Contains(t, texts["page"], "Nothing listens there")
}

func TestStatusJSON(t *testing.T) {
	a, gone := newServer(t, "a"), freeAddr(t)
	e := newEdge(t, "", statusSite("", a.addr, gone))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, gone, mcphealth.Down)
	probed := func() uint64 {
		all := endpoints()[0].Upstreams
		return all[0].Probes + all[1].Probes
	}
	before := probed()
	r := e.do(http.MethodGet, "/status", "", "Accept", "application/json")
	after := probed()
	require.Equal(t, "application/json", r.header.Get("Content-Type"))
	var doc statusDocument
	require.NoError(t, json.Unmarshal([]byte(r.body), &doc))
	require.Equal(t, mcphealth.UpDegraded, doc.State)
	require.Equal(t, "1 of 2 upstreams is down", doc.Headline)
	require.Equal(t, statusCounts{Total: 2, Up: 1, Down: 1}, doc.Counts)
	require.Len(t, doc.Pools, 1)
	worst := doc.Pools[0].Upstreams[0]
	require.Equal(t, gone, worst.Upstream)
	require.Equal(t, mcphealth.Refused, worst.Reason)
	meaning, advice := docs.Words("refused")
	require.Equal(t, [2]string{meaning, advice}, [2]string{worst.Meaning, worst.Advice})
	require.Equal(t, snapshots(gone)[0].Since.UnixMilli(), doc.Since.UnixMilli())

	// The numbers are those of the admin API.
	admin := endpoints()
	require.Len(t, doc.Endpoints, len(admin))
	require.Equal(t, admin[0].Requests, doc.Endpoints[0].Requests)
	require.Len(t, doc.Endpoints[0].Availability, len(admin[0].Availability))
	require.Len(t, doc.Endpoints[0].LastHour, 60)
	require.Len(t, doc.Endpoints[0].Last3Days, 72)
	shown := doc.Pools[0].Upstreams[0].Probes + doc.Pools[0].Upstreams[1].Probes
	require.True(t, before <= shown && shown <= after, "%d probes, want %d to %d: as many as there were", shown, before, after)
}

func TestStatusMethods(t *testing.T) {
	e := newEdge(t, "", "mcp_status /status")
	r := e.do(http.MethodPost, "/status", "x")
	require.Equal(t, http.StatusMethodNotAllowed, r.status)
	require.Equal(t, "GET, HEAD", r.header.Get("Allow"))
	for _, accept := range []string{"text/html", "application/json", "text/event-stream"} {
		r = e.do(http.MethodHead, "/status", "", "Accept", accept)
		require.Equal(t, http.StatusOK, r.status)
		require.Empty(t, r.body)
		require.Contains(t, r.header.Get("Content-Type"), accept)
	}
	require.Contains(t, e.do(http.MethodGet, "/status", "").body, "No MCP endpoint is checked")
}

func TestPreferred(t *testing.T) {
	tests := []struct{ accept, want string }{
		{"", typeHTML},
		{"*/*", typeHTML},
		{"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", typeHTML},
		{"application/json", typeJSON},
		{"application/json, */*", typeHTML},
		{"application/json, text/html;q=0.9", typeJSON},
		{"application/*;q=0.5", typeJSON},
		{"text/event-stream", typeStream},
		{"text/*", typeHTML},
		{"application/json;q=x, nonsense/;;", typeHTML},
		{"application/json;q=0", typeHTML},
	}
	for _, tt := range tests {
		if got := preferred([]string{tt.accept}); got != tt.want {
			t.Errorf("preferred(%q) = %q, want %q", tt.accept, got, tt.want)
		}
	}
}

// stream is an open stream of a client.
type stream struct {
	resp  *http.Response
	lines *bufio.Reader
}

func listen(t testing.TB, e *edge, path string) *stream {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, e.url+path, nil)
	require.NoError(t, err)
	req.Header.Set("Accept", "text/event-stream")
	var resp *http.Response
	eventually(t, func() bool { // a reload may reset a connection
		resp, err = (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}).Do(req)
		return err == nil
	}, "no stream: %v", &err)
	t.Cleanup(func() { resp.Body.Close() })
	return &stream{resp, bufio.NewReader(resp.Body)}
}

// next reads up to the next event of this name and returns its data.
func (s *stream) next(t testing.TB, name string) string {
	t.Helper()
	data, err := s.tryNext(name)
	require.NoError(t, err, "the stream ended before an event %q", name)
	return data
}

func (s *stream) tryNext(name string) (data string, err error) {
	event := ""
	for {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			return "", err
		}
		if v, ok := strings.CutPrefix(line, "event: "); ok {
			event = strings.TrimSpace(v)
		}
		if v, ok := strings.CutPrefix(line, "data: "); ok && event == name {
			return v, nil
		}
	}
}

func (s *stream) ended() bool {
	_, err := io.Copy(io.Discard, s.lines)
	return err == nil
}

func TestStatusStream(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", statusSite("", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	s := listen(t, e, "/status")
	require.Equal(t, http.StatusOK, s.resp.StatusCode)
	require.Contains(t, s.resp.Header.Get("Cache-Control"), "no-store")

	var all render
	require.NoError(t, json.Unmarshal([]byte(s.next(t, "render")), &all))
	id := "p1-" + checkers.list()[0].id
	require.Equal(t, []string{id}, all.Order["p1-calm"])
	require.Contains(t, all.Parts[id], a.addr)
	require.Contains(t, all.Title, "✓")

	a.onProbe(html)
	checkers.list()[0].checker.Probe()
	var c statusChange
	require.NoError(t, json.Unmarshal([]byte(s.next(t, "change")), &c))
	require.Equal(t, mcphealth.Down, c.To)
	require.Equal(t, mcphealth.NotMCP, c.Reason)
	var now render
	require.NoError(t, json.Unmarshal([]byte(s.next(t, "render")), &now))
	require.Equal(t, []string{id}, now.Order["p1-bad"])
	require.Contains(t, now.Parts[id], "Check address and path")
	require.Contains(t, now.Title, "✕")

	// it ends with the configuration, and the next one serves
	e.load("", statusSite("public off", a.addr)+"\nrespond /x y")
	require.True(t, s.ended(), "the stream was cut, not ended")
	eventually(t, func() bool { // the server of before may take one more, whose stream ends at once
		_, err := listen(t, e, "/status").tryNext("render")
		return err == nil
	}, "no stream after a reload")
}

func TestStatusStreamsEndWithTheProcess(t *testing.T) {
	e := newEdge(t, "grace_period 20s", "mcp_status /status")
	s := listen(t, e, "/status")
	s.next(t, "render")
	start := time.Now()
	require.NoError(t, caddy.Stop())
	require.True(t, s.ended())
	require.Less(t, time.Since(start), 10*time.Second, "the stop waited for a stream")
}

func TestStatusListenersAreBounded(t *testing.T) {
	e := newEdge(t, "", "mcp_status /status")
	serving := func() (n int) { // all goroutines would be Caddy's and the client's, too
		buf := make([]byte, 4<<20)
		for _, stack := range strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n") {
			if strings.Contains(stack, "caddymodule.(*hub)") || strings.Contains(stack, "caddymodule.(*Status)") {
				n++
			}
		}
		return n
	}
	var open []*stream
	for range maxListeners {
		s := listen(t, e, "/status")
		s.next(t, "render")
		open = append(open, s)
	}
	require.Greater(t, serving(), maxListeners)
	r := e.do(http.MethodGet, "/status", "", "Accept", "text/event-stream")
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Equal(t, "10", r.header.Get("Retry-After"))
	require.Equal(t, http.StatusOK, e.do(http.MethodGet, "/status", "").status, "the page itself is served")

	for _, s := range open {
		s.resp.Body.Close()
	}
	now := 0
	eventually(t, func() bool { now = serving(); return now == 0 }, "goroutines after all streams: %d, want none", &now)
	listen(t, e, "/status").next(t, "render")
}

// A client that does not read is hung up on, and nobody else notices.
func TestHubDropsTheSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		doc := &statusDocument{}
		h := newHub(func() *statusDocument { return doc })
		slow, ok := h.join(time.Time{})
		require.True(t, ok)
		quick, ok := h.join(time.Time{})
		require.True(t, ok)
		got := make(chan int)
		go func() {
			n := 0
			for range quick {
				n++
			}
			got <- n
		}()
		time.Sleep(beatEvery*frameQueue + time.Second)
		n := 0
		for range slow { // it ends, for it was closed
			n++
		}
		require.Equal(t, frameQueue, n)
		h.close()
		require.Equal(t, 1+frameQueue, <-got, "a frame and the beats")
		_, ok = h.join(time.Time{})
		require.False(t, ok, "the hub is closed")
	})
}

// Each reason has a meaning and an advice for whoever is woken by it.
func TestReasonsHaveWords(t *testing.T) {
	for _, v := range mcphealth.Verdicts() {
		for _, r := range mcphealth.ReasonsOf(v) {
			meaning, advice := docs.Words(string(r))
			require.NotEmpty(t, meaning, r)
			require.NotEmpty(t, advice, r)
		}
	}
}

// pool makes one of upstreams in these states: u up, d down, s slow, ? unknown,
// x draining, o overdue.
func poolOf(path, states string) statusPool {
	p := statusPool{Path: path, id: path}
	for i, s := range states {
		u := statusUpstream{id: fmt.Sprint(path, i)}
		u.Upstream, u.State, u.Reason = fmt.Sprintf("%s-%d", path, i), mcphealth.Up, mcphealth.OK
		u.Since = time.Unix(int64(i), 0)
		switch s {
		case 'd':
			u.State, u.Reason = mcphealth.Down, mcphealth.Refused
		case 's':
			u.State, u.Reason = mcphealth.UpDegraded, mcphealth.Slow
		case '?':
			u.State, u.Reason = mcphealth.StateUnknown, mcphealth.NeverProbed
		case 'x':
			u.Draining = true
		case 'o':
			u.Overdue = true
		}
		p.Counts.count(u)
		p.Upstreams = append(p.Upstreams, u)
	}
	p.State = p.Counts.state()
	p.Since = p.since()
	return p
}

func TestHeadline(t *testing.T) {
	tests := []struct {
		pools string
		want  string
		state mcphealth.State
		since int64 // Unix seconds; -1: none
	}{
		{"", "No MCP endpoint is checked", mcphealth.StateUnknown, -1},
		{"u", "The upstream is up", mcphealth.Up, -1},
		{"u uu", "All 3 upstreams are up", mcphealth.Up, -1},
		{"u ux", "All 3 upstreams are up", mcphealth.Up, -1},
		{"d", "0 is down", mcphealth.Down, 0},
		{"udd", "2 of 3 upstreams are down", mcphealth.UpDegraded, 1},
		{"u dd", "1 is down", mcphealth.Down, 1},
		{"d d uu", "2 of 3 pools are down", mcphealth.Down, 0},
		{"su", "1 of 2 upstreams is degraded", mcphealth.UpDegraded, 0},
		{"s", "The upstream is degraded", mcphealth.UpDegraded, 0},
		{"u??", "2 of 3 upstreams are not known yet", mcphealth.StateUnknown, 1},
		{"u -", "1 has no upstream that is known", mcphealth.StateUnknown, -1}, // - is none
		{"uo", "1 of 2 upstreams is not probed any more", mcphealth.StateUnknown, 1},
	}
	for _, tt := range tests {
		d := &statusDocument{}
		for i, states := range strings.Fields(tt.pools) {
			d.Pools = append(d.Pools, poolOf(fmt.Sprint(i), strings.Trim(states, "-")))
		}
		d.conclude()
		since := int64(-1)
		if d.Since != nil {
			since = d.Since.Unix()
		}
		if d.Headline != tt.want || d.State != tt.state || since != tt.since {
			t.Errorf("%q: %q, %s since %d; want %q, %s since %d", tt.pools, d.Headline, d.State, since, tt.want, tt.state, tt.since)
		}
	}
}

func TestNumbersOnThePage(t *testing.T) {
	share := func(f float64) *float64 { return &f }
	for _, tt := range []struct{ got, want string }{
		{inPercent(share(1)), "100%"},
		{inPercent(share(0.99999)), "99.99%"}, // what is not whole does not look so
		{inPercent(share(0.9995)), "99.95%"},
		{inPercent(share(0)), "0%"},
		{inPercent(nil), "–"},
		{asRate(share(0)), "0×"},
		{asRate(share(0.004)), "<0.1×"},
		{asRate(share(1.26)), "1.3×"},
		{asRate(share(1000)), "1000×"},
		{inMilliseconds(0.123), "0.12 ms"},
		{inMilliseconds(4.56), "4.6 ms"},
		{inMilliseconds(1234.5), "1235 ms"},
		{span(59 * time.Second), "59 s"},
		{span(47 * time.Hour), "47 h 0 min"},
		{span(49 * time.Hour), "2 d 1 h"},
		{someOf([]string{"b", "a"}), "a, b"},
		{someOf([]string{"e", "d", "c", "b", "a"}), "a, b, c and 2 more"},
	} {
		require.Equal(t, tt.want, tt.got)
	}
}

// fleet is a document of n upstreams in one pool, of which some are down.
func fleet(n, down int) *statusDocument {
	p := poolOf("/mcp", strings.Repeat("d", down)+strings.Repeat("u", n-down))
	for i := range p.Upstreams {
		u := &p.Upstreams[i]
		for range maxHistory {
			u.upstreamDetail.History = append(u.upstreamDetail.History, probeSample{Ms: float64(i % 7), Verdict: mcphealth.Ready, Reason: mcphealth.OK})
		}
	}
	d := &statusDocument{At: time.Now(), Pools: []statusPool{p}}
	d.conclude()
	return d
}

func TestStatusShowsTheWorstOfMany(t *testing.T) {
	page, err := fleet(maxRows+500, 20).layout().page(pageFilter{})
	require.NoError(t, err)
	require.Equal(t, maxRows, strings.Count(string(page), `class="row `))
	require.Equal(t, 20, strings.Count(string(page), `class="row down"`))
	require.Equal(t, maxOpen, strings.Count(string(page), `data-piece open`))
	require.Contains(t, string(page), "500 more upstreams")
}

func TestStatusFilter(t *testing.T) {
	d := fleet(30, 3)
	shown := func(query string) int {
		r := httptest.NewRequest(http.MethodGet, "/status?"+query, nil)
		page, err := d.layout().page(filterOf(r.URL.Query()))
		require.NoError(t, err)
		return strings.Count(string(page), `class="row `) - len(regexp.MustCompile(`class="row [^>]* hidden>`).FindAllString(string(page), -1))
	}
	require.Equal(t, 30, shown(""))
	require.Equal(t, 3, shown("show=problems"))
	require.Equal(t, 11, shown("q=/MCP-2"))
	require.Equal(t, 3, shown("q=refused"))
	require.Equal(t, 0, shown("q=nobody"))
}

// Of many, those that need no attention are brief, until they are asked for.
func TestStatusIsBrief(t *testing.T) {
	l := fleet(maxFull+1, 1).layout()
	full := func(f pageFilter) int {
		page, err := l.page(f)
		require.NoError(t, err)
		return strings.Count(string(page), "<dl>")
	}
	require.Equal(t, 1, full(pageFilter{}))
	require.Equal(t, 2, full(pageFilter{Text: "/mcp-7"})) // and the broken one, hidden
	require.Contains(t, l.row("/mcp7"), "<dl>")
	require.Empty(t, l.row("nobody"))

	small, err := fleet(maxFull, 1).layout().page(pageFilter{})
	require.NoError(t, err)
	require.Equal(t, maxFull, strings.Count(string(small), "<dl>"))
}

// A page that has just been made gets what is new, not all of it again.
func TestHubTellsWhatIsNewer(t *testing.T) {
	d := fleet(3, 0)
	d.Pools[0].Upstreams[1].upstreamDetail.History[maxHistory-1].At = d.At
	h := newHub(func() *statusDocument { return d })
	defer h.close()
	rows := func(since time.Time) (n int) {
		frames, ok := h.join(since)
		require.True(t, ok)
		return strings.Count(string(<-frames), `class=\"row `)
	}
	require.Equal(t, 3, rows(time.Time{}.Add(-time.Hour)))
	require.Equal(t, 1, rows(d.At))
	require.Equal(t, 0, rows(d.At.Add(time.Minute)))
}

func BenchmarkStatusPage(b *testing.B) {
	for _, n := range []int{1, 500} {
		d := fleet(n, min(n, 5))
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				page, err := d.layout().page(pageFilter{})
				require.NoError(b, err)
				b.ReportMetric(float64(len(page)), "bytes")
			}
		})
	}
}

// What a look for news costs while somebody watches 500 upstreams.
func BenchmarkStatusLook(b *testing.B) {
	d := fleet(500, 5)
	h := newHub(func() *statusDocument { return d })
	_, ok := h.join(time.Time{})
	require.True(b, ok)
	defer h.close()
	for b.Loop() {
		h.mu.Lock()
		h.refresh(false)
		h.mu.Unlock()
	}
}
