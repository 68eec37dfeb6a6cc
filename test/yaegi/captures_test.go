package yaegi_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/mcphealth/mcphealth/internal/mcpfake"
)

// setups are the words after "want" in a capture, as settings. The core's own
// TestCaptures says whether the verdicts are right.
var setups = map[string]map[string]string{
	"":          {},
	"shallow":   {"Shallow": "true"},
	"any":       {"AliveIf": "any_response"},
	"sse":       {"Era": "sse"},
	"host":      {"Host": "mcp.example.com"},
	"token":     {"Authorization": mcpfake.GoodToken},
	"bad-token": {"Authorization": "Bearer bad"},
}

// TestSameCaptures: the recorded servers, real ones and such as are none, asked
// twice compiled and twice interpreted.
func TestSameCaptures(t *testing.T) {
	d := interpreted(t)
	files, err := filepath.Glob("../../mcphealth/testdata/captures/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no captures: %v", err)
	}
	for _, file := range files {
		c, err := mcpfake.Load(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range c.Facts {
			word, setup, _ := strings.Cut(f.Key, " ")
			if word != "want" {
				continue
			}
			settings, ok := setups[setup]
			if !ok {
				t.Fatalf("capture %s: no such setup %q", c.Name, setup)
			}
			t.Run(strings.TrimSuffix(c.Name+"/"+setup, "/"), func(t *testing.T) {
				t.Parallel()
				want, _, _ := cutLast(f.Value, " ") // without the era
				compare(t, replay(t, compiled, c, settings), replay(t, d, c, settings), 2, want)
			})
		}
	}
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

func replay(t *testing.T, d drive, c *mcpfake.Capture, setup map[string]string) outcome {
	t.Helper()
	r, err := mcpfake.Play(c)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	settings := map[string]string{"Timeout": "2s"}
	for k, v := range setup {
		settings[k] = v
	}
	o := outcome{texts: probeAt(d, r.URL(), 2, settings)}
	for _, q := range r.Requests() {
		o.questions += changing.ReplaceAllString(fmt.Sprintf("%s %s %s session=%s version=%s state=%s by=%s %d\n",
			q.Verb, q.Path, q.RPC, q.Session, q.Version, q.State, q.Probe, q.Status), "*")
	}
	return o
}
