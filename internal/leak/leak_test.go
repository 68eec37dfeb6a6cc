package leak

import (
	"testing"
	"time"
)

func TestOurs(t *testing.T) {
	stop := make(chan struct{})
	go wait(stop)
	if left := ours(50 * time.Millisecond); len(left) == 0 {
		t.Error("a goroutine that waits is not found")
	}
	close(stop)
	for _, stack := range ours(time.Second) {
		t.Logf("left: %s", stack) // the runner's own, with this test's frame in it
	}
}

func wait(stop chan struct{}) { <-stop }
