package traefik

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestStreamsThatTraefikCuts counts how many streamed answers to a POST a plain Traefik
// breaks off, as docs/traefik.md says it. It is a measurement, of nothing of ours:
//
//	MCPHEALTH_CUTS=1 go test -v -run StreamsThatTraefikCuts .
func TestStreamsThatTraefikCuts(t *testing.T) {
	if os.Getenv("MCPHEALTH_CUTS") == "" {
		t.Skip("set MCPHEALTH_CUTS")
	}
	const event = "data: hello\n\n"
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		http.NewResponseController(w).Flush()
		time.Sleep(200 * time.Millisecond) // of work
		io.WriteString(w, event)
	}))
	defer srv.Close()
	plain := config{servers: []string{strings.TrimPrefix(srv.URL, "http://")}}
	fresh := plain
	fresh.service = "serversTransport: fresh"
	for name, yaml := range map[string]string{
		"connections kept":      bare(plain.yaml()),
		"a connection per call": bare(fresh.yaml()) + "  serversTransports:\n    fresh: {maxIdleConnsPerHost: -1}\n",
	} {
		tr := Start(t, Options{Dynamic: yaml, NoPlugin: true, Flags: quiet})
		var cut, all atomic.Int32
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				c := &http.Client{Transport: &http.Transport{}} // one that closes its connection spares its body
				defer c.CloseIdleConnections()
				for range 100 {
					resp, err := c.Post(tr.URL+"/mcp", "application/json", strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"echo"}}`))
					if err != nil {
						t.Error(err)
						return
					}
					b, err := io.ReadAll(resp.Body)
					resp.Body.Close()
					all.Add(1)
					if err != nil || string(b) != event {
						cut.Add(1)
					}
				}
			})
		}
		wg.Wait()
		t.Logf("%s: %d of %d streams cut", name, cut.Load(), all.Load())
		tr.Kill(t)
	}
}
