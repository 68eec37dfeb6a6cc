package mcphealth

import (
	"math"
	"testing"
	"time"
)

// An outage of the probes from minute 30 to 35 of the last hour, and calls that fail
// in the last minute, are seen in their minutes and in no others.
func TestBudgetPast(t *testing.T) {
	start := time.Date(2026, 11, 30, 3, 0, 0, 0, time.UTC)
	b := NewBudget(start)
	var totals Totals
	now := start
	for ; now.Sub(start) < time.Hour; now = now.Add(time.Second) {
		b.Observe(now, totals)
		minute := int(now.Sub(start) / time.Minute)
		totals.Probes.Total++
		if minute < 30 || minute >= 35 {
			totals.Probes.Good++
		}
		if minute == 59 {
			totals.Traffic.Total += 4
			totals.Traffic.Good += 3
		}
	}
	minutes := b.Past(now, totals, time.Minute, 60, DefaultObjective)
	if len(minutes) != 60 {
		t.Fatalf("%d minutes, want 60", len(minutes))
	}
	for i, a := range minutes {
		want, source := 1.0, "probes"
		switch {
		case i >= 30 && i < 35:
			want = 0
		case i == 59:
			want, source = 0.75, "traffic"
		}
		if math.Abs(a.Good-want) > 0.02 || a.Source != source {
			t.Errorf("minute %d: %v by %q, want %v by %q", i, a.Good, a.Source, want, source)
		}
	}
	hours := b.Past(now, totals, time.Hour, 72, DefaultObjective)
	for i := 0; i < 71; i++ {
		if hours[i].Source != "" {
			t.Errorf("hour %d: %v by %q, want nothing known", i, hours[i].Good, hours[i].Source)
		}
	}
	if got, want := hours[71].Good, 0.75; math.Abs(got-want) > 0.02 { // the worse of the two
		t.Errorf("the last hour: %v, want %v", got, want)
	}
}
