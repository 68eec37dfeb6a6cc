package caddymodule

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/mcphealth/mcphealth/mcphealth"
)

func init() {
	caddy.RegisterModule(Admin{})
}

// Admin is the part of the admin API that shows what is known of the upstreams:
//
//   - GET /mcp_health/upstreams: all of them
//   - GET /mcp_health/upstreams/{id}: one, with its last 20 changes and probe
//   - POST /mcp_health/upstreams/{id}/probe: ask it now
//   - POST /mcp_health/upstreams/{id}/drain: no new sessions, and no requests without
//     one, while others can take them; sessions go on for the guard's drain_timeout
//   - POST /mcp_health/upstreams/{id}/resume: the end of that
//   - GET /mcp_health/sessions: how many were lost with their upstream
//
// Ids stay the same as long as the upstream's settings do. Header values never show.
type Admin struct{}

// CaddyModule returns the Caddy module information.
func (Admin) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "admin.api.mcp_health",
		New: func() caddy.Module { return new(Admin) },
	}
}

const adminPath = "/mcp_health/upstreams"

// Routes returns the routes of the admin API.
func (a Admin) Routes() []caddy.AdminRoute {
	return []caddy.AdminRoute{
		{Pattern: adminPath, Handler: caddy.AdminHandlerFunc(a.serveList)},
		{Pattern: adminPath + "/", Handler: caddy.AdminHandlerFunc(a.serveOne)},
		{Pattern: "/mcp_health/sessions", Handler: caddy.AdminHandlerFunc(a.serveSessions)},
	}
}

// upstreamStatus is one upstream in the list.
type upstreamStatus struct {
	ID       string `json:"id"`
	Upstream string `json:"upstream"`
	Path     string `json:"path"`
	Host     string `json:"host,omitempty"`

	State   mcphealth.State   `json:"state"`
	Verdict mcphealth.Verdict `json:"verdict"`
	Reason  mcphealth.Reason  `json:"reason"`
	Detail  string            `json:"detail,omitempty"`
	Since   time.Time         `json:"since"`

	Era              mcphealth.Era        `json:"era"`
	ProtocolVersions []string             `json:"protocol_versions,omitempty"`
	Server           mcphealth.ServerInfo `json:"server"`

	LastProbe *time.Time `json:"last_probe,omitempty"`
	NextProbe *time.Time `json:"next_probe,omitempty"`
	LatencyMs float64    `json:"latency_ms"`
	Probes    uint64     `json:"probes"`

	// Draining: it gets no new work while others can take it, since then.
	Draining      bool       `json:"draining"`
	DrainingSince *time.Time `json:"draining_since,omitempty"`

	// LostSessions is how many requests were told that their session went away with
	// this upstream.
	LostSessions int64 `json:"lost_sessions"`

	// InUse is false for an upstream that no configuration names any more; it is
	// forgotten after some minutes.
	InUse bool `json:"in_use"`
}

// upstreamDetail is one upstream alone.
type upstreamDetail struct {
	upstreamStatus
	Warnings []string       `json:"warnings"`
	Steps    []probeStep    `json:"steps"`
	Changes  []upstreamMove `json:"changes"`
}

type probeStep struct {
	Step       string  `json:"step"`
	HTTPStatus int     `json:"http_status"`
	RPCCode    int     `json:"rpc_code"`
	Ms         float64 `json:"ms"`
	Outcome    string  `json:"outcome"`
}

// upstreamMove is one change of state, or of the reason for it.
type upstreamMove struct {
	At      time.Time         `json:"at"`
	From    mcphealth.State   `json:"from"`
	To      mcphealth.State   `json:"to"`
	Verdict mcphealth.Verdict `json:"verdict"`
	Reason  mcphealth.Reason  `json:"reason"`
	Detail  string            `json:"detail,omitempty"`
}

func statusOf(e *entry, s mcphealth.Snapshot) upstreamStatus {
	draining := e.drainingSince()
	return upstreamStatus{
		ID: e.id, Upstream: e.upstream, Path: e.path, Host: e.host,
		State: s.State, Verdict: s.Last.Verdict, Reason: s.Reason, Detail: s.Last.Detail, Since: s.Since,
		Era: s.Last.Era, ProtocolVersions: s.Last.ProtocolVersions, Server: s.Last.Server,
		LastProbe: timeOrNil(s.LastAt), NextProbe: timeOrNil(s.Next),
		LatencyMs: s.Last.LatencyMs, Probes: s.Probes,
		Draining: !draining.IsZero(), DrainingSince: timeOrNil(draining), LostSessions: e.lost.Load(),
		InUse: checkers.inUse(e) > 0,
	}
}

func timeOrNil(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

func detailOf(e *entry, s mcphealth.Snapshot) upstreamDetail {
	d := upstreamDetail{
		upstreamStatus: statusOf(e, s),
		Warnings:       append([]string{}, s.Last.Warnings...),
		Steps:          []probeStep{},
		Changes:        []upstreamMove{},
	}
	for _, st := range s.Last.Steps {
		d.Steps = append(d.Steps, probeStep{Step: st.Step, HTTPStatus: st.HTTPStatus, RPCCode: st.RPCCode, Ms: st.Ms, Outcome: st.Outcome})
	}
	for _, c := range s.Changes {
		d.Changes = append(d.Changes, upstreamMove{At: c.At, From: c.From, To: c.To, Verdict: c.Verdict, Reason: c.Reason, Detail: c.Detail})
	}
	return d
}

func (Admin) serveList(w http.ResponseWriter, r *http.Request) error {
	if r.Method != http.MethodGet {
		return notAllowed(r)
	}
	list := []upstreamStatus{}
	for _, e := range checkers.list() {
		list = append(list, statusOf(e, e.checker.Snapshot()))
	}
	return writeJSON(w, http.StatusOK, list)
}

func (Admin) serveOne(w http.ResponseWriter, r *http.Request) error {
	id, action, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, adminPath+"/"), "/")
	e := checkers.get(id)
	if e == nil || !slices.Contains([]string{"", "probe", "drain", "resume"}, action) {
		return caddy.APIError{HTTPStatus: http.StatusNotFound, Err: fmt.Errorf("no such upstream: %s", r.URL.Path)}
	}
	switch {
	case action == "" && r.Method == http.MethodGet:
		return writeJSON(w, http.StatusOK, detailOf(e, e.checker.Snapshot()))
	case action == "probe" && r.Method == http.MethodPost:
		e.checker.Probe()
		return writeJSON(w, http.StatusAccepted, map[string]string{"id": e.id, "upstream": e.upstream})
	case action != "" && r.Method == http.MethodPost:
		checkers.setDrain(e, action == "drain")
		return writeJSON(w, http.StatusOK, statusOf(e, e.checker.Snapshot()))
	}
	return notAllowed(r)
}

func (Admin) serveSessions(w http.ResponseWriter, r *http.Request) error {
	if r.Method != http.MethodGet {
		return notAllowed(r)
	}
	return writeJSON(w, http.StatusOK, map[string]int64{"lost": lostSessions.Load(), "missing_owners": int64(missing.n.Load())})
}

func notAllowed(r *http.Request) error {
	return caddy.APIError{HTTPStatus: http.StatusMethodNotAllowed, Err: fmt.Errorf("method %s is not allowed here", r.Method)}
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	body, err := json.Marshal(v)
	if err != nil {
		return caddy.APIError{HTTPStatus: http.StatusInternalServerError, Err: err}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, err = w.Write(append(body, '\n'))
	return err
}

// Interface guards
var _ caddy.AdminRouter = Admin{}
