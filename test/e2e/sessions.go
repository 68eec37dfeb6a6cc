package e2e

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// Connect opens a session of the legacy era.
func Connect(ctx context.Context, url string) (*mcp.ClientSession, error) {
	c := mcp.NewClient(&mcp.Implementation{Name: "mcphealth-e2e", Version: "0"}, nil)
	return c.Connect(ctx, &mcp.StreamableClientTransport{Endpoint: url}, &mcp.ClientSessionOptions{ProtocolVersion: LegacyVersion})
}

// Whoami asks which replica answers.
func Whoami(ctx context.Context, s *mcp.ClientSession) (string, error) {
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

// How many sessions RunSessions runs, and the calls of each.
const (
	Sessions = 200
	Calls    = 5
)

// MayWait is how long a client may be without an answer while a replica restarts:
// about a second on a quiet machine, several on a busy one.
const MayWait = 20 * time.Second

// Tally is what became of many sessions.
type Tally struct {
	mu     sync.Mutex
	Whole  int            // all calls answered, by one replica
	Calls  int            // calls answered
	Owners map[string]int // of whole sessions
	errors map[string]int
}

func (c *Tally) String() string {
	return fmt.Sprintf("%d of %d sessions whole (%.0f %%), %d of %d calls answered, owners %v, errors %v",
		c.Whole, Sessions, 100*float64(c.Whole)/Sessions, c.Calls, Sessions*Calls, c.Owners, c.errors)
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
func (c *Tally) one(t *testing.T, url string) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	owner, answered, err := "", 0, error(nil)
	s, err := Connect(ctx, url)
	for i := 0; err == nil && i < Calls; i++ {
		var name string
		if name, err = Whoami(ctx, s); err != nil {
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
	c.Calls += answered
	if err != nil {
		c.errors[kind(err)]++
		return
	}
	c.Whole++
	c.Owners[owner]++
}

// RunSessions runs 200 sessions, 20 at a time.
func RunSessions(t *testing.T, url string) *Tally {
	c := &Tally{Owners: map[string]int{}, errors: map[string]int{}}
	var wg sync.WaitGroup
	slots := make(chan struct{}, 20)
	for range Sessions {
		slots <- struct{}{}
		wg.Go(func() {
			c.one(t, url)
			<-slots
		})
	}
	wg.Wait()
	return c
}

// Worker is a client that works on, whatever comes: after 404 it opens a new session,
// after anything else it tries again.
type Worker struct {
	Name     string
	session  *mcp.ClientSession
	Calls    int
	Reopened int
	Longest  time.Duration // between two answers
	errors   map[string]int
}

func (w *Worker) run(ctx context.Context, url string) {
	w.errors = map[string]int{}
	last := time.Now()
	for n := 0; ctx.Err() == nil; n++ {
		c, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		err := w.step(c, url, fmt.Sprintf("%s-%d", w.Name, n))
		cancel()
		switch {
		case err == nil:
			w.Longest = max(w.Longest, time.Since(last))
			last = time.Now()
			w.Calls++
		default:
			w.errors[kind(err)]++
		}
		time.Sleep(50 * time.Millisecond)
	}
	if w.session != nil {
		w.session.Close()
	}
}

func (w *Worker) step(ctx context.Context, url, message string) (err error) {
	if w.session == nil {
		if w.session, err = Connect(context.Background(), url); err != nil {
			w.session = nil
			return err
		}
	}
	if err = Echo(ctx, w.session, message); err == nil {
		return nil
	}
	if errors.Is(err, mcp.ErrSessionMissing) || strings.Contains(err.Error(), "closed") {
		w.Reopened++ // the client library has given the connection up
		w.session.Close()
		w.session = nil
	}
	return err
}

// Work starts 40 workers. Its function stops them and says what they met.
func Work(t *testing.T, url string) (stop func() []*Worker) {
	ctx, cancel := context.WithCancel(context.Background())
	all := make([]*Worker, 40)
	var wg sync.WaitGroup
	for i := range all {
		all[i] = &Worker{Name: fmt.Sprintf("%s-w%d", t.Name(), i)}
		wg.Go(func() { all[i].run(ctx, url) })
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
	return func() []*Worker { cancel(); wg.Wait(); return all }
}

// Summary is what they met, in words.
func Summary(all []*Worker) string {
	calls, reopened, longest, errs := 0, 0, time.Duration(0), map[string]int{}
	for _, w := range all {
		calls += w.Calls
		reopened += w.Reopened
		longest = max(longest, w.Longest)
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
