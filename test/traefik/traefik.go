// Package traefik runs the plugin in a real Traefik, before real MCP servers.
package traefik

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

const module = "github.com/mcphealth/mcphealth"

var building sync.Mutex

// Binary builds Traefik once per machine and returns its path: about 800 seconds
// of CPU and 3 GB of memory from a cold Go cache.
func Binary(t testing.TB) string {
	t.Helper()
	if bin := os.Getenv("TRAEFIK"); bin != "" {
		return bin
	}
	building.Lock()
	defer building.Unlock()
	src := filepath.Join(e2e.Root(), "test/traefik/binary")
	bin := filepath.Join(e2e.Cache(), "bin", "traefik")
	if err := os.MkdirAll(filepath.Dir(bin), 0o755); err != nil {
		t.Fatal(err)
	}
	lock, err := os.Create(filepath.Join(e2e.Cache(), "traefik.lock"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	if newer(bin, filepath.Join(src, "go.mod"), filepath.Join(src, "go.sum")) {
		return bin
	}
	cmd := exec.Command("go", "build", "-o", bin, "github.com/traefik/traefik/v3/cmd/traefik")
	cmd.Dir = src
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	return bin
}

func newer(file string, than ...string) bool {
	f, err := os.Stat(file)
	if err != nil {
		return false
	}
	for _, name := range than {
		if s, err := os.Stat(name); err != nil || s.ModTime().After(f.ModTime()) {
			return false
		}
	}
	return true
}

// Traefik is one that runs, with the plugin mcphealth installed.
type Traefik struct {
	*e2e.Process
	URL string // of its entry point
	API string

	dir    string
	secure string // the URL of its TLS entry point, if it has one
}

// Options are what differs between two Traefiks.
type Options struct {
	Dynamic string   // the file provider's configuration; "" = none
	Flags   []string // more static configuration
	Patch   func(t testing.TB, root string)
	// NoPlugin leaves the plugin out.
	NoPlugin bool
	// Throttled keeps Traefik's pause of 2 s between two configurations.
	Throttled bool
}

// Start runs Traefik and waits until the plugin is loaded and the configuration
// is applied.
func Start(t testing.TB, o Options) *Traefik {
	t.Helper()
	dir, web, api := t.TempDir(), e2e.FreePort(t), e2e.FreePort(t)
	tr := &Traefik{URL: fmt.Sprintf("http://127.0.0.1:%d", web), API: fmt.Sprintf("http://127.0.0.1:%d", api), dir: dir}
	flags := []string{
		fmt.Sprintf("--entrypoints.web.address=127.0.0.1:%d", web),
		fmt.Sprintf("--entrypoints.traefik.address=127.0.0.1:%d", api),
		"--api.insecure=true", "--api.debug=true", "--log.level=DEBUG",
		"--global.checknewversion=false", "--global.sendanonymoususage=false",
	}
	if !o.NoPlugin {
		tr.install(t, o.Patch)
		flags = append(flags, "--experimental.localplugins.mcphealth.modulename="+module, "--experimental.abortonpluginfailure=true")
	}
	if !o.Throttled {
		flags = append(flags, "--providers.providersthrottleduration=50ms")
	}
	if o.Dynamic != "" {
		tr.write(t, o.Dynamic)
		flags = append(flags, "--providers.file.filename="+tr.file())
	}
	tr.run(t, web, append(flags, o.Flags...))
	if o.Dynamic != "" {
		tr.awaitRouters(t)
	}
	return tr
}

// awaitRouters waits for the first configuration of the file provider.
func (tr *Traefik) awaitRouters(t testing.TB) {
	t.Helper()
	addr := strings.TrimPrefix(tr.API, "http://")
	await(t, 20*time.Second, "the API listens", func() bool {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	await(t, 10*time.Second, "routers known", func() bool { return strings.Contains(tr.config(t), "@file") })
}

// Command is Traefik with the plugin, this configuration of the file provider and one
// entry point at web, for who starts it in a place of its own.
func Command(t testing.TB, web, dynamic string) *exec.Cmd {
	t.Helper()
	tr := &Traefik{dir: t.TempDir()}
	tr.install(t, nil)
	tr.write(t, dynamic)
	cmd := exec.Command(Binary(t), "--entrypoints.web.address="+web, "--providers.file.filename="+tr.file(),
		"--global.checknewversion=false", "--global.sendanonymoususage=false",
		"--experimental.localplugins.mcphealth.modulename="+module, "--experimental.abortonpluginfailure=true")
	cmd.Dir = tr.dir
	return cmd
}

// startWith runs Traefik with nothing but these flags, and the plugin.
func startWith(t testing.TB, web, api int, flags []string) *Traefik {
	t.Helper()
	tr := &Traefik{URL: fmt.Sprintf("http://127.0.0.1:%d", web), API: fmt.Sprintf("http://127.0.0.1:%d", api), dir: t.TempDir()}
	tr.install(t, nil)
	tr.run(t, web, flags)
	return tr
}

func (tr *Traefik) run(t testing.TB, web int, flags []string) {
	t.Helper()
	bin := Binary(t)
	tr.Process = e2e.StartProcess(t, fmt.Sprintf("127.0.0.1:%d", web), func() *exec.Cmd {
		cmd := exec.Command(bin, flags...)
		cmd.Dir = tr.dir
		return cmd
	})
}

// install puts the plugin where Traefik looks for local ones.
func (tr *Traefik) install(t testing.TB, patch func(testing.TB, string)) {
	t.Helper()
	root := filepath.Join(tr.dir, "plugins-local/src", module)
	if err := os.MkdirAll(root, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{".traefik.yml", "mcphealth", "traefikplugin"} {
		out, err := exec.Command("cp", "-r", filepath.Join(e2e.Root(), p), root).CombinedOutput()
		if err != nil {
			t.Fatalf("%v %s", err, out)
		}
	}
	if patch != nil {
		patch(t, root)
	}
}

func (tr *Traefik) file() string { return filepath.Join(tr.dir, "dynamic.yml") }

// write replaces the dynamic configuration in one step.
func (tr *Traefik) write(t testing.TB, dynamic string) {
	t.Helper()
	tmp := tr.file() + ".tmp"
	if err := os.WriteFile(tmp, []byte(dynamic), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, tr.file()); err != nil {
		t.Fatal(err)
	}
}

// applied is how often a configuration was applied so far.
func (tr *Traefik) applied() int {
	return strings.Count(tr.Output(), "Configuration received")
}

var statuses = regexp.MustCompile(`"serverStatus":\{[^}]*\}`)

// config is what Traefik serves now, as its API says: that is a router of the same
// configuration.
func (tr *Traefik) config(t testing.TB) string {
	t.Helper()
	all := ""
	for _, what := range []string{"routers", "middlewares", "services"} {
		_, body := get(t, tr.API+"/api/http/"+what)
		all += statuses.ReplaceAllString(body, "")
	}
	return all
}

// Reload replaces the configuration by another one and waits until it is applied.
func (tr *Traefik) Reload(t testing.TB, dynamic string) {
	t.Helper()
	before := tr.config(t)
	tr.write(t, dynamic)
	await(t, 10*time.Second, "configuration applied", func() bool { return tr.config(t) != before })
}

// Goroutines is how many run in Traefik, those of open connections and of its own
// caches aside, which end when the collector finds them.
func (tr *Traefik) Goroutines(t testing.TB) int {
	t.Helper()
	_, body := get(t, tr.API+"/debug/pprof/goroutine?debug=1")
	return e2e.CountGoroutines(t, body, "go-cache.(*janitor)")
}

func get(t testing.TB, url string) (int, string) {
	t.Helper()
	c := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func await(t testing.TB, within time.Duration, what string, ok func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > within {
			t.Fatalf("%s: not within %s", what, within)
		}
		time.Sleep(20 * time.Millisecond)
	}
	return time.Since(start)
}
