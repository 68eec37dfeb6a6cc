package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"
)

// body is a tools/call of 1 KiB, as a 2026-07-28 client sends it.
var body = func() string {
	b := `{"jsonrpc":"2.0","id":"bench","method":"tools/call","params":{"name":"echo","arguments":{"message":"%s"},"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}}}`
	return fmt.Sprintf(b, strings.Repeat("x", 1024-len(b)+2))
}()

// header is that of a call of 2026-07-28, and inSession that of one in a session.
var header = map[string]string{
	"Content-Type": "application/json", "Accept": "application/json, text/event-stream",
	"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "echo",
}

func inSession(id string) map[string]string {
	return map[string]string{
		"Content-Type": "application/json", "Accept": "application/json, text/event-stream",
		"MCP-Protocol-Version": "2025-11-25", "Mcp-Session-Id": id,
		"Mcp-Method": "tools/call", // by which our backend knows a call
	}
}

// A load has clients call, and says how it went.
type load func(addr string, header map[string]string, clients int, d time.Duration) (result, error)

// result is one round.
type result struct {
	perSecond float64
	p50, p99  time.Duration // p50: of our own load
	failed    int
}

var (
	wrkRate = regexp.MustCompile(`Requests/sec:\s+([\d.]+)`)
	wrkP99  = regexp.MustCompile(`99%\s+([\d.]+)(us|ms|s)`)
	wrkBad  = regexp.MustCompile(`Non-2xx or 3xx responses: (\d+)`)
)

// wrk has Debian's wrk make the load.
func wrk(addr string, header map[string]string, clients int, d time.Duration) (result, error) {
	f, err := os.CreateTemp("", "bench*.lua")
	if err != nil {
		return result{}, err
	}
	defer os.Remove(f.Name())
	fmt.Fprintf(f, "wrk.method = \"POST\"\nwrk.body = %q\n", body)
	for k, v := range header {
		fmt.Fprintf(f, "wrk.headers[%q] = %q\n", k, v)
	}
	f.Close()
	out, err := exec.Command("wrk", "-t1", "-c", strconv.Itoa(clients), "-d", fmt.Sprintf("%ds", int(d.Seconds())), "--latency", "-s", f.Name(), "http://"+addr+"/mcp").CombinedOutput()
	rate, p99 := wrkRate.FindSubmatch(out), wrkP99.FindSubmatch(out)
	if err != nil || rate == nil || p99 == nil {
		return result{}, fmt.Errorf("wrk: %v\n%s", err, out)
	}
	r := result{}
	r.perSecond, _ = strconv.ParseFloat(string(rate[1]), 64)
	r.p99, _ = time.ParseDuration(string(p99[1]) + string(p99[2]))
	if bad := wrkBad.FindSubmatch(out); bad != nil {
		r.failed, _ = strconv.Atoi(string(bad[1]))
	}
	return r, nil
}

// goLoad makes the load itself and checks every answer.
func goLoad(addr string, header map[string]string, clients int, d time.Duration) (result, error) {
	return paced(addr, header, clients, d, 0)
}

// paced is goLoad with a pause after each call.
func paced(addr string, header map[string]string, clients int, d, pause time.Duration) (result, error) {
	var mu sync.Mutex
	var took []time.Duration
	failed := 0
	var wg sync.WaitGroup
	end := time.Now().Add(d)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: clients}}
	defer client.CloseIdleConnections()
	for range clients {
		wg.Go(func() {
			var mine []time.Duration
			bad := 0
			for time.Now().Before(end) {
				start := time.Now()
				if err := call(client, addr, header); err != nil {
					bad++
				}
				mine = append(mine, time.Since(start))
				time.Sleep(pause)
			}
			mu.Lock()
			took, failed = append(took, mine...), failed+bad
			mu.Unlock()
		})
	}
	wg.Wait()
	sort.Slice(took, func(i, j int) bool { return took[i] < took[j] })
	if len(took) == 0 {
		return result{}, fmt.Errorf("no request within %s", d)
	}
	return result{perSecond: float64(len(took)) / d.Seconds(), p50: took[len(took)/2], p99: took[len(took)*99/100], failed: failed}, nil
}

func call(c *http.Client, addr string, header map[string]string) error {
	req, err := http.NewRequest(http.MethodPost, "http://"+addr+"/mcp", strings.NewReader(body))
	if err != nil {
		return err
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || !bytes.Contains(b, []byte(`"id":"bench","result"`)) {
		return fmt.Errorf("%d %s %v", resp.StatusCode, b, err)
	}
	return nil
}
