package mcphealth

import (
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/internal/mcpfake"
)

const (
	// hostileTimeout is the probe's in these tests, hostilePatience what it may
	// take beside: a loaded machine, not a second chance for the server.
	hostileTimeout  = time.Second
	hostilePatience = 500 * time.Millisecond
	// maxLive is how much heap a probe may hold at any moment: 1 MiB.
	maxLive = 1 << 20

	okJSON = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
	okSSE  = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
)

// otherAnswer is a result for somebody else.
const otherAnswer = `{"jsonrpc":"2.0","id":1,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`

type hostile struct {
	name string
	want string // verdict and reason
	do   func(*mcpfake.Socket)
}

// hostiles are servers that misbehave on the wire in one way each, on every
// question. $ID in a text is the id of the question, quoted.
var hostiles = []hostile{
	// Too much.
	{"endless headers", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON); s.Forever("X-Bomb: " + strings.Repeat("a", 4000) + "\r\n") }},
	{"one endless header", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "X-Bomb: "); s.Forever(strings.Repeat("a", 4096)) }},
	{"endless 1xx answers", "dead not_mcp", func(s *mcpfake.Socket) { s.Forever("HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n") }},
	{"endless comments", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okSSE + "\r\n"); s.Forever(": keep-alive\n\n") }},
	{"endless event", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okSSE + "\r\n"); s.Forever("data: more\n") }},
	{"endless event line", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okSSE + "\r\ndata: "); s.Forever(strings.Repeat("a", 4096)) }},
	{"endless JSON string", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "\r\n" + `{"jsonrpc":"2.0","id":$ID,"result":{"a":"`)
		s.Forever(strings.Repeat("a", 4096))
	}},
	{"endless JSON nesting", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n"); s.Forever(strings.Repeat("[", 4096)) }},
	{"endless white space", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n"); s.Forever(strings.Repeat(" ", 4096)) }},
	{"endless white space of no type", "dead not_mcp", func(s *mcpfake.Socket) { s.Say("HTTP/1.1 200 OK\r\n\r\n"); s.Forever(strings.Repeat("\n", 4096)) }},
	{"endless HTML", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n")
		s.Forever("<p>and so on")
	}},
	{"endless text", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
		s.Forever("and so on ")
	}},
	{"1 GiB of JSON", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Length: 1073741824\r\n\r\n[")
		s.Forever(`{"jsonrpc":"2.0","id":"another","result":{}},`)
	}},
	{"gzip bomb", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Encoding: gzip\r\n\r\n")
		s.Send(bomb)
	}},
	{"gzip bomb as an event", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okSSE + "Content-Encoding: gzip\r\n\r\n")
		s.Send(bomb)
	}},
	{"endless chunk extension", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "Transfer-Encoding: chunked\r\n\r\n1;")
		s.Forever(strings.Repeat("x", 4096))
	}},
	{"an answer, then no end", "ready ok", func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n" + discovered); s.Forever(strings.Repeat(" ", 4096)) }},
	{"an event, then no end", "ready ok", func(s *mcpfake.Socket) {
		s.Say(okSSE + "\r\ndata: " + discovered + "\n\n")
		s.Forever(": keep-alive\n\n")
	}},

	// Not for us.
	{"another's answer", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n" + otherAnswer) }},
	{"others' answers for ever", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okSSE + "\r\n"); s.Forever("data: " + otherAnswer + "\n\n") }},
	{"302 to another origin", "unknown redirected", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 302 Found\r\nLocation: http://trap.example/mcp\r\nContent-Length: 0\r\n\r\n")
	}},
	{"307 to another origin", "unknown redirected", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 307 Temporary Redirect\r\nLocation: http://trap.example/mcp\r\nContent-Length: 0\r\n\r\n")
	}},
	{"307 to another port", "unknown redirected", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/mcp\r\nContent-Length: 0\r\n\r\n")
	}},
	{"308 to the cloud's metadata", "unknown redirected", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 308 Permanent Redirect\r\nLocation: http://169.254.169.254/latest/meta-data\r\nContent-Length: 0\r\n\r\n")
	}},
	{"307 to another scheme", "unknown redirected", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 307 Temporary Redirect\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n")
	}},
	{"307 to itself", "unknown redirected", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 307 Temporary Redirect\r\nLocation: /mcp\r\nContent-Length: 0\r\n\r\n")
	}},
	{"307 to no place", "unknown redirected", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 307 Temporary Redirect\r\nLocation: ://\r\nContent-Length: 0\r\n\r\n")
	}},

	// Odd, and clients read it; or they do not.
	{"a byte order mark", "ready ok", func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n" + byteOrderMark + discovered) }},
	{"a byte order mark, no type", "ready ok", func(s *mcpfake.Socket) { s.Say("HTTP/1.1 200 OK\r\n\r\n" + byteOrderMark + discovered) }},
	{"an id with escapes", "ready ok", func(s *mcpfake.Socket) {
		s.ID = strings.ReplaceAll(s.ID, "-", `\u002d`)
		s.Say(okJSON + "\r\n" + discovered)
	}},
	{"members of odd types", "ready ok", func(s *mcpfake.Socket) {
		s.Say(okJSON + "\r\n" + `{"jsonrpc":"2.0","id":$ID,"result":{"ttlMs":"0","serverInfo":{"name":"x","version":1},"supportedVersions":["2026-07-28"],"capabilities":{}}}`)
	}},
	{"a code in quotes", "alive method_not_found", func(s *mcpfake.Socket) {
		s.Say(okJSON + "\r\n" + `{"jsonrpc":"2.0","id":$ID,"error":{"code":"-32601","message":"no"}}`)
	}},
	{"an error whose message is no text", "alive rpc_error", func(s *mcpfake.Socket) {
		s.Say(okJSON + "\r\n" + `{"jsonrpc":"2.0","error":{"code":-32000,"message":[{"type":"missing"}]},"id":$ID}`)
	}},
	{"gzip by its old name", "ready ok", func(s *mcpfake.Socket) {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, _ = io.WriteString(z, strings.ReplaceAll(discovered, "$ID", s.ID))
		_ = z.Close()
		s.Say(okJSON + "Content-Encoding: x-gzip\r\n\r\n")
		s.Send(b.Bytes())
	}},
	{"a batch as an event", "ready ok", func(s *mcpfake.Socket) {
		s.Say(okSSE + "\r\ndata: [" + `{"jsonrpc":"2.0","method":"notifications/progress"},` + discovered + "]\n\n")
	}},
	{"a batch that begins on the second line of data", "ready ok", func(s *mcpfake.Socket) { s.Say(okSSE + "\r\ndata:\ndata: [" + discovered + "]\n\n") }},
	{"an event with an empty name", "ready ok", func(s *mcpfake.Socket) { s.Say(okSSE + "\r\nevent:\ndata: " + discovered + "\n\n") }},
	{"an event field without a colon", "ready ok", func(s *mcpfake.Socket) {
		s.Say(okSSE + "\r\nevent: response\nevent\ndata: " + discovered + "\n\n")
	}},
	{"a stream of a type that nobody can read", "ready ok", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream, text/event-stream\r\n\r\nretry: 10\n\nid: 1\ndata: " + discovered + "\n\n")
	}},
	{"a stream of no type, with a byte order mark", "ready ok", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 200 OK\r\n\r\n" + byteOrderMark + "id: 1\ndata: " + discovered + "\n\n")
	}},
	{"a CR and its LF in two packets", "ready ok", func(s *mcpfake.Socket) {
		s.Say(okSSE + "\r\ndata: " + discovered + "\r")
		time.Sleep(20 * time.Millisecond)
		s.Say("\n\r")
		time.Sleep(20 * time.Millisecond)
		s.Say("\n")
	}},
	{"trailers, a character in two chunks", "ready ok", func(s *mcpfake.Socket) {
		s.Say(okSSE + "Transfer-Encoding: chunked\r\nTrailer: X-A\r\n\r\n")
		for _, part := range []string{"data: {\"x\":\"\xe2\x82", "\xac\"," + discovered[1:] + "\n\n"} {
			part = strings.ReplaceAll(part, "$ID", s.ID)
			s.Say(fmt.Sprintf("%x\r\n%s\r\n", len(part), part))
		}
		s.Say("0\r\nX-A: b\r\n\r\n")
	}},
	{"hints, and 100 unasked", "ready ok", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + okJSON + "\r\n" + discovered)
	}},
	{"a length that never comes", "ready ok", func(s *mcpfake.Socket) { s.Say(okJSON + "Content-Length: 4000\r\n\r\n" + discovered) }},
	{"an event of another name", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okSSE + "\r\nevent: response\ndata: " + discovered + "\n\n") }},
	{"members in Pascal's case", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "\r\n" + `{"JsonRpc":"2.0","Id":$ID,"Result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`)
	}},
	{"JSON-RPC in a page", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + discovered)
	}},
	// 401, 403, 421, 429 and what gateways say count without their body.
	{"401 in gzip, and nothing in it", "alive auth_required", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 401 Unauthorized\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n")
	}},
	{"429 in broken gzip", "degraded rate_limited", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nslow")
	}},
	{"502 cut off", "dead gateway_error", func(s *mcpfake.Socket) { s.Say("HTTP/1.1 502 Bad Gateway\r\nContent-Length: 100\r\n\r\nBad") }},
	{"404 in gzip, and nothing in it", "unknown endpoint_not_found", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 404 Not Found\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n")
	}},
	{"304 from a cache", "dead not_mcp", func(s *mcpfake.Socket) { s.Say("HTTP/1.1 304 Not Modified\r\n\r\n") }},
	{"an endless page of a 403", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 403 Forbidden\r\nContent-Type: text/html\r\n\r\n")
		s.Forever("<p>and so on")
	}},

	// Broken.
	{"line noise", "dead not_mcp", func(s *mcpfake.Socket) { s.Say("\x00\x01\x02 not HTTP \xff\xfe\r\n\r\n") }},
	{"another protocol", "dead not_mcp", func(s *mcpfake.Socket) { s.Say("SSH-2.0-OpenSSH_9.6\r\n") }},
	{"HTTP/2 frames", "dead not_mcp", func(s *mcpfake.Socket) { s.Say("\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x80\r\n") }},
	{"two lengths", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}") }},
	{"a negative length", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "Content-Length: -1\r\n\r\n{}") }},
	{"a header without a colon", "dead not_mcp", func(s *mcpfake.Socket) { s.Say("HTTP/1.1 200 OK\r\nnonsense\r\n\r\n") }},
	{"an unknown transfer encoding", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "Transfer-Encoding: hop\r\n\r\n{}") }},
	{"truncated JSON", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Length: 400\r\n\r\n" + `{"jsonrpc":"2.0","id":$ID,"res`)
	}},
	{"truncated event", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okSSE + "\r\ndata: " + discovered) }},
	{"truncated chunk", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "Transfer-Encoding: chunked\r\n\r\n400\r\n" + `{"jsonrpc":"2.0","id":$ID,"res`)
	}},
	{"chunked garbage", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n") }},
	{"gzip garbage", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Encoding: gzip\r\nContent-Length: 11\r\n\r\nnot gzipped")
	}},
	{"gzip of garbage", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Encoding: gzip\r\n\r\n")
		s.Send(append(append([]byte(nil), bomb[:10]...), "\xff\xff\xff\xff not deflated"...))
	}},
	{"an encoding that nobody asked for", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Encoding: br\r\nContent-Length: 4\r\n\r\n\x0b\x01\x80{")
	}},
	{"gzip cut off", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Encoding: gzip\r\n\r\n")
		s.Send(bomb[:40])
	}},
	{"101 to nowhere", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
	}},
	{"an array of nothing", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n[null,[],{},1,\"a\"]") }},
	{"no UTF-8", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n{\"jsonrpc\":\"2.0\",\"id\":\"\xff\xfe\",\"result\":{}}") }},
	// Other JSON-RPC services have a ping as well: Bitcoin Core answers null.
	{"results that are none of MCP's", "dead not_mcp", func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n" + `{"jsonrpc":"2.0","id":$ID,"result":"all is well"}`) }},

	// Gone.
	{"closed before a byte", "dead reset", func(*mcpfake.Socket) {}},
	{"closed in the status line", "dead not_mcp", func(s *mcpfake.Socket) { s.Say("HTTP/1.1 2") }},
	{"closed in the headers", "dead not_mcp", func(s *mcpfake.Socket) { s.Say("HTTP/1.1 200 OK\r\nContent-") }},
	{"reset before a byte", "dead reset", func(s *mcpfake.Socket) { s.Reset() }},
	{"reset after the headers", "dead reset", func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Length: 400\r\n\r\n{")
		time.Sleep(20 * time.Millisecond) // a reset overtakes what is not read yet
		s.Reset()
	}},
}

// stallers are those that take all the time there is.
var stallers = []hostile{
	{"silence", "dead timeout", func(s *mcpfake.Socket) { s.Hang() }},
	{"a status line, then silence", "dead timeout", func(s *mcpfake.Socket) { s.Say("HTTP/1.1 200 OK\r\n"); s.Hang() }},
	{"headers a byte at a time", "dead timeout", func(s *mcpfake.Socket) { s.Drip(okJSON + "\r\n" + discovered) }},
	{"headers, then silence", "dead stalled", func(s *mcpfake.Socket) { s.Say(okJSON + "Content-Length: 100\r\n\r\n"); s.Hang() }},
	{"JSON a byte at a time", "dead stalled", func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n"); s.Drip(discovered) }},
	{"an event a byte at a time", "dead stalled", func(s *mcpfake.Socket) { s.Say(okSSE + "\r\n"); s.Drip("data: " + discovered + "\n\n") }},
	{"comments now and then", "dead stalled", func(s *mcpfake.Socket) { s.Say(okSSE + "\r\n"); s.Drip(strings.Repeat(":\n", 1000)) }},
	{"half an answer, then silence", "dead stalled", func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n" + `{"jsonrpc":"2.0","id":$ID,`); s.Hang() }},
	{"others' answers now and then", "dead stalled", func(s *mcpfake.Socket) {
		s.Say(okSSE + "\r\n")
		for s.Say("data: " + otherAnswer + "\n\n") {
			time.Sleep(50 * time.Millisecond)
		}
	}},
	{"401, and a body that never comes", "alive auth_required", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n")
		s.Hang()
	}},
	{"429, and a body that never comes", "degraded rate_limited", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 429 Too Many Requests\r\nContent-Length: 100\r\n\r\n")
		s.Hang()
	}},
	{"a page of a 400 that never comes", "dead not_mcp", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 400 Bad Request\r\nContent-Type: text/html\r\n\r\n")
		s.Hang()
	}},
	{"502, and a body that never comes", "dead gateway_error", func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 502 Bad Gateway\r\nContent-Length: 100\r\n\r\n")
		s.Hang()
	}},
}

// discovered is what a healthy modern server answers.
const discovered = `{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`

// bomb is 64 MiB of a JSON string in 64 KiB of gzip.
var bomb = func() []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, `{"jsonrpc":"2.0","result":"`)
	as := bytes.Repeat([]byte("a"), 1<<20)
	for i := 0; i < 64; i++ {
		_, _ = z.Write(as)
	}
	_ = z.Close()
	return b.Bytes()
}()

func TestHostile(t *testing.T) {
	for i := range 2 * len(hostiles) {
		h, way := hostiles[i/2], ways[i%2]
		t.Run(h.name+"/"+way, func(t *testing.T) {
			before := runtime.NumGoroutine()
			peak := watchLive(t)
			h.meet(t, way)(t)
			live := peak()
			for n := 0; n < 2 && live > maxLive; n++ {
				// What is allocated while the collector marks counts as live: on a
				// busy machine that is some of the garbage as well. Measure again.
				live = min(live, liveOf(t, h.do))
			}
			if live > maxLive {
				t.Errorf("Probe held %d KiB of heap at once, want at most %d", live>>10, maxLive>>10)
			}
			if after := settledGoroutines(before); after > before {
				t.Errorf("%d goroutines after Close, %d before:\n%s", after, before, stacks())
			}
		})
	}
}

// All at the same time, for they wait.
func TestStalling(t *testing.T) {
	before := runtime.NumGoroutine()
	var judge []func(*testing.T)
	for i := range 2 * len(stallers) {
		judge = append(judge, stallers[i/2].meet(t, ways[i%2]))
	}
	for i := range judge {
		t.Run(stallers[i/2].name+"/"+ways[i%2], judge[i])
	}
	if after := settledGoroutines(before); after > before {
		t.Errorf("%d goroutines after Close, %d before:\n%s", after, before, stacks())
	}
}

// ways are the lines by which a probe goes (see lines).
var ways = []string{"plain", "transport"}

// meet begins a probe of h; what it returns waits for its end and judges it.
func (h hostile) meet(t *testing.T, way string) func(t *testing.T) {
	t.Helper()
	s := listenHostile(t, h.do)
	dialled := &dialLog{}
	p, err := NewProber(Target{URL: "http://" + s.Addr().String() + "/mcp", Timeout: hostileTimeout},
		lines[way](&http.Transport{DialContext: dialled.dial}))
	if err != nil {
		t.Fatal(err)
	}
	var r Result
	var took time.Duration
	done := make(chan struct{})
	go func() {
		defer close(done)
		r = p.Probe(context.Background())
		took = time.Since(r.At)
	}()
	return func(t *testing.T) {
		<-done
		p.Close(context.Background())
		s.Stop()
		if got := string(r.Verdict) + " " + string(r.Reason); got != h.want {
			t.Errorf("Probe = %q, want %q\n%s", got, h.want, trail(r))
		}
		if took > hostileTimeout+hostilePatience {
			t.Errorf("Probe took %v, want at most the timeout of %v", took, hostileTimeout)
		}
		if others := dialled.except(s.Addr().String()); len(others) > 0 {
			t.Errorf("Probe dialled %v, want its own upstream only", others)
		}
	}
}

// liveOf is the heap that one more probe of such an upstream holds.
func liveOf(t *testing.T, do func(*mcpfake.Socket)) int64 {
	t.Helper()
	s := listenHostile(t, do)
	defer s.Stop()
	p, err := NewProber(Target{URL: "http://" + s.Addr().String() + "/mcp", Timeout: hostileTimeout}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	peak := watchLive(t)
	p.Probe(context.Background())
	return peak()
}

// watchLive makes the collector run all the time and remembers the most it found
// reachable, beyond what was so before: what the probe, its connection and the
// fake server held at one moment. Garbage between two collections is not in it.
func watchLive(t *testing.T) (peak func() int64) {
	t.Helper()
	percent := debug.SetGCPercent(1)
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	read := func() int64 { metrics.Read(sample); return int64(sample[0].Value.Uint64()) }
	runtime.GC()
	before, most := read(), int64(0)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			case <-time.After(500 * time.Microsecond):
			}
			if n := read() - before; n > most {
				most = n
			}
		}
	}()
	return func() int64 {
		close(stop)
		<-done
		debug.SetGCPercent(percent)
		return most
	}
}

// settledGoroutines waits up to a second for the number to fall to want.
func settledGoroutines(want int) int {
	for i := 0; i < 100 && runtime.NumGoroutine() > want; i++ {
		time.Sleep(10 * time.Millisecond)
	}
	return runtime.NumGoroutine()
}

func stacks() []byte {
	b := make([]byte, 64<<10)
	return b[:runtime.Stack(b, true)]
}

// dialLog notes where a transport dials.
type dialLog struct {
	mu    sync.Mutex
	addrs []string
}

func (d *dialLog) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d.mu.Lock()
	d.addrs = append(d.addrs, addr)
	d.mu.Unlock()
	return (&net.Dialer{}).DialContext(ctx, network, addr)
}

func (d *dialLog) except(addr string) (others []string) {
	for _, a := range d.addrs {
		if a != addr {
			others = append(others, a)
		}
	}
	return others
}

func listenHostile(t testing.TB, do func(*mcpfake.Socket)) *mcpfake.Hostile {
	t.Helper()
	h, err := mcpfake.Misbehave(do)
	if err != nil {
		t.Fatal(err)
	}
	return h
}
