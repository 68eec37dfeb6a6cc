package operations

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
	"github.com/mcphealth/mcphealth/test/traefik"
)

// container is what docker inspect says of one.
type container struct {
	State struct {
		Pid    int
		Health struct {
			Status string
			Log    []struct{ Output string }
		}
	}
}

func inspect(t *testing.T, d *traefik.Docker, name string) (c container) {
	t.Helper()
	var all []container
	if err := json.Unmarshal([]byte(d.Run(t, "inspect", name)), &all); err != nil || len(all) != 1 {
		t.Fatalf("inspect %s: %v", name, err)
	}
	return all[0]
}

// awaitHealth waits until Docker calls the container that.
func awaitHealth(t *testing.T, d *traefik.Docker, name, want string) {
	t.Helper()
	var c container
	for begun := time.Now(); time.Since(begun) < 60*time.Second; time.Sleep(200 * time.Millisecond) {
		if c = inspect(t, d, name); c.State.Health.Status == want {
			return
		}
	}
	t.Fatalf("%s is %s, want %s: %+v", name, c.State.Health.Status, want, c.State.Health.Log)
}

// The images of examples/docker, in a real engine: built from scratch, asked by
// HEALTHCHECK, and heeded by Traefik.
func TestDocker(t *testing.T) {
	d := traefik.StartDocker(t)
	e2e.GoBuild(t, "mcphealth", "cmd/mcphealth") // says why, if it cannot be built
	build := exec.Command(filepath.Join(e2e.Root(), "examples/docker/build"))
	build.Env = append(os.Environ(), "DOCKER_HOST="+d.Host(), "DOCKER_BUILDKIT=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("examples/docker/build, after make build: %v\n%s", err, out)
	}
	server := example(t, "docker/server.Dockerfile", "FROM my-mcp-server", "FROM mcphealth-e2e", "--interval=10s", "--interval=1s", "--timeout=6s", "--timeout=3s")
	for name, port := range map[string]int{"app": e2e.FreePort(t), "other": e2e.FreePort(t)} {
		dir := t.TempDir()
		text := strings.Replace(server, "127.0.0.1:8000", fmt.Sprintf("127.0.0.1:%d", port), 1) + fmt.Sprintf("ENTRYPOINT [\"/mcp-server\", \"--json\", \"--name\", %q, \"--listen\", \"127.0.0.1:%d\"]\n", name, port)
		if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		buildIn(t, d, dir, name)
		d.Run(t, "run", "-d", "--name", name, "--network", "host", "--label", "traefik.enable=true",
			"--label", "traefik.http.routers.app.rule=PathPrefix(`/mcp`)", "--label", fmt.Sprintf("traefik.http.services.app.loadbalancer.server.port=%d", port), name)
	}
	tr := traefik.Start(t, traefik.Options{Flags: []string{"--providers.docker.endpoint=" + d.Host(), "--providers.docker.exposedbydefault=false"}})
	url := tr.URL + "/mcp"

	await(t, url, 60*time.Second, 20, "app", "other")
	awaitHealth(t, d, "app", "healthy") // though it answers 405 to GET
	pid := inspect(t, d, "other").State.Pid
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	awaitHealth(t, d, "other", "unhealthy")
	await(t, url, 60*time.Second, 20, "app")
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	awaitHealth(t, d, "other", "healthy")
	await(t, url, 60*time.Second, 20, "app", "other")
	d.Run(t, "rm", "-f", "other")

	t.Run("command", func(t *testing.T) { commandImage(t, d, url) })
	t.Run("caddy", func(t *testing.T) { caddyImage(t, d, url) })
}

func buildIn(t *testing.T, d *traefik.Docker, dir, tag string) {
	t.Helper()
	cmd := exec.Command("docker", "build", "--tag", tag, dir)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+d.Host(), "DOCKER_BUILDKIT=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
}

// locked is how a cautious operator runs what needs no rights.
var locked = []string{"run", "-d", "--name", "other", "--network", "host", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"}

// commandImage runs mcphealth serve in its image: it answers, is nobody (whoever that
// is), writes nothing, and is called healthy.
func commandImage(t *testing.T, d *traefik.Docker, url string) {
	port := e2e.FreePort(t)
	config := write(t, "mcphealth.yml", fmt.Sprintf("listen: 127.0.0.1:%d\ntargets: [{name: app, url: %q}]\n", port, url))
	d.Run(t, append(slices.Clone(locked), "--user", "65534:65534", "-v", config+":/etc/mcphealth.yml:ro",
		"--health-cmd", fmt.Sprintf("/mcphealth probe --healthcheck --alive-if any_response --deep off http://127.0.0.1:%d/livez", port), "mcphealth")...)
	defer d.Run(t, "rm", "-f", "other")
	if out := d.Run(t, "inspect", "--format", "{{json .Config.Healthcheck.Test}} {{.Config.User}}", "mcphealth"); !strings.Contains(out, `"http://127.0.0.1:9105/livez"`) || !strings.Contains(out, "65532:65532") {
		t.Errorf("the image's health check and user: %s", out)
	}
	await200(t, fmt.Sprintf("http://127.0.0.1:%d/health/app", port))
	// Docker runs --health-cmd by a shell, which the image has not: as the image's own
	// does, without one. The image has the public authorities.
	for want, exit := range map[int]int{port: 0, e2e.FreePort(t): 1} {
		cmd := exec.Command("docker", "-H", d.Host(), "exec", "other", "/mcphealth", "probe", "--healthcheck", "--alive-if", "any_response", "--deep", "off",
			"--cacert", "/etc/ssl/certs/ca-certificates.crt", fmt.Sprintf("http://127.0.0.1:%d/livez", want))
		out, _ := cmd.CombinedOutput()
		if cmd.ProcessState.ExitCode() != exit {
			t.Errorf("port %d: exit %d, want %d: %s", want, cmd.ProcessState.ExitCode(), exit, out)
		}
	}
	stopped := time.Now()
	d.Run(t, "stop", "-t", "10", "other")
	if took := time.Since(stopped); took > 8*time.Second {
		t.Errorf("docker stop took %v", took)
	}
	if code := strings.TrimSpace(d.Run(t, "inspect", "--format", "{{.State.ExitCode}}", "other")); code != "0" {
		t.Errorf("exit %s after SIGTERM", code)
	}
}

// caddyImage runs the Caddyfile of compose/caddy.yml in the image of Caddy.
func caddyImage(t *testing.T, d *traefik.Docker, url string) {
	port := e2e.FreePort(t)
	addr := strings.TrimSuffix(strings.TrimPrefix(url, "http://"), "/mcp")
	config := write(t, "Caddyfile", strings.NewReplacer("http:// {", fmt.Sprintf("{\n\tadmin off\n}\nhttp://127.0.0.1:%d {", port), "app1:8000 app2:8000", addr).Replace(composeConfig(t)))
	d.Run(t, append(slices.Clone(locked), "-v", config+":/etc/caddy/Caddyfile:ro", "caddy-mcphealth")...)
	defer d.Run(t, "rm", "-f", "other")
	await(t, "http://127.0.0.1:"+strconv.Itoa(port)+"/mcp", 30*time.Second, 5, "app")
}

func await200(t *testing.T, url string) {
	t.Helper()
	var last any
	for range 200 {
		resp, err := http.Get(url)
		if last = err; err == nil {
			resp.Body.Close()
			if last = resp.Status; resp.StatusCode == 200 {
				return
			}
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("%s: %v", url, last)
}
