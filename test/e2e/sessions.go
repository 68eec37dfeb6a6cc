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

// A Library is what applications in Go speak MCP with: a package, or a program that
// they speak to over stdio.
type Library struct {
	Name    string
	Open    func(ctx context.Context, t *testing.T, url string) (Session, error)
	Lost    func(error) bool // it has given the session up: the application opens another
	Clients int              // how many work at once
}

// A Session is what a library calls a client that is connected.
type Session interface {
	Call(ctx context.Context, tool string, args map[string]any) (text string, err error)
	Close() error
}

// GoSDK is the Go SDK as a client of the legacy era.
var GoSDK = Library{"go-sdk v1.8.0", openGoSDK(LegacyVersion), lostGoSDK, 40}

func openGoSDK(version string) func(context.Context, *testing.T, string) (Session, error) {
	return func(ctx context.Context, _ *testing.T, url string) (Session, error) {
		return connect(ctx, &mcp.StreamableClientTransport{Endpoint: url, HTTPClient: authorized}, version)
	}
}

func connect(ctx context.Context, tr mcp.Transport, version string) (Session, error) {
	c := mcp.NewClient(&mcp.Implementation{Name: "mcphealth-e2e", Version: "0"}, nil)
	s, err := c.Connect(ctx, tr, &mcp.ClientSessionOptions{ProtocolVersion: version})
	if err != nil {
		return nil, err
	}
	return goSession{s}, nil
}

func lostGoSDK(err error) bool {
	return errors.Is(err, mcp.ErrSessionMissing) || strings.Contains(err.Error(), "closed")
}

type goSession struct{ *mcp.ClientSession }

func (s goSession) Call(ctx context.Context, tool string, args map[string]any) (string, error) {
	r, err := s.CallTool(ctx, &mcp.CallToolParams{Name: tool, Arguments: args})
	if err != nil {
		return "", err
	}
	if len(r.Content) == 1 && !r.IsError {
		if c, ok := r.Content[0].(*mcp.TextContent); ok {
			return c.Text, nil
		}
	}
	return "", fmt.Errorf("%s = %+v", tool, r)
}

// Connect opens a session of the legacy era with the Go SDK.
func Connect(ctx context.Context, url string) (Session, error) {
	return connect(ctx, &mcp.StreamableClientTransport{Endpoint: url, HTTPClient: authorized}, LegacyVersion)
}

// Whoami asks which replica answers.
func Whoami(ctx context.Context, s Session) (string, error) {
	got, err := s.Call(ctx, "whoami", map[string]any{})
	name, _, _ := strings.Cut(got, ",")
	return name, err
}

// echo calls the tool echo and checks what comes back.
func echo(ctx context.Context, s Session, message string) error {
	got, err := s.Call(ctx, "echo", map[string]any{"message": message})
	if err == nil && got != message {
		err = fmt.Errorf("echo %q = %q", message, got)
	}
	return err
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
	Begun int // sessions: all, or those that a busy machine had time for

	mu     sync.Mutex
	Whole  int            // all calls answered, by one replica
	Calls  int            // calls answered
	Owners map[string]int // of whole sessions
	errors map[string]int
}

func (c *Tally) String() string {
	return fmt.Sprintf("%d of %d sessions whole (%.0f %%), %d of %d calls answered, owners %v, errors %v",
		c.Whole, c.Begun, 100*float64(c.Whole)/float64(c.Begun), c.Calls, c.Begun*Calls, c.Owners, c.errors)
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
func (c *Tally) one(t *testing.T, lib Library, url string) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	owner, answered, err := "", 0, error(nil)
	s, err := lib.Open(ctx, t, url)
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

// RunSessions runs 200 sessions of the Go SDK, 20 at a time.
func RunSessions(t *testing.T, url string) *Tally { return GoSDK.RunSessions(t, url) }

// sessionsTime is how long RunSessions begins sessions: mcp-remote, a process for each,
// takes 45 s on two idle cores, and six minutes among other tests.
const sessionsTime = time.Minute

// RunSessions runs 200 sessions, some at a time.
func (l Library) RunSessions(t *testing.T, url string) *Tally {
	c := &Tally{Owners: map[string]int{}, errors: map[string]int{}}
	var wg sync.WaitGroup
	slots := make(chan struct{}, l.Clients/2)
	for start := time.Now(); c.Begun < Sessions && time.Since(start) < sessionsTime; c.Begun++ {
		slots <- struct{}{}
		wg.Go(func() {
			c.one(t, l, url)
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
	lib      Library
	timeout  time.Duration // of one call
	session  Session
	Calls    int
	Reopened int
	Last     time.Time     // when the last answer came
	Longest  time.Duration // between two answers
	errors   map[string]int
}

// run works until ctx ends, and says when the first answer has come.
func (w *Worker) run(ctx context.Context, t *testing.T, url string, begun *sync.WaitGroup) {
	w.errors = map[string]int{}
	for n := 0; ctx.Err() == nil; n++ {
		c, cancel := context.WithTimeout(context.Background(), w.timeout)
		err := w.step(c, t, url, fmt.Sprintf("%s-%d", w.Name, n))
		cancel()
		switch {
		case err == nil:
			if w.Calls++; w.Calls == 1 {
				begun.Done()
			} else {
				w.Longest = max(w.Longest, time.Since(w.Last))
			}
			w.Last = time.Now()
		default:
			w.errors[kind(err)]++
		}
		time.Sleep(50 * time.Millisecond)
	}
	if w.Calls == 0 {
		begun.Done()
	}
	if w.session != nil {
		w.session.Close()
	}
}

func (w *Worker) step(ctx context.Context, t *testing.T, url, message string) (err error) {
	if w.session == nil {
		if w.session, err = w.lib.Open(ctx, t, url); err != nil {
			w.session = nil
			return err
		}
	}
	if err = echo(ctx, w.session, message); err == nil {
		return nil
	}
	if w.lib.Lost(err) {
		w.Reopened++
		w.session.Close()
		w.session = nil
	}
	return err
}

// Work starts 40 workers with the Go SDK. Its function stops them and says what they
// met.
func Work(t *testing.T, url string) (stop func() []*Worker) {
	return GoSDK.Work(t, 30*time.Second, url)
}

// Work starts workers whose calls may take that long, and waits until all have begun.
func (l Library) Work(t *testing.T, timeout time.Duration, url string) (stop func() []*Worker) {
	ctx, cancel := context.WithCancel(context.Background())
	all := make([]*Worker, l.Clients)
	var wg, begun sync.WaitGroup
	begun.Add(len(all))
	for i := range all {
		all[i] = &Worker{Name: fmt.Sprintf("%s-w%d", strings.ReplaceAll(t.Name(), " ", "-"), i), lib: l, timeout: timeout}
		wg.Go(func() { all[i].run(ctx, t, url, &begun) })
	}
	t.Cleanup(func() { cancel(); wg.Wait() })
	time.AfterFunc(2*time.Minute, cancel) // nobody works longer
	begun.Wait()
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
