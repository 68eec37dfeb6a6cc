package stdio

import (
	"bytes"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// leftovers: something that the child started still runs.
func (c *child) leftovers() (some bool) {
	c.descendants(func(*os.Process) { some = true })
	return some
}

// signalDescendants reaches also those that have a session or group of their own,
// as browsers are started.
func (c *child) signalDescendants(s syscall.Signal) {
	c.descendants(func(p *os.Process) { _ = p.Signal(s) })
}

// descendants calls f with each process that carries the child's mark in the
// environment it was started with, the child included. os.Process holds a pidfd,
// taken before the last look, so that a signal cannot meet another process with
// the same number.
func (c *child) descendants(f func(*os.Process)) {
	dirs, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range dirs {
		pid, err := strconv.Atoi(filepath.Base(dir))
		if err != nil || pid == os.Getpid() {
			continue
		}
		if !c.marked(dir) {
			continue
		}
		if p, err := os.FindProcess(pid); err == nil {
			if c.marked(dir) {
				f(p)
			}
			_ = p.Release()
		}
	}
}

// marked looks into /proc; a zombie has no environment any more.
func (c *child) marked(dir string) bool {
	env, err := os.ReadFile(dir + "/environ")
	return err == nil && bytes.Contains(env, []byte(c.mark))
}
