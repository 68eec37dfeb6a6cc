// Command mcpgo is examples/servers on another library, mcp-go. It is compiled
// with two releases of it (go.mod and v0.56.0.mod).
package main

import (
	"context"
	"flag"
	"log"
	"sync"

	"github.com/mark3labs/mcp-go/mcp"
	"github.com/mark3labs/mcp-go/server"
	"github.com/mcphealth/mcphealth/examples/servers/kit"
)

func main() {
	var o kit.Options
	o.Flags()
	mode := flag.String("mode", "default", "default (gives out sessions, believes any id of their form), stateful (knows them) or stateless")
	flag.Parse()
	ids := map[string]server.SessionIdManager{
		"default":   new(server.StatelessGeneratingSessionIdManager),
		"stateful":  new(server.InsecureStatefulSessionIdManager),
		"stateless": new(server.StatelessSessionIdManager),
	}[*mode]
	if ids == nil {
		log.Fatalf("-mode %q, want default, stateful or stateless", *mode)
	}
	stats, err := kit.NewStats(o.Name, o.Log)
	if err != nil {
		log.Fatal(err)
	}
	counted := &counter{SessionIdManager: ids, live: map[string]bool{}}
	stats.Sessions = counted.Live
	h := server.NewStreamableHTTPServer(newServer(stats), server.WithSessionIdManager(counted))
	if err := kit.Serve(o, stats, h); err != nil {
		log.Fatal(err)
	}
}

// counter counts the sessions of a session manager: given out, not terminated.
type counter struct {
	server.SessionIdManager

	mu   sync.Mutex
	live map[string]bool
}

func (c *counter) Generate() string {
	id := c.SessionIdManager.Generate()
	if id != "" { // stateless gives out none
		c.mu.Lock()
		defer c.mu.Unlock()
		c.live[id] = true
	}
	return id
}

func (c *counter) Terminate(id string) (notAllowed bool, err error) {
	notAllowed, err = c.SessionIdManager.Terminate(id)
	if !notAllowed && err == nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.live, id)
	}
	return notAllowed, err
}

// Live is how many sessions there are.
func (c *counter) Live() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.live)
}

func newServer(stats *kit.Stats) *server.MCPServer {
	s := server.NewMCPServer(stats.Name, kit.Version("github.com/mark3labs/mcp-go"), server.WithToolCapabilities(false))
	s.AddTool(mcp.NewTool("echo", mcp.WithString("message", mcp.Required())),
		func(_ context.Context, req mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return mcp.NewToolResultText(stats.Echo(req.GetString("message", ""))), nil
		})
	s.AddTool(mcp.NewTool("whoami"),
		func(context.Context, mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			return mcp.NewToolResultText(stats.Whoami()), nil
		})
	s.AddTool(mcp.NewTool("slow", mcp.WithNumber("ms", mcp.Required()), mcp.WithString("message")),
		func(ctx context.Context, req mcp.CallToolRequest) (*mcp.CallToolResult, error) {
			out, err := stats.Slow(ctx, req.GetString("message", ""), req.GetInt("ms", 0), progress(ctx, s, req))
			return mcp.NewToolResultText(out), err
		})
	return s
}

// progress reports to the caller of req, if it asked for that.
func progress(ctx context.Context, s *server.MCPServer, req mcp.CallToolRequest) func(done, all float64) {
	return func(done, all float64) {
		if req.Params.Meta == nil || req.Params.Meta.ProgressToken == nil {
			return
		}
		s.SendNotificationToClient(ctx, "notifications/progress", map[string]any{
			"progressToken": req.Params.Meta.ProgressToken, "progress": done, "total": all,
		})
	}
}
