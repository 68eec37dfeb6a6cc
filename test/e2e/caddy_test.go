package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// pair is two replicas behind one Caddy.
type pair struct {
	a, b  *Instance
	caddy *Caddy
	log   string // executions
}

// startPair starts two modern servers and a Caddy with site before them; {A} and
// {B} in it are their addresses. Both are up when it returns.
func startPair(t *testing.T, site string) *pair {
	t.Helper()
	p := &pair{log: filepath.Join(t.TempDir(), "executions")}
	s := Get(t, "go-sdk-v1.8.0-stateless")
	p.a = s.Start(t, FreePort(t), "--log", p.log, "--name", "a")
	p.b = s.Start(t, FreePort(t), "--log", p.log, "--name", "b")
	p.caddy = StartCaddy(t, p.site(site))
	p.caddy.AwaitState(t, p.a.Addr, "up", 5*time.Second)
	p.caddy.AwaitState(t, p.b.Addr, "up", 5*time.Second)
	return p
}

func (p *pair) site(s string) string {
	return strings.NewReplacer("{A}", p.a.Addr, "{B}", p.b.Addr).Replace(s)
}

// wantOnce checks that no call ran twice, on either server.
func (p *pair) wantOnce(t *testing.T) {
	t.Helper()
	for message, n := range Executions(t, p.log) {
		if n > 1 {
			t.Errorf("call %q was executed %d times, want at most once", message, n)
		}
	}
}

// want503 checks the answer that a client gets while nothing can serve
// (design.md §4): with its own id, and no HTML, no address.
func want503(t *testing.T, f Failure) {
	t.Helper()
	var body struct {
		ID    string `json:"id"`
		Error struct {
			Code int `json:"code"`
			Data struct {
				Reason       string `json:"reason"`
				RetryAfterMs int    `json:"retryAfterMs"`
			} `json:"data"`
		} `json:"error"`
	}
	err := json.Unmarshal(f.Body, &body)
	if f.Status != 503 || err != nil || body.ID != f.ID || body.Error.Code != 503 || body.Error.Data.Reason == "" || body.Error.Data.RetryAfterMs < 1000 ||
		f.Header.Get("Retry-After") == "" || f.Header.Get("Cache-Control") != "no-store" || f.Header.Get("X-Mcp-Health") != body.Error.Data.Reason ||
		strings.Contains(string(f.Body), "127.0.0.1") {
		t.Errorf("answer %d %v %s, want the 503 of the edge with id %q", f.Status, f.Header, f.Body, f.ID)
	}
}

// Kill -9 one of two under load: no call fails but those that were on their way
// to it at that moment, and those are not repeated.
func TestKillOneOfTwo(t *testing.T) {
	p := startPair(t, "mcp_proxy /mcp* {A} {B}")
	load := Load{URL: p.caddy.URL(), Clients: 20, Rate: 20}.Start(t)
	time.Sleep(time.Second)
	for range 5 {
		p.a.Kill(t)
		gone := time.Now() // until then a dying server's sockets still took calls
		down := p.caddy.AwaitState(t, p.a.Addr, "down", 3*time.Second)
		time.Sleep(500 * time.Millisecond)
		p.a.Restart(t)
		up := p.caddy.AwaitState(t, p.a.Addr, "up", 5*time.Second)
		t.Logf("down %s after the kill, up %s after the restart", down.Round(time.Millisecond), up.Round(time.Millisecond))
		for _, f := range load.Report().Failures {
			if f.Start.After(gone) && f.Start.Before(gone.Add(down+up)) {
				t.Errorf("a call that began after the server had gone failed: %v", f)
			}
		}
	}
	r := load.Stop()
	t.Log(r)
	for _, f := range r.Failures { // on their way to a dying server
		if f.Outcome == Transport && CheckCall(f.Body, f.ID) == nil {
			continue // answered; the server died before it could end the stream
		}
		if f.Status != 502 || !strings.Contains(string(f.Body), `"mayHaveRun":true`) {
			t.Errorf("%v: want the 502 that says it may have run; got %s", f, f.Body)
		}
	}
	if len(r.Failures)*100 > r.Sent {
		t.Errorf("%d of %d calls were caught by five kills, want less than 1 %%", len(r.Failures), r.Sent)
	}
	p.wantOnce(t)
}

// A hung server accepts and never answers. It is out within fall × timeout + one
// fast interval of the first call that it leaves waiting.
func TestHangOneOfTwo(t *testing.T) {
	p := startPair(t, "mcp_proxy /mcp* {A} {B} {\n\tcheck_timeout 1s\n}")
	load := Load{URL: p.caddy.URL(), Clients: 20, Rate: 20, Timeout: 60 * time.Second}.Start(t)
	time.Sleep(2 * time.Second)
	p.a.Pause(t)
	hung := time.Now()
	took := p.caddy.AwaitState(t, p.a.Addr, "down", 8*time.Second)
	t.Logf("down %s after the hang", took.Round(time.Millisecond))
	if limit := 2*time.Second + time.Second + 300*time.Millisecond; took > limit {
		t.Errorf("down after %s, want fall × timeout + fast = 3 s", took)
	}
	out := time.Now()
	time.Sleep(2 * time.Second)
	p.a.Continue(t)
	r := load.Stop()
	t.Log(r)
	for _, f := range r.Failures {
		if f.Start.After(out) || f.Start.Before(hung) {
			t.Errorf("a call that no hung server had failed: %v", f)
		}
	}
	p.caddy.AwaitState(t, p.a.Addr, "up", 12*time.Second)
	p.wantOnce(t)
}

// Both are killed: every answer is the edge's 503 with the caller's id. One comes
// back: the calls that were held succeed.
func TestKillBoth(t *testing.T) {
	t.Run("hold off", func(t *testing.T) {
		p := startPair(t, "mcp_proxy /mcp* {A} {B} {\n\thold 0\n}")
		p.a.Kill(t)
		p.b.Kill(t)
		r := burst(t, p.caddy, 20, time.Second)
		if r.Count[OK] != 0 || r.Count[Status] != r.Sent {
			t.Fatalf("%v, want a 503 each", r)
		}
		for _, f := range r.Failures {
			want503(t, f)
		}
	})
	t.Run("under load", func(t *testing.T) {
		p := startPair(t, "mcp_proxy /mcp* {A} {B} {\n\thold 0\n}")
		load := Load{URL: p.caddy.URL(), Clients: 20, Rate: 20}.Start(t)
		time.Sleep(time.Second)
		p.a.Kill(t)
		p.b.Kill(t)
		gone := time.Now()
		time.Sleep(2 * time.Second)
		r := load.Stop()
		t.Log(r)
		for _, f := range r.Failures {
			if f.Start.After(gone) {
				want503(t, f)
			}
		}
		if r.Count[Wrong] > 0 || r.Count[Status] == 0 {
			t.Errorf("%v, want a 503 for each call after the kill", r)
		}
		p.wantOnce(t)
	})
	t.Run("held calls succeed", func(t *testing.T) {
		p := startPair(t, "mcp_proxy /mcp* {A} {B}")
		p.a.Kill(t)
		p.b.Kill(t)
		p.caddy.AwaitState(t, p.a.Addr, "down", 5*time.Second)
		p.caddy.AwaitState(t, p.b.Addr, "down", 5*time.Second)
		load := Load{URL: p.caddy.URL(), Clients: 50, Rate: 1}.Start(t)
		time.Sleep(1500 * time.Millisecond)
		if r := load.Report(); r.Sent != 0 {
			t.Errorf("answered although nothing is there: %v", r)
		}
		p.b.Restart(t)
		p.caddy.AwaitState(t, p.b.Addr, "up", 5*time.Second)
		time.Sleep(time.Second)
		r := load.Stop()
		t.Log(r)
		if r.Sent < 50 || len(r.Failures) > 0 {
			t.Errorf("%v, want all held calls to succeed", r)
		}
		p.wantOnce(t)
	})
	t.Run("held too long", func(t *testing.T) {
		p := startPair(t, "mcp_proxy /mcp* {A} {B} {\n\thold 500ms\n}")
		p.a.Kill(t)
		p.b.Kill(t)
		r := burst(t, p.caddy, 20, 2*time.Second)
		for _, f := range r.Failures {
			want503(t, f)
			if d := f.End.Sub(f.Start); d < 400*time.Millisecond || d > 1500*time.Millisecond {
				t.Errorf("answered after %s, want about the hold of 500 ms", d)
			}
		}
		if r.Count[OK] != 0 || len(r.Failures) == 0 {
			t.Errorf("%v, want a 503 each", r)
		}
	})
}

func burst(t *testing.T, c *Caddy, clients int, d time.Duration) Report {
	t.Helper()
	load := Load{URL: c.URL(), Clients: clients, Rate: 5}.Start(t)
	time.Sleep(d)
	return load.Stop()
}

// What an upstream says decides, not its status.
func TestWhatTakesAnUpstreamOut(t *testing.T) {
	html := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<html>welcome</html>")
	}
	bearer := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("WWW-Authenticate", `Bearer resource_metadata="http://x/.well-known/oauth-protected-resource"`)
		w.WriteHeader(401)
	}
	noMethods := func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			w.WriteHeader(405)
			return
		}
		var m struct {
			ID json.RawMessage `json:"id"`
		}
		_ = json.NewDecoder(r.Body).Decode(&m)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32601,"message":"Method not found"}}`, m.ID)
	}
	tests := []struct {
		name    string
		handler http.HandlerFunc
		state   string
		reason  string
	}{
		{"HTML 200 on the MCP path", html, "down", "not_mcp"},
		{"401 with a Bearer challenge", bearer, "up", "auth_required"},
		{"405 to GET, -32601 to everything", noMethods, "up", "method_not_found"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			real := Get(t, "go-sdk-v1.8.0-stateless").Start(t, FreePort(t))
			fake := httptest.NewServer(tt.handler)
			defer fake.Close()
			addr := strings.TrimPrefix(fake.URL, "http://")
			// The default, said: without the credentials for probes that Caddys here have.
			c := StartCaddyGlobal(t, "\tmcp_health {\n\t\tobjective 0.999\n\t}", fmt.Sprintf("mcp_proxy /mcp* %s %s {\n\tlb_policy round_robin\n}", real.Addr, addr))
			c.AwaitState(t, addr, tt.state, 5*time.Second)
			if got := c.Upstreams(t)[addr].Reason; got != tt.reason {
				t.Errorf("reason %s, want %s", got, tt.reason)
			}
			c.AwaitState(t, real.Addr, "up", 5*time.Second)
			r := burst(t, c, 4, time.Second)
			if out := tt.state == "down"; out && len(r.Failures) > 0 {
				t.Errorf("%v, want the living one to get all calls", r)
			} else if !out && len(r.Failures) == 0 {
				t.Errorf("%v, want this upstream to get its share, and the client its answer", r)
			}
		})
	}
}

// Progress events and the answer of a long call arrive one by one through guard
// and policy, over HTTP/1.1 and h2c, and a reload in their middle is not noticed.
func TestStreamsSurviveAReload(t *testing.T) {
	for _, h2c := range []bool{false, true} {
		t.Run(map[bool]string{false: "HTTP1.1", true: "h2c"}[h2c], func(t *testing.T) {
			transport := ""
			s := Get(t, "go-sdk-v1.8.0-stateless").Start(t, FreePort(t), "--h2c")
			if h2c {
				transport = "\n\ttransport http {\n\t\tversions h2c\n\t}"
			}
			site := fmt.Sprintf("mcp_proxy /mcp* %s {%s\n}", s.Addr, transport)
			c := StartCaddy(t, site)
			c.AwaitState(t, s.Addr, "up", 5*time.Second)
			go func() {
				time.Sleep(time.Second)
				c.Reload(t, site+"\nrespond /other 204")
			}()
			times := streamCall(t, c.URL(), h2c, 3*time.Second)
			if len(times) < 5 {
				t.Fatalf("%d events, want progress and an answer", len(times))
			}
			var longest time.Duration
			for i := 1; i < len(times); i++ {
				longest = max(longest, times[i].Sub(times[i-1]))
			}
			if spread := times[len(times)-1].Sub(times[0]); spread < 2*time.Second || longest > spread/2 {
				t.Errorf("%d events within %s, longest gap %s: want them as they happen, over 3 s", len(times), spread, longest)
			}
		})
	}
}

// streamCall calls slow and returns when each event came.
func streamCall(t *testing.T, url string, h2c bool, takes time.Duration) (times []time.Time) {
	t.Helper()
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetHTTP1(!h2c)
	tr.Protocols.SetUnencryptedHTTP2(h2c)
	defer tr.CloseIdleConnections()
	req := Load{URL: url, Slow: takes}.request("stream-1")
	body := strings.NewReplacer(`"_meta":{`, `"_meta":{"progressToken":"p",`).Replace(readAll(t, req))
	req, _ = http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	for k, v := range (Load{URL: url, Slow: takes}).request("stream-1").Header {
		req.Header[k] = v
	}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	last := ""
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "data:") {
			times = append(times, time.Now())
			last = lines.Text()
		}
	}
	if err := CheckCall([]byte(last), "stream-1"); err != nil {
		t.Errorf("the last event: %v", err)
	}
	return times
}

func readAll(t *testing.T, req *http.Request) string {
	t.Helper()
	var b strings.Builder
	if _, err := bufio.NewReader(req.Body).WriteTo(&b); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// A real client of the legacy era keeps its session and its stream over a reload.
func TestLegacyClientOverAReload(t *testing.T) {
	s := Get(t, "go-sdk-v1.8.0-stateful").Start(t, FreePort(t))
	site := "mcp_proxy /mcp* " + s.Addr
	c := StartCaddy(t, site)
	c.AwaitState(t, s.Addr, "up", 5*time.Second)
	progress := make(chan struct{}, 100)
	client := Dial(t, c.URL(), LegacyVersion, &mcp.ClientOptions{
		ProgressNotificationHandler: func(context.Context, *mcp.ProgressNotificationClientRequest) { progress <- struct{}{} },
	})
	defer client.Close()
	for i := range 5 {
		echoAgain(t, client, fmt.Sprint("before ", i))
		c.Reload(t, site+fmt.Sprintf("\nrespond /other%d 204", i))
		echoAgain(t, client, fmt.Sprint("after ", i))
	}
	if n := s.Sessions(t); n != 2 { // the client's and the prober's
		t.Errorf("%d sessions on the server, want the client's and one of the prober", n)
	}
	client.Close()
	c.Terminate(t)
	s.AwaitSessions(t, 0)
}

// echoAgain calls again if the call crossed the end of a connection, which a reload
// closes: of 240 such calls, plain Caddy lost 52 on a busy machine, and ours 32.
func echoAgain(t *testing.T, client *mcp.ClientSession, message string) {
	t.Helper()
	err := Echo(t.Context(), client, message)
	for n := 0; n < 5 && err != nil && strings.Contains(err.Error(), "rejected by transport"); n++ {
		time.Sleep(50 * time.Millisecond)
		err = Echo(t.Context(), client, message)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A hundred reloads: the same verdicts, no storm of probes, no goroutine left, and
// no call answered wrongly.
func TestHundredReloads(t *testing.T) {
	// Caddy keeps a replaced transport's idle connections for keepalive, 2 minutes by default.
	site := "mcp_proxy /mcp* {A} {B} {\n\ttransport http {\n\t\tkeepalive 1s\n\t}\n}"
	p := startPair(t, site)
	// Caddy opens its socket anew on each reload: a connection that was not yet
	// accepted is reset (plain Caddy does the same), which is not counted here.
	load := Load{URL: p.caddy.URL(), Clients: 5, Rate: 20}.Start(t)
	time.Sleep(time.Second)
	before, probes := p.caddy.Goroutines(t), p.caddy.Upstreams(t)[p.a.Addr].Probes
	start := time.Now()
	for i := range 100 {
		p.caddy.Reload(t, p.site(site)+fmt.Sprintf("\nrespond /other%d 204", i))
		if u := p.caddy.Upstreams(t); u[p.a.Addr].State != "up" || u[p.b.Addr].State != "up" {
			t.Fatalf("after reload %d: %+v", i, u)
		}
	}
	took := time.Since(start)
	r := load.Stop()
	t.Logf("100 reloads in %s, %v", took.Round(time.Millisecond), r)
	if r.Count[Status]+r.Count[Wrong] > 0 {
		t.Errorf("calls failed: %v", r)
	}
	if n := p.caddy.Upstreams(t)[p.a.Addr].Probes - probes; n > int(took/(5*time.Second))+3 {
		t.Errorf("%d probes of one upstream in %s, want about one per interval of 10 s", n, took)
	}
	var after int
	for wait := time.Now(); time.Since(wait) < 15*time.Second; time.Sleep(200 * time.Millisecond) {
		if after = p.caddy.Goroutines(t); after <= before+5 {
			return
		}
	}
	t.Errorf("%d goroutines after 100 reloads, %d before", after, before)
}

// Each real server is found up, in its era, by a real Caddy, which leaves no
// session behind when it ends.
func TestCaddyKnowsEveryServer(t *testing.T) {
	for _, s := range All {
		t.Run(s.Name, func(t *testing.T) {
			i := s.Start(t, FreePort(t))
			c := StartCaddy(t, "mcp_proxy /mcp* "+i.Addr+" {\n\tcheck_interval 200ms\n}")
			c.AwaitState(t, i.Addr, "up", 10*time.Second)
			client := Dial(t, c.URL(), "", nil)
			if err := Echo(t.Context(), client, "through the edge"); err != nil {
				t.Error(err)
			}
			client.Close()
			time.Sleep(time.Second) // some probes
			if u := c.Upstreams(t)[i.Addr]; u.State != "up" {
				t.Errorf("%+v, want up", u)
			}
			c.Terminate(t)
			if s.Stateful {
				i.AwaitSessions(t, 0)
			}
		})
	}
}
