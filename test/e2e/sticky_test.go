package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// mayWait is how long a client may be without an answer while a replica restarts:
// about a second on a quiet machine, several on a busy one.
const mayWait = 20 * time.Second

// replicas are servers with sessions of their own behind one Caddy.
type replicas struct {
	all   []*Instance
	caddy *Caddy
	log   string // executions
}

// startReplicas starts n of them; {ALL} in site is their addresses.
func startReplicas(t *testing.T, server string, n int, site string) *replicas {
	t.Helper()
	r := &replicas{log: filepath.Join(t.TempDir(), "executions")}
	for i := range n {
		r.all = append(r.all, Get(t, server).Start(t, FreePort(t), "--log", r.log, "--name", string(rune('a'+i))))
	}
	r.caddy = StartCaddy(t, r.site(site))
	if strings.Contains(site, "mcp_proxy") {
		for _, i := range r.all {
			r.caddy.AwaitState(t, i.Addr, "up", 5*time.Second)
		}
	}
	return r
}

func (r *replicas) site(s string) string {
	var all []string
	for _, i := range r.all {
		all = append(all, i.Addr)
	}
	return strings.ReplaceAll(s, "{ALL}", strings.Join(all, " "))
}

// wantOnce checks that no message was executed twice.
func (r *replicas) wantOnce(t *testing.T) {
	t.Helper()
	n := 0
	for message, runs := range Executions(t, r.log) {
		if n++; message != "" && runs > 1 {
			t.Errorf("call %q was executed %d times, want at most once", message, runs)
		}
	}
	t.Logf("%d different messages executed", n)
}

// connect opens a session of the legacy era.
func connect(ctx context.Context, url string) (*mcp.ClientSession, error) {
	c := mcp.NewClient(&mcp.Implementation{Name: "mcphealth-e2e", Version: "0"}, nil)
	return c.Connect(ctx, &mcp.StreamableClientTransport{Endpoint: url}, &mcp.ClientSessionOptions{ProtocolVersion: LegacyVersion})
}

// whoami asks which replica answers.
func whoami(ctx context.Context, s *mcp.ClientSession) (string, error) {
	r, err := s.CallTool(ctx, &mcp.CallToolParams{Name: "whoami"})
	if err != nil {
		return "", err
	}
	if c, ok := r.Content[0].(*mcp.TextContent); ok {
		name, _, _ := strings.Cut(c.Text, ",")
		return name, nil
	}
	return "", fmt.Errorf("whoami = %+v", r)
}

const (
	sessions = 200
	calls    = 5
)

// tally is what became of many sessions.
type tally struct {
	mu     sync.Mutex
	whole  int            // all calls answered, by one replica
	calls  int            // calls answered
	owners map[string]int // of whole sessions
	errors map[string]int
}

func (c *tally) String() string {
	return fmt.Sprintf("%d of %d sessions whole (%.0f %%), %d of %d calls answered, owners %v, errors %v",
		c.whole, sessions, 100*float64(c.whole)/sessions, c.calls, sessions*calls, c.owners, c.errors)
}

var idInError = regexp.MustCompile(`\(session ID: [^)]*\)`)

// kind cuts off an error what differs from one to the next.
func kind(err error) string {
	s := idInError.ReplaceAllString(err.Error(), "…")
	if len(s) > 90 {
		s = "…" + s[len(s)-90:]
	}
	return s
}

// one runs one session.
func (c *tally) one(t *testing.T, url string) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	owner, answered, err := "", 0, error(nil)
	s, err := connect(ctx, url)
	for i := 0; err == nil && i < calls; i++ {
		var name string
		if name, err = whoami(ctx, s); err != nil {
			break
		}
		if owner == "" {
			owner = name
		}
		if answered++; name != owner {
			err = fmt.Errorf("answered by another replica")
		}
	}
	if s != nil {
		s.Close()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls += answered
	if err != nil {
		c.errors[kind(err)]++
		return
	}
	c.whole++
	c.owners[owner]++
}

// runSessions runs 200 sessions, 20 at a time.
func runSessions(t *testing.T, url string) *tally {
	c := &tally{owners: map[string]int{}, errors: map[string]int{}}
	var wg sync.WaitGroup
	slots := make(chan struct{}, 20)
	for range sessions {
		slots <- struct{}{}
		wg.Go(func() {
			c.one(t, url)
			<-slots
		})
	}
	wg.Wait()
	return c
}

// 200 sessions of 5 calls: all of them land on the replica that opened the session.
// Beside it, what plain Caddy does.
func TestSessionsFindTheirOwner(t *testing.T) {
	for _, n := range []int{2, 3} {
		for _, site := range []struct{ name, text string }{
			{"sticky", "mcp_proxy /mcp* {ALL} {\n\tsticky\n}"},
			{"plain random", "reverse_proxy /mcp* {ALL} {\n\tlb_policy random\n}"},
			{"plain header Mcp-Session-Id", "reverse_proxy /mcp* {ALL} {\n\tlb_policy header Mcp-Session-Id\n}"},
		} {
			t.Run(fmt.Sprintf("%d replicas/%s", n, site.name), func(t *testing.T) {
				r := startReplicas(t, "go-sdk-v1.8.0-stateful", n, site.text)
				c := runSessions(t, r.caddy.URL())
				t.Log(c)
				if site.name != "sticky" {
					return // measured, not wanted
				}
				if c.whole != sessions || c.calls != sessions*calls {
					t.Errorf("%v, want all", c)
				}
				if len(c.owners) != n {
					t.Errorf("owners %v, want sessions on all %d", c.owners, n)
				}
			})
		}
	}
}

// worker is a client that works on, whatever comes: after 404 it opens a new session,
// after anything else it tries again.
type worker struct {
	name     string
	session  *mcp.ClientSession
	calls    int
	reopened int
	longest  time.Duration // between two answers
	errors   map[string]int
}

func (w *worker) run(ctx context.Context, url string) {
	w.errors = map[string]int{}
	last := time.Now()
	for n := 0; ctx.Err() == nil; n++ {
		c, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		err := w.step(c, url, fmt.Sprintf("%s-%d", w.name, n))
		cancel()
		switch {
		case err == nil:
			w.longest = max(w.longest, time.Since(last))
			last = time.Now()
			w.calls++
		default:
			w.errors[kind(err)]++
		}
		time.Sleep(50 * time.Millisecond)
	}
	if w.session != nil {
		w.session.Close()
	}
}

func (w *worker) step(ctx context.Context, url, message string) (err error) {
	if w.session == nil {
		if w.session, err = connect(context.Background(), url); err != nil {
			w.session = nil
			return err
		}
	}
	if err = Echo(ctx, w.session, message); err == nil {
		return nil
	}
	if errors.Is(err, mcp.ErrSessionMissing) || strings.Contains(err.Error(), "closed") {
		w.reopened++ // the client library has given the connection up
		w.session.Close()
		w.session = nil
	}
	return err
}

// work starts 40 workers. Its function stops them and says what they met.
func work(t *testing.T, url string) (stop func() []*worker) {
	ctx, cancel := context.WithCancel(context.Background())
	all := make([]*worker, 40)
	var wg sync.WaitGroup
	for i := range all {
		all[i] = &worker{name: fmt.Sprintf("%s-w%d", t.Name(), i)}
		wg.Go(func() { all[i].run(ctx, url) })
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
	return func() []*worker { cancel(); wg.Wait(); return all }
}

func summary(all []*worker) string {
	calls, reopened, longest, errs := 0, 0, time.Duration(0), map[string]int{}
	for _, w := range all {
		calls += w.calls
		reopened += w.reopened
		longest = max(longest, w.longest)
		for k, n := range w.errors {
			errs[k] += n
		}
	}
	s := fmt.Sprintf("%d clients: %d calls answered, %d times a session was opened anew, longest pause of one client %s", len(all), calls, reopened, longest.Round(time.Millisecond))
	for k, n := range errs {
		s += fmt.Sprintf("\n  %4d × %s", n, k)
	}
	return s
}

// A rolling restart of all replicas under load: each session goes on, or is opened
// anew at once; nobody is lost, and nothing runs twice.
func TestRollingRestart(t *testing.T) {
	r := startReplicas(t, "go-sdk-v1.8.0-stateful", 3, "mcp_proxy /mcp* {ALL} {\n\tsticky\n}")
	stop := work(t, r.caddy.URL())
	time.Sleep(time.Second)
	for _, i := range r.all {
		i.Terminate(t)
		time.Sleep(500 * time.Millisecond) // as long as a container takes
		i.Restart(t)
		r.caddy.AwaitState(t, i.Addr, "up", 5*time.Second)
		time.Sleep(time.Second)
	}
	time.Sleep(time.Second)
	all := stop()
	t.Log(summary(all))
	for _, w := range all {
		if w.reopened < 1 || w.reopened > 3 {
			t.Errorf("%s opened %d sessions anew over 3 restarts, want 1 to 3", w.name, w.reopened)
		}
		if w.longest > mayWait {
			t.Errorf("%s was without an answer for %s", w.name, w.longest)
		}
	}
	r.wantOnce(t)
}

// A replica that does not come back: after the grace its sessions are opened anew
// elsewhere.
func TestReplicaIsGone(t *testing.T) {
	r := startReplicas(t, "go-sdk-v1.8.0-stateful", 2, "mcp_proxy /mcp* {ALL} {\n\tsticky\n\tsession_grace 2s\n}")
	stop := work(t, r.caddy.URL())
	time.Sleep(time.Second)
	r.all[0].Kill(t)
	r.caddy.AwaitState(t, r.all[0].Addr, "down", 5*time.Second)
	time.Sleep(4 * time.Second)
	all := stop()
	t.Log(summary(all))
	moved := 0
	for _, w := range all {
		moved += w.reopened
		if w.longest > mayWait {
			t.Errorf("%s was without an answer for %s, want about the grace of 2 s", w.name, w.longest)
		}
	}
	if moved == 0 {
		t.Error("no session was lost: the test is no good")
	}
	r.wantOnce(t)
}

// Sessions are found again after a restart of Caddy, and by another Caddy with the
// same key.
func TestSessionsOverEdges(t *testing.T) {
	site := "mcp_proxy /mcp* {ALL} {\n\tsticky\n\tsession_key 0123456789abcdef0123456789abcdef\n}"
	r := startReplicas(t, "ts-sdk-v1.32.2-stateful", 3, site)
	other := StartCaddy(t, r.site(site))
	for n := range 20 {
		s, err := connect(t.Context(), r.caddy.URL())
		if err != nil {
			t.Fatal(err)
		}
		id := s.ID()
		for k := range 6 {
			url := []string{r.caddy.URL(), other.URL()}[k%2]
			if status, body := rawEcho(t, url, id, fmt.Sprintf("edge-%d-%d", n, k)); status != 200 {
				t.Fatalf("%s: status %d %s", url, status, body)
			}
		}
		if n == 10 {
			r.caddy.Kill(t)
			r.caddy.Restart(t)
			if status, body := rawEcho(t, r.caddy.URL(), id, "restarted"); status != 200 {
				t.Fatalf("after a restart: status %d %s", status, body)
			}
		}
		s.Close()
	}
}
