package reliability

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// hostileBodies are what clients send while nothing can serve: the edge answers each
// with a 503 of its own, whose id it has to find.
var hostileBodies = []struct {
	name, body string
	want       string // id of the answer, as JSON; "none" for an answer without one, "any" for the client's or null
}{
	{"a number", callBody(`7`), `7`},
	{"a negative number", callBody(`-7`), `-7`},
	{"a fraction", callBody(`1.5`), `1.5`},
	{"a number beyond float64", callBody(`1e400`), `1e400`},
	{"a string", callBody(`"a"`), `"a"`},
	{"an empty string", callBody(`""`), `""`},
	{"escapes", callBody(`"\u0000\"\\\ud83d\ude00"`), `"\u0000\"\\\ud83d\ude00"`},
	{"script", callBody(`"</script><script>alert(1)</script>"`), "any"},
	{"1,000 bytes", callBody(`"` + strings.Repeat("x", 1000) + `"`), `"` + strings.Repeat("x", 1000) + `"`},
	{"64 KiB", callBody(`"` + strings.Repeat("x", 64<<10) + `"`), `null`},
	{"200 KiB", callBody(`"` + strings.Repeat("x", 200<<10) + `"`), `null`}, // net/http reads 256 KiB of what nobody read
	{"null", callBody(`null`), `null`},
	{"true", callBody(`true`), `null`},
	{"an object", callBody(`{"id":1}`), `null`},
	{"an array", callBody(`[1]`), `null`},
	{"none", `{"jsonrpc":"2.0","method":"notifications/initialized"}`, "none"},
	{"twice", `{"jsonrpc":"2.0","id":1,"method":"ping","id":2}`, "any"},
	{"in params only", `{"jsonrpc":"2.0","method":"x","params":{"id":3}}`, "none"},
	{"no UTF-8", callBody("\"\xff\xfe\""), "any"},
	{"half a surrogate", callBody(`"\ud800"`), "any"},
	{"behind deep nesting", `{"jsonrpc":"2.0","params":` + strings.Repeat("[", 50000) + strings.Repeat("]", 50000) + `,"method":"ping","id":4}`, "any"},
	{"endless nesting", strings.Repeat("[", 100000), `null`},
	{"a batch", `[` + callBody(`1`) + `,` + callBody(`2`) + `]`, `null`},
	{"an empty batch", `[]`, `null`},
	{"no JSON", "<html>", `null`},
	{"cut off", `{"jsonrpc":"2.0","id":5,"method":"tools/ca`, "any"},
	{"NUL bytes", strings.Repeat("\x00", 1000), `null`},
	{"nothing", "", `null`},
}

func TestHostileBodies(t *testing.T) {
	for _, edge := range edges {
		t.Run(edge.name, func(t *testing.T) {
			e := edge.start(t, Route{Name: "dead", Upstreams: []string{nowhere(t)}, Interval: 100 * time.Millisecond})
			awaitAnswer(t, e.URL("dead"), http.StatusServiceUnavailable)
			for _, row := range hostileBodies {
				if wrong := answerTo(e.URL("dead"), row.body, row.want); wrong != "" {
					t.Errorf("%s: %s", row.name, wrong)
				}
			}
		})
	}
}

// nowhere is an address on which nothing listens until the test does.
func nowhere(t testing.TB) string {
	t.Helper()
	return fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t))
}

func awaitAnswer(t testing.TB, url string, status int) {
	t.Helper()
	await(t, 10*time.Second, fmt.Sprintf("status %d of %s", status, url), func() bool {
		resp, err := alone.Post(url, "application/json", strings.NewReader(callBody("0")))
		if err != nil {
			return false
		}
		resp.Body.Close()
		return resp.StatusCode == status
	})
}

// answerTo says what is wrong with the edge's 503 to body; "" is good.
func answerTo(url, body, want string) string {
	resp, err := alone.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		return err.Error()
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		return err.Error()
	}
	var a struct {
		ID    *json.RawMessage
		Error json.RawMessage
	}
	switch {
	case resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || resp.Header.Get("Content-Type") != "application/json":
		return fmt.Sprintf("%s %v", resp.Status, resp.Header)
	case !utf8.Valid(got) || json.Unmarshal(got, &a) != nil || a.Error == nil || len(got) > 4<<10:
		return fmt.Sprintf("no short JSON-RPC error: %.300q", got)
	}
	id := "none"
	if bytes.Contains(got, []byte(`"id":null`)) {
		id = "null"
	} else if a.ID != nil {
		id = string(*a.ID)
	}
	if want != "any" && id != want {
		return fmt.Sprintf("id %.100s, want %.100s", id, want)
	}
	return ""
}

// smuggledCall is a second request that must never be executed.
const smuggledCall = "POST /good/mcp HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 66\r\n\r\n" +
	`{"jsonrpc":"2.0","id":"smuggled","method":"tools/call","params":{}}`

const head = "POST /good/mcp HTTP/1.1\r\nHost: edge\r\nContent-Type: application/json\r\n"

// hostileRequests are bytes on the edge's socket. Whatever comes back, the edge goes
// on and executes nothing but the one call, if that.
var hostileRequests = []struct{ name, raw string }{
	{"a length and chunks", head + "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggledCall},
	{"chunks and a short length", head + "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n5c\r\n" + smuggledCall + "\r\n0\r\n\r\n"},
	{"chunks of another kind", head + "Transfer-Encoding: xchunked\r\nContent-Length: 0\r\n\r\n" + smuggledCall},
	{"chunks, hidden by a tab", head + "Transfer-Encoding:\tchunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" + smuggledCall},
	{"chunks, folded", head + "Transfer-Encoding:\r\n chunked\r\nContent-Length: 0\r\n\r\n" + smuggledCall},
	{"chunks, twice", head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\nContent-Length: 0\r\n\r\n" + smuggledCall},
	{"a name with a space", head + "Content-Length : 0\r\n\r\n" + smuggledCall},
	{"two lengths", head + "Content-Length: 0\r\nContent-Length: 200\r\n\r\n" + smuggledCall},
	{"a length with a sign", head + "Content-Length: +0\r\n\r\n" + smuggledCall},
	{"a negative length", head + "Content-Length: -1\r\n\r\n" + smuggledCall},
	{"a length in hex", head + "Content-Length: 0x10\r\n\r\n" + smuggledCall},
	{"bare line feeds", strings.ReplaceAll(head, "\r\n", "\n") + "Content-Length: 0\nTransfer-Encoding: chunked\n\n0\n\n" + smuggledCall},
	{"a chunk size that overflows", head + "Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n{}"},
	{"an endless chunk extension", head + "Transfer-Encoding: chunked\r\n\r\n1;" + strings.Repeat("x", 1<<20)},
	{"a line break in a value", head + "Mcp-Session-Id: a\rX-Evil: 1\r\nContent-Length: 0\r\n\r\n"},
	{"NUL in a value", head + "Mcp-Session-Id: a\x00b\r\nContent-Length: 0\r\n\r\n"},
	{"2 MiB of headers", head + strings.Repeat("X-A: "+strings.Repeat("a", 1000)+"\r\n", 2000) + "\r\n"},
	{"no headers for ever", head},
	{"no version", "POST /good/mcp\r\n\r\n"},
	{"another host in the line", "POST http://evil.example/good/mcp HTTP/1.1\r\nHost: edge\r\nContent-Length: 0\r\n\r\n"},
	{"two hosts", head + "Host: evil.example\r\nContent-Length: 0\r\n\r\n"},
	{"CONNECT", "CONNECT 169.254.169.254:80 HTTP/1.1\r\nHost: 169.254.169.254:80\r\n\r\n"},
	{"TRACE", "TRACE /good/mcp HTTP/1.1\r\nHost: edge\r\n\r\n"},
	{"a way up", strings.Replace(head, "/good/mcp", "/good/../../../etc/passwd", 1) + "\r\n"},
	{"HTTP/2 without end", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\x00\x00\x00\x04\x00\x00\x00\x00\x00", 20000)},
	{"HTTP/2, CONTINUATION without end", inHTTP2(func(f *http2.Framer, call []byte) {
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: call})
		for range 20000 {
			f.WriteContinuation(1, false, nil)
		}
	})},
	{"HTTP/2, one field again and again", inHTTP2(func(f *http2.Framer, call []byte) {
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: call})
		for range 20 { // the content-type of call, from the table, in a byte each
			f.WriteContinuation(1, false, bytes.Repeat([]byte{0x80 | 62}, 16000))
		}
	})},
	{"HTTP/2, PING without end", inHTTP2(func(f *http2.Framer, _ []byte) {
		for range 20000 {
			f.WritePing(false, [8]byte{1})
		}
	})},
	{"HTTP/2, no window for the answer", inHTTP2(func(f *http2.Framer, call []byte) {
		f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		for id := uint32(1); id < 200; id += 2 {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: call, EndHeaders: true})
			f.WriteData(id, true, []byte(callBody(fmt.Sprintf(`"window %d"`, id))))
			call = []byte{0x80 | 3, 0x80 | 6, 0x80 | 62, 0x80 | 63, 0x80 | 64} // the same, from the table
		}
	})},
	{"line noise", strings.Repeat("\x00\xff\x16\x03", 5000)},
	{"an upgrade", head + "Connection: Upgrade, Mcp-Session-Id, Authorization\r\nUpgrade: websocket\r\nMcp-Session-Id: a\r\nContent-Length: 0\r\n\r\n"},
	{"a promise to go on", head + "Expect: 100-continue\r\nContent-Length: 1000000\r\n\r\n"},
}

// inHTTP2 is the beginning of a connection, and what do writes; call is the header block
// of a call to the good server.
func inHTTP2(do func(f *http2.Framer, call []byte)) string {
	var out, block bytes.Buffer
	out.WriteString(http2.ClientPreface)
	enc := hpack.NewEncoder(&block)
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", "edge"}, {":path", "/good/mcp"}, {"content-type", "application/json"}} {
		enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	f := http2.NewFramer(&out, nil)
	f.WriteSettings()
	do(f, block.Bytes())
	return out.String()
}

func TestHostileRequests(t *testing.T) {
	for _, edge := range edges {
		t.Run(edge.name, func(t *testing.T) {
			good := newServer(t)
			e := edge.start(t, Route{Name: "good", Upstreams: []string{good.Addr}, Timeout: 10 * time.Second})
			awaitUp(t, e, good.Addr)
			ask(t, e.URL("good"), callBody(`"before"`))
			goroutines, rss := e.Goroutines(t), e.Proc().RSS(t)
			e.Proc().ResetPeak(t)
			var all sync.WaitGroup
			for _, row := range hostileRequests {
				for range 20 {
					all.Go(func() { shout(e.URL("good"), row.raw) })
				}
			}
			for n := range 5 {
				ask(t, e.URL("good"), callBody(fmt.Sprintf(`"meanwhile %d"`, n)))
				time.Sleep(200 * time.Millisecond)
			}
			all.Wait()
			ask(t, e.URL("good"), callBody(`"after"`))
			if n := good.Runs()[`"smuggled"`]; n > 0 {
				t.Errorf("a smuggled request was executed %d times", n)
			}
			if v, ok := good.Headers.Load("X-Evil"); ok {
				t.Errorf("a smuggled header reached the server: %v", v)
			}
			if peak := e.Proc().Peak(t); peak > rss+maxGrowth {
				t.Errorf("memory %d MiB before, %d at most", rss, peak)
			} else {
				t.Logf("memory %d MiB before, %d at most", rss, peak)
			}
			wantGoroutines(t, e, goroutines)
		})
	}
}

// shout sends raw bytes, reads what comes back for a second, and leaves.
func shout(to, raw string) {
	u, _ := url.Parse(to)
	c, err := net.Dial("tcp", u.Host)
	if err != nil {
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(time.Second))
	go io.WriteString(c, raw)
	io.Copy(io.Discard, io.LimitReader(c, 1<<20))
}

// Clients that wait for an upstream, and leave: none of their calls is executed when
// it comes, no place stays taken, no goroutine is left. By HTTP/1.1, and by a flood of
// HTTP/2 streams that are reset at once.
func TestHeldClientsLeave(t *testing.T) {
	for _, edge := range edges {
		t.Run(edge.name, func(t *testing.T) {
			away := nowhere(t)
			e := edge.start(t, Route{Name: "held", Upstreams: []string{away}, Hold: 30 * time.Second, HoldMax: 400, Interval: 300 * time.Millisecond})
			await(t, 10*time.Second, "down", func() bool { state, _ := e.State(t, away); return state == "down" })
			goroutines := e.Goroutines(t)
			var all sync.WaitGroup
			for n := range 300 {
				all.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
					defer cancel()
					req, _ := http.NewRequestWithContext(ctx, http.MethodPost, e.URL("held"), strings.NewReader(callBody(fmt.Sprintf(`"left-%d"`, n))))
					req.Header.Set("Content-Type", "application/json")
					if resp, err := alone.Do(req); err == nil {
						resp.Body.Close()
						t.Errorf("client %d got %s while nothing was there", n, resp.Status)
					}
				})
			}
			if edge.name == "caddy" { // Traefik's entry point here speaks HTTP/1.1 without TLS
				all.Go(func() { resetStreams(t, e.URL("held"), 2000) })
			}
			all.Wait()
			wantGoroutines(t, e, goroutines)

			s := revive(t, away)
			ask(t, e.URL("held"), callBody(`"later"`))
			for id := range s.Runs() {
				if strings.HasPrefix(id, `"left-`) || strings.HasPrefix(id, `"reset-`) {
					t.Errorf("call %s of a client that had left was executed", id)
				}
			}
		})
	}
}

// resetStreams opens n streams over HTTP/2 and resets each at once (CVE-2023-44487).
func resetStreams(t testing.TB, to string, n int) {
	u, _ := url.Parse(to)
	c, err := net.Dial("tcp", u.Host)
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	io.WriteString(c, http2.ClientPreface)
	in := bufio.NewReader(c)
	go io.Copy(io.Discard, in)
	f := http2.NewFramer(c, nil)
	f.WriteSettings()
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for i := range n {
		block.Reset()
		for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", u.Host}, {":path", u.Path}, {"content-type", "application/json"}} {
			enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
		}
		id := uint32(2*i + 1)
		if f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndHeaders: true}) != nil {
			return // the server has had enough, which is right
		}
		f.WriteData(id, true, []byte(callBody(fmt.Sprintf(`"reset-%d"`, i))))
		f.WriteRSTStream(id, http2.ErrCodeCancel)
	}
}

// Session ids that nobody gave out, in any shape and number, cost nothing that stays,
// and reach the server as they are; sessions that were opened before find theirs after.
func TestSessionFlood(t *testing.T) {
	for _, edge := range edges {
		t.Run(edge.name, func(t *testing.T) {
			a, b := newServer(t), newServer(t)
			e := edge.start(t, Route{Name: "sticky", Upstreams: []string{a.Addr, b.Addr}, Timeout: 10 * time.Second, Caddy: "sticky\n", Traefik: "sticky: true\n", Service: stickyCookie})
			awaitUp(t, e, a.Addr)
			awaitUp(t, e, b.Addr)
			known := map[string]*Server{} // by the id as the client has it
			for n := 0; n < 100 || n < 200 && len(ownersOf(known)) < 2; n++ {
				id := openSession(t, e.URL("sticky"))
				known[id] = a
				if strings.HasPrefix(id, b.Addr) {
					known[id] = b
				}
			}
			if len(ownersOf(known)) < 2 {
				t.Errorf("%d sessions on one server", len(known))
			}
			for _, id := range []string{".", "..", "a.", ".b", "a.b.c", strings.Repeat(".", 1000), "x.AAAAAAAAAAAAAAAAAAAAAA", "a.b,c.d", "a;b=c.d", strings.Repeat("x", 8000), "~!@#$%^&*()"} {
				if status := callIn(e.URL("sticky"), id, `"shape"`); status != http.StatusOK {
					t.Errorf("session %.40q: status %d, want what the server says", id, status)
				}
				seenA, _ := a.Headers.Load("Mcp-Session-Id")
				seenB, _ := b.Headers.Load("Mcp-Session-Id")
				if seenA != id && seenB != id {
					t.Errorf("session %.40q reached the servers as %v or %v", id, seenA, seenB)
				}
			}
			goroutines, rss := e.Goroutines(t), e.Proc().RSS(t)
			ids := 10_000
			if long() {
				ids = 100_000
			}
			var all sync.WaitGroup
			for w := range 10 {
				all.Go(func() {
					for n := range ids / 10 {
						if status := callIn(e.URL("sticky"), fmt.Sprintf("session-%d-%d.%016x", w, n, n*7919), fmt.Sprint(n)); status != http.StatusOK {
							t.Errorf("status %d", status)
							return
						}
					}
				})
			}
			all.Wait()
			if now := e.Proc().RSS(t); now > rss+96 {
				t.Errorf("%d sessions: memory %d MiB before, %d after", ids, rss, now)
			} else {
				t.Logf("%d sessions: memory %d MiB before, %d after", ids, rss, now)
			}
			wantGoroutines(t, e, goroutines)
			n := 0
			for id, owner := range known {
				n++
				call := fmt.Sprintf(`"known %d"`, n)
				if status := callIn(e.URL("sticky"), id, call); status != http.StatusOK || owner.Runs()[call] != 1 {
					t.Errorf("a call in session %q: status %d, and not at its server", id, status)
				}
			}
		})
	}
}

// stickyCookie is what the plugin's sticky asks of Traefik's load balancer.
const stickyCookie = "sticky:\n  cookie:\n    name: stick\n"

func ownersOf(sessions map[string]*Server) map[*Server]bool {
	owners := map[*Server]bool{}
	for _, s := range sessions {
		owners[s] = true
	}
	return owners
}

// openSession opens one at a Server and returns its id as the edge gave it out.
func openSession(t testing.TB, url string) string {
	t.Helper()
	resp, err := pool.Post(url, "application/json", strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	id := resp.Header.Get("Mcp-Session-Id")
	if resp.StatusCode != http.StatusOK || id == "" {
		t.Fatalf("opening a session: %s %v", resp.Status, resp.Header)
	}
	return id
}

// pool is a client that keeps its connections.
var pool = &http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 32}}

// callIn calls in a session; id is JSON.
func callIn(url, session, id string) int {
	req, err := http.NewRequest(http.MethodPost, url, strings.NewReader(callBody(id)))
	if err != nil {
		return -1
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header["Mcp-Session-Id"] = []string{session}
	resp, err := pool.Do(req)
	if err != nil {
		return -1
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}
