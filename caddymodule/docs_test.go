package caddymodule

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/stretchr/testify/require"
)

var caddyfileBlock = regexp.MustCompile("(?ms)^```caddyfile\n(.*?)^```$")

// What the README, the docs and the examples show is a configuration that loads.
func TestDocsAreValid(t *testing.T) {
	t.Setenv("MCP_SESSION_KEY", "0123456789abcdef")
	files, err := filepath.Glob("../docs/*.md")
	require.NoError(t, err)
	files = append(files, "../README.md")
	blocks := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range caddyfileBlock.FindAllStringSubmatch(string(text), -1) {
			blocks++
			validCaddyfile(t, file, m[1])
		}
	}
	require.GreaterOrEqual(t, blocks, 6, "the docs show Caddyfiles")

	example, err := os.ReadFile("../examples/Caddyfile")
	require.NoError(t, err)
	validCaddyfile(t, "../examples/Caddyfile", string(example))
}

func validCaddyfile(t *testing.T, file, text string) {
	t.Helper()
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": file})
	require.NoError(t, err, text)
	var cfg caddy.Config
	require.NoError(t, caddy.StrictUnmarshalJSON(adapted, &cfg), text)
	// Validate opens nothing, but certificates want storage: none here.
	cfg.StorageRaw = []byte(`{"module":"file_system","root":"` + t.TempDir() + `"}`)
	require.NoError(t, caddy.Validate(&cfg), text)
}

// Each option has a row in docs/caddy.md, and each row is an option.
func TestDocsNameEveryOption(t *testing.T) {
	text, err := os.ReadFile("../docs/caddy.md")
	require.NoError(t, err)
	for file, head := range map[string]string{"policy.go": "//	lb_policy mcp_health {\n", "guard.go": "//	mcp_guard [<matcher>] {\n", "status.go": "//	mcp_status [<matcher>] {\n"} {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		_, grammar, _ := strings.Cut(string(source), head)
		grammar, _, _ = strings.Cut(grammar, "//	}\n")
		options := regexp.MustCompile(`(?m)^//\s+(\w+)`).FindAllStringSubmatch(grammar, -1)
		require.NotEmpty(t, options)
		for _, o := range options {
			require.Regexp(t, "(?m)^\\|[^|]*`"+o[1]+"[ `]", string(text), "docs/caddy.md lacks a row for %s", o[1])
		}
	}
	for _, name := range guardOptions {
		require.Regexp(t, "(?m)^\\| `"+name+"[ `]", string(text), "docs/caddy.md lacks a row for %s", name)
	}
}
