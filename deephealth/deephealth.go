// Package deephealth lets an MCP server say itself that it cannot work, before its
// tools fail: its database is locked, its disk is full, its threads are busy, or it
// is about to end. Mount a [Health] beside the MCP endpoint, and have the health
// check of the proxy read it (`health_path` of mcphealth, or any check that reads a
// status):
//
//	h, err := deephealth.New(deephealth.Options{},
//		deephealth.Check{Name: "database", Timeout: 200 * time.Millisecond, Run: db.PingContext},
//		deephealth.Check{Name: "search", Degrades: true, Run: pingSearch},
//	)
//	mux.Handle("/health", h)
//
// It needs the standard library only.
package deephealth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"net/http"
	"sync"
	"time"
)

const (
	// DefaultBudget is how long all checks together may take: 500 ms, half of the
	// shortest timeout that health checks have by default (1 s: Kubernetes).
	DefaultBudget = 500 * time.Millisecond
	// DefaultCache is how long a result is told without checking again. However many
	// ask, the dependencies are asked once in that time.
	DefaultCache = 5 * time.Second
	// DefaultSchedulerLimit is the scheduler latency from which the server is
	// degraded: 100 ms, where people begin to notice (Nielsen, "Response times").
	DefaultSchedulerLimit = 100 * time.Millisecond
)

// The statuses of a Report.
const (
	Healthy   = "healthy"   // every check is ok
	Degraded  = "degraded"  // one that only degrades is not
	Unhealthy = "unhealthy" // another one is not: HTTP 503
	Draining  = "draining"  // no new work, please: HTTP 503
)

// Check is one dependency.
type Check struct {
	// Name stands in the document. Required, and once only. Not "scheduler".
	Name string
	// Run says what is wrong with the dependency, nil if nothing is. It must end when
	// ctx does; one that does not is not started again before it has. Required.
	Run func(ctx context.Context) error
	// Timeout is how long Run may take. Default, and at most: the budget.
	Timeout time.Duration
	// Degrades: the server works without this dependency, only worse. Default false:
	// it cannot work without it.
	Degrades bool
}

// Options of New; zero values mean the defaults.
type Options struct {
	// Budget is how long all checks together may take, and so how long a caller
	// waits. Default DefaultBudget.
	Budget time.Duration
	// Cache is how long a result is told without checking again. Default
	// DefaultCache; more than 10 s tell callers of times long past.
	Cache time.Duration
	// SchedulerLimit is the scheduler latency from which the server is degraded: how
	// long one in a hundred goroutines waited for a processor since the last check.
	// Default DefaultSchedulerLimit; negative: it is not checked.
	SchedulerLimit time.Duration
	// ShowErrors puts the text of errors into the document. It may hold addresses and
	// worse, and /health may be public. Default false: "failed".
	ShowErrors bool
	// Logger hears of each change of the status, with the errors: Info when all is
	// well, else Warn. Default: nobody.
	Logger *slog.Logger
}

// Report is the document.
type Report struct {
	Status string            `json:"status"`
	Uptime float64           `json:"uptime"` // seconds since New
	Checks map[string]Result `json:"checks"`
}

// Result is what one check found.
type Result struct {
	OK        bool    `json:"ok"`
	LatencyMs float64 `json:"latencyMs"`
	Error     string  `json:"error"` // "" if OK
}

// Health is an http.Handler that answers GET and HEAD with a Report: 200, or 503
// when the server cannot work or takes no new work. Its methods may be called from
// any goroutine. It checks when somebody asks, and has no goroutine between.
type Health struct {
	o      Options
	checks []*dependency
	born   time.Time
	sched  scheduler

	mu       sync.Mutex
	draining bool
	last     Report // without uptime, draining aside
	at       time.Time
	running  chan struct{} // closed when the checks end; nil while none run
}

// dependency is a check, and whether it still runs.
type dependency struct {
	Check
	busy chan struct{} // holds one while it runs
}

// New makes a Health. The error says which check is wrong.
func New(o Options, checks ...Check) (*Health, error) {
	if o.Budget == 0 {
		o.Budget = DefaultBudget
	}
	if o.Cache == 0 {
		o.Cache = DefaultCache
	}
	if o.SchedulerLimit == 0 {
		o.SchedulerLimit = DefaultSchedulerLimit
	}
	if o.Budget < 0 || o.Cache < 0 {
		return nil, fmt.Errorf("deephealth: budget %v, cache %v: want positive durations", o.Budget, o.Cache)
	}
	h := &Health{o: o, born: time.Now()}
	names := map[string]bool{"": true, schedulerName: true}
	for i, c := range checks {
		if c.Timeout == 0 {
			c.Timeout = o.Budget
		}
		switch {
		case names[c.Name]:
			return nil, fmt.Errorf("deephealth: check %d: name %q: want one that no other check has, and not %s", i+1, c.Name, schedulerName)
		case c.Run == nil:
			return nil, fmt.Errorf("deephealth: check %s: want Run", c.Name)
		case c.Timeout < 0 || c.Timeout > o.Budget:
			return nil, fmt.Errorf("deephealth: check %s: timeout %v: want at most the budget, %v", c.Name, c.Timeout, o.Budget)
		}
		names[c.Name] = true
		h.checks = append(h.checks, &dependency{Check: c, busy: make(chan struct{}, 1)})
	}
	h.sched.late() // from now on
	return h, nil
}

// SetDraining says that the server wants no new work, as before it ends, or that it
// takes it again. It counts at once, whatever is cached.
func (h *Health) SetDraining(on bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.draining = on
}

// ServeHTTP answers with the Report.
func (h *Health) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		w.Header().Set("Allow", "GET, HEAD")
		http.Error(w, "want GET or HEAD", http.StatusMethodNotAllowed)
		return
	}
	report := h.Report(r.Context())
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	if report.Status == Unhealthy || report.Status == Draining {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(report) // who hung up wants no answer
}

// Report checks, unless the last result is fresh, and waits for that until ctx ends;
// then it tells the last one. All callers wait for the same checks.
func (h *Health) Report(ctx context.Context) Report {
	h.mu.Lock()
	if h.running == nil && (h.at.IsZero() || time.Since(h.at) >= h.o.Cache) {
		h.running = make(chan struct{})
		go h.check(h.running)
	}
	if running := h.running; running != nil {
		h.mu.Unlock()
		select {
		case <-running:
		case <-ctx.Done():
		}
		h.mu.Lock()
	}
	defer h.mu.Unlock()
	r := h.last
	r.Checks = maps.Clone(r.Checks) // the caller's own
	if r.Status == "" {             // ctx ended before the first result
		r = Report{Status: Unhealthy, Checks: map[string]Result{}}
	}
	if h.draining && r.Status != Unhealthy {
		r.Status = Draining
	}
	r.Uptime = math.Round(time.Since(h.born).Seconds()*1000) / 1000
	return r
}

// found is what one check found.
type found struct {
	*dependency
	Result
	err error
}

// check runs all checks at once, within the budget.
func (h *Health) check(done chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), h.o.Budget)
	defer cancel()
	all := make([]found, len(h.checks))
	var wait sync.WaitGroup
	for i, d := range h.checks {
		wait.Go(func() { all[i] = d.check(ctx) })
	}
	wait.Wait()
	r := Report{Status: Healthy, Checks: map[string]Result{}}
	var errs []error
	for _, f := range all {
		if f.err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f.Name, f.err))
			if f.Error = "failed"; h.o.ShowErrors || errors.Is(f.err, errSlow) {
				f.Error = f.err.Error()
			}
			if !f.Degrades {
				r.Status = Unhealthy
			} else if r.Status == Healthy {
				r.Status = Degraded
			}
		}
		r.Checks[f.Name] = f.Result
	}
	if limit := h.o.SchedulerLimit; limit > 0 {
		late := h.sched.late()
		c := Result{OK: late < limit, LatencyMs: millis(late)}
		if !c.OK {
			c.Error = fmt.Sprintf("one in a hundred goroutines waited %v or longer for a processor; the limit is %v", late, limit)
			errs = append(errs, errors.New(schedulerName+": "+c.Error))
			if r.Status == Healthy {
				r.Status = Degraded
			}
		}
		r.Checks[schedulerName] = c
	}
	h.keep(r, errors.Join(errs...), done)
}

func (h *Health) keep(r Report, err error, done chan struct{}) {
	h.mu.Lock()
	before := h.last.Status
	h.last, h.at, h.running = r, time.Now(), nil
	close(done)
	h.mu.Unlock()
	if h.o.Logger == nil || before == r.Status || before == "" && r.Status == Healthy {
		return
	}
	level := slog.LevelWarn
	if r.Status == Healthy {
		level = slog.LevelInfo
	}
	h.o.Logger.Log(context.Background(), level, "health changed", "from", before, "to", r.Status, "error", err)
}

// errSlow: no answer in time.
var errSlow = errors.New("no answer")

// check runs once, and does not wait longer than it may. What does not heed its
// context goes on, and is not started a second time meanwhile.
func (d *dependency) check(ctx context.Context) found {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	start := time.Now()
	var err error
	select {
	case d.busy <- struct{}{}:
		ended := make(chan error, 1)
		go func() {
			defer func() {
				if v := recover(); v != nil {
					ended <- fmt.Errorf("panic: %v", v)
				}
				cancel()
				<-d.busy
			}()
			ended <- d.Run(ctx)
		}()
		select {
		case err = <-ended:
		case <-ctx.Done():
			select {
			case err = <-ended: // just in time
			default:
				err = context.DeadlineExceeded
			}
		}
		if err != nil && ctx.Err() == context.DeadlineExceeded {
			err = fmt.Errorf("%w within %v", errSlow, d.Timeout)
		}
	default:
		cancel()
		err = fmt.Errorf("%w: the check before still runs", errSlow)
	}
	return found{d, Result{OK: err == nil, LatencyMs: millis(time.Since(start))}, err}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
