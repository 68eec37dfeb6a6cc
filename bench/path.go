package main

import (
	"bytes"
	"fmt"
	"net/http"
	"time"
)

// side is one of those that are compared.
type side struct {
	name, addr string
	header     map[string]string
	perSecond  spread
	p99        spread // ms
	cpu        spread // of the proxy, µs per request
	failed     int
}

// native, plain and ours are the same proxy in three ways: without any check, with
// Caddy's own, and with everything of ours that sits in the path (metrics come with the
// guard).
const (
	plainSite = `http://%s {
	reverse_proxy /mcp* %s
}
`
	nativeSite = `http://%s {
	reverse_proxy /mcp* %s {
		health_uri /health
		health_interval 10s
	}
}
`
	oursSite = `http://%s {
	mcp_guard /mcp* {
		sticky
	}
	reverse_proxy /mcp* %s {
		lb_policy mcp_health
		lb_retries 3
		lb_try_interval 20ms
	}
}
`
)

// pathRow is the request path: what a call costs through each.
func pathRow(out *bytes.Buffer) error {
	head := []string{"answer to a POST of 1 KiB", "no checks, req/s", "native checks, req/s", "ours, req/s", "ours ÷ native", "ours ÷ no checks", "p99, ours ÷ native", "CPU of the proxy per call: native, ours", "ours ÷ native"}
	lines := [][]string{head}
	for _, k := range []kind{
		{name: "small JSON", backend: "json", load: wrk},
		{name: "small JSON, in a session", backend: "json", load: wrk, session: true},
		{name: "small JSON, by a Go client that checks each answer", backend: "json", load: goLoad},
		{name: "small JSON, as one event", backend: "sse", load: wrk},
		{name: "JSON of 1 MiB", backend: "large", load: wrk},
		{name: fmt.Sprintf("stream of %d events", events), backend: "events", load: wrk},
		{name: "small JSON after 20 ms of work", backend: "slow", load: wrk},
	} {
		sides, err := comparePath(k)
		if err != nil {
			return err
		}
		plain, native, ours := sides[0], sides[1], sides[2]
		cells := []string{k.name, plain.perSecond.show("%.0f"), native.perSecond.show("%.0f"), ours.perSecond.show("%.0f"),
			ours.perSecond.over(native.perSecond).show("%.3f"), ours.perSecond.over(plain.perSecond).show("%.3f"), ours.p99.over(native.p99).show("%.3f"),
			fmt.Sprintf("%.0f µs, %.0f µs", native.cpu.median(), ours.cpu.median()), ours.cpu.over(native.cpu).show("%.3f")}
		lines = append(lines, cells)
		for _, s := range sides {
			if s.failed > 0 {
				return fmt.Errorf("%s, %s: %d requests failed", k.name, s.name, s.failed)
			}
		}
	}
	table(out, lines...)
	return nil
}

// kind is what is called, and how.
type kind struct {
	name, backend string
	load          load
	session       bool // one for all clients of a side
}

func comparePath(k kind) ([]*side, error) {
	b, err := startBackend(k.backend)
	if err != nil {
		return nil, err
	}
	defer b.stop()
	sides := []*side{{name: "no checks", addr: freeAddr()}, {name: "native checks", addr: freeAddr()}, {name: "ours", addr: freeAddr()}}
	up := b.addrs(2)
	var sites string
	for i, site := range []string{plainSite, nativeSite, oursSite} {
		sites += fmt.Sprintf(site, sides[i].addr, up)
	}
	c, err := startCaddy("\tmetrics\n", sites)
	if err != nil {
		return nil, err
	}
	defer c.stop()
	for _, s := range sides {
		s.header = header
		if k.session {
			id, err := session(http.DefaultClient, s.addr)
			if err != nil {
				return nil, err
			}
			s.header = inSession(id)
		}
		if _, err := k.load(s.addr, s.header, *clients, time.Second); err != nil { // warm up
			return nil, err
		}
	}
	for i := range *rounds {
		for j := range sides {
			s := sides[(i+j)%len(sides)]
			before, err := c.cpuTime()
			if err != nil {
				return nil, err
			}
			r, err := k.load(s.addr, s.header, *clients, *each)
			if err != nil {
				return nil, err
			}
			after, err := c.cpuTime()
			if err != nil {
				return nil, err
			}
			s.cpu = append(s.cpu, float64((after-before).Microseconds())/max(r.perSecond*each.Seconds(), 1))
			s.perSecond, s.p99 = append(s.perSecond, r.perSecond), append(s.p99, float64(r.p99)/1e6)
			s.failed += r.failed
		}
	}
	return sides, nil
}
