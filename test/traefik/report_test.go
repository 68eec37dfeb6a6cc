package traefik

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// callers are real clients that stay connected from call to call.
var callers = []struct {
	name  string
	start func(t *testing.T, url string) (call func(message string) error)
}{
	{"Go SDK 1.8.0, 2026-07-28", func(t *testing.T, url string) func(string) error { return goCaller(t, url, "") }},
	{"Go SDK 1.8.0, 2025-11-25", func(t *testing.T, url string) func(string) error { return goCaller(t, url, e2e.LegacyVersion) }},
	{"TypeScript SDK 1.32.2", func(t *testing.T, url string) func(string) error { return nodeCaller(t, url, "sdk1") }},
	{"TypeScript client 2.4.0", func(t *testing.T, url string) func(string) error { return nodeCaller(t, url, "sdk2") }},
}

func goCaller(t *testing.T, url, version string) func(string) error {
	s := e2e.Dial(t, url, version, nil)
	t.Cleanup(func() { s.Close() })
	return func(message string) error { return e2e.Echo(t.Context(), s, message) }
}

func nodeCaller(t *testing.T, url, lib string) func(string) error {
	c := e2e.StartNode(t, lib, url)
	var word string
	if err := c.Do("open", &word); err != nil {
		t.Fatal(err)
	}
	return func(message string) error { return c.Do("call "+message, &word) }
}

// The public report (one transient 404 disconnects a server for good): a stateless
// server with one tool is called four times, and its route is away for a second during
// call 2. With plain Traefik that call fails, and some clients never call again, though
// the route is back; with the plugin calls 1 to 4 succeed.
func TestOneTransient404(t *testing.T) {
	type echo struct {
		Message string `json:"message"`
	}
	server := mcp.NewServer(&mcp.Implementation{Name: "one-tool", Version: "1"}, nil)
	mcp.AddTool(server, &mcp.Tool{Name: "echo"}, func(_ context.Context, _ *mcp.CallToolRequest, args echo) (*mcp.CallToolResult, any, error) {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: args.Message}}}, nil, nil
	})
	backend := httptest.NewServer(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, &mcp.StreamableHTTPOptions{Stateless: true}))
	defer backend.CloseClientConnections()
	addr := strings.TrimPrefix(backend.URL, "http://")
	lost := 0
	for _, plugin := range []bool{false, true} {
		c := config{plugin: "hold: 10s", servers: []string{addr}}
		there := c.yaml()
		c.noRoute = true
		gone := c.yaml()
		if !plugin {
			there, gone = bare(there), bare(gone)
		}
		tr := Start(t, Options{Dynamic: there, NoPlugin: !plugin})
		if plugin {
			await(t, 10*time.Second, "up", func() bool { return strings.Contains(tr.Output(), "is up") })
		}
		for _, client := range callers {
			t.Run(fmt.Sprintf("%s, plugin %v", client.name, plugin), func(t *testing.T) {
				call := client.start(t, tr.URL+"/mcp")
				ended := make([]error, 5)
				for n := 1; n <= 4; n++ {
					back := make(chan struct{})
					if n == 2 {
						tr.Reload(t, gone)
						go func() {
							defer close(back)
							time.Sleep(time.Second)
							tr.write(t, there)
						}()
					}
					ended[n] = call(fmt.Sprint("call ", n))
					if n == 2 {
						<-back
						time.Sleep(700 * time.Millisecond) // the route is back for calls 3 and 4
					}
					t.Logf("call %d: %v", n, ended[n])
				}
				if plugin {
					for n := 1; n <= 4; n++ {
						if ended[n] != nil {
							t.Errorf("call %d: %v", n, ended[n])
						}
					}
					return
				}
				if ended[1] != nil || ended[2] == nil {
					t.Errorf("plain Traefik: calls ended %v, want call 2 to fail", ended[1:])
				}
				if ended[3] != nil && ended[4] != nil {
					lost++
				}
			})
		}
	}
	if lost == 0 {
		t.Error("no client was lost for good with plain Traefik: the report is no longer true")
	}
}
