package traefik

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

const origin = "https://app.example.com"

// preflight asks as a browser does before a page of another origin may call.
func preflight(t *testing.T, tr *Traefik, method string) (status int, h http.Header) {
	t.Helper()
	req, _ := http.NewRequest(method, tr.URL+"/mcp", nil)
	req.Header.Set("Origin", origin)
	if method == http.MethodOptions {
		req.Header.Set("Access-Control-Request-Method", "POST")
		req.Header.Set("Access-Control-Request-Headers", "content-type,mcp-protocol-version")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Error(err)
		return 0, nil
	}
	resp.Body.Close()
	return resp.StatusCode, resp.Header
}

// A preflight waits as the call does that follows it, and gets the server's answer: any
// other one, for want of CORS headers, would fail the call in the browser. Traefik's
// headers middleware, in front of the plugin, answers it at once, and lets pages read 503s.
func TestPreflights(t *testing.T) {
	server := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server {
		return mcp.NewServer(&mcp.Implementation{Name: "x", Version: "1"}, nil)
	}, &mcp.StreamableHTTPOptions{Stateless: true})
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodOptions {
			server.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Access-Control-Allow-Origin", origin)
		w.WriteHeader(http.StatusNoContent)
	}))
	defer backend.CloseClientConnections()
	c := config{plugin: "hold: 5s", servers: []string{strings.TrimPrefix(backend.URL, "http://")}}
	there := c.yaml()
	c.noRoute = true
	tr := Start(t, Options{Dynamic: c.yaml()})
	done := make(chan bool)
	go func() {
		defer close(done)
		start := time.Now()
		status, h := preflight(t, tr, http.MethodOptions)
		if status != 204 || h.Get("Access-Control-Allow-Origin") != origin || time.Since(start) < 500*time.Millisecond {
			t.Errorf("held: %d %v after %s, want the server's answer", status, h, time.Since(start))
		}
	}()
	time.Sleep(700 * time.Millisecond)
	tr.Reload(t, there)
	<-done

	c.plugin = "hold: 0"
	tr.Reload(t, c.yaml())
	if status, h := preflight(t, tr, http.MethodOptions); status != 503 || h.Get("Retry-After") == "" {
		t.Errorf("no hold: %d %v, want 503", status, h)
	}
	cors := "  middlewares:\n    cors:\n      headers:\n        accessControlAllowOriginList: ['" + origin + "']\n        accessControlAllowMethods: [GET, POST, DELETE]\n        accessControlAllowHeaders: ['*']\n"
	tr.Reload(t, strings.ReplaceAll(strings.Replace(c.yaml(), "  middlewares:\n", cors, 1), "[mcp]", "[cors, mcp]"))
	for method, want := range map[string]int{http.MethodOptions: 200, http.MethodPost: 503} {
		if status, h := preflight(t, tr, method); status != want || h.Get("Access-Control-Allow-Origin") != origin {
			t.Errorf("behind cors: %s: %d %v, want %d that the page may read", method, status, h, want)
		}
	}
}
