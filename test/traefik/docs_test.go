package traefik

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
	"gopkg.in/yaml.v3"
)

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(e2e.Root(), path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

var yamlBlock = regexp.MustCompile("(?s)```yaml\n(.*?)```")

// entryPoints are those that docs and examples name, besides web.
func entryPoints(t *testing.T) []string {
	return []string{fmt.Sprintf("--entrypoints.websecure.address=127.0.0.1:%d", e2e.FreePort(t)),
		fmt.Sprintf("--entrypoints.private.address=127.0.0.1:%d", e2e.FreePort(t))}
}

// Every yaml block of docs/traefik.md works in a real Traefik.
func TestDocs(t *testing.T) {
	blocks := yamlBlock.FindAllStringSubmatch(read(t, "docs/traefik.md"), -1)
	if len(blocks) < 6 {
		t.Fatalf("%d yaml blocks, want 6 or more", len(blocks))
	}
	for i, b := range blocks {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			var doc map[string]any
			if err := yaml.Unmarshal([]byte(b[1]), &doc); err != nil {
				t.Fatal(err)
			}
			if _, dynamic := doc["http"]; dynamic {
				wantAllEnabled(t, Start(t, Options{Dynamic: b[1], Flags: entryPoints(t)}))
				return
			}
			startStatic(t, b[1]+"\nentryPoints:\n  web:\n    address: \":80\"\n", "http: {routers: {r: {rule: Path(`/`), service: noop@internal}}}")
		})
	}
}

// The example files work as they are, but for addresses and where the plugin is.
func TestExamples(t *testing.T) {
	tr := startStatic(t, read(t, "examples/traefik/static.yml"), read(t, "examples/traefik/dynamic.yml"))
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	for _, edge := range []string{tr.URL, tr.secure} {
		t.Run(edge[:5], func(t *testing.T) {
			t.Parallel()
			req, _ := http.NewRequest(http.MethodPost, edge+"/mcp", strings.NewReader(`{"jsonrpc":"2.0","id":"x","method":"ping"}`))
			req.Host = "mcp.example.com"
			start := time.Now()
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			if resp.StatusCode != 503 || !strings.Contains(string(body), `"id":"x"`) || time.Since(start) < 9*time.Second {
				t.Errorf("%d %s after %s, want 503 after the hold of 10 s", resp.StatusCode, body, time.Since(start))
			}
		})
	}
}

// The labels of docker-compose.yml alone keep calls through a recreation.
func TestComposeExample(t *testing.T) {
	var compose struct {
		Services map[string]struct {
			Command []string
			Labels  []string
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, "examples/traefik/docker-compose.yml")), &compose); err != nil {
		t.Fatal(err)
	}
	d := StartDocker(t)
	port, edge := e2e.FreePort(t), e2e.FreePort(t)
	tr := Start(t, Options{Throttled: true, Flags: []string{"--providers.docker.endpoint=unix://" + d.socket, "--providers.docker.exposedbydefault=false"}})
	// The image of Traefik exposes a port, which its provider asks for.
	d.Run(t, d.args("run", "other", edge, append(compose.Services["traefik"].Labels, fmt.Sprintf("traefik.http.services.edge.loadbalancer.server.port=%d", edge))...)...)
	var app []string
	for _, l := range compose.Services["app"].Labels {
		app = append(app, strings.Replace(l, "port=8000", fmt.Sprintf("port=%d", port), 1))
	}
	d.Run(t, d.args("run", "app", port, app...)...)
	await(t, 20*time.Second, "served", func() bool { status, _ := post(t, tr.URL+"/mcp"); return status == 200 })
	load := e2e.Load{URL: tr.URL + "/mcp", Clients: 5, Rate: 5}.Start(t)
	time.Sleep(time.Second)
	d.Run(t, "rm", "-f", "app")
	time.Sleep(time.Second)
	d.Run(t, d.args("run", "app", port, app...)...)
	time.Sleep(5 * time.Second)
	rep := load.Stop()
	t.Log(rep)
	for _, f := range rep.Failures {
		if f.Status != 502 {
			t.Errorf("%v", f)
		}
	}
	if rep.Slowest < time.Second || len(rep.Failures) > 5 {
		t.Errorf("%v: want calls that waited, and none lost but those under way", rep)
	}
}

// startStatic runs Traefik with a static configuration file, made local.
func startStatic(t *testing.T, static, dynamic string) *Traefik {
	t.Helper()
	web, secure, api := e2e.FreePort(t), e2e.FreePort(t), e2e.FreePort(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "dynamic.yml")
	if err := os.WriteFile(file, []byte(dynamic), 0o644); err != nil {
		t.Fatal(err)
	}
	static = strings.NewReplacer(`":80"`, fmt.Sprintf(`"127.0.0.1:%d"`, web), `":443"`, fmt.Sprintf(`"127.0.0.1:%d"`, secure),
		"/etc/traefik/dynamic.yml", file, "  plugins:\n", "  localPlugins:\n", "      version: v0.1.0\n", "",
		"  docker:\n    exposedByDefault: false\n", "").Replace(static)
	if !strings.Contains(static, "providers:") {
		static += "providers:\n  file:\n    filename: " + file + "\n"
	}
	static += "api:\n  insecure: true\nlog:\n  level: DEBUG\nglobal:\n  checkNewVersion: false\n  sendAnonymousUsage: false\n"
	static = strings.Replace(static, "entryPoints:\n", fmt.Sprintf("entryPoints:\n  traefik:\n    address: \"127.0.0.1:%d\"\n", api), 1)
	name := filepath.Join(dir, "static.yml")
	if err := os.WriteFile(name, []byte(static), 0o644); err != nil {
		t.Fatal(err)
	}
	tr := startWith(t, web, api, []string{"--configfile=" + name})
	tr.secure = fmt.Sprintf("https://127.0.0.1:%d", secure)
	tr.awaitRouters(t)
	wantAllEnabled(t, tr)
	return tr
}

// wantAllEnabled wants every router and middleware without an error.
func wantAllEnabled(t *testing.T, tr *Traefik) {
	t.Helper()
	for _, what := range []string{"routers", "middlewares", "services"} {
		_, body := get(t, tr.API+"/api/http/"+what)
		var all []struct {
			Name, Status string
			Error        []string
		}
		if err := json.NewDecoder(bytes.NewReader([]byte(body))).Decode(&all); err != nil {
			t.Fatal(err)
		}
		for _, one := range all {
			if one.Status != "enabled" || len(one.Error) > 0 {
				t.Errorf("%s %s: %s %v", what, one.Name, one.Status, one.Error)
			}
		}
	}
	if strings.Contains(tr.Output(), "bad configuration") {
		t.Error("the plugin refused its configuration")
	}
}

// A key that does not exist, and a bad value, are named in Traefik's log.
func TestBadConfigurationIsNamed(t *testing.T) {
	for plugin, want := range map[string]string{"hodl: 3s": "unknown key hodl", "interval: often": "interval"} {
		tr := Start(t, Options{Dynamic: config{plugin: plugin, servers: []string{"127.0.0.1:1"}}.yaml()})
		await(t, 5*time.Second, "a line with "+want, func() bool {
			return strings.Contains(tr.Output(), "bad configuration") && strings.Contains(tr.Output(), want)
		})
	}
}
