package main

import (
	"debug/buildinfo"
	"os/exec"
	"regexp"
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

var versionNumber = regexp.MustCompile(`\d+\.\d+\.\d+`)

// haproxyVersion is what Debian's says of itself.
func haproxyVersion() string {
	out, _ := exec.Command("haproxy", "-v").Output()
	return versionNumber.FindString(string(out))
}

// traefikVersion is that of the module that Traefik was built from: it calls itself "dev".
func traefikVersion() string {
	info, err := buildinfo.ReadFile(*traefikBin)
	if err != nil {
		return "(" + err.Error() + ")"
	}
	return info.Main.Version
}
