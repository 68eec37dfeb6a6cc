package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// NodeClient is a real client that runs in Node: servers/npm/client.mjs, which takes
// commands.
type NodeClient struct {
	in  io.Writer
	out *bufio.Scanner
}

// StartNode starts one with the TypeScript SDK 1.x (lib sdk1) or the client 2.x (sdk2).
// It ends with the test.
func StartNode(t testing.TB, lib, url string) *NodeClient {
	t.Helper()
	cmd := exec.Command("node", filepath.Join(npmServers(t), "client.mjs"), lib, url)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	return &NodeClient{in, bufio.NewScanner(out)}
}

// Do runs one command and reads its result. The error is what the library said.
func (c *NodeClient) Do(line string, result any) error {
	fmt.Fprintln(c.in, line)
	if !c.out.Scan() {
		return fmt.Errorf("the client ended: %v", c.out.Err())
	}
	var a struct {
		Result json.RawMessage
		Error  string
	}
	if err := json.Unmarshal(c.out.Bytes(), &a); err != nil {
		return fmt.Errorf("%q: %w", c.out.Text(), err)
	}
	if a.Error != "" {
		return fmt.Errorf("%s", a.Error)
	}
	return json.Unmarshal(a.Result, result)
}
