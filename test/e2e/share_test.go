package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const redisPassword = "s3cret-of-the-store"

// startRedis runs Debian's redis-server with a password and nothing on disk.
func startRedis(t *testing.T) (p *Process, url string) {
	t.Helper()
	port := FreePort(t)
	p = StartProcess(t, fmt.Sprintf("127.0.0.1:%d", port), func() *exec.Cmd {
		return exec.Command("redis-server", "--bind", "127.0.0.1", "--port", fmt.Sprint(port), "--save", "", "--appendonly", "no", "--requirepass", redisPassword)
	})
	return p, fmt.Sprintf("redis://:%s@127.0.0.1:%d/3", redisPassword, port)
}

// counted is an MCP server that counts what it is asked, and can be told to be gone. It
// understands no question with the token "poor".
type counted struct {
	*httptest.Server
	asked  atomic.Int64
	absent atomic.Bool
	slow   time.Duration // before it says that it is gone
}

func startCounted(t *testing.T) *counted {
	c := new(counted)
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "Bearer poor" {
			http.Error(w, "what?", http.StatusNotAcceptable)
			return
		}
		c.asked.Add(1)
		if c.absent.Load() {
			time.Sleep(c.slow)
			http.NotFound(w, r)
			return
		}
		var m struct {
			ID json.RawMessage `json:"id"`
		}
		_ = json.NewDecoder(r.Body).Decode(&m)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`, m.ID)
	}))
	t.Cleanup(c.Close)
	return c
}

func (c *counted) addr() string { return strings.TrimPrefix(c.URL, "http://") }

// in is how often it is asked within d.
func (c *counted) in(d time.Duration) int64 {
	before := c.asked.Load()
	time.Sleep(d)
	return c.asked.Load() - before
}

// Three edges share one store: together they ask as one does, know what it finds out,
// and go on by themselves when the store, or the edge that asks, is gone.
func TestShareVerdicts(t *testing.T) {
	redis, url := startRedis(t)
	server := startCounted(t)
	var edges []*Caddy
	for range 3 {
		edges = append(edges, StartCaddyGlobal(t, "\tmcp_health {\n\t\tinterval 1s\n\t\tfast 500ms\n\t\tshare "+url+"\n\t}", "\tmcp_proxy /mcp* "+server.addr()))
	}
	all := func(state string, within time.Duration) {
		t.Helper()
		for _, c := range edges {
			c.AwaitState(t, server.addr(), state, within)
		}
	}
	all("up", 5*time.Second)
	time.Sleep(2 * time.Second)
	if n := server.in(10 * time.Second); n < 8 || n > 16 {
		t.Errorf("three edges asked %d times in 10 s, want about the 11 of one", n)
	}

	server.absent.Store(true)
	all("down", 10*time.Second)
	server.absent.Store(false)
	all("up", 10*time.Second)

	redis.Kill(t)
	time.Sleep(2 * time.Second)
	if n := server.in(5 * time.Second); n < 12 {
		t.Errorf("without a store three edges asked %d times in 5 s, want the 15 or more of three", n)
	}
	all("up", time.Second)
	redis.Restart(t)
	time.Sleep(5 * time.Second)
	if n := server.in(5 * time.Second); n < 3 || n > 9 {
		t.Errorf("with the store back three edges asked %d times in 5 s, want about the 6 of one", n)
	}

	redis.Pause(t) // it takes connections and says nothing
	time.Sleep(3 * time.Second)
	if n := server.in(5 * time.Second); n < 10 {
		t.Errorf("with a store that hangs three edges asked %d times in 5 s, want the 15 or so of three", n)
	}
	redis.Continue(t)
	time.Sleep(5 * time.Second)

	for range 2 { // the one that asks may be among them
		edges[0].Kill(t)
		edges = edges[1:]
		time.Sleep(3 * time.Second)
		if n := server.in(3 * time.Second); n < 2 {
			t.Errorf("asked %d times in 3 s after one of the edges was killed, want another one to go on", n)
		}
	}
	all("up", time.Second)
	for _, c := range edges {
		out := c.Output()
		if strings.Contains(out, redisPassword) {
			t.Errorf("the store's password is in the log:\n%s", out)
		}
		if n := strings.Count(out, "the store of shared verdicts is away"); n != 2 {
			t.Errorf("%d times in the log that the store is away, want once for each of two times:\n%s", n, out)
		}
	}
}

// Reloads and the end do not wait for a store that does well.
func TestShareReload(t *testing.T) {
	_, url := startRedis(t)
	server := startCounted(t)
	site := "\tmcp_proxy /mcp* " + server.addr()
	c := StartCaddyGlobal(t, "\tmcp_health {\n\t\tshare "+url+"\n\t}", site)
	c.AwaitState(t, server.addr(), "up", 5*time.Second)
	for i := range 3 {
		start := time.Now()
		c.Reload(t, fmt.Sprintf("%s\n\theader X-Load %d", site, i))
		if took := time.Since(start); took > 5*time.Second {
			t.Fatalf("reload %d took %s", i+1, took)
		}
		time.Sleep(1500 * time.Millisecond)
	}
	c.AwaitState(t, server.addr(), "up", time.Second)
	c.Terminate(t)
	if out := c.Output(); strings.Contains(out, "is away") {
		t.Errorf("reloads are said to be an outage of the store:\n%s", out)
	}
}

// What three edges notice at the same time one of them looks into.
func TestShareAlarms(t *testing.T) {
	_, url := startRedis(t)
	server := startCounted(t)
	server.slow = 100 * time.Millisecond // so that all notice before one has looked
	var edges []*Caddy
	for range 3 {
		edges = append(edges, StartCaddyGlobal(t, "\tmcp_health {\n\t\tinterval 20s\n\t\tshare "+url+"\n\t}", "\tmcp_proxy /mcp* "+server.addr()))
	}
	for _, c := range edges {
		c.AwaitState(t, server.addr(), "up", 5*time.Second)
	}
	time.Sleep(4 * time.Second)
	server.absent.Store(true)
	before := server.asked.Load()
	var wg sync.WaitGroup
	for _, c := range edges {
		wg.Go(func() {
			resp, err := http.Post(c.URL(), "application/json", strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`))
			if err != nil {
				t.Error(err)
				return
			}
			_ = resp.Body.Close()
		})
	}
	wg.Wait()
	for _, c := range edges {
		c.AwaitState(t, server.addr(), "down", 5*time.Second)
	}
	n := server.asked.Load() - before - int64(len(edges))
	t.Logf("%d questions", n)
	if n > 12 { // a probe of what is gone is up to four
		t.Errorf("three edges that noticed a loss asked %d questions until all knew, want one to ask, and to make sure", n)
	}
}

// An edge that cannot ask keeps no other from asking: not one that does not serve before
// it knows something, and not for longer than one that asks.
func TestShareWithOneThatCannotAsk(t *testing.T) {
	_, url := startRedis(t)
	server := startCounted(t)
	options := "\tmcp_health {\n\t\tinterval 1s\n\t\tfast 500ms\n\t\tinitial wait\n\t\theader Authorization \"Bearer {env.SHARE_TOKEN}\"\n\t\tshare " + url + "\n\t}"
	t.Setenv("SHARE_TOKEN", "poor")
	poor := StartCaddyGlobal(t, options, "\tmcp_proxy /mcp* "+server.addr())
	time.Sleep(3 * time.Second)
	t.Setenv("SHARE_TOKEN", "good")
	rich := StartCaddyGlobal(t, options, "\tmcp_proxy /mcp* "+server.addr())
	rich.AwaitState(t, server.addr(), "up", 5*time.Second)
	poor.AwaitState(t, server.addr(), "up", 5*time.Second) // it hears
	time.Sleep(2 * time.Second)
	if n := server.in(10 * time.Second); n < 8 {
		t.Errorf("asked %d times in 10 s beside an edge that cannot ask, want the 11 or so of the other", n)
	}
}

// A store may be full of lies: those that no edge could have told count for nothing.
func TestShareWithLiars(t *testing.T) {
	redis, url := startRedis(t)
	_, port, _ := strings.Cut(redis.Addr, ":")
	server := startCounted(t)
	c := StartCaddyGlobal(t, "\tmcp_health {\n\t\tinterval 1s\n\t\tshare "+url+"\n\t}", "\tmcp_proxy /mcp* "+server.addr())
	c.AwaitState(t, server.addr(), "up", 5*time.Second)
	cli := func(args ...string) string {
		t.Helper()
		out, err := exec.Command("redis-cli", append([]string{"-p", port, "-n", "3", "-a", redisPassword, "--no-auth-warning"}, args...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("redis-cli %v: %v\n%s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	lease := ""
	for range 100 {
		if lease = cli("KEYS", "mcphealth:*:lease"); lease != "" {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	key := strings.TrimSuffix(strings.TrimPrefix(lease, "mcphealth:1:"), ":lease")
	if len(key) != 32 {
		t.Fatalf("the lease is named %q, want mcphealth:1:<32 digits>:lease", lease)
	}
	for range 5 {
		for _, lie := range []string{
			"", "{", `{"edge":"x","key":"` + key + `"}`,
			`{"edge":"x","key":"` + key + `","result":{"verdict":"dead","reason":"ok"}}`,
			`{"edge":"x","key":"` + key + `","result":{"verdict":"dead","reason":"whatever I say"}}`,
			`{"edge":"x","key":"` + key + `","result":[[[[` + strings.Repeat("[", 5000) + `}`,
			`{"edge":"x","key":"` + strings.Repeat("k", 20000) + `"}`,
		} {
			cli("PUBLISH", "mcphealth:1:results:3", lie)
		}
	}
	cli("SET", lease, strings.Repeat("z", 1000), "PX", "90000000") // a lease for a day, by nobody
	cli("DEL", "mcphealth:1:"+key+":last")
	cli("LPUSH", "mcphealth:1:"+key+":last", "not a string")
	time.Sleep(4 * time.Second)
	if n := server.in(4 * time.Second); n < 1 {
		t.Errorf("asked %d times in 4 s under a lease that never ends, want an edge that trusts none longer than its own", n)
	}
	if u := c.Upstreams(t)[server.addr()]; u.State != "up" {
		t.Errorf("state %s (%s) after lies, want up", u.State, u.Reason)
	}
}
