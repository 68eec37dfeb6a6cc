package yaegi_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// reply is a raw HTTP answer. In its body $id stands for the id of the request,
// $path for its path.
type reply struct {
	status int
	header string // "Name: value", one a line
	body   string
	cut    bool          // the answer says that it is longer than it is
	hang   bool          // nothing more comes, and the stream stays open
	zip    bool          // body is sent gzipped
	drop   string        // the connection ends without an answer: "close" or "reset"
	wait   time.Duration // before the answer
}

// script is a server that answers by a list: a reply per JSON-RPC method, "*" for
// the others, "GET" for that. With refuse it hands out sessions and refuses what
// carries none of them.
type script struct {
	answers map[string]reply
	refuse  *reply
	// later replaces all of that from request number `from` (counted from 1) on;
	// sessions are forgotten then.
	from  int
	later *script
}

// scripted serves one script and remembers what it was asked.
type scripted struct {
	script script

	mu     sync.Mutex
	open   map[string]bool
	opened int
	asked  []string
}

func serve(s script) *scripted { return &scripted{script: s, open: map[string]bool{}} }

func (s *scripted) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var q struct {
		ID     json.RawMessage `json:"id"`
		Method string          `json:"method"`
	}
	_ = json.Unmarshal(body, &q)
	if q.Method == "" {
		q.Method = r.Method
	}
	a, session := s.choose(q.Method, r)
	a.body = strings.NewReplacer("$id", string(q.ID), "$path", r.URL.Path).Replace(a.body)
	if session != "" {
		w.Header().Set("Mcp-Session-Id", session)
	}
	a.send(w, r)
}

// choose finds the reply and keeps the book of sessions.
func (s *scripted) choose(method string, r *http.Request) (reply, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, strings.TrimSpace(fmt.Sprintf("%s %s prepared=%q host=%t session=%q version=%q",
		r.Method, method, r.Header.Get("X-Prepared"), r.Host == "clients.example", r.Header.Get("Mcp-Session-Id"), r.Header.Get("MCP-Protocol-Version"))))
	if s.script.later != nil && len(s.asked) >= s.script.from {
		s.script, s.open = *s.script.later, map[string]bool{}
	}
	id := r.Header.Get("Mcp-Session-Id")
	switch {
	case r.Method == http.MethodDelete:
		if !s.open[id] {
			return reply{status: 404}, ""
		}
		delete(s.open, id)
		return reply{status: 204}, ""
	case s.script.refuse == nil:
	case method == "initialize":
		a := s.script.pick(method)
		s.opened++
		id = fmt.Sprintf("s%d", s.opened)
		s.open[id] = true
		return a, id
	case !s.open[id]:
		return *s.script.refuse, ""
	}
	return s.script.pick(method), ""
}

func (s script) pick(method string) reply {
	if a, ok := s.answers[method]; ok {
		return a
	}
	return s.answers["*"]
}

// left is how many sessions were not ended.
func (s *scripted) left() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.open)
}

func (s *scripted) questions() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return changing.ReplaceAllString(strings.Join(s.asked, "\n"), "*")
}

func (a reply) send(w http.ResponseWriter, r *http.Request) {
	time.Sleep(a.wait)
	if a.drop != "" {
		a.hangUp(w)
		return
	}
	body := []byte(a.body)
	if a.zip {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, _ = z.Write(body)
		_ = z.Close()
		body = b.Bytes()
		w.Header().Set("Content-Encoding", "gzip")
	}
	w.Header()["Content-Type"] = nil // no guess of net/http's
	for line := range strings.Lines(a.header) {
		name, v, _ := strings.Cut(strings.TrimSpace(line), ": ")
		w.Header().Set(name, v)
	}
	if a.cut {
		w.Header().Set("Content-Length", fmt.Sprint(len(body)+10))
	}
	w.WriteHeader(a.status)
	_, _ = w.Write(body)
	if a.hang {
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}
}

func (a reply) hangUp(w http.ResponseWriter) {
	c, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		panic(err)
	}
	if a.drop == "reset" {
		_ = c.(*net.TCPConn).SetLinger(0)
	}
	_ = c.Close()
}
