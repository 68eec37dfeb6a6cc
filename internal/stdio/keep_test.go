package stdio

import (
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// kept is a fake that is kept running, and what was said of it.
type kept struct {
	*Server
	mark string
	mu   sync.Mutex
	all  []mcphealth.Result
}

func keepFake(t *testing.T, name string, beat, timeout time.Duration) *kept {
	t.Helper()
	k := &kept{mark: fmt.Sprintf("STDIO_TEST=%s.%d", regexp.MustCompile(`\W`).ReplaceAllString(t.Name(), "_"), time.Now().UnixNano())}
	command := []string{"/usr/bin/env", k.mark, "GORACE=atexit_sleep_ms=0", fakeName + "=" + name, os.Args[0]}
	s, err := Keep(mcphealth.Target{Timeout: timeout}, command, Options{Heartbeat: beat, OnResult: func(r mcphealth.Result) {
		k.mu.Lock()
		k.all = append(k.all, r)
		k.mu.Unlock()
	}})
	if err != nil {
		t.Fatal(err)
	}
	k.Server = s
	t.Cleanup(func() {
		s.Close()
		if got := s.Status().State; got != Stopped {
			t.Errorf("state %s after Close", got)
		}
		if left := carrying(k.mark); len(left) > 0 {
			t.Errorf("left %v", left)
		}
	})
	return k
}

// heard are the results so far, in short.
func (k *kept) heard() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	var all []string
	for _, r := range k.all {
		all = append(all, fmt.Sprintf("%s %s %s", r.Verdict, r.Reason, steps(r)))
	}
	return all
}

// await waits until the results begin like this.
func (k *kept) await(t *testing.T, want ...string) {
	t.Helper()
	for range 3000 {
		if len(k.heard()) >= len(want) {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	got := k.heard()
	for i, w := range want {
		if i >= len(got) || !strings.HasPrefix(got[i], w) {
			t.Fatalf("results %q, want %q at first; %+v", got, want, k.Status())
		}
	}
}

const beat = 50 * time.Millisecond

// One session serves all heartbeats: opened once, pinged from then on.
func TestKeepAsksInOneSession(t *testing.T) {
	t.Parallel()
	k := keepFake(t, "legacy", beat, in)
	k.await(t, "ready ok server/discover:error initialize:result tools/list:result", "ready ok ping:result", "ready ok ping:result")
	if st := k.Status(); st.State != Running || st.Restarts != 0 || st.Last.Server.Name != "fake" {
		t.Errorf("status %+v", st)
	}
	keepFake(t, "modern", beat, in).await(t, "ready ok server/discover:result", "ready ok server/discover:result")
}

// A server that ends is started again after a pause, and meanwhile it is dead.
func TestKeepRestarts(t *testing.T) {
	t.Parallel()
	k := keepFake(t, "ends after two answers", beat, in)
	k.await(t, "ready", "ready", "dead reset", "ready")
	if st := k.Status(); st.Restarts != 1 {
		t.Errorf("%d restarts, want 1", st.Restarts)
	}
	k = keepFake(t, "ends after the answer", time.Hour, in)
	k.await(t, "ready ok", "dead reset", "ready ok")
}

// A server that hangs is replaced after two lost heartbeats, with all that it
// started.
func TestKeepReplacesWhatHangs(t *testing.T) {
	t.Parallel()
	k := keepFake(t, "hangs after the first answer", beat, soon)
	k.await(t, "ready", "dead timeout", "dead timeout", "ready")
}

// The pause before restarts grows.
func TestKeepPauses(t *testing.T) {
	t.Parallel()
	k := keepFake(t, "ends at once", beat, in)
	start := time.Now()
	k.await(t, "dead reset", "dead reset", "dead reset")
	if took := time.Since(start); took < 3*minPause || took > 5*minPause+patience {
		t.Errorf("three results in %v, want pauses of %v and %v between", took, minPause, 2*minPause)
	}
	st := k.Status()
	if st.State != Waiting && st.State != Starting || !strings.Contains(st.Last.Detail, "exit status 7") {
		t.Errorf("status %+v", st)
	}
}

// What must be started with initialize is known after the first time.
func TestKeepLearnsTheFirstQuestion(t *testing.T) {
	t.Parallel()
	k := keepFake(t, "ends on discover", beat, in)
	k.await(t, "ready ok initialize:result tools/list:result", "ready ok ping:result")
}

// Its own questions are answered, and what it writes between heartbeats is read.
func TestKeepListens(t *testing.T) {
	t.Parallel()
	k := keepFake(t, "wants answers, and talks", 2*time.Second, in)
	k.await(t, "ready", "ready", "ready")
	if st := k.Status(); st.Restarts != 0 {
		t.Errorf("%d restarts: %v", st.Restarts, k.heard())
	}
}

// A command that cannot be started is tried again as well.
func TestKeepUnstarted(t *testing.T) {
	s, err := Keep(mcphealth.Target{}, []string{"no-such-command-anywhere"}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for range 200 {
		if s.Status().State == Waiting {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if st := s.Status(); st.State != Waiting || st.Last.Reason != mcphealth.Refused || st.Next.IsZero() {
		t.Errorf("status %+v", st)
	}
	s.Close()
	if _, err := Keep(mcphealth.Target{RequireAuth: true}, []string{"true"}, Options{}); err == nil {
		t.Error("no error for what belongs to HTTP")
	}
	if _, err := Keep(mcphealth.Target{}, nil, Options{}); err == nil {
		t.Error("no error for no command")
	}
}

// Close ends whatever the child is doing, and leaves nothing of ours.
func TestKeepLeavesNothing(t *testing.T) {
	before := runtime.NumGoroutine()
	for _, fake := range []string{"silent", "never reads", "leaves a daemon", "flood of lines", "forks and ends", "ignores SIGTERM"} {
		k := keepFake(t, fake, beat, in)
		time.Sleep(200 * time.Millisecond)
		start := time.Now()
		k.Close()
		if took := time.Since(start); took > 2*canceledGrace+patience {
			t.Errorf("%s: Close took %v", fake, took)
		}
	}
	for range 100 {
		if runtime.NumGoroutine() <= before {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d goroutines, had %d", runtime.NumGoroutine(), before)
}
