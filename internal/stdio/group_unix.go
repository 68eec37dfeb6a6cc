//go:build unix

package stdio

import (
	"os/exec"
	"syscall"
)

// ownGroup puts the child into a process group of its own: what it starts can be
// ended with it, and our terminal's Ctrl-C is ours to pass on.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// signal sends SIGTERM or SIGKILL to the child's group and to what has left it.
func (c *child) signal(kill bool) {
	s := syscall.SIGTERM
	if kill {
		s = syscall.SIGKILL
	}
	if !c.exited() { // else its number may be another's by now
		_ = syscall.Kill(-c.cmd.Process.Pid, s)
	}
	c.signalDescendants(s)
}
