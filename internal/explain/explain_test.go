package explain

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/internal/mcpfake"
	"github.com/mcphealth/mcphealth/mcphealth"
)

var update = flag.Bool("update", false, "write the golden files anew")

// in is the timeout of the checks here.
const in = 500 * time.Millisecond

// fake is a server that answers by HTTP method and JSON-RPC method.
type fake struct {
	*httptest.Server
	mu      sync.Mutex
	inits   int
	live    map[string]bool // sessions
	foreign int             // DELETEs of what is no live session
	gets    atomic.Int32    // that have not ended
}

// question is a request as a fake answers it.
type question struct{ verb, rpc, id, session, version string }

func serve(t *testing.T, say func(f *fake, w http.ResponseWriter, r *http.Request, q question)) *fake {
	t.Helper()
	f := &fake{live: map[string]bool{}}
	f.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		q := question{verb: r.Method, id: mcphealth.RequestID(body).JSON(), session: r.Header.Get("Mcp-Session-Id"), version: r.Header.Get("MCP-Protocol-Version")}
		if m := regexp.MustCompile(`"method":"([^"]*)"`).FindSubmatch(body); m != nil {
			q.rpc = string(m[1])
		}
		if r.Method == http.MethodDelete {
			f.mu.Lock()
			if !f.live[q.session] {
				f.foreign++
			}
			delete(f.live, q.session)
			f.mu.Unlock()
			return
		}
		if r.Method == http.MethodGet {
			f.gets.Add(1)
			defer f.gets.Add(-1)
		}
		say(f, w, r, q)
	}))
	t.Cleanup(f.Close)
	return f
}

func (f *fake) open(w http.ResponseWriter) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.inits++
	id := fmt.Sprintf("session-%d", f.inits)
	f.live[id] = true
	w.Header().Set("Mcp-Session-Id", id)
}

func rpc(w http.ResponseWriter, status int, q question, rest string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,%s}`, q.id, rest)
}

func stream(w http.ResponseWriter, r *http.Request, events string) {
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, events)
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}

const (
	discover   = `"result":{"supportedVersions":["2026-07-28"],"capabilities":{},"resultType":"complete","ttlMs":0,"cacheScope":"private"}`
	initialize = `"result":{"protocolVersion":"2025-06-18","capabilities":{},"serverInfo":{"name":"fake","version":"1"}}`
	notFound   = `"error":{"code":-32601,"message":"Method not found"}`
)

// wellKnown are the servers that other checks are known to misjudge, and some that
// are really down. Each has a golden file.
var wellKnown = []struct {
	name string
	say  func(f *fake, w http.ResponseWriter, r *http.Request, q question)
}{
	{"401-bearer", func(_ *fake, w http.ResponseWriter, _ *http.Request, _ question) {
		w.Header().Set("WWW-Authenticate", `Bearer resource_metadata="https://example.com/.well-known/oauth-protected-resource"`)
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(401)
		_, _ = io.WriteString(w, `{"error":"invalid_token"}`)
	}},
	{"405-on-get", func(f *fake, w http.ResponseWriter, _ *http.Request, q question) {
		switch {
		case q.verb == http.MethodGet:
			w.Header().Set("Allow", "POST, DELETE")
			w.WriteHeader(405)
		case q.rpc == "initialize":
			f.open(w)
			rpc(w, 200, q, initialize)
		case q.session == "session-1" || q.session == "session-2":
			rpc(w, 200, q, `"result":{}`)
		default:
			rpc(w, 400, q, `"error":{"code":-32000,"message":"Bad Request: No valid session ID provided"}`)
		}
	}},
	{"html-200", func(_ *fake, w http.ResponseWriter, _ *http.Request, _ question) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		_, _ = io.WriteString(w, "<!doctype html><title>Sign in</title>")
	}},
	{"ping-32601", func(f *fake, w http.ResponseWriter, r *http.Request, q question) {
		switch {
		case q.verb == http.MethodGet:
			stream(w, r, ": hello\n\n")
		case q.rpc == "initialize":
			f.open(w)
			rpc(w, 200, q, initialize)
		default:
			rpc(w, 200, q, notFound)
		}
	}},
	{"open-sse", func(_ *fake, w http.ResponseWriter, r *http.Request, q question) {
		if q.verb == http.MethodGet {
			stream(w, r, "")
			return
		}
		body := map[string]string{"server/discover": discover, "ping": `"result":{}`, "initialize": initialize}[q.rpc]
		stream(w, r, "id: 1\ndata:\n\nevent: message\ndata: {\"jsonrpc\":\"2.0\",\"id\":"+q.id+","+body+"}\n\n")
	}},
	{"404-modern", func(_ *fake, w http.ResponseWriter, _ *http.Request, q question) {
		switch {
		case q.verb == http.MethodGet:
			w.WriteHeader(405)
		case q.rpc == "server/discover":
			rpc(w, 200, q, discover)
		default:
			rpc(w, 404, q, notFound)
		}
	}},
	{"wedged-behind-sse", func(_ *fake, w http.ResponseWriter, r *http.Request, _ question) { stream(w, r, ": ping\n\n") }},
	{"one-session-for-all", func(_ *fake, w http.ResponseWriter, _ *http.Request, q question) {
		rpc(w, 400, q, `"error":{"code":-32000,"message":"Bad Request: Server not initialized"}`)
	}},
	{"rate-limited", func(_ *fake, w http.ResponseWriter, _ *http.Request, _ question) {
		w.Header().Set("Retry-After", "30")
		w.WriteHeader(429)
	}},
	{"http-sse-2024", func(_ *fake, w http.ResponseWriter, r *http.Request, q question) {
		if q.verb == http.MethodGet {
			stream(w, r, "event: endpoint\ndata: /messages\n\n")
			return
		}
		http.NotFound(w, r)
	}},
	{"empty-200", func(*fake, http.ResponseWriter, *http.Request, question) {}},
	{"redirect", func(_ *fake, w http.ResponseWriter, _ *http.Request, _ question) {
		w.Header().Set("Location", "https://login.example.com/")
		w.WriteHeader(302)
	}},
	{"502", func(_ *fake, w http.ResponseWriter, _ *http.Request, _ question) {
		w.Header().Set("Content-Type", "text/html")
		w.WriteHeader(502)
	}},
}

func TestGolden(t *testing.T) {
	for _, k := range wellKnown {
		t.Run(k.name, func(t *testing.T) {
			f := serve(t, k.say)
			r, took := run(t, f.URL+"/mcp", nil)
			if took > 3*in {
				t.Errorf("it took %v, want %v at most", took, 3*in)
			}
			var b bytes.Buffer
			if err := r.Print(&b); err != nil {
				t.Fatal(err)
			}
			got := strings.ReplaceAll(b.String(), f.URL, "http://127.0.0.1:8000")
			file := filepath.Join("testdata", k.name+".txt")
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("%s differs; got\n%s\nwant\n%s", file, got, want)
			}
			checkReport(t, r, b.String())
			f.checkLeft(t)
		})
	}
}

func run(t *testing.T, url string, header http.Header) (Report, time.Duration) {
	t.Helper()
	start := time.Now()
	r, err := Run(context.Background(), Target{Target: mcphealth.Target{URL: url, Header: header, Timeout: in},
		Transport: func() *http.Transport { return &http.Transport{} }})
	if err != nil {
		t.Fatal(err)
	}
	return r, time.Since(start)
}

// checkReport: what every report must be.
func checkReport(t *testing.T, r Report, text string) {
	t.Helper()
	for _, line := range strings.Split(text, "\n") {
		if n := len([]rune(line)); n > width && !strings.Contains(line, "http://") {
			t.Errorf("%d columns, want %d at most: %s", n, width, line)
		}
	}
	if len(r.Checks) != 4 || r.Meaning == "" || r.Advice == "" {
		t.Errorf("%d checks, meaning %q, advice %q; want 4 and some words", len(r.Checks), r.Meaning, r.Advice)
	}
	for _, c := range r.Checks {
		if c.Wrong && c.Why == "" || c.Concludes == notAsked && c.Why == "" {
			t.Errorf("%s concludes %s and does not say why that is wrong: %+v", c.Check, c.Concludes, c)
		}
		if n := len([]rune(c.Got)); n > 35 || n == 0 {
			t.Errorf("%s got %q, want something of at most 35 characters", c.Check, c.Got)
		}
	}
}

// checkLeft: no session, no stream, and no DELETE of what was not ours.
func (f *fake) checkLeft(t *testing.T) {
	t.Helper()
	for range 100 {
		if f.gets.Load() == 0 {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.live) > 0 || f.foreign > 0 || f.gets.Load() > 0 {
		t.Errorf("left %d sessions and %d streams, and ended %d that were not ours", len(f.live), f.gets.Load(), f.foreign)
	}
}

// The 89 recorded conversations: none makes explain hang, leave a session, or say
// something without a reason.
func TestCaptures(t *testing.T) {
	files, err := filepath.Glob("../../mcphealth/testdata/captures/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d captures: %v", len(files), err)
	}
	for _, file := range files {
		c, err := mcpfake.Load(file)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			p, err := mcpfake.Play(c)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			r, took := run(t, p.URL(), nil)
			if took > 3*in+2*time.Second { // a busy machine
				t.Errorf("it took %v", took)
			}
			var b bytes.Buffer
			if err := r.Print(&b); err != nil {
				t.Fatal(err)
			}
			checkReport(t, r, b.String())
			checkConduct(t, p.Requests())
		})
	}
}

// checkConduct: each session that was issued is ended, no other, and nothing but
// GET, POST and DELETE is sent.
func checkConduct(t *testing.T, requests []mcpfake.Request) {
	t.Helper()
	issued, gets := map[string]bool{}, 0
	for _, q := range requests {
		if q.Issued != "" {
			issued[q.Issued] = true
		}
		switch q.Verb {
		case http.MethodDelete:
			if !issued[q.Session] {
				t.Errorf("DELETE of %q, which is no session of ours", q.Session)
			}
			delete(issued, q.Session)
		case http.MethodGet:
			gets++
		case http.MethodPost:
		default:
			t.Errorf("sent %s", q.Verb)
		}
	}
	if len(issued) > 0 || gets > 1 {
		t.Errorf("left %d sessions, sent %d GETs; want none and one at most", len(issued), gets)
	}
}

// A server that never ends anything: each check ends by its own deadline.
func TestNeverHangs(t *testing.T) {
	endless := func(begin, more string) func(*fake, http.ResponseWriter, *http.Request, question) {
		return func(_ *fake, w http.ResponseWriter, r *http.Request, _ question) {
			w.Header().Set("Content-Type", "text/event-stream")
			_, _ = io.WriteString(w, begin)
			for r.Context().Err() == nil {
				_, _ = io.WriteString(w, more)
				w.(http.Flusher).Flush()
				time.Sleep(time.Millisecond)
			}
		}
	}
	tests := []struct {
		name string
		say  func(*fake, http.ResponseWriter, *http.Request, question)
	}{
		{"silence", func(_ *fake, _ http.ResponseWriter, r *http.Request, _ question) { <-r.Context().Done() }},
		{"comments for ever", endless("", ": ping\n\n")},
		{"one line for ever", endless("data: ", strings.Repeat("x", 1000))},
		{"a session, and silence", func(f *fake, w http.ResponseWriter, r *http.Request, q question) {
			f.open(w)
			w.Header().Set("Content-Type", "application/json")
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			before := runtime.NumGoroutine()
			f := serve(t, tt.say)
			_, took := run(t, f.URL, nil)
			if took > 3*in+time.Second {
				t.Errorf("it took %v, want %v at most", took, 3*in)
			}
			f.Close()
			for i := 0; i < 100 && runtime.NumGoroutine() > before; i++ {
				time.Sleep(10 * time.Millisecond)
			}
			if n := runtime.NumGoroutine(); n > before {
				t.Errorf("%d goroutines, had %d", n, before)
			}
		})
	}
}

// Sessions that a server forces on a check are ended, with whatever came with them.
func TestEndsWhatItIsGiven(t *testing.T) {
	f := serve(t, func(f *fake, w http.ResponseWriter, _ *http.Request, q question) {
		f.open(w)
		if q.rpc == "initialize" {
			rpc(w, 200, q, initialize)
			return
		}
		rpc(w, 400, q, `"error":{"code":-32600,"message":"Bad Request: Missing session ID"}`)
	})
	run(t, f.URL, nil)
	f.mu.Lock()
	defer f.mu.Unlock()
	// Those of the probe's own refused questions are the server's to sweep: the probe
	// ends what its initialize opened (design: DELETE only that).
	if f.foreign > 0 {
		t.Errorf("%d DELETEs of what was no live session", f.foreign)
	}
	for id := range f.live {
		if id >= "session-4" { // discover, ping and initialize of the probe come first
			t.Errorf("left %s, which a check was given", id)
		}
	}
}

// A GET does not make a server open a session that nobody can end: it carries one
// that is none.
func TestGetOpensNoSession(t *testing.T) {
	f := serve(t, func(f *fake, w http.ResponseWriter, r *http.Request, q question) {
		if q.verb == http.MethodGet {
			if q.session == "" {
				f.mu.Lock()
				f.live["of a GET"] = true
				f.mu.Unlock()
			}
			stream(w, r, "")
			return
		}
		rpc(w, 200, q, discover)
	})
	run(t, f.URL, nil)
	f.checkLeft(t)
}

// A session id that only repeats ours is no session.
func TestEndsNoEcho(t *testing.T) {
	f := serve(t, func(_ *fake, w http.ResponseWriter, _ *http.Request, q question) {
		if q.session != "" {
			w.Header().Set("Mcp-Session-Id", q.session)
		}
		rpc(w, 200, q, discover)
	})
	run(t, f.URL, nil)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.foreign > 0 {
		t.Errorf("%d DELETEs of a session that is none", f.foreign)
	}
}

// No redirect is followed, and so nothing goes to another origin.
func TestFollowsNoRedirect(t *testing.T) {
	var hits atomic.Int32
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { hits.Add(1) }))
	defer other.Close()
	for _, status := range []int{301, 302, 303, 307, 308} {
		f := serve(t, func(_ *fake, w http.ResponseWriter, _ *http.Request, _ question) {
			w.Header().Set("Location", other.URL)
			w.WriteHeader(status)
		})
		r, _ := run(t, f.URL, http.Header{"Authorization": {"Bearer hunter2-hunter2"}})
		if r.Checks[0].Concludes != up || r.Checks[0].HTTPStatus != status {
			t.Errorf("GET got %+v, want the redirect itself", r.Checks[0])
		}
	}
	if n := hits.Load(); n > 0 {
		t.Errorf("%d requests to another origin", n)
	}
}

// Credentials go with every check, and come out of none.
func TestNoSecretInReport(t *testing.T) {
	const secret = "hunter2-hunter2-hunter2"
	bare := 0
	f := serve(t, func(f *fake, w http.ResponseWriter, r *http.Request, _ question) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if r.Header.Get("Authorization") == "" {
			bare++
		}
		w.Header().Set("Content-Type", "text/"+secret)
		w.WriteHeader(418)
		_, _ = io.WriteString(w, secret)
	})
	r, _ := run(t, f.URL, http.Header{"Authorization": {"Bearer " + secret}})
	var text bytes.Buffer
	_ = r.Print(&text)
	doc, _ := json.Marshal(r)
	if strings.Contains(text.String()+string(doc), secret) {
		t.Errorf("the report holds the secret:\n%s\n%s", &text, doc)
	}
	if bare > 0 {
		t.Errorf("%d requests without credentials", bare)
	}
}

// Every reason has words, from docs/verdicts.md.
func TestWords(t *testing.T) {
	for _, v := range mcphealth.Verdicts() {
		for _, reason := range mcphealth.ReasonsOf(v) {
			meaning, advice := Words(reason)
			if meaning == "" || advice == "" || strings.ContainsAny(meaning+advice, "`|") {
				t.Errorf("Words(%s) = %q, %q", reason, meaning, advice)
			}
		}
	}
}

// Wide words and long lines stay within the columns.
func TestParagraph(t *testing.T) {
	tests := []struct{ in, want string }{
		{"", "  \n"},
		{"a b", "  a b\n"},
		{strings.Repeat("x", 100), "  " + strings.Repeat("x", 100) + "\n"},
		{strings.Repeat("ä", 78) + " b", "  " + strings.Repeat("ä", 78) + "\n  b\n"},
	}
	for _, tt := range tests {
		var b strings.Builder
		paragraph(&b, "  ", tt.in)
		if b.String() != tt.want {
			t.Errorf("paragraph(%q) = %q, want %q", tt.in, b.String(), tt.want)
		}
	}
}
