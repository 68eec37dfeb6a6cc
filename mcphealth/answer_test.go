package mcphealth

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestRequestID(t *testing.T) {
	tests := []struct {
		name, body, want string // want "" = no id member
	}{
		{"number", `{"jsonrpc":"2.0","id":7,"method":"ping"}`, `7`},
		{"string", `{"jsonrpc":"2.0","id":"a b","method":"ping"}`, `"a b"`},
		{"string with escapes stays as written", `{"id":"\u00e9\"","method":"ping"}`, `"\u00e9\""`},
		{"large number is not rounded", `{"id":12345678901234567890123,"method":"ping"}`, `12345678901234567890123`},
		{"fraction and exponent", `{"id":-1.5e3,"method":"ping"}`, `-1.5e3`},
		{"id after the parameters", `{"method":"ping","params":{"id":1,"a":[{"id":2}]},"id":3}`, `3`},
		{"id in the parameters only: a notification", `{"method":"ping","params":{"id":1}}`, ``},
		{"notification", `{"jsonrpc":"2.0","method":"notifications/initialized"}`, ``},
		{"response to the server", `{"jsonrpc":"2.0","id":4,"result":{}}`, ``},
		{"null", `{"id":null,"method":"ping"}`, `null`},
		{"object", `{"id":{},"method":"ping"}`, `null`},
		{"boolean", `{"id":true,"method":"ping"}`, `null`},
		{"batch", `[{"id":1,"method":"ping"}]`, `null`},
		{"empty body", ``, `null`},
		{"no JSON", `hello`, `null`},
		{"no JSON-RPC", `{}`, `null`},
		{"cut off after the id", `{"id":5,"method":"tools/call","params":{"x":"aaaa`, `5`},
		{"cut off before the id", `{"method":"tools/call","params":{"x":"aaaa`, `null`},
		{"cut off in the id", `{"method":"ping","id":"abc`, `null`},
		{"too long an id", `{"id":"` + strings.Repeat("x", 2000) + `","method":"ping"}`, `null`},
		{"no UTF-8", "{\"id\":\"\xff\xfe\",\"method\":\"ping\"}", `null`},
		{"white space", " \n {\t\"id\" : 6 , \"method\":\"ping\"}", `6`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := RequestID([]byte(tt.body)).JSON(); got != tt.want {
				t.Errorf("RequestID(%s) = %s, want %s", tt.body, got, tt.want)
			}
		})
	}
}

func TestUnavailable(t *testing.T) {
	tests := []struct {
		name, method, request string
		retry                 time.Duration
		wantRetry, wantBody   string
	}{
		{"a request", "POST", `{"id":7,"method":"ping"}`, 3 * time.Second, "3",
			`{"jsonrpc":"2.0","id":7,"error":{"code":503,"message":"MCP server temporarily unavailable, retry in 3 s","data":{"reason":"route_absent","retryAfterMs":3000}}}`},
		{"seconds are rounded up", "POST", `{"id":"x","method":"ping"}`, 1100 * time.Millisecond, "2",
			`{"jsonrpc":"2.0","id":"x","error":{"code":503,"message":"MCP server temporarily unavailable, retry in 2 s","data":{"reason":"route_absent","retryAfterMs":2000}}}`},
		{"at least one", "POST", `[]`, 0, "1",
			`{"jsonrpc":"2.0","id":null,"error":{"code":503,"message":"MCP server temporarily unavailable, retry in 1 s","data":{"reason":"route_absent","retryAfterMs":1000}}}`},
		{"a notification has no id", "POST", `{"method":"notifications/cancelled"}`, time.Second, "1",
			`{"jsonrpc":"2.0","error":{"code":503,"message":"MCP server temporarily unavailable, retry in 1 s","data":{"reason":"route_absent","retryAfterMs":1000}}}`},
		{"GET asks nothing", "GET", `{"id":1,"method":"ping"}`, time.Second, "1",
			`{"jsonrpc":"2.0","id":null,"error":{"code":503,"message":"MCP server temporarily unavailable, retry in 1 s","data":{"reason":"route_absent","retryAfterMs":1000}}}`},
		{"HEAD gets no body", "HEAD", ``, time.Second, "1", ``},
		{"nor does OPTIONS", "OPTIONS", ``, time.Second, "1", ``},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := httptest.NewRecorder()
			Unavailable(tt.method, RequestID([]byte(tt.request)), RouteAbsent, tt.retry).Send(w)
			want := map[string]string{"Retry-After": tt.wantRetry, "Cache-Control": "no-store", "Content-Type": "application/json", "X-Mcp-Health": "route_absent"}
			for k, v := range want {
				if got := w.Header().Get(k); got != v {
					t.Errorf("%s: %q, want %q", k, got, v)
				}
			}
			if w.Code != http.StatusServiceUnavailable || w.Body.String() != tt.wantBody {
				t.Errorf("got %d %s\nwant 503 %s", w.Code, w.Body, tt.wantBody)
			}
			if tt.wantBody != "" && !json.Valid(w.Body.Bytes()) {
				t.Errorf("body is no JSON: %s", w.Body)
			}
		})
	}
}

// Another edge in front must read our 503 as "its upstream is gone", never as life.
func TestUnavailableIsDeathToAProbe(t *testing.T) {
	for name, a := range map[string]func(ID) Answer{
		"503": func(id ID) Answer { return Unavailable("POST", id, Refused, time.Second) },
		"502": func(id ID) Answer { return MayHaveRun("POST", id, Reset) },
	} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				a(NullID).Send(w)
			}))
			defer s.Close()
			p, err := NewProber(Target{URL: s.URL + "/mcp"}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close(t.Context())
			if r := p.Probe(t.Context()); r.Verdict != Dead || r.Reason != GatewayError {
				t.Errorf("probe says %s (%s), want dead (gateway_error)", r.Verdict, r.Reason)
			}
		})
	}
}

func TestMayHaveRun(t *testing.T) {
	a := MayHaveRun("POST", RequestID([]byte(`{"id":9,"method":"tools/call"}`)), Reset)
	if a.Status != 502 || a.Header.Get("Retry-After") != "" || !strings.HasPrefix(string(a.Body), `{"jsonrpc":"2.0","id":9,"error":{"code":502,`) {
		t.Errorf("got %d %v %s", a.Status, a.Header, a.Body)
	}
}

func TestSessionLost(t *testing.T) {
	a := SessionLost("POST", RequestID([]byte(`{"id":"x","method":"tools/call"}`)), Refused)
	if a.Status != 404 || a.Header.Get("Retry-After") != "" || a.Header.Get("X-Mcp-Health") != "refused" || a.Header.Get("Cache-Control") != "no-store" {
		t.Errorf("got %d %v", a.Status, a.Header)
	}
	want := `{"jsonrpc":"2.0","id":"x","error":{"code":404,"message":"Session not found: the server that held it is gone, start a new session","data":{"reason":"refused","sessionLost":true}}}`
	if string(a.Body) != want {
		t.Errorf("body %s, want %s", a.Body, want)
	}
	if a := SessionLost("GET", RequestID(nil), Refused); !strings.HasPrefix(string(a.Body), `{"jsonrpc":"2.0","id":null,`) {
		t.Errorf("to a GET: %s", a.Body)
	}
}
