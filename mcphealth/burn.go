//go:build go1.21

package mcphealth

import "time"

// The objective and the windows are those of Google's SRE Workbook, chapter 5
// "Alerting on SLOs", table 5-8: 99.9 % of the requests are answered well.
const DefaultObjective = 0.999

const (
	// fineStep and coarseStep are how far apart the remembered totals stand: 10 s for
	// the windows up to an hour, 10 min for those up to three days. A window is longer
	// than its name by less than a step.
	fineStep   = 10 * time.Second
	coarseStep = 10 * time.Minute

	// MinRequests is how many requests within a window are a measure: 10. Below that
	// a single failure would burn a month's budget in one night, and probes speak.
	MinRequests = 10

	// forgiven is how many bad requests within a window burn nothing: 1. Any that is
	// alone among less than 70 would page, and an accident is no outage.
	forgiven = 1
)

// BurnWindow is a span of time over which availability is measured.
type BurnWindow struct {
	Name string
	Span time.Duration
}

// BurnWindows are those of the alerts: 1h with 5m and 6h with 30m page, 3d with 6h
// makes a ticket.
func BurnWindows() []BurnWindow {
	return []BurnWindow{
		{"5m", 5 * time.Minute}, {"30m", 30 * time.Minute}, {"1h", time.Hour},
		{"6h", 6 * time.Hour}, {"3d", 72 * time.Hour},
	}
}

// Share is how much of a whole was good: requests, or seconds.
type Share struct {
	Good  float64 `json:"good"`
	Total float64 `json:"total"`
}

// badOf is the bad part of a whole, 0 to 1.
func (s Share) badOf(whole float64) float64 {
	if s.Good >= s.Total || whole <= 0 {
		return 0
	}
	return (s.Total - s.Good) / whole
}

// Totals are what has been counted of an endpoint since it is known; they only grow.
type Totals struct {
	// Traffic is in requests: those that were not unavailable, not answered with a
	// 5xx and not with an internal error are good.
	Traffic Share
	// Probes is in seconds during which something was known of an upstream; good are
	// those in which one could serve.
	Probes Share
}

func (t Totals) minus(o Totals) Totals {
	return Totals{
		Traffic: Share{t.Traffic.Good - o.Traffic.Good, t.Traffic.Total - o.Traffic.Total},
		Probes:  Share{t.Probes.Good - o.Probes.Good, t.Probes.Total - o.Probes.Total},
	}
}

// Availability is what an endpoint was worth over one window.
type Availability struct {
	Window  string
	Traffic Share // requests
	Probes  Share // seconds
	// Source is which of the two decides: "traffic" or "probes"; "" while nothing is
	// known. The worse one does: probes tell of an outage that no request met, and
	// requests of failures that no probe meets. Traffic speaks from MinRequests on, as
	// a share of the requests; probes as a share of the window, so that ten seconds
	// after a start burn no more than ten seconds at any other time.
	Source string
	// Good is the share of good work, 0 to 1.
	Good float64
	// BurnRate is how many times faster than the objective allows the error budget is
	// being spent: at 1 it lasts exactly as long as the objective's period.
	BurnRate float64
}

// Severity is how much it matters that an error budget is being spent.
type Severity string

const (
	SeverityNone   Severity = "none"
	SeverityTicket Severity = "ticket" // somebody should look within days
	SeverityPage   Severity = "page"   // somebody should look now
)

// burnAlerts are those of the SRE Workbook, table 5-8. Both windows must burn: the
// long one says that it matters, the short one that it has not stopped.
var burnAlerts = []struct {
	long, short string
	rate        float64
	severity    Severity
}{
	{"1h", "5m", 14.4, SeverityPage}, // 2 % of a month's budget
	{"6h", "30m", 6, SeverityPage},   // 5 %
	{"3d", "6h", 1, SeverityTicket},  // 10 %
}

// BurnSeverity is what the burn rates over all windows call for.
func BurnSeverity(all []Availability) Severity {
	rates := map[string]float64{}
	for i := 0; i < len(all); i++ {
		rates[all[i].Window] = all[i].BurnRate
	}
	for i := 0; i < len(burnAlerts); i++ {
		a := burnAlerts[i]
		if rates[a.long] > a.rate && rates[a.short] > a.rate {
			return a.severity
		}
	}
	return SeverityNone
}

// A Budget remembers an endpoint's totals for three days in 25 KB. It reads no clock,
// and one goroutine at a time may use it.
type Budget struct {
	born         time.Time
	fine, coarse history
}

// NewBudget makes a budget whose first totals are of now.
func NewBudget(now time.Time) *Budget {
	return &Budget{
		born:   now,
		fine:   history{step: fineStep, slots: make([]Totals, time.Hour/fineStep+1)},
		coarse: history{step: coarseStep, slots: make([]Totals, 72*time.Hour/coarseStep+1)},
	}
}

// Observe remembers the totals. Call it every few seconds: what was counted between
// two calls belongs to the time of the second.
func (b *Budget) Observe(now time.Time, t Totals) {
	age := now.Sub(b.born)
	b.fine.note(age, t)
	b.coarse.note(age, t)
}

// Over is what the endpoint was worth over each of BurnWindows until now, given the
// totals of now. objective is between 0 and 1, as 0.999.
func (b *Budget) Over(now time.Time, t Totals, objective float64) []Availability {
	b.Observe(now, t)
	age := now.Sub(b.born)
	windows := BurnWindows()
	all := make([]Availability, 0, len(windows))
	for i := 0; i < len(windows); i++ {
		w := windows[i]
		h := &b.fine
		if w.Span > time.Hour {
			h = &b.coarse
		}
		all = append(all, availability(w, t.minus(h.before(age-w.Span)), objective, forgiven))
	}
	return all
}

// Past is what the endpoint was worth in each of the last n spans of time until now,
// the oldest first; Source is "" where nothing is known. A span is a multiple of 10 s
// within the last hour, or of 10 min within three days.
func (b *Budget) Past(now time.Time, t Totals, span time.Duration, n int, objective float64) []Availability {
	b.Observe(now, t)
	age := now.Sub(b.born)
	h := &b.fine
	if span*time.Duration(n) > time.Hour {
		h = &b.coarse
	}
	all := make([]Availability, 0, n)
	from := h.before(age - span*time.Duration(n))
	for i := n - 1; i >= 0; i-- {
		to := t
		if i > 0 {
			to = h.before(age - span*time.Duration(i))
		}
		all = append(all, availability(BurnWindow{Span: span}, to.minus(from), objective, 0))
		from = to
	}
	return all
}

func availability(w BurnWindow, t Totals, objective, pardon float64) Availability {
	a := Availability{Window: w.Name, Traffic: t.Traffic, Probes: t.Probes}
	var bad float64
	if t.Probes.Total > 0 {
		a.Source = "probes"
		bad = t.Probes.badOf(w.Span.Seconds())
		if bad > 1 {
			bad = 1
		}
	}
	lost := t.Traffic.badOf(t.Traffic.Total)
	if t.Traffic.Total-t.Traffic.Good <= pardon {
		lost = 0
	}
	measured := t.Traffic.Total >= MinRequests || t.Traffic.Total > 0 && a.Source == ""
	if measured && lost >= bad {
		a.Source = "traffic"
		bad = lost
	}
	if a.Source != "" {
		a.Good, a.BurnRate = 1-bad, bad/(1-objective)
	}
	return a
}

// history keeps the totals at the begin of each of the last steps: slots[n%len] is
// that of step n, up to the newest.
type history struct {
	step   time.Duration
	slots  []Totals
	newest int
	last   Totals // as noted last
}

// note keeps the totals t of the step that age lies in. What it adds to the last ones
// is counted as of now: a step that began meanwhile began with those.
func (h *history) note(age time.Duration, t Totals) {
	n := int(age / h.step)
	from := h.newest + 1
	if n-from >= len(h.slots) {
		from = n - len(h.slots) + 1
	}
	for i := from; i <= n; i++ {
		h.slots[i%len(h.slots)] = h.last
	}
	if n > h.newest {
		h.newest = n
	}
	h.last = t
}

// before returns the totals at the begin of the step that age lies in: nothing,
// before there was anything.
func (h *history) before(age time.Duration) Totals {
	n := int(age / h.step)
	if age < 0 || n < 1 {
		return Totals{}
	}
	if oldest := h.newest - len(h.slots) + 1; n < oldest {
		n = oldest
	}
	return h.slots[n%len(h.slots)]
}
