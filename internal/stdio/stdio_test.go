package stdio

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// in is the timeout of the probes here: the race detector on a busy machine may
// take a second to start the test binary again. soon is that of probes which wait
// for it in vain.
const (
	in   = 5 * time.Second
	soon = 2 * time.Second
)

func TestProbe(t *testing.T) {
	echo := func(t *mcphealth.Target) { t.ExpectTools = []string{"echo"} }
	other := func(t *mcphealth.Target) { t.ExpectTools = []string{"other"} }
	canary := func(t *mcphealth.Target) { t.CallTool, t.CallArgs = "echo", `{"message":"hi"}` }
	legacy := func(t *mcphealth.Target) { t.Era = mcphealth.Legacy }
	modern := func(t *mcphealth.Target) { t.Era = mcphealth.Modern }
	tests := []struct {
		fake  string
		set   func(*mcphealth.Target)
		want  string // verdict, reason, era
		steps string
		warns string // the beginnings of the warnings
	}{
		{"modern", nil, "ready ok modern", "server/discover:result", ""},
		{"modern", echo, "ready ok modern", "server/discover:result tools/list:result", ""},
		{"modern", other, "degraded tools_missing modern", "server/discover:result tools/list:result", ""},
		{"modern", canary, "ready ok modern", "server/discover:result tools/call:result", ""},
		{"isError", canary, "degraded tool_failing modern", "server/discover:result tools/call:result", ""},
		{"legacy", nil, "ready ok legacy", "server/discover:error initialize:result tools/list:result", ""},
		{"legacy", legacy, "ready ok legacy", "initialize:result tools/list:result", ""},
		{"legacy", modern, "alive rpc_error modern", "server/discover:error", ""},
		{"legacy", other, "degraded tools_missing legacy", "server/discover:error initialize:result tools/list:result tools/list:result", ""},
		{"no tools", nil, "ready ok legacy", "server/discover:error initialize:result tools/list:error", ""},
		{"silent before initialize", nil, "ready ok legacy", "server/discover:timeout initialize:result tools/list:result", ""},
		{"answers late without id", nil, "ready ok legacy", "server/discover:timeout initialize:result tools/list:result", ""},
		{"says goodbye at length", nil, "ready ok modern", "server/discover:result", ""},
		{"ends on discover", nil, "ready ok legacy", "server/discover:reset initialize:result tools/list:result", "restarted"},
		{"older version only", nil, "ready ok legacy", "server/discover:error initialize:error initialize:result tools/list:result", ""},
		{"tools/list hangs", nil, "dead timeout legacy", "server/discover:error initialize:result tools/list:timeout", ""},
		{"tools/list fails", nil, "degraded handshake_failed legacy", "server/discover:error initialize:result tools/list:error", ""},
		{"banner first", nil, "ready ok modern", "server/discover:result", "noise"},
		{"talks between", nil, "ready ok modern", "server/discover:result", ""},
		{"pings before it answers", nil, "ready ok modern", "server/discover:result", ""},
		{"asks for roots first", nil, "ready ok modern", "server/discover:result", ""},
		{"CRLF", nil, "ready ok modern", "server/discover:result", ""},
		{"ends after the answer", nil, "ready ok modern", "server/discover:result", "exit"},
		{"1 MiB of tools", echo, "ready ok legacy", "server/discover:error initialize:result tools/list:result tools/list:result", ""},

		{"garbage", nil, "dead not_mcp unknown", "server/discover:not_mcp initialize:not_mcp", "noise"},
		{"garbage, ends", nil, "dead not_mcp unknown", "server/discover:not_mcp", "noise exit"},
		{"foreign JSON", nil, "dead not_mcp unknown", "server/discover:not_mcp initialize:not_mcp", "noise"},
		{"echo", nil, "dead stalled unknown", "server/discover:stalled initialize:stalled", ""},
		{"silent", nil, "dead timeout unknown", "server/discover:timeout initialize:timeout", ""},
		{"ends at once", nil, "dead reset unknown", "server/discover:reset initialize:reset", "exit"},
		{"closes stdout", nil, "dead reset unknown", "server/discover:reset initialize:reset", ""},
		{"never reads", nil, "dead timeout unknown", "server/discover:timeout initialize:timeout", "shutdown"},
		{"notifications", nil, "dead not_mcp unknown", "server/discover:foreign initialize:foreign", "shutdown"},
		{"flood, no lines", nil, "dead not_mcp unknown", "server/discover:foreign initialize:foreign", "shutdown"},
		{"flood of lines", nil, "dead not_mcp unknown", "server/discover:foreign initialize:foreign", "noise shutdown"},
		{"flood of errors", nil, "dead timeout unknown", "server/discover:timeout initialize:timeout", "shutdown"},
		{"stderr, then modern", nil, "ready ok modern", "server/discover:result", ""},

		{"ignores stdin's end", nil, "ready ok modern", "server/discover:result", "shutdown"},
		{"ignores SIGTERM", nil, "ready ok modern", "server/discover:result", "shutdown"},
		{"leaves a grandchild", nil, "ready ok modern", "server/discover:result", "shutdown"},
		{"leaves a daemon", nil, "ready ok modern", "server/discover:result", "shutdown"},
		{"a wrapper", nil, "ready ok modern", "server/discover:result", ""},
		{"forks and ends", nil, "dead reset unknown", "server/discover:timeout initialize:reset", "shutdown"},
	}
	for _, tt := range tests {
		t.Run(tt.fake+"/"+tt.want, func(t *testing.T) {
			if !strings.HasPrefix(tt.fake, "flood") { // those take all the CPU there is
				t.Parallel()
			}
			target := mcphealth.Target{Timeout: in}
			if strings.HasPrefix(tt.want, "dead") && !strings.Contains(tt.steps, "result") {
				target.Timeout = soon
			}
			if tt.set != nil {
				tt.set(&target)
			}
			var stderr bytes.Buffer
			r, took := probeFake(t, tt.fake, target, &stderr)
			if got := fmt.Sprintf("%s %s %s", r.Verdict, r.Reason, r.Era); got != tt.want {
				t.Errorf("Probe = %q, want %q: %s\n%s", got, tt.want, r.Detail, &stderr)
			}
			if got := steps(r); got != tt.steps {
				t.Errorf("steps = %s, want %s", got, tt.steps)
			}
			var warns []string
			for _, w := range r.Warnings {
				word, _, _ := strings.Cut(w, ":")
				warns = append(warns, word)
			}
			got := strings.Join(warns, " ")
			if r.Verdict == mcphealth.Dead && !strings.Contains(tt.warns, "shutdown") {
				// On a busy machine a child may miss the little time that is left.
				got = strings.TrimSpace(strings.TrimSuffix(got, "shutdown"))
			}
			if got != tt.warns {
				t.Errorf("warnings = %q, want %q", r.Warnings, tt.warns)
			}
			if took > target.Timeout+patience {
				t.Errorf("it took %v, want %v at most", took, target.Timeout)
			}
		})
	}
}

// patience is what a busy machine may add to a timeout; TestEndsWithinTheTimeout
// allows none.
const patience = 2 * time.Second

func steps(r mcphealth.Result) string {
	var all []string
	for _, s := range r.Steps {
		all = append(all, s.Step+":"+s.Outcome)
	}
	return strings.Join(all, " ")
}

// probeFake probes a fake, and sees to it that no process is left.
func probeFake(t *testing.T, name string, target mcphealth.Target, stderr *bytes.Buffer) (mcphealth.Result, time.Duration) {
	t.Helper()
	mark := fmt.Sprintf("STDIO_TEST=%s.%d", regexp.MustCompile(`\W`).ReplaceAllString(t.Name(), "_"), time.Now().UnixNano())
	// The race detector sleeps for a second at each exit unless told not to.
	command := []string{"/usr/bin/env", mark, "GORACE=atexit_sleep_ms=0", fakeName + "=" + name, os.Args[0]}
	start := time.Now()
	r, err := Probe(context.Background(), target, command, stderr)
	took := time.Since(start)
	if err != nil {
		t.Fatal(err)
	}
	if left := carrying(mark); len(left) > 0 {
		t.Errorf("left %d processes: %v", len(left), left)
		for _, p := range left { // what a broken stop leaves must not pile up
			number, _, _ := strings.Cut(p, " ")
			if pid, err := strconv.Atoi(number); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
	return r, took
}

// carrying are the processes that were started with this in their environment.
func carrying(mark string) (all []string) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		if env, err := os.ReadFile(dir + "/environ"); err == nil && bytes.Contains(env, []byte(mark)) {
			line, _ := os.ReadFile(dir + "/cmdline")
			all = append(all, filepath.Base(dir)+" "+strings.ReplaceAll(string(line), "\x00", " "))
		}
	}
	return all
}

// A program that cannot be started is as dead as a port where nobody listens.
func TestUnstarted(t *testing.T) {
	dir := t.TempDir()
	noProgram := filepath.Join(dir, "server")
	if err := os.WriteFile(noProgram, []byte("no program"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"no-such-command-anywhere", filepath.Join(dir, "absent"), noProgram, dir} {
		r, err := Probe(context.Background(), mcphealth.Target{Timeout: in}, []string{command, "secret-argument"}, nil)
		if err != nil || r.Verdict != mcphealth.Dead || r.Reason != mcphealth.Refused || len(r.Steps) != 1 {
			t.Errorf("Probe(%q) = %+v, %v; want dead, refused", command, r, err)
		}
		if r.URL != "stdio:"+filepath.Base(command) || strings.Contains(fmt.Sprint(r), "secret-argument") {
			t.Errorf("Probe(%q) = %+v: want the program's name, and no argument", command, r)
		}
	}
}

// What a child is killed by, when nothing else helps, and what that is called.
func TestShutdownIsTold(t *testing.T) {
	tests := []struct{ fake, want string }{
		{"ignores stdin's end", "did not end when its stdin was closed; it ended on SIGTERM"},
		{"ignores SIGTERM", "did not end when its stdin was closed; it was killed"},
		{"leaves a daemon", "left processes behind"},
	}
	for _, tt := range tests {
		t.Run(tt.fake, func(t *testing.T) {
			t.Parallel()
			r, _ := probeFake(t, tt.fake, mcphealth.Target{Timeout: in}, &bytes.Buffer{})
			if len(r.Warnings) != 1 || !strings.Contains(r.Warnings[0], tt.want) {
				t.Errorf("warnings = %q, want %q", r.Warnings, tt.want)
			}
		})
	}
}

// How a process ended is said, and what it wrote to stderr is not: it is passed on
// apart, cut and made harmless.
func TestStderr(t *testing.T) {
	var stderr bytes.Buffer
	r, _ := probeFake(t, "ends at once", mcphealth.Target{Timeout: in}, &stderr)
	if !strings.Contains(r.Detail, "exit status 7") {
		t.Errorf("detail = %q, want the exit status", r.Detail)
	}
	stderr.Reset()
	probeFake(t, "stderr, then modern", mcphealth.Target{Timeout: in}, &stderr)
	out := stderr.String()
	if !strings.HasPrefix(out, "stderr: listening �[31mred�[0m\nstderr: sss") || !strings.HasSuffix(out, "(the rest is not shown)\n") {
		t.Errorf("stderr = %.80q … %q, want its beginning, printable", out, out[max(0, len(out)-80):])
	}
	if len(out) > 2*maxStderr {
		t.Errorf("%d bytes of stderr, want about %d", len(out), maxStderr)
	}
}

// Told to stop, a probe ends the child soon and gives no vote.
func TestCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(300*time.Millisecond, cancel)
	mark := fmt.Sprintf("STDIO_TEST=canceled.%d", time.Now().UnixNano())
	start := time.Now()
	r, err := Probe(ctx, mcphealth.Target{Timeout: 30 * time.Second}, []string{"/usr/bin/env", mark, fakeName + "=ignores SIGTERM", "/bin/sh", "-c", "trap '' TERM; sleep 60"}, nil)
	if err != nil || r.Verdict != mcphealth.Unknown || r.Reason != mcphealth.Canceled {
		t.Errorf("Probe = %s %s, %v; want unknown, canceled", r.Verdict, r.Reason, err)
	}
	if took := time.Since(start); took > 300*time.Millisecond+2*canceledGrace+patience {
		t.Errorf("it took %v after the cancel", took)
	}
	if left := carrying(mark); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// The timeout bounds the end as well: of the worst child, SIGKILL included. A busy
// machine may be late once, and not always.
func TestEndsWithinTheTimeout(t *testing.T) {
	const timeout = 1500 * time.Millisecond
	best := time.Hour
	for range 3 {
		_, took := probeFake(t, "deaf", mcphealth.Target{Timeout: timeout}, &bytes.Buffer{})
		if best = min(best, took); best <= timeout {
			return
		}
	}
	t.Errorf("it took %v at best, want %v at most", best, timeout)
}

// A slow start is no death, in either era.
func TestSlowStart(t *testing.T) {
	r, _ := probeFake(t, "slow start, modern", mcphealth.Target{Timeout: in}, &bytes.Buffer{})
	if r.Verdict != mcphealth.Ready || r.Era != mcphealth.Modern {
		t.Errorf("Probe = %s %s %s, want ready, modern: %s", r.Verdict, r.Reason, r.Era, steps(r))
	}
	// Too slow for discover's half of the time: it is asked again.
	r, _ = probeFake(t, "slow start, modern", mcphealth.Target{Timeout: 1600 * time.Millisecond}, &bytes.Buffer{})
	if r.Verdict != mcphealth.Ready || r.Era != mcphealth.Modern {
		t.Errorf("Probe = %s %s %s, want ready, modern: %s", r.Verdict, r.Reason, r.Era, steps(r))
	}
}

// Nothing of ours is left either: no goroutine, no file.
func TestLeavesNothing(t *testing.T) {
	files := func() int { all, _ := os.ReadDir("/proc/self/fd"); return len(all) }
	probeFake(t, "modern", mcphealth.Target{Timeout: in}, &bytes.Buffer{})
	goroutines, open := runtime.NumGoroutine(), files()
	for _, fake := range []string{"modern", "legacy", "garbage, ends", "leaves a daemon", "ends at once"} {
		probeFake(t, fake, mcphealth.Target{Timeout: in}, &bytes.Buffer{})
	}
	for range 100 {
		if runtime.NumGoroutine() <= goroutines && files() <= open {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d goroutines and %d files, had %d and %d", runtime.NumGoroutine(), files(), goroutines, open)
}

// What belongs to HTTP is refused.
func TestBadTarget(t *testing.T) {
	for _, target := range []mcphealth.Target{{Era: mcphealth.SSE}, {RequireAuth: true}, {HealthPath: "/x"}, {Host: "x"}, {CallArgs: "{}"}} {
		if _, err := Probe(context.Background(), target, []string{"true"}, nil); err == nil {
			t.Errorf("Probe(%+v) = no error, want one", target)
		}
	}
}

// Every fake of the table is there, and every fake is used.
func TestFakesAreUsed(t *testing.T) {
	source, err := os.ReadFile("stdio_test.go")
	more, _ := os.ReadFile("keep_test.go")
	source = append(source, more...)
	if err != nil {
		t.Fatal(err)
	}
	var unused []string
	for name := range fakes {
		if !strings.Contains(string(source), `"`+name+`"`) && name != "sleeper" {
			unused = append(unused, name)
		}
	}
	slices.Sort(unused)
	if len(unused) > 0 {
		t.Errorf("no test uses %q", unused)
	}
}
