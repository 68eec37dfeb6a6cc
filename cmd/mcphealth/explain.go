package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"github.com/mcphealth/mcphealth/internal/explain"
)

const explainSynopsis = `mcphealth explain [flags] URL

Shows side by side what other health checks conclude about an MCP server, what
mcphealth concludes, and why. Exit status: as that of mcphealth probe.`

// runExplain asks in all the ways and prints them beside each other.
func runExplain(args []string, stdout, stderr io.Writer) int {
	var o options
	fs := newFlags("mcphealth explain")
	o.declareShared(fs)
	err := o.parse(fs, args)
	if errors.Is(err, flag.ErrHelp) {
		help(stdout, fs, explainSynopsis)
		return exitUp
	}
	if err == nil {
		err = o.settle()
	}
	var way *http.Transport
	if err == nil {
		way, err = o.tls.transport()
	}
	if err != nil {
		return badUsage(stderr, "explain", err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r, err := explain.Run(ctx, explain.Target{Target: o.target, Transport: way.Clone})
	if err != nil {
		return badUsage(stderr, "explain", errors.New(asFlags.Replace(err.Error())))
	}
	if o.json {
		err = json.NewEncoder(stdout).Encode(r)
	} else {
		err = r.Print(stdout)
	}
	if err != nil {
		fmt.Fprintln(stderr, "mcphealth explain: writing the report:", err)
	}
	return exitStatus(r.MCPHealth.Verdict, false)
}
