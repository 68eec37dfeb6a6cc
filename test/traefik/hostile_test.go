package traefik

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// call is a tools/call of the era without sessions, as the load sends it.
func callRequest(ctx context.Context, tr *Traefik, message string) *http.Request {
	body := fmt.Sprintf(`{"jsonrpc":"2.0","id":%q,"method":"tools/call","params":{"name":"echo","arguments":{"message":%q},"_meta":{`+
		`"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/clientInfo":{"name":"t","version":"0"}}}}`, message, message)
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, tr.URL+"/mcp", strings.NewReader(body))
	for k, v := range map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream",
		"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "echo"} {
		req.Header.Set(k, v)
	}
	return req
}

// A crowd waits for a route: 1,024 calls are held, the rest is refused at once. Half of
// the clients leave. When the route is there, after a reload that changes the settings,
// those that stayed are served, once each, and of those that left none is executed.
func TestCrowd(t *testing.T) {
	r := startReplicas(t)
	c := config{plugin: "hold: 60s", servers: r.servers()}
	there := c.yaml()
	c.noRoute = true
	tr := Start(t, Options{Dynamic: c.yaml()})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	const crowd = 1200
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	leave, gone := context.WithCancel(ctx)
	var status sync.Map
	var refused, served, left atomic.Int32
	var wg sync.WaitGroup
	for n := range crowd {
		of := ctx
		if n%2 == 0 {
			of = leave
		}
		wg.Go(func() {
			resp, err := client.Do(callRequest(of, tr, fmt.Sprintf("crowd-%d", n)))
			if err != nil {
				left.Add(1)
				return
			}
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			status.Store(n, resp.StatusCode)
			switch {
			case resp.StatusCode == 503 && strings.Contains(string(body), fmt.Sprintf(`"id":"crowd-%d"`, n)):
				refused.Add(1)
			case resp.StatusCode == 200:
				served.Add(1)
			default:
				t.Errorf("call %d: %d %.200s", n, resp.StatusCode, body)
			}
		})
	}
	await(t, 30*time.Second, "the crowd waits", func() bool { return refused.Load() == crowd-1024 })
	c.plugin = "hold: 50s"
	tr.Reload(t, c.yaml())
	gone()
	await(t, 20*time.Second, "those who leave", func() bool { return left.Load()+refused.Load() >= crowd/2 })
	time.Sleep(time.Second) // the edge notices, too
	tr.Reload(t, there)
	wg.Wait()
	t.Logf("%d refused at once, %d left, %d served", refused.Load(), left.Load(), served.Load())
	for message, n := range e2e.Executions(t, r.log) {
		var of int
		if _, err := fmt.Sscanf(message, "crowd-%d", &of); err != nil {
			continue
		}
		if _, answered := status.Load(of); n > 1 || !answered {
			t.Errorf("call %d: executed %d times, answered %v", of, n, answered)
		}
	}
	if served.Load() == 0 || served.Load()+refused.Load()+left.Load() != crowd {
		t.Error("some calls were lost")
	}
}

// raw sends bytes and reads an answer.
func raw(t *testing.T, tr *Traefik, wait time.Duration, parts ...string) (*http.Response, []byte, time.Duration) {
	t.Helper()
	c, err := net.Dial("tcp", strings.TrimPrefix(tr.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	start := time.Now()
	for _, p := range parts {
		_, _ = io.WriteString(c, p)
	}
	_ = c.SetReadDeadline(start.Add(wait))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return nil, nil, time.Since(start)
	}
	body, _ := io.ReadAll(resp.Body)
	return resp, body, time.Since(start)
}

// Bodies that never come, never end, or are none, while there is no route. What stops in
// the middle ends with Traefik's readTimeout: its middlewares get no hand on that.
func TestHostileBodies(t *testing.T) {
	tr := Start(t, Options{Dynamic: config{plugin: "hold: 1s", noRoute: true}.yaml(),
		Flags: []string{"--entrypoints.web.transport.respondingtimeouts.readtimeout=3s"}})
	const head = "POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
	chunk := "10000\r\n" + strings.Repeat("x", 0x10000) + "\r\n"
	tests := []struct {
		name  string
		stops bool
		parts []string
	}{
		{"a body that stops", true, []string{head + "Content-Length: 1000\r\n\r\n" + `{"jsonrpc":"2.0","id":7,`}},
		{"a body that never begins", true, []string{head + "Content-Length: 1000\r\n\r\n"}},
		{"chunks that never end", false, []string{head + "Transfer-Encoding: chunked\r\n\r\n", strings.Repeat(chunk, 40)}},
		{"a length far too large", true, []string{head + "Content-Length: 99999999999\r\n\r\n{"}},
		{"no body", false, []string{head + "Content-Length: 0\r\n\r\n"}},
		{"no JSON", false, []string{head + "Content-Length: 4\r\n\r\n\xff\x00{["}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			resp, body, took := raw(t, tr, 10*time.Second, tt.parts...)
			if tt.stops {
				if took > 8*time.Second || resp != nil && resp.StatusCode != 503 && resp.StatusCode != 499 {
					t.Errorf("%v %s after %s, want the end of the connection", resp, body, took)
				}
				return
			}
			if resp == nil || resp.StatusCode != 503 || resp.Header.Get("Retry-After") == "" || took > 5*time.Second {
				t.Errorf("%v %s after %s, want 503 at the end of the hold", resp, body, took)
			}
		})
	}
}

// The id of a 503 is that of the request, of whatever kind, as it was written.
func TestIDsOfAllKinds(t *testing.T) {
	tr := Start(t, Options{Dynamic: config{plugin: "hold: 0", noRoute: true}.yaml()})
	for sent, want := range map[string]string{
		`7`: `7`, `-1.5e3`: `-1.5e3`, `12345678901234567890`: `12345678901234567890`, `"a\u0022b"`: `"a\u0022b"`, `"é"`: `"é"`, `null`: `null`,
		`true`: `null`, `{"a":1}`: `null`, `[1]`: `null`, `"` + strings.Repeat("x", 9000) + `"`: `null`,
	} {
		resp, err := http.Post(tr.URL+"/mcp", "application/json", strings.NewReader(`{"jsonrpc":"2.0","method":"x","id":`+sent+`}`))
		if err != nil {
			t.Fatal(err)
		}
		var got struct{ ID json.RawMessage }
		err = json.NewDecoder(resp.Body).Decode(&got)
		resp.Body.Close()
		if err != nil || resp.StatusCode != 503 || string(got.ID) != want {
			t.Errorf("id %.40s: %d %.60s %v, want %s", sent, resp.StatusCode, got.ID, err, want)
		}
	}
}
