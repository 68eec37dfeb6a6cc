package operations

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// probes counts what a server is asked.
type probes struct {
	http.Handler
	n atomic.Int64
}

func (p *probes) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.n.Add(1)
	p.Handler.ServeHTTP(w, r)
}

// callers is how many ask at once, over real sockets; in CI a machine may allow
// fewer files.
func callers(t *testing.T) int {
	t.Helper()
	if b, err := os.ReadFile("/proc/self/limits"); err == nil {
		for line := range strings.Lines(string(b)) {
			var soft, hard int
			if n, _ := fmt.Sscanf(line, "Max open files %d %d", &soft, &hard); n == 2 && hard < 11_000 {
				t.Logf("%d files at most", hard)
				return hard / 2
			}
		}
	}
	return 10_000
}

// Ten thousand callers at once, over real connections, while one of three servers
// hangs: each server is asked once, everybody is answered, and another ten thousand
// within the cache period ask nobody.
func TestTenThousandCallers(t *testing.T) {
	var counted [3]*probes
	args := []string{"serve", "--cache", "1m", "--timeout", "3s"}
	for i := range counted {
		s := startServer(t, fmt.Sprint("app", i), serving)
		if i == 2 {
			s.mode.Store(hanging)
		}
		counted[i] = &probes{Handler: s}
		ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t)))
		if err != nil {
			t.Fatal(err)
		}
		front := &http.Server{Handler: counted[i]}
		go front.Serve(ln)
		t.Cleanup(func() { front.Close() })
		args = append(args, "--target", fmt.Sprintf("app%d=http://%s/mcp", i, ln.Addr()))
	}
	addr := fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t))
	bin := mcphealth(t)
	e2e.StartProcess(t, addr, func() *exec.Cmd { return exec.Command(bin, append(args, "--listen", addr)...) })
	n := callers(t)
	for round := range 2 {
		var ok, failed atomic.Int64
		var why atomic.Value
		begun := make(chan struct{})
		var all sync.WaitGroup
		for range n {
			all.Go(func() {
				<-begun
				status, err := getOnce(addr, "/health")
				if err != nil || status != 200 {
					failed.Add(1)
					why.Store(fmt.Sprint(status, " ", err))
					return
				}
				ok.Add(1)
			})
		}
		start := time.Now()
		close(begun)
		all.Wait()
		t.Logf("round %d: %d callers answered in %v", round, ok.Load(), time.Since(start).Round(10*time.Millisecond))
		if failed.Load() > 0 {
			t.Errorf("%d of %d got no answer: %v", failed.Load(), n, why.Load())
		}
	}
	for i, c := range counted {
		if got := c.n.Load(); got != 1 {
			t.Errorf("app%d was asked %d times, want once", i, got)
		}
	}
}

// getOnce asks over a connection of its own, as cheaply as can be. A listener's queue
// may be full for a moment.
func getOnce(addr, path string) (int, error) {
	c, err := net.DialTimeout("tcp", addr, 30*time.Second)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(60 * time.Second))
	fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", path)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, err
}

// Callers that send a byte now and then, or far too much, hold nobody up, and are
// not kept.
func TestHostileCallers(t *testing.T) {
	t.Parallel()
	addr := startServe(t, startServer(t, "app", serving))
	var slow []net.Conn
	for range 500 {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprint(c, "GET /health HTTP/1.1\r\nHost: x\r\nX-")
		slow = append(slow, c)
	}
	if status, err := getOnce(addr, "/health"); status != 200 {
		t.Errorf("beside 500 slow ones: %d %v", status, err)
	}
	for i, c := range slow {
		_ = c.SetReadDeadline(time.Now().Add(15 * time.Second)) // it has 5 s, and 408 or nothing comes
		if _, err := io.ReadAll(c); err != nil {
			t.Fatalf("slow caller %d is still kept: %v", i, err)
		}
	}
	for request, want := range map[string]string{
		"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + strings.Repeat("x", 64<<10) + "\r\n\r\n":               "431",
		"GET /" + strings.Repeat("x", 64<<10) + " HTTP/1.1\r\nHost: x\r\n\r\n":                                 "431",
		"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n" + strings.Repeat("x", 1<<20): "405",
		"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n":  "200", // chunked counts (RFC 9112 §6.3)
		"GET http://169.254.169.254/health HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n":                          "200", // ours, whatever the Host
		"CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n":                                            "4",
		"GET /health/app/../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n":                                         "307",
		"GET /health HTTP/1.1\r\nHost: x\r\nX-Upstream: a\r\n b\r\n\r\n":                                       "4", // a folded line
		"GET /health HTTP/1.1\r\nHost: x\r\nX-Upstream: 127.0.0.1:1\r\n\r\n":                                   "404",
		"\x16\x03\x01\x02\x00\x01\x00": "400", // TLS
	} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(15 * time.Second))
		go io.WriteString(c, request+"\r\n\r\n")
		line, err := bufio.NewReader(c).ReadString('\n')
		if !strings.HasPrefix(line, "HTTP/1.1 "+want) && !strings.HasPrefix(line, "HTTP/1.0 "+want) {
			t.Errorf("%.60q: %q %v, want %s", request, line, err, want)
		}
		c.Close()
	}
	if status, err := getOnce(addr, "/health"); status != 200 {
		t.Errorf("after all that: %d %v", status, err)
	}
}

// It goes on when nobody reads its log any more.
func TestServeUnread(t *testing.T) {
	t.Parallel()
	addr, bin := fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t)), mcphealth(t)
	cmd := exec.Command(bin, "serve", "--listen", addr, "--target", "gone=http://127.0.0.1:1/mcp")
	log, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	if line, _ := bufio.NewReader(log).ReadString('\n'); !strings.Contains(line, "msg=listening") {
		t.Fatalf("%q", line)
	}
	log.Close()
	for path, want := range map[string]int{"/health/gone": 503, "/livez": 200} { // the first is worth a line
		if status, err := getOnce(addr, path); status != want {
			t.Errorf("%s: %d %v, want %d", path, status, err, want)
		}
	}
	if status, err := getOnce(addr, "/livez"); status != 200 {
		t.Errorf("after that: %d %v", status, err)
	}
}

// SIGTERM in the middle of a probe: callers are answered, sessions and commands end,
// and so does it, soon and with exit status 0.
func TestServeStops(t *testing.T) {
	t.Parallel()
	legacy := e2e.Get(t, "go-sdk-v1.8.0-stateful").Start(t, e2e.FreePort(t))
	hung := startServer(t, "hung", hanging)
	mark := filepath.Join(t.TempDir(), "child")
	addr := fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t))
	server := e2e.GoBuild(t, "gosdk-v1.8.0", "examples/servers")
	config := write(t, "config.yml", fmt.Sprintf(`
listen: %s
targets:
  - {name: legacy, url: %q}
  - {name: hung, url: %q, timeout: 30s}
  - {name: command, stdio: [/bin/sh, -c, 'sleep 1000 & echo $! >%s; exec %s --stdio']}
`, addr, legacy.URL, hung.url(), mark, server))
	bin := mcphealth(t)
	p := e2e.StartProcess(t, addr, func() *exec.Cmd { return exec.Command(bin, "serve", "--config", config) })
	for _, name := range []string{"legacy", "command"} {
		var doc struct {
			Checks map[string]struct{ OK bool }
		}
		for begun := time.Now(); !doc.Checks[name].OK && time.Since(begun) < 30*time.Second; time.Sleep(50 * time.Millisecond) {
			resp, err := http.Get("http://" + addr + "/health/" + name)
			if err != nil {
				t.Fatal(err)
			}
			_ = json.NewDecoder(resp.Body).Decode(&doc)
			resp.Body.Close()
		}
		if !doc.Checks[name].OK {
			t.Fatalf("%s is not ok\n%s", name, p.Output())
		}
	}
	legacy.AwaitSessions(t, 1)
	answered := make(chan string, 1)
	go func() {
		status, err := getOnce(addr, "/health/hung")
		answered <- fmt.Sprint(status, err)
	}()
	time.Sleep(500 * time.Millisecond) // it waits for its probe
	start := time.Now()
	p.Terminate(t)
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("it ended %v after SIGTERM", took)
	}
	if got := <-answered; got != "200 <nil>" { // it could not find out
		t.Errorf("the caller that waited: %s", got)
	}
	legacy.AwaitSessions(t, 0)
	pid, err := os.ReadFile(mark)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/proc/" + strings.TrimSpace(string(pid))); err == nil {
		if state, _ := os.ReadFile("/proc/" + strings.TrimSpace(string(pid)) + "/status"); !strings.Contains(string(state), "State:\tZ") {
			t.Error("what the command had started still runs")
		}
	}
	if out := p.Output(); !strings.Contains(out, "msg=stopping") || strings.Contains(out, "panic") {
		t.Errorf("%s", out)
	}
}
