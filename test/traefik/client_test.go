package traefik

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// The same story as TestRealClientSurvivesRecreation with the TypeScript SDK: the
// route is away during call 2. It is back for calls 3 and 4 in any case.
func TestTypeScriptClientSurvivesRecreation(t *testing.T) {
	for _, plugin := range []bool{false, true} {
		t.Run(fmt.Sprintf("plugin %v", plugin), func(t *testing.T) {
			server := e2e.Get(t, "ts-sdk-v1.32.2-stateful").Start(t, e2e.FreePort(t))
			c := config{plugin: "hold: 10s", servers: []string{server.Addr}}
			there := c.yaml()
			c.noRoute = true
			gone := c.yaml()
			if !plugin {
				there, gone = bare(there), bare(gone)
			}
			tr := Start(t, Options{Dynamic: there, NoPlugin: !plugin})
			await(t, 10*time.Second, "served", func() bool { status, _ := post(t, tr.URL+"/mcp"); return status < 500 && status != 404 })

			next, answers := startClient(t, tr.URL+"/mcp")
			ok := 0
			for call := 1; call <= 4; call++ {
				if call == 2 {
					tr.Reload(t, gone)
				}
				if call > 1 {
					fmt.Fprintln(next)
				}
				if call == 2 {
					time.Sleep(time.Second)
					tr.write(t, there)
				}
				line, err := answers.ReadString('\n')
				if err != nil {
					t.Fatal(err)
				}
				t.Log(strings.TrimSpace(line))
				if strings.HasSuffix(line, ": ok\n") {
					ok++
				}
				if call == 2 {
					time.Sleep(time.Second)
				}
			}
			if plugin && ok != 4 || !plugin && ok == 4 {
				t.Errorf("%d of 4 calls succeeded", ok)
			}
		})
	}
}

// startClient runs client.mjs among the packages that the servers use.
func startClient(t *testing.T, url string) (io.Writer, *bufio.Reader) {
	t.Helper()
	script, err := os.ReadFile(filepath.Join(e2e.Root(), "test/traefik/client.mjs"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "node", "--input-type=module", "-e", string(script))
	cmd.Dir = filepath.Join(e2e.Cache(), "npm")
	cmd.Env = append(os.Environ(), "MCP_URL="+url)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return in, bufio.NewReader(out)
}
