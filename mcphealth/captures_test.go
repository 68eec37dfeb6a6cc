package mcphealth

import (
	"context"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/internal/mcpfake"
)

// captures loads testdata/captures: 48 builds of real servers, two of them in
// two states, and 39 things that are no MCP server. Each says what it wants.
func captures(t testing.TB) []*mcpfake.Capture {
	files, err := filepath.Glob("testdata/captures/*.txtar")
	if err != nil || len(files) != 89 {
		t.Fatalf("testdata/captures holds %d files (%v), want 89", len(files), err)
	}
	var all []*mcpfake.Capture
	for _, f := range files {
		c, err := mcpfake.Load(f)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	return all
}

// setups are the words after "want" in a capture: how the prober is set up
// where that changes the verdict.
var setups = map[string]func(*Target){
	"":          func(*Target) {},
	"shallow":   func(t *Target) { t.Shallow = true },
	"any":       func(t *Target) { t.AliveIf = AliveIfAnyResponse },
	"sse":       func(t *Target) { t.Era = SSE },
	"host":      func(t *Target) { t.Host = "mcp.example.com" },
	"token":     func(t *Target) { t.Header = http.Header{"Authorization": {mcpfake.GoodToken}} },
	"bad-token": func(t *Target) { t.Header = http.Header{"Authorization": {"Bearer bad"}} },
}

// expectation is one want line.
type expectation struct {
	setup string
	want  string // verdict, reason and era
}

func wants(t testing.TB, c *mcpfake.Capture) []expectation {
	var es []expectation
	for _, f := range c.Facts {
		word, setup, _ := strings.Cut(f.Key, " ")
		if word != "want" {
			continue
		}
		if setups[setup] == nil {
			t.Fatalf("capture %s: no such setup %q", c.Name, setup)
		}
		es = append(es, expectation{setup, f.Value})
	}
	if len(es) == 0 {
		t.Fatalf("capture %s: no want line", c.Name)
	}
	return es
}

func TestCaptures(t *testing.T) {
	for _, c := range captures(t) {
		for _, e := range wants(t, c) {
			t.Run(strings.TrimSuffix(c.Name+"/"+e.setup, "/"), func(t *testing.T) {
				t.Parallel()
				playCapture(t, c, e)
			})
		}
	}
}

// playCapture probes a replay of c twice on one prober, as a checker would, and
// judges the verdict and the conduct.
func playCapture(t *testing.T, c *mcpfake.Capture, e expectation) {
	r, err := mcpfake.Play(c)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	target := Target{URL: r.URL(), Timeout: time.Second}
	setups[e.setup](&target)
	p, err := NewProber(target, nil)
	if err != nil {
		t.Fatal(err)
	}
	first := p.Probe(context.Background())
	asked := len(r.Requests())
	second := p.Probe(context.Background())
	steady := len(r.Requests()) - asked
	closed := p.Close(context.Background())

	if got := words(first); got != e.want {
		t.Errorf("Probe = %q, want %q\n%s", got, e.want, trail(first))
	}
	if got := words(second); got != e.want {
		t.Errorf("second Probe = %q, want %q as the first\n%s", got, e.want, trail(second))
	}
	if first.Era != EraUnknown && e.setup != "sse" && steady != 1 {
		t.Errorf("the second Probe asked %d questions, want 1: the first had learned which\n%s", steady, trail(second))
	}
	checkConduct(t, r.Requests(), e.setup == "sse")
	checkSessions(t, r.Requests(), closed)
}

func words(r Result) string {
	return string(r.Verdict) + " " + string(r.Reason) + " " + string(r.Era)
}

// trail tells a failing test's reader what was asked.
func trail(r Result) string {
	s := "\t" + r.Detail + "\n"
	for _, st := range r.Steps {
		s += "\t" + st.Step + " → " + st.Outcome + " " + http.StatusText(st.HTTPStatus) + "\n"
	}
	return s
}

// checkConduct: what a probe must never do, on the wire.
func checkConduct(t *testing.T, requests []mcpfake.Request, sse bool) {
	t.Helper()
	ids := map[string]bool{}
	for _, q := range requests {
		if q.Verb != http.MethodPost && q.Verb != http.MethodDelete && !sse {
			t.Errorf("%s %s: a probe sends POST, and DELETE for its own session", q.Verb, q.Path)
		}
		if q.Verb == http.MethodPost && (q.ID == "" || q.ID[0] != '"' || ids[q.ID]) {
			t.Errorf("%s with id %s: want a string that no request before had", q.RPC, q.ID)
		}
		ids[q.ID] = true
		if q.Probe == "" && !sse {
			t.Errorf("%s %s %s: the capture has no such exchange", q.Verb, q.Path, q.RPC)
		}
		for _, h := range []string{"Origin", "Cookie"} {
			if q.Header.Get(h) != "" {
				t.Errorf("%s: sent a %s", q.RPC, h)
			}
		}
	}
}

// checkSessions: one initialize at most, and each session that the server issued
// ended once, in the version that its initialize settled on.
func checkSessions(t *testing.T, requests []mcpfake.Request, closed bool) {
	t.Helper()
	issued := map[string]string{} // session → version
	inits, ended := 0, false
	for _, q := range requests {
		if q.RPC == "initialize" {
			inits++
		}
		if q.Issued != "" {
			issued[q.Issued] = q.Negotiated
		}
		if q.Verb != http.MethodDelete {
			if q.State == "live" && q.Version != issued[q.Session] {
				t.Errorf("%s in the session with version %q, want the negotiated %q", q.RPC, q.Version, issued[q.Session])
			}
			continue
		}
		version, ours := issued[q.Session]
		if !ours || q.Version != version {
			t.Errorf("DELETE of %q with version %q, want a session of ours, once, with version %q", q.Session, q.Version, version)
		}
		delete(issued, q.Session)
		ended = ended || q.Status < 300
	}
	if len(issued) > 0 {
		t.Errorf("left %d session(s) on the server after Close: %v", len(issued), issued)
	}
	if closed != ended {
		t.Errorf("Close = %v, want %v: whether the server ended a session", closed, ended)
	}
	if inits > 2 {
		t.Errorf("asked initialize %d times in two probes, want at most one per probe", inits)
	}
}
