package caddymodule

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// TestDepthOptions: each option of what is asked, in a Caddyfile and in JSON, once
// good and once bad. The flags of the command have theirs in cmd/mcphealth.
func TestDepthOptions(t *testing.T) {
	tests := []struct {
		caddyfile, json       string
		set                   func(*mcphealth.Target) // what comes of it
		badCaddyfile, badJSON string
		message               string // in both errors
	}{
		{`expect_tool echo`, `{"expect_tool":["echo"]}`, func(t *mcphealth.Target) { t.ExpectTools = []string{"echo"} },
			`expect_tool ""`, `{"expect_tool":[""]}`, "want the name of a tool"},
		{`call echo {"a":1}`, `{"call":{"tool":"echo","arguments":{"a":1}}}`, func(t *mcphealth.Target) { t.CallTool, t.CallArgs = "echo", `{"a":1}` },
			`call echo [1]`, `{"call":{"tool":"echo","arguments":[1]}}`, "want a JSON object"},
		{`slow_after 2s`, `{"slow_after":2000000000}`, func(t *mcphealth.Target) { t.SlowAfter = 2 * time.Second },
			`slow_after -2s`, `{"slow_after":-1}`, "want a positive duration"},
		{`health_path /health?deep=1`, `{"health_path":"/health?deep=1"}`, func(t *mcphealth.Target) { t.HealthPath = "/health?deep=1" },
			`health_path health`, `{"health_path":"health"}`, "want a path that begins with /"},
		{`fresh on`, `{"fresh":true}`, func(t *mcphealth.Target) { t.Fresh = true },
			`fresh yes`, `{"fresh":"yes"}`, ""},
		{`require_auth on`, `{"require_auth":true}`, func(t *mcphealth.Target) { t.RequireAuth = true },
			`require_auth 1`, `{"require_auth":1}`, ""},
		{`header Authorization "Bearer x"`, `{"header":{"Authorization":["Bearer x"]}}`, func(t *mcphealth.Target) { t.Header = http.Header{"Authorization": {"Bearer x"}} },
			"header Authorization \"a\nb\"", `{"header":{"Authorization":["a\nb"]}}`, "want no line break"},
		{`alive_if any_response`, `{"alive_if":"any_response"}`, func(t *mcphealth.Target) { t.AliveIf = mcphealth.AliveIfAnyResponse },
			`alive_if any`, `{"alive_if":"any"}`, "want mcp or any_response"},
		{`era sse`, `{"era":"sse"}`, func(t *mcphealth.Target) { t.Era = mcphealth.SSE },
			`era 2024`, `{"era":"2024"}`, "want auto, modern, legacy or sse"},
		{`deep off`, `{"deep":false}`, func(t *mcphealth.Target) { t.Shallow = true },
			"deep off\nexpect_tool a", `{"deep":false,"call":{"tool":"a"}}`, "contradict deep off"},
	}
	for _, tt := range tests {
		t.Run(tt.caddyfile, func(t *testing.T) {
			want := mcphealth.Target{URL: "http://localhost/"}.WithDefaults()
			tt.set(&want)
			written, err := checkOf(tt.caddyfile)
			require.NoError(t, err)
			require.Equal(t, want, written.target("http://localhost/"))
			loaded, err := checkOfJSON(tt.json)
			require.NoError(t, err)
			require.Equal(t, want, loaded.target("http://localhost/"))

			_, err = checkOf(tt.badCaddyfile)
			require.ErrorContains(t, err, tt.message)
			require.ErrorContains(t, err, "Testfile:")
			_, err = checkOfJSON(tt.badJSON)
			require.ErrorContains(t, err, tt.message)
		})
	}
}

func checkOf(options string) (Check, error) {
	var p Policy
	err := p.UnmarshalCaddyfile(caddyfile.NewTestDispenser("mcp_health {\n" + options + "\n}"))
	return p.Check, err
}

func checkOfJSON(raw string) (Check, error) {
	var c Check
	if err := json.Unmarshal([]byte(raw), &c); err != nil {
		return c, err
	}
	return c, c.validate()
}
