package e2e

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// stdioServers speak over stdin and stdout.
var stdioServers = []struct {
	name, era, steps string
	program          func(testing.TB) []string
}{
	{"go-sdk-v1.8.0", "modern", "server/discover", func(t testing.TB) []string { return append(gosdk180(t), "--stdio") }},
	{"go-sdk-v1.2.0", "legacy", "server/discover initialize tools/list", func(t testing.TB) []string { return append(gosdk120(t), "--stdio") }},
	{"server-everything-2026.8.31", "legacy", "server/discover initialize tools/list", func(t testing.TB) []string { return append(everything(t), "stdio") }},
}

// The command starts a server, asks it, calls a tool of it, and ends it. Nothing is
// left, and the server's stderr stays apart.
func TestProbeStdio(t *testing.T) {
	for _, s := range stdioServers {
		t.Run(s.name, func(t *testing.T) {
			tests := []struct {
				name  string
				flags []string
				want  string
				exit  int
				extra string // steps after the usual ones
			}{
				{"plain", nil, "ready ok", 0, ""},
				{"a tool", []string{"--expect-tool", "echo"}, "ready ok", 0, " tools/list"},
				{"a tool that it has not", []string{"--expect-tool", "no-such-tool"}, "degraded tools_missing", 0, " tools/list"},
				{"a call", []string{"--call", "echo", "--args", `{"message":"hello"}`}, "ready ok", 0, " tools/call"},
				{"a call without its argument", []string{"--call", "echo"}, "degraded tool_failing", 0, " tools/call"},
			}
			for _, tt := range tests {
				mark := fmt.Sprintf("E2E_STDIO=%d", time.Now().UnixNano())
				line := append(append(tt.flags, "--timeout", "15s", "--stdio", "--", "/usr/bin/env", mark), s.program(t)...)
				r, exit := probe(t, line...)
				if got := r.Verdict + " " + r.Reason; got != tt.want || exit != tt.exit || r.Era != s.era {
					t.Errorf("%s: %s %s, exit %d; want %s, %s, exit %d: %s", tt.name, got, r.Era, exit, tt.want, s.era, tt.exit, r.Detail)
				}
				var steps []string
				for _, step := range r.Steps {
					steps = append(steps, step.Step)
				}
				if got := strings.Join(steps, " "); got != s.steps+tt.extra {
					t.Errorf("%s: asked %s, want %s", tt.name, got, s.steps+tt.extra)
				}
				if left := startedWith(mark); len(left) > 0 {
					t.Errorf("%s: left %v", tt.name, left)
				}
			}
		})
	}
}

// A server behind npx, or another wrapper that stays, ends with it.
func TestProbeStdioWrapper(t *testing.T) {
	mark := fmt.Sprintf("E2E_STDIO=%d", time.Now().UnixNano())
	server := strings.Join(everything(t), " ")
	r, exit := probe(t, "--timeout", "15s", "--stdio", "--", "/usr/bin/env", mark, "/bin/sh", "-c", server+" stdio; true")
	if r.Verdict != "ready" || exit != 0 {
		t.Errorf("probe = %+v, exit %d; want ready", r, exit)
	}
	if left := startedWith(mark); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// An HTTP server that was started by mistake answers nothing on stdout: dead within
// the timeout, and ended.
func TestProbeStdioOfAnHTTPServer(t *testing.T) {
	mark := fmt.Sprintf("E2E_STDIO=%d", time.Now().UnixNano())
	line := append([]string{"--timeout", "3s", "--stdio", "--", "/usr/bin/env", mark}, gosdk180(t)...)
	start := time.Now()
	r, exit := probe(t, append(line, "--listen", fmt.Sprintf("127.0.0.1:%d", FreePort(t)))...)
	if r.Verdict != "dead" || r.Reason != "not_mcp" || exit != 1 {
		t.Errorf("probe = %s %s, exit %d; want dead, not_mcp (it prints its address), 1", r.Verdict, r.Reason, exit)
	}
	if took := time.Since(start); took > 4*time.Second {
		t.Errorf("it took %v, want 3s and the start of the command", took)
	}
	if left := startedWith(mark); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// startedWith are the processes that have this in their environment.
func startedWith(mark string) (all []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if env, err := os.ReadFile(dir + "/environ"); err == nil && bytes.Contains(env, []byte(mark)) {
			all = append(all, filepath.Base(dir))
		}
	}
	return all
}
