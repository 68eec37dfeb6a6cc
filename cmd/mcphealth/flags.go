package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// options are the flags of a command that asks a server.
type options struct {
	target      mcphealth.Target
	header      headerFlags
	tls         tlsFlags
	json        bool
	healthcheck bool
	verbose     bool
	stdio       bool
	command     []string // with stdio

	era, deep, aliveIf string // as written
}

// tlsFlags are the files of the connection.
type tlsFlags struct{ cacert, cert, key string }

// declare puts the flags of `mcphealth probe` on fs.
func (o *options) declare(fs *flag.FlagSet) {
	t := &o.target
	o.declareShared(fs)
	fs.BoolVar(&o.healthcheck, "healthcheck", false, "for containers: exit 0 unless the server is dead")
	fs.BoolVar(&o.stdio, "stdio", false, "start the command after -- and ask it over its stdin and stdout")
	fs.BoolVar(&o.verbose, "v", false, "say on stderr what was asked; with --stdio, what the command writes there")
	fs.StringVar(&o.aliveIf, "alive-if", "mcp", "which answers are life: `mcp|any_response`; the second takes any HTTP answer")
	fs.StringVar(&o.deep, "deep", "on", "whether a session may be opened, where nothing less tells: `on|off`")
	fs.Func("expect-tool", "this `tool` must be listed; may be repeated", func(s string) error {
		t.ExpectTools = append(t.ExpectTools, s)
		return nil
	})
	fs.StringVar(&t.CallTool, "call", "", "call this `tool` as a canary")
	fs.StringVar(&t.CallArgs, "args", "", "its arguments, a `JSON` object (default {})")
	fs.BoolVar(&t.Fresh, "fresh", false, "ask, besides, what no cache can answer")
	fs.BoolVar(&t.RequireAuth, "require-auth", false, "a server that answers without credentials is degraded")
	fs.DurationVar(&t.SlowAfter, "slow-after", 0, "an answer that takes longer than this `duration` is degraded")
	fs.StringVar(&t.HealthPath, "health-path", "", "`path` of a health document on the same server")
}

// declareShared are the flags that `mcphealth explain` has too.
func (o *options) declareShared(fs *flag.FlagSet) {
	fs.BoolVar(&o.json, "json", false, "print one JSON object")
	o.declareTarget(fs)
}

// declareTarget are the flags of a target, which `mcphealth serve` has too.
func (o *options) declareTarget(fs *flag.FlagSet) {
	fs.DurationVar(&o.target.Timeout, "timeout", mcphealth.DefaultTimeout, "how long the whole probe may take, a `duration`")
	fs.StringVar(&o.era, "era", "auto", "protocol generation: `auto|modern|legacy|sse`")
	fs.Func("header", "send this header, as '`Name: value`'; may be repeated", appendTo(&o.header.plain))
	fs.Func("header-env", "send a header whose value an environment variable holds, as `Name=VARIABLE`; may be repeated", appendTo(&o.header.env))
	fs.Func("header-file", "send a header whose value a file holds, as `Name=path`; may be repeated", appendTo(&o.header.file))
	fs.StringVar(&o.header.bearer, "bearer-file", "", "send Authorization: Bearer with the token in the file at `path`")
	fs.StringVar(&o.target.Host, "host", "", "the `Host` header that clients use")
	fs.StringVar(&o.tls.cacert, "cacert", "", "trust the certificates in this PEM `file`, and no others")
	fs.StringVar(&o.tls.cert, "cert", "", "client certificate, a PEM `file`")
	fs.StringVar(&o.tls.key, "key", "", "its key, a PEM `file` (default the one of --cert)")
}

func appendTo(list *[]string) func(string) error {
	return func(s string) error { *list = append(*list, s); return nil }
}

// parse reads args; flags may stand after the URL as well. With --stdio the first
// word that is no flag begins the command.
func (o *options) parse(fs *flag.FlagSet, args []string) error {
	var words []string
	for {
		if err := fs.Parse(args); err != nil {
			return err
		}
		rest := fs.Args()
		ended := len(rest) < len(args) && args[len(args)-len(rest)-1] == "--"
		if len(rest) == 0 || o.stdio || ended {
			words = append(words, rest...)
			break
		}
		words, args = append(words, rest[0]), rest[1:]
	}
	if err := refuseEmpty(fs); err != nil {
		return err
	}
	if o.stdio {
		o.command = words
		return o.checkStdio(fs)
	}
	if len(words) != 1 {
		return fmt.Errorf("want one URL, got %d words besides the flags", len(words))
	}
	o.target.URL = words[0]
	return nil
}

// refuseEmpty refuses flags that are given without a word, as by a variable that is not
// set: they would do nothing, and nobody would know.
func refuseEmpty(fs *flag.FlagSet) error {
	var err error
	fs.Visit(func(f *flag.Flag) {
		if v, ok := f.Value.(flag.Getter); ok && v.Get() == "" {
			err = fmt.Errorf(`%s "": want a value, or the flag left out`, dashed(f.Name))
		}
	})
	return err
}

// overHTTP are the flags that say nothing to a child process.
var overHTTP = []string{"header", "header-env", "header-file", "bearer-file", "host", "cacert", "cert", "key",
	"alive-if", "deep", "fresh", "require-auth", "health-path"}

func (o *options) checkStdio(fs *flag.FlagSet) error {
	if len(o.command) == 0 {
		return errors.New("--stdio: want a command, as in --stdio -- node server.js")
	}
	var err error
	fs.Visit(func(f *flag.Flag) {
		for _, name := range overHTTP {
			if f.Name == name {
				err = fmt.Errorf("--%s: it belongs to HTTP and says nothing to --stdio", name)
			}
		}
	})
	if o.era == string(mcphealth.SSE) {
		err = errors.New("--era sse: that is HTTP+SSE, and not --stdio")
	}
	return err
}

// settle turns the words into the target, and reads the files.
func (o *options) settle() error {
	t := &o.target
	if o.era != "" && o.era != "auto" {
		t.Era = mcphealth.Era(o.era)
	}
	t.AliveIf = mcphealth.AliveIf(o.aliveIf)
	switch o.deep {
	case "on", "":
	case "off":
		t.Shallow = true
	default:
		return fmt.Errorf("--deep %q: want on or off", o.deep)
	}
	switch {
	case o.era == string(mcphealth.EraUnknown):
		return fmt.Errorf("--era %q: want auto, modern, legacy or sse", o.era)
	case t.Timeout <= 0:
		return fmt.Errorf("--timeout %v: want a positive duration", t.Timeout)
	case t.SlowAfter < 0:
		return fmt.Errorf("--slow-after %v: want a positive duration", t.SlowAfter)
	case t.SlowAfter >= t.Timeout:
		return fmt.Errorf("--slow-after %v %s, %v", t.SlowAfter, neverSlow, t.Timeout)
	case t.CallArgs != "" && t.CallTool == "":
		return errors.New("--args: want --call with the tool that takes them")
	}
	var err error
	t.Header, err = o.header.header()
	return err
}

// neverSlow is what is wrong with an answer that would come too late to be slow.
const neverSlow = "can never be: want less than the timeout, after which a server counts as dead"

// asFlags names settings as this command does.
var asFlags = strings.NewReplacer("bad target: ", "", "alive_if ", "--alive-if ", "health_path ", "--health-path ",
	"expect_tool and call need", "--expect-tool and --call need", "expect_tool ", "--expect-tool ", "contradict deep off", "contradict --deep off",
	"arguments of tool ", "--args of tool ", "era ", "--era ")

// prober makes a prober of the options, over a connection of its own.
func (o *options) prober() (*mcphealth.Prober, error) {
	t, err := o.tls.transport()
	if err != nil {
		return nil, err
	}
	p, err := mcphealth.NewProber(o.target, mcphealth.NewLine(t))
	if err != nil {
		return nil, errors.New(asFlags.Replace(err.Error()))
	}
	return p, nil
}

// transport goes straight to the server: no proxy, no pool.
func (f tlsFlags) transport() (*http.Transport, error) {
	c := &tls.Config{}
	if f.cacert != "" {
		pem, err := os.ReadFile(f.cacert)
		if err != nil {
			return nil, fmt.Errorf("--cacert: %w", err)
		}
		c.RootCAs = x509.NewCertPool()
		if !c.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--cacert %s: no PEM certificate in it", f.cacert)
		}
	}
	if f.key != "" && f.cert == "" {
		return nil, errors.New("--key: want --cert with the certificate that it belongs to")
	}
	if f.cert != "" {
		key := f.key
		if key == "" {
			key = f.cert
		}
		pair, err := tls.LoadX509KeyPair(f.cert, key)
		if err != nil {
			return nil, fmt.Errorf("--cert, --key: %w", err)
		}
		c.Certificates = []tls.Certificate{pair}
	}
	return &http.Transport{TLSClientConfig: c, ForceAttemptHTTP2: true}, nil
}

// renewed is transport, made anew when one of the files has changed.
func (f tlsFlags) renewed() func() (*http.Transport, error) {
	var last *http.Transport
	var of string
	return func() (*http.Transport, error) {
		now := f.stamp()
		if last != nil && now == of {
			return last, nil
		}
		t, err := f.transport()
		if err != nil {
			return nil, err
		}
		last, of = t, now
		return t, nil
	}
}

// stamp changes when one of the files does.
func (f tlsFlags) stamp() (s string) {
	for _, file := range []string{f.cacert, f.cert, f.key} {
		if i, err := os.Stat(file); err == nil {
			s += fmt.Sprint(i.ModTime().UnixNano(), i.Size(), ",")
		}
	}
	return s
}

// newFlags is a flag set that prints nothing by itself: package flag would repeat
// what it could not read.
func newFlags(name string) *flag.FlagSet {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	return fs
}

// dashed is a flag's name as people write it.
func dashed(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

// help prints what a command is for, and its flags.
func help(w io.Writer, fs *flag.FlagSet, synopsis string) {
	fmt.Fprintf(w, "%s\n\n", synopsis)
	fs.VisitAll(func(f *flag.Flag) {
		arg, text := flag.UnquoteUsage(f)
		fmt.Fprintf(w, "  %s\n      %s", strings.TrimSpace(dashed(f.Name)+" "+arg), text)
		if f.DefValue != "" && f.DefValue != "false" && f.DefValue != "0s" {
			fmt.Fprintf(w, " (default %s)", f.DefValue)
		}
		fmt.Fprintln(w)
	})
}
