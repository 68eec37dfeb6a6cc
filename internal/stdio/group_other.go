//go:build !unix

package stdio

import "os/exec"

func ownGroup(*exec.Cmd) {}

// signal: without process groups and SIGTERM, the child itself can be killed.
func (c *child) signal(kill bool) {
	if kill {
		_ = c.cmd.Process.Kill()
	}
}

func (c *child) leftovers() bool { return false }
