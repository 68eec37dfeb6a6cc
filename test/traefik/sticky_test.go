package traefik

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// stateful are n servers of the legacy era, which keep their sessions to themselves.
func stateful(t *testing.T, n int) (all []*e2e.Instance, log string) {
	t.Helper()
	log = filepath.Join(t.TempDir(), "executions")
	for i := range n {
		all = append(all, e2e.Get(t, "go-sdk-v1.8.0-stateful").Start(t, e2e.FreePort(t), "--log", log, "--name", string(rune('a'+i))))
	}
	return all, log
}

const cookie = "sticky:\n  cookie:\n    name: stick"

func stickyConfig(plugin string, all []*e2e.Instance) config {
	c := config{plugin: "sticky: true\n" + plugin, service: cookie}
	for _, i := range all {
		c.servers = append(c.servers, i.Addr)
	}
	return c
}

func awaitUp(t *testing.T, tr *Traefik, all []*e2e.Instance) {
	t.Helper()
	for _, i := range all {
		await(t, 10*time.Second, i.Addr+" up", func() bool { return strings.Contains(tr.Output(), "http://"+i.Addr+"/mcp is up") })
	}
}

// 200 sessions of 5 calls of real clients: all of them land on the replica that opened
// the session. Beside it, what plain Traefik does, which needs a client that keeps cookies.
func TestSessionsFindTheirOwner(t *testing.T) {
	for _, n := range []int{2, 3} {
		for _, plugin := range []bool{true, false} {
			t.Run(fmt.Sprintf("%d replicas, plugin %v", n, plugin), func(t *testing.T) {
				all, _ := stateful(t, n)
				dynamic := stickyConfig("hold: 10s", all).yaml()
				if !plugin {
					dynamic = bare(dynamic)
				}
				tr := Start(t, Options{Dynamic: dynamic, NoPlugin: !plugin})
				if plugin {
					awaitUp(t, tr, all)
				}
				c := e2e.RunSessions(t, tr.URL+"/mcp")
				t.Log(c)
				if plugin && (c.Whole != e2e.Sessions || c.Calls != e2e.Sessions*e2e.Calls || len(c.Owners) != n) {
					t.Errorf("%v: want all sessions whole, on all %d", c, n)
				}
			})
		}
	}
}

// A rolling restart of all replicas under load: each session goes on, or is opened
// anew at once; nobody is lost, and nothing runs twice. Here behind a reload each.
func TestRollingRestart(t *testing.T) {
	all, log := stateful(t, 3)
	c := stickyConfig("hold: 10s", all)
	tr := Start(t, Options{Dynamic: c.yaml()})
	awaitUp(t, tr, all)
	stop := e2e.Work(t, tr.URL+"/mcp")
	time.Sleep(time.Second)
	for n, i := range all {
		i.Terminate(t)
		time.Sleep(500 * time.Millisecond)
		i.Restart(t)
		c.plugin = fmt.Sprintf("sticky: true\nhold: %ds", 11+n)
		tr.Reload(t, c.yaml())
		time.Sleep(time.Second)
	}
	workers := stop()
	t.Log(e2e.Summary(workers))
	for _, w := range workers {
		if w.Reopened < 1 || w.Reopened > 3 {
			t.Errorf("%s opened %d sessions anew over 3 restarts, want 1 to 3", w.Name, w.Reopened)
		}
		if w.Longest > e2e.MayWait {
			t.Errorf("%s was without an answer for %s", w.Name, w.Longest)
		}
	}
	(&replicas{log: log}).wantOnce(t)
}

// A replica that does not come back, and one that leaves the configuration: after the
// grace their sessions are opened anew elsewhere.
func TestReplicaIsGone(t *testing.T) {
	for _, how := range []string{"killed", "removed"} {
		t.Run(how, func(t *testing.T) {
			all, log := stateful(t, 2)
			c := stickyConfig("hold: 10s\nsessionGrace: 2s", all)
			tr := Start(t, Options{Dynamic: c.yaml()})
			awaitUp(t, tr, all)
			stop := e2e.Work(t, tr.URL+"/mcp")
			time.Sleep(time.Second)
			if how == "removed" {
				c.servers = c.servers[1:]
				tr.Reload(t, c.yaml())
			}
			all[0].Kill(t)
			time.Sleep(4 * time.Second)
			workers := stop()
			t.Log(e2e.Summary(workers))
			moved := 0
			for _, w := range workers {
				moved += w.Reopened
				if w.Longest > e2e.MayWait {
					t.Errorf("%s was without an answer for %s, want about the grace of 2 s", w.Name, w.Longest)
				}
			}
			if moved == 0 {
				t.Error("no session was lost: the test is no good")
			}
			(&replicas{log: log}).wantOnce(t)
		})
	}
}

// Sessions are found again by another Traefik with the same key, as after a restart;
// the id is 24 bytes longer than the server's and no cookie shows.
func TestSessionsOverEdges(t *testing.T) {
	all, _ := stateful(t, 3)
	dynamic := stickyConfig("sessionKey: 0123456789abcdef0123456789abcdef", all).yaml()
	one, two := Start(t, Options{Dynamic: dynamic}), Start(t, Options{Dynamic: dynamic})
	awaitUp(t, one, all)
	awaitUp(t, two, all)
	for n := range 20 {
		id, header := open(t, one)
		if len(id) > 24+64 || header.Get("Set-Cookie") != "" {
			t.Fatalf("session %q, Set-Cookie %q", id, header.Get("Set-Cookie"))
		}
		for range 3 {
			if status := ping(t, two, id); status != 200 {
				t.Fatalf("session %d at the other Traefik: %d", n, status)
			}
		}
		forged := "x" + id[1:]
		if status := ping(t, two, forged); status != 404 {
			t.Errorf("a forged id: %d, want the server's 404", status)
		}
	}
}

func open(t *testing.T, tr *Traefik) (string, http.Header) {
	t.Helper()
	resp := send(t, tr, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"0"}}}`)
	id := resp.Header.Get("Mcp-Session-Id")
	if resp.StatusCode != 200 || id == "" {
		t.Fatalf("opening a session: %d %v", resp.StatusCode, resp.Header)
	}
	return id, resp.Header
}

func ping(t *testing.T, tr *Traefik, session string) int {
	t.Helper()
	return send(t, tr, `{"jsonrpc":"2.0","id":2,"method":"ping"}`, "Mcp-Session-Id", session, "MCP-Protocol-Version", "2025-11-25").StatusCode
}

func send(t *testing.T, tr *Traefik, body string, header ...string) *http.Response {
	t.Helper()
	req, _ := http.NewRequest(http.MethodPost, tr.URL+"/mcp", strings.NewReader(body))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp
}

// All strategies that know a sticky cookie; the others, and services without one, are
// refused with the reason.
func TestStickyStrategies(t *testing.T) {
	for _, strategy := range []string{"wrr", "p2c", "leasttime"} {
		t.Run(strategy, func(t *testing.T) {
			t.Parallel()
			all, _ := stateful(t, 3)
			c := stickyConfig("hold: 10s", all)
			c.service += "\nstrategy: " + strategy
			tr := Start(t, Options{Dynamic: c.yaml(), Flags: observed})
			awaitUp(t, tr, all)
			for range 10 {
				id, _ := open(t, tr)
				for range 5 {
					if status := ping(t, tr, id); status != 200 {
						t.Fatalf("in its session: %d", status)
					}
				}
			}
		})
	}
	for name, service := range map[string]string{"no cookie": "", "hrw": "strategy: hrw"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := config{plugin: "sticky: true", servers: []string{"127.0.0.1:1"}, service: service}
			tr := Start(t, Options{Dynamic: c.yaml()})
			await(t, 5*time.Second, "the refusal", func() bool {
				return strings.Contains(tr.Output(), "sticky on mcp@file on router app:") && strings.Contains(tr.Output(), "the service has no sticky cookie")
			})
		})
	}
}

// A replica that says that it drains keeps its sessions and gets no new ones.
func TestDrainingReplicaKeepsItsSessions(t *testing.T) {
	all, _ := stateful(t, 2)
	var draining atomic.Bool
	to, _ := url.Parse("http://" + all[0].Addr)
	front := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) },
		ModifyResponse: func(r *http.Response) error {
			if draining.Load() {
				r.Header.Set("Mcp-Health-Drain", "1")
			}
			return nil
		},
		FlushInterval: -1,
	})
	defer front.CloseClientConnections()
	c := stickyConfig("interval: 200ms", all)
	c.servers[0] = strings.TrimPrefix(front.URL, "http://")
	tr := Start(t, Options{Dynamic: c.yaml()})
	await(t, 10*time.Second, "both up", func() bool { return strings.Count(tr.Output(), "/mcp is up") == 2 })
	var ids []string
	for range 10 {
		id, _ := open(t, tr)
		ids = append(ids, id)
	}
	draining.Store(true)
	await(t, 5*time.Second, "draining", func() bool { return strings.Contains(tr.Output(), "draining") })
	for _, id := range ids {
		if status := ping(t, tr, id); status != 200 {
			t.Errorf("an old session: %d", status)
		}
	}
	before := all[0].Sessions(t)
	for range 10 {
		open(t, tr)
	}
	if n := all[0].Sessions(t); n > before {
		t.Errorf("%d new sessions on the replica that drains", n-before)
	}
}

// A stream of a session breaks off as its server dies, and does not end as if all had
// been said.
func TestStickyStreamBreaks(t *testing.T) {
	all, _ := stateful(t, 1)
	tr := Start(t, Options{Dynamic: stickyConfig("hold: 0", all).yaml()})
	awaitUp(t, tr, all)
	id, _ := open(t, tr)
	body := `{"jsonrpc":"2.0","id":"s","method":"tools/call","params":{"name":"slow","arguments":{"ms":20000},"_meta":{"progressToken":"p"}}}`
	req, _ := http.NewRequest(http.MethodPost, tr.URL+"/mcp", strings.NewReader(body))
	for k, v := range map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Mcp-Session-Id": id, "MCP-Protocol-Version": "2025-11-25"} {
		req.Header.Set(k, v)
	}
	start := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	first := make([]byte, 1)
	if _, err := io.ReadFull(resp.Body, first); err != nil || time.Since(start) > 10*time.Second {
		t.Fatalf("no event within %s: %v", time.Since(start), err)
	}
	all[0].Kill(t)
	if rest, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("the stream ended well: %q", rest)
	}
	all[0].Restart(t)
	await(t, 10*time.Second, "a new session", func() bool {
		return send(t, tr, `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"0"}}}`).StatusCode == 200
	})
	if strings.Contains(tr.Output(), "internal error") {
		t.Error("an internal error is in the log")
	}
}

// openers are n servers that give clients a session.
func openers(t *testing.T, n int) (all []*httptest.Server, addrs []string) {
	t.Helper()
	for range n {
		srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			body, _ := io.ReadAll(req.Body) // which says 100 to who waits for that
			var q struct {
				ID json.RawMessage `json:"id"`
			}
			_ = json.Unmarshal(body, &q)
			rw.Header().Set("Content-Type", "application/json")
			if strings.Contains(string(body), `"client"`) {
				rw.Header().Set("Mcp-Session-Id", "raw")
			}
			if req.Method == http.MethodGet {
				rw.WriteHeader(http.StatusServiceUnavailable)
			}
			fmt.Fprintf(rw, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28"],"capabilities":{},"serverInfo":{"name":"a","version":"1"}}}`, q.ID)
		}))
		t.Cleanup(func() { _ = srv.Listener.Close() }) // not Close, which waits for the probes' connections
		all = append(all, srv)
		addrs = append(addrs, strings.TrimPrefix(srv.URL, "http://"))
	}
	return all, addrs
}

const opening = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"x":"client"}}`

// Traefik's retry, in front, keeps the head of a try that failed to itself: the client gets
// that of the last one. So it is with another middleware between.
func TestStickyBehindRetry(t *testing.T) {
	for name, o := range map[string]struct{ status, between string }{
		"no answer":        {"", "headers: {customRequestHeaders: {X-Any: any}}"},
		"503 too":          {`, status: ["503"]`, "headers: {customRequestHeaders: {X-Any: any}}"},
		"through compress": {`, status: ["503"]`, "compress: {minResponseBodyBytes: 1}"},
	} {
		t.Run(name, func(t *testing.T) {
			all, addrs := openers(t, 2)
			y := config{plugin: "sticky: true\nhold: 2s", service: cookie + "\nserversTransport: fresh", servers: addrs}.yaml()
			y = strings.Replace(y, "      service: app\n      middlewares: [mcp]", "      service: app\n      middlewares: [again, zip, mcp]", 1)
			y = strings.Replace(y, "  middlewares:\n", "  serversTransports:\n    fresh: {maxIdleConnsPerHost: -1}\n  middlewares:\n    again:\n      retry: {attempts: 4, initialInterval: 20ms"+o.status+"}\n    zip:\n      "+o.between+"\n", 1)
			tr := Start(t, Options{Dynamic: y})
			for _, a := range addrs {
				await(t, 10*time.Second, a+" up", func() bool { return strings.Contains(tr.Output(), "http://"+a+"/mcp is up") })
			}
			ids := []string{send(t, tr, opening).Header.Get("Mcp-Session-Id"), send(t, tr, opening).Header.Get("Mcp-Session-Id")}
			req, _ := http.NewRequest(http.MethodGet, tr.URL+"/mcp", nil)
			req.Header.Set("Mcp-Session-Id", ids[0])
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != 503 {
				t.Errorf("GET: %s %v, want the server's 503", resp.Status, resp.Header)
			}
			_ = all[0].Listener.Close() // who dials is refused; the probes keep their connections
			opened := 0
			for i := range 6 {
				resp := send(t, tr, opening)
				if resp.StatusCode == 200 {
					opened++
				}
				if id := resp.Header.Get("Mcp-Session-Id"); resp.StatusCode == 200 && !strings.HasPrefix(id, "raw.") {
					t.Errorf("%d opened: %s %v, want a session that names its owner", i, resp.Status, resp.Header)
				}
				resp = send(t, tr, `{"jsonrpc":"2.0","id":1,"method":"tools/call"}`, "Mcp-Session-Id", ids[i%2])
				if resp.StatusCode == 200 && resp.Header.Get("Content-Type") == "" {
					t.Errorf("%d in a session: %s %v, want a head", i, resp.Status, resp.Header)
				}
			}
			if opened == 0 {
				t.Error("none of 6 opened a session, though a server lives")
			}
		})
	}
}

// A session has its owner in its id also if a 100 came before the answer: Go's proxy
// clears the header after that.
func TestStickyAfterContinue(t *testing.T) {
	_, addrs := openers(t, 2)
	tr := Start(t, Options{Dynamic: config{plugin: "sticky: true", service: cookie, servers: addrs}.yaml()})
	for _, a := range addrs {
		await(t, 10*time.Second, a+" up", func() bool { return strings.Contains(tr.Output(), "http://"+a+"/mcp is up") })
	}
	if resp := send(t, tr, opening, "Expect", "100-continue"); !strings.HasPrefix(resp.Header.Get("Mcp-Session-Id"), "raw.") || resp.Header.Get("Set-Cookie") != "" {
		t.Errorf("%s %v, want a session that names its owner, and no cookie", resp.Status, resp.Header)
	}
}

// Our own refusal of a body that comes in pieces, or is large, keeps its head behind retry.
func TestRefusedBehindRetry(t *testing.T) {
	y := config{plugin: "hold: 0", service: cookie, servers: []string{fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t))}}.yaml()
	y = strings.Replace(y, "      service: app\n      middlewares: [mcp]", "      service: app\n      middlewares: [again, mcp]", 1)
	y = strings.Replace(y, "  middlewares:\n", "  middlewares:\n    again:\n      retry: {attempts: 3, initialInterval: 20ms, status: [\"503\"], retryNonIdempotentMethod: true}\n", 1)
	tr := Start(t, Options{Dynamic: y})
	await(t, 10*time.Second, "refused", func() bool { status, _ := post(t, tr.URL+"/mcp"); return status == 503 })
	for _, size := range []int{100, 300 << 10} {
		for _, chunked := range []bool{false, true} {
			var body io.Reader = strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"x","params":{"x":"` + strings.Repeat("x", size) + `"}}`)
			if chunked {
				body = io.MultiReader(body)
			}
			resp, err := http.Post(tr.URL+"/mcp", "application/json", body)
			if err != nil {
				t.Error(err)
				continue
			}
			resp.Body.Close()
			if resp.StatusCode != 503 || resp.Header.Get("X-Mcp-Health") == "" {
				t.Errorf("%d bytes, chunked %v: %s %v, want our 503", size, chunked, resp.Status, resp.Header)
			}
		}
	}
}
