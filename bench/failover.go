package main

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// failoverClients call failoverEach apart, each with a patience of callTimeout.
	failoverClients = 20
	failoverEach    = 100 * time.Millisecond
	callTimeout     = 5 * time.Second
)

// fault is what happens to the first backend of a proxy under load.
type fault struct {
	name     string
	replicas int
	watch    time.Duration // how long failures are waited for
	happen   func(*backend) error
	undo     func(*backend) error
}

func (b *backend) signal(s syscall.Signal) error { return b.cmd.Process.Signal(s) }

var faults = []fault{
	{"killed", 2, 15 * time.Second, func(b *backend) error { return b.signal(syscall.SIGKILL) }, nil},
	{"hangs (SIGSTOP)", 2, 30 * time.Second, func(b *backend) error { return b.signal(syscall.SIGSTOP) }, func(b *backend) error { return b.signal(syscall.SIGCONT) }},
	{"answers 200 with a web page", 2, 25 * time.Second, func(b *backend) error { return b.setMode("page") }, nil},
	{"its route is lost: bare 404", 2, 25 * time.Second, func(b *backend) error { return b.setMode("absent") }, nil},
	{"the only one is killed, and back after 2 s", 1, 15 * time.Second, func(b *backend) error { return recreate(b, syscall.SIGKILL) }, nil},
	{"the only one is stopped (SIGTERM), and back after 2 s", 1, 15 * time.Second, func(b *backend) error { return recreate(b, syscall.SIGTERM) }, nil},
}

// recreate ends a server and has it back after 2 s, as a deploy does.
func recreate(b *backend, how syscall.Signal) error {
	if err := b.signal(how); err != nil {
		return err
	}
	time.Sleep(2 * time.Second)
	return b.restart()
}

// contender is one proxy.
type contender struct {
	name  string
	start func(listen string, up []string) (*proc, error)
}

var contenders = []contender{
	{"Caddy, native checks", func(listen string, up []string) (*proc, error) {
		return startCaddy("", fmt.Sprintf("http://%s {\n\treverse_proxy /mcp* %s {\n\t\thealth_uri /health\n\t\thealth_interval 10s\n\t\thealth_fails 2\n\t\tfail_duration 10s\n\t\tlb_try_duration 5s\n\t}\n}\n", listen, strings.Join(up, " ")))
	}},
	{"HAProxy", startHAProxy},
	{"Traefik, native checks", func(listen string, up []string) (*proc, error) { return startTraefik(listen, up, false) }},
	{"ours, in Traefik", func(listen string, up []string) (*proc, error) { return startTraefik(listen, up, true) }},
	{"ours, in Caddy", func(listen string, up []string) (*proc, error) {
		return startCaddy("", fmt.Sprintf("http://%s {\n\tmcp_proxy /mcp* %s\n}\n", listen, strings.Join(up, " ")))
	}},
	{"ours, in Caddy, a connection per call", func(listen string, up []string) (*proc, error) {
		return startCaddy("", fmt.Sprintf("http://%s {\n\tmcp_proxy /mcp* %s {\n\t\ttransport http {\n\t\t\tkeepalive off\n\t\t}\n\t}\n}\n", listen, strings.Join(up, " ")))
	}},
}

// haproxyConfig checks as people do who know their servers speak MCP: by initialize.
const haproxyConfig = `
global
	maxconn 2000
defaults
	mode http
	timeout connect 2s
	timeout client 60s
	timeout server 60s
	timeout check 5s
	retries 3
	option redispatch
	option httpchk
	http-check send meth POST uri /mcp ver HTTP/1.1 hdr Host localhost hdr Content-Type application/json hdr Accept "application/json, text/event-stream" body "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"initialize\",\"params\":{\"protocolVersion\":\"2025-11-25\",\"capabilities\":{},\"clientInfo\":{\"name\":\"health\",\"version\":\"1.0\"}}}"
	http-check expect status 200-399
	http-check expect string "\"jsonrpc\""
	default-server inter 10s fastinter 1s fall 2 rise 1 check
listen mcp
	bind %s
`

func startHAProxy(listen string, up []string) (*proc, error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, err
	}
	config := fmt.Sprintf(haproxyConfig, listen)
	for i, addr := range up {
		config += fmt.Sprintf("\tserver s%d %s\n", i, addr)
	}
	file := filepath.Join(dir, "haproxy.cfg")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		return nil, err
	}
	p := &proc{dir: dir, cmd: exec.Command("haproxy", "-db", "-q", "-f", file)}
	return p, p.start("http://" + listen + " {")
}

// loss is what one fault cost in one round.
type loss struct {
	failed, total int
	underWay      int           // failed with our word that the server had been given them
	last          time.Duration // from the fault until the last call began that failed
}

// failoverRow is what clients lose when a server goes: all proxies at the same time,
// each with servers of its own.
func failoverRow(out *bytes.Buffer) error {
	var with []contender
	head := []string{"one of two servers …"}
	for _, c := range contenders {
		if _, err := exec.LookPath("haproxy"); c.name == "HAProxy" && err != nil {
			continue
		}
		if _, err := os.Stat(*traefikBin); strings.Contains(c.name, "Traefik") && err != nil {
			continue
		}
		with, head = append(with, c), append(head, c.name)
	}
	lines := [][]string{head}
	for _, f := range faults {
		failed, underWay, last := make([]spread, len(with)), make([]spread, len(with)), make([]spread, len(with))
		for round := range *rounds {
			all, err := fail(f, with, round)
			if err != nil {
				return fmt.Errorf("%s: %w", f.name, err)
			}
			for i, l := range all {
				failed[i], underWay[i] = append(failed[i], float64(l.failed)), append(underWay[i], float64(l.underWay))
				last[i] = append(last[i], l.last.Seconds())
			}
		}
		cells := []string{f.name}
		for i := range with {
			cell := failed[i].show("%.0f") + " failed"
			if slices.Equal(failed[i], underWay[i]) && slices.Max(failed[i]) > 0 {
				cell += ", all of them under way"
			}
			if failed[i].median() > 0 {
				cell += ", the last after " + last[i].show("%.1f") + " s"
			}
			cells = append(cells, cell)
		}
		lines = append(lines, cells)
	}
	table(out, lines...)
	fmt.Fprintf(out, "\n%d clients, each a call every %v, which fails without a JSON-RPC result within %v. In each round the fault comes at another moment of the interval. All check every 10 s and want two failures; native asks `/health`, with `fail_duration 10s` and `lb_try_duration 5s`; HAProxy asks by `initialize` and reads the answer, with `redispatch`, `retries 3` and `fastinter 1s`; Traefik asks `/health`, takes one failure (and asks every second after it), with `retry` and a connection per call, as ours in Traefik has. HAProxy %s, Traefik %s.\n",
		failoverClients, failoverEach, callTimeout, haproxyVersion(), traefikVersion())
	return nil
}

// fail has one fault happen to all at once.
func fail(f fault, with []contender, round int) ([]loss, error) {
	losses := make([]loss, len(with))
	errs := make([]error, len(with))
	var wg sync.WaitGroup
	for i, c := range with {
		wg.Go(func() { losses[i], errs[i] = failOne(f, c, round) })
	}
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			return nil, fmt.Errorf("%s: %w", with[i].name, err)
		}
	}
	return losses, nil
}

func failOne(f fault, c contender, round int) (loss, error) {
	var up []string
	var first *backend
	for i := range f.replicas {
		b, err := startBackend("json")
		if err != nil {
			return loss{}, err
		}
		defer b.stop()
		if i == 0 {
			first = b
		}
		up = append(up, b.addr(1))
	}
	listen := freeAddr()
	p, err := c.start(listen, up)
	if err != nil {
		return loss{}, err
	}
	defer p.stop()
	time.Sleep(3 * time.Second) // the first checks

	var mu sync.Mutex
	var l loss
	var at time.Time
	stop := make(chan struct{})
	var wg sync.WaitGroup
	client := &http.Client{Timeout: callTimeout, Transport: &http.Transport{MaxIdleConnsPerHost: failoverClients}}
	defer client.CloseIdleConnections()
	for i := range failoverClients {
		wg.Go(func() {
			time.Sleep(failoverEach * time.Duration(i) / failoverClients)
			for {
				start := time.Now()
				err := call(client, listen, header)
				mu.Lock()
				l.total++
				if err != nil {
					l.failed++
					if strings.Contains(err.Error(), "may have been executed") {
						l.underWay++
					}
					l.last = max(l.last, start.Sub(at))
				}
				mu.Unlock()
				select {
				case <-stop:
					return
				case <-time.After(failoverEach - time.Since(start)):
				}
			}
		})
	}
	// Each round at another moment of the interval, so that no proxy's next check is always near.
	time.Sleep(2*time.Second + probeInterval*time.Duration(round)/time.Duration(*rounds))
	mu.Lock()
	before := l.failed
	at = time.Now()
	mu.Unlock()
	if before > 0 {
		err = fmt.Errorf("%d of %d calls failed before anything had happened", before, l.total)
	} else {
		err = f.happen(first)
		time.Sleep(f.watch - time.Since(at))
	}
	close(stop)
	wg.Wait()
	if f.undo != nil {
		_ = f.undo(first)
	}
	return l, err
}
