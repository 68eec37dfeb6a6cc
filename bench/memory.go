package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// manyClients is one client of many connections. It keeps them.
func manyClients() *http.Client {
	return &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
}

// grown is what n of something add to a Caddy, in KiB each.
func grown(before, after usage, n int) string {
	live := (after.live + after.stacks - before.live - before.stacks) / float64(n) / 1024
	return fmt.Sprintf("%.1f KiB live, %.1f KiB resident, %.1f goroutines", live, (after.rss-before.rss)/float64(n)/1024, (after.goroutines-before.goroutines)/float64(n))
}

const idleStreams = 1000

// streamsRow is what streams cost on which nothing comes.
func streamsRow(out *bytes.Buffer) error {
	lines := [][]string{{fmt.Sprintf("%s idle event streams, each", thousands(idleStreams)), "memory of the proxy"}}
	for _, s := range []struct{ name, site string }{{"native checks", nativeSite}, {"ours", oursSite}} {
		text, err := idle(s.site)
		if err != nil {
			return err
		}
		lines = append(lines, []string{s.name, text})
	}
	table(out, lines...)
	return nil
}

func idle(site string) (string, error) {
	b, err := startBackend("json")
	if err != nil {
		return "", err
	}
	defer b.stop()
	listen := freeAddr()
	p, err := startCaddy("\tmetrics\n", fmt.Sprintf(site, listen, b.addrs(2)))
	if err != nil {
		return "", err
	}
	defer p.stop()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	open := func(n int) error {
		for range n {
			req, err := http.NewRequest(http.MethodGet, "http://"+listen+"/mcp", nil)
			if err != nil {
				return err
			}
			req.Header.Set("Accept", "text/event-stream")
			resp, err := client.Do(req) // closed with the process
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
		return "", err
	}
	before, err := p.usage()
	if err != nil {
		return "", err
	}
	if err := open(idleStreams); err != nil {
		return "", err
	}
	after, err := p.usage()
	return grown(before, after, idleStreams), err
}

const manySessions = 10_000

// sessionsRow is what sessions cost that find their owner: nothing is kept of them.
func sessionsRow(out *bytes.Buffer) error {
	b, err := startBackend("json")
	if err != nil {
		return err
	}
	defer b.stop()
	listen := freeAddr()
	p, err := startCaddy("\tmetrics\n", fmt.Sprintf(oursSite, listen, b.addrs(2)))
	if err != nil {
		return err
	}
	defer p.stop()
	client := manyClients()
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
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%s open sessions with `sticky`, two calls each: %+.0f KiB in all, %+.2f KiB per session, live in the proxy; %+.0f goroutines.\n",
		thousands(manySessions), (after.live-before.live)/1024, (after.live-before.live)/1024/manySessions, after.goroutines-before.goroutines)
	return nil
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

// heldRow is what requests cost that wait for an upstream, and how they go on.
func heldRow(out *bytes.Buffer) error {
	b, err := startBackend("json")
	if err != nil {
		return err
	}
	defer b.stop()
	listen := freeAddr()
	p, err := startCaddy("\tmetrics\n", fmt.Sprintf("http://%s {\n\tmcp_proxy /mcp* %s {\n\t\thold 120s\n\t\thold_max %d\n\t}\n}\n", listen, b.addr(1), manyHeld))
	if err != nil {
		return err
	}
	defer p.stop()
	time.Sleep(time.Second)
	if err := b.cmd.Process.Kill(); err != nil {
		return err
	}
	time.Sleep(2 * time.Second)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: manyHeld}}
	defer client.CloseIdleConnections()
	before, err := p.usage()
	if err != nil {
		return err
	}
	var done, failed atomic.Int64
	var first, last atomic.Int64 // Unix nanoseconds
	var wg sync.WaitGroup
	for range manyHeld {
		wg.Go(func() {
			if err := call(client, listen, header); err != nil {
				failed.Add(1)
			}
			now := time.Now().UnixNano()
			first.CompareAndSwap(0, now)
			last.Store(now)
			done.Add(1)
		})
		time.Sleep(200 * time.Microsecond)
	}
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
	if n := done.Load(); n > 0 {
		return fmt.Errorf("%d requests came back though no upstream was up", n)
	}
	back := time.Now()
	if err := b.restart(); err != nil {
		return err
	}
	wg.Wait()
	fmt.Fprintf(out, "%s held calls of 1 KiB (`hold_max %d`), each: %s, connection to the client included. When the server was back, the first was answered after %.2f s and the last after %.2f s; %d failed.\n",
		thousands(manyHeld), manyHeld, grown(before, after, manyHeld),
		time.Unix(0, first.Load()).Sub(back).Seconds(), time.Unix(0, last.Load()).Sub(back).Seconds(), failed.Load())
	return nil
}

// trafficRow is how often a server is asked that answers calls all the time.
func trafficRow(out *bytes.Buffer) error {
	lines := [][]string{{"two upstreams, 60 s", "probes per upstream and minute", "calls"}}
	for _, t := range []struct {
		name, option string
		load         bool
	}{{"no calls", "", false}, {"under calls", "", true}, {"under calls, `passive off`", "\t\tcheck_passive off\n", true}} {
		b, err := startBackend("json")
		if err != nil {
			return err
		}
		listen := freeAddr()
		p, err := startCaddy("", fmt.Sprintf("http://%s {\n\tmcp_proxy /mcp* %s {\n%s\t}\n}\n", listen, b.addrs(2), t.option))
		if err != nil {
			b.stop()
			return err
		}
		probes, calls, err := minute(b, listen, t.load)
		p.stop()
		b.stop()
		if err != nil {
			return err
		}
		lines = append(lines, []string{t.name, fmt.Sprintf("%.1f", float64(probes)/2), thousands(int(calls))})
	}
	table(out, lines...)
	return nil
}

// minute makes load, if any, and counts what one minute brings after a first.
func minute(b *backend, listen string, load bool) (probes, calls int64, err error) {
	client := manyClients()
	defer client.CloseIdleConnections()
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for load {
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond):
				}
				_ = call(client, listen, header)
			}
		})
	}
	defer wg.Wait()
	defer close(stop)
	time.Sleep(20 * time.Second)
	if _, err = b.counts(); err != nil {
		return 0, 0, err
	}
	time.Sleep(time.Minute)
	c, err := b.counts()
	return c.Probes, c.Requests, err
}
