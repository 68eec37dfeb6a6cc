// Package leak fails a test run that leaves goroutines of ours behind (tests only).
package leak

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
)

// patience is how long goroutines may take to end after the last test.
const patience = 5 * time.Second

// Main runs the tests and exits; it is what a TestMain does.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if left := ours(patience); len(left) > 0 {
			fmt.Printf("%d goroutines of ours are left after all tests:\n\n%s\n", len(left), strings.Join(left, "\n\n"))
			code = 1
		}
	}
	os.Exit(code)
}

// ours waits for goroutines with a frame in this module to end, and returns the
// stacks of those that did not. The caller's own is none of them.
func ours(within time.Duration) (left []string) {
	for end := time.Now().Add(within); ; time.Sleep(20 * time.Millisecond) {
		left = nil
		for _, stack := range stacks()[1:] {
			if strings.Contains(stack, "github.com/mcphealth/mcphealth/") {
				left = append(left, stack)
			}
		}
		if len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}

// stacks are those of all goroutines, the caller's first.
func stacks() []string {
	for size := 1 << 20; ; size *= 2 {
		buf := make([]byte, size)
		if n := runtime.Stack(buf, true); n < size {
			return strings.Split(strings.TrimSpace(string(buf[:n])), "\n\n")
		}
	}
}
