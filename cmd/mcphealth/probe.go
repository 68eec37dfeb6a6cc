package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/mcphealth/mcphealth/internal/stdio"
	"github.com/mcphealth/mcphealth/mcphealth"
)

func version() string { return "mcphealth " + mcphealth.Version }

const probeSynopsis = `mcphealth probe [flags] URL
mcphealth probe [flags] --stdio -- COMMAND [ARGUMENT ...]

Asks an MCP server once. Exit status: 0 ready, alive or degraded; 1 dead; 3 it
could not be found out; 64 bad usage.`

// probe asks once, prints what it found, and turns the verdict into an exit status.
func probe(args []string, stdout, stderr io.Writer) int {
	var o options
	fs := newFlags("mcphealth probe")
	o.declare(fs)
	err := o.parse(fs, args)
	if errors.Is(err, flag.ErrHelp) {
		help(stdout, fs, probeSynopsis)
		return exitUp
	}
	if err == nil {
		err = o.settle()
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	var r mcphealth.Result
	if err == nil {
		r, err = o.ask(ctx, stderr)
	}
	if err != nil {
		return badUsage(stderr, "probe", err)
	}
	if o.verbose {
		printSteps(stderr, r)
	}
	if o.json {
		err = json.NewEncoder(stdout).Encode(r)
	} else {
		err = printResult(stdout, r)
	}
	if err != nil {
		fmt.Fprintln(stderr, "mcphealth probe: writing the result:", err)
	}
	return exitStatus(r.Verdict, o.healthcheck)
}

// ask probes over HTTP or stdio, and leaves nothing behind. Its errors are those of
// the usage.
func (o *options) ask(ctx context.Context, stderr io.Writer) (mcphealth.Result, error) {
	if o.stdio {
		if !o.verbose {
			stderr = nil
		}
		r, err := stdio.Probe(ctx, o.target, o.command, stderr)
		if err != nil {
			err = errors.New(asFlags.Replace(err.Error()))
		}
		return r, err
	}
	p, err := o.prober()
	if err != nil {
		return mcphealth.Result{}, err
	}
	begun := time.Now()
	r := p.Probe(ctx)
	closing, cancel := context.WithDeadline(context.WithoutCancel(ctx), begun.Add(o.target.Timeout))
	defer cancel()
	r.SessionClosed = p.Close(closing)
	return r, nil
}

func badUsage(stderr io.Writer, command string, err error) int {
	fmt.Fprintf(stderr, "mcphealth %s: %v\nRun 'mcphealth %s -h' for its flags.\n", command, err, command)
	return exitUsage
}

// exitStatus: a container must not be restarted because a probe could not find
// out, so a healthcheck fails on dead only.
func exitStatus(v mcphealth.Verdict, healthcheck bool) int {
	switch {
	case v == mcphealth.Dead:
		return exitDead
	case v == mcphealth.Unknown && !healthcheck:
		return exitUnknown
	}
	return exitUp
}

func printResult(w io.Writer, r mcphealth.Result) error {
	_, err := fmt.Fprintf(w, "%s (%s): %s\n", r.Verdict, r.Reason, r.Detail)
	if err == nil && r.Server.Name != "" {
		_, err = fmt.Fprintf(w, "  server %s %s, %s %s, %.1f ms\n", r.Server.Name, r.Server.Version, r.Era, strings.Join(r.ProtocolVersions, " "), r.LatencyMs)
	}
	for _, warning := range r.Warnings {
		if err == nil {
			_, err = fmt.Fprintf(w, "  warning: %s\n", warning)
		}
	}
	return err
}

// printSteps says what was asked, a line per question.
func printSteps(w io.Writer, r mcphealth.Result) {
	for _, s := range r.Steps {
		fmt.Fprintf(w, "asked %s: %s", s.Step, s.Outcome)
		if s.HTTPStatus != 0 {
			fmt.Fprintf(w, ", HTTP %d", s.HTTPStatus)
		}
		if s.RPCCode != 0 {
			fmt.Fprintf(w, ", code %d", s.RPCCode)
		}
		fmt.Fprintf(w, ", %.1f ms\n", s.Ms)
	}
}
