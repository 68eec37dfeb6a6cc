package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const traefikModule = "github.com/mcphealth/mcphealth"

// Both Traefiks repeat what found nobody listening, on a connection per call, as
// docs/traefik.md says under "Fewer 502s".
const traefikConfig = `
http:
  middlewares:
    again:
      retry:
        attempts: 4
        initialInterval: 20ms
    mcp:
      plugin:
        mcphealth:
          paths: [/mcp]
          hold: 10s
  routers:
    app:
      rule: PathPrefix(` + "`/mcp`" + `)
      middlewares: [%s]
      service: app
  serversTransports:
    fresh:
      maxIdleConnsPerHost: -1
  services:
    app:
      loadBalancer:
        serversTransport: fresh
%s        servers:
`

// nativeCheck is Traefik's own: one failure takes a server down, one success brings it
// back.
const nativeCheck = `        healthCheck:
          path: /health
          interval: 10s
          unhealthyInterval: 1s
          timeout: 5s
`

// startTraefik runs Traefik with a service of these servers, checked by its own health
// check or by the plugin.
func startTraefik(listen string, up []string, plugin bool) (*proc, error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, err
	}
	bin, err := filepath.Abs(*traefikBin)
	if err != nil {
		return nil, err
	}
	middlewares, check := "again", nativeCheck
	flags := []string{"--entrypoints.web.address=" + listen, "--log.level=ERROR", "--global.checknewversion=false", "--global.sendanonymoususage=false"}
	if plugin {
		middlewares, check = "again, mcp", ""
		flags = append(flags, "--experimental.localplugins.mcphealth.modulename="+traefikModule, "--experimental.abortonpluginfailure=true")
		if err := installPlugin(dir); err != nil {
			return nil, err
		}
	}
	config := fmt.Sprintf(traefikConfig, middlewares, check)
	if !plugin { // a plugin that is not installed must not be named
		from, to := strings.Index(config, "    mcp:\n"), strings.Index(config, "  routers:\n")
		config = config[:from] + config[to:]
	}
	for _, addr := range up {
		config += "          - url: http://" + addr + "\n"
	}
	file := filepath.Join(dir, "dynamic.yml")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		return nil, err
	}
	p := &proc{dir: dir, cmd: exec.Command(bin, append(flags, "--providers.file.filename="+file)...)}
	p.cmd.Dir = dir
	return p, p.start("http://" + listen + " {")
}

// installPlugin puts the plugin of this folder where a Traefik in dir looks for it.
func installPlugin(dir string) error {
	root := filepath.Join(dir, "plugins-local/src", traefikModule)
	for _, name := range []string{"mcphealth", "traefikplugin"} {
		if err := os.CopyFS(filepath.Join(root, name), os.DirFS(filepath.Join("..", name))); err != nil {
			return err
		}
	}
	manifest, err := os.ReadFile("../.traefik.yml")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, ".traefik.yml"), manifest, 0o644)
}
