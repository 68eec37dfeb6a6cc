package e2e

import (
	"encoding/json"
	"errors"
	"os/exec"
	"testing"
)

// explain on every real server: it is up, the table says which checks are wrong
// about it, and no session is left by any of them.
func TestExplain(t *testing.T) {
	wrong := map[string]int{}
	for _, s := range All {
		t.Run(s.Name, func(t *testing.T) {
			i := s.Start(t, FreePort(t))
			for range 3 {
				out, err := exec.CommandContext(t.Context(), GoBuild(t, "mcphealth", "cmd/mcphealth"), "explain", "--json", i.URL).Output()
				var ee *exec.ExitError
				if errors.As(err, &ee) {
					t.Fatalf("exit %d: %s", ee.ExitCode(), out)
				}
				var doc struct {
					Checks []struct {
						Check, Got, Concludes, Why string
						Wrong                      bool
					}
					Mcphealth struct{ Verdict, Reason string }
				}
				if err := json.Unmarshal(out, &doc); err != nil {
					t.Fatalf("%v in %q", err, out)
				}
				if doc.Mcphealth.Verdict != "ready" && doc.Mcphealth.Verdict != "alive" {
					t.Errorf("mcphealth: %+v, want ready or alive", doc.Mcphealth)
				}
				for _, c := range doc.Checks {
					if c.Wrong != (c.Concludes == "down") || c.Wrong && c.Why == "" {
						t.Errorf("%s: %+v: want down to be wrong, and why", c.Check, c)
					}
					if c.Wrong {
						wrong[c.Check]++
					}
				}
			}
			i.AwaitSessions(t, 0)
		})
	}
	if !t.Failed() {
		t.Logf("of %d answers each, wrong: %v", 3*len(All), wrong)
	}
}
