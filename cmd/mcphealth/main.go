// Command mcphealth asks an MCP server whether it lives, in its own protocol.
package main

import (
	"fmt"
	"io"
	"os"
)

// Exit statuses (docs/verdicts.md; 64 is EX_USAGE of sysexits.h).
const (
	exitUp      = 0
	exitDead    = 1
	exitFailed  = 1 // of serve: it could not listen
	exitUnknown = 3
	exitUsage   = 64
)

const usage = `mcphealth asks an MCP server whether it lives, in its own protocol.

  mcphealth probe [flags] URL                  ask once; exit 0 up, 1 dead, 3 unknown
  mcphealth probe [flags] --stdio -- COMMAND   the same, of a server on stdin and stdout
  mcphealth explain [flags] URL                what other checks conclude, and why
  mcphealth serve --target NAME=URL ...        answer for servers at GET /health
  mcphealth version

Flags of a command: mcphealth probe -h, mcphealth explain -h, mcphealth serve -h
`

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

func run(args []string, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		fmt.Fprint(stderr, usage)
		return exitUsage
	}
	switch args[0] {
	case "probe":
		return probe(args[1:], stdout, stderr)
	case "explain":
		return runExplain(args[1:], stdout, stderr)
	case "serve":
		return runServe(args[1:], stdout, stderr)
	case "version", "--version", "-version":
		fmt.Fprintln(stdout, version())
		return exitUp
	case "help", "--help", "-h":
		fmt.Fprint(stdout, usage)
		return exitUp
	}
	fmt.Fprintf(stderr, "mcphealth: unknown command %q\n\n%s", args[0], usage)
	return exitUsage
}
