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

var outcomeLine = regexp.MustCompile(`(?m)^BenchmarkOutcome/(\w+?)(?:-\d+)?\s+\d+\s+([\d.]+) ns/op\s+([\d.]+) MB/s\s+\d+ B/op\s+(\d+) allocs/op`)

// outcomeRow runs the Go benchmarks of what reads answers for their outcome.
func outcomeRow(out *bytes.Buffer) error {
	cmd := exec.Command("go", "test", "-run", "^$", "-bench", "Outcome", "-benchmem", "-benchtime", "0.2s", "-count", strconv.Itoa(*rounds), "./mcphealth")
	cmd.Dir, _ = filepath.Abs("..")
	text, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, text)
	}
	ns, allocs, size := map[string]spread{}, map[string]string{}, map[string]float64{}
	for _, m := range outcomeLine.FindAllStringSubmatch(string(text), -1) {
		each, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return err
		}
		rate, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			return err
		}
		ns[m[1]], allocs[m[1]], size[m[1]] = append(ns[m[1]], each), max(allocs[m[1]], m[4]), rate*each/1000
	}
	lines := [][]string{{"answer", "size", "read", "allocations"}}
	for _, a := range []struct{ bench, name string }{
		{"small", "a small JSON result"}, {"text", "a long text in JSON"}, {"structured", "structured content in JSON"}, {"events", "a stream of events"},
		{"html", "a web page"}, {"worstQuotes", "the worst of quotes"}, {"worstSlashes", "the worst of escapes"}, {"worstCRs", "the worst of line ends"}, {"worstDepth", "the worst of nesting"},
	} {
		if ns[a.bench] == nil {
			return fmt.Errorf("no result for %s in\n%s", a.bench, text)
		}
		lines = append(lines, []string{a.name, fmt.Sprintf("%.1f KiB", size[a.bench]/1024), ns[a.bench].show("%.0f") + " ns", allocs[a.bench]})
	}
	table(out, lines...)
	return nil
}
