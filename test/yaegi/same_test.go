package yaegi_test

import (
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"
)

const (
	jsonType   = "Content-Type: application/json"
	streamType = "Content-Type: text/event-stream"
	plain      = "Content-Type: text/plain; charset=utf-8"
	page       = "Content-Type: text/html; charset=utf-8"
)

// The bodies of the answers below, as real servers send them.
const (
	discovered  = `{"jsonrpc":"2.0","id":$id,"result":{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},"serverInfo":{"name":"$path","version":"1.0"},"instructions":"grüß"}}`
	initialized = `{"jsonrpc":"2.0","id":$id,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"$path","version":"2"}}}`
	pong        = `{"jsonrpc":"2.0","id":$id,"result":{}}`
	unknown     = `{"jsonrpc":"2.0","id":$id,"error":{"code":-32601,"message":"Method not found"}}`
	internal    = `{"jsonrpc":"2.0","id":$id,"error":{"code":-32603,"message":"Internal error"}}`
	noSession   = `{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Session not found"}}`
	otherID     = `{"jsonrpc":"2.0","id":99,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`
)

// always answers every request alike.
func always(a reply) script { return script{answers: map[string]reply{"*": a}} }

// legacy is a stateful server of 2025-11-25.
func legacy(refuse reply) script {
	return script{refuse: &refuse, answers: map[string]reply{
		"initialize": {status: 200, header: jsonType, body: initialized},
		"ping":       {status: 200, header: streamType, body: "event: message\ndata: " + pong + "\n\n"},
		"tools/list": {status: 200, header: jsonType, body: `{"jsonrpc":"2.0","id":$id,"result":{"tools":[{"name":"add","inputSchema":{"type":"object"}}]}}`},
		"tools/call": {status: 200, header: jsonType, body: `{"jsonrpc":"2.0","id":$id,"result":{"content":[],"isError":true}}`},
		"*":          {status: 200, header: jsonType, body: unknown},
	}}
}

var refusedText = reply{status: 400, header: plain, body: "Invalid session ID\n"}
var refusedJSON = reply{status: 404, header: jsonType, body: noSession}

// modern is a server of 2026-07-28 with tools on two pages.
func modern() script {
	return script{answers: map[string]reply{
		"server/discover": {status: 200, header: jsonType, body: discovered},
		"tools/list":      {status: 200, header: jsonType, body: `{"jsonrpc":"2.0","id":$id,"result":{"tools":[{"name":"add"},{"name":"sub"}],"nextCursor":""}}`},
		"tools/call":      {status: 200, header: jsonType, body: `{"jsonrpc":"2.0","id":$id,"result":{"content":[],"isError":false}}`},
		"GET":             {status: 200, header: jsonType, body: `{"status":"degraded"}`},
		"*":               {status: 404, header: jsonType, body: unknown},
	}}
}

func (s script) then(from int, later script) script {
	s.from, s.later = from, &later
	return s
}

func bare404() script { return always(reply{status: 404, header: plain, body: "404 page not found\n"}) }

// sameTests are servers, and ways to ask them. What the answers mean is not
// tested here, but that the interpreter finds the same as the compiler: `want`,
// the last probe's verdict and reason, only proves that a case reaches what it
// is there for.
var sameTests = []struct {
	name   string
	server script
	ask    map[string]string // settings besides the URL
	probes int               // 0 = 2: the second is in steady state
	want   string
}{
	{name: "modern, JSON", server: modern(), want: "ready ok"},
	{name: "modern, SSE", server: always(reply{status: 200, header: streamType, hang: true,
		body: ": hello\nid: 1\nretry: 3000\ndata:\n\nevent: message\r\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\"}\r\n\r\ndata: " + discovered + "\n\n"}), want: "ready ok"},
	{name: "modern, two data lines and CR", server: always(reply{status: 200, header: streamType,
		body: "data: " + strings.Replace(discovered, ",", ",\rdata: ", 1) + "\r\r"}), want: "ready ok"},
	{name: "modern, another modern version", server: script{answers: map[string]reply{"*": {status: 400, header: jsonType,
		body: `{"jsonrpc":"2.0","id":$id,"error":{"code":-32022,"message":"Unsupported protocol version","data":{"supported":["2027-01-01"]}}}`}}}, want: "alive version_mismatch"},
	{name: "modern, a cache in front", server: always(reply{status: 200, header: jsonType + "\nAge: 12\nX-Cache: HIT",
		body: strings.Replace(discovered, `"resultType"`, `"ttlMs":60000,"cacheScope":"public","resultType"`, 1)}), want: "ready ok"},
	{name: "modern, gone", server: modern().then(2, bare404()), want: "dead route_absent"},
	{name: "modern, back again", server: modern().then(2, bare404().then(6, modern())), probes: 4, want: "ready ok"},
	{name: "modern, hangs later", server: modern().then(2, always(reply{status: 200, hang: true, header: jsonType, body: `{"jsonrpc"`})), ask: timeout("1s"), want: "dead stalled"},
	{name: "headers, then silence", server: always(reply{status: 200, hang: true, header: jsonType}), ask: timeout("1s"), want: "dead stalled"},
	{name: "stateful, text", server: legacy(refusedText), probes: 3, want: "ready ok"},
	{name: "stateful, JSON", server: legacy(refusedJSON), probes: 3, want: "ready ok"},
	{name: "stateful, shallow", server: legacy(refusedText), ask: map[string]string{"Shallow": "true"}, want: "alive session_required"},
	{name: "stateful, forgets once", server: legacy(refusedJSON).then(4, legacy(refusedJSON)), probes: 4, want: "ready ok"},
	{name: "stateful, forgets and fails", server: legacy(refusedJSON).then(4, script{refuse: &refusedJSON, answers: map[string]reply{
		"initialize": {status: 200, header: jsonType, body: internal}}}), probes: 3, want: "degraded handshake_failed"},
	{name: "stateful, older version", server: script{refuse: &refusedText, answers: map[string]reply{"initialize": {status: 400, header: jsonType,
		body: `{"jsonrpc":"2.0","id":"server-error","error":{"code":-32000,"message":"Bad Request: Unsupported protocol version (supported versions: 2025-06-18, 2025-03-26)"}}`}}}, want: "alive version_mismatch"},
	{name: "stateless", server: script{answers: map[string]reply{
		"ping": {status: 200, header: streamType, body: "data: " + pong + "\n\n"}, "*": {status: 200, header: jsonType, body: unknown}}}, want: "ready ok"},
	{name: "stateless, only initialize", server: script{answers: map[string]reply{
		"initialize": {status: 200, header: jsonType, body: initialized}, "*": {status: 200, header: jsonType, body: unknown}}}, want: "alive method_not_found"},
	{name: "one transport", server: always(reply{status: 400, header: jsonType, body: `{"jsonrpc":"2.0","error":{"code":-32000,"message":"Bad Request: Server not initialized"},"id":null}`}), want: "alive session_required"},
	{name: "batch of one", server: script{answers: map[string]reply{
		"ping": {status: 200, header: jsonType, body: "[" + pong + "]"}, "*": {status: 501, header: plain, body: "what?"}}}, want: "ready ok"},
	{name: "-32601 to all", server: always(reply{status: 200, header: jsonType, body: unknown}), want: "alive method_not_found"},
	{name: "-32603 to all", server: always(reply{status: 500, header: jsonType, body: internal}), want: "degraded handshake_failed"},
	{name: "code as text", server: always(reply{status: 200, header: jsonType, body: `{"jsonrpc":"2.0","id":$id,"error":{"code":"E1","message":"no"}}`}), want: "alive rpc_error"},
	{name: "message as a list", server: always(reply{status: 200, header: jsonType, body: `{"jsonrpc":"2.0","id":$id,"error":{"code":-32000,"message":[{"type":"missing"}]}}`}), want: "alive rpc_error"},
	{name: "an id for no request", server: always(reply{status: 400, header: jsonType, body: `{"jsonrpc":"2.0","id":"","error":{"code":-32000,"message":"no"}}`}), want: "alive rpc_error"},
	{name: "a result for anything", server: always(reply{status: 200, header: jsonType, body: pong}), want: "dead not_mcp"},
	{name: "stateful, then modern", server: legacy(refusedJSON).then(4, modern()), probes: 3, want: "ready ok"},
	{name: "an event of an empty name", server: always(reply{status: 200, header: streamType, body: "event:\ndata: " + discovered + "\n\n"}), want: "ready ok"},
	{name: "long error text", server: always(reply{status: 200, header: jsonType,
		body: `{"jsonrpc":"2.0","id":$id,"error":{"code":1,"message":"` + strings.Repeat("ü ", 60<<10) + `"}}`}), want: "alive rpc_error"},
	{name: "no content type, JSON", server: always(reply{status: 200, body: " \r\n" + discovered}), want: "ready ok"},
	{name: "gzip", server: always(reply{status: 200, header: jsonType, body: discovered, zip: true}), want: "ready ok"},
	{name: "gzip that is none", server: always(reply{status: 200, header: jsonType + "\nContent-Encoding: gzip", body: discovered}), want: "dead not_mcp"},
	{name: "HTML 200", server: always(reply{status: 200, header: page, body: "<!doctype html><title>Sign in</title>"}), want: "dead not_mcp"},
	{name: "empty 200", server: always(reply{status: 200}), want: "dead not_mcp"},
	{name: "foreign JSON", server: always(reply{status: 200, header: jsonType, body: `{"status":"ok"}`}), want: "dead not_mcp"},
	{name: "wrong id", server: always(reply{status: 200, header: jsonType, body: otherID}), want: "dead not_mcp"},
	{name: "truncated JSON", server: always(reply{status: 200, header: jsonType, body: discovered[:60]}), want: "dead not_mcp"},
	{name: "cut off", server: always(reply{status: 200, header: jsonType, body: discovered[:60], cut: true}), want: "dead not_mcp"},
	{name: "syntax error", server: always(reply{status: 200, header: jsonType, body: `{"jsonrpc":nope}`}), want: "dead not_mcp"},
	{name: "very long", server: always(reply{status: 200, header: streamType, body: strings.Repeat(": priming\n\n", 30<<10)}), ask: timeout("1m"), want: "dead not_mcp"},
	{name: "401", server: always(reply{status: 401, header: plain, body: "Unauthorized"}), want: "alive auth_required"},
	{name: "401, and a body that never comes", server: always(reply{status: 401, header: jsonType, hang: true, body: "{"}), ask: timeout("1s"), want: "alive auth_required"},
	{name: "400 about Host, in HTML", server: always(reply{status: 400, header: page, body: "<h2>Bad Request - Invalid Hostname</h2>"}), want: "unknown host_guessed"},
	{name: "401 with challenge", server: always(reply{status: 401, header: `WWW-Authenticate: Bearer resource_metadata="x"`, body: `{"error":"invalid_token"}`}), want: "alive auth_required"},
	{name: "401 to credentials", server: always(reply{status: 401, header: plain, body: "bad token s3cret-token"}), ask: map[string]string{"Authorization": "Bearer s3cret-token"}, want: "degraded credentials_rejected"},
	{name: "open, though it must not be", server: modern(), ask: map[string]string{"RequireAuth": "true", "Authorization": "Bearer x"}, want: "degraded handshake_failed"},
	{name: "403 about Host", server: always(reply{status: 403, header: plain, body: "Forbidden: invalid Host header"}), want: "unknown host_guessed"},
	{name: "403 about the clients' Host", server: always(reply{status: 403, header: plain, body: "Forbidden: invalid Host header"}), ask: map[string]string{"Host": "clients.example"}, want: "dead host_rejected"},
	{name: "403 page", server: always(reply{status: 403, header: page, body: "<h1>Forbidden</h1>"}), want: "dead not_mcp"},
	{name: "406", server: always(reply{status: 406, header: plain, body: "Not Acceptable: Client must accept text/event-stream"}), want: "unknown probe_rejected"},
	{name: "421", server: always(reply{status: 421}), want: "unknown host_guessed"},
	{name: "429", server: always(reply{status: 429, header: "Retry-After: 7", body: "slow down"}), want: "degraded rate_limited"},
	{name: "502", server: always(reply{status: 502, header: page, body: "<h1>Bad Gateway</h1>"}), want: "dead gateway_error"},
	{name: "503 JSON-RPC", server: always(reply{status: 503, header: jsonType + "\nRetry-After: 2", body: `{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"Too many sessions"}}`}), want: "degraded session_limit"},
	{name: "503 of another mcphealth", server: always(reply{status: 503, header: jsonType + "\nX-Mcp-Health: refused", body: `{"jsonrpc":"2.0","id":$id,"error":{"code":503,"message":"gone"}}`}), want: "dead gateway_error"},
	{name: "503 draining", server: always(reply{status: 503, header: plain, body: "shutting down"}), want: "degraded draining"},
	{name: "500 page", server: always(reply{status: 500, header: page, body: "<h1>oops</h1>"}), want: "dead server_error"},
	{name: "408", server: always(reply{status: 408}), want: "dead timeout"},
	{name: "404 bare", server: bare404(), want: "unknown endpoint_not_found"},
	{name: "404 from initialize too", server: always(reply{status: 404, header: jsonType, body: noSession}), want: "dead route_absent"},
	{name: "301 cross-origin", server: always(reply{status: 301, header: "Location: https://other.example/mcp"}), want: "unknown redirected"},
	{name: "any response", server: always(reply{status: 404, header: page, body: "<h1>no</h1>"}), ask: map[string]string{"AliveIf": "any_response"}, want: "alive http_answer"},
	{name: "comments only", server: always(reply{status: 200, header: streamType, body: ": ping\n\n: ping\n\n", hang: true}), ask: timeout("1s"), want: "dead stalled"},
	{name: "silence", server: always(reply{status: 200, wait: 2500 * time.Millisecond}), ask: timeout("1s"), want: "dead timeout"},
	{name: "closed connection", server: always(reply{drop: "close"}), want: "dead reset"},
	{name: "reset connection", server: always(reply{drop: "reset"}), want: "dead reset"},
	{name: "tools as expected", server: modern(), ask: map[string]string{"ExpectTools": "add,sub", "CallTool": "add", "CallArgs": `{"a":1}`, "Fresh": "true"}, want: "ready ok"},
	{name: "tools, 3 MiB over SSE", server: script{answers: map[string]reply{
		"server/discover": {status: 200, header: jsonType, body: discovered},
		"tools/list": {status: 200, header: streamType, body: `data: {"jsonrpc":"2.0","id":$id,"result":{"tools":[` +
			strings.Repeat(`{"name":"other","description":"`+strings.Repeat("x", 1000)+`"},`, 3<<10) + `{"name":"add"}]}}` + "\n\n"},
	}}, ask: map[string]string{"ExpectTools": "add"}, want: "ready ok"},
	{name: "tools missing", server: modern(), ask: map[string]string{"ExpectTools": "add,mul"}, want: "degraded tools_missing"},
	{name: "tools in a session", server: legacy(refusedText), ask: map[string]string{"ExpectTools": "add"}, want: "ready ok"},
	{name: "tool fails", server: legacy(refusedText), ask: map[string]string{"CallTool": "add"}, want: "degraded tool_failing"},
	{name: "slow", server: always(reply{status: 200, header: jsonType, body: discovered, wait: 5 * time.Millisecond}), ask: map[string]string{"SlowAfter": "1ms"}, want: "degraded slow"},
	{name: "health document", server: modern(), ask: map[string]string{"HealthPath": "/health"}, want: "degraded internal_error"},
	{name: "era legacy", server: legacy(refusedText), ask: map[string]string{"Era": "legacy"}, want: "ready ok"},
	{name: "era modern", server: legacy(refusedText), ask: map[string]string{"Era": "modern"}, want: "alive session_required"},
	{name: "era sse against another", server: modern(), ask: map[string]string{"Era": "sse"}, want: "dead not_mcp"},
	{name: "prepared request", server: modern(), ask: map[string]string{"line": "prepared", "Host": "clients.example"}, want: "ready ok"},
	{name: "foreign transport", server: modern(), ask: map[string]string{"line": "foreign"}, want: "ready ok"},
}

// timeout: all of these tests run at once, interpreted too, and within less a busy machine
// may not even have dialled, which is another verdict.
func timeout(d string) map[string]string { return map[string]string{"Timeout": d} }

func TestSame(t *testing.T) {
	d := interpreted(t)
	for _, tt := range sameTests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			probes := tt.probes
			if probes == 0 {
				probes = 2
			}
			c := outcomeAt(t, compiled, serve(tt.server), probes, tt.ask)
			i := outcomeAt(t, d, serve(tt.server), probes, tt.ask)
			compare(t, c, i, probes, tt.want)
		})
	}
}

// outcome is all that can be seen of some probes, from both ends.
type outcome struct {
	texts     []string
	questions string
	left      int // sessions on the server
}

func outcomeAt(t *testing.T, d drive, s *scripted, probes int, ask map[string]string) outcome {
	t.Helper()
	server := httptest.NewServer(s)
	defer server.Close()
	texts := probe(d, server.URL, probes, ask)
	return outcome{texts: texts, questions: s.questions(), left: s.left()}
}

// changing is what differs between two runs of the same: ports, random ids, times.
var changing = regexp.MustCompile(`127\.0\.0\.1:\d+|mcphealth-[0-9a-f]{16}|after \d+ms`)

func probe(d drive, base string, probes int, ask map[string]string) []string {
	return probeAt(d, base+"/mcp", probes, ask)
}

func probeAt(d drive, url string, probes int, ask map[string]string) []string {
	settings := maps.Clone(ask)
	if settings == nil {
		settings = map[string]string{}
	}
	settings["URL"] = url
	texts := d.Probe(probes, settings)
	for i := range texts {
		texts[i] = changing.ReplaceAllString(texts[i], "*")
	}
	return texts
}

func compare(t *testing.T, c, i outcome, probes int, want string) {
	t.Helper()
	if len(c.texts) != probes+1 || len(i.texts) != len(c.texts) {
		t.Fatalf("%d probes gave %d texts compiled, %d interpreted:\n%q\n%q", probes, len(c.texts), len(i.texts), c.texts, i.texts)
	}
	for n := range c.texts {
		if d := diff(c.texts[n], i.texts[n]); d != "" {
			t.Errorf("text %d of %d differs (- compiled, + interpreted):\n%s", n+1, len(c.texts), d)
		}
	}
	if d := diff(c.questions, i.questions); d != "" {
		t.Errorf("the server was asked other questions (- compiled, + interpreted):\n%s", d)
	}
	if c.left != 0 || i.left != 0 {
		t.Errorf("Close left %d sessions on the server compiled, %d interpreted, want none", c.left, i.left)
	}
	last := strings.SplitN(c.texts[probes-1], "\n", 3)
	if got := strings.TrimPrefix(last[0], "verdict: ") + " " + strings.TrimPrefix(last[1], "reason: "); got != want {
		t.Errorf("the compiled core says %q, want %q: the case does not reach what it is there for\n%s", got, want, c.texts[probes-1])
	}
}

// diff is the lines that differ, "" if none do.
func diff(a, b string) string {
	if a == b {
		return ""
	}
	as, bs := strings.Split(a, "\n"), strings.Split(b, "\n")
	var out []string
	for n := 0; n < len(as) || n < len(bs); n++ {
		switch {
		case n >= len(bs):
			out = append(out, "- "+as[n])
		case n >= len(as):
			out = append(out, "+ "+bs[n])
		case as[n] != bs[n]:
			out = append(out, "- "+as[n], "+ "+bs[n])
		}
	}
	return strings.Join(out, "\n")
}

// TestSameRedirect: one same-origin 307 is replayed, a second is not.
func TestSameRedirect(t *testing.T) {
	d := interpreted(t)
	for _, tt := range []struct{ name, location, want string }{
		{"same origin", "/final?x=1", "ready ok"},
		{"loop", "/mcp", "unknown redirected"},
		{"other port", "http://127.0.0.1:1/mcp", "unknown redirected"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			both := [2]outcome{}
			for n, d := range []drive{compiled, d} {
				final := serve(modern())
				server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/mcp" {
						http.Redirect(w, r, tt.location, http.StatusTemporaryRedirect)
						return
					}
					final.ServeHTTP(w, r)
				}))
				both[n] = outcome{texts: probe(d, server.URL, 2, nil), questions: final.questions()}
				server.Close()
			}
			compare(t, both[0], both[1], 2, tt.want)
		})
	}
}

// TestSameUnreachable: what no server answers, and what one that is no HTTP
// server does.
func TestSameUnreachable(t *testing.T) {
	d := interpreted(t)
	for _, tt := range []struct {
		name, url string
		ask       map[string]string
		want      string
	}{
		{name: "refused port", url: "http://" + closedPort(t), want: "dead refused"},
		{name: "no such name", url: "http://mcphealth.invalid", ask: timeout("2s"), want: "dead dns"},
		{name: "no HTTP", url: "http://" + chatty(t, "SSH-2.0-OpenSSH_9.7\r\n"), want: "dead not_mcp"},
		{name: "no TLS", url: "https://" + chatty(t, "HTTP/1.0 400 Bad Request\r\n\r\nno TLS"), want: "dead tls"},
		{name: "silent TLS", url: "https://" + chatty(t, ""), ask: timeout("200ms"), want: "dead tls"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, i := outcome{texts: probe(compiled, tt.url, 2, tt.ask)}, outcome{texts: probe(d, tt.url, 2, tt.ask)}
			compare(t, c, i, 2, tt.want)
		})
	}
}

// closedPort is an address of loopback at which nobody listens.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// chatty accepts, waits for the first bytes, says its words, whatever came, and
// then waits for the other side to go.
func chatty(t *testing.T, words string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
				b := make([]byte, 4<<10)
				_, err := c.Read(b)
				time.Sleep(20 * time.Millisecond) // net/http words an early answer differently
				_, _ = c.Write([]byte(words))
				for err == nil {
					_, err = c.Read(b)
				}
			}()
		}
	}()
	return l.Addr().String()
}

// TestSameTLS: the core's own net.Conn lies below TLS, and below HTTP/2.
func TestSameTLS(t *testing.T) {
	d := interpreted(t)
	for _, tt := range []struct {
		name string
		ask  map[string]string
		want string
	}{
		{name: "trusted", ask: map[string]string{"line": "insecure"}, want: "ready ok"},
		{name: "HTTP/2", ask: map[string]string{"line": "h2"}, want: "ready ok"},
		{name: "not trusted", want: "dead tls"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			both := [2]outcome{}
			for n, d := range []drive{compiled, d} {
				s := serve(legacy(refusedText))
				server := httptest.NewUnstartedServer(s)
				server.EnableHTTP2 = true
				server.Config.ErrorLog = log.New(io.Discard, "", 0) // it would print each refused handshake
				server.StartTLS()
				both[n] = outcome{texts: probe(d, server.URL, 2, tt.ask), questions: s.questions(), left: s.left()}
				server.Close()
			}
			compare(t, both[0], both[1], 2, tt.want)
		})
	}
}
