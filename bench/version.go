package main

import (
	"os/exec"
	"strings"
)

// caddyVersion is that of the Caddy that is measured.
func caddyVersion() string {
	out, err := exec.Command(*caddyBin, "version").Output()
	if err != nil {
		return "(" + err.Error() + ")"
	}
	v, _, _ := strings.Cut(string(out), " ")
	return strings.TrimSpace(v)
}
