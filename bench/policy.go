package main

import (
	"bytes"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

var benchLine = regexp.MustCompile(`(?m)^BenchmarkSelect/(?:\w+\.)?(\S+?)(?:-\d+)?\s+\d+\s+([\d.]+) ns/op\s+\d+ B/op\s+(\d+) allocs/op`)

// policyRow runs the Go benchmarks of the selection policy: the fallback policy alone,
// under ours, and with the guard before it.
func policyRow(out *bytes.Buffer) error {
	cmd := exec.Command("go", "test", "-run", "^$", "-bench", "Select", "-benchmem", "-benchtime", "0.2s", "-count", strconv.Itoa(*rounds), "./caddymodule")
	cmd.Dir, _ = filepath.Abs("..")
	text, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, text)
	}
	var names []string // "first/alone/2"
	ns, allocs := map[string]spread{}, map[string]string{}
	for _, m := range benchLine.FindAllStringSubmatch(string(text), -1) {
		if ns[m[1]] == nil && strings.Contains(m[1], "/alone/") {
			names = append(names, m[1])
		}
		n, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return err
		}
		ns[m[1]], allocs[m[1]] = append(ns[m[1]], n), max(allocs[m[1]], m[3])
	}
	if len(names) == 0 {
		return fmt.Errorf("no results in\n%s", text)
	}
	lines := [][]string{{"fallback, upstreams", "alone", "under `mcp_health`", "and behind the guard", "allocations"}}
	for _, name := range names {
		policy, guarded := strings.Replace(name, "/alone/", "/policy/", 1), strings.Replace(name, "/alone/", "/guarded/", 1)
		alone := ns[name].median()
		parts := strings.Split(name, "/")
		lines = append(lines, []string{strings.ToLower(strings.TrimSuffix(parts[0], "Selection")) + ", " + parts[2], ns[name].show("%.1f") + " ns",
			fmt.Sprintf("%+.1f ns", ns[policy].median()-alone), fmt.Sprintf("%+.1f ns", ns[guarded].median()-alone),
			max(allocs[name], allocs[policy], allocs[guarded])})
	}
	table(out, lines...)
	return nil
}
