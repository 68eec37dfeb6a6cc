package deephealth

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// quiet is without the scheduler, whose latency is the machine's.
var quiet = Options{SchedulerLimit: -1}

func fine(context.Context) error   { return nil }
func broken(context.Context) error { return errors.New("dial db.internal: refused") }
func hangs(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}

func health(t *testing.T, o Options, checks ...Check) *Health {
	t.Helper()
	h, err := New(o, checks...)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func get(h *Health, method string) (int, string) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, "/health", nil))
	return w.Code, w.Body.String()
}

func TestStatus(t *testing.T) {
	tests := []struct {
		name     string
		checks   []Check
		draining bool
		status   string
		code     int
	}{
		{"no check", nil, false, Healthy, 200},
		{"all is well", []Check{{Name: "a", Run: fine}, {Name: "b", Run: fine}}, false, Healthy, 200},
		{"one is broken", []Check{{Name: "a", Run: fine}, {Name: "b", Run: broken}}, false, Unhealthy, 503},
		{"one hangs", []Check{{Name: "a", Run: hangs}}, false, Unhealthy, 503},
		{"one panics", []Check{{Name: "a", Run: func(context.Context) error { panic("oh") }}}, false, Unhealthy, 503},
		{"a lesser one is broken", []Check{{Name: "a", Run: fine}, {Name: "b", Run: broken, Degrades: true}}, false, Degraded, 200},
		{"both kinds", []Check{{Name: "a", Run: broken}, {Name: "b", Run: broken, Degrades: true}}, false, Unhealthy, 503},
		{"draining", []Check{{Name: "a", Run: fine}}, true, Draining, 503},
		{"draining and degraded", []Check{{Name: "a", Run: broken, Degrades: true}}, true, Draining, 503},
		{"draining and broken", []Check{{Name: "a", Run: broken}}, true, Unhealthy, 503},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := health(t, quiet, tt.checks...)
				h.SetDraining(tt.draining)
				code, body := get(h, "GET")
				var r Report
				if err := json.Unmarshal([]byte(body), &r); err != nil || r.Status != tt.status || code != tt.code || len(r.Checks) != len(tt.checks) {
					t.Errorf("%d %s, want %d %s", code, body, tt.code, tt.status)
				}
				if h.SetDraining(false); tt.draining && tt.status == Draining {
					if code, body := get(h, "GET"); code != 200 {
						t.Errorf("drained no more: %d %s", code, body)
					}
				}
			})
		})
	}
}

// The document has the keys of mcphealth serve, and no text of an error unless asked
// for.
func TestDocument(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		checks := []Check{{Name: "db", Run: broken}, {Name: "fs", Run: fine}, {Name: "net", Run: hangs, Timeout: 200 * time.Millisecond, Degrades: true}}
		for show, want := range map[bool]string{
			false: `{"status":"unhealthy","uptime":60.2,"checks":{"db":{"ok":false,"latencyMs":0,"error":"failed"},"fs":{"ok":true,"latencyMs":0,"error":""},"net":{"ok":false,"latencyMs":200,"error":"no answer within 200ms"}}}`,
			true:  `"error":"dial db.internal: refused"`,
		} {
			h := health(t, Options{SchedulerLimit: -1, ShowErrors: show}, checks...)
			time.Sleep(time.Minute)
			if _, body := get(h, "GET"); !strings.Contains(body, want) {
				t.Errorf("%s, want %s", body, want)
			}
		}
	})
}

func TestMethods(t *testing.T) {
	h := health(t, Options{})
	if code, _ := get(h, "HEAD"); code != 200 {
		t.Errorf("HEAD: %d", code)
	}
	if code, _ := get(h, "POST"); code != 405 {
		t.Errorf("POST: %d", code)
	}
	if _, body := get(h, "GET"); !regexp.MustCompile(`"checks":\{"scheduler":\{"ok":true,"latencyMs":[0-9.]+,"error":""\}\}`).MatchString(body) {
		t.Errorf("%s", body)
	}
}

// All checks run at once, and together take no longer than the budget, whatever
// they do.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		var checks []Check
		for i := range 50 {
			checks = append(checks, Check{Name: fmt.Sprint(i), Run: hangs})
		}
		runs := 0
		checks = append(checks, Check{Name: "deaf", Run: func(context.Context) error { runs++; <-release; return nil }})
		h := health(t, quiet, checks...)
		for range 3 {
			start := time.Now()
			r := h.Report(t.Context())
			if took := time.Since(start); took != DefaultBudget || r.Status != Unhealthy {
				t.Errorf("%s after %v, want %v", r.Status, took, DefaultBudget)
			}
			time.Sleep(DefaultCache)
		}
		if runs != 1 {
			t.Errorf("the deaf check was started %d times, want once: it still runs", runs)
		}
		if e := h.Report(t.Context()).Checks["deaf"].Error; e != "no answer: the check before still runs" {
			t.Errorf("%q", e)
		}
		close(release)
		time.Sleep(DefaultCache)
		if c := h.Report(t.Context()).Checks["deaf"]; !c.OK || runs != 2 {
			t.Errorf("%+v after %d runs: want that it counts again", c, runs)
		}
	})
}

// However many ask: once per cache period, and never twice at a time.
func TestManyCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var runs, at, most atomic.Int32
		h := health(t, quiet, Check{Name: "a", Run: func(context.Context) error {
			runs.Add(1)
			most.Store(max(most.Load(), at.Add(1)))
			time.Sleep(100 * time.Millisecond)
			at.Add(-1)
			return nil
		}})
		var all sync.WaitGroup
		for i := range 10_000 {
			all.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond) // for 10 s
				if r := h.Report(t.Context()); r.Status != Healthy {
					t.Errorf("%s", r.Status)
				}
			})
		}
		all.Wait()
		if runs.Load() != 2 || most.Load() != 1 {
			t.Errorf("%d runs in 10 s, %d at once; want 2, one by one", runs.Load(), most.Load())
		}
	})
}

// A caller that leaves takes no check with it, and hears what is known.
func TestCallerLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := health(t, quiet, Check{Name: "a", Run: func(context.Context) error { time.Sleep(400 * time.Millisecond); return nil }})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		if r := h.Report(ctx); r.Status != Unhealthy || r.Checks == nil {
			t.Errorf("%+v", r)
		}
		if r := h.Report(t.Context()); r.Status != Healthy {
			t.Errorf("%+v", r)
		}
	})
}

// A change is told once, with the error.
func TestLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		bad := false
		h := health(t, Options{SchedulerLimit: -1, Logger: slog.New(slog.NewTextHandler(&log, nil))}, Check{Name: "db", Run: func(ctx context.Context) error {
			if bad {
				return broken(ctx)
			}
			return nil
		}})
		for _, bad = range []bool{false, false, true, true, false} {
			h.Report(t.Context())
			time.Sleep(DefaultCache)
		}
		synctest.Wait() // the last line is written after the answer
		want := []string{`level=WARN msg="health changed" from=healthy to=unhealthy error="db: dial db.internal: refused"`, `level=INFO msg="health changed" from=unhealthy to=healthy`}
		lines := strings.Split(strings.TrimSpace(log.String()), "\n")
		if len(lines) != 2 || !strings.Contains(lines[0], want[0]) || !strings.Contains(lines[1], want[1]) {
			t.Errorf("log:\n%s", &log)
		}
	})
}

func TestBadChecks(t *testing.T) {
	tests := []struct {
		o      Options
		checks []Check
		want   string
	}{
		{Options{Budget: -1}, nil, "want positive durations"},
		{Options{}, []Check{{Run: fine}}, `check 1: name ""`},
		{Options{}, []Check{{Name: "a", Run: fine}, {Name: "a", Run: fine}}, `check 2: name "a"`},
		{Options{}, []Check{{Name: "scheduler", Run: fine}}, `name "scheduler"`},
		{Options{}, []Check{{Name: "a"}}, "check a: want Run"},
		{Options{}, []Check{{Name: "a", Run: fine, Timeout: time.Second}}, "timeout 1s: want at most the budget, 500ms"},
		{Options{}, []Check{{Name: "a", Run: fine, Timeout: -time.Second}}, "timeout -1s"},
	}
	for _, tt := range tests {
		if _, err := New(tt.o, tt.checks...); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("New = %v, want %s", err, tt.want)
		}
	}
}

func TestPercentile99(t *testing.T) {
	bounds := []float64{math.Inf(-1), 0, .001, .1, 1, math.Inf(1)}
	tests := []struct {
		counts []uint64
		want   time.Duration
	}{
		{[]uint64{0, 0, 0, 0, 0}, 0},
		{[]uint64{5, 100, 0, 0, 0}, 0},
		{[]uint64{0, 1000, 0, 9, 0}, 0},
		{[]uint64{0, 1000, 0, 11, 0}, 100 * time.Millisecond},
		{[]uint64{0, 10, 1, 0, 0}, time.Millisecond},
		{[]uint64{0, 1, 0, 0, 3}, time.Second},
	}
	for _, tt := range tests {
		if got := percentile99(tt.counts, bounds); got != tt.want {
			t.Errorf("percentile99(%v) = %v, want %v", tt.counts, got, tt.want)
		}
	}
}

// A busy process is seen, and the time before the last check does not count.
func TestScheduler(t *testing.T) {
	var s scheduler
	s.late()
	s.before[len(s.before)/2] -= 1000 // as if a thousand had waited since
	if s.late() == 0 {
		t.Error("a thousand that waited are not seen")
	}
	if late := s.late(); late > time.Second {
		t.Errorf("%v: want what was since the last check", late)
	}
	h := health(t, Options{SchedulerLimit: 1}) // a nanosecond
	h.sched.before[len(h.sched.before)/2] -= 1000
	if r := h.Report(t.Context()); r.Status != Degraded || r.Checks["scheduler"].Error == "" {
		t.Errorf("%+v", r)
	}
}
