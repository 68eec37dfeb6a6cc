// Package operations runs what docs/operations.md shows: each proxy with the example
// that it shows, in front of servers that live, hang, or are none.
package operations

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// The modes of a server.
const (
	// serving is how a modern server is whom common checks drop: it answers GET by
	// 405, ping by 404 with -32601, and everything else as it should.
	serving = "serving"
	page    = "page"    // HTML in HTTP 200, whatever was asked
	hanging = "hanging" // accepts, and answers nothing
)

// server is an MCP server whose mode a test changes.
type server struct {
	name, addr string
	mode       atomic.Value
	calls      atomic.Int64 // tools/call executed
	srv        *http.Server
	release    chan struct{}
}

func startServer(t *testing.T, name, mode string) *server {
	t.Helper()
	s := &server{name: name, addr: fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t)), release: make(chan struct{})}
	s.mode.Store(mode)
	ln, err := net.Listen("tcp", s.addr)
	if err != nil {
		t.Fatal(err)
	}
	s.srv = &http.Server{Handler: s}
	go s.srv.Serve(ln)
	t.Cleanup(func() { close(s.release); s.srv.Close() })
	return s
}

func (s *server) url() string { return "http://" + s.addr + "/mcp" }

func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	switch s.mode.Load() {
	case hanging:
		select {
		case <-r.Context().Done():
		case <-s.release:
		}
		return
	case page:
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprint(w, "<!doctype html><title>Sign in</title>")
		return
	}
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", "POST")
		w.WriteHeader(http.StatusMethodNotAllowed)
		return
	}
	var m struct {
		ID     json.RawMessage
		Method string
	}
	_ = json.Unmarshal(body, &m)
	w.Header().Set("Content-Type", "application/json")
	rest := `"error":{"code":-32601,"message":"Method not found"}`
	switch m.Method {
	case "server/discover":
		rest = `"result":{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},"serverInfo":{"name":"` + s.name + `","version":"1"}}`
	case "tools/call":
		s.calls.Add(1)
		rest = `"result":{"resultType":"complete","content":[{"type":"text","text":"` + s.name + `"}]}`
	default:
		w.WriteHeader(http.StatusNotFound)
	}
	fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,%s}`, m.ID, rest)
}

// mcphealth builds the command.
func mcphealth(t testing.TB) string {
	return e2e.GoBuild(t, "mcphealth", "cmd/mcphealth")
}

// startServe runs mcphealth serve for these servers, on a free port.
func startServe(t *testing.T, servers ...*server) (addr string) {
	t.Helper()
	addr = fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t))
	args := []string{"serve", "--listen", addr, "--cache", "1s", "--timeout", "2s"}
	for _, s := range servers {
		args = append(args, "--target", s.name+"="+s.url())
	}
	bin := mcphealth(t)
	e2e.StartProcess(t, addr, func() *exec.Cmd { return exec.Command(bin, args...) })
	return addr
}

// example reads an example file, and puts these addresses for those in it. Each must
// be there.
func example(t *testing.T, file string, oldnew ...string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(e2e.Root(), "examples", file))
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	for i := 0; i < len(oldnew); i += 2 {
		if !strings.Contains(text, oldnew[i]) {
			t.Fatalf("examples/%s: no %q in it", file, oldnew[i])
		}
	}
	return strings.NewReplacer(oldnew...).Replace(text)
}

// write puts text into a file of the test's.
func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// meta is what a modern request must carry (MCP 2026-07-28).
const meta = `"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":{"name":"test","version":"1"},"io.modelcontextprotocol/clientCapabilities":{}}`

var calls atomic.Int64

// call calls the tool whoami through a proxy, with a connection of its own, and
// returns who answered; "" and why not.
func call(url string) (who, why string) { return callTool(url, "whoami", "{}", 10*time.Second) }

func callTool(url, tool, args string, timeout time.Duration) (who, why string) {
	id := calls.Add(1)
	req, _ := http.NewRequest(http.MethodPost, url, strings.NewReader(fmt.Sprintf(`{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":%q,"arguments":%s,%s}}`, id, tool, args, meta)))
	for name, value := range map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": tool} {
		req.Header.Set(name, value)
	}
	req.Close = true
	client := http.Client{Timeout: timeout}
	resp, err := client.Do(req)
	if err != nil {
		return "", err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	var m struct {
		ID     int64
		Result struct {
			Content []struct{ Text string }
			IsError bool
		}
	}
	if resp.StatusCode != 200 || json.Unmarshal(body, &m) != nil || m.ID != id || len(m.Result.Content) != 1 || m.Result.IsError {
		return "", fmt.Sprintf("%d %s", resp.StatusCode, body)
	}
	who, _, _ = strings.Cut(m.Result.Content[0].Text, ",")
	return who, ""
}

// await waits until a call is answered by each of these, and n calls after that by
// nobody else.
func await(t *testing.T, url string, within time.Duration, n int, names ...string) {
	t.Helper()
	begun := time.Now()
	missing, who, why := "", "", ""
	for good := 0; good < n; {
		if time.Since(begun) > within {
			t.Fatalf("%s: after %v the last was answered by %q (%s), want %q", url, within, who, why, names)
		}
		seen := map[string]bool{}
		for good = 0; good < n; good++ {
			who, why = call(url)
			if !strings.Contains(" "+strings.Join(names, " ")+" ", " "+who+" ") || who == "" {
				break
			}
			seen[who] = true
		}
		if good == n && len(seen) < len(names) {
			good, missing = 0, fmt.Sprint(seen)
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Logf("answered by %v after %v %s", names, time.Since(begun).Round(100*time.Millisecond), missing)
}

// routesAround takes two servers behind a proxy through all that matters. both: the
// proxy uses both where both are good, and else the first.
func routesAround(t *testing.T, url string, app1, app2 *server, both bool) {
	t.Helper()
	const soon = 40 * time.Second // two cores, and five proxies
	good := []string{"app1"}
	if both {
		good = []string{"app1", "app2"}
	}
	await(t, url, soon, 20, good...)
	app2.mode.Store(page)
	await(t, url, soon, 20, "app1") // a 200 with HTML is dead, a 405 to GET is not
	app1.mode.Store(hanging)
	app2.mode.Store(serving)
	await(t, url, soon, 20, "app2")
	app1.mode.Store(serving)
	await(t, url, soon, 20, good...)
}

// exitOf runs a command to its end.
func exitOf(args []string) (int, string) {
	cmd := exec.Command(args[0], args[1:]...)
	out, _ := cmd.CombinedOutput()
	return cmd.ProcessState.ExitCode(), string(out)
}
