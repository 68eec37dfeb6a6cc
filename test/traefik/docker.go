package traefik

import (
	"archive/tar"
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

const (
	image = "mcphealth-e2e"
	// startDelay is how long a new container takes until it listens.
	startDelay = "500ms"
)

// Docker is an engine of the test's own: no bridge, no iptables, containers on
// the host's network and servers on loopback.
type Docker struct {
	socket string
	log    string // executions of all containers
}

// StartDocker runs dockerd (Debian package docker.io) with an image of our server.
func StartDocker(t testing.TB) *Docker {
	t.Helper()
	bin, err := exec.LookPath("dockerd")
	if err != nil {
		if os.Getenv("CI") == "" {
			t.Skip("no dockerd: test/traefik/install installs it")
		}
		t.Fatal(err)
	}
	// A socket's path may have 108 bytes: not t.TempDir.
	dir, err := os.MkdirTemp("", "mcphealth-docker-")
	if err != nil {
		t.Fatal(err)
	}
	d := &Docker{socket: filepath.Join(dir, "docker.sock"), log: filepath.Join(t.TempDir(), "executions")}
	if err := os.WriteFile(d.log, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := exec.Command(bin, "--host", "unix://"+d.socket, "--data-root", dir+"/data", "--exec-root", dir+"/exec", "--pidfile", dir+"/pid",
		"--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false", "--storage-driver=vfs")
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} // no engine survives a test that is killed
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { cmd.Wait(); close(ended) }()
	t.Cleanup(func() {
		d.try("rm", "-f", "app", "app-new", "other")
		cmd.Process.Signal(os.Interrupt) // it ends its containerd too
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			cmd.Process.Kill()
		}
		syscall.Unmount(dir+"/exec/netns/default", syscall.MNT_DETACH) // dockerd leaves it
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("dockerd: %s", out.String())
		}
	})
	await(t, 30*time.Second, "dockerd ready", func() bool { return exec.Command("docker", "-H", "unix://"+d.socket, "version").Run() == nil })
	d.load(t)
	return d
}

// Host is the engine's DOCKER_HOST.
func (d *Docker) Host() string { return "unix://" + d.socket }

func (d *Docker) try(args ...string) (string, error) {
	out, err := exec.Command("docker", append([]string{"-H", "unix://" + d.socket}, args...)...).CombinedOutput()
	return string(out), err
}

// Run runs the docker command.
func (d *Docker) Run(t testing.TB, args ...string) string {
	t.Helper()
	out, err := d.try(args...)
	if err != nil {
		t.Fatalf("docker %v: %v\n%s", args, err, out)
	}
	return out
}

// load makes an image of two static programs, from scratch.
func (d *Docker) load(t testing.TB) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, dir := range map[string]string{"mcp-server": "examples/servers", "slowstart": "test/traefik/slowstart"} {
		bin := filepath.Join(e2e.Cache(), "bin", name+"-static")
		cmd := exec.Command("go", "build", "-o", bin, ".")
		cmd.Dir = filepath.Join(e2e.Root(), dir)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
		}
		content, err := os.ReadFile(bin)
		if err != nil {
			t.Fatal(err)
		}
		w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(content))})
		w.Write(content)
	}
	w.Close()
	cmd := exec.Command("docker", "-H", "unix://"+d.socket, "import", "-", image)
	cmd.Stdin = &b
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("docker import: %v\n%s", err, out)
	}
}

// args are the arguments of docker run or create for an MCP server on this port.
func (d *Docker) args(verb, name string, port int, labels ...string) []string {
	a := []string{verb, "--name", name, "--network", "host", "-v", filepath.Dir(d.log) + ":/log"}
	if verb == "run" {
		a = append(a, "-d")
	}
	for _, l := range labels {
		a = append(a, "--label", l)
	}
	return append(a, image, "/slowstart", startDelay, "/mcp-server", "--era", "modern", "--json",
		"--listen", fmt.Sprintf("127.0.0.1:%d", port), "--log", "/log/executions")
}

// labels route /mcp to the container through the middleware mcp@file.
func labels(port int, more ...string) []string {
	return append([]string{
		"traefik.enable=true",
		"traefik.http.routers.app.rule=PathPrefix(`/mcp`)",
		fmt.Sprintf("traefik.http.services.app.loadbalancer.server.port=%d", port),
	}, more...)
}

func listens(port int) bool {
	c, err := net.DialTimeout("tcp", fmt.Sprintf("127.0.0.1:%d", port), time.Second)
	if err != nil {
		return false
	}
	c.Close()
	return true
}

// executions counts what ran more than once.
func (d *Docker) duplicates(t testing.TB) []string {
	t.Helper()
	var all []string
	for message, n := range e2e.Executions(t, d.log) {
		if n > 1 && strings.HasPrefix(message, "load-") {
			all = append(all, message)
		}
	}
	return all
}
