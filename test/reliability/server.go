package reliability

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// discovered is what a healthy modern server answers to a probe. $ID is the id.
const discovered = `{"jsonrpc":"2.0","id":$ID,"result":{"supportedVersions":["2026-07-28"],"capabilities":{"tools":{}},"serverInfo":{"name":"fake","version":"1"}}}`

// isProbe: the request is a question of ours, not a client's.
func isProbe(r *http.Request) bool {
	return strings.HasPrefix(r.Header.Get("User-Agent"), "mcphealth/")
}

// A Server is a small modern MCP server in this process which counts what it runs.
type Server struct {
	Addr    string
	Probes  atomic.Int64
	Headers sync.Map // last value of each header that a client sent, by name

	srv  *http.Server
	mu   sync.Mutex
	runs map[string]int // executions by id
}

func newServer(t testing.TB) *Server {
	t.Helper()
	return revive(t, "127.0.0.1:0")
}

// revive starts one on an address.
func revive(t testing.TB, addr string) *Server {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{Addr: ln.Addr().String(), runs: map[string]int{}}
	s.srv = &http.Server{Handler: s, ReadHeaderTimeout: time.Minute, Protocols: new(http.Protocols)}
	s.srv.Protocols.SetHTTP1(true)
	s.srv.Protocols.SetUnencryptedHTTP2(true)
	go s.srv.Serve(ln)
	t.Cleanup(func() { s.srv.Close() })
	return s
}

// ServeHTTP answers a probe with what a modern server says of itself, and a call
// with its id. Who asks for a session gets one, called after the address.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(io.LimitReader(r.Body, 4<<20))
	if err != nil {
		return
	}
	var m struct {
		ID     json.RawMessage
		Method string
	}
	w.Header().Set("Content-Type", "application/json")
	if err := json.Unmarshal(body, &m); err != nil {
		w.WriteHeader(http.StatusBadRequest)
		io.WriteString(w, `{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"Parse error"}}`)
		return
	}
	if isProbe(r) {
		s.Probes.Add(1)
		io.WriteString(w, strings.ReplaceAll(discovered, "$ID", string(m.ID)))
		return
	}
	for k, v := range r.Header {
		s.Headers.Store(k, v[len(v)-1])
	}
	s.mu.Lock()
	s.runs[string(m.ID)]++
	s.mu.Unlock()
	if m.Method == "initialize" {
		w.Header().Set("Mcp-Session-Id", s.Addr+"/"+rand.Text())
	}
	fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"content":[{"type":"text","text":"done"}]}}`, m.ID)
}

// Runs is how often the calls with each id were executed.
func (s *Server) Runs() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[string]int{}
	for k, v := range s.runs {
		all[k] = v
	}
	return all
}

// wantOnce checks that no call ran twice.
func wantOnce(t testing.TB, servers ...*Server) {
	t.Helper()
	sum := map[string]int{}
	for _, s := range servers {
		for id, n := range s.Runs() {
			sum[id] += n
		}
	}
	for id, n := range sum {
		if n > 1 {
			t.Errorf("call %s was executed %d times, want at most once", id, n)
		}
	}
}

// callBody is a tools/call with this id, as JSON.
func callBody(id string) string { return sizedCall(id, 0) }

// sizedCall is one whose argument has that many bytes.
func sizedCall(id string, size int) string {
	return `{"jsonrpc":"2.0","id":` + id + `,"method":"tools/call","params":{"name":"echo","arguments":{"message":"` + strings.Repeat("x", size) + `"}}}`
}
