//go:build go1.21

package traefikplugin

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"sort"
	"strings"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// metricPrefix stands before the names of design.md §9, as caddy_ does in Caddy.
const metricPrefix = "traefik_mcp_health_"

// statusDocument is the JSON of statusPath.
type statusDocument struct {
	Servers []mcphealth.Snapshot `json:"servers"`
	Held    map[string]int       `json:"held"` // requests that wait, by group
}

// serveStatus shows every server that this plugin probes: JSON, or Prometheus
// text to those who accept that rather.
func serveStatus(rw http.ResponseWriter, req *http.Request) {
	all := servers()
	doc := statusDocument{Servers: []mcphealth.Snapshot{}, Held: held()}
	for i := 0; i < len(all); i++ {
		doc.Servers = append(doc.Servers, all[i].checker.Snapshot())
	}
	rw.Header().Set("Cache-Control", "no-store")
	if wantsMetrics(req.Header.Get("Accept")) {
		rw.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = rw.Write([]byte(metrics(doc)))
		return
	}
	body, err := json.MarshalIndent(doc, "", "  ")
	if err != nil {
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/json")
	_, _ = rw.Write(body)
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

// metrics writes the document in Prometheus's text format.
func metrics(doc statusDocument) string {
	var up, state, info, last, count, lines []string
	states := []mcphealth.State{mcphealth.Up, mcphealth.UpDegraded, mcphealth.Down, mcphealth.StateUnknown}
	seen := map[string]bool{} // one target may be probed in two ways: the first counts
	for i := 0; i < len(doc.Servers); i++ {
		s := doc.Servers[i]
		labels := labelsOf(s.URL)
		if seen[labels] {
			continue
		}
		seen[labels] = true
		up = append(up, line("upstream_up", labels, boolean(s.State == mcphealth.Up || s.State == mcphealth.UpDegraded)))
		for j := 0; j < len(states); j++ {
			state = append(state, line("upstream_state", labels+`,state="`+string(states[j])+`"`, boolean(s.State == states[j])))
		}
		protocol := ""
		if len(s.Last.ProtocolVersions) > 0 {
			protocol = s.Last.ProtocolVersions[0]
		}
		info = append(info, line("upstream_info", labels+`,era="`+string(s.Last.Era)+`",protocol="`+escape(protocol)+
			`",server="`+escape(s.Last.Server.Name)+`",version="`+escape(s.Last.Server.Version)+`"`, "1"))
		count = append(count, line("probes_total", labels, fmt.Sprint(s.Probes)))
		if !s.LastAt.IsZero() {
			last = append(last, line("last_probe_timestamp_seconds", labels, fmt.Sprintf("%.3f", float64(s.LastAt.UnixNano())/1e9)))
		}
	}
	waiting := 0
	for _, n := range doc.Held {
		waiting += n
	}
	lines = append(lines, family("upstream_up", "gauge", up), family("upstream_state", "gauge", state), family("upstream_info", "gauge", info),
		family("probes_total", "counter", count), family("last_probe_timestamp_seconds", "gauge", last),
		family("held_requests", "gauge", []string{metricPrefix + "held_requests " + fmt.Sprint(waiting)}))
	return strings.Join(lines, "")
}

func family(name, kind string, samples []string) string {
	if len(samples) == 0 {
		return ""
	}
	sort.Strings(samples)
	return "# TYPE " + metricPrefix + name + " " + kind + "\n" + strings.Join(samples, "\n") + "\n"
}

func line(name, labels, value string) string {
	return metricPrefix + name + "{" + labels + "} " + value
}

func boolean(b bool) string {
	if b {
		return "1"
	}
	return "0"
}

func labelsOf(target string) string {
	host, path := target, ""
	if u, err := url.Parse(target); err == nil {
		host, path = u.Host, u.Path
	}
	return `upstream="` + escape(host) + `",path="` + escape(path) + `"`
}

// escape makes a label value (Prometheus text format 0.0.4).
func escape(s string) string {
	return strings.NewReplacer(`\`, `\\`, `"`, `\"`, "\n", `\n`).Replace(s)
}
