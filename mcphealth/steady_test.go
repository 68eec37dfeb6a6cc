package mcphealth

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// moody is a legacy server with sessions whose mood a test changes.
type moody struct {
	mu       sync.Mutex
	mood     string
	sessions map[string]bool // live ones
	inits    int
}

// The moods: "well", or what is wrong.
var moods = map[string]func(m *moody, w http.ResponseWriter, q moodyQuestion){
	"well":    (*moody).well,
	"route":   func(_ *moody, w http.ResponseWriter, _ moodyQuestion) { http.Error(w, "404 page not found", 404) },
	"gateway": func(_ *moody, w http.ResponseWriter, _ moodyQuestion) { w.WriteHeader(502) },
	"page":    func(_ *moody, w http.ResponseWriter, _ moodyQuestion) { _, _ = io.WriteString(w, "<html>") },
	"401": func(m *moody, w http.ResponseWriter, q moodyQuestion) {
		m.forgetsBy(w, q, 401, "Unauthorized: Session not found")
	},
	"403": func(m *moody, w http.ResponseWriter, q moodyQuestion) {
		m.forgetsBy(w, q, 403, "Forbidden: invalid session")
	},
	"500":     func(m *moody, w http.ResponseWriter, q moodyQuestion) { m.forgetsBy(w, q, 500, "") },
	"forgets": func(m *moody, w http.ResponseWriter, q moodyQuestion) { m.sessions = map[string]bool{}; m.well(w, q) },
	"503":     func(m *moody, w http.ResponseWriter, q moodyQuestion) { m.forgetsBy(w, q, 503, "") },
	"named": func(m *moody, w http.ResponseWriter, q moodyQuestion) {
		m.refuses(w, q, 200, "Session 0f8fad5b-d9cd-469f-a165-70867728950e not found")
	},
	"410":         func(m *moody, w http.ResponseWriter, q moodyQuestion) { m.refuses(w, q, 410, "Gone") },
	"modern":      func(m *moody, w http.ResponseWriter, q moodyQuestion) { m.modern(w, q, 400, -32022) },
	"modern-2":    func(m *moody, w http.ResponseWriter, q moodyQuestion) { m.modern(w, q, 404, -32601) },
	"sessionless": func(m *moody, w http.ResponseWriter, q moodyQuestion) { m.takesNoID(w, q) },
	"429": func(m *moody, w http.ResponseWriter, q moodyQuestion) {
		if w.WriteHeader(429); q.method == "initialize" {
			m.inits++ // asked in vain
		}
	},
	"masked": func(m *moody, w http.ResponseWriter, q moodyQuestion) {
		if q.verb != http.MethodDelete && q.method != "initialize" && !m.sessions[q.session] {
			w.WriteHeader(429)
			return
		}
		m.well(w, q)
	},
	"solo": func(_ *moody, w http.ResponseWriter, q moodyQuestion) {
		say(w, 400, q, `"error":{"code":-32000,"message":"Bad Request: Server not initialized"}`)
	},
	"login": func(_ *moody, w http.ResponseWriter, _ moodyQuestion) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(403)
		_, _ = io.WriteString(w, `{"error":"Session expired"}`)
	},
	"full": func(_ *moody, w http.ResponseWriter, q moodyQuestion) {
		say(w, 503, q, `"error":{"code":-32000,"message":"No session: too many are open"}`)
	},
	"stub": func(_ *moody, w http.ResponseWriter, q moodyQuestion) { say(w, 200, q, okEmpty) },
	"locked": func(m *moody, w http.ResponseWriter, q moodyQuestion) {
		if w.WriteHeader(401); q.method != "ping" {
			m.inits++ // asked in vain
		}
	},
	"no-ping":  func(m *moody, w http.ResponseWriter, q moodyQuestion) { m.lacksPing(w, q) },
	"init-bad": func(m *moody, w http.ResponseWriter, q moodyQuestion) { m.failsInitialize(w, q) },
}

type moodyQuestion struct{ verb, method, session, id string }

func (m *moody) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	_, method, _ := strings.Cut(string(body), `"method":"`)
	method, _, _ = strings.Cut(method, `"`)
	m.mu.Lock()
	defer m.mu.Unlock()
	moods[m.mood](m, w, moodyQuestion{r.Method, method, r.Header.Get("Mcp-Session-Id"), RequestID(body).JSON()})
}

func say(w http.ResponseWriter, status int, q moodyQuestion, rest string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,%s}`, q.id, rest)
}

func (m *moody) well(w http.ResponseWriter, q moodyQuestion) {
	switch {
	case q.verb == http.MethodDelete:
		delete(m.sessions, q.session)
	case q.method == "initialize":
		m.inits++
		id := fmt.Sprintf("session-%d", m.inits)
		m.sessions[id] = true
		w.Header().Set("Mcp-Session-Id", id)
		say(w, 200, q, `"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"moody","version":"1"}}`)
	case m.sessions[q.session]:
		say(w, 200, q, `"result":{}`)
	default:
		say(w, 404, q, `"error":{"code":-32001,"message":"Session not found"}`)
	}
}

// forgetsBy knows no session, and says so in a way of its own: by text, or by an
// internal error.
func (m *moody) forgetsBy(w http.ResponseWriter, q moodyQuestion, status int, text string) {
	m.sessions = map[string]bool{}
	switch {
	case q.method == "initialize" || q.verb == http.MethodDelete:
		m.well(w, q)
	case text != "":
		w.WriteHeader(status)
		_, _ = io.WriteString(w, text)
	default:
		say(w, status, q, `"error":{"code":-32603,"message":"Session not found"}`)
	}
}

// refuses forgets as well, and says so in JSON-RPC, in words of its own.
func (m *moody) refuses(w http.ResponseWriter, q moodyQuestion, status int, message string) {
	m.sessions = map[string]bool{}
	if q.method == "initialize" || q.verb == http.MethodDelete {
		m.well(w, q)
		return
	}
	say(w, status, q, fmt.Sprintf(`"error":{"code":-32000,"message":%q}`, message))
}

// modern is another server, that knows no sessions.
func (m *moody) modern(w http.ResponseWriter, q moodyQuestion, status, code int) {
	if q.method == "server/discover" {
		say(w, 200, q, okDiscover)
		return
	}
	say(w, status, q, fmt.Sprintf(`"error":{"code":%d,"message":"no"}`, code))
}

// takesNoID hands out no session and refuses every id, as the C# SDK does without state.
func (m *moody) takesNoID(w http.ResponseWriter, q moodyQuestion) {
	switch {
	case q.session != "":
		say(w, 400, q, `"error":{"code":-32000,"message":"Bad Request: The Mcp-Session-Id header is not supported in stateless mode"}`)
	case q.method == "initialize":
		m.inits++
		say(w, 200, q, okInit)
	case q.method == "ping":
		say(w, 200, q, okEmpty)
	default:
		say(w, 400, q, unknownRPC)
	}
}

func (m *moody) lacksPing(w http.ResponseWriter, q moodyQuestion) {
	if q.method == "ping" && m.sessions[q.session] {
		say(w, 404, q, `"error":{"code":-32601,"message":"Method not found"}`)
		return
	}
	m.well(w, q)
}

func (m *moody) failsInitialize(w http.ResponseWriter, q moodyQuestion) {
	m.sessions = map[string]bool{}
	if q.method == "initialize" {
		say(w, 200, q, `"error":{"code":-32603,"message":"the database is away"}`)
		return
	}
	m.well(w, q)
}

// TestSteady: what a prober that knows its server says as that one's mood
// changes, and how many sessions it opens for it. None may be left.
func TestSteady(t *testing.T) {
	tests := []struct {
		name  string
		moods string
		want  []string // verdict and reason after each mood
		inits int
	}{
		{"one session, held", "well well well",
			[]string{"ready ok", "ready ok", "ready ok"}, 1},
		{"a route that goes and comes back leads to the old session", "well route route route well well",
			[]string{"ready ok", "dead route_absent", "dead route_absent", "dead route_absent", "ready ok", "ready ok"}, 1},
		{"as does a gateway that lost it", "well gateway well",
			[]string{"ready ok", "dead gateway_error", "ready ok"}, 1},
		{"another service in its place", "well page page page well",
			[]string{"ready ok", "dead not_mcp", "dead not_mcp", "dead not_mcp", "ready ok"}, 1},
		{"a lost session is renewed in the same probe", "well forgets well",
			[]string{"ready ok", "ready ok", "ready ok"}, 2},
		{"and so it is if that is said as if it were about credentials", "well 401 well 403 well",
			[]string{"ready ok", "ready ok", "ready ok", "ready ok", "ready ok"}, 3},
		{"or as an internal error", "well 500 well",
			[]string{"ready ok", "ready ok", "ready ok"}, 2},
		{"or as if there were no service", "well 503 well",
			[]string{"ready ok", "ready ok", "ready ok"}, 2},
		{"or with its name in between, or as gone", "well named well 410 well",
			[]string{"ready ok", "ready ok", "ready ok", "ready ok", "ready ok"}, 3},
		{"a server that keeps none is asked for none", "well forgets forgets forgets forgets forgets",
			[]string{"ready ok", "ready ok", "ready ok", "alive session_required", "alive session_required", "alive session_required"}, 3},
		{"the router works, what is behind it does not", "well init-bad init-bad init-bad",
			[]string{"ready ok", "degraded handshake_failed", "degraded handshake_failed", "degraded handshake_failed"}, 1},
		{"absent first, then here: initialize waits for no pause", "route route route well",
			[]string{"unknown endpoint_not_found", "unknown endpoint_not_found", "unknown endpoint_not_found", "ready ok"}, 1},
		{"a refused handshake and then no route", "init-bad init-bad init-bad route",
			[]string{"degraded handshake_failed", "degraded handshake_failed", "degraded handshake_failed", "dead route_absent"}, 0},
		{"a modern server takes the place of a legacy one", "well modern modern well",
			[]string{"ready ok", "ready ok", "ready ok", "ready ok"}, 2},
		{"one that says less", "well modern-2 modern-2",
			[]string{"ready ok", "ready ok", "ready ok"}, 1},
		{"a server without sessions that takes no id is initialized once", "sessionless sessionless sessionless",
			[]string{"ready ok", "ready ok", "ready ok"}, 1},
		{"429 of a server without sessions is about no session", "modern-2 429 modern-2",
			[]string{"ready ok", "degraded rate_limited", "ready ok"}, 0},
		{"429 of a server that took its place is", "modern-2 masked masked masked masked masked",
			[]string{"ready ok", "degraded rate_limited", "degraded rate_limited", "degraded rate_limited", "ready ok", "ready ok"}, 1},
		{"a login in the place of the one server of all", "solo login solo",
			[]string{"alive session_required", "dead not_mcp", "alive session_required"}, 0},
		{"a login in the place of a server that keeps no session", "well forgets forgets forgets login forgets",
			[]string{"ready ok", "ready ok", "ready ok", "alive session_required", "dead not_mcp", "alive session_required"}, 3},
		{"a full server costs no session", "well full full well",
			[]string{"ready ok", "degraded session_limit", "degraded session_limit", "ready ok"}, 1},
		{"a stub in the place of a server", "modern-2 stub stub",
			[]string{"ready ok", "dead not_mcp", "dead not_mcp"}, 0},
		{"a lock is no other server", "well locked well",
			[]string{"ready ok", "alive auth_required", "ready ok"}, 1},
		{"a method that is not found is no lost session", "no-ping no-ping no-ping",
			[]string{"ready ok", "alive method_not_found", "alive method_not_found"}, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			m := &moody{sessions: map[string]bool{}}
			s := httptest.NewServer(m)
			defer s.Close()
			p, err := NewProber(Target{URL: s.URL + "/mcp", Timeout: time.Second}, nil)
			if err != nil {
				t.Fatal(err)
			}
			for i, mood := range strings.Fields(tt.moods) {
				m.mu.Lock()
				m.mood = mood
				m.mu.Unlock()
				r := p.Probe(context.Background())
				if got := string(r.Verdict) + " " + string(r.Reason); got != tt.want[i] {
					t.Errorf("probe %d, server in mood %q: %q, want %q\n%s", i+1, mood, got, tt.want[i], trail(r))
				}
			}
			p.Close(context.Background())
			if m.inits != tt.inits {
				t.Errorf("opened %d sessions, want %d", m.inits, tt.inits)
			}
			if m.mood == "well" && len(m.sessions) > 0 {
				t.Errorf("left %d sessions on the server: %v", len(m.sessions), m.sessions)
			}
		})
	}
}
