package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// manyClients is one client of many connections. It keeps them.
func manyClients() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
}

// growth is what n of something add to a Caddy, each, round by round.
type growth struct{ live, resident, goroutines spread }

func (g *growth) add(before, after usage, n int) {
	each := func(from, to float64) float64 { return (to - from) / float64(n) }
	g.live = append(g.live, each(before.live+before.stacks, after.live+after.stacks)/1024)
	g.resident = append(g.resident, each(before.rss, after.rss)/1024)
	g.goroutines = append(g.goroutines, each(before.goroutines, after.goroutines))
}

func (g *growth) cells() []string {
	return []string{g.live.show("%.1f") + " KiB", g.resident.show("%.1f") + " KiB", g.goroutines.show("%.1f")}
}

const idleStreams = 1000

// streamsRow is what streams cost on which nothing comes.
func streamsRow(out *bytes.Buffer) error {
	sides := []struct {
		name, site string
		grown      growth
	}{{name: "native checks", site: nativeSite}, {name: "ours", site: oursSite}}
	for range *rounds {
		for i := range sides {
			if err := idle(sides[i].site, &sides[i].grown); err != nil {
				return err
			}
		}
	}
	lines := [][]string{{thousands(idleStreams) + " idle event streams, each", "live in the proxy", "resident", "goroutines"}}
	for _, s := range sides {
		lines = append(lines, append([]string{s.name}, s.grown.cells()...))
	}
	table(out, lines...)
	return nil
}

func idle(site string, grown *growth) error {
	b, p, listen, err := proxied(site, 2)
	if err != nil {
		return err
	}
	defer b.stop()
	defer p.stop()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	open := func(n int) error {
		for range n {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+listen+"/mcp", nil)
			if err != nil {
				return err
			}
			req.Header.Set("Accept", "text/event-stream")
			resp, err := client.Do(req) // ends with ctx
			if err != nil {
				return err
			}
			if line, err := bufio.NewReader(resp.Body).ReadString('\n'); line != ": hello\n" {
				return fmt.Errorf("stream: %d, %q, %v", resp.StatusCode, line, err)
			}
		}
		return nil
	}
	if err := open(50); err != nil { // what is made once
		return err
	}
	before, err := p.usage()
	if err != nil {
		return err
	}
	if err := open(idleStreams); err != nil {
		return err
	}
	after, err := p.usage()
	grown.add(before, after, idleStreams)
	return err
}

// proxied is a Caddy, metrics on, of one site before n upstreams, which are one backend.
func proxied(site string, n int) (b *backend, p *proc, listen string, err error) {
	if b, err = startBackend("json"); err != nil {
		return nil, nil, "", err
	}
	listen = freeAddr()
	if p, err = startCaddy("\tmetrics\n", fmt.Sprintf(site, listen, b.addrs(n))); err != nil {
		b.stop()
	}
	return b, p, listen, err
}

const manySessions = 10_000

// sessionsRow is what sessions cost that find their owner: nothing is kept of them.
func sessionsRow(out *bytes.Buffer) error {
	sides := []struct {
		name, site string
		grown      growth
	}{{name: "native checks, no affinity", site: nativeSite}, {name: "ours, `sticky`", site: oursSite}}
	for range *rounds {
		for i := range sides {
			if err := sessions(sides[i].site, &sides[i].grown); err != nil {
				return err
			}
		}
	}
	lines := [][]string{{thousands(manySessions) + " open sessions, two calls each", "live in the proxy, in all", "goroutines"}}
	for _, s := range sides {
		lines = append(lines, []string{s.name, s.grown.live.show("%+.0f") + " KiB", s.grown.goroutines.show("%+.0f")})
	}
	table(out, lines...)
	return nil
}

// sessions counts what they add all together.
func sessions(site string, grown *growth) error {
	b, p, listen, err := proxied(site, 2)
	if err != nil {
		return err
	}
	defer b.stop()
	defer p.stop()
	client := manyClients()
	defer client.CloseIdleConnections()
	run := func(n int) error {
		for range n {
			if _, err := session(client, listen); err != nil {
				return err
			}
		}
		return nil
	}
	if err := run(200); err != nil {
		return err
	}
	before, err := p.usage()
	if err != nil {
		return err
	}
	if err := run(manySessions); err != nil {
		return err
	}
	after, err := p.usage()
	grown.add(before, after, 1)
	return err
}

// session opens one, calls in it, and returns its id.
func session(c *http.Client, listen string) (id string, err error) {
	for _, m := range []string{`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"bench","version":"1"}}}`, body} {
		req, err := http.NewRequest(http.MethodPost, "http://"+listen+"/mcp", strings.NewReader(m))
		if err != nil {
			return "", err
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "application/json, text/event-stream")
		if id != "" {
			req.Header.Set("Mcp-Session-Id", id)
			req.Header.Set("Mcp-Method", "tools/call")
		}
		resp, err := c.Do(req)
		if err != nil {
			return "", err
		}
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if id == "" {
			id = resp.Header.Get("Mcp-Session-Id")
		}
		if resp.StatusCode != 200 || id == "" || !bytes.Contains(b, []byte(`"result"`)) {
			return "", fmt.Errorf("session: %d %s", resp.StatusCode, b)
		}
	}
	return id, nil
}

const manyHeld = 10_000

// heldSide is one of those that hold calls until an upstream is back.
type heldSide struct {
	name, site  string
	grown       growth
	cpu         spread // of one core, while they wait
	first, last spread // seconds from the server's return to an answer
	failed      spread
}

// heldRow is what requests cost that wait for an upstream, and how they go on.
func heldRow(out *bytes.Buffer) error {
	sides := []*heldSide{
		{name: "native, `lb_try_duration 120s`", site: "http://%s {\n\treverse_proxy /mcp* %s {\n\t\thealth_uri /health\n\t\thealth_interval 10s\n\t\tlb_try_duration 120s\n\t}\n}\n"},
		{name: "ours, `hold 120s`", site: "http://%s {\n\tmcp_proxy /mcp* %s {\n\t\thold 120s\n\t\thold_max " + strconv.Itoa(manyHeld) + "\n\t}\n}\n"},
	}
	for range *rounds {
		for _, s := range sides {
			if err := s.round(); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
		}
	}
	lines := [][]string{{thousands(manyHeld) + " held calls of 1 KiB", "each: live in the proxy, connection to the client included", "resident", "goroutines", "of one core while they wait", "the server back, first answer after", "last after", "failed"}}
	for _, s := range sides {
		lines = append(lines, slices.Concat([]string{s.name}, s.grown.cells(),
			[]string{s.cpu.show("%.0f %%"), s.first.show("%.1f") + " s", s.last.show("%.1f") + " s", s.failed.show("%.0f")}))
	}
	table(out, lines...)
	return nil
}

// round has all call while no server is up, and the server come back.
func (s *heldSide) round() error {
	b, p, listen, err := proxied(s.site, 1)
	if err != nil {
		return err
	}
	defer b.stop()
	defer p.stop()
	time.Sleep(time.Second)
	if err := b.cmd.Process.Kill(); err != nil {
		return err
	}
	time.Sleep(2 * time.Second)
	before, err := p.usage()
	if err != nil {
		return err
	}
	calls := callMany(listen)
	var after usage
	for range 100 { // until all are held
		if after, err = p.usage(); err != nil {
			return err
		}
		if after.goroutines-before.goroutines > 0.99*manyHeld {
			break
		}
		time.Sleep(200 * time.Millisecond)
	}
	began, err := p.cpuTime()
	if err != nil {
		return err
	}
	time.Sleep(heldFor)
	used, err := p.cpuTime()
	if err != nil {
		return err
	}
	if n := calls.done.Load(); n > 0 {
		return fmt.Errorf("%d requests came back though no upstream was up", n)
	}
	back := time.Now()
	if err := b.restart(); err != nil {
		return err
	}
	calls.Wait()
	s.grown.add(before, after, manyHeld)
	s.cpu = append(s.cpu, (used-began).Seconds()/heldFor.Seconds()*100)
	s.first = append(s.first, time.Unix(0, calls.first.Load()).Sub(back).Seconds())
	s.last = append(s.last, time.Unix(0, calls.last.Load()).Sub(back).Seconds())
	s.failed = append(s.failed, float64(calls.failed.Load()))
	return nil
}

// heldFor is how long the processor time of waiting is counted.
const heldFor = 5 * time.Second

// heldCalls are under way, each on a connection of its own.
type heldCalls struct {
	sync.WaitGroup
	done, failed atomic.Int64
	first, last  atomic.Int64 // answer, in Unix nanoseconds
}

func callMany(listen string) *heldCalls {
	c := new(heldCalls)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	for range manyHeld {
		c.Go(func() {
			if err := call(client, listen, header); err != nil {
				c.failed.Add(1)
			}
			now := time.Now().UnixNano()
			c.first.CompareAndSwap(0, now)
			c.last.Store(now)
			c.done.Add(1)
		})
		time.Sleep(200 * time.Microsecond)
	}
	return c
}

// asked is a Caddy whose probes are counted.
type asked struct {
	name, option string
	calls        bool // whether clients call through it
	backend      *backend
	proxy        *proc
	listen       string
	probes, seen spread // of each upstream, and calls of both, per minute
}

// trafficRow is how often a server is asked that answers calls all the time.
func trafficRow(out *bytes.Buffer) error {
	all := []*asked{{name: "no calls"}, {name: "under calls", calls: true}, {name: "under calls, `passive off`", option: "\t\tcheck_passive off\n", calls: true}}
	for _, a := range all {
		stop, err := a.start()
		if err != nil {
			return err
		}
		defer stop()
	}
	time.Sleep(20 * time.Second)
	for i := range *rounds + 1 { // the first sets the counts back
		for _, a := range all {
			c, err := a.backend.counts()
			if err != nil {
				return err
			}
			if i > 0 {
				a.probes, a.seen = append(a.probes, float64(c.Probes)/2), append(a.seen, float64(c.Requests))
			}
		}
		if i < *rounds {
			time.Sleep(time.Minute)
		}
	}
	lines := [][]string{{"two upstreams", "probes per upstream and minute", "calls per minute"}}
	for _, a := range all {
		lines = append(lines, []string{a.name, a.probes.show("%.1f"), a.seen.show("%.0f")})
	}
	table(out, lines...)
	return nil
}

// start starts it, and its clients if any.
func (a *asked) start() (stop func(), err error) {
	site := "http://%s {\n\tmcp_proxy /mcp* %s {\n" + a.option + "\t}\n}\n"
	if a.backend, a.proxy, a.listen, err = proxied(site, 2); err != nil {
		return nil, err
	}
	client := manyClients()
	end := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for a.calls {
				select {
				case <-end:
					return
				case <-time.After(20 * time.Millisecond):
				}
				_ = call(client, a.listen, header)
			}
		})
	}
	return func() {
		close(end)
		wg.Wait()
		client.CloseIdleConnections()
		a.proxy.stop()
		a.backend.stop()
	}, nil
}
