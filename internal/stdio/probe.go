// Package stdio asks an MCP server that speaks over the stdin and stdout of a
// child process (MCP "stdio" transport), and leaves no process behind. It is
// compiled only: the core in Traefik's interpreter cannot start processes.
package stdio

import (
	"context"
	"io"
	"path/filepath"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// shutdown is what of the timeout is kept for ending the child: 500 ms, so that
	// the whole probe is over in time even if the child heeds nothing but SIGKILL;
	// of a short timeout a quarter.
	shutdown = 500 * time.Millisecond
	// minGrace and maxGrace bound how long the child may take to heed its closed
	// stdin, and then SIGTERM. An idle server of the SDKs takes under 50 ms.
	minGrace = 100 * time.Millisecond
	maxGrace = 2 * time.Second
	// canceledGrace is the same when we are told to stop.
	canceledGrace = 250 * time.Millisecond
)

// Probe starts command, asks it what t wants, and ends it, within t.Timeout.
// stderr, unless nil, gets the beginning of what the child writes to its own. The
// error says that t is bad; what is wrong with the server is in the Result.
func Probe(ctx context.Context, t mcphealth.Target, command []string, stderr io.Writer) (mcphealth.Result, error) {
	t = t.WithDefaults()
	t.URL = "stdio:" + filepath.Base(command[0]) // no arguments: they may hold secrets
	if _, err := mcphealth.NewCarrierProber(t, &mcphealth.Carrier{}); err != nil {
		return mcphealth.Result{}, err
	}
	s := session{command: command, stderr: stderr, deadline: time.Now().Add(t.Timeout)}
	t.Timeout -= min(shutdown, t.Timeout/4)
	r := s.run(ctx, t)
	if !endedOnDiscover(t, r) {
		return r, nil
	}
	if t.Timeout = time.Until(s.deadline) - shutdown; t.Timeout <= 0 {
		return r, nil
	}
	first := r
	t.Era = mcphealth.Legacy
	r = s.run(ctx, t)
	r.Steps = append(first.Steps, r.Steps...)
	if r.Verdict.Vote() <= 0 {
		r.Era = first.Era
	} else {
		r.Warnings = append(r.Warnings, "restarted: the server ended when it was asked server/discover; started anew, it answers initialize")
	}
	return r, nil
}

// session is one probe: what is started, and when all must be over.
type session struct {
	command  []string
	stderr   io.Writer
	deadline time.Time
}

// run is one child, from its start to its end.
func (s *session) run(ctx context.Context, t mcphealth.Target) mcphealth.Result {
	began := time.Now()
	c, err := start(s.command, s.stderr)
	if err != nil {
		return unstarted(t, began, err)
	}
	p, err := mcphealth.NewCarrierProber(t, &mcphealth.Carrier{Send: c.send, Receive: c.receive})
	if err != nil {
		panic(err) // Probe has tried it
	}
	r := p.Probe(ctx)
	r.Warnings = append(r.Warnings, c.stop(s.grace(ctx))...)
	return r
}

// grace is how long the child may take to heed each request to end.
func (s *session) grace(ctx context.Context) time.Duration {
	if ctx.Err() != nil {
		return canceledGrace
	}
	return max(minGrace, min(maxGrace, time.Until(s.deadline)/3))
}

// unstarted is the result where no process came to be: like a refused connection.
func unstarted(t mcphealth.Target, began time.Time, err error) mcphealth.Result {
	return mcphealth.Result{
		URL: t.URL, Verdict: mcphealth.Dead, Reason: mcphealth.Refused, Detail: "start: " + err.Error(), Era: t.Era,
		ProtocolVersions: []string{}, Warnings: []string{}, At: began,
		Steps: []mcphealth.Step{{Step: "start", Outcome: string(mcphealth.Refused)}},
	}
}
