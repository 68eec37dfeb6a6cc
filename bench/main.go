// Command bench measures what mcphealth costs and what it is worth: ours and each
// peer in turns, in one run, medians with minimum and maximum, ratios. What it prints
// is what docs/benchmarks.md shows; -write puts it there.
//
//	go run . -row path,probing -write ../docs/benchmarks.md
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/mcphealth/mcphealth/bench/report"
)

var (
	caddyBin = flag.String("caddy", "../bin/caddy", "Caddy with the modules")
	// traefikBin is built as CI does for its tests; without it the row has no Traefik.
	traefikBin = flag.String("traefik", "../test/e2e/.cache/bin/traefik", "Traefik, for row failover")
	rounds     = flag.Int("rounds", 7, "rounds per side; 5 or more for numbers that are published")
	each       = flag.Duration("each", 4*time.Second, "length of a round")
	clients    = flag.Int("clients", 32, "connections that make the load")
	sizes      = flag.String("upstreams", "100,1000,10000", "how many upstreams row probing has")
	write      = flag.String("write", "", "a file whose sections <!-- bench ROW --> are replaced")
	only       = flag.String("row", "", "comma-separated rows; default all")
	port       = flag.Int("port", 0, "for this program's own use")
	asServer   = flag.String("backend", "", "for this program's own use")
)

// rows are what can be measured, in the order of docs/benchmarks.md, and how their
// rounds go. Each prints markdown.
var rows = []struct {
	name   string
	run    func(*bytes.Buffer) error
	rounds func() string
}{
	{"path", pathRow, func() string { return fmt.Sprintf("%d rounds of %v in turns", *rounds, *each) }},
	{"policy", policyRow, benchmarks},
	{"outcome", outcomeRow, benchmarks},
	{"streams", streamsRow, inTurns},
	{"probe", probeRow, func() string { return fmt.Sprintf("%d rounds of %d probes in turns", *rounds, probesEach) }},
	{"probing", probingRow, func() string { return fmt.Sprintf("%d rounds of %v, all at the same time", *rounds, probeInterval) }},
	{"beside", besideRow, func() string { return fmt.Sprintf("%d rounds of %v, one after the other", *rounds, *each) }},
	{"traffic", trafficRow, func() string { return fmt.Sprintf("%d rounds of a minute, all at the same time", *rounds) }},
	{"failover", failoverRow, func() string { return fmt.Sprintf("%d rounds, all at the same time", *rounds) }},
	{"sessions", sessionsRow, inTurns},
	{"held", heldRow, inTurns},
}

func inTurns() string    { return fmt.Sprintf("%d rounds in turns", *rounds) }
func benchmarks() string { return fmt.Sprintf("%d runs of 200 ms", *rounds) }

func main() {
	flag.Parse()
	run := measure
	if *asServer != "" {
		run = func() error { return serveBackend(*asServer, *port) }
	}
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func measure() error {
	known := map[string]bool{}
	for _, r := range rows {
		known[r.name] = true
	}
	var want []string
	if *only != "" {
		want = strings.Split(*only, ",")
	}
	for _, name := range want {
		if !known[name] {
			return fmt.Errorf("row %q: not known", name)
		}
	}
	for _, r := range rows {
		if want != nil && !slices.Contains(want, r.name) {
			continue
		}
		out := new(bytes.Buffer)
		if err := r.run(out); err != nil {
			return fmt.Errorf("row %s: %w", r.name, err)
		}
		fmt.Fprintf(out, "\n%s\n", machine(r.rounds()))
		fmt.Printf("\n%s: %s", r.name, out)
		if *write != "" {
			if err := report.ReplaceSection(*write, r.name, out.String()); err != nil {
				return err
			}
		}
	}
	return nil
}

// machine is the line below each table: how to read and repeat it.
func machine(rounds string) string {
	return fmt.Sprintf("_%d cores, %s, Caddy %s, %s, %s; %s, load and backends on the same cores._",
		runtime.NumCPU(), cpu(), caddyVersion(), runtime.Version(), time.Now().Format("2006-01-02"), rounds)
}

func cpu() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(b)) {
		if name, found := strings.CutPrefix(line, "model name"); found {
			return strings.TrimSpace(strings.TrimLeft(name, "\t: "))
		}
	}
	return "unknown processor"
}

// spread is one quantity over the rounds.
type spread []float64

func (s spread) sorted() []float64 {
	all := slices.Clone(s)
	sort.Float64s(all)
	return all
}

func (s spread) median() float64 {
	if len(s) == 0 {
		return 0
	}
	return s.sorted()[len(s)/2]
}

// show is the median, with least and most in brackets.
func (s spread) show(format string) string {
	if len(s) == 0 {
		return "–"
	}
	all := s.sorted()
	return fmt.Sprintf(format+" ("+format+" to "+format+")", s.median(), all[0], all[len(all)-1])
}

// over is s divided by o, round by round.
func (s spread) over(o spread) spread {
	var r spread
	for i := range min(len(s), len(o)) {
		if o[i] != 0 {
			r = append(r, s[i]/o[i])
		}
	}
	return r
}

// table writes rows of cells as markdown; the first is the head.
func table(out *bytes.Buffer, rows ...[]string) { out.WriteString(report.Table(rows)) }
