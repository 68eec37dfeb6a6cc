package caddymodule

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	_ "github.com/caddyserver/caddy/v2/modules/standard"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// server is a small MCP server which can be told to misbehave. It says at once
// which instance answered, what it was sent, and how often.
type server struct {
	t    testing.TB
	name string
	addr string
	http *httptest.Server

	calls    atomic.Int64 // requests of clients
	probes   atomic.Int64 // questions of checkers
	headers  sync.Map     // last header of a client's request, by name
	probeHdr sync.Map
	handler  atomic.Pointer[http.HandlerFunc] // for clients; nil: answer
	prober   atomic.Pointer[http.HandlerFunc] // for checkers; nil: answer
}

const ready = `{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},"serverInfo":{"name":"fake","version":"1"}}`

func newServer(t testing.TB, name string) *server {
	t.Helper()
	s := &server{t: t, name: name}
	s.start(net.JoinHostPort("127.0.0.1", "0"))
	t.Cleanup(s.kill)
	return s
}

func (s *server) start(addr string) {
	s.t.Helper()
	ln, err := net.Listen("tcp", addr)
	require.NoError(s.t, err)
	s.addr = ln.Addr().String()
	s.http = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
	s.http.Listener.Close()
	s.http.Listener = ln
	s.http.Config.Protocols = new(http.Protocols)
	s.http.Config.Protocols.SetHTTP1(true)
	s.http.Config.Protocols.SetUnencryptedHTTP2(true)
	s.http.Start()
}

// kill ends the server as a killed process ends: nothing listens, all connections
// are cut.
func (s *server) kill() {
	s.http.Listener.Close()
	s.http.CloseClientConnections()
	s.http.Close()
}

// revive starts it again on the same address.
func (s *server) revive() { s.t.Helper(); s.start(s.addr) }

// on has f answer clients; nil goes back to the usual answers.
func (s *server) on(f http.HandlerFunc) { s.handler.Store(orNil(f)) }

// onProbe has f answer checkers.
func (s *server) onProbe(f http.HandlerFunc) { s.prober.Store(orNil(f)) }

func orNil(f http.HandlerFunc) *http.HandlerFunc {
	if f == nil {
		return nil
	}
	return &f
}

func (s *server) serve(w http.ResponseWriter, r *http.Request) {
	if strings.HasPrefix(r.Header.Get("User-Agent"), "mcphealth/") {
		s.probes.Add(1)
		s.probeHdr.Store("Host", r.Host)
		for k := range r.Header {
			s.probeHdr.Store(k, r.Header.Get(k))
		}
		if f := s.prober.Load(); f != nil {
			(*f)(w, r)
			return
		}
		s.answer(w, r)
		return
	}
	s.calls.Add(1)
	s.headers.Store("Host", r.Host)
	for k := range r.Header {
		s.headers.Store(k, r.Header.Get(k))
	}
	if f := s.handler.Load(); f != nil {
		(*f)(w, r)
		return
	}
	s.answer(w, r)
}

func (s *server) answer(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var m struct {
		ID     json.RawMessage `json:"id"`
		Method string          `json:"method"`
		Params json.RawMessage `json:"params"`
	}
	if r.Method != http.MethodPost || json.Unmarshal(body, &m) != nil {
		http.Error(w, "what?", http.StatusBadRequest)
		return
	}
	if m.ID == nil {
		w.WriteHeader(http.StatusAccepted)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	result := ready
	if m.Method != "server/discover" {
		result = fmt.Sprintf(`{"served_by":%q,"got":%d}`, s.name, len(body))
	}
	fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":%s}`, m.ID, result)
}

func html(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html")
	io.WriteString(w, "<!doctype html><title>Welcome</title>")
}

// freePort returns an address on loopback that nothing listens on.
func freeAddr(t testing.TB) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	return ln.Addr().String()
}

// edge is a Caddy of ours.
type edge struct {
	t    testing.TB
	addr string
	url  string
}

const globals = `{
	admin off
	persist_config off
	auto_https off
	storage file_system %q
	servers {
		protocols h1 h2c
	}
	log {
		output discard
	}
	%s
}
`

// isCaddy210: this is Caddy 2.10, whose transports add no headers of their own.
var isCaddy210 = func() bool {
	_, adds := any(new(reverseproxy.HTTPTransport)).(requestHeaderOps)
	return !adds
}()

// storageDir is an empty folder for Caddy's storage. Caddy tidies that up in a goroutine
// which outlives its Stop by a moment, and may put a file where t.TempDir removes.
func storageDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "caddy")
	require.NoError(t, err)
	t.Cleanup(func() {
		eventually(t, func() bool { return os.RemoveAll(dir) == nil }, "removing %s", dir)
	})
	return dir
}

// newEdge starts Caddy with one site of this body. {addr} is its own address.
func newEdge(t testing.TB, options, site string) *edge {
	t.Helper()
	e := &edge{t: t, addr: freeAddr(t)}
	e.url = "http://" + e.addr
	e.load(options, site)
	t.Cleanup(func() {
		require.NoError(t, caddy.Stop())
		forgetAll(t)
	})
	return e
}

// forgetAll ends all checkers, so that tests do not see each other's. A request that was
// held keeps its own until its handler has returned, which may be after the client has
// the answer: Caddy does not wait for handlers unless it exits.
func forgetAll(t testing.TB) {
	t.Helper()
	eventually(t, func() bool {
		checkers.closeUnused(10 * time.Second)
		return len(checkers.list()) == 0
	}, "checkers are still referred to after the stop")
}

func (e *edge) load(options, site string) {
	e.t.Helper()
	require.NoError(e.t, caddy.Load(e.adapt(options, site), true))
	client.CloseIdleConnections() // a reload ends them, and a call may cross that
}

func (e *edge) adapt(options, site string) []byte {
	e.t.Helper()
	text := fmt.Sprintf(globals, storageDir(e.t), options) + "http://" + e.addr + " {\n" + site + "\n}\n"
	out, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), map[string]any{"filename": "Caddyfile"})
	require.NoError(e.t, err)
	return out
}

// validate is what caddy validate says of a site.
func validate(t testing.TB, options, site string) error {
	t.Helper()
	text := fmt.Sprintf(globals, storageDir(t), options) + "http://127.0.0.1:1 {\n" + site + "\n}\n"
	out, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
	require.NoError(t, err)
	var cfg caddy.Config
	require.NoError(t, caddy.StrictUnmarshalJSON(out, &cfg))
	return caddy.Validate(&cfg)
}

// reply is an answer that was read to its end.
type reply struct {
	status int
	header http.Header
	body   string
}

func (e *edge) do(method, path, body string, header ...string) reply {
	e.t.Helper()
	r, err := e.try(method, path, body, header...)
	require.NoError(e.t, err)
	return r
}

var client = &http.Client{
	Transport:     &http.Transport{MaxIdleConnsPerHost: 64},
	Timeout:       time.Minute,
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

func (e *edge) try(method, path, body string, header ...string) (reply, error) {
	var reader io.Reader
	if body != "" {
		reader = strings.NewReader(body)
	}
	req, err := http.NewRequest(method, e.url+path, reader)
	if err != nil {
		return reply{}, err
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := client.Do(req)
	if err != nil {
		return reply{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return reply{resp.StatusCode, resp.Header, string(b)}, err
}

// call is one tools/call with this id (as JSON).
func (e *edge) call(id string) reply {
	e.t.Helper()
	return e.do(http.MethodPost, "/mcp", callBody(id))
}

func callBody(id string) string {
	return `{"jsonrpc":"2.0","id":` + id + `,"method":"tools/call","params":{"name":"echo"}}`
}

// servedBy is the name of the server that gave the answer; "" if none did.
func (r reply) servedBy() string {
	var m struct {
		Result struct {
			ServedBy string `json:"served_by"`
		} `json:"result"`
	}
	_ = json.Unmarshal([]byte(r.body), &m)
	return m.Result.ServedBy
}

// snapshots are those of all checkers of the upstream with this address.
func snapshots(addr string) (all []mcphealth.Snapshot) {
	for _, e := range checkers.list() {
		if e.upstream == addr {
			all = append(all, e.checker.Snapshot())
		}
	}
	return all
}

// waitState waits until the upstream's one checker says state.
func waitState(t testing.TB, addr string, state mcphealth.State) mcphealth.Snapshot {
	t.Helper()
	var last mcphealth.Snapshot
	eventually(t, func() bool {
		all := snapshots(addr)
		if len(all) != 1 {
			return false
		}
		last = all[0]
		return last.State == state
	}, "upstream %s: want state %s, have %v", addr, state, &last)
	return last
}

func eventually(t testing.TB, ok func() bool, format string, args ...any) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf(format, args...)
		}
		time.Sleep(2 * time.Millisecond)
	}
}
