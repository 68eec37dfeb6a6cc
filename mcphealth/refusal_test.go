package mcphealth

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// TestRefusals: what servers, frameworks and hops in between say to the made-up
// session of the cheap questions, beyond the captures; a server that hands out
// sessions stands behind where the row says so.
func TestRefusals(t *testing.T) {
	const rpcError = `{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Session does not belong to you: invalid session"}}`
	token := func(t *Target) { t.Header = http.Header{"Authorization": {"Bearer good"}} }
	host := func(t *Target) { t.Host = "mcp.example.com" }
	shallow := func(t *Target) { t.Shallow = true }
	eraModern := func(t *Target) { t.Era = Modern }
	tests := []struct {
		name   string
		status int
		body   string
		header string // "Name: value", or ""
		behind bool   // initialize opens a session
		set    func(*Target)
		want   string
	}{
		{"rmcp, formerly", 401, "Unauthorized: Session not found", "", true, nil, "ready ok"},
		{"the same, to credentials", 401, "Unauthorized: Session not found", "", true, token, "ready ok"},
		{"the same, to everything", 401, "Unauthorized: Session not found", "", false, token, "degraded credentials_rejected"},
		{"a challenge is one, whatever the words", 401, "Session expired", "WWW-Authenticate: Bearer", true, nil, "alive auth_required"},
		{"another user's session", 403, "Forbidden: invalid session", "", true, nil, "ready ok"},
		{"the same in JSON-RPC", 403, rpcError, "", true, nil, "ready ok"},
		{"JSON of its own, as a login's", 403, `{"error":"Invalid session ID"}`, "", true, nil, "dead not_mcp"},
		{"or where initialize is not asked", 403, `{"error":"Invalid session ID"}`, "", true, eraModern, "dead not_mcp"},
		{"rmcp, without a session", 422, "Unexpected message, expect initialize request", "", true, nil, "ready ok"},
		{"the same, asked no further", 422, "Unexpected message, expect initialize request", "", true, shallow, "alive session_required"},
		{"Neotoma, after a restart", 503, rpcError, "", true, nil, "ready ok"},
		{"the same, to everything", 503, rpcError, "", false, nil, "degraded session_limit"},
		{"or full, for all that a probe hears that asks no further", 503, rpcError, "", true, shallow, "degraded session_limit"},
		{"or it starts", 503, `{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"Server not initialized"}}`, "", true, nil, "degraded session_limit"},
		{"or full, in words about sessions", 503, `{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"No more sessions"}}`, "", true, nil, "degraded session_limit"},
		{"or full, where initialize is not asked", 503, rpcError, "", true, eraModern, "degraded session_limit"},
		{"the same from another edge", 503, rpcError, "X-Mcp-Health: refused", true, nil, "dead gateway_error"},
		{"the application chokes", 500, "<html>Internal Server Error", "", true, nil, "ready ok"},
		{"no session, and none can be had", 404, "Not Found: Session not found", "", false, nil, "dead route_absent"},
		{"the same in JSON-RPC, gone", 410, `{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"Tunnel offline"}}`, "", false, nil, "dead route_absent"},

		{"C# and PHP, an error that belongs to no request", 404, `{"jsonrpc":"2.0","id":"","error":{"code":-32001,"message":"Session not found"}}`, "", true, shallow, "alive session_required"},
		{"the same, to initialize", 400, `{"jsonrpc":"2.0","id":"","error":{"code":-32000,"message":"Bad Request"}}`, "", false, nil, "alive rpc_error"},

		{"the session's name between the words", 400, `{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"Session 0f8fad5b-d9cd-469f-a165-70867728950e not found"}}`, "", true, shallow, "alive session_required"},
		{"go-sdk's HTTP+SSE", 400, "sessionid must be provided\n", "", false, nil, "alive session_required"},

		{"Starlette's TrustedHostMiddleware", 400, "Invalid host header", "", false, nil, "unknown host_guessed"},
		{"the same, to the Host of clients", 400, "Invalid host header", "", false, host, "dead host_rejected"},
		{"ASP.NET Core's host filtering", 400, "<!DOCTYPE HTML><HTML><HEAD><TITLE>Bad Request</TITLE></HEAD><BODY><h2>Bad Request - Invalid Hostname</h2>", "", false, nil, "unknown host_guessed"},
		{"the same, to the Host of clients", 400, "<!DOCTYPE HTML><HTML><HEAD><TITLE>Bad Request</TITLE></HEAD><BODY><h2>Bad Request - Invalid Hostname</h2>", "", false, host, "dead host_rejected"},
		{"Django's, with DEBUG", 400, "<!DOCTYPE html><html lang=\"en\"><head><title>DisallowedHost\n          at /mcp</title>", "", false, nil, "unknown host_guessed"},
		{"nginx, of anything else", 400, "<html><head><title>400 Bad Request</title></head>", "", false, nil, "dead not_mcp"},
		{"Vite", 403, `<!DOCTYPE html>Blocked request. This host ("mcp.example.com") is not allowed.`, "", false, nil, "unknown host_guessed"},
		{"the same, to the Host of clients", 403, `<!DOCTYPE html>Blocked request. This host ("mcp.example.com") is not allowed.`, "", false, host, "dead host_rejected"},
		{"Cloudflare's wall", 403, "<!DOCTYPE html><html><head><title>Attention Required! | Cloudflare</title>", "", false, nil, "dead not_mcp"},
		{"AWS API Gateway, no such route", 403, `{"message":"Missing Authentication Token"}`, "", false, nil, "dead not_mcp"},

		{"Docker's API", 400, "Unsupported API version 1.24", "", false, nil, "dead not_mcp"},
		{"a WebSocket server", 426, "Upgrade Required", "Upgrade: websocket", false, nil, "dead not_mcp"},
		{"plain HTTP to a port of TLS", 400, "Client sent an HTTP request to an HTTPS server.", "", false, nil, "dead not_mcp"},
		{"AWS API Gateway, the function failed", 500, `{"message":"Internal server error"}`, "", false, nil, "dead server_error"},
		{"Envoy", 503, "upstream connect error or disconnect/reset before headers. reset reason: connection failure", "", false, nil, "dead gateway_error"},
		{"Kong, no such route", 404, `{"message":"no Route matched with those values"}`, "", false, nil, "unknown endpoint_not_found"},
		{"a name with session in it", 404, "service mcp-session-router not found", "", false, nil, "unknown endpoint_not_found"},
		{"a Host with session in it", 404, "host sessions.example.com not found", "", false, nil, "unknown endpoint_not_found"},
		{"a source line with session in it", 400, "sessionHandler.go:12 closed", "", false, nil, "dead not_mcp"},
		{"Next.js", 404, "Server action not found.", "", false, nil, "unknown endpoint_not_found"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
				if tt.behind && (a.method == "initialize" || a.session == "s-1") {
					saySessions(nothing)(w, a)
					return
				}
				if name, value, ok := strings.Cut(tt.header, ": "); ok {
					w.Header().Set(name, value)
				}
				if strings.HasPrefix(tt.body, "{") {
					w.Header().Set("Content-Type", "application/json")
				}
				w.WriteHeader(tt.status)
				_, _ = io.WriteString(w, tt.body)
			})
			target := Target{URL: d.URL + "/mcp", Timeout: time.Second}
			if tt.set != nil {
				tt.set(&target)
			}
			p, err := NewProber(target, nil)
			if err != nil {
				t.Fatal(err)
			}
			for i := 1; i <= 2; i++ { // the second knows what the first has learned
				r := p.Probe(context.Background())
				if got := string(r.Verdict) + " " + string(r.Reason); got != tt.want {
					t.Errorf("probe %d = %q, want %q\n%s", i, got, tt.want, trail(r))
				}
			}
			p.Close(context.Background())
			if opened, ended := d.count(func(a inquiry) bool { return a.method == "initialize" && tt.behind }),
				d.count(func(a inquiry) bool { return a.verb == http.MethodDelete }); opened != ended {
				t.Errorf("%d sessions opened, %d ended", opened, ended)
			}
		})
	}
}

// A redirect is replayed once, at the same upstream, if its origin is that of the
// question, as we see it or as clients do.
func TestSameOrigin(t *testing.T) {
	tests := []struct {
		name, location, host string
		want                 string
	}{
		{"a path", "/mcp/", "", "ready ok"},
		{"a whole URL in capitals", "HTTP://$HOST/mcp/", "", "ready ok"},
		{"the Host of clients", "http://mcp.example.com/mcp/", "mcp.example.com", "ready ok"},
		{"with the port of the scheme", "http://mcp.example.com:80/mcp/", "mcp.example.com", "ready ok"},
		{"TLS ends before us", "https://mcp.example.com/mcp/", "mcp.example.com", "ready ok"},
		{"TLS is wanted of us", "https://mcp.example.com/mcp", "mcp.example.com", "unknown redirected"},
		{"TLS, of a Host that nobody told us", "https://mcp.example.com/mcp/", "", "unknown redirected"},
		{"another port", "http://mcp.example.com:8080/mcp/", "mcp.example.com", "unknown redirected"},
		{"no place", "", "", "unknown redirected"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
				if a.path == "/mcp/" {
					sayModern(nothing)(w, a)
					return
				}
				w.Header()["Location"] = []string{strings.ReplaceAll(tt.location, "$HOST", a.host)}
				w.WriteHeader(http.StatusTemporaryRedirect)
			})
			probeDepth(t, Target{URL: d.URL + "/mcp", Host: tt.host}, tt.want)
		})
	}
}

// A session that was opened behind a redirect is ended there: Starlette sends /mcp to
// /mcp/, and a DELETE would be sent there as well and end nothing.
func TestSessionBehindRedirect(t *testing.T) {
	d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
		if a.path == "/mcp/" {
			saySessions(nothing)(w, a)
			return
		}
		w.Header().Set("Location", "/mcp/")
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	probeDepth(t, Target{URL: d.URL + "/mcp"}, "ready ok")
	if n := d.count(func(a inquiry) bool { return a.verb == http.MethodDelete && a.path == "/mcp/" && a.session == "s-1" }); n != 1 {
		t.Errorf("asked %s, want the session ended at /mcp/", d.methods())
	}
}

// Bitcoin Core has a ping as well, and answers null; Kodi says pong.
func TestPingOfOthers(t *testing.T) {
	for _, pong := range []string{"null", `"pong"`} {
		d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
			if a.method == "ping" {
				answer200(w, a, `"result":`+pong)
				return
			}
			answerWith(w, 404, a, unknownRPC)
		})
		probeDepth(t, Target{URL: d.URL}, "alive method_not_found")
	}
}

// A stub has a result for anything; a sloppy MCP server too, but a right one for initialize.
func TestResultForAnything(t *testing.T) {
	for _, tt := range []struct{ initialize, want string }{
		{okEmpty, "dead not_mcp"},
		{okInit, "ready ok"},
	} {
		d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
			if a.method == "initialize" {
				answer200(w, a, tt.initialize)
				return
			}
			answer200(w, a, okEmpty)
		})
		probeDepth(t, Target{URL: d.URL}, tt.want)
	}
}

// A Host that is learned while a probe with another one is refused is the next guess.
func TestHostLearnedDuringAProbe(t *testing.T) {
	var p *Prober
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host == "good.example" {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"no such session"}}`)
			return
		}
		p.LearnHost("good.example")
		http.Error(w, "Invalid Host header", http.StatusMisdirectedRequest)
	}))
	defer s.Close()
	p, err := NewProber(Target{URL: s.URL + "/mcp"}, NewLine(&http.Transport{}))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	first, second := p.Probe(context.Background()), p.Probe(context.Background())
	if first.Reason != HostGuessed || second.Verdict != Alive {
		t.Errorf("%s, then %s %s: want host_guessed, then alive", first.Reason, second.Verdict, second.Reason)
	}
}
