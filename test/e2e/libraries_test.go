package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/mark3labs/mcp-go/client"
	"github.com/mark3labs/mcp-go/client/transport"
	mcpgo "github.com/mark3labs/mcp-go/mcp"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

var (
	goSDKModern = Library{"go-sdk v1.8.0, modern", openGoSDK(""), lostGoSDK, 40}
	mcpGo       = Library{"mcp-go v1.2.1", openMCPGo(LegacyVersion), lostMCPGo, 40}
	mcpGoModern = Library{"mcp-go v1.2.1, modern", openMCPGo(""), lostMCPGo, 40}
	mcpRemote   = Library{"mcp-remote 0.15.1", openMCPRemote, lostGoSDK, 8} // each is a process

	goLibraries = []Library{GoSDK, goSDKModern, mcpGo, mcpRemote}
)

// openMCPRemote starts mcp-remote, as a desktop application does, and speaks to it
// over stdio.
func openMCPRemote(_ context.Context, t *testing.T, url string) (Session, error) {
	dir, err := os.MkdirTemp(t.TempDir(), "")
	if err != nil {
		return nil, err
	}
	cmd := exec.Command("node", filepath.Join(npmServers(t), "node_modules/mcp-remote/dist/proxy.js"), url, "--allow-http", "--transport", "http-only")
	cmd.Env = append(os.Environ(), "MCP_REMOTE_CONFIG_DIR="+dir, "HOME="+dir)
	return connect(t.Context(), &mcp.CommandTransport{Command: cmd, TerminateDuration: 100 * time.Millisecond}, LegacyVersion)
}

type mcpgoSession struct{ *client.Client }

func lostMCPGo(err error) bool { return errors.Is(err, transport.ErrSessionTerminated) }

// openMCPGo with the newest version takes a Go SDK server with sessions for a modern
// one, since that answers server/discover, and then refuses modern calls.
func openMCPGo(version string) func(context.Context, *testing.T, string) (Session, error) {
	return func(ctx context.Context, t *testing.T, url string) (Session, error) {
		c, err := client.NewStreamableHttpClient(url)
		if err != nil {
			return nil, err
		}
		if err = c.Start(t.Context()); err == nil {
			init := mcpgo.InitializeRequest{}
			init.Params.ProtocolVersion = version
			init.Params.ClientInfo = mcpgo.Implementation{Name: "mcphealth-e2e", Version: "0"}
			_, err = c.Initialize(ctx, init)
		}
		if err != nil {
			c.Close()
			return nil, err
		}
		return mcpgoSession{c}, nil
	}
}

func (s mcpgoSession) Call(ctx context.Context, tool string, args map[string]any) (string, error) {
	req := mcpgo.CallToolRequest{}
	req.Params.Name, req.Params.Arguments = tool, args
	r, err := s.CallTool(ctx, req)
	if err != nil {
		return "", err
	}
	if len(r.Content) == 1 && !r.IsError {
		if c, ok := r.Content[0].(mcpgo.TextContent); ok {
			return c.Text, nil
		}
	}
	return "", fmt.Errorf("%s = %+v", tool, r)
}
