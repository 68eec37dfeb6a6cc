package stdio

import (
	"context"
	"errors"
	"io"
	"path/filepath"
	"sync"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// DefaultHeartbeat is how often a kept server is asked: as often as an upstream
	// behind a proxy.
	DefaultHeartbeat = 10 * time.Second
	// startWithin is what a kept server gets for its first answer, at least: npx and
	// uvx may fetch the package first.
	startWithin = 30 * time.Second
	// lostBeats is how many heartbeats in a row may fail before the server is
	// replaced: two, as `fall` has it for upstreams.
	lostBeats = 2
	// minPause and maxPause bound the pause before a restart. It doubles with each,
	// and never ends: a server that is broken at night is tried until it is mended.
	minPause = time.Second
	maxPause = time.Minute
	// steadyAfter is how long a server must have run for the pause to begin anew.
	steadyAfter = time.Minute
)

// State is what a kept server is doing.
type State string

// The states of a kept server.
const (
	Starting State = "starting" // the process runs, and has not answered yet
	Running  State = "running"  // it answered once; the last Result says how it is
	Waiting  State = "waiting"  // it ended, or was ended; it is started again after a pause
	Stopped  State = "stopped"  // by Close
)

// Options of Keep; zero values mean the defaults.
type Options struct {
	// Heartbeat is how often the server is asked. Default DefaultHeartbeat.
	Heartbeat time.Duration
	// Stderr gets the beginning of what each process writes to its own; nil: nothing.
	Stderr io.Writer
	// OnResult is called after each answer or its absence, from one goroutine.
	OnResult func(mcphealth.Result)
}

// Status is all that is known of a kept server.
type Status struct {
	State    State
	Restarts int              // processes started after the first
	Next     time.Time        // while Waiting: when it is started again
	Last     mcphealth.Result // never_probed before the first
}

// A Server is a process that is kept running: asked at each heartbeat, and replaced
// when it ends or no longer answers. One goroutine owns it, from Keep to Close.
type Server struct {
	target  mcphealth.Target
	era     mcphealth.Era // as configured; target.Era may be what was found out
	command []string
	o       Options

	cancel context.CancelFunc
	done   chan struct{}

	mu     sync.Mutex
	status Status
}

// Keep starts command and keeps it running. The error says that t is bad.
func Keep(t mcphealth.Target, command []string, o Options) (*Server, error) {
	t = t.WithDefaults()
	if len(command) == 0 {
		return nil, errors.New("want a command")
	}
	t.URL = "stdio:" + filepath.Base(command[0]) // no arguments: they may hold secrets
	if _, err := mcphealth.NewCarrierProber(t, &mcphealth.Carrier{}); err != nil {
		return nil, err
	}
	if o.Heartbeat == 0 {
		o.Heartbeat = DefaultHeartbeat
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{target: t, era: t.Era, command: command, o: o, cancel: cancel, done: make(chan struct{})}
	s.status = Status{State: Starting, Last: mcphealth.Result{URL: t.URL, Verdict: mcphealth.Unknown, Reason: mcphealth.NeverProbed,
		Detail: "the server is starting", Era: t.Era}}
	go s.keep(ctx)
	return s, nil
}

// Status is what is known now.
func (s *Server) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status
}

// Close ends the server, and what it has started, and waits for their end.
func (s *Server) Close() {
	s.cancel()
	<-s.done
}

func (s *Server) keep(ctx context.Context) {
	defer close(s.done)
	for pause := minPause; ; {
		began := time.Now()
		again := s.live(ctx)
		if time.Since(began) >= steadyAfter {
			pause = minPause
		}
		if !again {
			s.set(func(st *Status) { st.State, st.Next = Waiting, time.Now().Add(pause) })
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
			pause = min(2*pause, maxPause)
		}
		if ctx.Err() != nil {
			s.set(func(st *Status) { st.State = Stopped })
			return
		}
		s.set(func(st *Status) { st.State, st.Restarts = Starting, st.Restarts+1 })
	}
}

// live is one process, from its start to its end. It reports whether to start the
// next at once.
func (s *Server) live(ctx context.Context) (again bool) {
	began := time.Now()
	c, err := start(s.command, s.o.Stderr)
	if err != nil {
		s.report(unstarted(s.target, began, err))
		return false
	}
	p := newPump(c)
	defer func() {
		grace := maxGrace
		if ctx.Err() != nil {
			grace = canceledGrace
		}
		c.stop(grace)
		<-p.done
	}()
	ask, err := s.prober(p)
	if err != nil {
		panic(err) // Keep has tried it
	}
	for lost := 0; lost < lostBeats; {
		r := ask(ctx)
		if ctx.Err() != nil {
			return false
		}
		starting := s.Status().State == Starting
		if starting && endedOnDiscover(s.target, r) {
			s.target.Era = mcphealth.Legacy // the next process is asked otherwise
			return true
		}
		s.report(r)
		switch {
		case r.Verdict.Vote() > 0:
			lost = 0
			s.set(func(st *Status) { st.State = Running })
		case starting:
			s.target.Era = s.era
			return false
		default:
			lost++
		}
		select {
		case <-ctx.Done():
			return false
		case <-p.done:
			if r.Verdict.Vote() > 0 {
				r.Verdict, r.Reason, r.Detail, r.At = mcphealth.Dead, mcphealth.Reset, p.err.Error(), time.Now()
				s.report(r)
			}
			return false
		case <-time.After(s.o.Heartbeat):
		}
	}
	return false
}

// prober asks one process. It may take long over the first answer.
func (s *Server) prober(p *pump) (func(context.Context) mcphealth.Result, error) {
	carrier := &mcphealth.Carrier{Send: p.send, Receive: p.receive}
	t := s.target
	t.Timeout = max(t.Timeout, startWithin)
	first, err := mcphealth.NewCarrierProber(t, carrier)
	if err != nil {
		return nil, err
	}
	asked := false
	return func(ctx context.Context) mcphealth.Result {
		defer p.listen()()
		if asked {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, s.target.Timeout)
			defer cancel()
		}
		asked = true
		return first.Probe(ctx)
	}, nil
}

func (s *Server) report(r mcphealth.Result) {
	s.set(func(st *Status) { st.Last = r })
	if s.o.OnResult != nil {
		s.o.OnResult(r)
	}
}

func (s *Server) set(change func(*Status)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.status)
}

// endedOnDiscover: some servers of the handshake era end when the first request is
// another one than initialize.
func endedOnDiscover(t mcphealth.Target, r mcphealth.Result) bool {
	return len(r.Steps) == 1 && r.Steps[0].Step == "server/discover" && r.Reason == mcphealth.Reset && t.Era != mcphealth.Modern && t.Era != mcphealth.Legacy
}
