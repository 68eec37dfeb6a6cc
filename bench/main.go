// Command bench measures the request path: the same load against plain Caddy and
// against ours, in one Caddy process, in turns, and prints ratios. The rows that
// it prints are those of docs/benchmarks.md.
package main

import (
	"flag"
	"fmt"
	"log"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"sort"
	"strconv"
	"strings"
	"time"
)

func main() {
	rounds := flag.Int("rounds", 7, "rounds per side")
	each := flag.Duration("each", 4*time.Second, "length of a round")
	clients := flag.Int("clients", 32, "connections")
	caddy := flag.String("caddy", "../bin/caddy", "Caddy with the modules")
	tool := flag.String("load", "", "wrk, or go (checks every answer); default: wrk if it is there")
	flag.Parse()
	if *tool == "" {
		*tool = "go"
		if _, err := exec.LookPath("wrk"); err == nil {
			*tool = "wrk"
		}
	}
	if err := run(*caddy, *tool, *rounds, *clients, *each); err != nil {
		log.Fatal(err)
	}
}

// side is one of the two that are compared.
type side struct {
	name, addr string
	results    []result
}

// result is one round.
type result struct {
	perSecond float64
	p99       time.Duration
	failed    int
}

func run(caddy, tool string, rounds, clients int, each time.Duration) error {
	fmt.Printf("machine: %d cores, %s, %s, load from %s with %d connections\n", runtime.NumCPU(), cpu(), runtime.Version(), tool, clients)
	for _, row := range []struct {
		name, backend string
	}{
		{"POST 1 KiB JSON", "json"},
		{"POST, answer as SSE", "sse"},
	} {
		if err := compare(row.name, row.backend, caddy, tool, rounds, clients, each); err != nil {
			return err
		}
	}
	return policyRow()
}

func compare(name, backend, caddy, tool string, rounds, clients int, each time.Duration) error {
	servers := []string{serveBackend(backend), serveBackend(backend)}
	plain, ours := &side{name: "reverse_proxy, native checks", addr: freeAddr()}, &side{name: "guard + policy", addr: freeAddr()}
	stop, err := startCaddy(caddy, config(plain.addr, ours.addr, servers))
	if err != nil {
		return err
	}
	defer stop()
	load := wrk
	if tool == "go" {
		load = goLoad
	}
	for _, s := range []*side{plain, ours} { // warm up
		if _, err := load(s.addr, clients, time.Second); err != nil {
			return err
		}
	}
	for i := range rounds {
		order := []*side{plain, ours}
		if i%2 == 1 {
			order = []*side{ours, plain}
		}
		for _, s := range order {
			r, err := load(s.addr, clients, each)
			if err != nil {
				return err
			}
			s.results = append(s.results, r)
		}
	}
	report(name, plain, ours)
	return nil
}

func config(plain, ours string, servers []string) string {
	up := strings.Join(servers, " ")
	return fmt.Sprintf(`{
	admin off
	auto_https off
	persist_config off
	log {
		level ERROR
	}
}
http://%s {
	reverse_proxy /mcp* %s {
		health_uri /health
		health_interval 10s
	}
}
http://%s {
	mcp_guard /mcp*
	reverse_proxy /mcp* %s {
		lb_policy mcp_health
		lb_retries 3
		lb_try_interval 20ms
	}
}
`, plain, up, ours, up)
}

// report prints one row: medians with minimum and maximum, and what counts, the
// ratio, taken from pairs of neighbouring rounds.
func report(name string, plain, ours *side) {
	var speed, tail []float64
	for i := range plain.results {
		speed = append(speed, ours.results[i].perSecond/plain.results[i].perSecond)
		tail = append(tail, float64(ours.results[i].p99)/float64(plain.results[i].p99))
	}
	fmt.Printf("\n%s\n", name)
	for _, s := range []*side{plain, ours} {
		var per, p99 []float64
		failed := 0
		for _, r := range s.results {
			per, p99, failed = append(per, r.perSecond), append(p99, float64(r.p99)/1e6), failed+r.failed
		}
		fmt.Printf("  %-30s %8.0f req/s (%.0f to %.0f)   p99 %.2f ms (%.2f to %.2f)   %d failed\n", s.name,
			median(per), low(per), high(per), median(p99), low(p99), high(p99), failed)
	}
	fmt.Printf("  ratio: %.3f of the requests per second (%.3f to %.3f), p99 %.3f × (%.3f to %.3f)\n",
		median(speed), low(speed), high(speed), median(tail), low(tail), high(tail))
}

var benchLine = regexp.MustCompile(`(?m)^BenchmarkSelect/(?:\w+\.)?(\S+?)(?:-\d+)?\s+\d+\s+([\d.]+) ns/op\s+\d+ B/op\s+(\d+) allocs/op`)

// policyRow runs the Go benchmarks of the selection policy and prints medians: the
// fallback policy alone, under ours, and with the guard before it.
func policyRow() error {
	cmd := exec.Command("go", "test", "-run", "^$", "-bench", "Select", "-benchmem", "-benchtime", "0.2s", "-count", "5", "./caddymodule")
	cmd.Dir, _ = filepath.Abs("..")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	var names []string
	ns, allocs := map[string][]float64{}, map[string]string{}
	for _, m := range benchLine.FindAllStringSubmatch(string(out), -1) {
		if ns[m[1]] == nil {
			names = append(names, m[1])
		}
		n, _ := strconv.ParseFloat(m[2], 64)
		ns[m[1]], allocs[m[1]] = append(ns[m[1]], n), m[3]
	}
	fmt.Print("\nselection policy, per choice (fallback/how/upstreams)\n")
	for _, name := range names {
		fmt.Printf("  %-34s %6.1f ns (%.1f to %.1f)   %s allocations", name, median(ns[name]), low(ns[name]), high(ns[name]), allocs[name])
		if alone := ns[strings.NewReplacer("/policy/", "/alone/", "/guarded/", "/alone/").Replace(name)]; alone != nil && (strings.Contains(name, "/policy/") || strings.Contains(name, "/guarded/")) {
			fmt.Printf("   %+.1f ns", median(ns[name])-median(alone))
		}
		fmt.Println()
	}
	return nil
}

func startCaddy(bin, config string) (stop func(), err error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		return nil, err
	}
	cmd := exec.Command(bin, "run", "--config", file, "--adapter", "caddyfile")
	cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+dir)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		_ = os.RemoveAll(dir)
	}
	for _, line := range strings.Split(config, "\n") {
		addr, found := strings.CutPrefix(line, "http://")
		if !found {
			continue
		}
		if err := awaitListen(strings.TrimSuffix(addr, " {")); err != nil {
			stop()
			return nil, err
		}
	}
	time.Sleep(300 * time.Millisecond) // first health checks
	return stop, nil
}

func awaitListen(addr string) error {
	var err error
	for range 200 {
		var c net.Conn
		if c, err = net.Dial("tcp", addr); err == nil {
			return c.Close()
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("caddy does not listen: %w", err)
}

func freeAddr() string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func cpu() string {
	b, _ := os.ReadFile("/proc/cpuinfo")
	for _, line := range strings.Split(string(b), "\n") {
		if name, found := strings.CutPrefix(line, "model name"); found {
			return strings.TrimLeft(name, "\t: ")
		}
	}
	return "unknown processor"
}

func sorted(x []float64) []float64 {
	x = append([]float64(nil), x...)
	sort.Float64s(x)
	return x
}

func median(x []float64) float64 { return sorted(x)[len(x)/2] }
func low(x []float64) float64    { return sorted(x)[0] }
func high(x []float64) float64   { return sorted(x)[len(x)-1] }
