package caddymodule

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// What is compared with now must not be a reading of the wall clock, which jumps when
// somebody sets it or a suspended machine wakes up. Moments that people see may be.
func TestWallClockIsForPeopleOnly(t *testing.T) {
	shown := map[string]bool{
		"metrics.go": true, "observe.go": true, "statusstream.go": true, "statusview.go": true, "status.go": true,
	}
	wall := regexp.MustCompile(`UnixNano\(\)|UnixMilli\(|\.Unix\(\)|time\.Unix\(|\.Round\(0\)`)
	for _, dir := range []string{".", "../mcphealth", "../traefikplugin"} {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		require.NoError(t, err)
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") || shown[filepath.Base(file)] {
				continue
			}
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			for i, line := range strings.Split(string(text), "\n") {
				if wall.MatchString(line) && !strings.Contains(line, "longAgo") {
					t.Errorf("%s:%d: %s: count from born by clock, or from a time.Time that keeps its monotonic reading", file, i+1, strings.TrimSpace(line))
				}
			}
		}
	}
	require.InDelta(t, 0, time.Since(atClock(clock())).Seconds(), 1)
}
