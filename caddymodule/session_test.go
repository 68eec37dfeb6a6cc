package caddymodule

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// replica is a server that gives out sessions, and knows only its own.
type replica struct {
	*server
	mu       sync.Mutex
	sessions map[string]bool
	opened   int
	echoes   bool // says the session's id with each answer, as the TypeScript SDK does
	runs     atomic.Int64
}

func newReplica(t testing.TB, name string) *replica {
	r := &replica{server: newServer(t, name), sessions: map[string]bool{}}
	r.on(r.legacy)
	return r
}

// restart is what a deploy does: the same address, and no session is known.
func (r *replica) restart() {
	r.mu.Lock()
	r.sessions = map[string]bool{}
	r.mu.Unlock()
	r.revive()
}

const sessionNotFound = `{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found"},"id":null}`

func (r *replica) legacy(w http.ResponseWriter, req *http.Request) {
	id := req.Header.Get("Mcp-Session-Id")
	body, _ := io.ReadAll(req.Body)
	r.mu.Lock()
	known := r.sessions[id]
	if mcphealth.OpensSession(req.Method, body) {
		r.opened++
		id = fmt.Sprintf("%s.%d", r.name, r.opened) // ids may have dots
		r.sessions[id], known = true, true
		w.Header().Set("Mcp-Session-Id", id)
	}
	if known && req.Method == http.MethodDelete {
		delete(r.sessions, id)
	}
	r.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	switch {
	case !known:
		w.WriteHeader(http.StatusNotFound)
		io.WriteString(w, sessionNotFound)
	case req.Method == http.MethodDelete:
		w.WriteHeader(http.StatusNoContent)
	case req.Method == http.MethodGet:
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: %s\n\n", r.name)
	default:
		r.runs.Add(1)
		if r.echoes {
			w.Header().Set("Mcp-Session-Id", id)
		}
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":1,"result":{"served_by":%q}}`, r.name)
	}
}

const openBody = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25"}}`

// open opens a session and returns its id, as clients see it.
func (e *edge) open() string {
	e.t.Helper()
	r := e.post(openBody)
	require.Equal(e.t, http.StatusOK, r.status, r.body)
	id := r.header.Get("Mcp-Session-Id")
	require.NotEmpty(e.t, id)
	return id
}

// in makes a call in a session.
func (e *edge) in(session string) reply {
	e.t.Helper()
	return e.post(callBody("1"), "Mcp-Session-Id", session, "MCP-Protocol-Version", "2025-11-25")
}

// post posts, and once more if it met the end of a connection: a reload of Caddy resets
// those that it has not yet accepted.
func (e *edge) post(body string, header ...string) reply {
	e.t.Helper()
	if r, err := e.try(http.MethodPost, "/mcp", body, header...); err == nil {
		return r
	}
	return e.do(http.MethodPost, "/mcp", body, header...)
}

// openedBy is the name of the replica that opened the session.
func openedBy(session string) string { n, _, _ := strings.Cut(session, "."); return n }

const secret = "0123456789abcdef"

func sticky(more string, upstreams ...string) string {
	return guarded("sticky\nsession_key "+secret+"\n"+more, upstreams...)
}

// ended is what follows, with calls to /mcp in which the grace of an owner never ends,
// and calls to /over, of the same sessions, in which it has ended as it begins.
func ended(then string) string {
	guard := "mcp_guard %s {\nsticky\nsession_key " + secret + "\nhold 0\nsession_grace %s\n}\n"
	return "route {\n" + fmt.Sprintf(guard, "/mcp", "1h") + fmt.Sprintf(guard, "/over", "0") + "rewrite /over /mcp\n" + then + "\n}"
}

// over makes a call in a session when the grace is over; see ended.
func (e *edge) over(session string) reply {
	e.t.Helper()
	return e.do(http.MethodPost, "/over", callBody("1"), "Mcp-Session-Id", session, "MCP-Protocol-Version", "2025-11-25")
}

// openAt opens sessions until one is owned by the replica of this name.
func (e *edge) openAt(name string) string {
	e.t.Helper()
	for range 20 {
		if id := e.open(); openedBy(id) == name {
			return id
		}
	}
	e.t.Fatalf("no session on %s in 20 tries", name)
	return ""
}

func TestStickyFindsTheOwner(t *testing.T) {
	a, b, c := newReplica(t, "a"), newReplica(t, "b"), newReplica(t, "c")
	for name, site := range map[string]string{
		"mcp_guard": sticky("", a.addr, b.addr, c.addr),
		"mcp_proxy": "mcp_proxy " + a.addr + " " + b.addr + " " + c.addr + " {\nsticky\nsession_key " + secret + "\n}",
	} {
		t.Run(name, func(t *testing.T) {
			e := newEdge(t, "", site)
			owners := map[string]int{}
			for range 30 {
				id := e.open()
				owner := openedBy(id)
				owners[owner]++
				require.LessOrEqual(t, len(id), len("a.100")+24)
				for range 5 {
					r := e.in(id)
					require.Equal(t, owner, r.servedBy(), "status %d", r.status)
				}
				require.Contains(t, e.do(http.MethodGet, "/mcp", "", "Mcp-Session-Id", id).body, "data: "+owner)
				require.Equal(t, http.StatusNoContent, e.do(http.MethodDelete, "/mcp", "", "Mcp-Session-Id", id).status)
				r := e.in(id)
				require.Equal(t, http.StatusNotFound, r.status)
				require.Equal(t, sessionNotFound, r.body, "the owner's own 404 is passed on")
			}
			require.Len(t, owners, 3)
		})
	}
}

// A guard stands before what its reverse_proxy is wrapped in.
func TestStickyAroundBlocks(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	proxy := "reverse_proxy " + a.addr + " " + b.addr + " {\nlb_policy mcp_health\n}"
	for _, block := range []string{"handle", "handle /mcp*", "handle_path /nothing* {\n}\nhandle", "route"} {
		t.Run(block, func(t *testing.T) {
			e := newEdge(t, "", block+" {\n"+proxy+"\n}\nmcp_guard /mcp* {\nsticky\n}")
			id := e.open()
			for range 6 {
				r := e.in(id)
				require.Equal(t, openedBy(id), r.servedBy(), "status %d", r.status)
			}
		})
	}
}

// With sources whose lists are made anew for each request.
func TestStickyDynamic(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	for name, way := range dynamicWays {
		t.Run(name, func(t *testing.T) {
			list(a.addr, b.addr)
			e := newEdge(t, "", ended(fmt.Sprintf(way, "")))
			ids := []string{}
			for range 30 {
				ids = append(ids, e.open())
			}
			for range 3 {
				for _, id := range ids {
					r := e.in(id)
					require.Equal(t, openedBy(id), r.servedBy(), "status %d", r.status)
				}
			}
			id := e.openAt("a")
			list(b.addr) // the owner is gone from the list
			require.Equal(t, http.StatusServiceUnavailable, e.in(id).status)
			r := e.over(id)
			require.Equal(t, http.StatusNotFound, r.status, r.body)
			require.Equal(t, "route_absent", r.header.Get("X-Mcp-Health"))
			list(a.addr, b.addr)
			require.Equal(t, "a", e.in(id).servedBy())
		})
	}
}

// Servers that say the id with each answer must say it as the client knows it.
func TestStickyEchoesTheClientsID(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	a.echoes, b.echoes = true, true
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	id := e.open()
	require.Equal(t, id, e.in(id).header.Get("Mcp-Session-Id"))
	// one that was opened before the guard was sticky
	bare := id[:len(id)-24]
	eventually(t, func() bool { return e.in(bare).status == http.StatusOK }, "the bare id never met its owner")
	for range 4 {
		if r := e.in(bare); r.status == http.StatusOK {
			require.Equal(t, bare, r.header.Get("Mcp-Session-Id"))
		}
	}
}

// What is no tag of ours goes on as it is, wherever the policy sends it.
func TestStickyForgedTags(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	seen := make(chan string, 1)
	for _, r := range []*replica{a, b} {
		r.on(func(w http.ResponseWriter, r *http.Request) { seen <- r.Header.Get("Mcp-Session-Id") })
	}
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	foreign := mcphealth.NewSessionKey([]byte("another secret, of another edge"))
	mine := keyOf(secret)
	tag := mine.Tag("x", mine.Owner("tcp/"+a.addr))[1:]
	for _, id := range []string{
		"plain", "with.dots.in.it", "x." + strings.Repeat("A", 23), foreign.Tag("x", foreign.Owner("tcp/"+a.addr)),
		"y" + tag, strings.Repeat("z", 8000) + tag, "." + strings.Repeat("_", 23),
	} {
		e.in(id)
		require.Equal(t, id, <-seen)
	}
	e.in("x" + tag)
	require.Equal(t, "x", <-seen, "a tag of ours is taken off")
}

// Requests of the era without sessions go anywhere and are left as they are.
func TestStickyNeverPinsModernRequests(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	id := e.openAt("a")
	var at sync.Map
	for _, r := range []*replica{a, b} {
		r.on(func(w http.ResponseWriter, req *http.Request) {
			at.Store(r.name, req.Header.Get("Mcp-Session-Id"))
			w.Header().Set("Mcp-Session-Id", req.Header.Get("Mcp-Session-Id"))
		})
	}
	for range 4 {
		r := e.do(http.MethodPost, "/mcp", callBody("1"), "Mcp-Session-Id", id, "MCP-Protocol-Version", "2026-07-28")
		require.Equal(t, http.StatusOK, r.status)
	}
	for _, name := range []string{"a", "b"} {
		got, _ := at.Load(name)
		require.Equal(t, id, got, "at %s", name)
	}
}

// The key is the same after a reload, after a restart, and on another edge with the
// same storage.
func TestStickyKeyIsKept(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	store := storageDir(t)
	e := newEdge(t, "", "respond ok")
	load := func(more string) {
		text := fmt.Sprintf(globals, store, "") + "http://" + e.addr + " {\n" + guarded("sticky\n"+more, a.addr, b.addr) + "\n}\n"
		out, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(text), nil)
		require.NoError(t, err)
		require.NoError(t, caddy.Load(out, true))
		client.CloseIdleConnections() // a reload ends them; a POST on one is not repeated
	}
	load("")
	ids := []string{}
	for range 10 {
		ids = append(ids, e.open())
	}
	check := func(when string) {
		t.Helper()
		for _, id := range ids {
			require.Equal(t, openedBy(id), e.in(id).servedBy(), when)
		}
	}
	check("at first")
	load("hold 9s")
	check("after a reload")
	require.NoError(t, caddy.Stop())
	forgetAll(t)
	keys.Clear() // as a new process
	load("")
	check("after a restart")
}

// Edges that start at the same time agree on one key.
func TestStickyKeyRace(t *testing.T) {
	root := t.TempDir()
	storages := make([]storage, 8)
	for i := range storages {
		storages[i] = fileStorage(t, root)
	}
	got := make([]string, len(storages))
	var wg sync.WaitGroup
	for i, s := range storages {
		wg.Go(func() {
			var err error
			got[i], err = storedSecret(t.Context(), s)
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	for _, s := range got {
		require.Equal(t, got[0], s)
		require.GreaterOrEqual(t, len(s), minSecret)
	}
}

func TestStickyKeyErrors(t *testing.T) {
	t.Setenv("MCP_TEST_SHORT", "short")
	t.Setenv("MCP_TEST_KEY", "0123456789abcdef\n")
	for key, want := range map[string]string{
		"short": "5 bytes, want at least 16", "{env.MCP_TEST_SHORT}": "5 bytes", "{env.MCP_TEST_NONE}": "empty", "{nothing.like.it}": "unrecognized", "{env.MCP_TEST_KEY}": "",
	} {
		k, err := sessionKey(caddy.Context{}, key)
		if want == "" {
			require.NoError(t, err)
			require.Same(t, keyOf(secret), k, "white space at the end of a file is none of the key")
			continue
		}
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "session_key")
		_, err = sessionKeys(caddy.Context{}, secret, []string{key})
		require.ErrorContains(t, err, want)
		require.ErrorContains(t, err, "old_session_keys")
	}
}

// The owner comes back within the grace: the call waits for it, and nobody else gets
// it. What it says then is its own business.
func TestStickyWaitsForTheOwner(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	id := e.openAt("a")
	a.kill()
	answer := make(chan reply, 1)
	go func() { answer <- e.in(id) }()
	eventually(t, func() bool { return heldBytes.Load() > 0 }, "the call is not held")
	before := b.calls.Load()
	a.revive() // the same process, in effect: it knows its sessions
	require.Equal(t, "a", (<-answer).servedBy())
	require.Equal(t, before, b.calls.Load(), "another upstream got the call")

	a.kill()
	go func() { answer <- e.in(id) }()
	waitState(t, a.addr, mcphealth.Down)
	a.restart()
	r := <-answer
	require.Equal(t, http.StatusNotFound, r.status)
	require.Equal(t, sessionNotFound, r.body, "the recreated owner's 404 passes untouched")
	require.Empty(t, r.header.Get("X-Mcp-Health"))
}

func TestStickyOwnerIsGone(t *testing.T) {
	tests := []struct {
		name, options string
		alone         bool // nobody else is up
		want          int
	}{
		{name: "within the grace", options: "hold 50ms", want: 503},
		{name: "within the grace, without waiting", options: "hold 0", want: 503},
		{name: "grace over", options: "session_grace 100ms\nhold 5s", want: 404},
		{name: "grace over, without waiting", options: "session_grace 0\nhold 0", want: 404},
		{name: "nobody else is up", options: "session_grace 0\nhold 50ms", alone: true, want: 503},
		{name: "on_lost 503", options: "session_grace 0\nhold 50ms\non_lost 503", want: 503},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := newReplica(t, "a"), newReplica(t, "b")
			e := newEdge(t, "", sticky(tt.options, a.addr, b.addr))
			waitState(t, a.addr, mcphealth.Up)
			waitState(t, b.addr, mcphealth.Up)
			id := e.openAt("a")
			a.kill()
			waitState(t, a.addr, mcphealth.Down)
			if tt.alone {
				b.kill()
				waitState(t, b.addr, mcphealth.Down)
			}
			before, lost := b.calls.Load(), lostSessions.Load()
			for _, method := range []string{http.MethodPost, http.MethodGet, http.MethodDelete} {
				body, wantID := "", "null"
				if method == http.MethodPost {
					body, wantID = callBody(`"mine"`), `"mine"`
				}
				r := e.do(method, "/mcp", body, "Mcp-Session-Id", id)
				require.Equal(t, tt.want, r.status, r.body)
				o := decodeOutage(t, r)
				require.Equal(t, wantID, string(o.ID))
				require.Equal(t, tt.want, o.Error.Code)
				require.NotEmpty(t, o.Error.Data.Reason)
				require.Equal(t, o.Error.Data.Reason, r.header.Get("X-Mcp-Health"))
				require.Equal(t, tt.want == 503, r.header.Get("Retry-After") != "")
				require.NotContains(t, r.body, "127.0.0.1")
			}
			require.Equal(t, before, b.calls.Load(), "another upstream got a call of the session")
			if tt.want == 404 {
				require.Equal(t, lost+3, lostSessions.Load())
				require.Equal(t, int64(3), entryOf(a.addr).lost.Load())
				require.Equal(t, "b", openedBy(e.open()), "a new session opens at once")
			}
			if !tt.alone { // some clients keep the old id when they open a new session
				r := e.do(http.MethodPost, "/mcp", openBody, "Mcp-Session-Id", id)
				require.Equal(t, http.StatusOK, r.status, r.body)
				require.Equal(t, "b", openedBy(r.header.Get("Mcp-Session-Id")))
			}
		})
	}
}

// A held call is given up when the grace ends, not when the hold does.
func TestStickyHoldEndsWithTheGrace(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("session_grace 500ms\nhold 20s", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	id := e.openAt("a")
	a.kill()
	waitState(t, a.addr, mcphealth.Down)
	start := time.Now()
	r := e.in(id)
	require.Equal(t, http.StatusNotFound, r.status, r.body)
	require.Less(t, time.Since(start), 5*time.Second)
	require.Zero(t, heldBytes.Load())
}

// An owner that the configuration no longer names counts as down from the first
// request that misses it; named again, it is found again.
func TestStickyOwnerIsRemoved(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	others := missing.Len()
	e := newEdge(t, "", ended(balanced(a.addr, b.addr)))
	id := e.openAt("a")
	load := func(upstreams ...string) {
		e.load("", ended(balanced(upstreams...)))
		client.CloseIdleConnections() // a reload ends them; a POST on one is not repeated
	}
	load(b.addr)
	waitState(t, b.addr, mcphealth.Up)
	r := e.in(id)
	require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
	require.Equal(t, "route_absent", r.header.Get("X-Mcp-Health"))
	load(a.addr, b.addr)
	require.Equal(t, "a", e.in(id).servedBy())
	require.Equal(t, others, missing.Len())
	load(b.addr)
	require.Equal(t, http.StatusServiceUnavailable, e.in(id).status)
	r = e.over(id)
	require.Equal(t, http.StatusNotFound, r.status, r.body)
	require.Equal(t, "route_absent", r.header.Get("X-Mcp-Health"))
}

// Without health of ours behind it the guard does not know who answered. Whether it is
// there, only the routing of requests tells, if it is anywhere.
func TestStickyWithoutOurPolicy(t *testing.T) {
	a := newReplica(t, "a")
	e := newEdge(t, "", "mcp_guard {\nsticky\n}\nreverse_proxy /mcp "+a.addr+"\nmcp_proxy /other "+a.addr)
	id := e.open()
	require.Equal(t, "a.1", id)
	require.Equal(t, "a", e.in(id).servedBy())
}

// Where it is nowhere, sticky is refused before a session is lost by it: also by caddy
// validate, and wherever the guard stands.
func TestStickyNeedsThePolicy(t *testing.T) {
	validate := func(site string) error { return validate(t, "", site) }
	const guard = "mcp_guard {\nsticky\nsession_key 0123456789abcdef\n}\n"
	const picks = "reverse_proxy a:1 {\nlb_policy mcp_health\n}"
	require.ErrorContains(t, validate(guard+"reverse_proxy a:1 b:1"), errNobodyPicks.Error())
	require.ErrorContains(t, validate("handle /a* {\n"+guard+"reverse_proxy a:1 {\nlb_policy cookie\n}\n}\nmcp_guard /b*\n"), errNobodyPicks.Error())
	for _, good := range []string{
		guard + "reverse_proxy a:1 b:1 {\nlb_policy mcp_health\n}",
		guard + "reverse_proxy {\ndynamic mcp_health {\nsource a x 80\n}\n}",
		guard + "handle /a* {\nhandle /a/b* {\nreverse_proxy a:1 {\nlb_policy mcp_health\n}\n}\n}",
		"handle /0* {\nreverse_proxy a:1 {\nlb_policy mcp_health\n}\n}\nhandle {\n" + guard + "reverse_proxy b:1\n}",
		guard + "reverse_proxy b:1\nhandle_errors {\n" + picks + "\n}",
		guard + "reverse_proxy b:1 {\nhandle_response {\n" + picks + "\n}\n}",
		guard + "invoke x\n}\n&(x) {\n" + picks,
		"invoke x\n" + picks + "\n}\n&(x) {\n" + guard + "reverse_proxy b:1",
		guard + "reverse_proxy b:1\n}\nhttp://127.0.0.1:2 {\n" + picks,
		picks + "\n}\nhttp://127.0.0.1:2 {\n" + guard + "reverse_proxy b:1",
	} {
		require.NoError(t, validate(good), good)
	}
}

// Sessions of a killed owner are never run elsewhere, whatever the proxy would retry.
func TestStickyNeverRunsElsewhere(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("hold 2s", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	var ids []string
	for range 10 {
		ids = append(ids, e.openAt("a"))
	}
	before := b.runs.Load()
	var wg sync.WaitGroup
	var ok, bad atomic.Int64
	for _, id := range ids {
		wg.Go(func() {
			for range 10 {
				r, err := e.try(http.MethodPost, "/mcp", callBody("1"), "Mcp-Session-Id", id)
				if err == nil && r.servedBy() == "a" {
					ok.Add(1)
				} else if err != nil || r.status != http.StatusBadGateway {
					bad.Add(1)
					t.Errorf("%v %d %s", err, r.status, r.body)
				}
			}
		})
	}
	for range 3 {
		time.Sleep(30 * time.Millisecond)
		a.kill()
		time.Sleep(30 * time.Millisecond)
		a.revive()
	}
	wg.Wait()
	require.Equal(t, before, b.runs.Load())
	require.NotZero(t, ok.Load())
}

// A stream of a session passes as it comes, and ends with its owner.
func TestStickyStream(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	id := e.openAt("b")
	b.on(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: hello\n\n")
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	req, _ := http.NewRequest(http.MethodGet, e.url+"/mcp", nil)
	req.Header.Set("Mcp-Session-Id", id)
	resp, err := client.Do(req)
	require.NoError(t, err)
	defer resp.Body.Close()
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "data: hello\n", line)
}

func entryOf(addr string) *entry {
	for _, e := range checkers.list() {
		if e.upstream == addr {
			return e
		}
	}
	return nil
}

// The way of a pinned request through the policy allocates nothing; the guard makes
// the strings of one header.
func TestStickyAllocates(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	p, h := provisioned(t, `{"policy":"mcp_health","interval":"1h"}`, a.addr, b.addr)
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	g := &Guard{key: keyOf(secret), keys: []*mcphealth.SessionKey{keyOf(secret)}, drainTimeout: time.Hour}
	owner := g.key.Owner(ownerName(b.addr))
	id := g.key.Tag("9f86d081-884c-4d63-a3b5-1f0c5e1d2a3b", owner)
	r := request(t)
	r.Header.Set("Mcp-Session-Id", id)
	r.Header.Set("MCP-Protocol-Version", "2025-11-25")
	tr := &transit{ResponseWriterWrapper: caddyhttp.ResponseWriterWrapper{ResponseWriter: httptest.NewRecorder()}, req: r}
	n := testing.AllocsPerRun(1000, func() {
		r.Header[sessionField][0] = id
		tr.readTicket(g, r)
		if u := p.Select(h.Upstreams, r, tr); u == nil || u.Dial != b.addr {
			t.Fatal("not the owner")
		}
		tr.settle()
		tr.Header()[sessionField] = []string{tr.ticket.id}
		tr.stampTicket()
		tr.picked = pick{}
	})
	if n > 1 && !raceEnabled { // the slice that the test itself makes
		t.Errorf("a pinned request allocates %v times, want none", n-1)
	}
	n = testing.AllocsPerRun(1000, func() {
		tr.ticket = ticket{guard: g}
		p.Select(h.Upstreams, r, tr)
		tr.settle()
		tr.Header()[sessionField] = []string{"9f86d081-884c-4d63-a3b5-1f0c5e1d2a3b"}
		tr.stampTicket()
		tr.picked = pick{}
	})
	if n > 2 && !raceEnabled {
		t.Errorf("a new session allocates %v times, want once", n-1)
	}
}

// adminDo asks the admin API about the upstream.
func adminDo(t *testing.T, addr, action string) {
	t.Helper()
	status, body := admin(t, http.MethodPost, "/mcp_health/upstreams/"+entryOf(addr).id+"/"+action)
	require.Equal(t, http.StatusOK, status, body)
}

// An upstream that drains gets no new work while others can take it; its sessions go
// on, until the drain timeout.
func TestDrain(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	site := sticky("hold 0", a.addr, b.addr)
	e := newEdge(t, "", site)
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	id := e.openAt("a")
	adminDo(t, a.addr, "drain")
	check := func(when string) {
		t.Helper()
		for range 10 {
			require.Equal(t, "b", openedBy(e.open()), when)
		}
		require.Equal(t, "a", e.in(id).servedBy(), when)
	}
	check("drained")
	e.load("", strings.Replace(site, "200ms", "300ms", 1)) // another question
	client.CloseIdleConnections()
	waitState2(t, a.addr, mcphealth.Up)
	check("after a reload")
	b.kill()
	eventually(t, func() bool {
		r := e.do(http.MethodPost, "/mcp", openBody)
		return r.status == http.StatusOK && openedBy(r.header.Get("Mcp-Session-Id")) == "a"
	}, "nobody else can take it, and yet it gets nothing")
	b.revive()
	eventually(t, func() bool { return openedBy(e.open()) == "b" }, "b is not back")

	e.load("", sticky("hold 0\ndrain_timeout 1ms", a.addr, b.addr))
	client.CloseIdleConnections()
	r := e.in(id)
	require.Equal(t, http.StatusNotFound, r.status, r.body)
	require.Equal(t, "draining", r.header.Get("X-Mcp-Health"))

	b.kill()
	eventually(t, func() bool { return e.in(id).servedBy() == "a" }, "nobody else is there for its sessions")
	b.revive()
	eventually(t, func() bool { return e.in(id).status == http.StatusNotFound }, "b is not back")
	adminDo(t, a.addr, "resume")
	for _, entry := range checkers.list() {
		require.Zero(t, entry.drain.since.Load(), "one way to ask still drains")
	}
	require.Equal(t, "a", e.in(id).servedBy(), "resumed, the session is there again")
	require.Equal(t, "a", openedBy(e.openAt("a")))
}

// After a recovery new work ramps up; without slow_start it is there at once.
func TestSlowStart(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	for _, slow := range []string{"", "slow_start 1h"} {
		e := newEdge(t, "", "reverse_proxy "+a.addr+" "+b.addr+" {\nlb_policy mcp_health {\ninterval 100ms\nfast 10ms\n"+slow+"\n}\n}")
		waitState(t, a.addr, mcphealth.Up)
		waitState(t, b.addr, mcphealth.Up)
		share := func() int {
			n := 0
			for range 200 {
				if e.call("1").servedBy() == "a" {
					n++
				}
			}
			return n
		}
		if n := share(); n < 60 {
			t.Errorf("%q: %d of 200 before any outage, want about half", slow, n)
		}
		a.onProbe(html)
		waitState(t, a.addr, mcphealth.Down)
		a.onProbe(nil)
		waitState(t, a.addr, mcphealth.Up)
		early := share()
		if slow == "" && early < 60 || slow != "" && early > 50 {
			t.Errorf("%q: %d of 200 at once after the recovery", slow, early)
		}
		if slow != "" {
			back := &entryOf(a.addr).upAgain
			back.Store(back.Load() - int64(30*time.Minute))
			if n := share(); n < 20 || n > 85 {
				t.Errorf("%q: %d of 200 after half of the time, want about a quarter", slow, n)
			}
			back.Store(back.Load() - int64(30*time.Minute))
		}
		if n := share(); n < 60 {
			t.Errorf("%q: %d of 200 once the time is over", slow, n)
		}
		b.kill()
		waitState(t, b.addr, mcphealth.Down)
		a.onProbe(html)
		waitState(t, a.addr, mcphealth.Down)
		a.onProbe(nil)
		waitState(t, a.addr, mcphealth.Up)
		if n := share(); n != 200 {
			t.Errorf("%q: %d of 200 although nobody else is there", slow, n)
		}
		b.revive()
		require.NoError(t, caddy.Stop())
		forgetAll(t)
	}
}

// A server drains by its own word, in the header of its answers; clients do not see it.
func TestDrainByTheServer(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	site := strings.Replace(sticky("", a.addr, b.addr), "200ms", "1h", 1)
	e := newEdge(t, "", site)
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	id := e.openAt("a")
	drains := func(f http.HandlerFunc) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Mcp-Health-Drain", "1")
			f(w, r)
		}
	}
	a.on(drains(a.legacy))
	a.onProbe(drains(a.answer))
	r := e.in(id)
	require.Equal(t, "a", r.servedBy())
	require.Empty(t, r.header.Get("Mcp-Health-Drain"))
	s := waitState(t, a.addr, mcphealth.UpDegraded) // long before the next probe was due
	require.Equal(t, mcphealth.Draining, s.Reason)
	for range 10 {
		require.Equal(t, "b", openedBy(e.open()))
	}
	require.Equal(t, "a", e.in(id).servedBy())
	require.False(t, entryOf(a.addr).drainingSince().IsZero())
	a.on(a.legacy)
	a.onProbe(nil)
	entryOf(a.addr).checker.Probe()
	waitState(t, a.addr, mcphealth.Up)
	require.Equal(t, "a", openedBy(e.openAt("a")))
}

// waitState2 waits until one of the upstream's checkers in use says state.
func waitState2(t *testing.T, addr string, state mcphealth.State) {
	t.Helper()
	eventually(t, func() bool {
		for _, e := range checkers.list() {
			if e.upstream == addr && checkers.inUse(e) > 0 && e.checker.Snapshot().State == state {
				return true
			}
		}
		return false
	}, "upstream %s: no checker in use says %s", addr, state)
}

func fileStorage(t *testing.T, root string) storage {
	info, err := caddy.GetModule("caddy.storage.file_system")
	require.NoError(t, err)
	m := info.New()
	require.NoError(t, json.Unmarshal([]byte(`{"root":"`+root+`"}`), m))
	s, err := m.(caddy.StorageConverter).CertMagicStorage()
	require.NoError(t, err)
	return s
}

// A request of a session: the tag off, the owner chosen, the id in the answer.
func BenchmarkSticky(b *testing.B) {
	for _, n := range []int{2, 10} {
		var dials []string
		for i := range n {
			dials = append(dials, newServer(b, fmt.Sprint(i)).addr)
		}
		p, h := provisioned(b, `{"policy":"mcp_health","interval":"1h"}`, dials...)
		for _, d := range dials {
			waitState(b, d, mcphealth.Up)
		}
		g := &Guard{key: keyOf(secret), keys: []*mcphealth.SessionKey{keyOf(secret)}, drainTimeout: time.Hour}
		id := g.key.Tag("9f86d081-884c-4d63-a3b5-1f0c5e1d2a3b", g.key.Owner(ownerName(dials[n-1])))
		r := request(b)
		r.Header.Set("Mcp-Session-Id", id)
		tr := &transit{ResponseWriterWrapper: caddyhttp.ResponseWriterWrapper{ResponseWriter: httptest.NewRecorder()}, req: r}
		answer := []string{""}
		tr.Header()[sessionField] = answer
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				r.Header[sessionField][0] = id
				tr.readTicket(g, r)
				if u := p.Select(h.Upstreams, r, tr); u == nil {
					b.Fatal("none")
				}
				tr.settle()
				answer[0] = tr.ticket.id
				tr.stampTicket()
				tr.picked = pick{}
			}
		})
	}
}
