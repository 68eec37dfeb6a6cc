// Command servers is a small real MCP server (Go SDK) with the tools echo,
// whoami and slow: what `make run` puts behind the proxy, and a backend of the
// end-to-end tests. It is compiled with an older SDK too
// (test/e2e/servers/gosdk-v1.2.0.mod), so it uses only what both have.
package main

import (
	"context"
	"flag"
	"log"
	"net/http"

	"github.com/mcphealth/mcphealth/examples/servers/kit"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

func main() {
	var o kit.Options
	o.Flags()
	era := flag.String("era", "modern", "modern (2026-07-28, stateless) or legacy (sessions)")
	stateless := flag.Bool("stateless", false, "no sessions, whatever the era: what an SDK without 2026-07-28 calls stateless")
	asJSON := flag.Bool("json", false, "answer application/json instead of text/event-stream")
	stdio := flag.Bool("stdio", false, "speak over stdin and stdout instead of HTTP, until stdin ends")
	flag.Parse()
	if *era != "modern" && *era != "legacy" {
		log.Fatalf("-era %q, want modern or legacy", *era)
	}
	stats, err := kit.NewStats(o.Name, o.Log)
	if err != nil {
		log.Fatal(err)
	}
	server := newServer(stats)
	stats.Sessions = func() (n int) {
		for range server.Sessions() {
			n++
		}
		return n
	}
	if *stdio {
		if err := server.Run(context.Background(), &mcp.StdioTransport{}); err != nil {
			log.Fatal(err)
		}
		return
	}
	// In this SDK a stateless handler speaks 2026-07-28 and a stateful one does not.
	h := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server },
		&mcp.StreamableHTTPOptions{Stateless: *stateless || *era == "modern", JSONResponse: *asJSON})
	if err := kit.Serve(o, stats, h); err != nil {
		log.Fatal(err)
	}
}

type echoArgs struct {
	Message string `json:"message" jsonschema:"text to send back"`
}

type slowArgs struct {
	MS      int    `json:"ms" jsonschema:"how long to take, in milliseconds"`
	Message string `json:"message,omitempty" jsonschema:"text to send back at the end"`
}

func newServer(stats *kit.Stats) *mcp.Server {
	s := mcp.NewServer(&mcp.Implementation{Name: stats.Name, Version: kit.Version("github.com/modelcontextprotocol/go-sdk")}, nil)
	mcp.AddTool(s, &mcp.Tool{Name: "echo", Description: "sends a message back"},
		func(_ context.Context, _ *mcp.CallToolRequest, in echoArgs) (*mcp.CallToolResult, any, error) {
			return text(stats.Echo(in.Message)), nil, nil
		})
	mcp.AddTool(s, &mcp.Tool{Name: "whoami", Description: "tells which server answers"},
		func(context.Context, *mcp.CallToolRequest, struct{}) (*mcp.CallToolResult, any, error) {
			return text(stats.Whoami()), nil, nil
		})
	mcp.AddTool(s, &mcp.Tool{Name: "slow", Description: "takes a while and reports progress"},
		func(ctx context.Context, req *mcp.CallToolRequest, in slowArgs) (*mcp.CallToolResult, any, error) {
			out, err := stats.Slow(ctx, in.Message, in.MS, progress(ctx, req))
			return text(out), nil, err
		})
	return s
}

// progress reports to the caller of req, if it asked for that.
func progress(ctx context.Context, req *mcp.CallToolRequest) func(done, all float64) {
	token := req.Params.GetProgressToken()
	return func(done, all float64) {
		if token != nil {
			req.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: done, Total: all})
		}
	}
}

func text(s string) *mcp.CallToolResult {
	return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: s}}}
}
