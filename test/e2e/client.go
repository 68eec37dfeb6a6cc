package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// LegacyVersion is the newest protocol version with sessions.
const LegacyVersion = "2025-11-25"

// Dial opens a client session as a real client does, with the Go SDK. version
// is the newest protocol version that the client knows, "" for the newest
// there is. opts may be nil.
func Dial(t testing.TB, url, version string, opts *mcp.ClientOptions) *mcp.ClientSession {
	t.Helper()
	c := mcp.NewClient(&mcp.Implementation{Name: "mcphealth-e2e", Version: "0"}, opts)
	s, err := c.Connect(t.Context(), &mcp.StreamableClientTransport{Endpoint: url, HTTPClient: authorized}, &mcp.ClientSessionOptions{ProtocolVersion: version})
	if err != nil {
		t.Fatalf("connect to %s: %v", url, err)
	}
	return s
}

// Echo calls the tool echo and checks what comes back.
func Echo(ctx context.Context, s *mcp.ClientSession, message string) error {
	r, err := s.CallTool(ctx, &mcp.CallToolParams{Name: "echo", Arguments: map[string]any{"message": message}})
	if err != nil {
		return err
	}
	if len(r.Content) == 1 && !r.IsError {
		// server-everything puts "Echo: " in front.
		if c, ok := r.Content[0].(*mcp.TextContent); ok && strings.HasSuffix(c.Text, message) {
			return nil
		}
	}
	return fmt.Errorf("echo %q = %+v", message, r)
}

// rawEcho calls echo in a session that some client opened.
func rawEcho(t testing.TB, url, session, message string) (status int, body string) {
	t.Helper()
	req, _ := http.NewRequest(http.MethodPost, url, strings.NewReader(fmt.Sprintf(
		`{"jsonrpc":"2.0","id":%q,"method":"tools/call","params":{"name":"echo","arguments":{"message":%q}}}`, message, message)))
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("MCP-Protocol-Version", LegacyVersion)
	req.Header.Set("Mcp-Session-Id", session)
	authorize(req.Header)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}
