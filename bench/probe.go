package main

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"syscall"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	probesEach     = 3000 // per round, a second's worth or so
	probeUpstreams = 1000
)

// probeRow is what one probe costs, one after the other without a pause, so that all
// that they need is in the processor's caches: over a plain line, over net/http's
// transport, and what is the least for any check that dials, a small question and its
// answer over a connection of its own.
func probeRow(out *bytes.Buffer) error {
	b, err := startBackend("json")
	if err != nil {
		return err
	}
	defer b.stop()
	ways := []struct {
		name        string
		ask         func(i int) error
		user, sys   spread // µs
		bytes, pile spread // allocated, and in how many pieces
	}{
		{name: "dial, write, read, close", ask: func(i int) error { return bare(b.addr(i + 1)) }},
		{name: "a probe, plain HTTP/1.1", ask: askOver(b, mcphealth.NewPlainLine)},
		{name: "a probe, by `http.Transport`", ask: askOver(b, mcphealth.NewLine)},
	}
	for range *rounds {
		for w := range ways {
			way := &ways[w]
			before, memory := selfUsage()
			for i := range probesEach {
				if err := way.ask(i % probeUpstreams); err != nil {
					return fmt.Errorf("%s: %w", way.name, err)
				}
			}
			after, memory2 := selfUsage()
			per := func(a, b syscall.Timeval) float64 {
				return float64(time.Duration(b.Nano()-a.Nano()).Microseconds()) / probesEach
			}
			way.user, way.sys = append(way.user, per(before.Utime, after.Utime)), append(way.sys, per(before.Stime, after.Stime))
			way.bytes = append(way.bytes, float64(memory2.TotalAlloc-memory.TotalAlloc)/probesEach)
			way.pile = append(way.pile, float64(memory2.Mallocs-memory.Mallocs)/probesEach)
		}
	}
	lines := [][]string{{"", "our processor time", "the kernel's", "allocated"}}
	for _, way := range ways {
		lines = append(lines, []string{way.name, way.user.show("%.0f") + " µs", way.sys.show("%.0f") + " µs",
			fmt.Sprintf("%.1f KiB in %.0f", way.bytes.median()/1024, way.pile.median())})
	}
	table(out, lines...)
	return nil
}

// askOver probes each upstream over a line of its own.
func askOver(b *backend, newLine func(*http.Transport) *mcphealth.Line) func(i int) error {
	probers := make([]*mcphealth.Prober, probeUpstreams)
	return func(i int) (err error) {
		if probers[i] == nil {
			if probers[i], err = mcphealth.NewProber(mcphealth.Target{URL: "http://" + b.addr(i+1) + "/mcp"}, newLine(&http.Transport{})); err != nil {
				return err
			}
		}
		if r := probers[i].Probe(context.Background()); r.Verdict != mcphealth.Ready {
			return fmt.Errorf("%s %s: %s", r.Verdict, r.Reason, r.Detail)
		}
		return nil
	}
}

// bare asks in the shortest way.
func bare(addr string) error {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return err
	}
	defer c.Close()
	const question = `{"jsonrpc":"2.0","id":"1","method":"server/discover"}`
	if _, err := fmt.Fprintf(c, "POST /mcp HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", addr, len(question), question); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 1024))
	return err
}

func selfUsage() (u syscall.Rusage, m runtime.MemStats) {
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	runtime.ReadMemStats(&m)
	return u, m
}
