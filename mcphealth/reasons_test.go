package mcphealth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// reply is what a fake says to one JSON-RPC method; $ID is the question's id.
type reply struct {
	status int
	body   string
}

// The replies that several fakes share.
var (
	noMethod   = reply{200, `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32601,"message":"Method not found"}}`}
	noSession  = reply{404, `{"jsonrpc":"2.0","id":null,"error":{"code":-32001,"message":"Session not found"}}`}
	broken     = reply{200, `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32603,"message":"Internal error"}}`}
	discovery  = reply{200, discovered}
	noSessions = reply{503, `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32000,"message":"Too many open sessions"}}`}
	modernOnly = reply{400, `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32022,"message":"Unsupported protocol version","data":{"supported":["2026-07-28"]}}}`}
	oldVersion = reply{400, `{"jsonrpc":"2.0","id":$ID,"error":{"code":-32602,"message":"Unsupported protocol version","data":{"supported":["2023-01-01"]}}}`}
)

// fakes produce the reasons that neither a capture nor a hostile server does.
// says maps a JSON-RPC method, or the path of a GET, to its reply; "*" is every
// other.
var fakes = []struct {
	name      string
	want      string
	says      map[string]reply
	set       func(*Target)
	transport func() *http.Transport
}{
	{name: "a version that nobody shares", want: "alive version_mismatch",
		says: map[string]reply{"initialize": oldVersion, "*": noMethod}},
	{name: "slower than asked for", want: "degraded slow",
		says: map[string]reply{"*": discovery}, set: func(t *Target) { t.SlowAfter = time.Nanosecond }},
	{name: "no more sessions", want: "degraded session_limit",
		says: map[string]reply{"initialize": noSessions, "*": noSession}},
	{name: "shutting down", want: "degraded draining",
		says: map[string]reply{"*": {503, "Server is shutting down"}}},
	{name: "fails inside", want: "degraded internal_error",
		says: map[string]reply{"*": broken}, set: func(t *Target) { t.Era = Modern }},
	{name: "fails inside, and names its version to initialize", want: "degraded internal_error",
		says: map[string]reply{"server/discover": broken, "*": modernOnly}},
	{name: "fails inside, and knows no initialize", want: "degraded internal_error",
		says: map[string]reply{"server/discover": broken, "*": {404, noMethod.body}}},
	{name: "an old server chokes on the new question, and has no version in common", want: "alive version_mismatch",
		says: map[string]reply{"server/discover": broken, "*": oldVersion}},
	{name: "a router before a broken server", want: "degraded handshake_failed",
		says: map[string]reply{"initialize": broken, "*": noSession}},
	{name: "a tool that is not there", want: "degraded tools_missing",
		says: map[string]reply{"tools/list": {200, `{"jsonrpc":"2.0","id":$ID,"result":{"tools":[{"name":"other"}]}}`}, "*": discovery},
		set:  func(t *Target) { t.ExpectTools = []string{"echo"} }},
	{name: "a tool that fails", want: "degraded tool_failing",
		says: map[string]reply{"tools/call": {200, `{"jsonrpc":"2.0","id":$ID,"result":{"isError":true,"content":[]}}`}, "*": discovery},
		set:  func(t *Target) { t.CallTool = "echo" }},
	{name: "nobody listens", want: "dead refused",
		set: func(t *Target) { t.URL = "http://" + closedPort() + "/mcp" }},
	{name: "no connection", want: "dead connect_timeout", transport: func() *http.Transport {
		return &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}
	}},
	{name: "a name that does not resolve", want: "dead dns",
		set: func(t *Target) { t.URL = "http://mcp.invalid/mcp" },
		transport: func() *http.Transport {
			dns := func(context.Context, string, string) (net.Conn, error) {
				return nil, errors.New("no resolver in this test")
			}
			d := &net.Dialer{Resolver: &net.Resolver{PreferGo: true, Dial: dns}}
			return &http.Transport{DialContext: d.DialContext}
		}},
	{name: "a resolver that does not answer", want: "dead dns",
		set: func(t *Target) { t.URL = "http://mcp.invalid/mcp" },
		transport: func() *http.Transport {
			return &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				trace := httptrace.ContextClientTrace(ctx)
				trace.DNSStart(httptrace.DNSStartInfo{})
				select {
				case <-ctx.Done():
				case <-time.After(1200 * time.Millisecond): // net/http's transport lets a dial go on
				}
				err := &net.DNSError{Err: "i/o timeout", Name: "mcp.invalid", IsTimeout: true}
				trace.DNSDone(httptrace.DNSDoneInfo{Err: err}) // as package net does
				return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
			}}
		}},
	{name: "a name that does not resolve, with a word of TLS in it", want: "dead dns", transport: func() *http.Transport {
		return &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, errors.New("dial tcp: lookup certificates.internal on 127.0.0.53:53: no such host") // as Caddy's DialError has it
		}}
	}},
	{name: "HTTP where HTTPS is expected", want: "dead tls",
		says: map[string]reply{"*": discovery}, set: func(t *Target) { t.URL = "https" + strings.TrimPrefix(t.URL, "http") }},
	{name: "a health document says no", want: "dead health_down",
		says: map[string]reply{"/health": {503, `{"status":"unhealthy"}`}, "*": discovery}, set: func(t *Target) { t.HealthPath = "/health" }},
	{name: "the form of the request", want: "unknown probe_rejected",
		says: map[string]reply{"*": {415, ""}}},
	{name: "no socket is left on this machine", want: "unknown probe_rejected", transport: func() *http.Transport {
		return &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("socket", syscall.EMFILE)}
		}}
	}},
	{name: "nor one for the resolver", want: "unknown probe_rejected",
		set: func(t *Target) { t.URL = "http://mcp.invalid/mcp" },
		transport: func() *http.Transport {
			dns := func(context.Context, string, string) (net.Conn, error) {
				return nil, os.NewSyscallError("socket", syscall.EMFILE)
			}
			d := &net.Dialer{Resolver: &net.Resolver{PreferGo: true, Dial: dns}}
			return &http.Transport{DialContext: d.DialContext}
		}},
	{name: "a server that speaks of files, and no HTTP", want: "dead not_mcp", transport: func() *http.Transport {
		return &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go func() {
				_, _ = theirs.Read(make([]byte, 4096))
				_, _ = io.WriteString(theirs, "too many open files\r\n\r\n")
				_ = theirs.Close()
			}()
			return ours, nil
		}}
	}},
	{name: "our own end", want: "unknown canceled", transport: func() *http.Transport {
		return &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			cancelProbe()
			<-ctx.Done()
			return nil, ctx.Err()
		}}
	}},
}

// cancelProbe ends the probe of the fake that runs.
var cancelProbe context.CancelFunc

func TestFakes(t *testing.T) {
	for way, newLine := range lines {
		for _, f := range fakes {
			t.Run(way+"/"+f.name, func(t *testing.T) {
				s := httptest.NewServer(speak(f.says))
				defer s.Close()
				target := Target{URL: s.URL + "/mcp", Timeout: time.Second}
				if f.set != nil {
					f.set(&target)
				}
				transport := &http.Transport{}
				if f.transport != nil {
					transport = f.transport()
				}
				p, err := NewProber(target, newLine(transport))
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithCancel(context.Background())
				defer cancel()
				cancelProbe = cancel
				r := p.Probe(ctx)
				p.Close(context.Background())
				if got := string(r.Verdict) + " " + string(r.Reason); got != f.want {
					t.Errorf("Probe = %q, want %q\n%s", got, f.want, trail(r))
				}
			})
		}
	}
}

// lines are the two ways to an upstream without TLS.
var lines = map[string]func(*http.Transport) *Line{"transport": NewLine, "plain": NewPlainLine}

// speak is a server that says what it is told to.
func speak(says map[string]reply) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		key := r.URL.Path
		if m := regexp.MustCompile(`"method":"([^"]*)"`).FindSubmatch(body); m != nil {
			key = string(m[1])
		}
		a, ok := says[key]
		if !ok {
			a = says["*"]
		}
		if strings.HasPrefix(a.body, "{") {
			w.Header().Set("Content-Type", "application/json")
		}
		w.WriteHeader(a.status)
		_, _ = io.WriteString(w, strings.ReplaceAll(a.body, "$ID", RequestID(body).JSON()))
	})
}

// closedPort is an address where nobody listens.
func closedPort() string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "127.0.0.1:1"
	}
	defer l.Close()
	return l.Addr().String()
}

// elsewhere are the reasons that no probe gives, and what does.
var elsewhere = map[string]string{
	"unknown never_probed": "Checker.Snapshot before the first probe: TestNeverProbed",
	"degraded error_rate":  "Checker.Served, from traffic: TestErrorRate",
}

func TestNeverProbed(t *testing.T) {
	p, err := NewProber(Target{URL: "http://127.0.0.1:1/mcp"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewChecker(p, Schedule{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	s := c.Snapshot()
	if s.State != StateUnknown || s.Reason != NeverProbed || s.Last.Verdict != Unknown || s.Last.Reason != NeverProbed {
		t.Errorf("Snapshot before Start: state %s, reason %s, last %s %s; want unknown, never_probed, both times",
			s.State, s.Reason, s.Last.Verdict, s.Last.Reason)
	}
}

// TestRouteAbsent: the same bare 404 is death where MCP answered before, and
// unknown where it never did.
func TestRouteAbsent(t *testing.T) {
	nothing := speak(map[string]reply{"*": {404, "404 page not found\n"}})
	something := speak(map[string]reply{"*": discovery})
	var mcp atomic.Bool
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if mcp.Load() {
			something.ServeHTTP(w, r)
			return
		}
		nothing.ServeHTTP(w, r)
	}))
	defer s.Close()
	p, err := NewProber(Target{URL: s.URL + "/mcp", Timeout: time.Second}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	for _, step := range []struct{ says, want string }{
		{"nothing", "unknown endpoint_not_found unknown"},
		{"MCP", "ready ok modern"},
		{"nothing", "dead route_absent modern"},
		{"nothing", "dead route_absent modern"},
		{"MCP", "ready ok modern"},
	} {
		mcp.Store(step.says == "MCP")
		if r := p.Probe(context.Background()); words(r) != step.want {
			t.Errorf("while the server says %s: Probe = %q, want %q\n%s", step.says, words(r), step.want, trail(r))
		}
	}
}

// TestReasonsAreClosed: code, docs/verdicts.md and what the tests produce know
// the same words.
func TestReasonsAreClosed(t *testing.T) {
	listed := map[string]bool{}
	for _, v := range Verdicts() {
		for _, r := range ReasonsOf(v) {
			listed[string(v)+" "+string(r)] = true
		}
	}
	compare(t, "constants of verdict.go", bare(declared(t)), "the list of verdict.go", bare(listed))
	compare(t, "docs/verdicts.md", documented(t), "the list of verdict.go", listed)
	compare(t, "captures, hostile servers and fakes", produced(t), "the list of verdict.go", listed)
}

func compare(t *testing.T, aName string, a map[string]bool, bName string, b map[string]bool) {
	t.Helper()
	for _, pair := range []struct {
		in, notIn string
		have, all map[string]bool
	}{{aName, bName, b, a}, {bName, aName, a, b}} {
		var lost []string
		for w := range pair.all {
			if !pair.have[w] {
				lost = append(lost, w)
			}
		}
		sort.Strings(lost)
		if len(lost) > 0 {
			t.Errorf("in %s, but not in %s: %q", pair.in, pair.notIn, lost)
		}
	}
}

// bare leaves the reasons without their verdicts.
func bare(pairs map[string]bool) map[string]bool {
	all := map[string]bool{}
	for w := range pairs {
		all[w[strings.LastIndex(w, " ")+1:]] = true
	}
	return all
}

// declared are the constants of type Reason in verdict.go.
func declared(t *testing.T) map[string]bool {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "verdict.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		v, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		if id, ok := v.Type.(*ast.Ident); ok && id.Name == "Reason" {
			word, err := strconv.Unquote(v.Values[0].(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			all[word] = true
		}
		return true
	})
	return all
}

// documented are the rows of docs/verdicts.md, one table under each verdict.
func documented(t *testing.T) map[string]bool {
	t.Helper()
	data, err := os.ReadFile("../docs/verdicts.md")
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("^\\| `([a-z_]+)` \\| .+ \\| .+ \\| .+ \\|$")
	all, verdict := map[string]bool{}, ""
	for _, line := range strings.Split(string(data), "\n") {
		if h, ok := strings.CutPrefix(line, "## "); ok {
			verdict = h
		}
		m := row.FindStringSubmatch(line)
		if m == nil || verdict == "" {
			continue
		}
		if w := verdict + " " + m[1]; all[w] {
			t.Errorf("docs/verdicts.md: two rows for %s", w)
		} else {
			all[w] = true
		}
	}
	return all
}

// produced is what the tables of the other tests want, and those make sure to get.
func produced(t *testing.T) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	for _, c := range captures(t) {
		for _, e := range wants(t, c) {
			all[e.want[:strings.LastIndex(e.want, " ")]] = true
		}
	}
	for _, h := range slices.Concat(hostiles, stallers) {
		all[h.want] = true
	}
	for _, f := range fakes {
		all[f.want] = true
	}
	for w := range elsewhere {
		all[w] = true
	}
	return all
}

// A server that drains says so in the header of its answers, whatever they are.
func TestDrainHeader(t *testing.T) {
	tests := []struct {
		name, value string
		want        Reason
	}{
		{"it drains", "1", Draining},
		{"it does not", "0", OK},
		{"another word", "yes", OK},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				var q struct{ ID string }
				_ = json.NewDecoder(r.Body).Decode(&q)
				w.Header().Set(DrainHeader, tt.value)
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%q,"result":{"supportedVersions":["2026-07-28"],"capabilities":{}}}`, q.ID)
			}))
			defer s.Close()
			p, err := NewProber(Target{URL: s.URL + "/mcp"}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close(t.Context())
			if r := p.Probe(t.Context()); r.Reason != tt.want {
				t.Errorf("probe says %s (%s) %s, want %s", r.Verdict, r.Reason, r.Detail, tt.want)
			}
		})
	}
}

func TestDrainingSince(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	s := Snapshot{Reason: Draining, Since: at(1), Changes: []Change{{Reason: OK, At: at(1)}, {Reason: Slow, At: at(2)}, {Reason: Draining, At: at(3)}}}
	if got := s.DrainingSince(); got != at(3) {
		t.Errorf("DrainingSince = %v, want when the reason became draining, %v", got, at(3))
	}
	s.Reason = Slow
	if got := s.DrainingSince(); !got.IsZero() {
		t.Errorf("DrainingSince = %v of a server that does not drain", got)
	}
}
