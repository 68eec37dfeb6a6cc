//go:build unix && !linux

package stdio

import "syscall"

// leftovers: something in the child's group still runs.
func (c *child) leftovers() bool { return syscall.Kill(-c.cmd.Process.Pid, 0) == nil }

func (c *child) signalDescendants(s syscall.Signal) { _ = syscall.Kill(-c.cmd.Process.Pid, s) }
