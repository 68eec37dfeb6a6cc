package reliability

import (
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
	"github.com/mcphealth/mcphealth/test/traefik"
)

// canaries are what must show nowhere: credentials of probes, of clients, and the key
// of session tags.
var canaries = map[string]string{
	"CANARY_PROBE":  "canary-probe-5d41402abc4b2a76",
	"CANARY_GLOBAL": "canary-global-7d793037a0760186",
	"CANARY_KEY":    "canary-key-0123456789abcdef0",
	"CANARY_CLIENT": "canary-client-9e107d9d372bb682",
}

// wantNoCanary looks for them in text, as they are and in base64.
func wantNoCanary(t testing.TB, where, text string) {
	t.Helper()
	for name, secret := range canaries {
		for _, form := range []string{secret, base64.StdEncoding.EncodeToString([]byte(secret))} {
			if at := strings.Index(text, form); at >= 0 {
				t.Errorf("%s shows %s: …%s…", where, name, text[max(0, at-200):min(len(text), at+100)])
				return
			}
		}
	}
}

// parrots are upstreams that repeat what they were sent, in one place each: the words
// of a server reach logs and pages, our credentials must not.
var parrots = []struct {
	name   string
	answer func(w http.ResponseWriter, r *http.Request, id, said, trap string)
}{
	{"name", func(w http.ResponseWriter, _ *http.Request, id, said, _ string) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28","%s"],"capabilities":{"tools":{}},"serverInfo":{"name":"<script>alert(1)</script> %[2]s","version":"\u2028\n%[2]s"}}}`, id, said)
	}},
	{"rpc error", func(w http.ResponseWriter, _ *http.Request, id, said, _ string) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32603,"message":"boom %s\r\nX-Evil: 1","data":"%[2]s"}}`, id, said)
	}},
	{"challenge", func(w http.ResponseWriter, _ *http.Request, _, said, _ string) {
		w.Header().Set("WWW-Authenticate", `Bearer realm="`+said+`", error_description="`+said+`"`)
		http.Error(w, said, http.StatusUnauthorized)
	}},
	{"redirect", func(w http.ResponseWriter, _ *http.Request, _, said, trap string) {
		w.Header().Set("Location", "http://"+trap+"/mcp?token="+said)
		w.WriteHeader(http.StatusTemporaryRedirect)
	}},
	{"page", func(w http.ResponseWriter, _ *http.Request, _, said, _ string) {
		w.Header().Set("Content-Type", "text/html; charset="+said)
		w.WriteHeader(http.StatusInternalServerError)
		io.WriteString(w, "<h1>"+said+"</h1>")
	}},
	{"forbidden", func(w http.ResponseWriter, _ *http.Request, _, said, _ string) {
		http.Error(w, "no, "+said, http.StatusForbidden)
	}},
	{"session", func(w http.ResponseWriter, r *http.Request, _, said, _ string) {
		w.Header().Set("Mcp-Session-Id", said)
		w.Header().Set("Set-Cookie", "s="+said)
		http.Error(w, `{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"Bad Request: `+said+`"}}`, http.StatusBadRequest)
	}},
	{"endpoint elsewhere", func(w http.ResponseWriter, r *http.Request, _, said, trap string) {
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "event: endpoint\ndata: http://%s/messages?token=%s\n\n", trap, said)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}},
}

// startParrots starts them, and a trap that they point to: nobody may come there.
func startParrots(t *testing.T) (addrs []string, trap string, trapped *atomic.Int64) {
	t.Helper()
	trapped = new(atomic.Int64)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			trapped.Add(1)
			c.Close()
		}
	}()
	trap = ln.Addr().String()
	for _, p := range parrots {
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(io.LimitReader(r.Body, 1<<20))
			said := r.Header.Get("Authorization") + " " + r.Header.Get("X-Probe-Token")
			if !isProbe(r) {
				said = "hello" // what clients and servers tell each other, Caddy logs at DEBUG
			}
			p.answer(w, r, idOf(body), strings.TrimSpace(said), trap)
		}))
		t.Cleanup(s.CloseClientConnections)
		t.Cleanup(s.Close)
		addrs = append(addrs, strings.TrimPrefix(s.URL, "http://"))
	}
	return addrs, trap, trapped
}

func idOf(body []byte) string {
	_, rest, ok := strings.Cut(string(body), `"id":"`)
	if !ok {
		return "null"
	}
	id, _, _ := strings.Cut(rest, `"`)
	return `"` + id + `"`
}

// A run of Caddy with all features on and credentials everywhere, behind servers that
// repeat what they are told: nothing that it says to anybody shows a secret.
func TestNoSecretShowsInCaddy(t *testing.T) {
	addrs, _, trapped := startParrots(t)
	dir, port, admin := t.TempDir(), e2e.FreePort(t), fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t))
	var site strings.Builder
	for i, a := range addrs {
		era := ""
		if parrots[i].name == "endpoint elsewhere" {
			era = "check_era sse"
		}
		fmt.Fprintf(&site, `	mcp_proxy /p%d/* %s %s {
		check_path /p%[1]d/mcp
		check_header Authorization "Bearer {env.CANARY_PROBE}"
		check_header X-Probe-Token "{env.CANARY_GLOBAL}"
		check_interval 300ms
		check_fast 100ms
		check_timeout 500ms
		check_health_path /p%[1]d/health
		check_expect_tool search
		check_require_auth on
		check_error_rate 50%%
		sticky
		session_key {env.CANARY_KEY}
		session_grace 0
		hold 200ms
		%[4]s
	}
`, i, a, nowhere(t), era)
	}
	file := filepath.Join(dir, "Caddyfile")
	text := fmt.Sprintf("{\n\tadmin %s\n\tauto_https off\n\tpersist_config off\n\tmetrics\n\tlog {\n\t\tlevel DEBUG\n\t}\n}\nhttp://:%d {\n\tbind 127.0.0.1\n\tlog\n\tmcp_status /status\n%s}\n", admin, port, site.String())
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := e2e.StartProcess(t, fmt.Sprintf("127.0.0.1:%d", port), func() *exec.Cmd {
		cmd := exec.Command(e2e.CaddyBinary(t), "run", "--config", file, "--adapter", "caddyfile")
		cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+dir)
		for k, v := range canaries {
			cmd.Env = append(cmd.Env, k+"="+v)
		}
		return cmd
	})
	said := visitAll(t, fmt.Sprintf("http://127.0.0.1:%d", port), len(addrs))
	said["status page"] = fetch(t, fmt.Sprintf("http://127.0.0.1:%d/status", port), "text/html")
	said["status JSON"] = fetch(t, fmt.Sprintf("http://127.0.0.1:%d/status", port), "application/json")
	list := fetch(t, "http://"+admin+"/mcp_health/upstreams", "")
	said["list"] = list
	for _, part := range strings.Split(list, `"id":"`)[1:] {
		id, _, _ := strings.Cut(part, `"`)
		said["detail "+id] = fetch(t, "http://"+admin+"/mcp_health/upstreams/"+id, "")
	}
	for _, path := range []string{"/mcp_health/endpoints", "/mcp_health/sessions", "/metrics", "/config/"} {
		said[path] = fetch(t, "http://"+admin+path, "")
	}
	said["logs"] = p.Output()
	for line := range strings.Lines(said["logs"]) { // at DEBUG, Caddy logs each event with all its data
		if strings.Contains(line, `"logger":"events"`) && strings.Contains(line, "mcp_health") {
			said["events"] += line
		}
	}
	for where, text := range said {
		wantNoCanary(t, where, text)
	}
	if !strings.Contains(said["events"], `"name":"unhealthy"`) || !strings.Contains(said["events"], `"reason":"`) {
		t.Errorf("no event with its data: the test shows nothing of events\n%s", said["events"])
	}
	if !strings.Contains(list, "[redacted]") {
		t.Errorf("no server repeated a secret that was redacted: the test shows nothing\n%s", list)
	}
	if strings.Contains(said["status page"], "<script>alert(1)") || strings.Contains(list, "<script>") {
		t.Error("a server's name is shown as it is")
	}
	if n := trapped.Load(); n > 0 {
		t.Errorf("%d connections to where only servers pointed", n)
	}
	wantOwnRules(t, admin)
}

// visitAll calls every route as clients do, with credentials of their own, and
// returns what the edge itself said.
func visitAll(t *testing.T, base string, routes int) map[string]string {
	t.Helper()
	time.Sleep(2 * time.Second) // a few probes each
	said := map[string]string{}
	for i := range routes {
		for _, session := range []string{"", "s.0123456789abcdefghijkl"} {
			req, _ := http.NewRequest(http.MethodPost, fmt.Sprintf("%s/p%d/mcp", base, i), strings.NewReader(callBody(`"x"`)))
			req.Header.Set("Content-Type", "application/json")
			req.Header.Set("Authorization", "Bearer "+canaries["CANARY_CLIENT"])
			if session != "" {
				req.Header.Set("Mcp-Session-Id", session)
			}
			resp, err := (&http.Client{Timeout: 2 * time.Second, Transport: alone.Transport, CheckRedirect: alone.CheckRedirect}).Do(req)
			if err != nil {
				continue // a stream that does not begin
			}
			b, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
			resp.Body.Close()
			if resp.Header.Get("X-Mcp-Health") != "" { // else it is the server's, who may say what it likes
				said[fmt.Sprintf("answer of p%d", i)] = fmt.Sprintln(resp.Header) + string(b)
			}
		}
	}
	return said
}

func fetch(t testing.TB, url, accept string) string {
	t.Helper()
	req, _ := http.NewRequest(http.MethodGet, url, nil)
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	resp, err := alone.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("GET %s: %s %.200s %v", url, resp.Status, b, err)
	}
	return string(b)
}

// wantOwnRules: the admin endpoint's own rules on Host and Origin hold for our paths,
// and nothing changes by GET.
func wantOwnRules(t *testing.T, admin string) {
	t.Helper()
	list := fetch(t, "http://"+admin+"/mcp_health/upstreams", "")
	_, rest, _ := strings.Cut(list, `"id":"`)
	id, _, _ := strings.Cut(rest, `"`)
	tests := []struct {
		name, method, path, host, origin string
		want                             int
	}{
		{"foreign host", "GET", "/mcp_health/upstreams", "evil.example", "", 403},
		{"foreign host, one", "GET", "/mcp_health/upstreams/" + id, "evil.example", "", 403},
		{"foreign host, drain", "POST", "/mcp_health/upstreams/" + id + "/drain", "evil.example", "", 403},
		{"foreign origin, drain", "POST", "/mcp_health/upstreams/" + id + "/drain", "", "http://evil.example", 403},
		{"drain by GET", "GET", "/mcp_health/upstreams/" + id + "/drain", "", "", 405},
		{"probe by GET", "GET", "/mcp_health/upstreams/" + id + "/probe", "", "", 405},
		{"delete", "DELETE", "/mcp_health/upstreams/" + id, "", "", 405},
		{"another file", "GET", "/mcp_health/upstreams/../../config", "", "", 0},
		{"no such one", "GET", "/mcp_health/upstreams/%3Cscript%3E", "", "", 404},
	}
	for _, tt := range tests {
		req, _ := http.NewRequest(tt.method, "http://"+admin+tt.path, nil)
		if tt.host != "" {
			req.Host = tt.host
		}
		if tt.origin != "" {
			req.Header.Set("Origin", tt.origin)
			req.Header.Set("Sec-Fetch-Mode", "cors")
		}
		resp, err := alone.Do(req)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if tt.want != 0 && resp.StatusCode != tt.want || strings.Contains(string(b), "<script>") {
			t.Errorf("%s: %s %s, want %d", tt.name, resp.Status, b, tt.want)
		}
	}
	if strings.Contains(fetch(t, "http://"+admin+"/mcp_health/upstreams/"+id, ""), `"draining":true`) {
		t.Error("an upstream was drained from a foreign origin")
	}
}

// The same in Traefik, whose own log shows the whole configuration at DEBUG.
func TestNoSecretShowsInTraefik(t *testing.T) {
	addrs, _, trapped := startParrots(t)
	var routes []Route
	for i, a := range addrs {
		routes = append(routes, Route{Name: fmt.Sprintf("p%d", i), Upstreams: []string{a, nowhere(t)}, Interval: 300 * time.Millisecond, Timeout: 500 * time.Millisecond, Hold: 200 * time.Millisecond,
			Traefik: fmt.Sprintf("expectTools: [search]\nheaders:\n  Authorization: Bearer %s\n  X-Probe-Token: %s\n", canaries["CANARY_PROBE"], canaries["CANARY_GLOBAL"])})
	}
	tr := traefik.Start(t, traefik.Options{Dynamic: traefikDynamic(routes)})
	said := visitAll(t, tr.URL, len(addrs))
	said["status"] = fetch(t, tr.URL+"/status", "")
	said["metrics"] = fetch(t, tr.URL+"/status", "text/plain;version=0.0.4")
	for line := range strings.Lines(tr.Output()) {
		if !strings.Contains(line, "Configuration received") {
			said["logs"] += line
		}
	}
	for where, text := range said {
		wantNoCanary(t, where, text)
	}
	if !strings.Contains(said["status"], "[redacted]") {
		t.Errorf("no server repeated a secret that was redacted: the test shows nothing\n%s", said["status"])
	}
	if n := trapped.Load(); n > 0 {
		t.Errorf("%d connections to where only servers pointed", n)
	}
}
