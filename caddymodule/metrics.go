package caddymodule

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/caddyserver/caddy/v2"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// maxLabel is how long a label value may be, in bytes: 128. Addresses and paths
	// are shorter; what a server calls itself is its own choice.
	maxLabel = 128

	// maxInfos is how many names, versions and protocols of one upstream get a series
	// of their own within infoSpan: a server that calls itself something else in each
	// answer must not fill the disk of a Prometheus.
	maxInfos = 10
	infoSpan = 24 * time.Hour

	// otherInfo is what further ones are called.
	otherInfo = "other"
)

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("caddy_mcp_health_"+name, help, labels, nil)
}

// The metrics. Those with the labels upstream and path are there for as long as a
// configuration names the upstream; in requests_total, upstream is empty for requests
// that reached none.
var (
	descUp          = desc("upstream_up", "Whether the upstream may get requests: 1 if it is up or degraded, 0 if it is down or not known yet.", "upstream", "path")
	descPeers       = desc("upstream_peers_up", "How many upstreams of the same reverse_proxy may get requests, the upstream itself among them; the fewest, where it is in several.", "upstream", "path")
	descState       = desc("upstream_state", "1 for the state that the upstream is in.", "upstream", "path", "state")
	descSince       = desc("upstream_since_timestamp_seconds", "Since when the upstream is in its state, in Unix time, and the reason for it.", "upstream", "path", "state", "reason")
	descInfo        = desc("upstream_info", "What the upstream's MCP server says of itself.", "upstream", "path", "era", "protocol", "server", "version")
	descWarning     = desc("upstream_warning", "1 for each warning of the last probe.", "upstream", "path", "warning")
	descProbes      = desc("probes_total", "Probes that ended, by what they found.", "upstream", "path", "verdict", "reason")
	descDuration    = desc("probe_duration_seconds", "How long whole probes took.", "upstream", "path")
	descLast        = desc("last_probe_timestamp_seconds", "When the last probe began, in Unix time; 0: there was none.", "upstream", "path")
	descNext        = desc("next_probe_timestamp_seconds", "When the next probe is due, in Unix time; later than an interval after the last one while traffic stands in for probes, or the server asked to be left alone. 0: none is planned.", "upstream", "path")
	descInterval    = desc("probe_interval_seconds", "How often the upstream is probed while nothing is the matter.", "upstream", "path")
	descTransitions = desc("transitions_total", "Changes of state.", "upstream", "path", "to", "reason")
	descRequests    = desc("requests_total", "Requests through mcp_guard that ended, by how.", "upstream", "path", "outcome")
	descHeld        = desc("held_requests", "Requests that wait for an upstream to come back now.")
	descBurn        = desc("burn_rate", "How many times faster than the objective allows an endpoint's error budget is being spent.", "path", "window")
)

// collector gives what is counted in this process to the registry of a configuration:
// each has one of its own, and counters outlive it.
type collector struct{}

// registerMetrics makes the metrics part of what the configuration's registry gives.
func registerMetrics(ctx caddy.Context) error {
	var already prometheus.AlreadyRegisteredError
	err := ctx.GetMetricsRegistry().Register(collector{})
	if errors.As(err, &already) {
		return nil
	}
	return err
}

// Describe names the metrics.
func (collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{descUp, descPeers, descState, descSince, descInfo, descWarning, descProbes, descDuration, descLast,
		descNext, descInterval, descTransitions, descRequests, descHeld, descBurn} {
		ch <- d
	}
	heldFor.Describe(ch)
}

// Collect gives the metrics as of now.
func (collector) Collect(ch chan<- prometheus.Metric) {
	to := sink(ch)
	to.gauge(descHeld, float64(heldNow.Load()))
	heldFor.Collect(ch)
	burning := map[*endpoint]bool{}
	for _, a := range ledger.nobodies() {
		to.requests(a.accountKey, a.requests.now())
		if a.endpoint.asked() { // also when its last upstream has gone
			burning[a.endpoint] = true
		}
	}
	peers := peersUp()
	for a, u := range inUseByAccount() {
		burning[a.endpoint] = true
		to.upstream(a, u)
		if n, ok := peers[a]; ok {
			to.gauge(descPeers, float64(n), a.upstream, a.path)
		}
	}
	for ep := range burning {
		to.burn(ep)
	}
}

// A sink is where metrics go.
type sink chan<- prometheus.Metric

func (s sink) gauge(d *prometheus.Desc, v float64, labels ...string) {
	s <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func (s sink) count(d *prometheus.Desc, v uint64, labels ...string) {
	s <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), labels...)
}

func (s sink) requests(key accountKey, n requestCounts) {
	for i, v := range []uint64{n.OK, n.RPCError, n.ToolError, n.HTTPError, n.Unavailable} {
		s.count(descRequests, v, key.upstream, key.path, string(mcphealth.Outcomes()[i]))
	}
}

func (s sink) burn(ep *endpoint) {
	for _, w := range ep.status().Availability {
		if w.BurnRate != nil {
			s.gauge(descBurn, *w.BurnRate, ep.path, w.Window)
		}
	}
}

// upstream gives all that is known of one.
func (s sink) upstream(a *account, u upstreamDetail) {
	labels := []string{a.upstream, a.path}
	with := func(more ...string) []string { return slices.Concat(labels, more) }
	s.gauge(descUp, oneIf(isUp(u.State)), labels...)
	for _, state := range states {
		s.gauge(descState, oneIf(state == u.State), with(string(state))...)
	}
	s.gauge(descSince, unix(&u.Since), with(string(u.State), string(u.Reason))...)
	s.gauge(descInfo, 1, with(a.info(u)...)...)
	for _, w := range warningWords(u.Warnings) {
		s.gauge(descWarning, 1, with(w)...)
	}
	s.gauge(descLast, unix(u.LastProbe), labels...)
	s.gauge(descNext, unix(u.NextProbe), labels...)
	s.gauge(descInterval, u.IntervalS, labels...)
	for _, n := range u.ProbeCounts {
		s.count(descProbes, n.Count, with(string(n.Verdict), string(n.Reason))...)
	}
	for _, n := range u.Transitions {
		s.count(descTransitions, n.Count, with(string(n.To), string(n.Reason))...)
	}
	s.requests(a.accountKey, u.Requests)
	s <- a.durationMetric(labels)
}

// states are all states.
var states = []mcphealth.State{mcphealth.Up, mcphealth.UpDegraded, mcphealth.Down, mcphealth.StateUnknown}

// inUseByAccount are the upstreams in use. One that is asked in several ways, as by
// several sites, has one series: what is worst of it shows.
func inUseByAccount() map[*account]upstreamDetail {
	all := map[*account]upstreamDetail{}
	for _, e := range checkers.list() {
		s := e.checker.Snapshot()
		u := upstreamDetail{upstreamStatus: statusOf(e, s), Warnings: s.Last.Warnings}
		if !u.InUse {
			continue
		}
		if other, ok := all[e.account]; ok && better(other.State, u.State) == u.State {
			continue
		}
		all[e.account] = u
	}
	return all
}

// peersUp counts for each upstream how many of its reverse proxy may get requests:
// several may serve different servers under one path, and one that is dead must not
// hide behind another. Those whose address depends on the request are always tried.
func peersUp() map[*account]int {
	all := map[*account]int{}
	app := apps.current()
	if app == nil {
		return all
	}
	for _, g := range app.allGroups() {
		entries, up := g.entries()
		for _, e := range entries {
			if isUp(e.checker.Snapshot().State) {
				up++
			}
		}
		for _, e := range entries {
			if n, ok := all[e.account]; !ok || up < n {
				all[e.account] = up
			}
		}
	}
	return all
}

// warningWords are the words that warnings begin with, each once.
func warningWords(warnings []string) []string {
	var words []string
	for _, w := range warnings {
		word, _, _ := strings.Cut(w, ":")
		if word = label(word); !slices.Contains(words, word) {
			words = append(words, word)
		}
	}
	return words
}

// info are the labels era, protocol, server and version.
func (a *account) info(u upstreamDetail) []string {
	protocol := ""
	if len(u.ProtocolVersions) > 0 {
		protocol = slices.Max(u.ProtocolVersions)
	}
	words := [3]string{label(protocol), label(u.Server.Name), label(u.Server.Version)}
	a.mu.Lock()
	defer a.mu.Unlock()
	if now := time.Now(); a.infos == nil || now.Sub(a.infosSince) > infoSpan {
		a.infos, a.infosSince = map[[3]string]bool{}, now
	}
	if !a.infos[words] {
		if len(a.infos) >= maxInfos {
			words = [3]string{otherInfo, otherInfo, otherInfo}
		} else {
			a.infos[words] = true
		}
	}
	return append([]string{string(cmp.Or(u.Era, mcphealth.EraUnknown))}, words[:]...)
}

// durationMetric is the histogram of probe durations.
func (a *account) durationMetric(labels []string) prometheus.Metric {
	a.mu.Lock()
	defer a.mu.Unlock()
	buckets := make(map[float64]uint64, len(durationBuckets))
	var sum uint64
	for i, bound := range durationBuckets {
		sum += a.durations[i]
		buckets[bound] = sum
	}
	sum += a.durations[len(durationBuckets)]
	return prometheus.MustNewConstHistogram(descDuration, sum, a.seconds, buckets, labels...)
}

// nobodies are the accounts of requests that reached no upstream.
func (b *book) nobodies() []*account {
	b.mu.Lock()
	defer b.mu.Unlock()
	var all []*account
	for key, a := range b.accounts {
		if key.upstream == "" {
			all = append(all, a)
		}
	}
	return all
}

// label is s as a label value: valid, printable and short.
func label(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) > maxLabel {
		s = strings.ToValidUTF8(s[:maxLabel], "")
	}
	return s
}

func oneIf(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

func unix(t *time.Time) float64 {
	if t == nil {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

// Interface guard
var _ prometheus.Collector = collector{}
