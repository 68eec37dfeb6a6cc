package traefik

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
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

// compose runs docker-compose (Debian package docker-compose) on the engine.
func (d *Docker) compose(t testing.TB, file string, args ...string) {
	t.Helper()
	cmd := exec.Command("docker-compose", append([]string{"-p", "mcphealth", "-f", file}, args...)...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST=unix://"+d.socket)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
}

// The labels of docker-compose.yml alone keep calls through a recreation by compose
// itself. Images, commands and ports are the test's.
func TestComposeExample(t *testing.T) {
	if _, err := exec.LookPath("docker-compose"); err != nil && os.Getenv("CI") == "" {
		t.Skip("no docker-compose: test/traefik/install installs it")
	}
	type service struct {
		Image   string   `yaml:"image"`
		Command []string `yaml:"command"`
		Network string   `yaml:"network_mode"`
		Labels  []string `yaml:"labels"`
	}
	var example struct {
		Services map[string]service `yaml:"services"`
	}
	if err := yaml.Unmarshal([]byte(read(t, "examples/traefik/docker-compose.yml")), &example); err != nil {
		t.Fatal(err)
	}
	d := StartDocker(t)
	ports := map[string]int{"traefik": e2e.FreePort(t), "app": e2e.FreePort(t)}
	tr := Start(t, Options{Throttled: true, Flags: []string{"--providers.docker.endpoint=unix://" + d.socket, "--providers.docker.exposedbydefault=false"}})
	for name, s := range example.Services {
		s.Image, s.Network = image, "host"
		s.Command = []string{"/slowstart", startDelay, "/mcp-server", "--era", "modern", "--json", "--listen", fmt.Sprintf("127.0.0.1:%d", ports[name])}
		for i := range s.Labels {
			s.Labels[i] = strings.Replace(s.Labels[i], "port=8000", fmt.Sprintf("port=%d", ports[name]), 1)
		}
		if name == "traefik" { // the image of Traefik exposes a port, which its provider asks for
			s.Labels = append(s.Labels, fmt.Sprintf("traefik.http.services.edge.loadbalancer.server.port=%d", ports[name]))
		}
		example.Services[name] = s
	}
	text, err := yaml.Marshal(map[string]any{"version": "3", "services": example.Services})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "docker-compose.yml")
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
	d.compose(t, file, "up", "-d")
	defer d.compose(t, file, "down", "-t", "1")
	await(t, 20*time.Second, "served", func() bool { status, _ := post(t, tr.URL+"/mcp"); return status == 200 })
	loads := outOfStep(t, tr, 10)
	time.Sleep(time.Second)
	d.compose(t, file, "up", "-d", "--force-recreate", "--no-deps", "app")
	time.Sleep(4 * time.Second)
	rep := stopAll(loads)
	t.Log(classify(rep, tr.Output(), nil))
	for _, f := range rep.Failures {
		if f.Status != 502 {
			t.Errorf("%v", f)
		}
	}
	if rep.Slowest < 200*time.Millisecond || len(rep.Failures) > 5 {
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
