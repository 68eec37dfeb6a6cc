package caddymodule

import (
	"encoding/json"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"
)

// What the Caddyfile refuses, JSON must not get through either.
func TestBadJSON(t *testing.T) {
	tests := []struct {
		name    string
		handler string // of the one route
		app     string
		want    string
	}{
		{name: "unknown option", handler: proxyJSON(`{"policy":"mcp_health","uri":"/mcp"}`), want: `unknown field "uri"`},
		{name: "weights", handler: proxyJSON(`{"policy":"mcp_health","fallback":{"policy":"weighted_round_robin","weights":[1,2]}}`), want: "weighted_round_robin cannot be the fallback"},
		{name: "itself", handler: proxyJSON(`{"policy":"mcp_health","fallback":{"policy":"mcp_health"}}`), want: "cannot be its own fallback"},
		{name: "weights, of the fallback's fallback", handler: proxyJSON(`{"policy":"mcp_health","fallback":{"policy":"header","field":"X","fallback":{"policy":"weighted_round_robin","weights":[1,2]}}}`), want: "weighted_round_robin cannot be the fallback"},
		{name: "itself, as the fallback's fallback", handler: proxyJSON(`{"policy":"mcp_health","fallback":{"policy":"header","field":"X","fallback":{"policy":"mcp_health"}}}`), want: "cannot be its own fallback"},
		{name: "era", handler: proxyJSON(`{"policy":"mcp_health","era":"stone"}`), want: `era "stone"`},
		{name: "initial", handler: proxyJSON(`{"policy":"mcp_health","initial":"pessimistic"}`), want: "initial 'pessimistic'"},
		{name: "path", handler: proxyJSON(`{"policy":"mcp_health","path":"mcp"}`), want: "path 'mcp'"},
		{name: "path with a wrong escape", handler: proxyJSON(`{"policy":"mcp_health","path":"/a%zz/mcp"}`), want: "path '/a%zz/mcp'"},
		{name: "path of two lines", handler: proxyJSON(`{"policy":"mcp_health","path":"/mcp\n"}`), want: "path '/mcp"},
		{name: "interval", handler: proxyJSON(`{"policy":"mcp_health","interval":-1}`), want: "interval"},
		{name: "fast above the default interval", handler: proxyJSON(`{"policy":"mcp_health","fast":"20s"}`), want: "fast 20s is longer than interval 10s"},
		{name: "app's fast above the default interval", handler: proxyJSON(`{"policy":"mcp_health"}`), app: `{"fast":"20s"}`, want: "fast 20s is longer than interval 10s"},
		{name: "timeout", handler: proxyJSON(`{"policy":"mcp_health","timeout":-1}`), want: "timeout"},
		{name: "call", handler: proxyJSON(`{"policy":"mcp_health","call":{"tool":"a","arguments":[1]}}`), want: "want a JSON object"},
		{name: "call without a tool", handler: proxyJSON(`{"policy":"mcp_health","call":{"tool":""}}`), want: "name of a tool"},
		{name: "header Host", handler: proxyJSON(`{"policy":"mcp_health","header":{"host":["a"]}}`), want: "use the option 'host'"},
		{name: "source without source", handler: `{"handler":"reverse_proxy","dynamic_upstreams":{"source":"mcp_health"}}`, want: "want the source"},
		{name: "guard", handler: `{"handler":"mcp_guard","hold":-1}`, want: "hold"},
		{name: "guard's hold_max", handler: `{"handler":"mcp_guard","hold_max":-1}`, want: "hold_max"},
		{name: "guard's retry_after", handler: `{"handler":"mcp_guard","retry_after":-1}`, want: "retry_after"},
		{name: "guard's session_grace", handler: `{"handler":"mcp_guard","session_grace":-1}`, want: "session_grace"},
		{name: "guard's on_lost", handler: `{"handler":"mcp_guard","on_lost":"410"}`, want: "on_lost '410'"},
		{name: "guard's drain_timeout", handler: `{"handler":"mcp_guard","sticky":true,"drain_timeout":-1}`, want: "drain_timeout"},
		{name: "guard's session_key", handler: `{"handler":"mcp_guard","sticky":true,"session_key":"short"}`, want: "session_key: 5 bytes"},
		{name: "guard's session_key without a value", handler: `{"handler":"mcp_guard","sticky":true,"session_key":"{env.MCP_NO_SUCH_VARIABLE}"}`, want: "session_key"},
		{name: "slow_start", handler: proxyJSON(`{"policy":"mcp_health","slow_start":-1}`), want: "positive duration"},
		{name: "app", handler: `{"handler":"mcp_guard"}`, app: `{"fall":-1}`, want: "fall -1"},
		{name: "app and handler together", handler: proxyJSON(`{"policy":"mcp_health","expect_tool":["a"]}`), app: `{"deep":false}`, want: "deep off"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			app := tt.app
			if app == "" {
				app = "{}"
			}
			cfg := `{"admin":{"disabled":true,"config":{"persist":false}},
				"storage":{"module":"file_system","root":"` + storageDir(t) + `"},
				"logging":{"logs":{"default":{"writer":{"output":"discard"}}}},
				"apps":{"mcp_health":` + app + `,"http":{"servers":{"s":{"listen":["127.0.0.1:0"],"routes":[{"handle":[` + tt.handler + `]}]}}}}}`
			require.True(t, json.Valid([]byte(cfg)))
			var c caddy.Config
			require.NoError(t, json.Unmarshal([]byte(cfg), &c))
			err := caddy.Validate(&c)
			require.ErrorContains(t, err, tt.want)
			require.Zero(t, guards.Load(), "a guard is still counted")
			require.Empty(t, checkers.list())
		})
	}
}

func proxyJSON(policy string) string {
	return `{"handler":"reverse_proxy","load_balancing":{"selection_policy":` + policy + `},"upstreams":[{"dial":"127.0.0.1:9"}]}`
}

// Validating a configuration must not reach out to anybody.
func TestValidateProbesNobody(t *testing.T) {
	a := newServer(t, "a")
	cfg := `{"admin":{"disabled":true},"storage":{"module":"file_system","root":"` + storageDir(t) + `"},
		"logging":{"logs":{"default":{"writer":{"output":"discard"}}}},
		"apps":{"http":{"servers":{"s":{"listen":["127.0.0.1:0"],"routes":[{"handle":[
		{"handler":"reverse_proxy","load_balancing":{"selection_policy":{"policy":"mcp_health"}},"upstreams":[{"dial":"` + a.addr + `"}]}]}]}}}}}`
	var c caddy.Config
	require.NoError(t, json.Unmarshal([]byte(cfg), &c))
	require.NoError(t, caddy.Validate(&c))
	require.Zero(t, a.probes.Load())
	require.Empty(t, checkers.list())
}
