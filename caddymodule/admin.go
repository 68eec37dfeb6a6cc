package caddymodule

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

func init() {
	caddy.RegisterModule(Admin{})
}

// Admin is the part of the admin API that shows what is known of the upstreams:
//
//   - GET /mcp_health/upstreams: all of them
//   - GET /mcp_health/upstreams/{id}: one, with its last 20 changes and 60 probes
//   - POST /mcp_health/upstreams/{id}/probe: ask it now
//   - POST /mcp_health/upstreams/{id}/drain: no new sessions, and no requests without
//     one, while others can take them; sessions go on for the guard's drain_timeout
//   - POST /mcp_health/upstreams/{id}/resume: the end of that
//   - GET /mcp_health/endpoints: by path, with availability and burn rates
//   - GET /mcp_health/sessions: how many were lost with their upstream
//
// Ids stay the same as long as the upstream's settings do. Header values never show. A
// POST that a browser sends for another site's page gets 403, unless `enforce_origin` lets
// it pass.
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
		{Pattern: "/mcp_health/endpoints", Handler: caddy.AdminHandlerFunc(a.serveEndpoints)},
		{Pattern: "/mcp_health/sessions", Handler: caddy.AdminHandlerFunc(a.serveSessions)},
	}
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
	if err := mayChange(w, r); err != nil {
		return err
	}
	switch {
	case action == "" && r.Method == http.MethodGet:
		return writeJSON(w, http.StatusOK, detailOf(e, e.checker.Snapshot()))
	case action == "probe" && r.Method == http.MethodPost:
		if !e.checker.Probe() {
			return caddy.APIError{HTTPStatus: http.StatusConflict, Err: fmt.Errorf("%s is in no configuration any more, and is not probed; it will leave this list", e.upstream)}
		}
		return writeJSON(w, http.StatusAccepted, map[string]string{"id": e.id, "upstream": e.upstream})
	case action != "" && r.Method == http.MethodPost:
		checkers.setDrain(e, action == "drain")
		return writeJSON(w, http.StatusOK, statusOf(e, e.checker.Snapshot()))
	}
	return notAllowed(r)
}

func (Admin) serveEndpoints(w http.ResponseWriter, r *http.Request) error {
	if r.Method != http.MethodGet {
		return notAllowed(r)
	}
	return writeJSON(w, http.StatusOK, endpoints())
}

func (Admin) serveSessions(w http.ResponseWriter, r *http.Request) error {
	if r.Method != http.MethodGet {
		return notAllowed(r)
	}
	return writeJSON(w, http.StatusOK, map[string]int64{"lost": lostSessions.Load(), "missing_owners": int64(missing.Len())})
}

// otherSites finds out what a browser sends for the page of another site.
var otherSites = http.NewCrossOriginProtection()

// mayChange refuses that where it is no question: an admin's browser may meet any page.
// Caddy looks at the origin itself with enforce_origin, and only then names it.
func mayChange(w http.ResponseWriter, r *http.Request) error {
	if err := otherSites.Check(r); err != nil && w.Header().Get("Access-Control-Allow-Origin") == "" {
		return caddy.APIError{HTTPStatus: http.StatusForbidden, Err: err}
	}
	return nil
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
