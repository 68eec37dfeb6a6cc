package mcphealth

import (
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// inquiry is one request as a depth server saw it.
type inquiry struct {
	verb, path, method, session, version, auth, host string
	id                                               string // as JSON
	gone                                             <-chan struct{}
	params                                           struct {
		Name      string
		Cursor    string
		Arguments json.RawMessage
		Version   string `json:"protocolVersion"`
		Meta      struct {
			Version string `json:"io.modelcontextprotocol/protocolVersion"`
		} `json:"_meta"`
	}
}

// depthServer answers by a function and remembers what it was asked.
type depthServer struct {
	*httptest.Server
	mu  sync.Mutex
	log []inquiry
}

// serveDepth starts one. say writes the answer.
func serveDepth(t *testing.T, say func(w http.ResponseWriter, a inquiry)) *depthServer {
	t.Helper()
	d := &depthServer{}
	d.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		a := inquiry{verb: r.Method, path: r.URL.Path, session: r.Header.Get("Mcp-Session-Id"), host: r.Host,
			version: r.Header.Get("MCP-Protocol-Version"), auth: r.Header.Get("Authorization"), id: RequestID(body).JSON(), gone: r.Context().Done()}
		var q struct {
			Method string
			Params json.RawMessage
		}
		_ = json.Unmarshal(body, &q)
		_ = json.Unmarshal(q.Params, &a.params)
		a.method = q.Method
		d.mu.Lock()
		d.log = append(d.log, a)
		d.mu.Unlock()
		say(w, a)
	}))
	t.Cleanup(d.Close)
	return d
}

// count is how many requests were f.
func (d *depthServer) count(f func(inquiry) bool) (n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, a := range d.log {
		if f(a) {
			n++
		}
	}
	return n
}

// methods are the JSON-RPC methods asked, in order; "DELETE" and "GET" for others.
func (d *depthServer) methods() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []string
	for _, a := range d.log {
		if a.method == "" {
			a.method = a.verb
		}
		all = append(all, a.method)
	}
	return strings.Join(all, " ")
}

func answer200(w http.ResponseWriter, a inquiry, rest string) { answerWith(w, 200, a, rest) }

func answerWith(w http.ResponseWriter, status int, a inquiry, rest string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,%s}`, a.id, rest)
}

const (
	okDiscover = `"result":{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},"_meta":{"io.modelcontextprotocol/serverInfo":{"name":"deep","version":"1"}}}`
	okInit     = `"result":{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"serverInfo":{"name":"deep","version":"1"}}`
	okEmpty    = `"result":{}`
	unknownRPC = `"error":{"code":-32601,"message":"Method not found"}`
)

// sayModern answers as a modern server does, tools by more.
func sayModern(more func(w http.ResponseWriter, a inquiry) bool) func(http.ResponseWriter, inquiry) {
	return func(w http.ResponseWriter, a inquiry) {
		switch {
		case more(w, a):
		case a.method == "server/discover":
			answer200(w, a, okDiscover)
		default:
			answerWith(w, 404, a, unknownRPC)
		}
	}
}

// saySessions answers as a legacy server with sessions does.
func saySessions(more func(w http.ResponseWriter, a inquiry) bool) func(http.ResponseWriter, inquiry) {
	return func(w http.ResponseWriter, a inquiry) {
		switch {
		case a.verb == http.MethodDelete:
			w.WriteHeader(204)
		case a.method == "initialize":
			w.Header().Set("Mcp-Session-Id", "s-1")
			answer200(w, a, okInit)
		case a.session != "s-1":
			answerWith(w, 404, a, `"error":{"code":-32001,"message":"Session not found"}`)
		case more(w, a):
		case a.method == "ping":
			answer200(w, a, okEmpty)
		default:
			answer200(w, a, unknownRPC)
		}
	}
}

func nothing(http.ResponseWriter, inquiry) bool { return false }

// probeDepth probes once, closes, and wants the verdict and reason.
func probeDepth(t *testing.T, target Target, want string) Result {
	t.Helper()
	if target.Timeout == 0 {
		target.Timeout = 2 * time.Second
	}
	p, err := NewProber(target, nil)
	if err != nil {
		t.Fatal(err)
	}
	r := p.Probe(context.Background())
	p.Close(context.Background())
	if got := string(r.Verdict) + " " + string(r.Reason); got != want {
		t.Errorf("Probe = %q, want %q\n%s", got, want, trail(r))
	}
	return r
}

// pages of a tool list: three tools on each.
func pages(w http.ResponseWriter, a inquiry) bool {
	if a.method != "tools/list" {
		return false
	}
	page := 0
	_, _ = fmt.Sscanf(a.params.Cursor, "page-%d", &page)
	next := ""
	if page < 3 {
		next = fmt.Sprintf(`,"nextCursor":"page-%d"`, page+1)
	}
	answer200(w, a, fmt.Sprintf(`"result":{"tools":[{"name":"a%d"},{"name":"b%d"},{"name":"c%d"}]%s}`, page, page, page, next))
	return true
}

func TestExpectTool(t *testing.T) {
	endless := func(w http.ResponseWriter, a inquiry) bool {
		if a.method == "tools/list" {
			answer200(w, a, `"result":{"tools":[],"nextCursor":"x`+a.params.Cursor+`"}`)
		}
		return a.method == "tools/list"
	}
	loop := func(w http.ResponseWriter, a inquiry) bool {
		if a.method == "tools/list" {
			answer200(w, a, `"result":{"tools":[],"nextCursor":"more"}`)
		}
		return a.method == "tools/list"
	}
	tired := func(w http.ResponseWriter, a inquiry) bool {
		if a.method == "tools/list" && a.params.Cursor != "" {
			<-a.gone
			return true
		}
		return endless(w, a)
	}
	long := func(w http.ResponseWriter, a inquiry) bool {
		if a.method == "tools/list" {
			answer200(w, a, `"result":{"tools":[{"name":"x","description":"`+strings.Repeat("x", 1<<20)+`"},{"name":"last"}]}`)
		}
		return a.method == "tools/list"
	}
	tests := []struct {
		name  string
		tools []string
		more  func(http.ResponseWriter, inquiry) bool
		want  string
		lists int // tools/list asked, at most
	}{
		{"on the first page, no other is read", []string{"b0"}, pages, "ready ok", 1},
		{"on the last page", []string{"a0", "c3"}, pages, "ready ok", 4},
		{"one of two is missing", []string{"a0", "nope"}, pages, "degraded tools_missing", 4},
		{"a server without tools", []string{"a0"}, nothing, "degraded tools_missing", 1},
		{"a list without end ends", []string{"a0"}, endless, "degraded tools_missing", maxPages},
		{"a list that leads back to itself", []string{"a0"}, loop, "degraded tools_missing", 2},
		{"a list whose next page never comes", []string{"a0"}, tired, "degraded tools_missing", 2},
		{"a list of 1 MiB is read", []string{"last"}, long, "ready ok", 1},
	}
	for _, tt := range tests {
		for era, say := range map[string]func(func(http.ResponseWriter, inquiry) bool) func(http.ResponseWriter, inquiry){"modern": sayModern, "legacy": saySessions} {
			t.Run(tt.name+"/"+era, func(t *testing.T) {
				d := serveDepth(t, say(tt.more))
				r := probeDepth(t, Target{URL: d.URL, ExpectTools: tt.tools}, tt.want)
				if n := d.count(func(a inquiry) bool { return a.method == "tools/list" }); n > tt.lists || n == 0 {
					t.Errorf("asked tools/list %d times, want 1 to %d", n, tt.lists)
				}
				if strings.Contains(tt.want, "missing") && !strings.Contains(r.Detail, tt.tools[len(tt.tools)-1]) && tt.name != "a server without tools" {
					t.Errorf("Detail = %q, want the name of the missing tool", r.Detail)
				}
				if r.SessionOpened && !strings.Contains(d.methods(), "DELETE") {
					t.Errorf("asked %s, want the session ended", d.methods())
				}
			})
		}
	}
}

// The Python SDK answers nothing but a ping before notifications/initialized.
func TestInitializedComesBeforeTools(t *testing.T) {
	told := 0
	d := serveDepth(t, saySessions(func(w http.ResponseWriter, a inquiry) bool {
		switch {
		case a.method == "notifications/initialized" && a.version == "2025-11-25":
			told++
			w.WriteHeader(202)
		case a.method == "ping":
			return false
		case told == 0:
			answer200(w, a, `"error":{"code":-32602,"message":"Invalid request parameters"}`)
		case a.method == "tools/call":
			answer200(w, a, `"result":{"content":[]}`)
		default:
			return pages(w, a)
		}
		return true
	}))
	p, err := NewProber(Target{URL: d.URL, ExpectTools: []string{"a1"}, CallTool: "a1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= 2; i++ { // the second is in the same session
		if r := p.Probe(context.Background()); r.Reason != OK {
			t.Errorf("probe %d = %s %s, want ready ok\n%s", i, r.Verdict, r.Reason, trail(r))
		}
	}
	p.Close(context.Background())
	if told != 1 {
		t.Errorf("told %d times, want once", told)
	}
}

// A notification that was refused, as for load, is said again if the tools fail, and not
// otherwise.
func TestInitializedAgain(t *testing.T) {
	for _, needed := range []bool{true, false} {
		told := 0
		d := serveDepth(t, saySessions(func(w http.ResponseWriter, a inquiry) bool {
			switch {
			case a.method == "notifications/initialized":
				if told++; told == 1 || !needed {
					w.WriteHeader(503)
				}
			case a.method == "tools/list" && needed && told < 2:
				answer200(w, a, `"error":{"code":-32602,"message":"Invalid request parameters"}`)
			default:
				return pages(w, a)
			}
			return true
		}))
		p, err := NewProber(Target{URL: d.URL, ExpectTools: []string{"a0"}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		var r Result
		for i := 1; i <= 3; i++ {
			r = p.Probe(context.Background())
		}
		p.Close(context.Background())
		if want := map[bool]int{true: 2, false: 1}[needed]; told != want || r.Reason != OK {
			t.Errorf("needed %v: %s %s, told %d times, want ready ok and %d", needed, r.Verdict, r.Reason, told, want)
		}
	}
}

func TestCallTool(t *testing.T) {
	call := func(rest string) func(http.ResponseWriter, inquiry) bool {
		return func(w http.ResponseWriter, a inquiry) bool {
			if a.method == "tools/call" {
				answer200(w, a, rest)
			}
			return a.method == "tools/call"
		}
	}
	limited := func(w http.ResponseWriter, a inquiry) bool {
		if a.method == "tools/call" {
			w.WriteHeader(429)
		}
		return a.method == "tools/call"
	}
	hangs := func(_ http.ResponseWriter, a inquiry) bool {
		if a.method == "tools/call" {
			time.Sleep(500 * time.Millisecond)
		}
		return a.method == "tools/call"
	}
	tests := []struct {
		name string
		more func(http.ResponseWriter, inquiry) bool
		want string
	}{
		{"a result", call(`"result":{"content":[{"type":"text","text":"1"}]}`), "ready ok"},
		{"isError", call(`"result":{"content":[],"isError":true}`), "degraded tool_failing"},
		{"isError inside what the tool says is the tool's business", call(`"result":{"resultType":"complete","content":[],"structuredContent":{"isError":true}}`), "ready ok"},
		{"the tool asks for input", call(`"result":{"resultType":"input_required","inputRequests":{"a":{"method":"elicitation/create"}}}`), "degraded tool_failing"},
		{"a result that is none", call(`"result":null`), "degraded tool_failing"},
		{"a JSON-RPC error", call(`"error":{"code":-32602,"message":"Unknown tool"}`), "degraded tool_failing"},
		{"an internal error", call(`"error":{"code":-32603,"message":"db"}`), "degraded tool_failing"},
		{"too many calls", limited, "degraded rate_limited"},
		{"a tool that hangs is the tool's failure", hangs, "degraded tool_failing"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, sayModern(tt.more))
			r := probeDepth(t, Target{URL: d.URL, CallTool: "select", CallArgs: `{"sql":"select 1"}`, Timeout: 400 * time.Millisecond}, tt.want)
			n := d.count(func(a inquiry) bool {
				return a.method == "tools/call" && a.params.Name == "select" && string(a.params.Arguments) == `{"sql":"select 1"}` && a.params.Meta.Version == modernVersion
			})
			if n != 1 {
				t.Errorf("called the tool %d times with its arguments, want once; %s", n, r.Detail)
			}
		})
	}
}

// A canary is called where the server answered, and nowhere else.
func TestCallToolNotUnasked(t *testing.T) {
	d := serveDepth(t, func(w http.ResponseWriter, _ inquiry) {
		w.Header().Set("WWW-Authenticate", "Bearer")
		w.WriteHeader(401)
	})
	probeDepth(t, Target{URL: d.URL, CallTool: "select", ExpectTools: []string{"select"}}, "alive auth_required")
	if got := d.methods(); got != "server/discover" {
		t.Errorf("asked %s, want server/discover alone after a 401", got)
	}
}

// A slow server whose answers come in time, one by one, is not dead because not all of
// them do; and initialize, whose answer would come too late, is not asked.
func TestSlowLadder(t *testing.T) {
	for want, rest := range map[string]string{
		"alive method_not_found": unknownRPC,
		"alive session_required": `"error":{"code":-32001,"message":"Session not found"}`,
		"alive rpc_error":        `"error":{"code":-32000,"message":"Bad Request"}`,
	} {
		d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
			time.Sleep(600 * time.Millisecond)
			answer200(w, a, rest)
		})
		r := probeDepth(t, Target{URL: d.URL, Timeout: time.Second}, want)
		if got := d.methods(); got != "server/discover" || !strings.Contains(fmt.Sprint(r.Warnings), "slow") {
			t.Errorf("asked %s, warned %q; want server/discover alone, and a word on its time", got, r.Warnings)
		}
	}
}

// But what else initialize would say, or has said, is not passed over for that.
func TestSlowIsNoExcuse(t *testing.T) {
	slow := func(w http.ResponseWriter, a inquiry) {
		time.Sleep(600 * time.Millisecond)
		answerWith(w, 404, a, `"error":{"code":-32001,"message":"Session not found"}`)
	}
	tests := []struct {
		name string
		set  func(*Target)
		say  func(w http.ResponseWriter, a inquiry, probe int)
		want string // of three probes
	}{
		{"a slow login", nil, func(w http.ResponseWriter, a inquiry, _ int) {
			if a.method != "initialize" {
				time.Sleep(600 * time.Millisecond)
			}
			http.Error(w, "Session expired", http.StatusForbidden)
		}, "not_mcp not_mcp not_mcp"},
		{"initialize has failed", nil, func(w http.ResponseWriter, a inquiry, probe int) {
			switch {
			case a.method == "initialize":
				answer200(w, a, `"error":{"code":-32603,"message":"db"}`)
			case probe == 2:
				slow(w, a)
			default:
				answerWith(w, 404, a, `"error":{"code":-32001,"message":"Session not found"}`)
			}
		}, "handshake_failed handshake_failed handshake_failed"},
		{"the renewal of this probe has failed", nil, func(w http.ResponseWriter, a inquiry, probe int) {
			switch {
			case probe == 1:
				saySessions(nothing)(w, a)
				return
			case a.method == "initialize":
				time.Sleep(300 * time.Millisecond)
				answer200(w, a, `"error":{"code":-32603,"message":"db"}`)
				return
			case a.method == "server/discover":
				time.Sleep(400 * time.Millisecond)
			}
			answerWith(w, 404, a, `"error":{"code":-32001,"message":"Session not found"}`)
		}, "ok handshake_failed handshake_failed"},
		{"nothing else is to be asked", func(t *Target) { t.Shallow = true }, func(w http.ResponseWriter, a inquiry, _ int) { slow(w, a) },
			"session_required session_required session_required"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			var probe atomic.Int32
			d := serveDepth(t, func(w http.ResponseWriter, a inquiry) { tt.say(w, a, int(probe.Load())) })
			target := Target{URL: d.URL, Timeout: time.Second}
			if tt.set != nil {
				tt.set(&target)
			}
			p, err := NewProber(target, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close(context.Background())
			var got []string
			for i := int32(1); i <= 3; i++ {
				probe.Store(i)
				r := p.Probe(context.Background())
				got = append(got, string(r.Reason))
				if strings.Contains(fmt.Sprint(r.Warnings), "slow") {
					t.Errorf("warned %q", r.Warnings)
				}
			}
			if s := strings.Join(got, " "); s != tt.want {
				t.Errorf("reasons %q, want %q", s, tt.want)
			}
		})
	}
}

// A server without sessions that takes an id again is asked with the made-up one again.
func TestNoIDForgotten(t *testing.T) {
	var later atomic.Bool
	d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		switch {
		case a.method == "initialize":
			answer200(w, a, okInit)
		case a.method == "ping" && (a.session == "") != later.Load():
			answer200(w, a, okEmpty)
		default:
			answerWith(w, 400, a, `"error":{"code":-32000,"message":"Bad Request"}`)
		}
	})
	p, err := NewProber(Target{URL: d.URL, Timeout: time.Second}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < 4; i++ {
		later.Store(i >= 2)
		p.Probe(context.Background())
	}
	if got, want := d.methods(), "server/discover ping initialize ping ping server/discover ping ping"; got != want {
		t.Errorf("asked %s, want %s", got, want)
	}
}

func TestSlowAfter(t *testing.T) {
	slow := func(method string) func(http.ResponseWriter, inquiry) bool {
		return func(_ http.ResponseWriter, a inquiry) bool {
			if a.method == method {
				time.Sleep(60 * time.Millisecond)
			}
			return false
		}
	}
	tests := []struct {
		name string
		say  func(http.ResponseWriter, inquiry)
		want string
	}{
		{"a slow discover", sayModern(slow("server/discover")), "degraded slow"},
		{"a quick one", sayModern(nothing), "ready ok"},
		{"a refusal is no slower than it was", func(w http.ResponseWriter, _ inquiry) {
			time.Sleep(60 * time.Millisecond)
			w.WriteHeader(502)
		}, "dead gateway_error"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, tt.say)
			r := probeDepth(t, Target{URL: d.URL, SlowAfter: 40 * time.Millisecond}, tt.want)
			if r.Reason == Slow && !strings.Contains(r.Detail, "40ms") {
				t.Errorf("Detail = %q, want the limit named", r.Detail)
			}
		})
	}
}

func TestHealthPath(t *testing.T) {
	tests := []struct {
		name   string
		status int
		body   string
		want   string
		warns  bool
	}{
		{"healthy", 200, `{"status":"healthy"}`, "ready ok", false},
		{"degraded", 200, `{"status":"degraded"}`, "degraded internal_error", false},
		{"draining", 200, `{"status":"draining"}`, "degraded draining", false},
		{"draining by 503", 503, `{"status":"draining"}`, "degraded draining", false},
		{"unhealthy", 200, `{"status":"unhealthy"}`, "dead health_down", false},
		{"503 without a word", 503, ``, "dead health_down", false},
		{"absent: the endpoint decides", 404, `nope`, "ready ok", true},
		{"broken: the endpoint decides", 500, ``, "ready ok", true},
		{"no JSON", 200, `OK`, "ready ok", false},
		{"ASP.NET Core's text", 200, `Unhealthy`, "dead health_down", false},
		{"and its second word", 200, "Degraded\n", "degraded internal_error", false},
		{"Spring's word, 200 all the same", 200, `{"status":"DOWN","components":{}}`, "dead health_down", false},
		{"the other one", 200, `{"status":"UP"}`, "ready ok", false},
		{"the draft's word", 200, byteOrderMark + `{"status":"fail"}`, "dead health_down", false},
		{"the draft's second word", 200, `{"status":"warn"}`, "degraded internal_error", false},
		{"a status that is no word", 200, `{"status":1}`, "ready ok", false},
		{"a list", 200, `[{"status":"unhealthy"}]`, "ready ok", false},
		{"a text with the word in it", 200, `nothing is unhealthy here`, "ready ok", false},
		{"a redirect is not followed", 302, ``, "ready ok", true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
				if a.path == "/health" {
					w.Header().Set("Location", "http://127.0.0.1:1/")
					w.WriteHeader(tt.status)
					_, _ = io.WriteString(w, tt.body)
					return
				}
				sayModern(nothing)(w, a)
			})
			r := probeDepth(t, Target{URL: d.URL + "/mcp", HealthPath: "/health"}, tt.want)
			if warned := len(r.Warnings) > 0; warned != tt.warns {
				t.Errorf("Warnings = %q, want some: %v", r.Warnings, tt.warns)
			}
			if n := d.count(func(a inquiry) bool { return a.verb == http.MethodGet && a.path != "/health" }); n > 0 {
				t.Errorf("%d GETs of the endpoint, want the health document alone", n)
			}
		})
	}
}

// What is escaped in health_path stays so.
func TestHealthPathIsEscapedOnce(t *testing.T) {
	const path = "/a%2Fb%20c/health?of=d%26e"
	asked := ""
	p, err := NewProber(Target{URL: "http://upstream.test/mcp", HealthPath: path}, NewForeignLine(roundTrip(func(r *http.Request) (*http.Response, error) {
		if r.Method == http.MethodGet {
			asked = r.URL.RequestURI()
		}
		return nil, io.EOF
	})))
	if err != nil {
		t.Fatal(err)
	}
	p.Probe(t.Context())
	if asked != path {
		t.Errorf("asked for %s, want %s", asked, path)
	}
}

// A health document that hangs leaves the question itself its time.
func TestHealthPathHangs(t *testing.T) {
	for _, begin := range []string{"", `{"status":`} {
		d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
			if a.path != "/health" {
				sayModern(nothing)(w, a)
				return
			}
			_, _ = io.WriteString(w, begin)
			w.(http.Flusher).Flush()
			time.Sleep(300 * time.Millisecond)
		})
		r := probeDepth(t, Target{URL: d.URL + "/mcp", HealthPath: "/health?deep=1", Timeout: 400 * time.Millisecond}, "ready ok")
		if len(r.Warnings) != 1 || !strings.HasPrefix(r.Warnings[0], "health_path: ") {
			t.Errorf("Warnings = %q, want the health document's silence", r.Warnings)
		}
	}
}

// With fresh a cache that answers for a dead server is seen through.
func TestFresh(t *testing.T) {
	tests := []struct {
		name string
		more func(http.ResponseWriter, inquiry) bool
		want string
	}{
		{"an error to a method that cannot exist", nothing, "ready ok"},
		{"a gateway that has only discover in its cache", func(w http.ResponseWriter, a inquiry) bool {
			if strings.HasPrefix(a.method, "mcphealth/") {
				w.WriteHeader(502)
			}
			return strings.HasPrefix(a.method, "mcphealth/")
		}, "dead gateway_error"},
		{"silence", func(_ http.ResponseWriter, a inquiry) bool {
			if strings.HasPrefix(a.method, "mcphealth/") {
				time.Sleep(time.Second)
			}
			return strings.HasPrefix(a.method, "mcphealth/")
		}, "dead timeout"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, sayModern(tt.more))
			probeDepth(t, Target{URL: d.URL, Fresh: true, Timeout: 400 * time.Millisecond}, tt.want)
			probeDepth(t, Target{URL: d.URL, Fresh: true, Timeout: 400 * time.Millisecond}, tt.want)
			seen := map[string]bool{}
			for _, m := range strings.Fields(d.methods()) {
				if strings.HasPrefix(m, "mcphealth/") && seen[m] {
					t.Errorf("asked %s twice: a cache could know it", m)
				}
				seen[m] = true
			}
			if len(seen) != 3 {
				t.Errorf("asked %s, want discover and two methods that cannot exist", d.methods())
			}
		})
	}
}

// lock answers 401 to whoever does not know the word.
func lock(word string, say func(http.ResponseWriter, inquiry)) func(http.ResponseWriter, inquiry) {
	return func(w http.ResponseWriter, a inquiry) {
		if a.auth != word && a.verb != http.MethodDelete {
			w.Header().Set("WWW-Authenticate", `Bearer resource_metadata="https://example.com/.well-known/oauth-protected-resource"`)
			w.WriteHeader(401)
			return
		}
		say(w, a)
	}
}

func TestRequireAuth(t *testing.T) {
	good := http.Header{"Authorization": {"Bearer good"}}
	stateless := func(w http.ResponseWriter, a inquiry) {
		if a.method == "ping" {
			answer200(w, a, okEmpty)
			return
		}
		answer200(w, a, unknownRPC)
	}
	sse := func(guarded bool) func(http.ResponseWriter, inquiry) {
		return func(w http.ResponseWriter, a inquiry) {
			if guarded && a.auth == "" {
				w.WriteHeader(401)
				return
			}
			w.WriteHeader(404)
		}
	}
	tests := []struct {
		name   string
		say    func(http.ResponseWriter, inquiry)
		header http.Header
		set    func(*Target)
		want   string
		warns  string
	}{
		{"locked, no key", lock("Bearer good", sayModern(nothing)), nil, nil, "alive auth_required", ""},
		{"locked, the right key", lock("Bearer good", sayModern(nothing)), good, nil, "ready ok", ""},
		{"locked, the wrong key", lock("Bearer other", sayModern(nothing)), good, nil, "degraded credentials_rejected", ""},
		{"locked, sessions", lock("Bearer good", saySessions(nothing)), good, nil, "ready ok", ""},
		{"locked, no sessions", lock("Bearer good", stateless), good, nil, "ready ok", ""},
		{"open, no key", sayModern(nothing), nil, nil, "degraded handshake_failed", "auth_missing"},
		{"open, whatever the key", sayModern(nothing), good, nil, "degraded handshake_failed", "auth_missing"},
		{"open, sessions", saySessions(nothing), good, nil, "degraded handshake_failed", "auth_missing"},
		{"open, sessions, no key", saySessions(nothing), nil, nil, "degraded handshake_failed", "auth_missing"},
		{"open, no sessions", stateless, good, nil, "degraded handshake_failed", "auth_missing"},
		{"a session router in front of the lock proves nothing", saySessions(nothing), good, func(t *Target) { t.Shallow = true }, "alive session_required", "auth_unproven"},
		{"without the option nobody asks", sayModern(nothing), good, func(t *Target) { t.RequireAuth = false }, "ready ok", ""},
		{"a dead server is dead first", func(w http.ResponseWriter, _ inquiry) { w.WriteHeader(502) }, good, nil, "dead gateway_error", ""},
		{"HTTP+SSE, locked", sse(true), nil, func(t *Target) { t.Era = SSE }, "alive auth_required", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, tt.say)
			target := Target{URL: d.URL, Header: tt.header, RequireAuth: true}
			if tt.set != nil {
				tt.set(&target)
			}
			r := probeDepth(t, target, tt.want)
			if got := strings.Join(r.Warnings, "\n"); !strings.HasPrefix(got, tt.warns) || tt.warns == "" && got != "" {
				t.Errorf("Warnings = %q, want %q", r.Warnings, tt.warns)
			}
			if n := d.count(func(a inquiry) bool { return a.method == "initialize" }); n > 1 {
				t.Errorf("%d initializes, want one at most: the second look goes into the session of the first", n)
			}
			bare := d.count(func(a inquiry) bool { return a.auth == "" && a.verb == http.MethodPost })
			if tt.header != nil && bare > 1 {
				t.Errorf("%d questions without credentials, want one", bare)
			}
		})
	}
}

// The second look is asked each time, also of a server that is known by then.
func TestRequireAuthSteady(t *testing.T) {
	locked := true
	var mu sync.Mutex
	d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		mu.Lock()
		defer mu.Unlock()
		if locked {
			lock("Bearer good", saySessions(nothing))(w, a)
			return
		}
		saySessions(nothing)(w, a)
	})
	p, err := NewProber(Target{URL: d.URL, Header: http.Header{"Authorization": {"Bearer good"}}, RequireAuth: true, Timeout: time.Second}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	for i, want := range []string{"ready ok", "ready ok", "degraded handshake_failed", "ready ok"} {
		mu.Lock()
		locked = i != 2
		mu.Unlock()
		if r := p.Probe(context.Background()); string(r.Verdict)+" "+string(r.Reason) != want {
			t.Errorf("probe %d = %s %s, want %s\n%s", i+1, r.Verdict, r.Reason, want, trail(r))
		}
	}
	if n := d.count(func(a inquiry) bool { return a.method == "initialize" }); n != 1 {
		t.Errorf("%d initializes, want one", n)
	}
}

// The connection of the last question stays open as death watch, also where that
// question was the one without credentials.
func TestRequireAuthKeepsTheWatch(t *testing.T) {
	d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		if a.auth == "" {
			w.Header().Set("Content-Type", "text/html")
			w.WriteHeader(401)
			_, _ = io.WriteString(w, "<html>who are you?")
			return
		}
		sayModern(nothing)(w, a)
	})
	p, err := NewProber(Target{URL: d.URL, Header: http.Header{"Authorization": {"Bearer good"}}, RequireAuth: true, Timeout: time.Second}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	p.Probe(context.Background())
	ended := make(chan bool, 1)
	if !p.line.watchIdle(nil, func() { ended <- true }) {
		t.Fatal("nothing is watched after the probe")
	}
	d.CloseClientConnections()
	select {
	case <-ended:
	case <-time.After(2 * time.Second):
		t.Error("the end of the connection was not noticed")
	}
}

// SetHeader is what a room calls when a token was renewed: the next probe sends
// the new one, and what the old one had opened is ended.
func TestSetHeader(t *testing.T) {
	word := "Bearer old"
	var mu sync.Mutex
	d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		mu.Lock()
		defer mu.Unlock()
		lock(word, saySessions(nothing))(w, a)
	})
	p, err := NewProber(Target{URL: d.URL, Header: http.Header{"Authorization": {"Bearer old"}}, Timeout: time.Second}, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := func(step, verdict string) {
		t.Helper()
		if r := p.Probe(context.Background()); string(r.Verdict)+" "+string(r.Reason) != verdict {
			t.Errorf("%s: Probe = %s %s, want %s\n%s", step, r.Verdict, r.Reason, verdict, trail(r))
		}
	}
	want("the old token", "ready ok")
	p.SetHeader(http.Header{"Authorization": {"Bearer old"}})
	want("the same again", "ready ok")
	if n := d.count(func(a inquiry) bool { return a.method == "initialize" }); n != 1 {
		t.Errorf("%d initializes, want one: nothing changed", n)
	}
	mu.Lock()
	word = "Bearer new"
	mu.Unlock()
	want("the server's token changed", "degraded credentials_rejected")
	p.SetHeader(http.Header{"Authorization": {"Bearer new"}})
	want("and ours", "ready ok")
	want("from then on", "ready ok")
	p.Close(context.Background())
	if got := d.count(func(a inquiry) bool { return a.verb == http.MethodDelete }); got != 2 {
		t.Errorf("%d DELETEs, want two: of either token's session", got)
	}
}

// Other credentials may lead to another server: it is asked from the first question.
func TestSetHeaderLeadsElsewhere(t *testing.T) {
	d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		switch {
		case a.auth == "Bearer new":
			sayModern(nothing)(w, a)
		case a.method == "ping":
			answer200(w, a, okEmpty)
		default:
			answer200(w, a, unknownRPC)
		}
	})
	p, err := NewProber(Target{URL: d.URL, Header: http.Header{"Authorization": {"Bearer old"}}, Timeout: time.Second}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	for _, tt := range []struct {
		auth string
		era  Era
	}{{"Bearer old", Legacy}, {"Bearer new", Modern}, {"Bearer old", Legacy}} {
		p.SetHeader(http.Header{"Authorization": {tt.auth}})
		if r := p.Probe(context.Background()); r.Verdict != Ready || r.Era != tt.era {
			t.Errorf("%s: Probe = %s %s %s, want ready, %s\n%s", tt.auth, r.Verdict, r.Reason, r.Era, tt.era, trail(r))
		}
	}
}

// Header values are read and replaced from any goroutine.
func TestSetHeaderConcurrently(t *testing.T) {
	d := serveDepth(t, sayModern(nothing))
	p, err := NewProber(Target{URL: d.URL, Timeout: time.Second}, nil)
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := 0; i < 4; i++ {
		i := i
		all.Add(2)
		go func() {
			defer all.Done()
			p.SetHeader(http.Header{"Authorization": {fmt.Sprintf("Bearer token-%d", i)}})
		}()
		go func() { defer all.Done(); p.Probe(context.Background()) }()
	}
	all.Wait()
	p.SetHeader(nil)
	p.Probe(context.Background())
	p.Close(context.Background())
	d.mu.Lock()
	defer d.mu.Unlock()
	if last := d.log[len(d.log)-1]; last.auth != "" {
		t.Errorf("the last probe sent %q, want nothing", last.auth)
	}
}

// secretWord is what must not come out again.
const secretWord = "hunter2-hunter2-hunter2"

// A server may repeat our credentials wherever it likes: a Result does not.
func TestNoSecretInResult(t *testing.T) {
	pad := strings.Repeat("x", maxWord-len(secretWord)/2) // where cutting leaves half of it
	html := func(status int, header, value, body string) func(http.ResponseWriter, inquiry) {
		return func(w http.ResponseWriter, _ inquiry) {
			w.Header().Set("Content-Type", "text/plain")
			w.Header().Set(header, value)
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
		}
	}
	tests := []struct {
		name string
		say  func(http.ResponseWriter, inquiry)
	}{
		{"in an error", func(w http.ResponseWriter, a inquiry) {
			answer200(w, a, `"error":{"code":-32000,"message":"bad token `+secretWord+`"}`)
		}},
		{"cut in the middle", func(w http.ResponseWriter, a inquiry) {
			answer200(w, a, `"error":{"code":-32000,"message":"`+pad+secretWord+`"}`)
		}},
		{"as its name", func(w http.ResponseWriter, a inquiry) {
			answer200(w, a, `"result":{"supportedVersions":["2026-07-28","`+secretWord+`"],"capabilities":{},"serverInfo":{"name":"`+pad+secretWord+`","version":"Bearer `+secretWord+`"}}`)
		}},
		{"as an event's name", func(w http.ResponseWriter, a inquiry) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = fmt.Fprintf(w, "event: %s\ndata: {\"jsonrpc\":\"2.0\",\"id\":%s,\"result\":{}}\n\n", secretWord, a.id)
		}},
		{"in text", html(400, "X-A", "b", "no session for "+secretWord)},
		{"in a page's type", html(200, "Content-Type", "text/"+secretWord, "x")},
		{"in a redirect", html(302, "Location", "/login?was="+secretWord, "")},
		{"in a cache's header", html(200, "Age", "12 "+secretWord, "")},
		{"in another", html(200, "X-Cache", "HIT "+secretWord, "")},
		{"in a header line that is none", func(w http.ResponseWriter, _ inquiry) {
			c, _, _ := w.(http.Hijacker).Hijack()
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nBearer "+secretWord+"\r\n\r\n")
			_ = c.Close()
		}},
		{"in the health document", func(w http.ResponseWriter, a inquiry) {
			if a.verb == http.MethodGet {
				_, _ = io.WriteString(w, `{"status":"`+secretWord+`"}`)
				return
			}
			answer200(w, a, okDiscover)
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, tt.say)
			p, err := NewProber(Target{URL: d.URL, HealthPath: "/health", Timeout: time.Second,
				Header: http.Header{"Authorization": {"Bearer " + secretWord}, "X-Key": {"k"}}}, nil)
			if err != nil {
				t.Fatal(err)
			}
			r := p.Probe(context.Background())
			p.Close(context.Background())
			b, err := json.Marshal(r)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(b), secretWord[:len(secretWord)/2]) {
				t.Errorf("the result holds the secret, or half of it: %s", b)
			}
		})
	}
}

// Nor half of one that is longer than what is kept of an error.
func TestNoHalfOfALongSecretInResult(t *testing.T) {
	long := strings.Repeat("long-secret-", maxWords/12+1)
	d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		answer200(w, a, `"error":{"code":-32000,"message":"bad token `+long+`"}`)
	})
	r := probeDepth(t, Target{URL: d.URL, Header: http.Header{"Authorization": {"Bearer " + long}}}, "alive rpc_error")
	if strings.Contains(r.Detail, "secret") {
		t.Errorf("the result holds the beginning of the secret: %s", r.Detail)
	}
}

// Nor what a server of the event stream repeats of them.
func TestNoSecretInResultOfAStream(t *testing.T) {
	for name, first := range map[string]string{"the stream": "data: {}", "the POST": "event: endpoint\ndata: /post"} {
		d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
			w.Header().Set("Content-Type", "text/event-stream")
			if a.verb == http.MethodPost {
				w.Header().Set("Content-Type", "text/"+secretWord)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			w.Header().Set("X-Cache", "HIT "+secretWord)
			_, _ = io.WriteString(w, first+"\n\n")
		})
		p, err := NewProber(Target{URL: d.URL, Era: SSE, Timeout: time.Second, Header: http.Header{"Authorization": {"Bearer " + secretWord}}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		b, err := json.Marshal(p.Probe(context.Background()))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(strings.ToLower(string(b)), secretWord) {
			t.Errorf("the result holds the secret that %s repeats: %s", name, b)
		}
	}
}

// Nor of a part of them.
func TestNoPartOfASecretInResult(t *testing.T) {
	d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		answer200(w, a, `"error":{"code":-32000,"message":"not for `+secretWord+`, in good English"}`)
	})
	for name, value := range map[string]string{
		"Authorization":   "Basic " + base64.StdEncoding.EncodeToString([]byte("user:"+secretWord)),
		"Proxy-Authorize": `Digest username="user", response="` + secretWord + `"`,
		"Cookie":          "lang=en; session=" + secretWord + "; theme=dark",
		"X-Api-Key":       "another-key," + secretWord,
	} {
		p, err := NewProber(Target{URL: d.URL, Timeout: time.Second, Header: http.Header{name: {value}, "Accept-Language": {"en-GB, English;q=0.5"}}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		r := p.Probe(context.Background())
		p.Close(context.Background())
		if strings.Contains(r.Detail, secretWord) || !strings.Contains(r.Detail, "in good English") {
			t.Errorf("%s: Detail = %q: want the rest of it", name, r.Detail)
		}
	}
}

// The old token is still secret after a new one came.
func TestNoOldSecretInResult(t *testing.T) {
	d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		answer200(w, a, `"error":{"code":-32000,"message":"token `+secretWord+` has expired"}`)
	})
	p, err := NewProber(Target{URL: d.URL, Header: http.Header{"Authorization": {"Bearer " + secretWord}}, Timeout: time.Second}, nil)
	if err != nil {
		t.Fatal(err)
	}
	p.SetHeader(http.Header{"Authorization": {"Bearer another"}})
	r := p.Probe(context.Background())
	p.Close(context.Background())
	if strings.Contains(r.Detail, secretWord) {
		t.Errorf("Detail = %q, which holds the token of before", r.Detail)
	}
}

// Keys stand in URLs as well, and redirects and error pages repeat those.
func TestNoQuerySecretInResult(t *testing.T) {
	d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		w.Header().Set("Location", "http://elsewhere.example/?key=hunter2%2Fhunter2&was=hunter2/hunter2&mode=json")
		w.WriteHeader(http.StatusFound)
	})
	for _, key := range []string{"key=hunter2%2Fhunter2", "hunter2%2Fhunter2"} { // or it is the whole of it
		p, err := NewProber(Target{URL: d.URL + "/mcp?mode=json&" + key, Timeout: time.Second}, nil)
		if err != nil {
			t.Fatal(err)
		}
		r := p.Probe(context.Background())
		p.Close(context.Background())
		if strings.Contains(r.Detail, "hunter2") || !strings.Contains(r.Detail, "mode=json") {
			t.Errorf("%s: Detail = %q: want neither form of the key, and the rest", key, r.Detail)
		}
	}
}

func TestAliveIfAnyResponse(t *testing.T) {
	page := func(status int) func(http.ResponseWriter, inquiry) {
		return func(w http.ResponseWriter, _ inquiry) {
			w.Header().Set("Content-Type", "text/html")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "<html>")
		}
	}
	tests := []struct {
		name  string
		say   func(http.ResponseWriter, inquiry)
		mcp   string // by default
		any   string // by the literal rule
		setup func(*Target)
	}{
		{"a result", sayModern(nothing), "ready ok", "ready ok", nil},
		{"-32601 in a 404", func(w http.ResponseWriter, a inquiry) { answerWith(w, 404, a, unknownRPC) }, "alive method_not_found", "alive method_not_found", nil},
		{"-32601 in a 200", func(w http.ResponseWriter, a inquiry) { answer200(w, a, unknownRPC) }, "alive method_not_found", "alive method_not_found", nil},
		{"a bare 404", page(404), "unknown endpoint_not_found", "alive http_answer", nil},
		{"a login page", page(200), "dead not_mcp", "alive http_answer", nil},
		{"500", page(500), "dead server_error", "alive http_answer", nil},
		{"502", page(502), "dead gateway_error", "alive http_answer", nil},
		{"a redirect", func(w http.ResponseWriter, _ inquiry) {
			w.Header().Set("Location", "/login")
			w.WriteHeader(302)
		}, "unknown redirected", "alive http_answer", nil},
		{"discover answered, the next question not", func(w http.ResponseWriter, a inquiry) {
			if a.method != "server/discover" {
				time.Sleep(500 * time.Millisecond)
			}
			page(404)(w, a)
		}, "dead timeout", "alive http_answer", nil},
		{"silence", func(http.ResponseWriter, inquiry) { time.Sleep(500 * time.Millisecond) }, "dead timeout", "dead timeout", nil},
		{"headers, and silence", func(w http.ResponseWriter, _ inquiry) {
			w.Header().Set("Content-Type", "application/json")
			w.(http.Flusher).Flush()
			time.Sleep(500 * time.Millisecond)
		}, "dead stalled", "dead stalled", nil},
		{"a health document outranks it", func(w http.ResponseWriter, a inquiry) {
			if a.verb == http.MethodGet {
				w.WriteHeader(503)
				return
			}
			page(404)(w, a)
		}, "dead health_down", "dead health_down", func(t *Target) { t.HealthPath = "/health" }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, tt.say)
			target := Target{URL: d.URL, Timeout: 300 * time.Millisecond}
			if tt.setup != nil {
				tt.setup(&target)
			}
			probeDepth(t, target, tt.mcp)
			target.AliveIf = AliveIfAnyResponse
			probeDepth(t, target, tt.any)
		})
	}
	t.Run("nobody listens", func(t *testing.T) {
		probeDepth(t, Target{URL: "http://" + closedPort(), AliveIf: AliveIfAnyResponse}, "dead refused")
	})
}

// TestVersions: one server per way to say which versions it knows.
func TestVersions(t *testing.T) {
	refuses := func(code int, message, data string) string {
		return fmt.Sprintf(`"error":{"code":%d,"message":%q,"data":%s}`, code, message, data)
	}
	tests := []struct {
		name string
		say  func(http.ResponseWriter, inquiry)
		want string
		era  Era
		// the versions offered: of discover's _meta, then of initialize's params
		offered string
	}{
		{"-32022 lists a newer modern one", func(w http.ResponseWriter, a inquiry) {
			if a.params.Meta.Version == "2027-01-15" && a.version == "2027-01-15" {
				answer200(w, a, strings.Replace(okDiscover, "2026-07-28", "2027-01-15", 1))
				return
			}
			answerWith(w, 400, a, refuses(-32022, "Unsupported protocol version", `{"supported":["2027-01-15","2025-11-25"],"requested":"2026-07-28"}`))
		}, "ready ok", Modern, "2026-07-28 2027-01-15"},
		{"-32022 lists only legacy ones", func(w http.ResponseWriter, a inquiry) {
			switch a.method {
			case "server/discover":
				answerWith(w, 400, a, refuses(-32022, "Unsupported protocol version", `{"supported":["2025-06-18"],"requested":"2026-07-28"}`))
			case "initialize":
				answer200(w, a, strings.Replace(okInit, "2025-11-25", "2025-06-18", 1))
			default:
				answerWith(w, 400, a, refuses(-32000, "Bad Request: no session", "null"))
			}
		}, "ready ok", Legacy, "2026-07-28 2025-11-25"},
		{"initialize lists older ones in its data", func(w http.ResponseWriter, a inquiry) {
			switch {
			case a.method == "initialize" && a.params.Version == "2025-03-26":
				answer200(w, a, strings.Replace(okInit, "2025-11-25", "2025-03-26", 1))
			case a.method == "initialize":
				answerWith(w, 400, a, refuses(-32602, "Unsupported protocol version", `{"supported":["2024-11-05","2025-03-26"]}`))
			default:
				answerWith(w, 400, a, refuses(-32000, "Bad Request: Server requires a session", "null"))
			}
		}, "ready ok", Legacy, "2026-07-28 2025-11-25 2025-03-26"},
		{"initialize lists older ones in its words", func(w http.ResponseWriter, a inquiry) {
			switch {
			case a.method == "initialize" && a.params.Version == "2025-06-18":
				answer200(w, a, strings.Replace(okInit, "2025-11-25", "2025-06-18", 1))
			case a.method == "initialize":
				http.Error(w, "Unsupported protocol version (supported: 2025-06-18, 2025-03-26)", 400)
			default:
				http.Error(w, "Invalid session ID", 400)
			}
		}, "ready ok", Legacy, "2026-07-28 2025-11-25 2025-06-18"},
		{"a word under another name", func(w http.ResponseWriter, a inquiry) {
			switch {
			case a.method == "initialize" && a.params.Version == "2025-03-26":
				answer200(w, a, strings.Replace(okInit, "2025-11-25", "2025-03-26", 1))
			case a.method == "initialize":
				answerWith(w, 400, a, refuses(-32600, "Invalid Request", `{"supportedVersions":"2025-03-26"}`))
			default:
				answerWith(w, 400, a, refuses(-32000, "Bad Request: Server requires a session", "null"))
			}
		}, "ready ok", Legacy, "2026-07-28 2025-11-25 2025-03-26"},
		{"a list of objects", func(w http.ResponseWriter, a inquiry) {
			switch {
			case a.method == "initialize" && a.params.Version == "2024-11-05":
				answer200(w, a, strings.Replace(okInit, "2025-11-25", "2024-11-05", 1))
			case a.method == "initialize":
				answerWith(w, 200, a, refuses(-32602, "no", `[{"version":"2024-11-05","released":"long ago"}]`))
			default:
				answerWith(w, 400, a, refuses(-32000, "Bad Request: Server requires a session", "null"))
			}
		}, "ready ok", Legacy, "2026-07-28 2025-11-25 2024-11-05"},
		{"-32022 without a list", func(w http.ResponseWriter, a inquiry) {
			answerWith(w, 400, a, `"error":{"code":-32022,"message":"no"}`)
		}, "alive version_mismatch", EraUnknown, "2026-07-28 2025-11-25"},
		{"initialize settles on a lower one by itself", func(w http.ResponseWriter, a inquiry) {
			switch a.method {
			case "initialize":
				answer200(w, a, strings.Replace(okInit, "2025-11-25", "2025-03-26", 1))
			default:
				answerWith(w, 400, a, refuses(-32000, "Bad Request: no session", "null"))
			}
		}, "ready ok", Legacy, "2026-07-28 2025-11-25"},
		{"none in common", func(w http.ResponseWriter, a inquiry) {
			answerWith(w, 400, a, refuses(-32022, "Unsupported protocol version", `{"supported":["2023-01-01"]}`))
		}, "alive version_mismatch", EraUnknown, "2026-07-28 2025-11-25 2023-01-01"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, tt.say)
			r := probeDepth(t, Target{URL: d.URL}, tt.want)
			if r.Era != tt.era {
				t.Errorf("era = %s, want %s", r.Era, tt.era)
			}
			var offered []string
			d.mu.Lock()
			for _, a := range d.log {
				if v := a.params.Meta.Version + a.params.Version; v != "" {
					offered = append(offered, v)
				}
			}
			d.mu.Unlock()
			if got := strings.Join(offered, " "); got != tt.offered {
				t.Errorf("offered %s, want %s", got, tt.offered)
			}
		})
	}
}

// sseServer is a server of 2024-11-05: GET opens the stream, answers to what is
// posted come on it.
func sseServer(t *testing.T, answers map[string]string) *depthServer {
	t.Helper()
	stream := make(chan string, 10)
	held := ""
	return serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		if status, to, moved := strings.Cut(answers["moved"], " "); moved && a.path == "/sse" {
			w.Header().Set("Location", to)
			w.WriteHeader(statusOf(status))
			return
		}
		if status, text, refused := strings.Cut(answers["refuse"], " "); refused {
			http.Error(w, text, statusOf(status))
			return
		}
		if a.verb == http.MethodGet {
			w.Header().Set("Content-Type", "text/event-stream")
			var to io.Writer = w
			flush := w.(http.Flusher).Flush
			if answers["gzip"] != "" {
				w.Header().Set("Content-Encoding", "gzip")
				z := gzip.NewWriter(w)
				to, flush = z, func() { _ = z.Flush(); w.(http.Flusher).Flush() }
			}
			endpoint := "/messages?session=1"
			if other, ok := answers["endpoint"]; ok {
				endpoint = other
			}
			_, _ = io.WriteString(to, ": hello\n\nevent: welcome\ndata: {}\n\nevent: endpoint\ndata: "+endpoint+"\n\n")
			flush()
			for {
				select {
				case message := <-stream:
					_, _ = io.WriteString(to, "event: message\ndata: "+message+"\n\n")
					flush()
				case <-a.gone:
					return
				}
			}
		}
		if a.path != "/messages" {
			w.WriteHeader(404)
			return
		}
		if answers["post"] != "" {
			w.WriteHeader(401)
			return
		}
		w.WriteHeader(202)
		if a.method == "initialize" && answers["before"] != "" {
			held = fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,%s}`, a.id, answers["initialize"])
			stream <- answers["before"]
			return
		}
		if a.method == "" { // the reply to what was asked before
			stream <- held
			return
		}
		rest, ok := answers[a.method]
		if !ok {
			rest = unknownRPC
		}
		if rest != "" && a.id != "" {
			stream <- fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,%s}`, a.id, rest)
		}
	})
}

func statusOf(s string) int {
	n, _ := strconv.Atoi(s)
	return n
}

func TestEraSSE(t *testing.T) {
	init := strings.Replace(okInit, "2025-11-25", "2024-11-05", 1)
	tools := `"result":{"tools":[{"name":"echo"}]}`
	tests := []struct {
		name    string
		answers map[string]string
		set     func(*Target)
		want    string
	}{
		{"the handshake over the stream", map[string]string{"initialize": init}, nil, "ready ok"},
		{"a ping that wants its answer first", map[string]string{"initialize": init, "before": `{"jsonrpc":"2.0","id":"theirs","method":"ping"}`}, nil, "ready ok"},
		{"compressed, though nobody asked", map[string]string{"initialize": init, "gzip": "on"}, nil, "ready ok"},
		{"an endpoint relative to the stream", map[string]string{"initialize": init, "endpoint": "messages?session=1"}, nil, "ready ok"},
		{"an endpoint as clients see it", map[string]string{"initialize": init, "endpoint": "https://mcp.example.com/messages?session=1"},
			func(t *Target) { t.Host = "mcp.example.com" }, "ready ok"},
		{"an endpoint of another origin", map[string]string{"initialize": init, "endpoint": "https://mcp.example.com/messages?session=1"}, nil, "dead not_mcp"},
		{"another Host is wanted", map[string]string{"refuse": "403 Forbidden: invalid Host header"}, nil, "unknown host_guessed"},
		{"it shuts down", map[string]string{"refuse": "503 Server is shutting down"}, nil, "degraded draining"},
		{"a gateway without anybody behind it", map[string]string{"refuse": "503 no available server"}, nil, "dead gateway_error"},
		{"the endpoint wants credentials", map[string]string{"initialize": init, "post": "401"}, nil, "alive auth_required"},
		{"a result that is no InitializeResult", map[string]string{"initialize": okEmpty}, nil, "degraded handshake_failed"},
		{"an error over the stream", map[string]string{"initialize": `"error":{"code":-32000,"message":"no"}`}, nil, "alive rpc_error"},
		{"no answer over the stream", map[string]string{"initialize": ""}, nil, "degraded handshake_failed"},
		{"an expected tool", map[string]string{"initialize": init, "tools/list": tools}, func(t *Target) { t.ExpectTools = []string{"echo"} }, "ready ok"},
		{"a tool that is not there", map[string]string{"initialize": init, "tools/list": tools}, func(t *Target) { t.ExpectTools = []string{"other"} }, "degraded tools_missing"},
		{"a canary", map[string]string{"initialize": init, "tools/call": `"result":{"content":[]}`}, func(t *Target) { t.CallTool = "echo" }, "ready ok"},
		{"a canary that fails", map[string]string{"initialize": init, "tools/call": `"result":{"isError":true}`}, func(t *Target) { t.CallTool = "echo" }, "degraded tool_failing"},
		{"fresh", map[string]string{"initialize": init}, func(t *Target) { t.Fresh = true }, "ready ok"},
		{"open, though it must not be", map[string]string{"initialize": init}, func(t *Target) { t.RequireAuth = true }, "degraded handshake_failed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := sseServer(t, tt.answers)
			target := Target{URL: d.URL + "/sse", Era: SSE, Timeout: 400 * time.Millisecond}
			if tt.set != nil {
				tt.set(&target)
			}
			r := probeDepth(t, target, tt.want)
			if r.Era != SSE {
				t.Errorf("era = %s, want sse", r.Era)
			}
			if n := d.count(func(a inquiry) bool { return a.verb == http.MethodGet }); n != 1 {
				t.Errorf("%d streams opened, want one", n)
			}
		})
	}
}

// The stream behind a redirect: Starlette sends /sse to /sse/, a login page takes all.
func TestStreamBehindRedirect(t *testing.T) {
	tests := []struct{ moved, want, says string }{
		{"307 /sse/", "ready ok", "redirect"},
		{"307 /sse", "unknown redirected", `"/sse"`},
		{"302 /login", "unknown redirected", `"/login"`},
		{"307 http://127.0.0.1:1/sse/", "unknown redirected", "127.0.0.1:1"},
	}
	for _, tt := range tests {
		t.Run(tt.moved, func(t *testing.T) {
			d := sseServer(t, map[string]string{"initialize": okInit, "endpoint": "../messages?session=1", "moved": tt.moved})
			r := probeDepth(t, Target{URL: d.URL + "/sse", Era: SSE, Timeout: time.Second}, tt.want)
			if said := fmt.Sprint(r.Detail, r.Warnings); !strings.Contains(said, tt.says) {
				t.Errorf("it says %s, want %s in it", said, tt.says)
			}
		})
	}
}

// A header that RequireAuth leaves out is left out of the second stream as well.
func TestEraSSERequireAuthWithKey(t *testing.T) {
	d := sseServer(t, map[string]string{"initialize": okInit})
	p, err := NewProber(Target{URL: d.URL + "/sse", Era: SSE, RequireAuth: true, Header: http.Header{"Authorization": {"Bearer good"}}, Timeout: time.Second}, nil)
	if err != nil {
		t.Fatal(err)
	}
	p.Probe(context.Background())
	p.Close(context.Background())
	if n := d.count(func(a inquiry) bool { return a.verb == http.MethodGet && a.auth == "" }); n != 1 {
		t.Errorf("%d streams without credentials, want one", n)
	}
}

// Traffic proves none of the things that are asked besides.
func TestRequireAuthIsNotHiddenByTraffic(t *testing.T) {
	p, err := NewProber(Target{URL: "http://127.0.0.1:1/mcp", RequireAuth: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewChecker(p, Schedule{})
	if err != nil {
		t.Fatal(err)
	}
	c.threshold.state = Up
	c.Sent()
	c.Answered("mcp.example.com")
	if c.trafficProves() {
		t.Error("trafficProves = true, want false with require_auth")
	}
}

// A password in a URL is refused without being repeated.
func TestNoPasswordInErrors(t *testing.T) {
	for _, url := range []string{
		"http://user:" + secretWord + "@127.0.0.1/mcp", "http://user:" + secretWord + "%zz@127.0.0.1/mcp",
		"ftp://user:" + secretWord + "@127.0.0.1/mcp", "http://user:" + secretWord + "@127.0.0.1:port/mcp",
	} {
		err := Target{URL: url}.Validate()
		if err == nil || strings.Contains(err.Error(), secretWord) {
			t.Errorf("Validate(%q) = %v, want an error that does not repeat the password", url, err)
		}
	}
}

// A probe that is called off says so, wherever it was, and the next one begins as if there
// had been none.
func TestCanceled(t *testing.T) {
	tests := []struct {
		name   string
		target Target
		times  int // of cancellation
		held   func(method string) (status int, media, begin string)
		want   string // of the probe after them
	}{
		{"in the page of a 403", Target{}, 1, func(string) (int, string, string) {
			return 403, "text/html", "<html>"
		}, "ready ok"},
		{"in a health document", Target{HealthPath: "/health"}, 1, func(string) (int, string, string) {
			return 503, "application/json", "{"
		}, "ready ok"},
		{"in initialize", Target{}, 2, func(method string) (int, string, string) {
			if method == "initialize" {
				return 200, "application/json", "{"
			}
			return 404, "", ""
		}, "ready ok"},
		{"in initialize over a stream", Target{Era: SSE}, 1, func(method string) (int, string, string) {
			if method != "" {
				return 202, "", ""
			}
			return 200, "text/event-stream", "event: endpoint\ndata: /post\n\n"
		}, "dead not_mcp"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				over := false
				tt.target.URL = "http://upstream.test/mcp"
				p, err := NewProber(tt.target, NewForeignLine(roundTrip(func(r *http.Request) (*http.Response, error) {
					var m message
					if r.Body != nil {
						_ = json.NewDecoder(r.Body).Decode(&m)
					}
					status, media, begin := 200, "application/json", fmt.Sprintf(`{"jsonrpc":"2.0","id":%s,%s}`, m.ID, okInit)
					if m.Method == "server/discover" || m.Method == "ping" {
						status, begin = 404, ""
					}
					var rest io.Reader = strings.NewReader("")
					if !over {
						status, media, begin = tt.held(m.Method)
					}
					if !over && begin != "" {
						ours, theirs := io.Pipe()
						context.AfterFunc(r.Context(), func() { _ = theirs.CloseWithError(r.Context().Err()) })
						rest = ours
					}
					return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {media}}, ContentLength: -1,
						Body: io.NopCloser(io.MultiReader(strings.NewReader(begin), rest)), Request: r}, nil
				})))
				if err != nil {
					t.Fatal(err)
				}
				for range tt.times {
					ctx, cancel := context.WithCancel(t.Context())
					time.AfterFunc(time.Second, cancel)
					if r := p.Probe(ctx); r.Reason != Canceled {
						t.Errorf("Probe, called off, = %s %s, want unknown canceled\n%s", r.Verdict, r.Reason, trail(r))
					}
				}
				over = true
				if r := p.Probe(t.Context()); string(r.Verdict)+" "+string(r.Reason) != tt.want {
					t.Errorf("the next Probe = %s %s, want %s\n%s", r.Verdict, r.Reason, tt.want, trail(r))
				}
			})
		})
	}
}

// A cursor goes back to the server and is remembered: none of megabytes is followed.
func TestLongCursor(t *testing.T) {
	lists := 0
	d := serveDepth(t, sayModern(func(w http.ResponseWriter, a inquiry) bool {
		if a.method != "tools/list" {
			return false
		}
		lists++
		answer200(w, a, `"result":{"tools":[],"nextCursor":"`+strings.Repeat("x", maxCursor+lists)+`"}`)
		return true
	}))
	probeDepth(t, Target{URL: d.URL, ExpectTools: []string{"any"}}, "degraded tools_missing")
	if lists != 1 {
		t.Errorf("asked for %d pages, want 1", lists)
	}
}
