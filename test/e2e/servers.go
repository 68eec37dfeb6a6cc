package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
)

// Server is one build of a real MCP server in one mode.
type Server struct {
	Name     string
	Era      string // what a probe must find: modern or legacy
	Stateful bool   // gives out sessions, to legacy clients at least

	program  func(t testing.TB) []string // builds it; the start of its command line
	flags    []string                    // its mode
	sessions func(*Instance) int         // nil: /debug/stats says it
}

// All is every server that the project promises to understand. The names are
// those of the captures in mcp-wire.md.
var All = []Server{
	{Name: "go-sdk-v1.8.0-stateful", Era: "legacy", Stateful: true, program: gosdk180, flags: []string{"--era", "legacy"}},
	{Name: "go-sdk-v1.8.0-stateless", Era: "modern", program: gosdk180, flags: []string{"--era", "modern"}},
	{Name: "go-sdk-v1.8.0-json", Era: "legacy", Stateful: true, program: gosdk180, flags: []string{"--era", "legacy", "--json"}},
	{Name: "go-sdk-v1.8.0-stateless-json", Era: "modern", program: gosdk180, flags: []string{"--era", "modern", "--json"}},
	{Name: "go-sdk-v1.2.0-stateful", Era: "legacy", Stateful: true, program: gosdk120, flags: []string{"--era", "legacy"}},
	{Name: "go-sdk-v1.2.0-stateless", Era: "legacy", program: gosdk120, flags: []string{"--era", "legacy", "--stateless"}},
	{Name: "mcp-go-v1.2.1-default", Era: "modern", Stateful: true, program: mcpgo121, flags: []string{"--mode", "default"}},
	{Name: "mcp-go-v1.2.1-stateful", Era: "modern", Stateful: true, program: mcpgo121, flags: []string{"--mode", "stateful"}},
	{Name: "mcp-go-v1.2.1-stateless", Era: "modern", program: mcpgo121, flags: []string{"--mode", "stateless"}},
	{Name: "mcp-go-v0.56.0-default", Era: "legacy", Stateful: true, program: mcpgo056, flags: []string{"--mode", "default"}},
	{Name: "mcp-go-v0.56.0-stateful", Era: "legacy", Stateful: true, program: mcpgo056, flags: []string{"--mode", "stateful"}},
	{Name: "mcp-go-v0.56.0-stateless", Era: "legacy", program: mcpgo056, flags: []string{"--mode", "stateless"}},
	{Name: "ts-sdk-v1.32.2-stateful", Era: "legacy", Stateful: true, program: node("sdk1.mjs"), flags: []string{"--mode", "stateful"}},
	{Name: "ts-sdk-v1.32.2-stateless", Era: "legacy", program: node("sdk1.mjs"), flags: []string{"--mode", "stateless"}},
	{Name: "ts-sdk-v2.4.0-dual", Era: "modern", program: node("sdk2.mjs")},
	{Name: "server-everything-2026.8.31", Era: "legacy", Stateful: true, program: everything, flags: []string{"streamableHttp"}, sessions: everythingSessions},
}

// Get is the server of that name.
func Get(t testing.TB, name string) Server {
	t.Helper()
	for _, s := range All {
		if s.Name == name {
			return s
		}
	}
	t.Fatalf("no server %q in the table", name)
	return Server{}
}

func gosdk180(t testing.TB) []string {
	return []string{GoBuild(t, "gosdk-v1.8.0", "examples/servers")}
}

func gosdk120(t testing.TB) []string {
	return []string{GoBuild(t, "gosdk-v1.2.0", "examples/servers", "-modfile=../../test/e2e/servers/gosdk-v1.2.0.mod")}
}

func mcpgo121(t testing.TB) []string {
	return []string{GoBuild(t, "mcpgo-v1.2.1", "test/e2e/servers/mcpgo")}
}

func mcpgo056(t testing.TB) []string {
	return []string{GoBuild(t, "mcpgo-v0.56.0", "test/e2e/servers/mcpgo", "-modfile=v0.56.0.mod")}
}

func node(file string) func(testing.TB) []string {
	return func(t testing.TB) []string { return []string{"node", filepath.Join(npmServers(t), file)} }
}

func everything(t testing.TB) []string {
	dir := npmServers(t)
	return []string{"node", "--import", filepath.Join(dir, "loopback.mjs"),
		filepath.Join(dir, "node_modules/@modelcontextprotocol/server-everything/dist/index.js")}
}

// Instance is a Server that runs.
type Instance struct {
	*Process
	Server Server
	URL    string // its MCP endpoint
}

// Start builds the server if need be and starts it on a port of 127.0.0.1.
// args are flags besides its mode: --name N, --log FILE (see Executions), and
// for Go servers --h2c. server-everything heeds none.
func (s Server) Start(t testing.TB, port int, args ...string) *Instance {
	t.Helper()
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	line := append(append(s.program(t), s.flags...), "--listen", addr)
	line = append(line, args...)
	env := append(os.Environ(), fmt.Sprintf("PORT=%d", port)) // server-everything's way
	p := StartProcess(t, addr, func() *exec.Cmd {
		cmd := exec.Command(line[0], line[1:]...)
		cmd.Env = env
		return cmd
	})
	return &Instance{Process: p, Server: s, URL: "http://" + addr + "/mcp"}
}

// Stats is what a server says about itself at /debug/stats.
type Stats struct {
	Name       string
	PID        int
	Sessions   int            // live ones
	Goroutines int            // Go servers only
	Calls      map[string]int // executions of each tool
	Duplicates int            // executions with a message that had been executed; -1 = no longer counted
}

// Stats asks it. server-everything has none.
func (i *Instance) Stats(t testing.TB) (s Stats) {
	t.Helper()
	c := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Get("http://" + i.Addr + "/debug/stats")
	if err != nil {
		t.Fatalf("stats of %s: %v", i.Server.Name, err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil {
		t.Fatalf("stats of %s: status %d: %v", i.Server.Name, resp.StatusCode, err)
	}
	return s
}

// Sessions is how many sessions live on its side.
func (i *Instance) Sessions(t testing.TB) int {
	t.Helper()
	if i.Server.sessions != nil {
		return i.Server.sessions(i)
	}
	return i.Stats(t).Sessions
}

// AwaitSessions waits until want sessions live on its side: a DELETE may be
// answered before the session is gone.
func (i *Instance) AwaitSessions(t testing.TB, want int) {
	t.Helper()
	got := i.Sessions(t)
	for start := time.Now(); got != want && time.Since(start) < 3*time.Second; got = i.Sessions(t) {
		time.Sleep(50 * time.Millisecond)
	}
	if got != want {
		t.Errorf("%s has %d live sessions, want %d", i.Server.Name, got, want)
	}
}

var (
	sessionOpened = regexp.MustCompile(`(?m)^Session initialized with ID: `)
	sessionClosed = regexp.MustCompile(`(?m)^Transport closed for session `)
)

// everythingSessions counts in the log: server-everything prints a line
// whenever it puts a session into its table or takes it out.
func everythingSessions(i *Instance) int {
	out := i.Output()
	return len(sessionOpened.FindAllString(out, -1)) - len(sessionClosed.FindAllString(out, -1))
}

// Executions reads the file that servers were given as log, and returns how
// often each message was executed, on all of them, killed ones included.
func Executions(t testing.TB, file string) map[string]int {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	n := map[string]int{}
	for line := range strings.Lines(string(b)) {
		_, message, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		n[message]++
	}
	return n
}
