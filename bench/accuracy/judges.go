package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

var caddyBin, probeBin, traefikBin, haproxyBin string

// A judge is one program that judges all targets. It fills one or more rows, each
// from its own copy of the cases: what a check does to a server is part of the case.
type judge struct {
	rows   []string
	atOnce bool // asks when it is told, and has no state that settles
	start  func(dir string, targets []target) (collect func() (map[int]vote, error), stop func(), err error)
}

var judges = []judge{
	{rows: []string{"Traefik, GET", "Traefik, POST (it sends no body)"}, start: startTraefik},
	{rows: []string{"HAProxy, GET", "HAProxy, POST initialize", "HAProxy, POST initialize, answer read"}, start: startHAProxy},
	{rows: []string{"Caddy, GET", "Caddy, POST initialize", "Caddy, POST initialize, answer read", "ours, in Caddy"}, start: startCaddy},
	{rows: []string{"ours, mcphealth probe"}, start: startProbes, atOnce: true},
}

// ours is the row of startCaddy that asks with lb_policy mcp_health.
const ours = 3

// initialize is the body that people give to a check by POST.
const initialize = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"health","version":"1.0"}}}`

// check is what a native check of a target asks. Its rows are GET, POST, and POST
// with a look for "jsonrpc" in what comes back.
type check struct {
	method, host, timeout string
	header                [][2]string
	reads                 bool
}

func checkOf(t target) check {
	c := check{method: http.MethodGet, timeout: "5s", reads: t.row == 2}
	if t.row > 0 {
		c.method = http.MethodPost
		c.header = [][2]string{{"Content-Type", "application/json"}, {"Accept", "application/json, text/event-stream"}}
	}
	for _, o := range t.options() {
		switch o[0] {
		case "host":
			c.host = o[1]
		case "timeout":
			c.timeout = o[1]
		case "header":
			k, v, _ := strings.Cut(o[1], ": ")
			c.header = append(c.header, [2]string{k, v})
		}
	}
	return c
}

func startCaddy(dir string, targets []target) (func() (map[int]vote, error), func(), error) {
	listen, admin := freePort(), freePort()
	var b strings.Builder
	fmt.Fprintf(&b, "{\n\tadmin 127.0.0.1:%d\n\tauto_https off\n\tpersist_config off\n\tlog {\n\t\tformat json\n\t}\n}\n", admin)
	for _, t := range targets {
		fmt.Fprintf(&b, "http://%s.test:%d {\n\tbind 127.0.0.1\n\treverse_proxy %s {\n%s\t}\n}\n", t.name, listen, t.addr(), caddyCheck(t))
	}
	logs, stop, err := spawn(dir, b.String(), caddyBin, "run", "--adapter", "caddyfile", "--config")
	if err != nil {
		return nil, nil, err
	}
	return func() (map[int]vote, error) {
		f, err := os.Open(logs)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		votes := map[int]vote{}
		for _, t := range targets {
			if t.row != ours {
				votes[t.port] = up // until a check fails
			}
		}
		if err := caddyLog(f, votes); err != nil {
			return nil, err
		}
		var list []struct{ Upstream, State string }
		if err := getJSON(fmt.Sprintf("http://127.0.0.1:%d/mcp_health/upstreams", admin), &list); err != nil {
			return nil, err
		}
		for _, u := range list {
			votes[portOf(u.Upstream)] = map[string]vote{"up": up, "degraded": up, "down": down, "unknown": none}[u.State]
		}
		return votes, nil
	}, stop, nil
}

func caddyCheck(t target) string {
	var b strings.Builder
	if t.row == ours {
		fmt.Fprintf(&b, "\t\tlb_policy mcp_health {\n\t\t\tpath %s\n\t\t\tinterval %s\n", t.Path, interval)
		for _, o := range t.options() {
			switch o[0] {
			case "args": // of call
				b.WriteString(" `" + o[1] + "`\n")
				continue
			case "header":
				k, v, _ := strings.Cut(o[1], ": ")
				o[1] = fmt.Sprintf("%s %q", k, v)
			case "fresh":
				o[1] = "on"
			}
			b.WriteString("\t\t\t" + o[0] + " " + o[1])
			if o[0] != "call" {
				b.WriteString("\n")
			}
		}
		b.WriteString("\t\t}\n")
		return b.String()
	}
	c := checkOf(t)
	fmt.Fprintf(&b, "\t\thealth_uri %s\n\t\thealth_interval %s\n\t\thealth_timeout %s\n", t.Path, interval, c.timeout)
	if c.method == http.MethodPost {
		fmt.Fprintf(&b, "\t\thealth_method POST\n\t\thealth_request_body `%s`\n", initialize)
	}
	if c.reads {
		b.WriteString("\t\thealth_body `\"jsonrpc\"`\n")
	}
	if c.host != "" {
		c.header = append(c.header, [2]string{"Host", c.host})
	}
	if len(c.header) > 0 {
		b.WriteString("\t\thealth_headers {\n")
		for _, h := range c.header {
			fmt.Fprintf(&b, "\t\t\t%s %q\n", h[0], h[1])
		}
		b.WriteString("\t\t}\n")
	}
	return b.String()
}

// caddyLog follows the log of Caddy's native check. With its default thresholds of
// one, a host is down from a line that says why until the line "host is up".
func caddyLog(r io.Reader, votes map[int]vote) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var m struct{ Logger, Msg, Host string }
		if json.Unmarshal(lines.Bytes(), &m) != nil || m.Logger != "http.handlers.reverse_proxy.health_checker.active" {
			continue
		}
		switch m.Msg {
		case "host is up":
			votes[portOf(m.Host)] = up
		case "HTTP request failed", "status code out of tolerances", "failed to read response body", "response body failed expectations":
			votes[portOf(m.Host)] = down
		default:
			return fmt.Errorf("caddy's log: %s", lines.Bytes())
		}
	}
	return lines.Err()
}

func startTraefik(dir string, targets []target) (func() (map[int]vote, error), func(), error) {
	web, api := freePort(), freePort()
	type object map[string]any
	routers, services := object{}, object{}
	for _, t := range targets {
		c := checkOf(t)
		check := object{"path": t.Path, "method": c.method, "hostname": c.host, "interval": interval.String(), "timeout": c.timeout}
		if len(c.header) > 0 { // an empty object is an error
			header := map[string]string{}
			for _, h := range c.header {
				header[h[0]] = h[1]
			}
			check["headers"] = header
		}
		routers[t.name] = object{"rule": "Host(`" + t.name + ".test`)", "service": t.name}
		services[t.name] = object{"loadBalancer": object{"servers": []object{{"url": "http://" + t.addr()}}, "healthCheck": check}}
	}
	config, err := json.Marshal(object{"http": object{"routers": routers, "services": services}})
	if err != nil {
		return nil, nil, err
	}
	_, stop, err := spawn(dir, string(config), traefikBin, fmt.Sprintf("--entrypoints.web.address=127.0.0.1:%d", web),
		fmt.Sprintf("--entrypoints.traefik.address=127.0.0.1:%d", api), "--api.insecure=true",
		"--global.checknewversion=false", "--global.sendanonymoususage=false", "--providers.file.filename=")
	if err != nil {
		return nil, nil, err
	}
	return func() (map[int]vote, error) {
		var list []struct{ ServerStatus map[string]string }
		if err := getJSON(fmt.Sprintf("http://127.0.0.1:%d/api/http/services?per_page=10000", api), &list); err != nil {
			return nil, err
		}
		votes := map[int]vote{}
		for _, s := range list {
			for server, status := range s.ServerStatus {
				u, err := url.Parse(server)
				if err != nil {
					return nil, err
				}
				votes[portOf(u.Host)] = map[string]vote{"UP": up, "DOWN": down}[status]
			}
		}
		return votes, nil
	}, stop, nil
}

func startHAProxy(dir string, targets []target) (func() (map[int]vote, error), func(), error) {
	socket := filepath.Join(dir, "stats")
	var b strings.Builder
	fmt.Fprintf(&b, "global\n\tstats socket %s mode 600\ndefaults\n\tmode http\n\ttimeout connect 5s\n\ttimeout client 30s\n\ttimeout server 30s\n", socket)
	for _, t := range targets {
		c := checkOf(t)
		if c.host == "" {
			c.host = t.addr()
		}
		fmt.Fprintf(&b, "backend %s\n\ttimeout check %s\n\toption httpchk\n\thttp-check send meth %s uri %s ver HTTP/1.1 hdr Host %s", t.name, c.timeout, c.method, t.Path, c.host)
		for _, h := range c.header {
			fmt.Fprintf(&b, " hdr %s '%s'", h[0], h[1])
		}
		if c.method == http.MethodPost {
			fmt.Fprintf(&b, " body '%s'", initialize)
		}
		b.WriteString("\n\thttp-check expect status 200-399\n")
		if c.reads {
			b.WriteString("\thttp-check expect string '\"jsonrpc\"'\n")
		}
		fmt.Fprintf(&b, "\tserver %d %s check inter %s\n", t.port, t.addr(), interval)
	}
	_, stop, err := spawn(dir, b.String(), haproxyBin, "-db", "-f")
	if err != nil {
		return nil, nil, err
	}
	return func() (map[int]vote, error) {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			return nil, err
		}
		defer conn.Close()
		if _, err := io.WriteString(conn, "show stat\n"); err != nil {
			return nil, err
		}
		return haproxyStat(conn)
	}, stop, nil
}

// haproxyStat reads `show stat`, where each server is named by its port. A status
// may carry how far it is from the next one: "UP 1/3" is up.
func haproxyStat(r io.Reader) (map[int]vote, error) {
	table, err := csv.NewReader(r).ReadAll()
	if err != nil {
		return nil, err
	}
	votes, column := map[int]vote{}, map[string]int{}
	for i, name := range table[0] {
		column[strings.TrimPrefix(name, "# ")] = i
	}
	for _, line := range table[1:] {
		port, err := strconv.Atoi(line[column["svname"]])
		if err != nil {
			continue // BACKEND
		}
		switch status, _, _ := strings.Cut(line[column["status"]], " "); status {
		case "UP":
			votes[port] = up
		case "DOWN":
			votes[port] = down
		default:
			return nil, fmt.Errorf("haproxy: %s is %q, want UP or DOWN", line[column["pxname"]], line[column["status"]])
		}
	}
	return votes, nil
}

// startProbes runs our command as often as the case says, and once more when the
// scripts are in their last phase.
func startProbes(_ string, targets []target) (func() (map[int]vote, error), func(), error) {
	probeAll := func(times func(target) int) (map[int]vote, error) {
		votes, errs := map[int]vote{}, []error(nil)
		var lock sync.Mutex
		var all sync.WaitGroup
		slots := make(chan struct{}, 4) // two cores, and most of a probe is waiting
		for _, t := range targets {
			all.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				for range times(t) {
					v, err := probe(t)
					lock.Lock()
					votes[t.port], errs = v, append(errs, err)
					lock.Unlock()
				}
			})
		}
		all.Wait()
		return votes, errors.Join(errs...)
	}
	if _, err := probeAll(func(t target) int { return max(t.Probe.Repeat, 1) }); err != nil {
		return nil, nil, err
	}
	return func() (map[int]vote, error) { return probeAll(func(target) int { return 1 }) }, func() {}, nil
}

func probe(t target) (vote, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, probeBin, append(append([]string{"probe", "--json"}, t.Probe.Args...), "http://"+t.addr()+t.Path)...).Output()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return none, err
	}
	var result struct{ Verdict string }
	if err := json.Unmarshal(out, &result); err != nil {
		return none, fmt.Errorf("probe of %s: %w in %q", t.ID, err, out)
	}
	return voteOf(result.Verdict), nil
}

// spawn runs bin with args and the name of a file that holds config. It returns
// where its log is and how to end it.
func spawn(dir, config, bin string, args ...string) (logs string, stop func(), err error) {
	file, logs := filepath.Join(dir, "config.yml"), filepath.Join(dir, "log")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		return "", nil, err
	}
	out, err := os.Create(logs)
	if err != nil {
		return "", nil, err
	}
	defer out.Close()
	if last := len(args) - 1; strings.HasSuffix(args[last], "=") {
		args[last] += file
	} else {
		args = append(args, file)
	}
	cmd := exec.Command(bin, args...)
	cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+dir)
	cmd.Stdout, cmd.Stderr = out, out
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	select {
	case <-ended:
		b, _ := os.ReadFile(logs)
		return "", nil, fmt.Errorf("%s ended: %s", bin, bytes.TrimSpace(b))
	case <-time.After(2 * time.Second):
	}
	return logs, func() { _ = cmd.Process.Kill(); <-ended }, nil
}

func getJSON(url string, to any) error {
	resp, err := http.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: status %d, want 200", url, resp.StatusCode)
	}
	return json.NewDecoder(resp.Body).Decode(to)
}

func portOf(addr string) int {
	_, port, _ := net.SplitHostPort(addr)
	n, _ := strconv.Atoi(port)
	return n
}

func freePort() int {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	defer ln.Close()
	return ln.Addr().(*net.TCPAddr).Port
}
