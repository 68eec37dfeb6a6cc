package main

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// probed is a Caddy that does nothing but check its upstreams.
type probed struct {
	name    string
	backend *backend
	proc    *proc

	began time.Time // a round
	used  time.Duration

	cpu      spread // percent of one core
	probes   spread // per second
	dials    spread // per second
	bytes    spread // per probe, both directions
	before   usage  // of the same Caddy with one upstream
	settled  usage
	openNow  int64 // connections at the backend
	upstream int
}

// probingRow is what checking 100, 1,000 and 10,000 upstreams costs. The Caddys run
// at the same time, each with a backend of its own: processor time is counted per
// process.
func probingRow(out *bytes.Buffer) error {
	lines := [][]string{{"upstreams, every 10 s", "checks", "of one core", "per probe", "memory per upstream: live, resident", "goroutines", "connections held", "probes/s", "dials/s", "bytes per probe"}}
	for size := range strings.SplitSeq(*sizes, ",") {
		n, err := strconv.Atoi(size)
		if err != nil {
			return fmt.Errorf("-upstreams %q: %w", size, err)
		}
		all, err := compareProbing(n)
		if err != nil {
			return err
		}
		for _, p := range all {
			rate := p.probes.median()
			lines = append(lines, []string{thousands(n), p.name, p.cpu.show("%.1f %%"),
				fmt.Sprintf("%.0f µs", p.cpu.median()*1e4/rate),
				fmt.Sprintf("%.1f KiB, %.1f KiB", per(p, func(u usage) float64 { return u.live + u.stacks }), per(p, func(u usage) float64 { return u.rss })),
				fmt.Sprintf("%+.0f", p.settled.goroutines-p.before.goroutines), thousands(int(p.openNow)),
				fmt.Sprintf("%.0f", rate), fmt.Sprintf("%.0f", p.dials.median()), fmt.Sprintf("%.0f", p.bytes.median())})
		}
	}
	table(out, lines...)
	return nil
}

// per is what one upstream adds of something, in KiB.
func per(p *probed, of func(usage) float64) float64 {
	return (of(p.settled) - of(p.before)) / float64(p.upstream-1) / 1024
}

func thousands(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// probeInterval is that of all of them.
const probeInterval = 10 * time.Second

func compareProbing(n int) (all []*probed, err error) {
	for _, p := range []*probed{{name: "native"}, {name: "ours"}, {name: "ours, `watch off`"}} {
		p.upstream = n
		if err := p.start(n); err != nil {
			return nil, err
		}
		defer p.stop()
		all = append(all, p)
	}
	time.Sleep(2*probeInterval + time.Second)
	for range *rounds {
		for _, p := range all {
			if err := p.begin(); err != nil {
				return nil, err
			}
		}
		time.Sleep(probeInterval)
		for _, p := range all {
			if err := p.end(); err != nil {
				return nil, err
			}
		}
	}
	for range 5 { // the moment counts at which the fewest probes run
		for _, p := range all {
			u, err := p.proc.usage()
			if err != nil {
				return nil, err
			}
			if p.settled.live == 0 || u.live+u.stacks < p.settled.live+p.settled.stacks {
				p.settled = u
			}
		}
	}
	return all, nil
}

func (p *probed) site(n int) string {
	switch p.name {
	case "native":
		return fmt.Sprintf("http://%s {\n\treverse_proxy /mcp* %s {\n\t\thealth_uri /health\n\t\thealth_interval 10s\n\t}\n}\n", freeAddr(), p.backend.addrs(n))
	case "ours":
		return fmt.Sprintf("http://%s {\n\tmcp_proxy /mcp* %s\n}\n", freeAddr(), p.backend.addrs(n))
	}
	return fmt.Sprintf("http://%s {\n\tmcp_proxy /mcp* %s {\n\t\tcheck_watch off\n\t}\n}\n", freeAddr(), p.backend.addrs(n))
}

// start measures the Caddy with one upstream, and starts it with n.
func (p *probed) start(n int) (err error) {
	if p.backend, err = startBackend("json"); err != nil {
		return err
	}
	small, err := startCaddy("", p.site(1))
	if err != nil {
		return err
	}
	time.Sleep(2 * time.Second)
	p.before, err = small.usage()
	small.stop()
	if err != nil {
		return err
	}
	p.proc, err = startCaddy("", p.site(n))
	return err
}

func (p *probed) stop() {
	if p.proc != nil {
		p.proc.stop()
	}
	p.backend.stop()
}

// begin and end are one round.
func (p *probed) begin() (err error) {
	if _, err = p.backend.counts(); err != nil {
		return err
	}
	p.began = time.Now()
	p.used, err = p.proc.cpuTime()
	return err
}

func (p *probed) end() error {
	used, err := p.proc.cpuTime()
	if err != nil {
		return err
	}
	seconds := time.Since(p.began).Seconds()
	c, err := p.backend.counts()
	if err != nil {
		return err
	}
	p.cpu = append(p.cpu, (used-p.used).Seconds()/seconds*100)
	p.probes = append(p.probes, float64(c.Probes)/seconds)
	p.dials = append(p.dials, float64(c.Conns)/seconds)
	p.bytes = append(p.bytes, float64(c.BytesIn+c.BytesOut)/float64(max(c.Probes, 1)))
	p.openNow = c.Open
	return nil
}

// besideClients call besidePause apart: few enough to leave the cores idle for the most
// part, so that what a call waits for are the probes.
const (
	besideClients = 8
	besidePause   = 20 * time.Millisecond
)

// besideRow is what calls notice of the probing: the same calls through Caddys that check
// nothing else, and the most upstreams besides.
func besideRow(out *bytes.Buffer) error {
	all := strings.Split(*sizes, ",")
	n, err := strconv.Atoi(all[len(all)-1])
	if err != nil {
		return fmt.Errorf("-upstreams %q: %w", *sizes, err)
	}
	called, err := startBackend("json")
	if err != nil {
		return err
	}
	defer called.stop()
	lines := [][]string{{"the same Caddy checks besides", "checks", "half of the calls within", "99 of 100 within"}}
	for _, p := range []*probed{{name: "native"}, {name: "ours"}} {
		many := fmt.Sprintf("%s upstreams", thousands(n))
		for _, more := range []string{"nothing", many} {
			p50, p99, err := p.callsBeside(called, n, more == many)
			if err != nil {
				return err
			}
			lines = append(lines, []string{more, p.name, p50.show("%.2f") + " ms", p99.show("%.2f") + " ms"})
		}
	}
	table(out, lines...)
	return nil
}

func (p *probed) callsBeside(called *backend, n int, many bool) (p50, p99 spread, err error) {
	if p.backend, err = startBackend("json"); err != nil {
		return nil, nil, err
	}
	defer p.stop()
	listen := freeAddr()
	sites := fmt.Sprintf(map[string]string{"native": nativeSite, "ours": oursSite}[p.name], listen, called.addrs(2))
	if many {
		sites += p.site(n)
	}
	if p.proc, err = startCaddy("", sites); err != nil {
		return nil, nil, err
	}
	time.Sleep(2*probeInterval + time.Second)
	for range *rounds {
		r, err := paced(listen, header, besideClients, *each, besidePause)
		if err != nil || r.failed > 0 {
			return nil, nil, fmt.Errorf("%d calls failed: %v", r.failed, err)
		}
		p50, p99 = append(p50, float64(r.p50)/1e6), append(p99, float64(r.p99)/1e6)
	}
	p.proc.stop()
	p.proc = nil
	return p50, p99, nil
}
