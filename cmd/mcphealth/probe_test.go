package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"flag"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"sort"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// mcp is the command, called as from a shell.
func mcp(args ...string) (exit int, stdout, stderr string) {
	var out, errs bytes.Buffer
	exit = run(args, &out, &errs)
	return exit, out.String(), errs.String()
}

// server answers JSON-RPC by method, or a GET by path; $ID is the question's id. "*" is every other,
// and what is not there is 404.
func server(t *testing.T, says map[string]string) *httptest.Server {
	t.Helper()
	return serveFunc(t, func(w http.ResponseWriter, r *http.Request, method, id string) {
		body, ok := says[method]
		if r.Method == http.MethodGet {
			body, ok = says[r.URL.Path]
		}
		if !ok {
			body, ok = says["*"]
		}
		if !ok {
			w.WriteHeader(404)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, strings.ReplaceAll(body, "$ID", id))
	})
}

// A server may speak HTTP/2 alone.
func TestHTTP2(t *testing.T) {
	s := httptest.NewUnstartedServer(handler(func(w http.ResponseWriter, _ *http.Request, method, id string) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, strings.ReplaceAll(modern[method], "$ID", id))
	}))
	s.EnableHTTP2 = true
	s.StartTLS()
	defer s.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	writePEM(t, ca, "CERTIFICATE", s.Certificate().Raw)
	if exit, out, errs := mcp("probe", "--cacert", ca, s.URL); exit != exitUp || !strings.HasPrefix(out, "ready (ok)") {
		t.Errorf("exit %d, %q, %q; want ready", exit, out, errs)
	}
}

func serveFunc(t *testing.T, f func(w http.ResponseWriter, r *http.Request, method, id string)) *httptest.Server {
	t.Helper()
	s := httptest.NewUnstartedServer(handler(f))
	s.Start()
	t.Cleanup(s.Close)
	return s
}

func handler(f func(w http.ResponseWriter, r *http.Request, method, id string)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		method := ""
		if m := regexp.MustCompile(`"method":"([^"]*)"`).FindSubmatch(body); m != nil {
			method = string(m[1])
		}
		f(w, r, method, mcphealth.RequestID(body).JSON())
	})
}

const (
	discovered = `{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":["2026-07-28"],"capabilities":{},"serverInfo":{"name":"demo","version":"1"}}}`
	toolList   = `{"jsonrpc":"2.0","id":$ID,"result":{"tools":[{"name":"echo"}]}}`
	toolResult = `{"jsonrpc":"2.0","id":$ID,"result":{"content":[]}}`
	toolError  = `{"jsonrpc":"2.0","id":$ID,"result":{"isError":true,"content":[]}}`
	noSession  = `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32001,"message":"Session not found"}}`
	noMethod   = `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32601,"message":"Method not found"}}`
)

var modern = map[string]string{"server/discover": discovered, "tools/list": toolList, "tools/call": toolResult, "*": noMethod}

func TestExitStatus(t *testing.T) {
	with := func(method, body string) map[string]string {
		says := map[string]string{}
		for k, v := range modern {
			says[k] = v
		}
		says[method] = body
		return says
	}
	tests := []struct {
		name  string
		says  map[string]string // nil: nobody listens
		flags []string
		exit  int
		out   string // verdict and reason
	}{
		{"ready", modern, nil, 0, "ready (ok)"},
		{"alive", map[string]string{"*": noMethod}, nil, 0, "alive (method_not_found)"},
		{"degraded", modern, []string{"--expect-tool", "other"}, 0, "degraded (tools_missing)"},
		{"a tool that is there", modern, []string{"--expect-tool", "echo", "--call", "echo", "--args", `{"a":1}`, "--fresh"}, 0, "ready (ok)"},
		{"a tool that fails", with("tools/call", toolError), []string{"--call", "echo"}, 0, "degraded (tool_failing)"},
		{"slow", modern, []string{"--slow-after", "1ns"}, 0, "degraded (slow)"},
		{"a health document says no", with("/health", `{"status":"unhealthy"}`), []string{"--health-path", "/health"}, 1, "dead (health_down)"},
		{"asked no further", map[string]string{"initialize": discovered, "*": noSession}, []string{"--deep", "off"}, 0, "alive (session_required)"},
		{"another era", modern, []string{"--era", "legacy"}, 0, "alive (method_not_found)"},
		{"no stream", modern, []string{"--era", "sse"}, 1, "dead (not_mcp)"},
		{"open", modern, []string{"--require-auth"}, 0, "degraded (handshake_failed)"},
		{"dead", nil, nil, 1, "dead (refused)"},
		{"dead, in a container", nil, []string{"--healthcheck"}, 1, "dead (refused)"},
		{"unknown", map[string]string{}, nil, 3, "unknown (endpoint_not_found)"},
		{"unknown, in a container", map[string]string{}, []string{"--healthcheck"}, 0, "unknown (endpoint_not_found)"},
		{"any response", map[string]string{}, []string{"--alive-if", "any_response"}, 0, "alive (http_answer)"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			url := "http://127.0.0.1:1/mcp"
			if tt.says != nil {
				url = server(t, tt.says).URL + "/mcp"
			}
			exit, out, errs := mcp(append(append([]string{"probe"}, tt.flags...), url)...)
			if exit != tt.exit || !strings.HasPrefix(out, tt.out+": ") || errs != "" {
				t.Errorf("exit %d, %q, stderr %q; want %d, %q", exit, out, errs, tt.exit, tt.out)
			}
		})
	}
}

// Usage errors name the flag, say what is wanted, print nothing on stdout, and end
// with 64, before anything is asked.
func TestUsage(t *testing.T) {
	asked := 0
	s := serveFunc(t, func(http.ResponseWriter, *http.Request, string, string) { asked++ })
	dir := t.TempDir()
	empty, noPEM := filepath.Join(dir, "empty"), filepath.Join(dir, "text")
	for file, text := range map[string]string{empty: "\n", noPEM: "no certificate"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	tests := []struct {
		args string // {} is the URL
		want string // in stderr
	}{
		{"", "mcphealth probe"},
		{"prob {}", `unknown command "prob"`},
		{"probe", "want one URL"},
		{"probe {} {}", "want one URL"},
		{"probe --nonsense {}", "-nonsense"},
		{"probe --timeout x {}", "-timeout"},
		{"probe --timeout 0s {}", "--timeout"},
		{"probe --timeout -1s {}", "--timeout"},
		{"probe --slow-after -1s {}", "--slow-after"},
		{"probe --slow-after 5s {}", "--slow-after 5s can never be: want less than the timeout, after which a server counts as dead, 5s"},
		{"probe --host {host} {}", `host "{host}": want a name`},
		{"probe --era 2025 {}", "--era"},
		{"probe --era unknown {}", "--era"},
		{"probe --alive-if yes {}", "--alive-if"},
		{"probe --deep maybe {}", "--deep"},
		{"probe --deep off --expect-tool a {}", "--expect-tool"},
		{"probe --args {\"a\":1} {}", "--args"},
		{"probe --call echo --args [1] {}", "--args"},
		{"probe --call echo --args {{ {}", "--args"},
		{"probe --health-path health {}", "--health-path"},
		{"probe --health-path /a#b {}", "--health-path"},
		{"probe --expect-tool= {}", "--expect-tool"},
		{"probe --call= {}", `--call "": want a value`},
		{"probe --bearer-file= {}", "--bearer-file"},
		{"explain --cacert= {}", "--cacert"},
		{"serve --config= --target a={}", "--config"},
		{"probe --fresh=perhaps {}", "-fresh"},
		{"probe --require-auth=perhaps {}", "-require-auth"},
		{"probe --header nocolon {}", "--header"},
		{"probe --header :value {}", "--header"},
		{"probe --header Host:x {}", "--host"},
		{"probe --header A:\x01 {}", "--header"},
		{"probe --header-env A {}", "--header-env"},
		{"probe --header-env A=NO_SUCH_VARIABLE_HERE {}", "--header-env"},
		{"probe --header-file A {}", "--header-file"},
		{"probe --header-file A=/no/such/file {}", "--header-file"},
		{"probe --header-file A=" + empty + " {}", "--header-file"},
		{"probe --header-file A=" + dir + " {}", "--header-file"},
		{"probe --header-file A=/dev/zero {}", "--header-file"},
		{"probe --bearer-file /no/such/file {}", "--bearer-file"},
		{"probe --cacert /no/such/file {}", "--cacert"},
		{"probe --cacert " + noPEM + " {}", "--cacert"},
		{"probe --cert /no/such/file {}", "--cert"},
		{"probe --cert " + noPEM + " {}", "--cert"},
		{"probe --key " + noPEM + " {}", "--key"},
		{"probe ftp://127.0.0.1/mcp", "url"},
		{"probe 127.0.0.1:8000/mcp", "url"},
		{"probe http://user:password@127.0.0.1/mcp", "header"},
		{"probe --stdio", "--stdio"},
		{"probe --stdio --", "--stdio"},
		{"probe --stdio --host x -- true", "--host"},
		{"probe --stdio --header A:b -- true", "--header"},
		{"probe --stdio --header-env A=b -- true", "--header-env"},
		{"probe --stdio --header-file A=b -- true", "--header-file"},
		{"probe --stdio --bearer-file b -- true", "--bearer-file"},
		{"probe --stdio --cacert b -- true", "--cacert"},
		{"probe --stdio --cert b -- true", "--cert"},
		{"probe --stdio --key b -- true", "--key"},
		{"probe --stdio --alive-if mcp -- true", "--alive-if"},
		{"probe --stdio --deep on -- true", "--deep"},
		{"probe --stdio --fresh -- true", "--fresh"},
		{"probe --stdio --require-auth -- true", "--require-auth"},
		{"probe --stdio --health-path /x -- true", "--health-path"},
		{"probe --stdio --era sse -- true", "--era"},
		{"probe --stdio --args {} -- true", "--args"},
		{"explain", "want one URL"},
		{"explain --call echo {}", "-call"},
		{"explain --stdio -- true", "-stdio"},
		{"explain --era x {}", "--era"},
		{"explain --cacert /no/such/file {}", "--cacert"},
		{"explain ftp://127.0.0.1/mcp", "url"},
	}
	for _, tt := range tests {
		args := strings.Fields(tt.args)
		for i := range args {
			if args[i] == "{}" && args[max(0, i-1)] != "--args" {
				args[i] = s.URL
			}
		}
		exit, out, errs := mcp(args...)
		if exit != exitUsage || out != "" || !strings.Contains(errs, tt.want) {
			t.Errorf("mcphealth %s: exit %d, stdout %q, stderr %q; want 64, nothing, and %q", tt.args, exit, out, errs, tt.want)
		}
	}
	if asked > 0 {
		t.Errorf("the server was asked %d times", asked)
	}
}

func TestHelp(t *testing.T) {
	for _, args := range [][]string{{"help"}, {"--help"}, {"-h"}, {"probe", "-h"}, {"probe", "--help"}, {"explain", "-h"}} {
		exit, out, errs := mcp(args...)
		if exit != exitUp || !strings.Contains(out, "mcphealth explain [flags] URL") && !strings.Contains(out, "--timeout duration") || errs != "" {
			t.Errorf("mcphealth %v: exit %d, %q, stderr %q; want its help on stdout", args, exit, out, errs)
		}
	}
	if exit, out, _ := mcp("version"); exit != exitUp || out != "mcphealth "+mcphealth.Version+"\n" {
		t.Errorf("version: exit %d, %q", exit, out)
	}
}

// Flags count wherever they stand; after -- nothing is a flag.
func TestFlagsAnywhere(t *testing.T) {
	url := server(t, modern).URL
	for _, args := range [][]string{{"--json", url}, {url, "--json"}, {"--timeout", "2s", url, "--json", "--fresh"}, {"--json", "--", url}} {
		if exit, out, errs := mcp(append([]string{"probe"}, args...)...); exit != exitUp || !strings.HasPrefix(out, "{") {
			t.Errorf("probe %v: exit %d, %q, %q; want JSON", args, exit, out, errs)
		}
	}
	if exit, _, _ := mcp("probe", "--", "--json", url); exit != exitUsage {
		t.Errorf("probe -- --json URL: exit %d, want 64", exit)
	}
}

// contract are the keys of the JSON document (docs/command.md) and what each holds.
var contract = map[string]string{
	"url": "string", "verdict": "string", "reason": "string", "detail": "string", "era": "string",
	"protocolVersions": "[]interface {}", "server": "map[string]interface {}", "httpStatus": "float64", "rpcCode": "float64",
	"latencyMs": "float64", "sessionOpened": "bool", "sessionClosed": "bool", "warnings": "[]interface {}", "steps": "[]interface {}",
}

func TestJSONContract(t *testing.T) {
	hangs := serveFunc(t, func(_ http.ResponseWriter, r *http.Request, _, _ string) { <-r.Context().Done() })
	tests := []struct {
		name string
		args []string
	}{
		{"ready", []string{server(t, modern).URL}},
		{"unknown", []string{server(t, nil).URL}},
		{"refused", []string{"http://127.0.0.1:1"}},
		{"timeout", []string{"--timeout", "100ms", hangs.URL}},
		{"http_answer", []string{"--alive-if", "any_response", server(t, nil).URL}},
		{"slow", []string{"--slow-after", "1ns", server(t, modern).URL}},
		{"stdio, not started", []string{"--stdio", "--", "/no/such/program"}},
		{"stdio, ends", []string{"--stdio", "--", "/bin/true"}},
		{"stdio, echoes", []string{"--timeout", "600ms", "--stdio", "--", "/bin/cat"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, out, errs := mcp(append([]string{"probe", "--json"}, tt.args...)...)
			var doc map[string]any
			if err := json.Unmarshal([]byte(out), &doc); err != nil || strings.Count(out, "\n") != 1 || errs != "" {
				t.Fatalf("%v in %q, stderr %q; want one line of JSON", err, out, errs)
			}
			checkContract(t, doc)
		})
	}
}

func checkContract(t *testing.T, doc map[string]any) {
	t.Helper()
	for key, want := range contract {
		if got := fmt.Sprintf("%T", doc[key]); got != want {
			t.Errorf("%s is %s (%v), want %s", key, got, doc[key], want)
		}
	}
	for key := range doc {
		if contract[key] == "" {
			t.Errorf("%s is not in the contract", key)
		}
	}
	steps, _ := doc["steps"].([]any)
	if len(steps) == 0 {
		t.Error("no steps")
	}
	for _, s := range steps {
		if keys := sortedKeys(s.(map[string]any)); keys != "httpStatus ms outcome rpcCode step" {
			t.Errorf("a step has %s", keys)
		}
	}
	if keys := sortedKeys(doc["server"].(map[string]any)); keys != "name version" {
		t.Errorf("server has %s", keys)
	}
	verdict, reason := mcphealth.Verdict(doc["verdict"].(string)), mcphealth.Reason(doc["reason"].(string))
	if !slices.Contains(mcphealth.ReasonsOf(verdict), reason) {
		t.Errorf("reason %s does not belong to %s", reason, verdict)
	}
}

func sortedKeys(m map[string]any) string {
	var keys []string
	for k := range m {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	return strings.Join(keys, " ")
}

// secret is what must stand in no output. Its half would be a leak as well.
const secret = "hunter2-hunter2-hunter2-hunter2"

// No credentials come out of the command: not with a server that repeats them, not
// in an error about them, not where they stand in the wrong place.
func TestNoSecretInOutput(t *testing.T) {
	dir := t.TempDir()
	whole, token, control := filepath.Join(dir, "whole"), filepath.Join(dir, "token"), filepath.Join(dir, "control")
	for file, text := range map[string]string{whole: "Bearer " + secret + "\n", token: secret + "\r\n", control: secret + "\x00" + secret} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("MCP_TOKEN", "Bearer "+secret)
	echo := serveFunc(t, func(w http.ResponseWriter, r *http.Request, _, id string) {
		auth := r.Header.Get("Authorization") + r.Header.Get("X-Key")
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Cache", "HIT "+auth)
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"error":{"code":-32000,"message":%q}}`, id, strings.Repeat("x", 100)+auth)
	})
	name := serveFunc(t, func(w http.ResponseWriter, r *http.Request, _, id string) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, strings.ReplaceAll(strings.ReplaceAll(discovered, "$ID", id), "demo", r.Header.Get("Authorization")))
	})
	away := serveFunc(t, func(w http.ResponseWriter, r *http.Request, _, _ string) {
		w.Header().Set("Location", "/login?"+r.Header.Get("Authorization"))
		w.WriteHeader(302)
	})
	headers := [][]string{
		{"--header", "Authorization: Bearer " + secret}, {"--header", "X-Key:" + secret},
		{"--header-env", "Authorization=MCP_TOKEN"}, {"--header-file", "Authorization=" + whole}, {"--bearer-file", token},
		// Wrong, in all ways that people get it wrong.
		{"--header", "Bearer " + secret}, {"--header", "Authorization Bearer " + secret + ": x"}, {"--header", "Authorization: " + secret + "\n"},
		{"--header", "Authorization: x\x00" + secret}, {"--header-env", "Authorization=" + secret}, {"--header-env", secret},
		{"--header-file", "Authorization=" + secret}, {"--header-file", secret}, {"--bearer-file", secret}, {"--bearer-file", control},
		{"--header-file", "Authorization=" + control}, {"--header", "Host: " + secret}, {"--cacert", "/no/file", "--header", "A: " + secret},
		{"--timeout", "x", "--header", "A: " + secret}, {"--header", "A: " + secret, "--nonsense"},
	}
	for _, h := range headers {
		for _, url := range []string{echo.URL, name.URL, away.URL, "http://127.0.0.1:1/", "ftp://x/"} {
			for _, form := range [][]string{{"probe"}, {"probe", "--json"}, {"probe", "-v"}, {"probe", "--require-auth"}, {"explain"}, {"explain", "--json"}} {
				_, out, errs := mcp(append(append(form, h...), url)...)
				if all := out + errs; strings.Contains(all, secret[:len(secret)/2]) {
					t.Errorf("mcphealth %v %.20q %s prints the secret: %s", form, h, url, all)
				}
			}
		}
	}
}

// Values come from where they are kept, at each run anew.
func TestCredentials(t *testing.T) {
	word := "one"
	var mu sync.Mutex
	s := serveFunc(t, func(w http.ResponseWriter, r *http.Request, _, id string) {
		mu.Lock()
		defer mu.Unlock()
		if r.Header.Get("Authorization") != "Bearer "+word {
			w.Header().Set("WWW-Authenticate", "Bearer")
			w.WriteHeader(401)
			return
		}
		_, _ = io.WriteString(w, strings.ReplaceAll(discovered, "$ID", id))
	})
	dir := t.TempDir()
	whole, token := filepath.Join(dir, "whole"), filepath.Join(dir, "token")
	set := func(value string) {
		mu.Lock()
		word = value
		mu.Unlock()
		t.Setenv("MCP_TOKEN", "Bearer "+value)
		_ = os.WriteFile(whole, []byte("Bearer "+value+"\n"), 0o600)
		_ = os.WriteFile(token, []byte(value), 0o600)
	}
	for _, value := range []string{"one", "two"} {
		set(value)
		for _, flags := range [][]string{
			{"--header", "Authorization: Bearer " + value}, {"--header-env", "authorization=MCP_TOKEN"},
			{"--header-file", "Authorization=" + whole}, {"--bearer-file", token},
			{"--header", "X-Other: 1", "--bearer-file", token, "--require-auth"},
		} {
			if exit, out, errs := mcp(append(append([]string{"probe"}, flags...), s.URL)...); exit != exitUp || !strings.HasPrefix(out, "ready (ok)") {
				t.Errorf("probe %v: exit %d, %q, %q; want ready", flags, exit, out, errs)
			}
		}
	}
	if exit, out, _ := mcp("probe", "--header", "Authorization: Bearer wrong", s.URL); exit != exitUp || !strings.HasPrefix(out, "degraded (credentials_rejected)") {
		t.Errorf("a wrong token: exit %d, %q; want credentials_rejected", exit, out)
	}
	if exit, out, _ := mcp("probe", "--require-auth", s.URL); exit != exitUp || !strings.HasPrefix(out, "alive (auth_required)") {
		t.Errorf("no token: exit %d, %q; want auth_required", exit, out)
	}
}

// The Host that clients use is sent, and trusted names are checked against the URL.
func TestHost(t *testing.T) {
	s := serveFunc(t, func(w http.ResponseWriter, r *http.Request, _, id string) {
		if r.Host != "mcp.example.com" {
			http.Error(w, "Invalid Host header", 421)
			return
		}
		_, _ = io.WriteString(w, strings.ReplaceAll(discovered, "$ID", id))
	})
	for flags, want := range map[string]string{"": "unknown (host_guessed)", "--host=mcp.example.com": "ready (ok)", "--host=other": "dead (host_rejected)"} {
		if _, out, _ := mcp(append([]string{"probe", s.URL}, strings.Fields(flags)...)...); !strings.HasPrefix(out, want) {
			t.Errorf("probe %s: %q, want %s", flags, out, want)
		}
	}
}

// TestTLS: a private authority, and a server that wants a client certificate.
func TestTLS(t *testing.T) {
	dir := t.TempDir()
	client := newPair(t, dir, "client")
	pool := x509.NewCertPool()
	pool.AddCert(client.leaf)
	s := httptest.NewUnstartedServer(handler(func(w http.ResponseWriter, _ *http.Request, _, id string) {
		_, _ = io.WriteString(w, strings.ReplaceAll(discovered, "$ID", id))
	}))
	s.Config.ErrorLog = nil
	s.TLS = &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
	s.StartTLS()
	t.Cleanup(s.Close)
	ca := filepath.Join(dir, "ca.pem")
	writePEM(t, ca, "CERTIFICATE", s.Certificate().Raw)
	other := newPair(t, dir, "other")
	both := filepath.Join(dir, "both.pem")
	cert, _ := os.ReadFile(client.cert)
	key, _ := os.ReadFile(client.key)
	if err := os.WriteFile(both, append(cert, key...), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name  string
		flags []string
		exit  int
		want  string
	}{
		{"certificate and key", []string{"--cacert", ca, "--cert", client.cert, "--key", client.key}, 0, "ready (ok)"},
		{"both in one file", []string{"--cacert", ca, "--cert", both}, 0, "ready (ok)"},
		{"no certificate", []string{"--cacert", ca}, 1, "dead (tls)"},
		{"somebody else's certificate", []string{"--cacert", ca, "--cert", other.cert, "--key", other.key}, 1, "dead (tls)"},
		{"an authority that nobody knows", []string{"--cert", client.cert, "--key", client.key}, 1, "dead (tls)"},
		{"the key of another", []string{"--cert", client.cert, "--key", other.key}, 64, ""},
	}
	for _, tt := range tests {
		for _, command := range []string{"probe", "explain"} {
			exit, out, errs := mcp(append(append([]string{command}, tt.flags...), s.URL)...)
			if exit != tt.exit || command == "probe" && !strings.HasPrefix(out, tt.want) {
				t.Errorf("%s: %s exit %d, %q, %q; want %d, %s", tt.name, command, exit, out, errs, tt.exit, tt.want)
			}
		}
	}
}

// pair is a certificate that signs itself, and its key, as PEM files.
type pair struct {
	cert, key string
	leaf      *x509.Certificate
}

func newPair(t *testing.T, dir, name string) pair {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, BasicConstraintsValid: true, IsCA: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	p := pair{filepath.Join(dir, name+".pem"), filepath.Join(dir, name+".key"), leaf}
	writePEM(t, p.cert, "CERTIFICATE", der)
	writePEM(t, p.key, "PRIVATE KEY", raw)
	return p
}

func writePEM(t *testing.T, file, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// With -v the steps stand on stderr, and a child's stderr does too; stdout is the
// same.
func TestVerbose(t *testing.T) {
	url := server(t, modern).URL
	_, plain, quiet := mcp("probe", "--json", "http://127.0.0.1:1/")
	_, same, loud := mcp("probe", "--json", "-v", "http://127.0.0.1:1/")
	if quiet != "" || !strings.HasPrefix(loud, "asked server/discover: refused, ") || !strings.HasPrefix(same, plain[:60]) {
		t.Errorf("stderr %q and %q with -v, stdout %q and %q", quiet, loud, plain, same)
	}
	if _, _, loud := mcp("probe", "-v", "--expect-tool", "echo", url); strings.Count(loud, "asked ") != 2 || !strings.Contains(loud, "asked tools/list: result, HTTP 200, ") {
		t.Errorf("stderr %q, want both questions", loud)
	}
	script := `echo words >&2; exit 9`
	if exit, out, quiet := mcp("probe", "--stdio", "--", "/bin/sh", "-c", script); exit != exitDead || quiet != "" || !strings.Contains(out, "exit status 9") {
		t.Errorf("stdio: exit %d, %q, stderr %q; want dead with the status, and nothing on stderr", exit, out, quiet)
	}
	if _, _, loud := mcp("probe", "-v", "--stdio", "--", "/bin/sh", "-c", script); !strings.Contains(loud, "stderr: words\n") {
		t.Errorf("stdio: stderr %q, want the child's words", loud)
	}
}

// What stands between --stdio and the command's own flags is ours, the rest not.
func TestStdioArguments(t *testing.T) {
	dir := t.TempDir()
	got := filepath.Join(dir, "args")
	script := filepath.Join(dir, "server")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nprintf '%s,' \"$@\" >"+got+"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"--stdio", "--", script, "--json", "a b", "--", "-v"}, {"--stdio", script, "--json", "a b", "--", "-v"}} {
		_, out, _ := mcp(append([]string{"probe"}, args...)...)
		if b, _ := os.ReadFile(got); string(b) != "--json,a b,--,-v," || strings.HasPrefix(out, "{") {
			t.Errorf("probe %v: the command got %q, stdout %q", args, b, out)
		}
	}
}

// TestExplain: the document's keys, and the same exit status as probe.
func TestExplain(t *testing.T) {
	tests := []struct {
		name string
		url  string
		exit int
	}{
		{"ready", server(t, modern).URL, exitUp},
		{"dead", "http://127.0.0.1:1/", exitDead},
		{"unknown", server(t, nil).URL, exitUnknown},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			exit, out, errs := mcp("explain", "--json", tt.url)
			var doc map[string]any
			if err := json.Unmarshal([]byte(out), &doc); err != nil || exit != tt.exit || errs != "" {
				t.Fatalf("exit %d, %v in %q, stderr %q; want %d and JSON", exit, err, out, errs, tt.exit)
			}
			if keys := sortedKeys(doc); keys != "advice checks mcphealth meaning url" {
				t.Errorf("the document has %s", keys)
			}
			checkContract(t, doc["mcphealth"].(map[string]any))
			checks := doc["checks"].([]any)
			for _, c := range checks {
				if keys := sortedKeys(c.(map[string]any)); keys != "check concludes got httpStatus ms rpcCode rule why wrong" {
					t.Errorf("a check has %s", keys)
				}
			}
			if len(checks) != 4 {
				t.Errorf("%d checks, want 4", len(checks))
			}
			if exit, out, _ := mcp("explain", tt.url); exit != tt.exit || !strings.Contains(out, "CONCLUDES") {
				t.Errorf("as text: exit %d, %q", exit, out)
			}
		})
	}
}

// docs/command.md has every flag of every command, with its argument, and no other;
// and every key of the document.
func TestDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/command.md")
	if err != nil {
		t.Fatal(err)
	}
	for command, declare := range map[string]func(*options, *flag.FlagSet){"probe": (*options).declare, "explain": (*options).declareShared,
		"serve": func(_ *options, fs *flag.FlagSet) { new(serving).declare(fs) }} {
		_, section, _ := strings.Cut(string(page), "\n## "+command+"\n")
		section, _, _ = strings.Cut(section, "\n## ")
		documented := map[string]bool{}
		for _, m := range regexp.MustCompile("(?m)^\\| `(--?[^`]+)` \\|").FindAllStringSubmatch(section, -1) {
			documented[strings.ReplaceAll(m[1], `\|`, "|")] = true
		}
		fs := newFlags(command)
		declare(&options{}, fs)
		fs.VisitAll(func(f *flag.Flag) {
			arg, _ := flag.UnquoteUsage(f)
			if want := strings.TrimSpace(dashed(f.Name) + " " + arg); !documented[want] {
				t.Errorf("docs/command.md, %s: no row for `%s`", command, want)
			} else {
				delete(documented, want)
			}
		})
		for row := range documented {
			t.Errorf("docs/command.md, %s: a row for `%s`, which is no flag", command, row)
		}
	}
	for key := range contract {
		if !strings.Contains(string(page), "`"+key+"`") {
			t.Errorf("docs/command.md does not name the key %s", key)
		}
	}
}
