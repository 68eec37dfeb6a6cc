package caddymodule

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// naming has a replica give out this id, and answer 200 to whoever has it.
func (r *replica) naming(id string) {
	r.on(func(w http.ResponseWriter, req *http.Request) {
		body, _ := io.ReadAll(req.Body)
		switch {
		case mcphealth.OpensSession(req.Method, body):
			w.Header().Set("Mcp-Session-Id", id)
		case req.Header.Get("Mcp-Session-Id") != id:
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, sessionNotFound)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":1,"result":{"served_by":%q}}`, r.name)
	})
}

// Ids of all shapes lead back to their owner; what is no session id passes as it is.
func TestStickyIDsOfAllShapes(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	for name, id := range map[string]string{
		"one byte": "x", "a dot": ".", "dots": "..a..b..", "a comma": "a,b", "quotes": `"a"`, "4096 bytes": strings.Repeat("i", 4095),
		"base64": "YWJj+/==", "like a tag": "x." + strings.Repeat("A", 23), "percent": "%2e%0a", "a backslash": `a\b`,
	} {
		t.Run(name, func(t *testing.T) {
			for _, r := range []*replica{a, b} {
				r.naming(id + r.name)
			}
			owners := map[string]bool{}
			for range 6 {
				got := e.open()
				owner := got[len(id) : len(id)+1]
				owners[owner] = true
				require.Len(t, got, len(id)+1+24)
				for range 3 {
					require.Equal(t, owner, e.in(got).servedBy())
				}
			}
			require.Len(t, owners, 2)
		})
	}
	for name, id := range map[string]string{"not ASCII": "caf\u00e9", "a space": "a b", "5000 bytes": strings.Repeat("i", 5000)} {
		t.Run(name, func(t *testing.T) {
			a.naming(id)
			b.naming(id)
			require.Equal(t, id, e.open())
			require.Equal(t, http.StatusOK, e.in(id).status)
		})
	}
}

// A field given twice, as by a framework and the application on it.
func TestStickyFieldGivenTwice(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	for _, r := range []*replica{a, b} {
		r.on(func(w http.ResponseWriter, req *http.Request) {
			w.Header()["Mcp-Session-Id"] = []string{"twice-" + r.name, "twice-" + r.name}
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"jsonrpc":"2.0","id":1,"result":{"served_by":%q,"got":"%s"}}`, r.name, req.Header["Mcp-Session-Id"])
		})
	}
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	for range 4 {
		id := e.open()
		owner := strings.TrimPrefix(id, "twice-")[:1]
		for range 4 {
			req, _ := http.NewRequest(http.MethodPost, e.url+"/mcp", strings.NewReader(callBody("1")))
			req.Header["Mcp-Session-Id"] = []string{id, id}
			resp, err := client.Do(req)
			require.NoError(t, err)
			body, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			require.Contains(t, string(body), `"served_by":"`+owner+`","got":"[twice-`+owner+` twice-`+owner+`]"`)
			require.Equal(t, []string{id, id}, resp.Header["Mcp-Session-Id"])
		}
	}
}

// An id that is not looked at, as in a modern request, comes back as it went.
func TestStickyIDsDoNotGrow(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	id := e.openAt("a")
	for _, r := range []*replica{a, b} {
		r.on(func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Mcp-Session-Id", req.Header.Get("Mcp-Session-Id"))
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{}}`)
		})
	}
	r := e.do(http.MethodPost, "/mcp", callBody("1"), "Mcp-Session-Id", id, "MCP-Protocol-Version", "2026-07-28")
	require.Equal(t, id, r.header.Get("Mcp-Session-Id"))
}

// Spelled as HTTP/2 does, and in other ways.
func TestStickyFieldNames(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	id := e.openAt("b")
	for _, name := range []string{"mcp-session-id", "MCP-SESSION-ID", "Mcp-Session-ID"} {
		for range 4 {
			c, err := net.Dial("tcp", e.addr)
			require.NoError(t, err)
			body := callBody("1")
			fmt.Fprintf(c, "POST /mcp HTTP/1.1\r\nHost: %s\r\n%s:  %s \r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", e.addr, name, id, len(body), body)
			answer, err := io.ReadAll(c)
			require.NoError(t, err)
			require.Contains(t, string(answer), `"served_by":"b"`)
			c.Close()
		}
	}
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	h2 := &http.Client{Transport: &http.Transport{Protocols: p}}
	defer h2.CloseIdleConnections()
	for range 4 {
		req, _ := http.NewRequest(http.MethodPost, e.url+"/mcp", strings.NewReader(callBody("1")))
		req.Header.Set("Mcp-Session-Id", id)
		resp, err := h2.Do(req)
		require.NoError(t, err)
		answer, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		require.Equal(t, 2, resp.ProtoMajor)
		require.Contains(t, string(answer), `"served_by":"b"`)
	}
}

// A server may give a session another id, and refuse to end one.
func TestStickyServersOwnWays(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	for _, r := range []*replica{a, b} {
		n := 0
		r.on(func(w http.ResponseWriter, req *http.Request) {
			if req.Method == http.MethodDelete {
				w.Header().Set("Allow", "POST")
				w.WriteHeader(http.StatusMethodNotAllowed)
				return
			}
			if n++; n > 1 && req.Header.Get("Mcp-Session-Id") != fmt.Sprintf("%s.%d", r.name, n-1) {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			w.Header().Set("Mcp-Session-Id", fmt.Sprintf("%s.%d", r.name, n))
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"jsonrpc":"2.0","id":1,"result":{"served_by":%q}}`, r.name)
		})
	}
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	id := e.open()
	owner := openedBy(id)
	for range 5 {
		r := e.in(id)
		require.Equal(t, owner, r.servedBy())
		require.NotEqual(t, id, r.header.Get("Mcp-Session-Id"))
		id = r.header.Get("Mcp-Session-Id")
	}
	require.Equal(t, http.StatusMethodNotAllowed, e.do(http.MethodDelete, "/mcp", "", "Mcp-Session-Id", id).status)
	require.Equal(t, owner, e.in(id).servedBy())
}

// A stream that is open when the owner dies breaks off; what comes after it is for
// the owner, too.
func TestStickyStreamWhileTheOwnerDies(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("hold 50ms", a.addr, b.addr))
	id := e.openAt("a")
	a.on(func(w http.ResponseWriter, r *http.Request) {
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
	in := bufio.NewReader(resp.Body)
	line, err := in.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "data: hello\n", line)
	before := b.calls.Load()
	a.kill()
	_, err = io.ReadAll(in)
	require.Error(t, err, "the stream ended as if it were whole")
	waitState(t, a.addr, mcphealth.Down)
	r := e.do(http.MethodGet, "/mcp", "", "Mcp-Session-Id", id, "Last-Event-ID", "1")
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Equal(t, before, b.calls.Load())
	a.on(a.legacy)
	a.revive()
	require.Contains(t, e.do(http.MethodGet, "/mcp", "", "Mcp-Session-Id", id).body, "data: a")
}

// Upstreams by other kinds of addresses: one server under two names, placeholders,
// unix sockets.
func TestStickyAddresses(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	socket := func(name string) string {
		r := newReplica(t, name)
		path := filepath.Join(t.TempDir(), name+".sock")
		ln, err := net.Listen("unix", path)
		require.NoError(t, err)
		s := httptest.NewUnstartedServer(http.HandlerFunc(r.serve))
		s.Listener.Close()
		s.Listener = ln
		s.Start()
		t.Cleanup(s.Close)
		return "unix/" + path
	}
	t.Setenv("MCP_TEST_UPSTREAM", a.addr)
	_, portOfA, _ := net.SplitHostPort(a.addr)
	c, d := socket("c"), socket("d")
	for name, tt := range map[string]struct {
		upstreams []string
		owners    int
	}{
		"two names":       {[]string{a.addr, "localhost:" + portOfA, b.addr}, 2},
		"a placeholder":   {[]string{"{env.MCP_TEST_UPSTREAM}", b.addr}, 2},
		"unix sockets":    {[]string{c, d}, 2},
		"by the request":  {[]string{"{http.request.header.X-To}", b.addr}, 2},
		"the same, twice": {[]string{a.addr, a.addr, b.addr}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEdge(t, "", sticky("hold 0", tt.upstreams...))
			owners := map[string]bool{}
			for range 12 {
				r := e.do(http.MethodPost, "/mcp", openBody, "X-To", a.addr)
				require.Equal(t, http.StatusOK, r.status, r.body)
				id := r.header.Get("Mcp-Session-Id")
				owners[openedBy(id)] = true
				for range 4 {
					r := e.do(http.MethodPost, "/mcp", callBody("1"), "Mcp-Session-Id", id, "X-To", a.addr)
					require.Equal(t, openedBy(id), r.servedBy(), r.body)
				}
			}
			require.Len(t, owners, tt.owners)
		})
	}
	t.Run("unix sockets of a source", func(t *testing.T) {
		for _, way := range dynamicWays {
			list(c, d)
			e := newEdge(t, "", "mcp_guard {\nsticky\nhold 0\n}\n"+fmt.Sprintf(way, ""))
			for range 8 {
				id := e.open()
				for range 4 {
					require.Equal(t, openedBy(id), e.in(id).servedBy())
				}
			}
			require.NoError(t, caddy.Stop())
			forgetAll(t)
		}
	})
}

// Several guards around one proxy: the session finds its owner whichever of them is
// sticky, for a site may have one and mcp_proxy brings another.
func TestStickySeveralGuards(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	key := "sticky\nsession_key " + secret + "\n"
	for name, guards := range map[string][3]string{
		"the outer":               {key + "session_grace 0", "hold 0", "hold 0"},
		"the inner":               {"hold 0", key + "session_grace 0", "hold 0"},
		"both":                    {key, key + "session_grace 0\nhold 0", ""},
		"both, with other keys":   {"sticky\nsession_key another-secret-of-16-bytes", key + "session_grace 0\nhold 0", ""},
		"the outermost of three":  {key + "session_grace 0", "hold 0", "hold 0"},
		"both, in a loop of both": {key, key + "session_grace 0\nhold 0", key + "session_grace 0\nhold 0"},
	} {
		t.Run(name, func(t *testing.T) {
			site := "route {\n"
			for _, g := range guards {
				if g != "" {
					site += "mcp_guard {\n" + g + "\n}\n"
				}
			}
			_, proxy, _ := strings.Cut(guarded("", a.addr, b.addr), "reverse_proxy")
			e := newEdge(t, "", site+"reverse_proxy"+proxy+"\n}")
			waitState(t, a.addr, mcphealth.Up)
			waitState(t, b.addr, mcphealth.Up)
			for range 4 {
				id := e.open()
				require.LessOrEqual(t, len(id), len("a.1000")+24, "tagged twice")
				for range 4 {
					require.Equal(t, openedBy(id), e.in(id).servedBy())
				}
			}
			id := e.openAt("a")
			a.kill()
			waitState(t, a.addr, mcphealth.Down)
			require.Equal(t, http.StatusNotFound, e.in(id).status)
			a.revive()
			waitState(t, a.addr, mcphealth.Up)
			require.Equal(t, "a", e.in(id).servedBy())
		})
	}
}

// The tag of a session of another site with the same key: that session is not here,
// and the other site's sessions have nothing to do with it.
func TestStickyTagOfAnotherSite(t *testing.T) {
	a, b, c := newReplica(t, "a"), newReplica(t, "b"), newReplica(t, "c")
	list(a.addr, c.addr)
	e := newEdge(t, "", "handle /mcp {\nmcp_guard {\nsticky\nsession_key "+secret+"\nhold 0\n}\n"+fmt.Sprintf(dynamicWays["policy"], "")+"\n}\nhandle {\n"+sticky("hold 0", b.addr)+"\n}")
	id := e.openAt("a")
	before, gone := b.calls.Load(), missing.Len()
	r := e.do(http.MethodPost, "/other", callBody("1"), "Mcp-Session-Id", id)
	require.Equal(t, http.StatusNotFound, r.status, r.body)
	require.Equal(t, before, b.calls.Load())
	require.Equal(t, gone, missing.Len(), "another site uses up its grace")
	list(c.addr)
	require.Equal(t, http.StatusServiceUnavailable, e.in(id).status)
}

// An owner that the proxy itself takes for dead (health_uri, fail_duration) is gone as
// any other is: its sessions are not told to wait for ever.
func TestStickyOwnerTheProxyRefuses(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	for _, r := range []*replica{a, b} {
		r.on(func(w http.ResponseWriter, req *http.Request) {
			if req.URL.Path == "/healthz" {
				return
			}
			r.legacy(w, req)
		})
	}
	site := strings.Replace(sticky("hold 0\nsession_grace 400ms", a.addr, b.addr), "lb_retries 3", "lb_retries 3\nhealth_uri /healthz\nhealth_interval 20ms\nhealth_status 200", 1)
	e := newEdge(t, "", site)
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	id := e.openAt("a")
	a.on(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path == "/healthz" {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		a.legacy(w, req)
	})
	var r reply
	eventually(t, func() bool { r = e.in(id); return r.status != http.StatusOK }, "still there")
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Equal(t, "health_down", r.header.Get("X-Mcp-Health"))
	eventually(t, func() bool { r = e.in(id); return r.status == http.StatusNotFound }, "never lost: %v", &r)
	require.Equal(t, "health_down", r.header.Get("X-Mcp-Health"))
	a.on(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path != "/healthz" {
			a.legacy(w, req)
		}
	})
	eventually(t, func() bool { return e.in(id).servedBy() == "a" }, "never found again")
}

// refusing has replicas answer the proxy's own check, as the switch says.
func refusing(r *replica) *atomic.Bool {
	refuse := new(atomic.Bool)
	r.on(func(w http.ResponseWriter, req *http.Request) {
		switch {
		case req.URL.Path != "/healthz":
			r.legacy(w, req)
		case refuse.Load():
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})
	return refuse
}

const withHealth = "lb_retries 3\nhealth_uri /healthz\nhealth_interval 20ms\nhealth_status 200"

// Each absence of an owner has a grace of its own, though nobody of its sessions asked
// for it while it was there.
func TestStickyEachAbsenceHasItsGrace(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	with, without := ended(balanced(a.addr, b.addr)), ended(balanced(b.addr))
	refuse := refusing(a)
	refusing(b)
	checked, others := strings.Replace(with, "lb_retries 3", withHealth, 1), missing.Len()
	noted := func() bool {
		found := missing.Len() > others
		for _, g := range serving.Load().groups {
			g.each(func(m *member) { found = found || m.refused.Load() != nil })
		}
		return found
	}
	for name, way := range map[string]struct {
		site        string
		leave, back func(e *edge)
	}{
		"by reloads":    {with, func(e *edge) { e.load("", without) }, func(e *edge) { e.load("", with) }},
		"for the proxy": {checked, func(*edge) { refuse.Store(true) }, func(*edge) { refuse.Store(false) }},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEdge(t, "", way.site)
			id := e.openAt("a")
			for range 2 {
				way.leave(e)
				eventually(t, func() bool { // by others first: a call in the session would show that it is there
					owners := ""
					for range 10 {
						owners += openedBy(e.open())
					}
					return !strings.Contains(owners, "a")
				}, "still there")
				require.Equal(t, http.StatusServiceUnavailable, e.in(id).status)
				require.Equal(t, http.StatusNotFound, e.over(id).status)
				require.True(t, noted())
				way.back(e)
				eventually(t, func() bool { return openedBy(e.open()) == "a" }, "never back")
				eventually(t, func() bool { return !noted() }, "the next absence would be taken for this one")
			}
			eventually(t, func() bool { return e.in(id).servedBy() == "a" }, "never found again")
		})
	}
}

// That one proxy does not want an owner is not over because another one has it.
func TestStickyOwnerThatOneProxyRefuses(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	refuse := refusing(a)
	refusing(b)
	one := sticky("hold 0\nsession_grace 400ms", a.addr, b.addr)
	e := newEdge(t, "", "handle_path /two {\nrewrite * /mcp\n"+one+"\n}\nhandle {\n"+strings.Replace(one, "lb_retries 3", withHealth, 1)+"\n}")
	id := e.openAt("a")
	refuse.Store(true)
	var r reply
	eventually(t, func() bool {
		e.do(http.MethodPost, "/two", callBody("1"), "Mcp-Session-Id", id, "MCP-Protocol-Version", "2025-11-25")
		r = e.in(id)
		return r.status == http.StatusNotFound
	}, "never lost: %v", &r)
	require.Equal(t, "health_down", r.header.Get("X-Mcp-Health"))
}

// A call that is held for an owner which is back with the next configuration is sent to
// ask there: nobody says that its session is lost.
func TestStickyOwnerIsBackInTheNextConfiguration(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	with := sticky("hold 10m\nsession_grace 10m", a.addr, b.addr)
	e := newEdge(t, "", with)
	id := e.openAt("a")
	e.load("", sticky("hold 10m\nsession_grace 10m", b.addr))
	held, before := make(chan reply, 1), missing.Len()
	go func() { held <- e.in(id) }()
	eventually(t, func() bool { return missing.Len() > before }, "the owner is not missed")
	e.load("", with)
	eventually(t, func() bool { return len(held) > 0 }, "nobody sends it there")
	r := <-held
	require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
	require.Equal(t, "1", r.header.Get("Retry-After"))
	require.Equal(t, "a", e.in(id).servedBy())
}

// Calls that meet the death of their owner, before anybody knows of it, are given up
// when the grace ends, too.
func TestStickyGraceOfTheFirstToKnow(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	site := strings.Replace(sticky("session_grace 300ms\nhold 20s", a.addr, b.addr), "lb_retries 3", "", 1)
	e := newEdge(t, "", site)
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	id := e.openAt("a")
	a.kill()
	start := time.Now()
	r := e.in(id)
	require.Equal(t, http.StatusNotFound, r.status, r.body)
	require.Less(t, time.Since(start), 8*time.Second)
	require.Zero(t, heldBytes.Load())
}

// A call whose body is too large to hold.
func TestStickyLargeBodies(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", ended(balanced(a.addr, b.addr)))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	id := e.openAt("a")
	big := `{"jsonrpc":"2.0","id":"far","method":"tools/call","params":{"pad":"` + strings.Repeat("x", 3<<20) + `"}}`
	require.Equal(t, "a", e.do(http.MethodPost, "/mcp", big, "Mcp-Session-Id", id).servedBy())
	a.kill()
	waitState(t, a.addr, mcphealth.Down)
	before := b.calls.Load()
	r := e.do(http.MethodPost, "/mcp", big, "Mcp-Session-Id", id)
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.Equal(t, `"far"`, string(decodeOutage(t, r).ID))
	r = e.do(http.MethodPost, "/over", big, "Mcp-Session-Id", id)
	require.Equal(t, http.StatusNotFound, r.status)
	require.Equal(t, `"far"`, string(decodeOutage(t, r).ID))
	require.Equal(t, before, b.calls.Load())
	require.Zero(t, heldBytes.Load())
}

// What else may stand around the guard and in the proxy.
func TestStickyAmongOtherHandlers(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	a.echoes, b.echoes = true, true
	inProxy := func(more string) string {
		return strings.Replace(sticky("", a.addr, b.addr), "lb_retries 3", "lb_retries 3\n"+more, 1)
	}
	for name, site := range map[string]string{
		"encode":          "encode gzip\n" + inProxy(""),
		"rewrite":         inProxy("rewrite /mcp?x=1"),
		"handle_response": inProxy("@ok status 200\nhandle_response @ok {\ncopy_response\n}"),
		"headers":         inProxy("header_down -Server\nheader_up X-A b"),
		"intercept":       "intercept {\n@gone status 404\nhandle_response @gone {\nrespond gone 410\n}\n}\n" + inProxy(""),
		"buffers":         inProxy("request_buffers 64KiB\nresponse_buffers 64KiB"),
		"lb_retry_match":  inProxy("lb_retry_match method GET"),
		"try_duration":    inProxy("lb_try_duration 300ms"),
		"forward_auth":    "forward_auth " + b.addr + " {\nuri /auth\n}\n" + inProxy(""),
	} {
		t.Run(name, func(t *testing.T) {
			for _, r := range []*replica{a, b} {
				r.on(func(w http.ResponseWriter, req *http.Request) {
					if req.URL.Path != "/auth" {
						r.legacy(w, req)
					}
				})
			}
			e := newEdge(t, "", site)
			for range 4 {
				id := e.open()
				for range 4 {
					r := e.in(id)
					require.Equal(t, openedBy(id), r.servedBy(), "%d %s", r.status, r.body)
					require.Equal(t, id, r.header.Get("Mcp-Session-Id"))
				}
				require.Contains(t, e.do(http.MethodGet, "/mcp", "", "Mcp-Session-Id", id).body, "data: "+openedBy(id))
			}
		})
	}
}

// A request that the site's error handling takes is as it came.
func TestStickyErrorRoutesSeeTheClientsID(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", "route {\nmcp_guard {\nsticky\nsession_key "+secret+"\n}\nerror 418\n}\nhandle_errors {\nroute {\n"+sticky("", a.addr, b.addr)+"\n}\n}")
	key := keyOf(secret)
	b.sessions["mine"] = true
	id := key.Tag("mine", key.Owner("tcp/"+b.addr))
	for range 4 {
		require.Equal(t, "b", e.in(id).servedBy())
	}
}

// A connection to the owner that turns out dead says nothing about the call: it is
// sent again, to the owner, whichever way the upstreams come.
func TestStickyDeadConnections(t *testing.T) {
	for name, way := range dynamicWays {
		t.Run(name, func(t *testing.T) {
			a, b := newReplica(t, "a"), newReplica(t, "b")
			list(a.addr, b.addr)
			e := newEdge(t, "", "mcp_guard {\nsticky\nhold 0\n}\n"+fmt.Sprintf(way, ""))
			waitState(t, a.addr, mcphealth.Up)
			waitState(t, b.addr, mcphealth.Up)
			id := e.openAt("a")
			for range 30 {
				require.Equal(t, "a", e.in(id).servedBy())
				a.http.CloseClientConnections()
				r := e.in(id)
				require.Equal(t, "a", r.servedBy(), "%d %s", r.status, r.body)
			}
		})
	}
}

// Draining, in its corners.
func TestDrainCorners(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("hold 0\nsession_grace 200ms", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	onA, onB := e.openAt("a"), e.openAt("b")
	adminDo(t, a.addr, "drain")
	adminDo(t, b.addr, "drain")
	for range 4 { // all drain: somebody has to
		require.NotEmpty(t, e.open())
	}
	require.Equal(t, "a", e.in(onA).servedBy())
	require.Equal(t, "b", e.in(onB).servedBy())
	adminDo(t, b.addr, "resume")
	for range 8 {
		require.Equal(t, "b", openedBy(e.open()))
		r := e.do(http.MethodPost, "/mcp", callBody("1"), "MCP-Protocol-Version", "2026-07-28")
		require.Equal(t, http.StatusNotFound, r.status)
	}
	require.Equal(t, "a", e.in(onA).servedBy())
	a.kill() // an owner that drains, and then is gone
	waitState(t, a.addr, mcphealth.Down)
	require.Equal(t, http.StatusServiceUnavailable, e.in(onA).status)
	eventually(t, func() bool { return e.in(onA).status == http.StatusNotFound }, "never lost")
	a.restart()
	waitState(t, a.addr, mcphealth.Up)
	for range 8 {
		require.Equal(t, "b", openedBy(e.open()), "the admin has not said resume")
	}
}

// A server drains by its health document.
func TestDrainByTheHealthDocument(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	document := `{"status":"healthy"}`
	health := func(r *replica, document *string) {
		r.onProbe(func(w http.ResponseWriter, req *http.Request) {
			if req.URL.Path == "/health" {
				io.WriteString(w, *document)
				return
			}
			r.answer(w, req)
		})
	}
	healthy := document
	health(b, &healthy)
	health(a, &document)
	e := newEdge(t, "", strings.Replace(sticky("", a.addr, b.addr), "interval 200ms", "interval 100ms\nhealth_path /health", 1))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	id := e.openAt("a")
	drain := `{"status":"draining"}`
	health(a, &drain)
	require.Equal(t, mcphealth.Draining, waitState(t, a.addr, mcphealth.UpDegraded).Reason)
	for range 8 {
		require.Equal(t, "b", openedBy(e.open()))
		require.Equal(t, "a", e.in(id).servedBy())
	}
	health(a, &healthy)
	waitState(t, a.addr, mcphealth.Up)
	require.Equal(t, "a", openedBy(e.openAt("a")))
}

// Who repeats the opening of a session that met an outage gets one session each time,
// wherever there is somebody to open it.
func TestStickyOpensElsewhere(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	e := newEdge(t, "", sticky("", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	for range 5 {
		b.kill()
		require.Equal(t, "a", openedBy(e.open()))
		b.revive()
		a.kill()
		require.Equal(t, "b", openedBy(e.open()))
		a.revive()
	}
	batch := e.do(http.MethodPost, "/mcp", "["+openBody+"]")
	require.Equal(t, http.StatusNotFound, batch.status, "the server's own answer")
	require.Equal(t, sessionNotFound, batch.body)
}

// A new key beside the one of before ends no session: the tags that clients have are
// still read, new ones are the new key's.
func TestStickyNewKey(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	a.echoes, b.echoes = true, true
	const next = "fedcba9876543210"
	with := func(keys string) string { return guarded("sticky\nsession_key "+keys, a.addr, b.addr) }
	e := newEdge(t, "", with(secret))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	old := []string{e.openAt("a"), e.openAt("b")}
	e.load("", with(next+"\nold_session_keys "+secret))
	young := []string{e.openAt("a"), e.openAt("b")}
	check := func(ids []string) {
		t.Helper()
		for range 4 {
			for _, id := range ids {
				r := e.in(id)
				require.Equal(t, openedBy(id), r.servedBy(), "%d %s", r.status, r.body)
				require.Equal(t, id, r.header.Get("Mcp-Session-Id"))
			}
		}
	}
	check(append(old, young...))
	a.kill()
	waitState(t, a.addr, mcphealth.Down)
	a.revive()
	waitState(t, a.addr, mcphealth.Up)
	check(append(old, young...))
	e.load("", with(next))
	check(young)
	r := e.in(old[0])
	require.Equal(t, http.StatusNotFound, r.status)
	require.Equal(t, sessionNotFound, r.body, "a foreign tag goes on as it is")
}

// That another proxy lists an owner which a source has dropped does not keep its sessions.
func TestStickyOwnerDroppedByASource(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	list(a.addr, b.addr)
	const policy = "lb_policy mcp_health {\ninterval 100ms\nfast 20ms\nfallback round_robin\n}\n}\n"
	e := newEdge(t, "", "handle /other* {\nreverse_proxy "+a.addr+" {\n"+policy+"}\n"+
		"handle {\nmcp_guard {\nsticky\nsession_key "+secret+"\nhold 0\nsession_grace 400ms\n}\nreverse_proxy {\ndynamic test\n"+policy+"}")
	id := e.openAt("a")
	list(b.addr)
	var r reply
	eventually(t, func() bool { r = e.in(id); return r.status == http.StatusNotFound }, "never lost: %v", &r)
}

// A configuration that does not start brings nobody back.
func TestStickyOwnerMissingOverFailedReloads(t *testing.T) {
	a, b := newReplica(t, "a"), newReplica(t, "b")
	taken := must(net.Listen("tcp", "127.0.0.1:0"))
	t.Cleanup(func() { taken.Close() })
	with := sticky("hold 0\nsession_grace 400ms", a.addr, b.addr)
	e := newEdge(t, "", with)
	id := e.openAt("a")
	e.load("", sticky("hold 0\nsession_grace 400ms", b.addr))
	since := time.Now()
	require.Equal(t, http.StatusServiceUnavailable, e.in(id).status)
	bad := e.adapt("", with+"\n}\nhttp://"+taken.Addr().String()+" {\nrespond ok")
	for time.Since(since) < 400*time.Millisecond {
		require.Error(t, caddy.Load(bad, true))
	}
	require.Equal(t, http.StatusNotFound, e.in(id).status)
}
