//go:build go1.21

package traefikplugin

import (
	"fmt"
	"log"
	"sync"
)

// warn writes a line that an operator should see: Traefik logs it as an error,
// the only level besides debug that reaches its log from a plugin.
func warn(format string, args ...interface{}) {
	log.Print("mcphealth: " + fmt.Sprintf(format, args...))
}

// tell writes a line that Traefik logs at level debug.
func tell(format string, args ...interface{}) {
	fmt.Println("mcphealth: " + fmt.Sprintf(format, args...))
}

// complain reports a panic that was caught: in a plugin it would end Traefik.
func complain(where string, v interface{}) {
	if v != nil {
		warn("internal error in %s, please report it: %v", where, v)
	}
}

// told holds what has been said once: New runs again on each reload.
var told struct {
	mu sync.Mutex
	m  map[string]bool
}

// warnOnce is warn, once for this text in the life of the process.
func warnOnce(format string, args ...interface{}) {
	text := fmt.Sprintf(format, args...)
	told.mu.Lock()
	if told.m == nil {
		told.m = map[string]bool{}
	}
	before := told.m[text]
	if len(told.m) < 1000 {
		told.m[text] = true
	}
	told.mu.Unlock()
	if !before {
		warn("%s", text)
	}
}
