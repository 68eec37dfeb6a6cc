package serve

import (
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/mcphealth/mcphealth/internal/stdio"
	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// maxInfos is how many names, versions and protocols of one target get a series of
	// their own within infoSpan, as in Caddy's module: a server that calls itself
	// something else in each answer must not fill the disk of a Prometheus.
	maxInfos = 10
	infoSpan = 24 * time.Hour
	// otherInfo is what further ones are called.
	otherInfo = "other"
)

// metrics are those of Caddy's module, with the target's name for its address
// (docs/command.md).
type metrics struct {
	registry    *prometheus.Registry
	up          *prometheus.GaugeVec
	info        *prometheus.GaugeVec
	probes      *prometheus.CounterVec
	duration    *prometheus.HistogramVec
	last        *prometheus.GaugeVec
	transitions *prometheus.CounterVec

	mu    sync.Mutex
	known map[string]*known // of each target
}

// known is what metrics know of a target.
type known struct {
	last  mcphealth.Result
	info  []string           // the labels of its target_info
	infos map[[3]string]bool // those it had since
	since time.Time
}

func newMetrics() *metrics {
	m := &metrics{registry: prometheus.NewRegistry(), known: map[string]*known{}}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "mcp_health_" + name, Help: help}, append([]string{"target"}, labels...))
	}
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "mcp_health_" + name, Help: help}, append([]string{"target"}, labels...))
	}
	m.up = gauge("target_up", "1 unless the last probe found the server dead.")
	m.info = gauge("target_info", "What the server says of itself, always 1.", "era", "protocol", "server", "version")
	m.last = gauge("last_probe_timestamp_seconds", "When the last probe began, Unix time.")
	m.probes = counter("probes_total", "Probes by what they found.", "verdict", "reason")
	m.transitions = counter("transitions_total", "Changes of verdict or reason.", "to", "reason")
	m.duration = prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "mcp_health_probe_duration_seconds",
		Help: "How long probes took.", Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10}}, []string{"target"})
	m.registry.MustRegister(m.up, m.info, m.last, m.probes, m.transitions, m.duration)
	return m
}

// commands adds what only commands over stdio have.
func (m *metrics) commands(all map[string]*stdio.Server) {
	if len(all) > 0 {
		m.registry.MustRegister(children(all))
	}
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// note counts a result, and reports whether it differs from the one before.
func (m *metrics) note(target string, r mcphealth.Result, took time.Duration) (before mcphealth.Result, changed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.known[target]
	if changed = k == nil; changed {
		k = &known{}
		m.known[target] = k
	}
	before, k.last = k.last, r
	changed = changed || before.Verdict != r.Verdict || before.Reason != r.Reason
	up := 1.0
	if r.Verdict == mcphealth.Dead {
		up = 0
	}
	m.up.WithLabelValues(target).Set(up)
	m.last.WithLabelValues(target).Set(float64(r.At.UnixMilli()) / 1000)
	m.probes.WithLabelValues(target, string(r.Verdict), string(r.Reason)).Inc()
	m.duration.WithLabelValues(target).Observe(took.Seconds())
	if changed {
		m.transitions.WithLabelValues(target, string(r.Verdict), string(r.Reason)).Inc()
	}
	if info := append([]string{target}, k.name(r)...); !slices.Equal(info, k.info) {
		m.info.DeleteLabelValues(k.info...)
		k.info = info
		m.info.WithLabelValues(info...).Set(1)
	}
	return before, changed
}

// name are the labels era, protocol, server and version.
func (k *known) name(r mcphealth.Result) []string {
	words := [3]string{"", r.Server.Name, r.Server.Version}
	if len(r.ProtocolVersions) > 0 {
		words[0] = slices.Max(r.ProtocolVersions)
	}
	if now := time.Now(); k.infos == nil || now.Sub(k.since) > infoSpan {
		k.infos, k.since = map[[3]string]bool{}, now
	}
	if len(k.infos) < maxInfos {
		k.infos[words] = true
	}
	if !k.infos[words] {
		words = [3]string{otherInfo, otherInfo, otherInfo}
	}
	return append([]string{string(r.Era)}, words[:]...)
}

// children are the commands over stdio, by target.
type children map[string]*stdio.Server

var (
	childState = prometheus.NewDesc("mcp_health_child_state", "What the command over stdio is doing, 1 for the present state.", []string{"target", "state"}, nil)
	restarts   = prometheus.NewDesc("mcp_health_child_restarts_total", "Times that the command over stdio was started again.", []string{"target"}, nil)
)

func (c children) Describe(ch chan<- *prometheus.Desc) { ch <- childState; ch <- restarts }

func (c children) Collect(ch chan<- prometheus.Metric) {
	for name, s := range c {
		st := s.Status()
		for _, state := range []stdio.State{stdio.Starting, stdio.Running, stdio.Waiting, stdio.Stopped} {
			v := 0.0
			if st.State == state {
				v = 1
			}
			ch <- prometheus.MustNewConstMetric(childState, prometheus.GaugeValue, v, name, string(state))
		}
		ch <- prometheus.MustNewConstMetric(restarts, prometheus.CounterValue, float64(st.Restarts), name)
	}
}
