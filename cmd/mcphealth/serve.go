package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/mcphealth/mcphealth/internal/serve"
	"github.com/mcphealth/mcphealth/mcphealth"
)

const serveSynopsis = `mcphealth serve [flags] --target NAME=URL [--target NAME=URL ...]
mcphealth serve --config FILE

Answers GET /health and /health/NAME: 200, or 503 when nothing can serve. Asks a
server when somebody wants to know, once per cache period. Ends on SIGTERM.`

// defaultListen is where serve listens unless told otherwise: details of failures
// are for those on this machine.
const defaultListen = "127.0.0.1:9105"

const (
	// headerWithin and requestWithin are how long a caller may take over its request:
	// 5 and 10 s. One that takes longer holds a connection for nothing.
	headerWithin  = 5 * time.Second
	requestWithin = 10 * time.Second
	// answerWithin is how long it may take over our answer, once there is one.
	answerWithin = 10 * time.Second
	// idleFor is how long a connection may stay open between requests: more than the
	// period of any health check in use.
	idleFor = 2 * time.Minute
	// maxRequest is how many bytes of headers a caller may send: 16 KiB.
	maxRequest = 16 << 10
	// graceful is how long callers may still be answered after SIGTERM.
	graceful = 5 * time.Second
)

// serving is what the flags, or the file, say.
type serving struct {
	options // of every --target
	listen  string
	cache   time.Duration
	named   []string // NAME=URL
	config  string
	check   bool

	targets []serve.Target
}

func (s *serving) declare(fs *flag.FlagSet) {
	fs.StringVar(&s.listen, "listen", defaultListen, "`host:port` to answer at")
	fs.Func("target", "a server to answer for, as `NAME=URL`; may be repeated", appendTo(&s.named))
	fs.DurationVar(&s.cache, "cache", serve.DefaultCache, "how long an answer is told without asking again, a `duration`")
	fs.StringVar(&s.config, "config", "", "read all this, and more, from a YAML or JSON `file`; no other flag goes with it, but --check")
	fs.BoolVar(&s.check, "check", false, "say whether the flags or the file are right, and end")
	s.declareTarget(fs)
}

// runServe answers until it is told to stop.
func runServe(args []string, stdout, stderr io.Writer) int {
	var s serving
	fs := newFlags("mcphealth serve")
	s.declare(fs)
	err := fs.Parse(args)
	if errors.Is(err, flag.ErrHelp) {
		help(stdout, fs, serveSynopsis)
		return exitUp
	}
	if err == nil {
		err = s.settle(fs)
	}
	if err != nil {
		return badUsage(stderr, "serve", err)
	}
	if s.check {
		fmt.Fprintf(stdout, "right, with %d targets\n", len(s.targets))
		return exitUp
	}
	log := slog.New(slog.NewTextHandler(stderr, nil))
	if err := s.run(log, stderr); err != nil {
		fmt.Fprintf(stderr, "mcphealth serve: %v\n", err)
		return exitFailed
	}
	return exitUp
}

// settle turns the flags, or the file, into targets.
func (s *serving) settle(fs *flag.FlagSet) error {
	if fs.NArg() > 0 {
		return fmt.Errorf("want flags only, got the word %q; targets are --target NAME=URL", fs.Arg(0))
	}
	if err := refuseEmpty(fs); err != nil {
		return err
	}
	if s.config != "" {
		var other error
		fs.Visit(func(f *flag.Flag) {
			if f.Name != "config" && f.Name != "check" {
				other = fmt.Errorf("--config: it has %s too; want the file, or flags", dashed(f.Name))
			}
		})
		if other != nil {
			return other
		}
		return s.read(s.config)
	}
	if err := s.options.settle(); err != nil {
		return err
	}
	if s.cache <= 0 {
		return fmt.Errorf("--cache %v: want a positive duration", s.cache)
	}
	if err := checkListen(s.listen); err != nil {
		return fmt.Errorf("--listen %w", err)
	}
	if _, err := s.tls.transport(); err != nil {
		return err
	}
	return s.settleTargets()
}

func (s *serving) settleTargets() error {
	if len(s.named) == 0 {
		return errors.New("want --target NAME=URL, or --config FILE")
	}
	if len(s.named) > serve.MaxTargets {
		return fmt.Errorf("--target: %d of them: want %d at most", len(s.named), serve.MaxTargets)
	}
	seen := map[string]bool{}
	for i, named := range s.named {
		name, url, ok := strings.Cut(named, "=")
		if !ok {
			return fmt.Errorf("--target, number %d: want NAME=URL", i+1) // the URL may hold a password
		}
		t := serve.Target{Name: name, Target: s.target, Transport: s.tls.renewed(), Header: s.header.header}
		t.URL = url
		if err := t.Validate(); err != nil {
			return fmt.Errorf("--target, number %d: %s", i+1, asFlags.Replace(err.Error()))
		}
		if seen[name] {
			return fmt.Errorf("--target, number %d: there is a target %s already", i+1, name)
		}
		seen[name] = true
		s.targets = append(s.targets, t)
	}
	return nil
}

// checkListen finds what net.Listen would, without listening; and an absent port,
// which it would take for any port.
func checkListen(addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err == nil && port != "" {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil || port == "" {
		return fmt.Errorf("%q: want host:port, or :port for all addresses", addr)
	}
	return nil
}

// run listens, answers, and ends on SIGTERM or SIGINT, or as its terminal closes. A
// second signal kills.
func (s *serving) run(log *slog.Logger, stderr io.Writer) error {
	signals := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // nohup
		signals = append(signals, syscall.SIGHUP)
	}
	ctx, stop := signal.NotifyContext(context.Background(), signals...)
	defer stop()
	// Go ends a program that writes to a stderr which nobody reads any more, as where a
	// log collector has died. Caught, and not ignored, for commands would inherit that.
	unread := make(chan os.Signal, 1)
	signal.Notify(unread, syscall.SIGPIPE)
	defer signal.Stop(unread)
	ln, err := net.Listen("tcp", s.listen)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	defer ln.Close()
	answers, err := serve.New(s.targets, serve.Options{Cache: s.cache, Logger: log, Stderr: stderr})
	if err != nil {
		return err
	}
	longest := mcphealth.DefaultTimeout
	for _, t := range s.targets {
		longest = max(longest, t.Timeout)
	}
	srv := &http.Server{Handler: answers.Handler(), ReadHeaderTimeout: headerWithin, ReadTimeout: requestWithin,
		WriteTimeout: longest + answerWithin, IdleTimeout: idleFor, MaxHeaderBytes: maxRequest,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	log.Info("listening", "address", ln.Addr().String(), "targets", len(s.targets))
	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err = <-served: // the listener broke
	case <-ctx.Done():
		stop()
		log.Info("stopping")
	}
	_ = ln.Close()
	answers.Close() // ends the probes that callers wait for
	last, cancel := context.WithTimeout(context.Background(), graceful)
	defer cancel()
	if srv.Shutdown(last) != nil {
		_ = srv.Close()
	}
	return err
}
