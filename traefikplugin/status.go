//go:build go1.21

package traefikplugin

import (
	"encoding/json"
	"net/http"
	"sort"
	"strings"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// metricPrefix stands before the names of design.md §9, as caddy_ does in Caddy.
const metricPrefix = "traefik_mcp_health_"

// statusDocument is the JSON of statusPath.
type statusDocument struct {
	Servers      []mcphealth.Snapshot `json:"servers"`
	Endpoints    []endpointDocument   `json:"endpoints"`
	Held         map[string]int       `json:"held"` // requests that wait, by group
	LostSessions int64                `json:"lostSessions"`
}

// endpointDocument is what all servers at one path were worth.
type endpointDocument struct {
	Path         string             `json:"path"`
	Availability map[string]float64 `json:"availability"` // by window
	BurnRate     map[string]float64 `json:"burnRate"`     // by window
}

// serveStatus shows every server that this plugin probes: JSON, or Prometheus
// text to those who accept that rather.
func serveStatus(rw http.ResponseWriter, req *http.Request) {
	rw.Header().Set("Cache-Control", "no-store")
	if req.Method != http.MethodGet && req.Method != http.MethodHead {
		rw.Header().Set("Allow", "GET, HEAD")
		http.Error(rw, "GET and HEAD only", http.StatusMethodNotAllowed)
		return
	}
	if wantsMetrics(req.Header.Get("Accept")) {
		rw.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = rw.Write([]byte(metrics()))
		return
	}
	all := servers()
	doc := statusDocument{Servers: []mcphealth.Snapshot{}, Endpoints: endpointDocuments(), Held: held(), LostSessions: lostSessions.Load()}
	for i := 0; i < len(all); i++ {
		doc.Servers = append(doc.Servers, shownSnapshot(all[i].checker.Snapshot()))
	}
	body, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	_, _ = rw.Write(body)
}

// shownSnapshot is s with its URLs as they are shown.
func shownSnapshot(s mcphealth.Snapshot) mcphealth.Snapshot {
	s.URL = withoutQuery(s.URL)
	s.Last.URL = s.URL
	s.Changes = append([]mcphealth.Change{}, s.Changes...)
	for i := 0; i < len(s.Changes); i++ {
		s.Changes[i].URL = s.URL
	}
	return s
}

func wantsMetrics(accept string) bool {
	return strings.Contains(accept, "openmetrics-text") || strings.Contains(accept, "text/plain")
}

func held() map[string]int {
	groups.mu.Lock()
	var all []*group
	for _, g := range groups.m {
		all = append(all, g)
	}
	groups.mu.Unlock()
	n := map[string]int{}
	for i := 0; i < len(all); i++ {
		if w := all[i].held(); w > 0 {
			n[all[i].key] = w
		}
	}
	return n
}

// endpointDocuments are all paths, in order.
func endpointDocuments() []endpointDocument {
	ledger.mu.Lock()
	var paths []string
	for p := range ledger.budgets {
		paths = append(paths, p)
	}
	ledger.mu.Unlock()
	sort.Strings(paths)
	all := []endpointDocument{}
	for i := 0; i < len(paths); i++ {
		e := budgetAt(paths[i])
		if e == nil {
			continue
		}
		doc := endpointDocument{Path: paths[i], Availability: map[string]float64{}, BurnRate: map[string]float64{}}
		over := e.availability(time.Now())
		for j := 0; j < len(over); j++ {
			if over[j].Source != "" {
				doc.Availability[over[j].Window] = over[j].Good
				doc.BurnRate[over[j].Window] = over[j].BurnRate
			}
		}
		all = append(all, doc)
	}
	return all
}

// shown is a server as the metrics show it.
type shown struct {
	labels  string
	now     mcphealth.Snapshot
	account *account
	every   time.Duration
}

// shownServers is each server once: of one that is probed in two ways the first counts.
func shownServers() []shown {
	all := servers()
	seen := map[string]bool{}
	var out []shown
	for i := 0; i < len(all); i++ {
		a := all[i].account
		labels := labelsOf(a.upstream, a.path)
		if !seen[labels] {
			out = append(out, shown{labels: labels, now: all[i].checker.Snapshot(), account: a, every: all[i].every})
		}
		seen[labels] = true
	}
	return out
}

var states = []mcphealth.State{mcphealth.Up, mcphealth.UpDegraded, mcphealth.Down, mcphealth.StateUnknown}

// metrics writes all in Prometheus's text format.
func metrics() string {
	p := &page{}
	all := shownServers()
	p.gauges(all)
	p.counters(all)
	p.ofNobody()
	return p.text.String()
}

func (p *page) gauges(all []shown) {
	p.each(all, "upstream_up", "Whether the upstream may get requests: 1 if it is up or degraded, 0 if it is down or not known yet.", func(s shown) interface{} {
		return boolean(s.now.State == mcphealth.Up || s.now.State == mcphealth.UpDegraded)
	})
	p.family("upstream_state", "gauge", "1 for the state that the upstream is in.")
	for i := 0; i < len(all); i++ {
		for j := 0; j < len(states); j++ {
			p.sample("upstream_state", all[i].labels+`,state="`+string(states[j])+`"`, boolean(all[i].now.State == states[j]))
		}
	}
	p.family("upstream_info", "gauge", "What the upstream's MCP server says of itself.")
	for i := 0; i < len(all); i++ {
		p.sample("upstream_info", all[i].labels+","+all[i].account.info(all[i].now.Last), 1)
	}
	p.each(all, "last_probe_timestamp_seconds", "When the last probe began, in Unix time; 0: there was none.", func(s shown) interface{} { return unix(s.now.LastAt) })
	p.each(all, "next_probe_timestamp_seconds", "When the next probe is due, in Unix time.", func(s shown) interface{} { return unix(s.now.Next) })
	p.each(all, "probe_interval_seconds", "How often the upstream is probed while nothing is the matter.", func(s shown) interface{} { return s.every.Seconds() })
}

// each is a gauge with one sample for each upstream.
func (p *page) each(all []shown, name, help string, value func(shown) interface{}) {
	p.family(name, "gauge", help)
	for i := 0; i < len(all); i++ {
		p.sample(name, all[i].labels, value(all[i]))
	}
}

func (p *page) counters(all []shown) {
	p.counted(all, "probes_total", "counter", "Probes that ended, by what they found.", func(s shown) {
		p.samples("probes_total", s.labels, s.account.kinds)
	})
	p.counted(all, "transitions_total", "counter", "Changes of state.", func(s shown) {
		p.samples("transitions_total", s.labels, s.account.moves)
	})
	p.counted(all, "probe_duration_seconds", "histogram", "How long whole probes took.", func(s shown) {
		p.histogram("probe_duration_seconds", s.labels, s.account.took)
	})
}

// counted is a metric out of the accounts, which write sees locked.
func (p *page) counted(all []shown, name, kind, help string, write func(shown)) {
	p.family(name, kind, help)
	for i := 0; i < len(all); i++ {
		a := all[i].account
		a.mu.Lock()
		write(all[i])
		a.mu.Unlock()
	}
}

// ofNobody are the metrics that belong to no upstream.
func (p *page) ofNobody() {
	waiting := 0
	for _, n := range held() {
		waiting += n
	}
	p.family("held_requests", "gauge", "Requests that wait for an upstream to come back now.")
	p.sample("held_requests", "", waiting)
	p.family("lost_sessions_total", "counter", "Requests whose session was lost with its upstream.")
	p.sample("lost_sessions_total", "", lostSessions.Load())
	p.family("burn_rate", "gauge", "How many times faster than the objective of 99.9 % allows an endpoint's error budget is being spent, by probes.")
	all := endpointDocuments()
	for i := 0; i < len(all); i++ {
		windows := mcphealth.BurnWindows()
		for j := 0; j < len(windows); j++ {
			if rate, known := all[i].BurnRate[windows[j].Name]; known {
				p.sample("burn_rate", `path="`+escape(all[i].Path)+`",window="`+windows[j].Name+`"`, rate)
			}
		}
	}
	ledger.mu.Lock()
	defer ledger.mu.Unlock()
	p.family("requests_total", "counter", "Requests that the plugin refused with 503. It does not see those that are served.")
	var paths []string
	for path := range ledger.refused {
		paths = append(paths, path)
	}
	sort.Strings(paths)
	for i := 0; i < len(paths); i++ {
		p.sample("requests_total", labelsOf("", paths[i])+`,outcome="unavailable"`, ledger.refused[paths[i]])
	}
	p.family("hold_seconds", "histogram", "How long requests waited for an upstream to come back, whatever came of it.")
	p.histogram("hold_seconds", "", ledger.held)
}

func boolean(b bool) int {
	if b {
		return 1
	}
	return 0
}

func unix(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}
