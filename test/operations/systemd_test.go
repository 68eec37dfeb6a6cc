package operations

import (
	"os/exec"
	"strings"
	"testing"
)

// The unit is one that systemd takes without a word, and its configuration is right.
func TestSystemd(t *testing.T) {
	bin := mcphealth(t)
	config := write(t, "mcphealth.yml", example(t, "systemd/mcphealth.yml"))
	unit := example(t, "systemd/mcphealth.service", "/usr/local/bin/mcphealth", bin, "/etc/mcphealth.yml", config)
	cmd := exec.Command(installed(t, "systemd-analyze"), "verify", "--man=no", write(t, "mcphealth.service", unit))
	// It may have something to say of the machine's own units as well.
	if out, err := cmd.CombinedOutput(); err != nil || strings.Contains(string(out), "mcphealth.service") {
		t.Errorf("%v: %v\n%s", cmd.Args, err, out)
	}
	for line := range strings.Lines(unit) {
		if command, ok := strings.CutPrefix(line, "ExecStartPre="); ok {
			if exit, out := exitOf(strings.Fields(command)); exit != 0 {
				t.Errorf("%s: exit %d: %s", command, exit, out)
			}
		}
	}
}
