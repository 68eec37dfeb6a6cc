package e2e

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// As Caddy is told to stop, what waits is refused, and Caddy does not wait for it: whoever
// stops a container kills it after some seconds, and with it what still waits.
func TestStopRefusesWhatWaits(t *testing.T) {
	i := Get(t, "go-sdk-v1.8.0-stateful").Start(t, FreePort(t))
	gone, another := FreePort(t), FreePort(t)
	c := StartCaddy(t, fmt.Sprintf(`	mcp_proxy /mcp* %s {
		hold 1m
		sticky
		session_grace 1h
	}
	mcp_proxy /gone* 127.0.0.1:%d {
		hold 1m
	}
	mcp_guard /unknown* {
		hold 1m
	}
	reverse_proxy /unknown* 127.0.0.1:%d`, i.Addr, gone, another))
	c.AwaitState(t, i.Addr, "up", 10*time.Second)
	post := func(path, session, body string) (*http.Response, string, error) {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, strings.Replace(c.URL(), "/mcp", path, 1), strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "application/json, text/event-stream")
		if session != "" {
			req.Header.Set("Mcp-Session-Id", session)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return nil, "", err
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		return resp, string(b), err
	}
	opened, body, err := post("/mcp", "", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"stop","version":"1"}}}`)
	if err != nil || opened.StatusCode != http.StatusOK {
		t.Fatal(err, body)
	}
	i.Kill(t)
	c.AwaitState(t, i.Addr, "down", 10*time.Second)
	calls := []struct{ path, session, id string }{
		{"/mcp", "", "11"},
		{"/mcp", opened.Header.Get("Mcp-Session-Id"), "12"},
		{"/gone", "", "13"},
		{"/unknown", "", "14"},
	}
	wrong := make(chan string)
	for _, call := range calls {
		go func() {
			resp, body, err := post(call.path, call.session, `{"jsonrpc":"2.0","id":`+call.id+`,"method":"tools/list"}`)
			switch {
			case err != nil:
				wrong <- fmt.Sprintf("%v: %v", call, err)
			case resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, `"id":`+call.id+`,"error"`):
				wrong <- fmt.Sprintf("%v: %s %s", call, resp.Status, body)
			default:
				wrong <- ""
			}
		}()
	}
	waiting := fmt.Sprintf("\ncaddy_mcp_health_held_requests %d\n", len(calls))
	for deadline := time.Now().Add(10 * time.Second); !strings.Contains(c.Metrics(t), waiting); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("they do not wait")
		}
	}
	c.Terminate(t)
	for range calls {
		if w := <-wrong; w != "" {
			t.Error(w)
		}
	}
}

// Caddy waits for streams as it stops, and they have no end: the sessions that probes hold
// on servers are ended before somebody loses patience. Until then, as long as requests may
// come (shutdown_delay), the servers are asked.
func TestStopEndsSessions(t *testing.T) {
	i := Get(t, "go-sdk-v1.8.0-stateful").Start(t, FreePort(t))
	c := StartCaddyGlobal(t, "\tshutdown_delay 2s", "\tmcp_proxy /mcp* "+i.Addr+" {\n\t\tcheck_interval 100ms\n\t\tcheck_passive off\n\t}")
	c.AwaitState(t, i.Addr, "up", 10*time.Second)
	ask := func(method, session, body string) *http.Response {
		req, _ := http.NewRequestWithContext(t.Context(), method, c.URL(), strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "application/json, text/event-stream")
		req.Header.Set("Mcp-Session-Id", session)
		resp, err := http.DefaultClient.Do(req)
		if err != nil || resp.StatusCode != http.StatusOK {
			t.Fatal(err, resp)
		}
		return resp
	}
	opened := ask(http.MethodPost, "", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"stop","version":"1"}}}`)
	opened.Body.Close()
	stream := ask(http.MethodGet, opened.Header.Get("Mcp-Session-Id"), "")
	defer stream.Body.Close()
	i.AwaitSessions(t, 2)
	ended := make(chan struct{})
	go func() { defer close(ended); c.Terminate(t) }()
	time.Sleep(200 * time.Millisecond)
	before := c.Upstreams(t)[i.Addr].Probes
	time.Sleep(500 * time.Millisecond)
	if n := c.Upstreams(t)[i.Addr].Probes; n < before+2 {
		t.Errorf("%d probes within 500 ms of shutdown_delay, want about 5", n-before)
	}
	i.AwaitSessions(t, 1)
	if !c.Running() {
		t.Error("Caddy has ended: this proves nothing")
	}
	<-ended
}
