package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/mcphealth/mcphealth/mcphealth"
)

func version() string { return "mcphealth " + mcphealth.Version }

// probeFlags are the settings of one probe command.
type probeFlags struct {
	target      mcphealth.Target
	json        bool
	healthcheck bool
	cacert      string
}

// probe asks once, prints what it found, and turns the verdict into an exit status.
func probe(args []string, stdout, stderr io.Writer) int {
	f, err := parseProbe(args, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return exitUp
	}
	var prober *mcphealth.Prober
	if err == nil {
		prober, err = newProber(f)
	}
	if err != nil {
		fmt.Fprintln(stderr, "mcphealth probe:", err)
		return exitUsage
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r := prober.Probe(ctx)
	r.SessionClosed = prober.Close(ctx)
	if f.json {
		err = json.NewEncoder(stdout).Encode(r)
	} else {
		err = printResult(stdout, r)
	}
	if err != nil {
		fmt.Fprintln(stderr, "mcphealth probe: writing the result:", err)
	}
	return exitStatus(r.Verdict, f.healthcheck)
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

func parseProbe(args []string, stderr io.Writer) (probeFlags, error) {
	f := probeFlags{target: mcphealth.Target{Header: http.Header{}}}
	t := &f.target
	era, aliveIf, deep := "auto", "mcp", "on"
	fs := flag.NewFlagSet("mcphealth probe", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.BoolVar(&f.json, "json", false, "print one JSON object")
	fs.BoolVar(&f.healthcheck, "healthcheck", false, "for containers: exit 0 unless the server is dead")
	fs.DurationVar(&t.Timeout, "timeout", mcphealth.DefaultTimeout, "bounds the whole probe")
	fs.Func("header", "send this header, as 'Name: value'; may be repeated", func(s string) error { return addHeader(t.Header, s) })
	fs.StringVar(&t.Host, "host", "", "the Host header that clients use")
	fs.StringVar(&era, "era", era, "auto, modern, legacy or sse")
	fs.StringVar(&aliveIf, "alive-if", aliveIf, "mcp, or any_response: any HTTP answer is life")
	fs.StringVar(&deep, "deep", deep, "on, or off: never open a session")
	fs.Func("expect-tool", "this tool must be listed; may be repeated", func(s string) error {
		t.ExpectTools = append(t.ExpectTools, s)
		return nil
	})
	fs.StringVar(&t.CallTool, "call", "", "call this tool as a canary")
	fs.StringVar(&t.CallArgs, "args", "", "its arguments, a JSON object")
	fs.BoolVar(&t.Fresh, "fresh", false, "ask, besides, what no cache can answer")
	fs.DurationVar(&t.SlowAfter, "slow-after", 0, "a slower answer is degraded")
	fs.StringVar(&t.HealthPath, "health-path", "", "path of a health document on the same server")
	fs.StringVar(&f.cacert, "cacert", "", "trust the certificates in this PEM file, and no others")
	if err := fs.Parse(args); err != nil {
		return f, err
	}
	if fs.NArg() != 1 {
		return f, fmt.Errorf("want one URL, got %d arguments", fs.NArg())
	}
	t.URL = fs.Arg(0)
	t.AliveIf = mcphealth.AliveIf(aliveIf)
	if era != "auto" {
		t.Era = mcphealth.Era(era)
	}
	switch deep {
	case "on":
	case "off":
		t.Shallow = true
	default:
		return f, fmt.Errorf("deep %q: want on or off", deep)
	}
	if t.Timeout <= 0 {
		return f, fmt.Errorf("timeout %v: want a positive duration", t.Timeout)
	}
	return f, nil
}

func addHeader(h http.Header, s string) error {
	name, value, ok := strings.Cut(s, ":")
	if name = strings.TrimSpace(name); !ok || name == "" {
		return errors.New("want 'Name: value'")
	}
	h.Add(name, strings.TrimSpace(value))
	return nil
}

func newProber(f probeFlags) (*mcphealth.Prober, error) {
	t := &http.Transport{}
	if f.cacert != "" {
		pem, err := os.ReadFile(f.cacert)
		if err != nil {
			return nil, fmt.Errorf("cacert: %w", err)
		}
		pool := x509.NewCertPool()
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("cacert %s: no PEM certificate in it", f.cacert)
		}
		t.TLSClientConfig = &tls.Config{RootCAs: pool}
	}
	return mcphealth.NewProber(f.target, mcphealth.NewLine(t))
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
