package mcphealth

import (
	"math"
	"strconv"
	"strings"
	"testing"
	"time"
)

// what an endpoint is fed in a span of time: requests, and seconds of which the probes
// know.
type spell struct {
	over        time.Duration
	good, bad   float64 // requests
	secondsUp   float64
	secondsDown float64
}

func TestBudget(t *testing.T) {
	const day = 24 * time.Hour
	tests := []struct {
		name  string
		feed  []spell
		rates string // burn rate over 5m 30m 1h 6h 3d; - where nothing is known
		by    string // which of traffic and probes decides
	}{
		{"nothing is known", nil, "- - - - -", "-----"},
		{"all is well", []spell{{over: time.Minute, good: 100, secondsUp: 60}}, "0 0 0 0 0", "ttttt"},
		{"probes alone, up", []spell{{over: time.Minute, secondsUp: 60}}, "0 0 0 0 0", "ppppp"},
		{"probes alone, down for a minute since the start", []spell{{over: time.Minute, secondsDown: 60}}, "200 33.3 16.7 2.78 0.231", "ppppp"},
		{"probes alone, down for a week", []spell{{over: 7 * day, secondsDown: 7 * 86400}}, "1000 1000 1000 1000 1000", "ppppp"},
		{"one in a thousand burns at 1", []spell{{over: time.Minute, good: 9990, bad: 10}}, "1 1 1 1 1", "ttttt"},
		{"14.4 in a thousand page", []spell{{over: time.Hour, good: 9856, bad: 144}}, "14.4 14.4 14.4 14.4 14.4", "ttttt"},
		{"a failure at night is none of traffic's", []spell{{over: time.Minute, bad: 1, secondsUp: 60}}, "0 0 0 0 0", "ppppp"},
		{"nor is one among the few of a quiet night", []spell{{over: time.Minute, good: 19, bad: 1, secondsUp: 60}}, "0 0 0 0 0", "ttttt"},
		{"two are a pattern", []spell{{over: time.Minute, good: 38, bad: 2, secondsUp: 60}}, "50 50 50 50 50", "ttttt"},
		{"few are all that is known without probes", []spell{{over: time.Minute, bad: 2}}, "1000 1000 1000 1000 1000", "ttttt"},
		{"an outage that no request met", []spell{{over: 50 * time.Minute, good: 1000, secondsUp: 3000}, {over: 10 * time.Minute, secondsDown: 600}},
			"1000 333 167 27.8 2.31", "ppppp"},
		{"failures that no probe meets", []spell{{over: 10 * time.Minute, good: 50, bad: 50, secondsUp: 600}}, "500 500 500 500 500", "ttttt"},
		{"an hour later the short windows have forgotten", []spell{{over: time.Minute, bad: 100}, {over: 59 * time.Minute, good: 900}},
			"0 0 100 100 100", "ttttt"},
		{"three days later all have", []spell{{over: time.Minute, bad: 100}, {over: 3*day + 11*time.Minute, good: 10}}, "0 0 0 0 0", "ttttt"},
		{"and two days later only the longest has not", []spell{{over: time.Minute, bad: 100}, {over: 2 * day, good: 100}}, "0 0 0 0 500", "ttttt"},
	}
	for _, tt := range tests {
		now := time.Date(2026, 11, 30, 3, 0, 0, 0, time.UTC)
		b := NewBudget(now)
		var sum Totals
		for _, s := range tt.feed {
			steps := int(s.over / (10 * time.Second))
			for range steps {
				n := float64(steps)
				sum.Traffic.Good += s.good / n
				sum.Traffic.Total += (s.good + s.bad) / n
				sum.Probes.Good += s.secondsUp / n
				sum.Probes.Total += (s.secondsUp + s.secondsDown) / n
				now = now.Add(10 * time.Second)
				b.Observe(now, sum)
			}
		}
		windows, by := BurnWindows(), ""
		for i, a := range b.Over(now, sum, DefaultObjective) {
			if a.Window != windows[i].Name {
				t.Errorf("%s: window %d is %s, want %s", tt.name, i, a.Window, windows[i].Name)
			}
			by += (a.Source + "-")[:1]
			want := strings.Fields(tt.rates)[i]
			if a.Source == "" {
				if want != "-" {
					t.Errorf("%s: nothing is known over %s, want %s", tt.name, a.Window, want)
				}
				continue
			}
			// A window is up to a step longer than its name.
			if got, want := a.BurnRate, number(t, want); math.Abs(got-want) > 0.04*want+1e-6 || math.Abs(a.Good-(1-got/1000)) > 1e-9 {
				t.Errorf("%s: burn rate over %s = %v (%v good), want about %v", tt.name, a.Window, got, a.Good, want)
			}
		}
		if by != tt.by {
			t.Errorf("%s: decided by %s, want %s", tt.name, by, tt.by)
		}
	}
}

func TestBurnSeverity(t *testing.T) {
	tests := []struct {
		rates string // over 5m 30m 1h 6h 3d
		want  Severity
	}{
		{"0 0 0 0 0", SeverityNone},
		{"15 0 15 0 0", SeverityPage},
		{"15 15 14.4 0 0", SeverityNone},
		{"0 0 15 0 0", SeverityNone}, // it has stopped
		{"0 7 0 7 0", SeverityPage},
		{"0 0 0 7 0", SeverityNone},
		{"0 0 0 1.1 1.1", SeverityTicket},
		{"1000 1000 0 0 1.1", SeverityNone},
		{"15 7 15 7 7", SeverityPage},
	}
	for _, tt := range tests {
		var all []Availability
		for i, rate := range strings.Fields(tt.rates) {
			all = append(all, Availability{Window: BurnWindows()[i].Name, BurnRate: number(t, rate)})
		}
		if got := BurnSeverity(all); got != tt.want {
			t.Errorf("burn rates %s call for %s, want %s", tt.rates, got, tt.want)
		}
	}
}

// A budget that nobody looked after for a while, as while the machine slept, counts
// what came then as of now, and goes on.
func TestBudgetAfterAGap(t *testing.T) {
	for _, gap := range []time.Duration{time.Second, time.Minute, 2 * time.Hour, 30 * 24 * time.Hour} {
		now := time.Now()
		b := NewBudget(now)
		sum := Totals{Traffic: Share{100, 100}}
		b.Observe(now.Add(time.Minute), sum)
		sum.Traffic = Share{100, 200}
		now = now.Add(time.Minute + gap)
		all := b.Over(now, sum, DefaultObjective)
		for i, w := range BurnWindows() {
			want := 100.0
			if w.Span >= gap+time.Minute {
				want = 200
			}
			// up to a step longer
			if got := all[i].Traffic.Total; got != want && (got != 200 || gap+time.Minute > w.Span+coarseStep) {
				t.Errorf("after a gap of %v, %s saw %v requests, want %v", gap, w.Name, got, want)
			}
		}
		if got := b.Over(now.Add(time.Hour), sum, DefaultObjective); got[0].Traffic.Total != 0 {
			t.Errorf("after a gap of %v and an hour, 5m saw %v requests, want none", gap, got[0].Traffic.Total)
		}
	}
}

// Its memory is fixed: 25 KB.
func TestBudgetIsSmall(t *testing.T) {
	b := NewBudget(time.Now())
	if got := (len(b.fine.slots) + len(b.coarse.slots)) * 32; got > 26<<10 {
		t.Errorf("a budget takes %d bytes, want at most 26 KiB", got)
	}
}

func number(t *testing.T, s string) float64 {
	t.Helper()
	f, err := strconv.ParseFloat(s, 64)
	if err != nil {
		t.Fatal(err)
	}
	return f
}
