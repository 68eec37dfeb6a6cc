package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// startWithin is how long a server may take to listen: node with a cold disk
// cache and two busy cores needs several seconds.
const startWithin = 30 * time.Second

// Process is a server that a test started. It ends with the test.
type Process struct {
	Addr string // host:port it listens on

	command func() *exec.Cmd
	cmd     *exec.Cmd
	out     output
	ended   chan struct{}
}

// StartProcess runs a command and waits until it listens on addr. The command
// is made by a function because Restart needs it again.
func StartProcess(t testing.TB, addr string, command func() *exec.Cmd) *Process {
	t.Helper()
	p := &Process{Addr: addr, command: command}
	t.Cleanup(func() { p.end(t) })
	p.start(t)
	return p
}

func (p *Process) start(t testing.TB) {
	t.Helper()
	p.cmd = p.command()
	p.cmd.Stdout, p.cmd.Stderr = &p.out, &p.out
	// A group of its own, to see that it leaves no child; and no server
	// survives a test that panics or times out.
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	p.cmd.WaitDelay = time.Second
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	p.ended = ended
	go func() { p.cmd.Wait(); close(ended) }()
	for start := time.Now(); time.Since(start) < startWithin; time.Sleep(10 * time.Millisecond) {
		if !p.Running() {
			t.Fatalf("%v ended: %v\n%s", p.cmd.Args, p.cmd.ProcessState, p.Output())
		}
		if c, err := net.Dial("tcp", p.Addr); err == nil {
			c.Close()
			return
		}
	}
	t.Fatalf("%v does not listen on %s after %s\n%s", p.cmd.Args, p.Addr, startWithin, p.Output())
}

// PID is its process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Running reports whether it has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// RSS is its resident memory in MiB.
func (p *Process) RSS(t testing.TB) int { return p.memory(t, "VmRSS") }

// Peak is the most that its resident memory was since ResetPeak, in MiB.
func (p *Process) Peak(t testing.TB) int { return p.memory(t, "VmHWM") }

// ResetPeak begins a new measurement (proc(5), clear_refs).
func (p *Process) ResetPeak(t testing.TB) {
	t.Helper()
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p.PID()), []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
}

func (p *Process) memory(t testing.TB, field string) (mib int) {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(b), "\n"+field+":")
	if _, err := fmt.Sscan(rest, &mib); err != nil {
		t.Fatalf("%s of %v: %v", field, p.cmd.Args, err)
	}
	return mib >> 10
}

// Output is what it has printed so far, on stdout and stderr.
func (p *Process) Output() string { return p.out.String() }

// Kill ends it at once (SIGKILL) and waits for its end.
func (p *Process) Kill(t testing.TB) { t.Helper(); p.signal(t, syscall.SIGKILL); <-p.ended }

// Pause makes it hang: it still accepts (the kernel does), and never answers.
func (p *Process) Pause(t testing.TB) { t.Helper(); p.signal(t, syscall.SIGSTOP) }

// Continue ends a Pause.
func (p *Process) Continue(t testing.TB) { t.Helper(); p.signal(t, syscall.SIGCONT) }

// Terminate asks it to stop (SIGTERM) and waits for its end, 15 s at most.
func (p *Process) Terminate(t testing.TB) {
	t.Helper()
	p.signal(t, syscall.SIGTERM)
	select {
	case <-p.ended:
	case <-time.After(15 * time.Second):
		t.Fatalf("%v still runs 15 s after SIGTERM\n%s", p.cmd.Args, p.Output())
	}
}

// Restart starts it again on the same address, after Kill or Terminate.
func (p *Process) Restart(t testing.TB) {
	t.Helper()
	if p.Running() {
		t.Fatalf("%v still runs", p.cmd.Args)
	}
	p.start(t)
}

func (p *Process) signal(t testing.TB, s syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		t.Fatalf("%s to %v: %v\n%s", s, p.cmd.Args, err, p.Output())
	}
}

// end kills it with all its children, and says so if it had left any.
func (p *Process) end(t testing.TB) {
	if p.ended == nil {
		return // it could not be started
	}
	p.cmd.Process.Kill()
	<-p.ended
	group := -p.PID()
	if err := syscall.Kill(group, 0); !errors.Is(err, syscall.ESRCH) {
		syscall.Kill(group, syscall.SIGKILL)
		t.Errorf("%v left a process behind", p.cmd.Args)
	}
	if t.Failed() {
		t.Logf("output of %v:\n%s", p.cmd.Args, tail(p.Output(), 4000))
	}
}

// FreePort finds a port on 127.0.0.1 that nothing listens on. It stays below
// the range that the kernel gives to outgoing connections (32768 on): a test
// that kills a server must find its port free again, and not as the source of
// some connection.
func FreePort(t testing.TB) int {
	t.Helper()
	for range 100 {
		port := 20000 + rand.IntN(12000)
		if ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			ln.Close()
			return port
		}
	}
	t.Fatal("no free port in 100 tries")
	return 0
}

// output is a bytes.Buffer for several goroutines.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

func tail(s string, n int) string {
	if len(s) > n {
		return "… " + s[len(s)-n:]
	}
	return s
}
