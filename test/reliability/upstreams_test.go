package reliability

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/internal/mcpfake"
)

const (
	okJSON = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
	okSSE  = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"

	// maxRead is how much of an answer a client here reads before it leaves: more
	// than any buffer on the way, and than the 10 MiB of headers that net/http reads.
	maxRead = 12 << 20
	// maxStay is how long it stays where there is no end to wait for, and patience
	// where there is: on a busy machine.
	maxStay  = 2 * time.Second
	patience = 20 * time.Second
	// visitors are how many clients each server has at once.
	visitors = 5

	// maxGrowth is how much more memory a proxy may take with all rows of a table at
	// once, in MiB. Two rows send headers without an end to five clients each, of which
	// net/http reads 10 MiB; and the collector lets the heap double.
	maxGrowth = 384
)

// A hostile server answers probes well and then misbehaves towards clients in one way.
// A client leaves after maxRead bytes, or maxStay where it may leave.
type hostile struct {
	name string
	do   func(*mcpfake.Socket)
	want string // what clients may see: statuses, "cut" for a broken answer, "left" for one without an end
	size int    // of the calls' arguments
}

// hostileUpstreams are those that speak HTTP/1.1.
var hostileUpstreams = []hostile{
	// Too much.
	{name: "endless headers", do: func(s *mcpfake.Socket) { s.Say(okJSON); s.Forever("X-Bomb: " + strings.Repeat("a", 4000) + "\r\n") }, want: "502 left"},
	{name: "one endless header", do: func(s *mcpfake.Socket) { s.Say(okJSON + "X-Bomb: "); s.Forever(strings.Repeat("a", 4096)) }, want: "502 left"},
	{name: "endless comments", do: func(s *mcpfake.Socket) { s.Say(okSSE + "\r\n"); s.Forever(": keep-alive\n\n") }, want: "left"},
	{name: "endless event line", do: func(s *mcpfake.Socket) { s.Say(okSSE + "\r\ndata: "); s.Forever(strings.Repeat("a", 4096)) }, want: "left"},
	{name: "endless JSON", do: func(s *mcpfake.Socket) {
		s.Say(okJSON + "\r\n" + `{"jsonrpc":"2.0","id":$ID,"result":{"a":"`)
		s.Forever(strings.Repeat("a", 4096))
	}, want: "left"},
	{name: "endless nesting", do: func(s *mcpfake.Socket) { s.Say(okJSON + "\r\n"); s.Forever(strings.Repeat("[", 4096)) }, want: "left"},
	{name: "1 GiB", do: func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Length: 1073741824\r\n\r\n")
		s.Forever(strings.Repeat(" ", 4096))
	}, want: "left"},
	{name: "gzip bomb", do: func(s *mcpfake.Socket) { s.Say(okJSON + "Content-Encoding: gzip\r\n\r\n"); s.Send(bomb) }, want: "200"},
	{name: "gzip bomb as events", do: func(s *mcpfake.Socket) { s.Say(okSSE + "Content-Encoding: gzip\r\n\r\n"); s.Send(bomb) }, want: "200"},
	{name: "endless early hints", do: func(s *mcpfake.Socket) { s.Forever("HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n") }, want: "502 left cut"},
	{name: "endless chunk extension", do: func(s *mcpfake.Socket) {
		s.Say(okJSON + "Transfer-Encoding: chunked\r\n\r\n1;")
		s.Forever(strings.Repeat("x", 4096))
	}, want: "cut left"},
	{name: "endless trailers", do: func(s *mcpfake.Socket) {
		s.Say(okJSON + "Transfer-Encoding: chunked\r\nTrailer: X-T\r\n\r\n2\r\n{}\r\n0\r\n")
		s.Forever("X-T: " + strings.Repeat("a", 4000) + "\r\n")
	}, want: "cut left 200"},

	// Too slow.
	{name: "silence", do: func(s *mcpfake.Socket) { s.Hang() }, want: "left"},
	{name: "a byte now and then", do: func(s *mcpfake.Socket) { s.Drip(okJSON + "\r\n" + discovered) }, want: "left"},
	{name: "headers, then silence", do: func(s *mcpfake.Socket) { s.Say(okJSON + "Content-Length: 100\r\n\r\n"); s.Hang() }, want: "left"},
	{name: "half an event, then silence", do: func(s *mcpfake.Socket) { s.Say(okSSE + "\r\ndata: {"); s.Hang() }, want: "left"},

	// Smuggling shapes.
	{name: "two lengths", do: func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Length: 2\r\nContent-Length: 40\r\n\r\n{}" + smuggled)
	}, want: "502"},
	{name: "a length and chunks", do: func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n" + smuggled)
	}, want: "200 502"},
	{name: "an answer and one more", do: func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Length: 2\r\n\r\n{}" + smuggled)
	}, want: "200"},
	{name: "chunks of another kind", do: func(s *mcpfake.Socket) { s.Say(okJSON + "Transfer-Encoding: chunked, hop\r\n\r\n2\r\n{}\r\n") }, want: "502"},
	{name: "a line break in a header", do: func(s *mcpfake.Socket) {
		s.Say(okJSON + "Mcp-Session-Id: a\rSet-Cookie: evil=1\r\nContent-Length: 2\r\n\r\n{}")
	}, want: "200 502"},
	{name: "101 to nowhere", do: func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
	}, want: "502"},

	// Elsewhere.
	{name: "redirect to the metadata service", do: func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 307 Temporary Redirect\r\nLocation: http://169.254.169.254/latest/meta-data\r\nContent-Length: 0\r\n\r\n")
	}, want: "307"},
	{name: "redirect to loopback", do: func(s *mcpfake.Socket) {
		s.Say("HTTP/1.1 308 Permanent Redirect\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")
	}, want: "308"},

	// Broken.
	{name: "line noise", do: func(s *mcpfake.Socket) { s.Say("\x00\x01 not HTTP \xff\r\n\r\n") }, want: "502"},
	{name: "HTTP/2 frames", do: func(s *mcpfake.Socket) { s.Say("\x00\x00\x12\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x80\r\n") }, want: "502"},
	{name: "truncated", do: func(s *mcpfake.Socket) { s.Say(okJSON + "Content-Length: 400\r\n\r\n{") }, want: "cut"},
	{name: "closed before a byte", do: func(*mcpfake.Socket) {}, want: "502"},
	{name: "reset before a byte", do: func(s *mcpfake.Socket) { s.Reset() }, want: "502"},
	{name: "reset in the answer", do: func(s *mcpfake.Socket) {
		s.Say(okSSE + "\r\ndata: {}\n\n")
		time.Sleep(20 * time.Millisecond)
		s.Reset()
	}, want: "cut"},
	{name: "duplicate keys and no UTF-8", do: func(s *mcpfake.Socket) {
		s.Say(okJSON + "Content-Length: 56\r\n\r\n" + "{\"jsonrpc\":\"2.0\",\"id\":1,\"id\":$ID,\"result\":\"\xff\xfe\",\"id\":[7]}"[:56])
	}, want: "200 cut"},
}

// smuggled is an answer behind the answer, for whoever reads on.
const smuggled = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 8\r\n\r\nsmuggled"

// bomb is 64 MiB of a JSON string in 64 KiB of gzip.
var bomb = func() []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	io.WriteString(z, `{"jsonrpc":"2.0","result":"`)
	for range 64 {
		z.Write(bytes.Repeat([]byte("a"), 1<<20))
	}
	z.Close()
	return b.Bytes()
}()

// answersProbes has the server answer probes well; do is for clients.
func answersProbes(do func(*mcpfake.Socket)) func(*mcpfake.Socket) {
	return func(s *mcpfake.Socket) {
		if isProbe(s.Request) {
			s.Say(okJSON + "Connection: close\r\n\r\n" + discovered)
			return
		}
		do(s)
	}
}

// All of them at once, five clients each: the proxies live, take bounded memory, and
// when the clients and servers are gone nothing of them is left.
func TestHostileUpstreams(t *testing.T) {
	for _, edge := range edges {
		t.Run(edge.name, func(t *testing.T) {
			survives(t, edge, hostileUpstreams, listen, Route{})
		})
	}
}

// The same in HTTP/2, where the clients of a server share its connections.
func TestHostileStreams(t *testing.T) {
	certificate := newAuthority(t, filepath.Join(t.TempDir(), "ca.pem")).issue(t, time.Hour)
	overTLS := func() (net.Listener, error) {
		return tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{*certificate}, NextProtos: []string{"h2", "http/1.1"}})
	}
	for _, edge := range edges {
		t.Run(edge.name, func(t *testing.T) {
			t.Run("h2c", func(t *testing.T) {
				survives(t, edge, hostileStreams, listen, Route{Caddy: "transport http {\n\tversions h2c\n}\n", Scheme: "h2c"})
			})
			if edge.name == "caddy" {
				t.Run("tls", func(t *testing.T) {
					survives(t, edge, hostileStreams, overTLS, Route{Caddy: "transport http {\n\ttls_insecure_skip_verify\n}\n"})
				})
			}
		})
	}
}

func listen() (net.Listener, error) { return net.Listen("tcp", "127.0.0.1:0") }

// survives runs a table against a proxy; by is the way to its servers.
func survives(t *testing.T, edge proxy, rows []hostile, listen func() (net.Listener, error), by Route) {
	var routes []Route
	var servers []*mcpfake.Hostile
	for i, row := range rows {
		l, err := listen()
		if err != nil {
			t.Fatal(err)
		}
		s := mcpfake.MisbehaveOn(l, answersProbes(row.do))
		servers = append(servers, s)
		route := by
		route.Name, route.Upstreams = fmt.Sprintf("r%d", i), []string{s.Addr().String()}
		routes = append(routes, route)
	}
	good := newServer(t)
	healthy := Route{Name: "good", Upstreams: []string{good.Addr}, Timeout: 10 * time.Second}
	e := edge.start(t, healthy)
	awaitUp(t, e, good.Addr)
	ask(t, e.URL("good"), callBody(`"before"`))
	goroutines, rss := e.Goroutines(t), e.Proc().RSS(t)
	e.Reload(t, append(routes, healthy)...)
	for _, s := range servers {
		awaitUp(t, e, s.Addr().String())
	}
	e.Proc().ResetPeak(t)

	seen := make([][]string, len(rows))
	var all sync.WaitGroup
	var mu sync.Mutex
	for i, row := range rows {
		for n := range visitors {
			all.Go(func() {
				stay := patience
				if strings.Contains(row.want, "left") {
					stay = maxStay
				}
				got := visit(stay, e.URL(routes[i].Name), sizedCall(fmt.Sprintf(`"%d-%d"`, i, n), row.size))
				mu.Lock()
				seen[i] = append(seen[i], got)
				mu.Unlock()
			})
		}
	}
	for n := range 10 { // meanwhile, others are served
		ask(t, e.URL("good"), callBody(fmt.Sprintf(`"meanwhile %d"`, n)))
		time.Sleep(100 * time.Millisecond)
	}
	all.Wait()
	for i, row := range rows {
		for _, got := range seen[i] {
			if word, _, _ := strings.Cut(got, " "); !strings.Contains(row.want, word) && word != "503" && word != edge.broken {
				t.Errorf("%s: a client saw %s, want %s", row.name, got, row.want)
				break
			}
		}
		t.Logf("%-34s %s", row.name, tally(seen[i]))
	}
	if peak := e.Proc().Peak(t); peak > rss+maxGrowth {
		t.Errorf("memory %d MiB before, %d at most, want at most %d more", rss, peak, maxGrowth)
	} else {
		t.Logf("memory %d MiB before, %d at most", rss, peak)
	}
	for _, s := range servers {
		s.Stop()
	}
	e.Reload(t, healthy)
	ask(t, e.URL("good"), callBody(`"after"`))
	wantGoroutines(t, e, goroutines)
	wantOnce(t, good)
}

// visit makes a call as a client that has seen enough at some point, and says in
// short what it saw. An answer of ours is checked.
func visit(stay time.Duration, url, body string) string {
	ctx, cancel := context.WithTimeout(context.Background(), stay)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return err.Error()
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("Accept-Encoding", "identity")
	resp, err := alone.Do(req)
	if ctx.Err() != nil {
		return "left"
	}
	if err != nil {
		return "cut " + err.Error()
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxRead))
	switch {
	case ctx.Err() != nil || len(b) == maxRead:
		return "left"
	case err != nil:
		return "cut in a " + resp.Status
	case bytes.Contains(b, []byte("smuggled")):
		return "an answer that was not for it"
	case resp.Header.Get("Set-Cookie") != "":
		return "a header that was smuggled in"
	}
	if why := resp.Header.Get("X-Mcp-Health"); why != "" {
		if wrong := checkOurs(resp, b, body); wrong != "" {
			return wrong
		}
		return fmt.Sprintf("%d ours %s", resp.StatusCode, why)
	}
	return fmt.Sprint(resp.StatusCode)
}

// checkOurs says what is wrong with an answer that the edge made itself; "" is good.
func checkOurs(resp *http.Response, got []byte, asked string) string {
	var a struct {
		ID    json.RawMessage
		Error *struct {
			Data struct{ Reason string }
		}
	}
	var q struct{ ID json.RawMessage }
	json.Unmarshal([]byte(asked), &q)
	switch {
	case json.Unmarshal(got, &a) != nil || a.Error == nil:
		return fmt.Sprintf("an answer of ours that is no JSON-RPC error: %.200q", got)
	case q.ID != nil && string(a.ID) != string(q.ID):
		return fmt.Sprintf("an answer of ours to id %s, want %s", a.ID, q.ID)
	case a.Error.Data.Reason != resp.Header.Get("X-Mcp-Health"):
		return fmt.Sprintf("an answer of ours for two reasons: %.200q", got)
	case resp.Header.Get("Cache-Control") != "no-store":
		return "an answer of ours that may be cached"
	case resp.StatusCode == http.StatusServiceUnavailable && resp.Header.Get("Retry-After") == "":
		return "503 without Retry-After"
	case bytes.Contains(got, []byte("127.0.0.1")):
		return fmt.Sprintf("an address in %.200q", got)
	}
	return ""
}

// ask makes a call that must be answered.
func ask(t testing.TB, url, body string) {
	t.Helper()
	resp, err := alone.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Errorf("%s: %v", url, err)
		return
	}
	defer resp.Body.Close()
	if b, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != http.StatusOK || !bytes.Contains(b, []byte("done")) {
		t.Errorf("%s: %s %s %v", url, resp.Status, b, err)
	}
}

func tally(all []string) string {
	n := map[string]int{}
	for _, s := range all {
		n[s]++
	}
	return strings.TrimPrefix(fmt.Sprint(n), "map")
}

func awaitUp(t testing.TB, e Edge, upstream string) {
	t.Helper()
	await(t, 10*time.Second, upstream+" up", func() bool { state, _ := e.State(t, upstream); return state == "up" })
}

// wantGoroutines waits until the edge has no more goroutines than before, a few of
// its own housekeeping aside.
func wantGoroutines(t testing.TB, e Edge, before int) {
	t.Helper()
	const slack = 8
	now := e.Goroutines(t)
	for start := time.Now(); now > before+slack && time.Since(start) < 20*time.Second; now = e.Goroutines(t) {
		time.Sleep(200 * time.Millisecond)
	}
	if now > before+slack {
		t.Errorf("%d goroutines after it all, %d before", now, before)
		if c, ok := e.(caddyEdge); ok {
			t.Logf("%.4000s", c.Stacks(t))
		}
	} else {
		t.Logf("%d goroutines after it all, %d before", now, before)
	}
}
