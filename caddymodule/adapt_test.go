package caddymodule

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/stretchr/testify/require"
)

var update = flag.Bool("update", false, "write what the adapter says into testdata/adapt")

// Each file is a Caddyfile, a line of dashes, and the JSON it becomes or the error
// it gives. `go test -run Adapt -update` writes the second half.
func TestAdapt(t *testing.T) {
	files, err := filepath.Glob("testdata/adapt/*.caddyfiletest")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".caddyfiletest"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			in, want, _ := strings.Cut(string(text), "----------\n")
			got := adapted(t, in)
			if *update {
				require.NoError(t, os.WriteFile(file, []byte(in+"----------\n"+got), 0o644))
				return
			}
			require.Equal(t, want, got)
		})
	}
}

func adapted(t *testing.T, in string) string {
	out, warnings, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(in), map[string]any{"filename": "Caddyfile"})
	if err != nil {
		return err.Error() + "\n"
	}
	for _, w := range warnings {
		if !strings.Contains(w.Message, "not formatted") {
			t.Errorf("warning: %s", w)
		}
	}
	var pretty bytes.Buffer
	require.NoError(t, json.Indent(&pretty, out, "", "\t"))
	return pretty.String() + "\n"
}
