package traefik

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
	"github.com/quic-go/quic-go/http3"
)

// Calls over HTTP/3 are held and refused as all others are, and the provider that asks for
// its configuration over HTTP is as good as the one that reads a file.
func TestHTTP3(t *testing.T) {
	r := startReplicas(t)
	c := config{plugin: "hold: 3s", servers: r.servers(), noRoute: true}
	var now atomic.Value
	now.Store(c.yaml())
	source := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, now.Load().(string)) }))
	defer source.Close()
	port := e2e.FreePort(t)
	tr := Start(t, Options{Flags: []string{
		"--providers.http.endpoint=" + source.URL, "--providers.http.pollinterval=100ms",
		fmt.Sprintf("--entrypoints.quic.address=127.0.0.1:%d", port), "--entrypoints.quic.http.tls=true", "--entrypoints.quic.http3=true",
	}})
	await(t, 20*time.Second, "routers known", func() bool { return strings.Contains(tr.config(t), "@http") })

	over := &http3.Transport{TLSClientConfig: insecure.Transport.(*http.Transport).TLSClientConfig}
	defer over.Close()
	call := func(message string) (int, string) {
		req := callRequest(t.Context(), tr, message)
		req.URL, _ = req.URL.Parse(fmt.Sprintf("https://127.0.0.1:%d/mcp", port))
		resp, err := over.RoundTrip(req)
		if err != nil {
			t.Error(err)
			return 0, ""
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Error(err)
		}
		return resp.StatusCode, string(b)
	}
	if status, body := call("refused"); status != http.StatusServiceUnavailable || !strings.Contains(body, `"id":"refused"`) || !strings.Contains(body, "route_absent") {
		t.Errorf("the route is away: %d %s", status, body)
	}
	held := make(chan int)
	go func() {
		status, _ := call("held")
		held <- status
	}()
	time.Sleep(500 * time.Millisecond)
	c.noRoute = false
	now.Store(c.yaml())
	if status := <-held; status != http.StatusOK {
		t.Errorf("held: %d, want 200", status)
	}
	if all := e2e.Executions(t, r.log); len(all) != 1 || all["held"] != 1 {
		t.Errorf("executed %v, want the held call, once", all)
	}
}
