package caddymodule

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

func init() {
	caddy.RegisterModule(testHandler{})
	caddy.RegisterModule(brokenHandler{})
	caddy.RegisterModule(new(execHandler))
}

// execHandler is the part of github.com/mholt/caddy-events-exec that the example
// needs: the module itself is not on the module proxy that our tests may ask.
type execHandler struct {
	Command string   `json:"command"`
	Args    []string `json:"args,omitempty"`
}

func (*execHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.exec", New: func() caddy.Module { return new(execHandler) }}
}

func (h *execHandler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	if !d.Args(&h.Command) {
		return d.ArgErr()
	}
	h.Args = d.RemainingArgs()
	return nil
}

func (h *execHandler) Handle(ctx context.Context, _ caddy.Event) error {
	repl := ctx.Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	args := make([]string, len(h.Args))
	for i, a := range h.Args {
		args[i] = repl.ReplaceAll(a, "")
	}
	out, err := exec.CommandContext(ctx, repl.ReplaceAll(h.Command, ""), args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w", out, err)
	}
	return nil
}

// The example's events reach a webhook, with everything in them.
func TestWebhookExample(t *testing.T) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skip("no curl here")
	}
	texts := make(chan string, 10)
	hook := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		var m struct{ Text string }
		assert.NoError(t, json.NewDecoder(r.Body).Decode(&m))
		texts <- m.Text
	}))
	defer hook.Close()
	t.Setenv("WEBHOOK_URL", hook.URL)
	example, err := os.ReadFile("../examples/events/Caddyfile")
	require.NoError(t, err)
	validCaddyfile(t, "../examples/events/Caddyfile", string(example))
	notify, err := filepath.Abs("../examples/events/notify")
	require.NoError(t, err)
	options := regexp.MustCompile(`(?s)events \{.*?\n\t\}`).FindString(strings.ReplaceAll(string(example), "/etc/caddy/notify", notify))

	a := newServer(t, "a")
	newEdge(t, options, guarded("", a.addr))
	require.Equal(t, a.addr+"/mcp is up again (ok)", <-texts)
	a.onProbe(html)
	require.Equal(t, a.addr+"/mcp is down (not_mcp), was up", <-texts)
	app := apps.current()
	app.announceBudget(`/"mcp\`, mcphealth.SeverityNone, mcphealth.SeverityPage, []mcphealth.Availability{{Window: "1h", BurnRate: 15.04}})
	require.Equal(t, `/"mcp\ fails its clients: error budget burns 15 times too fast (page)`, <-texts)
	app.announceBudget("/mcp", mcphealth.SeverityPage, mcphealth.SeverityNone, nil)
	require.Equal(t, "/mcp is within its error budget again", <-texts)
}

// testHandler notes the events that it gets.
type testHandler struct{}

var noted struct {
	sync.Mutex
	events []string
	origin string
}

func (testHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.test", New: func() caddy.Module { return new(testHandler) }}
}

func (testHandler) Handle(_ context.Context, e caddy.Event) error {
	data, err := json.Marshal(e.Data)
	if err != nil {
		return err
	}
	noted.Lock()
	defer noted.Unlock()
	noted.events = append(noted.events, e.Name()+" "+string(data))
	noted.origin = string(e.Origin().CaddyModule().ID)
	return nil
}

func (testHandler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error { d.Next(); return nil }

func TestEvents(t *testing.T) {
	noted.events = nil
	a := newServer(t, "a")
	options := `events {
		on healthy test
		on unhealthy test
	}`
	site := guarded("", a.addr)
	e := newEdge(t, options, site)
	waitState(t, a.addr, mcphealth.Up)
	e.load(options, site) // the checker is older than the app now
	a.onProbe(html)
	waitState(t, a.addr, mcphealth.Down)
	want := []string{
		`healthy {"from":"unknown","host":"","path":"/mcp","reason":"ok","to":"up","upstream":"` + a.addr + `"}`,
		`unhealthy {"from":"up","host":"","path":"/mcp","reason":"not_mcp","to":"down","upstream":"` + a.addr + `"}`,
	}
	eventually(t, func() bool {
		noted.Lock()
		defer noted.Unlock()
		return len(noted.events) == len(want)
	}, "want %d events", len(want))
	require.Equal(t, want, noted.events)
	require.Equal(t, "mcp_health", noted.origin)
}

// brokenHandler is a handler of events that panics, as third parties' do.
type brokenHandler struct{ testHandler }

func (brokenHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.broken", New: func() caddy.Module { return new(brokenHandler) }}
}

func (h brokenHandler) Handle(ctx context.Context, e caddy.Event) error {
	_ = h.testHandler.Handle(ctx, e)
	panic("oh")
}

// It ends neither the process nor the checks.
func TestBrokenHandlerOfEvents(t *testing.T) {
	noted.Lock()
	noted.events = nil
	noted.Unlock()
	a := newServer(t, "a")
	newEdge(t, `events {
		on healthy broken
		on unhealthy broken
		on budget_burning broken
	}`, guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	a.onProbe(html)
	waitState(t, a.addr, mcphealth.Down)
	a.onProbe(nil)
	waitState(t, a.addr, mcphealth.Up)
	apps.current().announceBudget("/mcp", mcphealth.SeverityNone, mcphealth.SeverityPage, nil)
	eventually(t, func() bool {
		noted.Lock()
		defer noted.Unlock()
		return len(noted.events) == 4
	}, "not all events were sent")
}

// An error budget that is spent too fast is told once, and so is the end of it: an
// alert that needs no Prometheus.
func TestBudgetEvents(t *testing.T) {
	noted.Lock()
	noted.events = nil
	noted.Unlock()
	a := newServer(t, "a")
	a.on(answering(http.StatusInternalServerError, "text/plain", "oops"))
	e := newEdge(t, `events {
		on budget_burning test
		on budget_ok test
	}
	mcp_health {
		objective 0.99
	}`, guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	for range mcphealth.MinRequests {
		e.call("1")
	}
	ep := endpointAt(t, "/mcp")
	eventually(t, func() bool { return ep.wasted.Load() == mcphealth.MinRequests }, "the requests are not counted")
	now := time.Now()
	ep.tick(now)
	ep.tick(now.Add(time.Second))
	require.Equal(t, mcphealth.SeverityPage, endpoints()[0].Severity)
	require.Equal(t, 0.99, endpoints()[0].Objective)
	ep.tick(now.Add(12 * time.Hour))
	ep.tick(now.Add(14 * 24 * time.Hour))
	noted.Lock()
	defer noted.Unlock()
	require.Equal(t, []string{
		`budget_burning {"burn_rate_1h":100,"burn_rate_30m":100,"burn_rate_3d":100,"burn_rate_5m":100,"burn_rate_6h":100,"objective":0.99,"path":"/mcp","severity":"page"}`,
		`budget_ok {"burn_rate_1h":0,"burn_rate_30m":0,"burn_rate_3d":100,"burn_rate_5m":0,"burn_rate_6h":0,"objective":0.99,"path":"/mcp","severity":"page"}`,
	}, noted.events)
}

// Events go to webhooks and scripts: they hold no credential, though the server says
// it again and the path has it.
func TestNoSecretInEvents(t *testing.T) {
	const canary = "canary-d41d8cd98f00b204"
	noted.Lock()
	noted.events = nil
	noted.Unlock()
	t.Setenv("CANARY", canary)
	a := newServer(t, "a")
	e := newEdge(t, `events {
		on healthy test
		on unhealthy test
		on budget_burning test
		on budget_ok test
	}`, `mcp_guard {
		sticky
		session_key {env.CANARY}
	}
	reverse_proxy `+a.addr+` {
		lb_policy mcp_health {
			path /mcp?key={env.CANARY}
			header Authorization "Bearer {env.CANARY}"
			interval 50ms
			fast 10ms
			fall 1
		}
	}`)
	waitState(t, a.addr, mcphealth.Up)
	a.onProbe(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Www-Authenticate", r.Header.Get("Authorization"))
		http.Error(w, r.Header.Get("Authorization")+r.RequestURI, http.StatusNotFound)
	})
	waitState(t, a.addr, mcphealth.Down)
	require.Equal(t, http.StatusServiceUnavailable, e.do(http.MethodPost, "/mcp?key="+canary, callBody("1"), "Authorization", canary).status)
	path := checkers.list()[0].path
	apps.current().announceBudget(path, mcphealth.SeverityNone, mcphealth.SeverityPage, nil)
	eventually(t, func() bool {
		noted.Lock()
		defer noted.Unlock()
		return len(noted.events) == 3
	}, "want three events")
	noted.Lock()
	defer noted.Unlock()
	for _, event := range noted.events {
		require.NotContains(t, event, canary)
		require.Contains(t, event, `"path":"/mcp?…"`)
	}
}

// admin asks the admin API's own handlers.
func admin(t *testing.T, method, path string) (int, string) {
	t.Helper()
	mux := http.NewServeMux()
	for _, route := range (Admin{}).Routes() {
		mux.HandleFunc(route.Pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := route.Handler.ServeHTTP(w, r); err != nil {
				var api caddy.APIError
				require.ErrorAs(t, err, &api)
				w.WriteHeader(api.HTTPStatus)
			}
		})
	}
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequest(method, path, nil))
	return w.Code, w.Body.String()
}

// A page that an admin looks at drains nothing, whatever Caddy's own settings: a POST
// without a body is one that browsers send for any page.
func TestAdminRefusesPages(t *testing.T) {
	a := newServer(t, "a")
	newEdge(t, "", `mcp_proxy `+a.addr)
	drain := func(before string, header ...string) error {
		r := httptest.NewRequest(http.MethodPost, "http://localhost:2019"+adminPath+"/"+entryOf(a.addr).id+"/drain", nil)
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		w := httptest.NewRecorder()
		if before != "" {
			w.Header().Set("Access-Control-Allow-Origin", before) // as Caddy with enforce_origin
		}
		return Admin{}.serveOne(w, r)
	}
	for _, header := range [][]string{
		{"Origin", "https://page.example", "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors"},
		{"Origin", "https://page.example"},
		{"Origin", "null"},
	} {
		err := drain("", header...)
		var api caddy.APIError
		require.ErrorAs(t, err, &api, "%v", header)
		require.Equal(t, http.StatusForbidden, api.HTTPStatus)
		require.True(t, entryOf(a.addr).drainingSince().IsZero(), "%v", header)
	}
	for _, header := range [][]string{nil, {"Origin", "http://localhost:2019"}, {"Sec-Fetch-Site", "same-origin"}} {
		require.NoError(t, drain("", header...), "%v", header)
	}
	err := drain("https://admin.example", "Origin", "https://admin.example", "Sec-Fetch-Site", "cross-site")
	require.NoError(t, err, "Caddy itself allows it")
}

func TestAdmin(t *testing.T) {
	a := newServer(t, "a")
	site := `reverse_proxy ` + a.addr + ` {
		lb_policy mcp_health {
			interval 1h
			header Authorization "Bearer s3cret"
		}
	}`
	e := newEdge(t, "", site)
	waitState(t, a.addr, mcphealth.Up)

	status, body := admin(t, http.MethodGet, "/mcp_health/upstreams")
	require.Equal(t, http.StatusOK, status)
	var list []map[string]any
	require.NoError(t, json.Unmarshal([]byte(body), &list))
	require.Len(t, list, 1)
	require.Equal(t, a.addr, list[0]["upstream"])
	require.Equal(t, "up", list[0]["state"])
	require.Equal(t, "ok", list[0]["reason"])
	require.Equal(t, "modern", list[0]["era"])
	require.Equal(t, true, list[0]["in_use"])
	id := list[0]["id"].(string)

	status, body = admin(t, http.MethodGet, "/mcp_health/upstreams/"+id)
	require.Equal(t, http.StatusOK, status)
	var one struct {
		ID      string
		Changes []struct{ From, To, Reason string }
	}
	require.NoError(t, json.Unmarshal([]byte(body), &one))
	require.Equal(t, id, one.ID)
	require.Len(t, one.Changes, 1)
	require.Equal(t, "up", one.Changes[0].To)
	require.NotContains(t, body, "s3cret")

	before := a.probes.Load()
	status, _ = admin(t, http.MethodPost, "/mcp_health/upstreams/"+id+"/probe")
	require.Equal(t, http.StatusAccepted, status)
	eventually(t, func() bool { return a.probes.Load() > before }, "not probed")

	for _, bad := range []struct {
		method, path string
		status       int
	}{
		{http.MethodPost, "/mcp_health/upstreams", http.StatusMethodNotAllowed},
		{http.MethodDelete, "/mcp_health/upstreams/" + id, http.StatusMethodNotAllowed},
		{http.MethodGet, "/mcp_health/upstreams/" + id + "/probe", http.StatusMethodNotAllowed},
		{http.MethodGet, "/mcp_health/upstreams/nobody", http.StatusNotFound},
		{http.MethodPost, "/mcp_health/upstreams/" + id + "/dance", http.StatusNotFound},
	} {
		status, _ := admin(t, bad.method, bad.path)
		require.Equal(t, bad.status, status, "%s %s", bad.method, bad.path)
	}

	e.load("", strings.Replace(site, "lb_policy", "flush_interval -1\nlb_policy", 1))
	require.Equal(t, id, checkers.list()[0].id, "the id changed with a reload")

	e.load("", "respond ok")
	require.Equal(t, false, statusOf(checkers.list()[0], checkers.list()[0].checker.Snapshot()).InUse)
	status, _ = admin(t, http.MethodPost, "/mcp_health/upstreams/"+id+"/probe")
	require.Equal(t, http.StatusConflict, status, "nobody probes it any more")
}
