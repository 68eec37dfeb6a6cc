package main

import (
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/internal/serve"
)

// file writes text to a file that a test may name in a configuration.
func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// A configuration that is wrong is refused with the line that is.
func TestBadServeConfig(t *testing.T) {
	const one = "targets:\n  - name: a\n    url: http://127.0.0.1:1/mcp\n"
	tests := []struct{ name, text, want string }{
		{"nothing", "", "FILE: want targets"},
		{"no targets", "listen: 127.0.0.1:0\n", "FILE: want targets"},
		{"unknown key", "listn: x\n" + one, "FILE:1: unknown key listn: want one of listen, cache, targets"},
		{"unknown key of a target", one + "    timout: 3s\n", "FILE:4: unknown key timout: want one of name, timeout, era,"},
		{"unknown key of a call", one + "    call: {tol: x}\n", "FILE:4: unknown key tol: want one of tool, args"},
		{"two faults", "listn: x\n" + one + "    timout: 3s\n", "FILE:5: unknown key timout"},
		{"a key twice", one + "    url: http://127.0.0.1:2/mcp\n", `FILE:4: mapping key "url" already defined at line 3`},
		{"a name twice", one + "  - name: a\n    url: http://127.0.0.1:2/mcp\n", "FILE:4: name: there is a target a already, in line 2"},
		{"an odd name", "targets:\n  - url: http://127.0.0.1:1/\n    name: a/b\n", `FILE:3: name "a/b": want letters, digits`},
		{"no name", "targets:\n  - url: http://127.0.0.1:1/\n", `FILE:2: name "": want letters, digits`},
		{"a bare number", one + "    timeout: 5\n", `FILE:4: "5": want a duration above 0, such as 5s`},
		{"a negative duration", "cache: -5s\n" + one, `FILE:1: "-5s": want a duration above 0`},
		{"no duration", one + "    slow_after: [1s]\n", `FILE:4: "": want a duration above 0`},
		{"a word for a list", one + "    expect_tools: search\n", "FILE:4: cannot unmarshal !!str into a list of words"},
		{"neither url nor stdio", "targets:\n  - name: a\n", "FILE:2: want url, or stdio with a command, and not both"},
		{"both", one + "    stdio: [true]\n", "FILE:2: want url, or stdio with a command, and not both"},
		{"HTTP over stdio", "targets:\n  - name: a\n    stdio: [server]\n    deep: off\n", "FILE:4: deep: it belongs to HTTP and says nothing to stdio"},
		{"credentials over stdio", "targets:\n  - name: a\n    stdio: [server]\n    header_env: {A: B}\n", "FILE:4: header_env: it belongs to HTTP"},
		{"SSE over stdio", "targets:\n  - name: a\n    stdio: [server]\n    era: sse\n", "FILE:4: era sse, require_auth"},
		{"heartbeat over HTTP", one + "    heartbeat: 1s\n", "FILE:4: heartbeat 1s: want at least 10ms, and a command over stdio"},
		{"no program", "targets:\n  - name: a\n    stdio: [\"\"]\n", "FILE:3: stdio: want a program"},
		{"no port", "listen: 127.0.0.1\n" + one, `FILE:1: listen "127.0.0.1": want host:port`},
		{"no such port", one + "listen: :99999\n", `FILE:4: listen ":99999": want host:port`},
		{"an empty listen", "listen: \"\"\n" + one, `FILE:1: listen "": want host:port`},
		{"a value that is not there", one + "    bearer_file:\n", "FILE:4: want a value, or nothing at all, not null"},
		{"a target that is not there", one + "  -\n", "FILE:4: want a value"},
		{"a word that is not there", one + "    expect_tools: [a, ~]\n", "FILE:4: want a value"},
		{"only a remark", "# nothing\n", "FILE: want targets"},
		{"only null", "~\n", "FILE: want targets"},
		{"a merged listen", "<<: {listen: x}\n" + one, `FILE:1: listen "x": want host:port`},
		{"too many", "targets:\n" + strings.Repeat("  - {name: a, url: http://x/}\n", 1001), "FILE:2: 1001 targets: want 1000 at most"},
		{"bad url", "targets:\n  - name: a\n    url: ftp://x/\n", `FILE:3: url "ftp://x/": want http://`},
		{"bad port", "targets:\n  - name: a\n    url: http://x:99999/\n", "FILE:3: url: port 99999: want 1 to 65535"},
		{"a password in the url", "targets:\n  - name: a\n    url: http://u:hunter2@x/\n", "FILE:3: url: credentials belong into a header"},
		{"bad era", one + "    era: ancient\n", `FILE:4: era "ancient": want auto, modern, legacy or sse`},
		{"unknown era", one + "    era: unknown\n", `FILE:4: era "unknown": want auto`},
		{"slow only when dead", one + "    slow_after: 9s\n", "FILE:4: slow_after 9s can never be: want less than the timeout, after which a server counts as dead, 5s"},
		{"a header of the probe's own", one + "    header: {Accept: hunter2}\n", "FILE:4: header: header Accept contradicts what a probe sets there itself"},
		{"bad alive_if", one + "    alive_if: perhaps\n", `FILE:4: alive_if "perhaps": want mcp or any_response`},
		{"bad health_path", one + "    health_path: health\n", `FILE:4: health_path "health": want a path`},
		{"no tool", one + "    call: {args: {}}\n", "FILE:4: call: want tool"},
		{"deep off, tools wanted", one + "    deep: off\n    expect_tools: [x]\n", "expect_tool and call need a session on stateful servers: they contradict deep off"},
		{"no such file", one + "    header_file: {Authorization: /no/such/file}\n", "FILE:4: header_file: no such file or directory"},
		{"no such variable", one + "    header_env: {Authorization: NO_SUCH_VARIABLE}\n", "FILE:4: header_env: the environment variable is not set, or empty"},
		{"no such token", one + "    bearer_file: /no/such/file\n", "FILE:4: bearer_file: no such file or directory"},
		{"no header name", one + "    header: {\"a b\": x}\n", "FILE:4: header: want a header name before the value"},
		{"Host as a header", one + "    header: {Host: x}\n", "FILE:4: header: the Host is set by --host"},
		{"a secret for names", one + "    header: hunter2\n", "FILE:4: cannot unmarshal !!str into names with values"},
		{"no authority", one + "    cacert: /no/such/file\n", "FILE:4: cacert: open /no/such/file"},
		{"a key alone", one + "    key: /no/such/file\n", "FILE:4: key: want cert with the certificate"},
		{"no certificate", one + "    key: /no\n    cert: /no/such/file\n", "FILE:5: cert, key: open /no/such/file"},
		{"two documents", one + "---\n" + one, "FILE: a second document: want one"},
		{"no YAML", "targets: [", "FILE:1: did not find expected node content"},
		{"a list", "- a\n", "FILE:1: cannot unmarshal !!seq into a configuration"},
		{"a bomb", "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a]\n", "FILE:1: unknown key a"},
		{"too long", "#" + strings.Repeat("x", maxConfig), "FILE: more than 1048576 bytes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := file(t, "config.yml", tt.text)
			exit, out, errs := mcp("serve", "--check", "--config", path)
			if exit != exitUsage || out != "" || !strings.Contains(errs, strings.Replace(tt.want, "FILE", path, 1)) {
				t.Errorf("exit %d, %q, %q; want %s", exit, out, errs, tt.want)
			}
			if strings.Contains(errs, "hunter2") {
				t.Errorf("the secret shows: %s", errs)
			}
		})
	}
	if exit, _, errs := mcp("serve", "--config", "/no/such/file"); exit != exitUsage || !strings.Contains(errs, "--config: open /no/such/file") {
		t.Errorf("exit %d, %q", exit, errs)
	}
}

// All keys at once arrive where they belong; and the same as JSON, with tabs.
func TestServeConfig(t *testing.T) {
	t.Setenv("PROBE_X", "from-env")
	token := file(t, "token", "from-file\n")
	pair := newPair(t, t.TempDir(), "client")
	yaml := `
listen: 127.0.0.1:1234
cache: 1m
targets:
  - {name: a, url: "http://x:1/mcp", host: h, timeout: 3s, era: legacy, alive_if: any_response, deep: on, fresh: true,
     require_auth: true, health_path: /health, expect_tools: [t], call: {tool: t, args: {q: [1, x, null]}}, slow_after: 1s,
     header: {X-Plain: v}, header_env: {X-Env: PROBE_X}, header_file: {X-File: TOKEN}, bearer_file: TOKEN, cacert: CERT, cert: CERT, key: KEY}
  - {name: b, url: "https://x/mcp", deep: off, era: auto}
  - {name: c, stdio: [server, --flag], heartbeat: 30s, timeout: 9s}
`
	files := strings.NewReplacer("TOKEN", token, "CERT", pair.cert, "KEY", pair.key)
	var s serving
	if err := s.read(file(t, "config.yml", files.Replace(yaml))); err != nil {
		t.Fatal(err)
	}
	a, b, c := s.targets[0], s.targets[1], s.targets[2]
	h, err := a.Header()
	if err != nil || h.Get("X-Plain") != "v" || h.Get("X-Env") != "from-env" || h.Get("X-File") != "from-file" || h.Get("Authorization") != "Bearer from-file" {
		t.Errorf("header %v, %v", h, err)
	}
	way, err := a.Transport()
	if err != nil || len(way.TLSClientConfig.Certificates) != 1 || way.TLSClientConfig.RootCAs == nil {
		t.Errorf("transport %v, %v", way, err)
	}
	if again, _ := a.Transport(); again != way {
		t.Error("another way, though no file has changed")
	}
	other := newPair(t, t.TempDir(), "other")
	for from, to := range map[string]string{other.cert: pair.cert, other.key: pair.key} {
		text, _ := os.ReadFile(from)
		_ = os.WriteFile(to, append(text, '\n'), 0o600)
	}
	if again, err := a.Transport(); again == way || err != nil {
		t.Errorf("the same way after the files have changed, %v", err)
	}
	if s.listen != "127.0.0.1:1234" || s.cache.String() != "1m0s" || a.Timeout.String() != "3s" || a.Host != "h" || a.Era != "legacy" || a.AliveIf != "any_response" ||
		a.Shallow || !a.Fresh || !a.RequireAuth || a.HealthPath != "/health" || a.ExpectTools[0] != "t" || a.CallTool != "t" || a.CallArgs != `{"q":[1,"x",null]}` || a.SlowAfter.String() != "1s" {
		t.Errorf("%+v", a)
	}
	if !b.Shallow || b.Era != "" || c.Command[1] != "--flag" || c.Heartbeat.String() != "30s" || c.Timeout.String() != "9s" {
		t.Errorf("%+v %+v", b, c)
	}
	json := file(t, "config.json", "{\n\t\"targets\":\t[\n\t\t{\"name\": \"a\", \"url\": \"http://x/\", \"deep\": false, \"call\": {\"tool\": \"t\"}}\n\t]\n}\n")
	if exit, _, errs := mcp("serve", "--check", "--config", json); exit != exitUsage || !strings.Contains(errs, "json:3: expect_tool and call need") {
		t.Errorf("JSON: exit %d, %q", exit, errs)
	}
	good := file(t, "config.json", `{"listen": "127.0.0.1:0", "targets": [{"name": "a", "url": "http://x/"}]}`)
	if exit, out, errs := mcp("serve", "--check", "--config", good); exit != exitUp || out != "right, with 1 targets\n" || errs != "" {
		t.Errorf("JSON: exit %d, %q, %q", exit, out, errs)
	}
}

// The flags, and what is wrong with them.
func TestServeFlags(t *testing.T) {
	const url = "http://127.0.0.1:1/mcp"
	tests := []struct {
		args string
		want string // "" = right
	}{
		{"--target a=" + url, ""},
		{"--target a=" + url + "?x=y --target b=" + url + " --header A:b --cache 1s", ""},
		{"", "want --target NAME=URL, or --config FILE"},
		{"--target " + url, "--target, number 1: want NAME=URL"},
		{"--target " + url + "?token=hunter2", `--target, number 1: name "http://127.0.0.1:1/mcp?token": want letters`},
		{"--target =" + url, `--target, number 1: name ""`},
		{"--target a=" + url + " --target a=" + url, "--target, number 2: there is a target a already"},
		{"--target a=http://u:hunter2@x/", "credentials belong into a header"},
		{"--target a=" + url + " --timeout 0s", "--timeout 0s: want a positive duration"},
		{"--target a=" + url + " --cache -1s", "--cache -1s: want a positive duration"},
		{"--target a=" + url + " --era ancient", `--era "ancient"`},
		{"--target a=" + url + " --header-env A=NO_SUCH_VARIABLE", "--header-env, number 1"},
		{"--target a=" + url + " --cacert /no/such/file", "--cacert: open /no/such/file"},
		{"--target a=" + url + " word", `want flags only, got the word "word"`},
		{"--config x --target a=" + url, "--config: it has --target too"},
		{"--config x --listen :1", "--config: it has --listen too"},
		{"--target a=" + url + " --listen 127.0.0.1", `--listen "127.0.0.1": want host:port`},
		{"--target a=" + url + " --listen=", `--listen "": want a value`},
		{strings.Repeat("--target a="+url+" ", 1001), "--target: 1001 of them: want 1000 at most"},
		{"--nonsense", "flag provided but not defined"},
	}
	for _, tt := range tests {
		exit, out, errs := mcp(append([]string{"serve", "--check"}, strings.Fields(tt.args)...)...)
		if tt.want == "" && (exit != exitUp || errs != "") || tt.want != "" && (exit != exitUsage || out != "" || !strings.Contains(errs, tt.want)) {
			t.Errorf("serve %s: exit %d, %q, %q; want %q", tt.args, exit, out, errs, tt.want)
		}
		if strings.Contains(errs, "hunter2") {
			t.Errorf("serve %s: the secret shows: %s", tt.args, errs)
		}
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if exit, _, errs := mcp("serve", "--target", "a="+url, "--listen", ln.Addr().String()); exit != exitFailed || !strings.Contains(errs, "listen: ") {
		t.Errorf("a port in use: exit %d, %q", exit, errs)
	}
}

// It ends well, too, when its terminal goes away.
func TestServeHangup(t *testing.T) {
	if signal.Ignored(syscall.SIGHUP) {
		t.Skip("under nohup it goes on")
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	_ = ln.Close()
	ended := make(chan string, 1)
	go func() {
		exit, _, errs := mcp("serve", "--target", "a=http://127.0.0.1:1/mcp", "--listen", addr)
		ended <- fmt.Sprint(exit, errs)
	}()
	for range 500 {
		if resp, err := http.Get("http://" + addr + "/livez"); err == nil {
			_ = resp.Body.Close()
			self, _ := os.FindProcess(os.Getpid())
			_ = self.Signal(syscall.SIGHUP)
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	select {
	case got := <-ended:
		if !strings.HasPrefix(got, "0") || !strings.Contains(got, "msg=stopping") {
			t.Errorf("%s", got)
		}
	case <-time.After(30 * time.Second):
		t.Error("it does not end")
	}
}

// docs/command.md has a row for each key of the file, and the file that it shows is
// right.
func TestServeConfigIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/command.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n### The file\n")
	section, _, _ = strings.Cut(section, "\n### ")
	for _, typ := range []reflect.Type{reflect.TypeFor[serveConfig](), reflect.TypeFor[targetConfig]()} {
		for _, key := range keysOf(typ.Name()) {
			if !regexp.MustCompile("(?m)^\\|[^|]*`" + key + "`").MatchString(section) {
				t.Errorf("docs/command.md has no row for %s", key)
			}
		}
	}
	_, block, _ := strings.Cut(section, "```yaml\n")
	block, _, _ = strings.Cut(block, "```")
	block = strings.Replace(block, "/run/secrets/probe-token", file(t, "token", "x"), 1)
	if exit, out, errs := mcp("serve", "--check", "--config", file(t, "config.yml", block)); exit != exitUp || out != "right, with 2 targets\n" {
		t.Errorf("exit %d, %q, %q", exit, out, errs)
	}
	if !strings.Contains(string(page), "up to 1,000 times") || serve.MaxTargets != 1000 {
		t.Error("docs/command.md names another number of targets")
	}
}
