package operations

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/compose-spec/compose-go/v2/loader"
	"github.com/compose-spec/compose-go/v2/types"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// compose reads a compose file as docker compose does, against the specification's
// schema.
func compose(t *testing.T, file string) *types.Project {
	t.Helper()
	project, err := loader.LoadWithContext(context.Background(), types.ConfigDetails{WorkingDir: t.TempDir(),
		ConfigFiles: []types.ConfigFile{{Filename: file, Content: []byte(example(t, file))}}}, func(o *loader.Options) { o.SetProjectName("x", true) })
	if err != nil {
		t.Fatal(err)
	}
	return project
}

// composeConfig is the Caddyfile in compose/caddy.yml.
func composeConfig(t *testing.T) string {
	return compose(t, "compose/caddy.yml").Configs["caddyfile"].Content
}

// The compose files are right, and their health checks are what a good server passes
// and a dead one does not.
func TestCompose(t *testing.T) {
	for _, file := range []string{"compose/caddy.yml", "compose/traefik.yml", "traefik/docker-compose.yml"} {
		project := compose(t, file)
		for name, service := range project.Services {
			if service.HealthCheck != nil {
				t.Run(file+"/"+name, func(t *testing.T) { asHealthCheck(t, service.HealthCheck.Test[1:]) })
			}
		}
	}
	if text := composeConfig(t); text != "http:// {\n\tmcp_proxy /mcp* app1:8000 app2:8000\n}\n" {
		t.Errorf("the Caddyfile is %q", text)
	}
}

// asHealthCheck runs a command that asks a server at 127.0.0.1:8000, of one that
// lives, though common checks would drop it, of one that is none, and of nobody.
func asHealthCheck(t *testing.T, command []string) {
	t.Helper()
	if i := slices.Index(command, "http://127.0.0.1:8000/mcp"); i < 0 {
		t.Fatalf("%q asks for no http://127.0.0.1:8000/mcp", command)
	}
	lives, dies := startServer(t, "lives", serving), startServer(t, "dies", page)
	for url, want := range map[string]int{lives.url(): 0, dies.url(): 1, fmt.Sprintf("http://127.0.0.1:%d/mcp", e2e.FreePort(t)): 1} {
		args := append([]string{mcphealth(t)}, command[1:]...)
		args[slices.Index(args, "http://127.0.0.1:8000/mcp")] = url
		if got, out := exitOf(args); got != want {
			t.Errorf("%q: exit %d, want %d: %s", args, got, want, out)
		}
	}
}
