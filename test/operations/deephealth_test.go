package operations

import (
	"bufio"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// writers call the tool note over and over, and keep who answered when.
type writers struct {
	mu      sync.Mutex
	answers map[string]int // since forget
	failed  []string
	slowest time.Duration
	stop    chan struct{}
	all     sync.WaitGroup
}

func startWriters(url string, n int) *writers {
	w := &writers{answers: map[string]int{}, stop: make(chan struct{})}
	for range n {
		w.all.Go(func() {
			for {
				select {
				case <-w.stop:
					return
				case <-time.After(20 * time.Millisecond):
				}
				begun := time.Now()
				who, why := callTool(url, "note", `{"text":"x"}`, time.Minute)
				w.mu.Lock()
				w.answers[who]++
				w.slowest = max(w.slowest, time.Since(begun))
				if who == "" {
					w.failed = append(w.failed, why)
				}
				w.mu.Unlock()
			}
		})
	}
	return w
}

// forget forgets who answered, and returns it.
func (w *writers) forget() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	was := w.answers
	w.answers = map[string]int{}
	return was
}

// A server whose database is locked says so before a call fails, and Caddy sends the
// calls to the other one; so it does while one drains.
func TestDeepHealth(t *testing.T) {
	t.Parallel()
	bin := e2e.GoBuild(t, "deephealth", "examples/deephealth")
	start := func(name string) (*e2e.Process, string) {
		addr, db := fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t)), filepath.Join(t.TempDir(), name+".db")
		return e2e.StartProcess(t, addr, func() *exec.Cmd {
			return exec.Command(bin, "-listen", addr, "-name", name, "-db", db, "-cache", "1s", "-drain", "4s")
		}), db
	}
	one, db := start("one")
	two, _ := start("two")
	site := example(t, "deephealth/Caddyfile", "127.0.0.1:9001", one.Addr, "127.0.0.1:9002", two.Addr, "check_health_path /health", "check_health_path /health\n\t\tcheck_interval 500ms")
	_, site, _ = strings.Cut(site, "8080 {\n") // the block without its address
	caddy := e2e.StartCaddy(t, site[:strings.LastIndex(site, "}")])
	w := startWriters(caddy.URL(), 4)
	defer func() { close(w.stop); w.all.Wait() }()
	both := func() {
		t.Helper()
		for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
			w.mu.Lock()
			ok := w.answers["one"] > 0 && w.answers["two"] > 0
			w.mu.Unlock()
			if ok {
				return
			}
			if time.Since(begun) > 30*time.Second {
				t.Fatalf("answered by %v after 30 s, want both", w.forget())
			}
		}
	}
	both()

	locked := time.Now()
	lock := exec.Command(bin, "-db", db, "-lock", "8s")
	out, err := lock.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := lock.Start(); err != nil {
		t.Fatal(err)
	}
	defer lock.Wait()
	if line, _ := bufio.NewReader(out).ReadString('\n'); line != "locked\n" {
		t.Fatalf("the lock says %q", line)
	}
	caddy.AwaitState(t, one.Addr, "down", 7*time.Second)
	t.Logf("down %v after the lock: %s", time.Since(locked).Round(10*time.Millisecond), caddy.Upstreams(t)[one.Addr].Reason)
	if reason := caddy.Upstreams(t)[one.Addr].Reason; reason != "health_down" {
		t.Errorf("reason %s, want health_down", reason)
	}
	for range 20 { // those that were with it by then still wait for the lock
		if who, why := callTool(caddy.URL(), "note", `{"text":"x"}`, time.Minute); who != "two" {
			t.Errorf("while one is down: %q %s, want two", who, why)
		}
	}
	caddy.AwaitState(t, one.Addr, "up", 30*time.Second)
	w.forget()
	both()

	if resp, err := http.Get("http://" + one.Addr + "/health"); err != nil || resp.StatusCode != 200 {
		t.Errorf("the lock is gone: %v %v", resp, err)
	}
	ended := make(chan struct{})
	go func() { one.Terminate(t); close(ended) }()
	caddy.AwaitState(t, one.Addr, "degraded", 10*time.Second)
	if reason := caddy.Upstreams(t)[one.Addr].Reason; reason != "draining" {
		t.Errorf("reason %s, want draining", reason)
	}
	<-ended
	w.forget()
	time.Sleep(500 * time.Millisecond)
	if got := w.forget(); got["two"] == 0 || len(got) != 1 {
		t.Errorf("after one has ended: %v", got)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.failed) > 0 {
		t.Errorf("%d calls failed, the first: %s", len(w.failed), w.failed[0])
	}
	t.Logf("slowest call %v", w.slowest.Round(time.Millisecond))
}
