package traefik

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// startHolders are n servers of before 2026-07-28, and how many sessions they have together.
func startHolders(t *testing.T, n int) (addrs []string, sessions *atomic.Int32) {
	t.Helper()
	sessions = &atomic.Int32{}
	for range n {
		srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			var q struct {
				ID     json.RawMessage `json:"id"`
				Method string          `json:"method"`
			}
			_ = json.NewDecoder(req.Body).Decode(&q)
			rw.Header().Set("Content-Type", "application/json")
			switch {
			case req.Method == http.MethodDelete:
				sessions.Add(-1)
			case q.Method == "initialize":
				sessions.Add(1)
				rw.Header().Set("Mcp-Session-Id", "held")
				fmt.Fprintf(rw, `{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"a","version":"1"}}}`, q.ID)
			case req.Header.Get("Mcp-Session-Id") == "held":
				fmt.Fprintf(rw, `{"jsonrpc":"2.0","id":%s,"result":{}}`, q.ID)
			default:
				http.Error(rw, "Bad Request: No valid session ID provided", http.StatusBadRequest)
			}
		}))
		t.Cleanup(func() { _ = srv.Listener.Close() }) // not Close, which waits for the probes' connections
		addrs = append(addrs, strings.TrimPrefix(srv.URL, "http://"))
	}
	return addrs, sessions
}

// While Traefik stops, the probes' sessions are ended, and what comes is served. It is given
// a second: how often it is gone too soon otherwise is in docs/traefik.md.
func TestStop(t *testing.T) {
	addrs, sessions := startHolders(t, 3)
	tr := Start(t, Options{Dynamic: config{plugin: "interval: 100ms", servers: addrs}.yaml(),
		Flags: []string{"--entrypoints.web.transport.lifecycle.requestacceptgracetimeout=1s"}})
	await(t, 10*time.Second, "a session at each", func() bool { return sessions.Load() == 3 })
	late := make(chan int)
	time.AfterFunc(500*time.Millisecond, func() {
		status, _ := post(t, tr.URL+"/mcp")
		late <- status
	})
	tr.Terminate(t)
	if n := sessions.Load(); n != 0 {
		t.Errorf("%d sessions of probes are left, want none", n)
	}
	if status := <-late; status != http.StatusBadRequest {
		t.Errorf("a request while Traefik stopped got %d, want the server's own 400", status)
	}
	if strings.Contains(tr.Output(), "internal error") {
		t.Error("an internal error is in the log")
	}
}
