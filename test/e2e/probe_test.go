package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// probes is how many probes in a row must leave nothing behind.
const probes = 200

// result is the part of the command's JSON (design.md §8) that these tests read.
type result struct {
	Verdict, Reason, Detail, Era string
	SessionOpened, SessionClosed bool
	Steps                        []struct{ Step, Outcome string }
}

// probe runs `mcphealth probe --json` and returns what it says and its exit status.
func probe(t *testing.T, args ...string) (r result, exit int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, GoBuild(t, "mcphealth", "cmd/mcphealth"), append([]string{"probe", "--json"}, args...)...).Output()
	var ee *exec.ExitError
	if err != nil && !errors.As(err, &ee) {
		t.Fatal(err)
	}
	if ee != nil {
		exit = ee.ExitCode()
	}
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("probe %v: %v in %q", args, err, out)
	}
	return r, exit
}

// The command finds every server up, knows its era, and leaves no session.
func TestProbeCommand(t *testing.T) {
	for _, s := range All {
		t.Run(s.Name, func(t *testing.T) {
			i := s.Start(t, FreePort(t))
			for range 5 {
				r, exit := probe(t, i.URL)
				if (r.Verdict != "ready" && r.Verdict != "alive") || r.Era != s.Era || exit != 0 {
					t.Fatalf("probe = %+v, exit %d; want ready or alive, %s, exit 0", r, exit, s.Era)
				}
				if r.SessionOpened != r.SessionClosed {
					t.Errorf("opened %v, closed %v: %+v", r.SessionOpened, r.SessionClosed, r)
				}
			}
			i.AwaitSessions(t, 0)
		})
	}
}

// A dead server is dead, and a paused one too: within the timeout.
func TestProbeCommandDead(t *testing.T) {
	for _, name := range []string{"go-sdk-v1.8.0-stateful", "go-sdk-v1.8.0-stateless", "ts-sdk-v1.32.2-stateful"} {
		t.Run(name, func(t *testing.T) {
			i := Get(t, name).Start(t, FreePort(t))
			i.Pause(t)
			start := time.Now()
			if r, exit := probe(t, "--timeout", "1s", i.URL); r.Verdict != "dead" || r.Reason != "timeout" || exit != 1 {
				t.Errorf("paused: %+v, exit %d; want dead, timeout, 1", r, exit)
			}
			if took := time.Since(start); took > 3*time.Second {
				t.Errorf("took %s with --timeout 1s", took)
			}
			i.Kill(t)
			if r, exit := probe(t, i.URL); r.Verdict != "dead" || r.Reason != "refused" || exit != 1 {
				t.Errorf("killed: %+v, exit %d; want dead, refused, 1", r, exit)
			}
		})
	}
}

// One prober, as it runs inside a proxy, holds one session at most while it
// probes and none after Close. A prober per probe, as in the command, leaves
// none either. The servers' goroutines come back to where they were.
func TestProbesLeaveNothing(t *testing.T) {
	for _, s := range All {
		t.Run(s.Name, func(t *testing.T) {
			i := s.Start(t, FreePort(t))
			before := i.goroutines(t)

			p := newProber(t, i.URL)
			for range probes {
				up(t, p, s.Era)
			}
			if n := i.Sessions(t); n > 1 {
				t.Errorf("%d sessions after %d probes, want one at most", n, probes)
			}
			p.Close(t.Context())
			i.AwaitSessions(t, 0)

			for range probes {
				p := newProber(t, i.URL)
				up(t, p, s.Era)
				p.Close(t.Context())
			}
			i.AwaitSessions(t, 0)

			after := i.goroutines(t)
			for start := time.Now(); after > before+spare && time.Since(start) < 3*time.Second; after = i.goroutines(t) {
				time.Sleep(50 * time.Millisecond)
			}
			if after > before+spare {
				t.Errorf("the server has %d goroutines after %d probes, had %d before", after, 2*probes, before)
			}
		})
	}
}

// spare is how many goroutines more than before are no leak: connections that
// the server has not seen closed yet.
const spare = 5

func (i *Instance) goroutines(t *testing.T) int {
	t.Helper()
	if i.Server.sessions != nil {
		return 0 // has no stats
	}
	return i.Stats(t).Goroutines
}

func newProber(t *testing.T, url string) *mcphealth.Prober {
	t.Helper()
	p, err := mcphealth.NewProber(mcphealth.Target{URL: url}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// up probes once and wants an upstream of that era that is up.
func up(t *testing.T, p *mcphealth.Prober, era string) {
	t.Helper()
	r := p.Probe(t.Context())
	if (r.Verdict != mcphealth.Ready && r.Verdict != mcphealth.Alive) || string(r.Era) != era {
		p.Close(context.Background())
		t.Fatalf("probe = %+v, want ready or alive, %s", r, era)
	}
}
