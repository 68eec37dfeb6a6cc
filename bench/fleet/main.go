// Command fleet simulates many edges that check the same upstreams: the real Checker on
// virtual time, with a network that is a function. It says how often an upstream is
// asked, how soon its loss is known, and how long edges disagree, and draws the curves
// of docs/scale.md.
//
// Upstreams do not touch each other, so that a few stand for all: the number of edges
// decides what one upstream sees, and the number of upstreams what one edge does.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mcphealth/mcphealth/bench/report"
)

var (
	write = flag.String("write", "", "the folder of scale.md: its sections are replaced, its curves drawn")
	most  = flag.Int("edges", 1000, "the most edges")
	wide  = flag.Int("upstreams", 10_000, "the most upstreams of one edge")
)

// setting is how a fleet is configured, and what passes through it.
type setting struct {
	name    string // as people write it
	traffic bool
	budget  float64 // probes per second of all edges together; 0: none
	share   bool
}

var settings = []setting{
	{name: "as it comes"},
	{name: "as it comes", traffic: true},
	{name: "`probe_budget 2/s`", budget: 2},
	{name: "`probe_budget 2/s`", budget: 2, traffic: true},
	{name: "`share`", share: true},
	{name: "`share`", share: true, traffic: true},
	{name: "`share`, `probe_budget 2/s`", share: true, budget: 2},
	{name: "`share`, `probe_budget 2/s`", share: true, budget: 2, traffic: true},
}

// String names it and its traffic.
func (s setting) String() string {
	if s.traffic {
		return s.name + ", traffic"
	}
	return s.name + ", no traffic"
}

// floor is the least time between two probes of one upstream by one of so many edges.
func (s setting) floor(edges int) time.Duration {
	if s.budget == 0 {
		return 0
	}
	return time.Duration(float64(edges) / s.budget * float64(time.Second))
}

// main runs as a test would: only there does Go have virtual time.
func main() {
	testing.Init()
	flag.Parse()
	testing.Main(regexp.MatchString, []testing.InternalTest{{Name: "fleet", F: simulate}}, nil, nil)
}

func simulate(t *testing.T) {
	var seen []observed
	pairs := map[setting][][]observed{} // by edges, of each number of upstreams
	for _, s := range settings {
		watch := func(edges, upstreams int) (o observed) {
			began := time.Now()
			synctest.Test(t, func(*testing.T) { o = watchFleet(s, edges, upstreams) })
			fmt.Fprintf(os.Stderr, "%v, %d edges × %d: %v\n", s, edges, upstreams, time.Since(began).Round(10*time.Millisecond))
			return o
		}
		for _, n := range steps(1, *most) {
			seen = append(seen, watch(n, 0))
		}
		for _, n := range powers(1, *most) {
			var row []observed
			for _, m := range powers(10, *wide) {
				row = append(row, watch(n, m))
			}
			pairs[s] = append(pairs[s], row)
		}
	}
	var cuts []partition
	for _, s := range settings {
		if !s.share || s.traffic { // calls are part of what is simulated
			continue
		}
		for n := 10; n <= *most; n *= 10 {
			for _, cut := range []int{1, n / 2, n - 1} {
				synctest.Test(t, func(*testing.T) { cuts = append(cuts, watchPartition(s, n, cut)) })
			}
		}
	}
	var storms []storm
	for _, n := range steps(10, *wide) {
		synctest.Test(t, func(*testing.T) { storms = append(storms, watchStorm(n)) })
	}
	if err := show(seen, pairs, cuts, storms); err != nil {
		t.Fatal(err)
	}
}

// powers are those of ten from least to most, and steps those and three times each.
func powers(least, most int) (all []int) {
	for n := least; n <= most; n *= 10 {
		all = append(all, n)
	}
	return all
}

func steps(least, most int) (all []int) {
	for _, n := range powers(least, most) {
		if all = append(all, n); 3*n <= most {
			all = append(all, 3*n)
		}
	}
	return all
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

// show prints the tables, and writes them and the curves where they belong.
func show(seen []observed, pairs map[setting][][]observed, cuts []partition, storms []storm) error {
	fleet := [][]string{{"setting", "edges", "probes of one upstream per second", "loss known to half of the edges after", "to all after", "edges disagree for", "back: known to all after"}}
	for _, o := range seen {
		fleet = append(fleet, []string{o.setting.String(), fmt.Sprint(o.edges), fmt.Sprintf("%.2f", o.perSecond), seconds(o.half), seconds(o.all), seconds(o.disagree), seconds(o.back)})
	}
	grid := [][]string{{"setting", "edges"}}
	for _, m := range powers(10, *wide) {
		grid[0] = append(grid[0], fmt.Sprintf("%d upstreams on each", m))
	}
	for _, s := range settings {
		for _, row := range pairs[s] {
			cells := []string{s.String(), fmt.Sprint(row[0].edges)}
			for _, o := range row {
				cells = append(cells, fmt.Sprintf("%.2f/s; %s; %s", o.perSecond, seconds(o.all), seconds(o.disagree)))
			}
			grid = append(grid, cells)
		}
	}
	storm := [][]string{{"upstreams of one edge", "steady, probes/s", "all lost: known after", "all back: half known after", "all known after", "with a call that waits for each", "most probes in any second"}}
	for _, s := range storms {
		storm = append(storm, []string{fmt.Sprint(s.upstreams), fmt.Sprintf("%.0f", s.steady), seconds(s.down), seconds(s.half), seconds(s.up), seconds(s.awaited), fmt.Sprint(s.most)})
	}
	cut := [][]string{{"setting", "edges", "cut off", "moves down or up: of an edge that sees it", "of one that is cut off", "wrong after 30 s", "probes that it gets per second"}}
	for _, p := range cuts {
		cut = append(cut, []string{p.setting.name, fmt.Sprint(p.edges), fmt.Sprint(p.cut), fmt.Sprint(p.see), fmt.Sprint(p.blind), fmt.Sprint(p.wrong), fmt.Sprintf("%.2f", p.perSecond)})
	}
	sections := []struct {
		name string
		rows [][]string
	}{{"fleet", fleet}, {"grid", grid}, {"cut", cut}, {"storm", storm}}
	for _, s := range sections {
		fmt.Printf("\n%s", report.Table(s.rows))
	}
	if *write == "" {
		return nil
	}
	for _, s := range sections {
		if err := report.ReplaceSection(filepath.Join(*write, "scale.md"), s.name, report.Table(s.rows)); err != nil {
			return err
		}
	}
	for name, c := range curves(seen, storms) {
		if err := os.WriteFile(filepath.Join(*write, "scale-"+name+".svg"), []byte(c.svg()), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// curves are the drawings, by the end of their file's name.
func curves(seen []observed, storms []storm) map[string]chart {
	of := func(title, y string, logY bool, value func(observed) float64) chart {
		c := chart{title: title, x: "edges", y: y, logY: logY}
		for _, s := range settings {
			l := line{name: strings.ReplaceAll(s.String(), "`", "")}
			for _, o := range seen {
				if o.setting == s {
					l.points = append(l.points, point{float64(o.edges), value(o)})
				}
			}
			c.lines = append(c.lines, l)
		}
		return c
	}
	lost, half := line{name: "all lost: all known"}, line{name: "all back: half known"}
	back, awaited := line{name: "all back: all known"}, line{name: "all back, calls wait: all known"}
	for _, s := range storms {
		lost.points = append(lost.points, point{float64(s.upstreams), s.down.Seconds()})
		half.points = append(half.points, point{float64(s.upstreams), s.half.Seconds()})
		back.points = append(back.points, point{float64(s.upstreams), s.up.Seconds()})
		awaited.points = append(awaited.points, point{float64(s.upstreams), s.awaited.Seconds()})
	}
	return map[string]chart{
		"probes":   of("How often one upstream is asked", "probes per second", true, func(o observed) float64 { return o.perSecond }),
		"loss":     of("When all edges know that it is lost", "seconds", true, func(o observed) float64 { return o.all.Seconds() }),
		"disagree": of("How long edges disagree (0.1: less)", "seconds", true, func(o observed) float64 { return max(0.1, o.disagree.Seconds()) }),
		"storm":    {title: "All upstreams of one edge at once", x: "upstreams", y: "seconds", lines: []line{lost, back, half, awaited}},
	}
}
