// Package serve answers, over plain HTTP, whether MCP servers live: for proxies,
// containers and clusters that can ask for a path and read a status, and no more.
//
// It asks a server when somebody wants to know, and keeps the answer for a while
// (cell). It counts no rise and fall and keeps no schedule: those who ask have both
// (`fall` in HAProxy, failureThreshold in Kubernetes, health_fails in Caddy), and
// counting twice would add up. Nobody asks, nobody is asked.
package serve

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/mcphealth/mcphealth/internal/stdio"
	"github.com/mcphealth/mcphealth/mcphealth"
)

// DefaultCache is how long a result is told without asking again.
const DefaultCache = 5 * time.Second

// MaxTargets is how many targets one serve may have: each GET /health asks all of
// them, in one moment.
const MaxTargets = 1000

// UpstreamHeader names a target by its address, in requests for /health: what a
// stock Caddy can send with its checks.
const UpstreamHeader = "X-Upstream"

// Options of New; zero values mean the defaults.
type Options struct {
	// Cache is how long a result is told without asking again. Default DefaultCache.
	Cache time.Duration
	// Logger hears of changes, Info up and Warn down. Default: nobody.
	Logger *slog.Logger
	// Stderr gets the beginning of what commands over stdio write to theirs.
	Stderr io.Writer
}

// A Server answers for its targets, and for nobody else.
type Server struct {
	born    time.Time
	targets map[string]source
	called  map[string][]string // names by what X-Upstream may say
	metrics *metrics
	log     *slog.Logger
	cancel  context.CancelFunc
}

// New makes a server. It starts the commands; servers over HTTP it asks when
// somebody wants to know. Close ends it.
func New(targets []Target, o Options) (*Server, error) {
	if o.Cache == 0 {
		o.Cache = DefaultCache
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if err := valid(targets, o); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &Server{born: time.Now(), targets: map[string]source{}, called: map[string][]string{}, metrics: newMetrics(), log: o.Logger, cancel: cancel}
	commands := map[string]*stdio.Server{}
	for _, t := range targets {
		heard := func(r mcphealth.Result) { s.heard(t.Name, r) }
		var err error
		if len(t.Command) > 0 {
			commands[t.Name], err = stdio.Keep(t.Target, t.Command, stdio.Options{Heartbeat: t.Heartbeat, Stderr: from(t.Name, o.Stderr), OnResult: heard})
			s.targets[t.Name] = overStdio{commands[t.Name]}
		} else {
			s.targets[t.Name], err = overHTTP(ctx, t, o, heard)
		}
		if err != nil {
			delete(s.targets, t.Name)
			s.Close()
			return nil, fmt.Errorf("target %s: %w", t.Name, err)
		}
		for _, name := range append([]string{t.Name}, t.addresses()...) {
			s.called[name] = append(s.called[name], t.Name)
		}
	}
	s.metrics.commands(commands)
	return s, nil
}

func valid(targets []Target, o Options) error {
	if o.Cache < 0 {
		return fmt.Errorf("cache %v: want a positive duration", o.Cache)
	}
	if len(targets) == 0 || len(targets) > MaxTargets {
		return fmt.Errorf("%d targets: want 1 to %d", len(targets), MaxTargets)
	}
	names := map[string]bool{}
	for i, t := range targets {
		if err := t.Validate(); err != nil {
			return fmt.Errorf("target %d: %w", i+1, err)
		}
		if names[t.Name] {
			return fmt.Errorf("target %d: the name %s is another target's already", i+1, t.Name)
		}
		names[t.Name] = true
	}
	return nil
}

// Close cancels the probes that run, ends the sessions that are held and the
// commands, all at once, and waits for that. Answers go on with what was known.
func (s *Server) Close() {
	s.cancel()
	var all sync.WaitGroup
	for _, t := range s.targets {
		all.Go(t.close)
	}
	all.Wait()
}

func (s *Server) heard(name string, r mcphealth.Result) {
	if r.Reason == mcphealth.Canceled {
		return
	}
	before, changed := s.metrics.note(name, r, time.Since(r.At))
	if !changed {
		return
	}
	level := slog.LevelInfo
	if r.Verdict.Vote() <= 0 || r.Verdict == mcphealth.Degraded {
		level = slog.LevelWarn
	}
	from := before.Verdict
	if from == "" {
		from = mcphealth.Unknown
	}
	s.log.Log(context.Background(), level, "target changed", "target", name, "from", from, "to", r.Verdict, "reason", r.Reason, "detail", r.Detail)
}

// Handler answers GET and HEAD of /health, /health/{name}, /livez and /metrics.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", s.health)
	mux.HandleFunc("GET /health/{name}", s.health)
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { s.answer(w, nil) })
	metrics := s.metrics.handler()
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		// Who watches by Prometheus alone is a caller, too; but a scrape waits for
		// nobody for long.
		ctx, cancel := context.WithTimeout(r.Context(), patience)
		defer cancel()
		s.ask(ctx, s.targets)
		metrics.ServeHTTP(w, r)
	})
	return mux
}

// health answers for all targets, or for those that the path and X-Upstream name.
func (s *Server) health(w http.ResponseWriter, r *http.Request) {
	chosen := s.targets
	name := r.PathValue("name")
	if name != "" {
		chosen = map[string]source{}
		if t, ok := s.targets[name]; ok {
			chosen[name] = t
		}
	}
	if said, ok := r.Header[UpstreamHeader]; ok {
		if len(said) != 1 {
			fail(w, http.StatusBadRequest, "want one "+UpstreamHeader)
			return
		}
		all := chosen
		chosen = map[string]source{}
		for _, name := range s.named(said[0]) {
			if t, ok := all[name]; ok {
				chosen[name] = t
			}
		}
	}
	if len(chosen) == 0 {
		fail(w, http.StatusNotFound, "no such target: name one that mcphealth serve is configured with, or its host:port")
		return
	}
	s.answer(w, s.ask(r.Context(), chosen))
}

// named are the targets that a proxy means. Caddy writes the network before the
// address where its configuration does.
func (s *Server) named(said string) []string {
	if names := s.called[said]; names != nil {
		return names
	}
	host, path, _ := strings.Cut(strings.TrimPrefix(said, "tcp/"), "/")
	if host = oneForm(host); path != "" {
		host += "/" + path
	}
	return s.called[host]
}

// ask has all of them asked that are due, at the same time, and waits as the cells
// allow: to the end of a probe, or, where the last result may be told, for patience.
func (s *Server) ask(ctx context.Context, chosen map[string]source) map[string]status {
	hurried, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var due, tellable []<-chan struct{}
	for _, t := range chosen {
		switch wait, may := t.begin(); {
		case wait != nil && may:
			tellable = append(tellable, wait)
		case wait != nil:
			due = append(due, wait)
		}
	}
	await(hurried, tellable)
	await(ctx, due)
	all := make(map[string]status, len(chosen))
	for name, t := range chosen {
		all[name] = t.status()
	}
	return all
}

func await(ctx context.Context, all []<-chan struct{}) {
	for _, done := range all {
		select {
		case <-done:
		case <-ctx.Done():
			return
		}
	}
}

func (s *Server) answer(w http.ResponseWriter, all map[string]status) {
	d := document(time.Since(s.born), all)
	code := http.StatusOK
	if d.Status == unhealthy {
		code = http.StatusServiceUnavailable
	}
	write(w, code, d)
}

func fail(w http.ResponseWriter, code int, what string) {
	write(w, code, struct {
		Error string `json:"error"`
	}{what})
}

func write(w http.ResponseWriter, code int, doc any) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(doc) // who hung up wants no answer
}
