// Command accuracy has the bug cases of test/suite judged side by side: by the
// active health checks that Caddy, Traefik and HAProxy bring along, and by ours.
// It prints how many votes each got right, and which way the others were wrong.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// interval is how often every checker asks, and settle when its state is read:
// after ten rounds, or five of a check that runs into the default timeout of 5 s.
// The scripts enter their last phase at changeover.
const (
	interval   = 2 * time.Second
	changeover = 7 * time.Second
	settle     = 22 * time.Second
)

func main() {
	verbose := flag.Bool("v", false, "name the cases that each got wrong")
	only := flag.String("only", "", "judge only these `IDs`, comma separated")
	flag.StringVar(&caddyBin, "caddy", "../bin/caddy", "Caddy with the modules")
	flag.StringVar(&probeBin, "mcphealth", "../bin/mcphealth", "our command")
	flag.StringVar(&traefikBin, "traefik", "../test/e2e/.cache/bin/traefik", "Traefik, as test/traefik builds it")
	flag.StringVar(&haproxyBin, "haproxy", "haproxy", "HAProxy, as accuracy/install installs it")
	flag.Parse()
	if err := run(*only, *verbose); err != nil {
		log.Fatal(err)
	}
}

// A vote is what a checker does to traffic.
type vote string

const (
	up   vote = "up"
	down vote = "down"
	none vote = "none" // no vote: the server keeps the state it had
)

// voteOf is the vote that a verdict of ours is.
func voteOf(verdict string) vote {
	switch verdict {
	case "ready", "alive", "degraded":
		return up
	case "dead":
		return down
	}
	return none
}

// bugCase is a case script, as far as the judges need it.
type bugCase struct {
	ID, Path string
	Probe    struct {
		Args   []string
		Repeat int
		Runs   []struct{ Verdicts []string }
	}
	Want struct{ Verdicts []string }
}

// want is the vote that the case wants once it is in its last phase: none where
// only "unknown" is right, and down where the suite takes "dead" as well.
func (c bugCase) want() vote {
	verdicts := c.Want.Verdicts
	if n := len(c.Probe.Runs); n > 0 && c.Probe.Runs[n-1].Verdicts != nil {
		verdicts = c.Probe.Runs[n-1].Verdicts
	}
	for _, v := range verdicts {
		if w := voteOf(v); w != none {
			return w
		}
	}
	return none
}

// options are the case's flags for our command, which have the names of our
// Caddy options.
func (c bugCase) options() (opts [][2]string) {
	for _, arg := range c.Probe.Args {
		if name, found := strings.CutPrefix(arg, "--"); found {
			opts = append(opts, [2]string{strings.ReplaceAll(name, "-", "_")})
		} else {
			opts[len(opts)-1][1] = arg
		}
	}
	return opts
}

// target is one case, played for one checker.
type target struct {
	bugCase
	name string // for configurations: fd01-0
	row  int
	port int
}

func (t target) addr() string { return fmt.Sprintf("127.0.0.1:%d", t.port) }

// row is one line of the table: how a checker voted.
type row struct {
	name                          string
	right, falseDown, falseUp     []string
	noVote                        []string // where there was something to say
	neutralUp, neutralDown, quiet int      // where only "unknown" is right
}

func (r *row) count(id string, want, got vote) {
	switch {
	case want == none && got == up:
		r.neutralUp++
	case want == none && got == down:
		r.neutralDown++
	case want == none:
		r.quiet++
	case got == none:
		r.noVote = append(r.noVote, id)
	case got == want:
		r.right = append(r.right, id)
	case got == down:
		r.falseDown = append(r.falseDown, id)
	default:
		r.falseUp = append(r.falseUp, id)
	}
}

func run(only string, verbose bool) error {
	cases, err := loadCases("../test/suite/cases", only)
	if err != nil {
		return err
	}
	var rows []*row
	for _, j := range judges {
		votes, err := judged(j, cases)
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
			fmt.Fprintf(os.Stderr, "left out: %s: %v\n", strings.Join(j.rows, ", "), err)
			continue
		} else if err != nil {
			return err
		}
		for i, name := range j.rows {
			r := &row{name: name}
			for _, c := range cases {
				r.count(c.ID, c.want(), votes[i][c.ID])
			}
			rows = append(rows, r)
		}
	}
	report(os.Stdout, cases, rows, verbose)
	return nil
}

func loadCases(dir, only string) (cases []bugCase, err error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var c bugCase
		if err := json.Unmarshal(b, &c); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if only == "" || slices.Contains(strings.Split(only, ","), c.ID) {
			cases = append(cases, c)
		}
	}
	if len(cases) == 0 {
		return nil, fmt.Errorf("%s: no cases", dir)
	}
	return cases, nil
}

// judged has one judge look at fresh copies of all cases, one copy for each of its
// rows, and returns the votes by row and case.
func judged(j judge, cases []bugCase) ([]map[string]vote, error) {
	scripts, err := play(len(j.rows))
	if err != nil {
		return nil, err
	}
	defer scripts.stop()
	var targets []target
	for _, c := range cases {
		for i, port := range scripts.ports[c.ID] {
			targets = append(targets, target{c, fmt.Sprintf("%s-%d", strings.ToLower(c.ID), i), i, port})
		}
	}
	dir, err := os.MkdirTemp("", "accuracy")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	start := time.Now()
	collect, stop, err := j.start(dir, targets)
	if err != nil {
		return nil, err
	}
	defer stop()
	wait := func(until time.Duration) {
		if !j.atOnce {
			time.Sleep(time.Until(start.Add(until)))
		}
	}
	wait(changeover)
	if err := scripts.enterLast(); err != nil {
		return nil, err
	}
	wait(settle)
	byPort, err := collect()
	if err != nil {
		return nil, err
	}
	votes := make([]map[string]vote, len(j.rows))
	for i := range votes {
		votes[i] = map[string]vote{}
	}
	for _, t := range targets {
		v := byPort[t.port]
		if v == "" {
			return nil, fmt.Errorf("%s: nothing known of %s", j.rows[t.row], t.ID)
		}
		votes[t.row][t.ID] = v
	}
	return votes, nil
}

// scripts are the cases being played by replays.py.
type scripts struct {
	ports map[string][]int
	in    io.WriteCloser
	out   *bufio.Reader
	cmd   *exec.Cmd
}

func play(copies int) (*scripts, error) {
	s := &scripts{cmd: exec.Command("python3", "accuracy/replays.py", strconv.Itoa(copies))}
	s.cmd.Stderr = os.Stderr
	in, err := s.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	s.in, s.out = in, bufio.NewReader(out)
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	line, err := s.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &s.ports)
	}
	if err != nil {
		s.stop()
		return nil, fmt.Errorf("replays.py: %w", err)
	}
	return s, nil
}

func (s *scripts) enterLast() error {
	if _, err := io.WriteString(s.in, "\n"); err != nil {
		return err
	}
	_, err := s.out.ReadString('\n')
	return err
}

func (s *scripts) stop() {
	_ = s.in.Close()
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

func report(w io.Writer, cases []bugCase, rows []*row, verbose bool) {
	wanted, changing := map[vote]int{}, 0
	for _, c := range cases {
		wanted[c.want()]++
		if len(c.Probe.Runs) > 0 {
			changing++
		}
	}
	fmt.Fprintf(w, "%d cases: %d want up, %d down, %d no vote; %d that change are judged by their end. Every %s, timeout 5s or the case's, read after %s\n\n",
		len(cases), wanted[up], wanted[down], wanted[none], changing, interval, settle)
	fmt.Fprintf(w, "| checker | right, of %d | false down | false up | no vote | neutral: up, down, none |\n|---|---|---|---|---|---|\n", wanted[up]+wanted[down])
	for _, r := range rows {
		fmt.Fprintf(w, "| %s | %d | %d | %d | %d | %d, %d, %d |\n", r.name, len(r.right), len(r.falseDown), len(r.falseUp), len(r.noVote), r.neutralUp, r.neutralDown, r.quiet)
	}
	fmt.Fprintln(w)
	for _, r := range rows {
		if !verbose {
			break
		}
		for _, wrong := range []struct {
			name string
			ids  []string
		}{{"false down", r.falseDown}, {"false up", r.falseUp}, {"no vote", r.noVote}} {
			if len(wrong.ids) > 0 {
				fmt.Fprintf(w, "%s: %s: %s\n", r.name, wrong.name, strings.Join(wrong.ids, " "))
			}
		}
	}
	fmt.Fprint(w, "accuracy")
	for _, r := range rows {
		fmt.Fprintf(w, " %s=%d/%d", strings.NewReplacer(",", "", " ", "-", "(", "", ")", "").Replace(r.name), len(r.right), wanted[up]+wanted[down])
	}
	fmt.Fprintln(w)
}
