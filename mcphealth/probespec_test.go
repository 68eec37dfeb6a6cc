package mcphealth

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// What docs/probe-spec.md promises line by line, where no other test shows it.

// literal is the published specification and nothing else: one server/discover, and
// any answer to it is life.
func literal(url string) Target {
	return Target{URL: url, Era: Modern, AliveIf: AliveIfAnyResponse, Timeout: 300 * time.Millisecond}
}

func TestLiteralProbe(t *testing.T) {
	html := func(status int) func(http.ResponseWriter, inquiry) {
		return func(w http.ResponseWriter, _ inquiry) {
			w.Header().Set("Content-Type", "text/html")
			w.WriteHeader(status)
			_, _ = io.WriteString(w, "<html>")
		}
	}
	tests := []struct {
		name string
		say  func(http.ResponseWriter, inquiry)
		want string
	}{
		{"a result", sayModern(nothing), "ready ok"},
		{"-32601", func(w http.ResponseWriter, a inquiry) { answer200(w, a, unknownRPC) }, "alive method_not_found"},
		{"404 that carries -32601", func(w http.ResponseWriter, a inquiry) { answerWith(w, 404, a, unknownRPC) }, "alive method_not_found"},
		{"another JSON-RPC error", func(w http.ResponseWriter, a inquiry) {
			answerWith(w, 400, a, `"error":{"code":-32000,"message":"no"}`)
		}, "alive rpc_error"},
		{"401", func(w http.ResponseWriter, _ inquiry) { w.WriteHeader(401) }, "alive auth_required"},
		{"404", html(404), "alive http_answer"},
		{"200, a page", html(200), "alive http_answer"},
		{"500", html(500), "alive http_answer"},
		{"502", html(502), "alive http_answer"},
		{"503", html(503), "alive http_answer"},
		{"421", html(421), "alive http_answer"},
		{"no answer in time", func(_ http.ResponseWriter, a inquiry) { <-a.gone }, "dead timeout"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := serveDepth(t, tt.say)
			probeDepth(t, literal(d.URL), tt.want)
			if got := d.methods(); got != "server/discover" {
				t.Errorf("asked %s, want server/discover once", got)
			}
		})
	}
	t.Run("no connection", func(t *testing.T) { probeDepth(t, literal("http://"+closedPort()), "dead refused") })
}

// Straight to the backend: no proxy of the environment, and nobody but the target.
func TestProbeGoesStraight(t *testing.T) {
	for _, name := range []string{"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"} {
		t.Setenv(name, "http://proxy.example.com:3128")
	}
	var dialled []string
	line := NewLine(&http.Transport{DialContext: func(_ context.Context, _, addr string) (net.Conn, error) {
		dialled = append(dialled, addr)
		return nil, errors.New("connection refused")
	}})
	p, err := NewProber(Target{URL: "http://app1.example.com:8000/mcp"}, line)
	if err != nil {
		t.Fatal(err)
	}
	p.Probe(context.Background())
	if got := strings.Join(dialled, " "); got != "app1.example.com:8000" {
		t.Errorf("dialled %q, want the upstream", got)
	}
}

// What a probe asks for, no cache may keep or answer; what a server lets caches keep
// all the same is a warning.
func TestDiscoverIsNotCached(t *testing.T) {
	tests := []struct {
		name, ttl string
		header    http.Header
		warns     bool
	}{
		{"ttlMs 0", `"ttlMs":0,"cacheScope":"public"`, nil, false},
		{"none, as in tmcp", `"x":0`, nil, false},
		{"for this client alone", `"ttlMs":60000,"cacheScope":"private"`, nil, false},
		{"for shared caches", `"ttlMs":60000,"cacheScope":"public"`, nil, true},
		{"out of a cache", `"ttlMs":0`, http.Header{"Age": {"30"}}, true},
		{"into one", `"ttlMs":0`, http.Header{"Age": {"0"}, "X-Cache": {"MISS"}}, false},
		{"out of Cloudflare's", `"ttlMs":0`, http.Header{"Cf-Cache-Status": {"HIT"}}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			ids := map[string]bool{}
			d := serveDepth(t, func(w http.ResponseWriter, a inquiry) {
				ids[a.id] = true
				for k, v := range tt.header {
					w.Header()[k] = v
				}
				answer200(w, a, fmt.Sprintf(`"result":{"supportedVersions":["2026-07-28"],"capabilities":{},%s}`, tt.ttl))
			})
			for range 3 {
				r := probeDepth(t, Target{URL: d.URL}, "ready ok")
				if warned := len(r.Warnings) == 1 && strings.HasPrefix(r.Warnings[0], "cacheable: "); warned != tt.warns || len(r.Warnings) > 1 {
					t.Errorf("Warnings = %q, want one of cacheable: %v", r.Warnings, tt.warns)
				}
			}
			if len(ids) != 3 {
				t.Errorf("%d ids in three probes: a cache could know one", len(ids))
			}
		})
	}
}

// The headers that keep caches and compressing hops out, and no more than needed.
func TestProbeHeaders(t *testing.T) {
	var got http.Header
	line := NewForeignLine(roundTrip(func(r *http.Request) (*http.Response, error) {
		got = r.Header
		return nil, errors.New("connection refused")
	}))
	p, err := NewProber(Target{URL: "http://app1/mcp"}, line)
	if err != nil {
		t.Fatal(err)
	}
	p.Probe(context.Background())
	want := map[string]string{
		"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Accept-Encoding": "identity",
		"Cache-Control": "no-cache, no-store", "User-Agent": "mcphealth/" + Version, "Mcp-Protocol-Version": modernVersion,
		"Mcp-Method": "server/discover", "Mcp-Session-Id": ghostID,
	}
	for k, v := range want {
		if got.Get(k) != v {
			t.Errorf("%s: %q, want %q", k, got.Get(k), v)
		}
	}
	if len(got) != len(want) {
		t.Errorf("sent %v, want these %d alone", got, len(want))
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }
