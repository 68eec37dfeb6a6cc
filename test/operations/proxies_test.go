package operations

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// two are two servers, mcphealth serve for them, and the address of a proxy.
func two(t *testing.T) (app1, app2 *server, serve, edge string) {
	t.Helper()
	app1, app2 = startServer(t, "app1", serving), startServer(t, "app2", serving)
	return app1, app2, startServe(t, app1, app2), fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t))
}

// installed finds a program from Debian, which test/operations/install installs.
func installed(t *testing.T, name string) string {
	t.Helper()
	bin, err := exec.LookPath(name)
	if err != nil {
		bin = filepath.Join("/usr/sbin", name)
		_, err = os.Stat(bin)
	}
	if err != nil && os.Getenv("CI") == "" {
		t.Skipf("no %s: test/operations/install installs it", name)
	}
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

func TestHAProxy(t *testing.T) {
	t.Parallel()
	bin := installed(t, "haproxy")
	app1, app2, serve, edge := two(t)
	_, port, _ := strings.Cut(serve, ":")
	config := write(t, "haproxy.cfg", example(t, "haproxy/haproxy.cfg", "bind :80", "bind "+edge, "port 9105", "port "+port, "10.0.0.1:8000", app1.addr, "10.0.0.2:8000", app2.addr))
	e2e.StartProcess(t, edge, func() *exec.Cmd { return exec.Command(bin, "-db", "-f", config) })
	routesAround(t, "http://"+edge+"/mcp", app1, app2, true)
}

// Sessions stay with the server that opened them, through the same file.
func TestHAProxySessions(t *testing.T) {
	t.Parallel()
	bin := installed(t, "haproxy")
	stateful := e2e.Get(t, "go-sdk-v1.8.0-stateful")
	one, two := stateful.Start(t, e2e.FreePort(t)), stateful.Start(t, e2e.FreePort(t))
	serve, edge := startServe(t, &server{name: "app1", addr: one.Addr}, &server{name: "app2", addr: two.Addr}), fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t))
	_, port, _ := strings.Cut(serve, ":")
	config := write(t, "haproxy.cfg", example(t, "haproxy/haproxy.cfg", "bind :80", "bind "+edge, "port 9105", "port "+port, "10.0.0.1:8000", one.Addr, "10.0.0.2:8000", two.Addr))
	e2e.StartProcess(t, edge, func() *exec.Cmd { return exec.Command(bin, "-db", "-f", config) })
	post := func(session, body string) *http.Response {
		t.Helper()
		req, _ := http.NewRequest(http.MethodPost, "http://"+edge+"/mcp", strings.NewReader(body))
		req.Header = http.Header{"Content-Type": {"application/json"}, "Accept": {"application/json, text/event-stream"}}
		if session != "" {
			req.Header.Set("Mcp-Session-Id", session)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		return resp
	}
	for range 10 {
		resp := post("", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"test","version":"1"}}}`)
		id := resp.Header.Get("Mcp-Session-Id")
		for range 5 {
			if resp := post(id, `{"jsonrpc":"2.0","id":2,"method":"ping"}`); resp.StatusCode != 200 || id == "" {
				t.Errorf("in session %q: %s", id, resp.Status)
			}
		}
	}
	if one.Sessions(t) < 2 || two.Sessions(t) < 2 {
		t.Errorf("%d and %d sessions, want that both are used", one.Sessions(t), two.Sessions(t))
	}
}

func TestNginx(t *testing.T) {
	t.Parallel()
	bin := installed(t, "nginx")
	app1, app2, serve, edge := two(t)
	dir := t.TempDir()
	user := ""
	if os.Geteuid() == 0 {
		user = "user root;\n" // else its workers are www-data, to whom the test's folders are closed
	}
	config := write(t, "nginx.conf", user+fmt.Sprintf("daemon off;\npid %[1]s/pid;\nerror_log stderr;\nevents {}\nhttp {\n\taccess_log off;\n\tclient_body_temp_path %[1]s/body;\n\tproxy_temp_path %[1]s/proxy;\n\tfastcgi_temp_path %[1]s/f;\n\tuwsgi_temp_path %[1]s/u;\n\tscgi_temp_path %[1]s/s;\n", dir)+
		example(t, "nginx/mcp.conf", "listen 80", "listen "+edge, "127.0.0.1:9105", serve, "10.0.0.1:8000", app1.addr, "10.0.0.2:8000", app2.addr, "/var/cache/", dir+"/")+"}\n")
	nginx := e2e.StartProcess(t, edge, func() *exec.Cmd { return exec.Command(bin, "-e", "stderr", "-c", config) })
	t.Cleanup(func() { nginx.Terminate(t) }) // it ends its workers, too
	url := "http://" + edge + "/mcp"
	routesAround(t, url, app1, app2, false)

	// None is left: a 503 that an MCP client survives.
	app1.mode.Store(page)
	app2.mode.Store(page)
	why := ""
	for range 200 {
		if _, why = call(url); strings.HasPrefix(why, `503 {"jsonrpc":"2.0","id":null,"error":`) {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if !strings.HasPrefix(why, "503 {") {
		t.Errorf("with no server left: %s", why)
	}
	resp, err := http.Get("http://" + edge + "/mcphealth/app1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, _ := io.ReadAll(resp.Body); len(body) > 0 {
		t.Errorf("from outside /mcphealth/app1 is %s", body)
	}
}

// stockCaddy is Caddy as its authors release it, built as xcaddy builds ours, so that
// most of it comes from Go's cache.
func stockCaddy(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(e2e.Cache(), "bin", "caddy-stock")
	if err := os.MkdirAll(filepath.Dir(bin), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags", "-w -s", "-tags", "nobadger,nomysql,nopgx", "-o", bin, "github.com/caddyserver/caddy/v2/cmd/caddy")
	cmd.Dir = e2e.Root()
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", cmd.Args, err, out)
	}
	return bin
}

func TestStockCaddy(t *testing.T) {
	t.Parallel()
	bin := stockCaddy(t)
	app1, app2, serve, edge := two(t)
	dir := t.TempDir()
	config := write(t, "Caddyfile", "{\n\tadmin off\n\tauto_https off\n}\n"+
		example(t, "stock-caddy/Caddyfile", "mcp.example.com {", "http://"+edge+" {", "127.0.0.1:9105", serve, "10.0.0.1:8000", app1.addr, "10.0.0.2:8000", app2.addr))
	e2e.StartProcess(t, edge, func() *exec.Cmd {
		cmd := exec.Command(bin, "run", "--config", config, "--adapter", "caddyfile")
		cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+dir)
		return cmd
	})
	routesAround(t, "http://"+edge+"/mcp", app1, app2, true)
}
