package stdio

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// child is a server process. Its ends of the pipes are closed here once it runs;
// ours have deadlines, so that nothing needs a goroutine of its own but stderr.
type child struct {
	cmd   *exec.Cmd
	mark  string // in the environment of all its descendants
	in    *os.File
	out   *os.File
	lines *bufio.Reader
	begun []byte // of a line that has not ended yet

	ended  chan struct{} // it was waited for
	stderr chan struct{} // its stderr was read to the end
	err    *os.File
}

// start runs command. Its stderr goes to w, cut at maxStderr, or nowhere.
func start(command []string, w io.Writer) (*child, error) {
	var id [8]byte
	_, _ = rand.Read(id[:])
	c := &child{cmd: exec.Command(command[0], command[1:]...), mark: "MCPHEALTH_CHILD=" + hex.EncodeToString(id[:]),
		ended: make(chan struct{}), stderr: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), c.mark)
	ownGroup(c.cmd)
	theirs, err := c.pipes()
	defer closeAll(theirs)
	if err == nil {
		err = c.cmd.Start()
	}
	if err != nil {
		closeAll([]*os.File{c.in, c.out, c.err})
		return nil, err
	}
	c.lines = bufio.NewReaderSize(c.out, 64<<10)
	go func() { _ = c.cmd.Wait(); close(c.ended) }()
	go func() { passStderr(w, c.err); close(c.stderr) }()
	return c, nil
}

// pipes connects the child's three streams and returns its ends of them.
func (c *child) pipes() (theirs []*os.File, err error) {
	pipe := func() (r, w *os.File) {
		if err == nil {
			r, w, err = os.Pipe()
		}
		return r, w
	}
	stdin, in := pipe()
	out, stdout := pipe()
	errs, stderr := pipe()
	c.in, c.out, c.err = in, out, errs
	c.cmd.Stdin, c.cmd.Stdout, c.cmd.Stderr = stdin, stdout, stderr
	return []*os.File{stdin, stdout, stderr}, err
}

func closeAll(files []*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// send writes one message, as a line (MCP "stdio": messages are delimited by
// newlines).
func (c *child) send(ctx context.Context, message []byte) error {
	defer c.within(ctx, c.in.SetWriteDeadline)()
	if _, err := c.in.Write(append(message, '\n')); err != nil {
		return c.explain(ctx, err)
	}
	return nil
}

// receive returns the next line, or the first limit bytes of a longer one. What a
// deadline cuts off is kept for the next call.
func (c *child) receive(ctx context.Context, limit int) ([]byte, error) {
	defer c.within(ctx, c.out.SetReadDeadline)()
	for {
		part, err := c.lines.ReadSlice('\n')
		c.begun = append(c.begun, part...)
		whole := err == nil || errors.Is(err, io.EOF) && len(c.begun) > 0
		if whole || len(c.begun) >= limit {
			line := bytes.TrimRight(c.begun, "\r\n")
			c.begun = nil
			return line[:min(len(line), limit)], nil
		}
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			return nil, c.explain(ctx, err)
		}
	}
}

// within ends what blocks on a pipe when ctx ends. release must be called before
// the next one.
func (c *child) within(ctx context.Context, set func(time.Time) error) (release func()) {
	if set(time.Time{}) != nil { // no deadlines on pipes here: end what is at the other end
		set = func(time.Time) error { return c.cmd.Process.Kill() }
	}
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = set(time.Unix(1, 0))
		close(done)
	})
	return func() {
		if !stop() {
			<-done
		}
	}
}

// errSilent: the context ended first, by its deadline or because we were told to stop.
var errSilent = errors.New("no answer in time")

// explain says why a pipe broke, where the process's own end is why.
func (c *child) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return errSilent
	}
	select {
	case <-c.ended:
		return fmt.Errorf("the process ended (%s) without an answer", c.cmd.ProcessState)
	case <-time.After(minGrace): // the pipes end a moment before the process
	}
	return fmt.Errorf("the process still runs, but its pipe is closed: %w", err)
}

// exited tells whether the process has ended and was waited for.
func (c *child) exited() bool {
	select {
	case <-c.ended:
		return true
	default:
		return false
	}
}

// stop ends the child as the specification says: close its stdin, wait, SIGTERM,
// wait, SIGKILL; and with it whatever it has started. It returns what was wrong
// with that, as warnings.
func (c *child) stop(grace time.Duration) (warnings []string) {
	_ = c.out.SetReadDeadline(time.Time{})
	_ = c.in.Close()
	go func() { _, _ = io.Copy(io.Discard, c.out) }() // a child that waits to write could not end
	if c.gone(grace) {
		if c.cmd.ProcessState.ExitCode() != 0 {
			warnings = append(warnings, "exit: the server ended by "+c.cmd.ProcessState.String())
		}
	} else {
		ended := c.exited()
		c.signal(false)
		how := "it ended on SIGTERM"
		if !c.gone(grace) {
			how = "it was killed"
		}
		if ended {
			warnings = append(warnings, "shutdown: the server ended, but left processes behind, which were ended")
		} else {
			warnings = append(warnings, "shutdown: the server did not end when its stdin was closed; "+how)
		}
	}
	c.signal(true)
	wait(c.ended, maxGrace)  // a process in the kernel's hands may not even heed SIGKILL
	wait(c.stderr, minGrace) // a process that escaped may hold it
	closeAll([]*os.File{c.out, c.err})
	<-c.stderr
	return warnings
}

func wait(done <-chan struct{}, most time.Duration) {
	select {
	case <-done:
	case <-time.After(most):
	}
}

// gone waits until the child and all that it started have ended, d at most.
func (c *child) gone(d time.Duration) bool {
	timeout := time.After(d)
	select {
	case <-c.ended:
	case <-timeout:
		return false
	}
	for c.leftovers() {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-timeout:
			return false
		}
	}
	return true
}
