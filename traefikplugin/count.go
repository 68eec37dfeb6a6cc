//go:build go1.21

package traefikplugin

import (
	"fmt"
	"net/url"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// maxLabel is how long a label value may be, in bytes: 128. What a server calls
	// itself is its own choice.
	maxLabel = 128
	// maxInfos is how many names and versions of one upstream get a series of their
	// own: one that calls itself something else in each answer must not fill the disk
	// of a Prometheus. Further ones are "other".
	maxInfos = 10
)

// probeBuckets and holdBuckets are the upper bounds of the histograms, in seconds: the
// same as in Caddy.
var (
	probeBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}
	holdBuckets  = []float64{.01, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60}
)

// histogram counts durations; whoever has it locks.
type histogram struct {
	bounds []float64
	n      []uint64 // by bucket, one more than bounds
	sum    float64
}

func newHistogram(bounds []float64) *histogram {
	return &histogram{bounds: bounds, n: make([]uint64, len(bounds)+1)}
}

func (h *histogram) observe(seconds float64) {
	i := sort.SearchFloat64s(h.bounds, seconds)
	h.n[i]++
	h.sum += seconds
}

// account is what is counted of one upstream at one path. It outlives reloads, and
// ends with the last server of that name.
type account struct {
	upstream, path string
	refs           int // guarded by ledger.mu

	mu    sync.Mutex
	kinds map[string]uint64 // probes, by the labels verdict and reason
	moves map[string]uint64 // changes of state, by the labels to and reason
	took  *histogram
	infos map[string]bool // that got a series
}

// budget is the error budget of all upstreams at one path. It hears of probes alone:
// the plugin sees no answers.
type budget struct {
	refs int // guarded by ledger.mu

	mu     sync.Mutex
	states map[mcphealth.State]int
	noted  time.Time
	probes mcphealth.Share // seconds
	past   *mcphealth.Budget
}

// ledger holds all accounts, and what belongs to no upstream.
var ledger = struct {
	mu       sync.Mutex
	accounts map[string]*account // by their labels
	budgets  map[string]*budget
	refused  map[string]uint64 // 503s, by the configured path
	held     *histogram
}{accounts: map[string]*account{}, budgets: map[string]*budget{}, refused: map[string]uint64{}, held: newHistogram(holdBuckets)}

// openAccount finds or makes the account of a target. Each call needs a closeAccount.
func openAccount(target string) *account {
	upstream, path := target, ""
	if u, err := url.Parse(target); err == nil {
		upstream, path = u.Host, u.Path
	}
	key := labelsOf(upstream, path)
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	a := ledger.accounts[key]
	if a == nil {
		a = &account{upstream: upstream, path: path, kinds: map[string]uint64{}, moves: map[string]uint64{}, took: newHistogram(probeBuckets), infos: map[string]bool{}}
		ledger.accounts[key] = a
	}
	a.refs++
	e := ledger.budgets[path]
	if e == nil {
		now := time.Now()
		e = &budget{states: map[mcphealth.State]int{}, noted: now, past: mcphealth.NewBudget(now)}
		ledger.budgets[path] = e
	}
	e.refs++
	e.move("", mcphealth.StateUnknown)
	return a
}

// closeAccount gives one back whose server was in this state.
func closeAccount(a *account, state mcphealth.State) {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	if a.refs--; a.refs == 0 {
		delete(ledger.accounts, labelsOf(a.upstream, a.path))
	}
	e := ledger.budgets[a.path]
	e.move(state, "")
	if e.refs--; e.refs == 0 {
		delete(ledger.budgets, a.path)
	}
}

// probed counts a probe.
func (a *account) probed(r mcphealth.Result) {
	a.mu.Lock()
	a.kinds[`verdict="`+string(r.Verdict)+`",reason="`+string(r.Reason)+`"`]++
	a.took.observe(time.Since(r.At).Seconds())
	a.mu.Unlock()
	if e := budgetAt(a.path); e != nil {
		e.availability(time.Now())
	}
}

// moved counts a change.
func (a *account) moved(c mcphealth.Change) {
	a.mu.Lock()
	a.moves[`to="`+string(c.To)+`",reason="`+string(c.Reason)+`"`]++
	a.mu.Unlock()
	if e := budgetAt(a.path); e != nil {
		e.move(c.From, c.To)
	}
}

func budgetAt(path string) *budget {
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	return ledger.budgets[path]
}

// move counts a server out of one state and into another; "" is none.
func (e *budget) move(from, to mcphealth.State) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pass(time.Now())
	e.states[from]--
	e.states[to]++
}

// pass credits the time since it was called last to what the servers were.
func (e *budget) pass(now time.Time) {
	seconds := now.Sub(e.noted).Seconds()
	if seconds <= 0 {
		return
	}
	e.noted = now
	up := e.states[mcphealth.Up] + e.states[mcphealth.UpDegraded]
	if up > 0 {
		e.probes.Good += seconds
	}
	if up+e.states[mcphealth.Down] > 0 {
		e.probes.Total += seconds
	}
}

// availability is over all windows until now, and remembers the totals of now.
func (e *budget) availability(now time.Time) []mcphealth.Availability {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pass(now)
	return e.past.Over(now, mcphealth.Totals{Probes: e.probes}, mcphealth.DefaultObjective)
}

// info are the labels of what the server says of itself.
func (a *account) info(r mcphealth.Result) string {
	protocol := ""
	for i := 0; i < len(r.ProtocolVersions); i++ {
		if r.ProtocolVersions[i] > protocol {
			protocol = r.ProtocolVersions[i]
		}
	}
	words := `protocol="` + escape(protocol) + `",server="` + escape(r.Server.Name) + `",version="` + escape(r.Server.Version) + `"`
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.infos[words] {
		if len(a.infos) >= maxInfos {
			words = `protocol="other",server="other",version="other"`
		} else {
			a.infos[words] = true
		}
	}
	era := r.Era
	if era == "" {
		era = mcphealth.EraUnknown
	}
	return `era="` + string(era) + `",` + words
}

// countRefused counts a 503 of ours.
func countRefused(path string) {
	ledger.mu.Lock()
	ledger.refused[path]++
	ledger.mu.Unlock()
}

// countHeld counts how long a request waited, whatever came of it.
func countHeld(since time.Time) {
	ledger.mu.Lock()
	ledger.held.observe(time.Since(since).Seconds())
	ledger.mu.Unlock()
}

// lostSessions counts the requests whose session was lost with its server.
var lostSessions atomic.Int64

// labelsOf are the labels by which upstreams are told apart.
func labelsOf(upstream, path string) string {
	return `upstream="` + escape(upstream) + `",path="` + escape(path) + `"`
}

// escape makes a label value (Prometheus text format 0.0.4): valid and short.
func escape(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) > maxLabel {
		s = strings.ToValidUTF8(s[:maxLabel], "")
	}
	return strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s)
}

// page collects Prometheus text, one family after the other.
type page struct{ text strings.Builder }

// family begins the samples of one metric.
func (p *page) family(name, kind, help string) {
	_, _ = p.text.WriteString("# HELP " + metricPrefix + name + " " + help + "\n# TYPE " + metricPrefix + name + " " + kind + "\n")
}

func (p *page) sample(name, labels string, value interface{}) {
	if labels != "" {
		labels = "{" + labels + "}"
	}
	_, _ = p.text.WriteString(metricPrefix + name + labels + " " + fmt.Sprint(value) + "\n")
}

// samples writes counters, in the order of their labels.
func (p *page) samples(name, labels string, n map[string]uint64) {
	var all []string
	for k := range n {
		all = append(all, k)
	}
	sort.Strings(all)
	for i := 0; i < len(all); i++ {
		p.sample(name, labels+","+all[i], n[all[i]])
	}
}

func (p *page) histogram(name, labels string, h *histogram) {
	all := uint64(0)
	before := labels
	if before != "" {
		before += ","
	}
	for i := 0; i < len(h.n); i++ {
		all += h.n[i]
		bound := "+Inf"
		if i < len(h.bounds) {
			bound = fmt.Sprint(h.bounds[i])
		}
		p.sample(name+"_bucket", before+`le="`+bound+`"`, all)
	}
	p.sample(name+"_sum", labels, h.sum)
	p.sample(name+"_count", labels, all)
}
