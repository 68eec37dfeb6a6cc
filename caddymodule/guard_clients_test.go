package caddymodule

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// slowly opens a connection and sends no more than the beginning of a request.
func slowly(t *testing.T, e *edge, length int, beginning string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", e.addr)
	require.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	_, err = fmt.Fprintf(c, "POST /mcp HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n%s", e.addr, length, beginning)
	require.NoError(t, err)
	return c
}

// answerOn reads one answer.
func answerOn(t *testing.T, c net.Conn) reply {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(10*time.Second)))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	require.NoError(t, err)
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	return reply{resp.StatusCode, resp.Header, string(body)}
}

// The server's read_body is for the body alone: a call that is all here is held, and runs, for
// longer than that. Caddy 2.11.9 takes a lifted deadline for its own.
func TestReadBodyDoesNotEndAHeldCall(t *testing.T) {
	a := newServer(t, "a")
	a.on(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(time.Second)
		a.answer(w, r)
	})
	site := "request_body /set/* {\nset `" + callBody("3") + "`\n}\nuri strip_prefix /set\n" +
		"mcp_proxy " + a.addr + " {\nhold 2s\ncheck_interval 200ms\ncheck_fast 20ms\n}"
	e := newEdge(t, "", site)
	limited := strings.Replace(string(e.adapt("", site)), `"listen":`, `"read_timeout":"500ms","listen":`, 1)
	require.NoError(t, caddy.Load([]byte(limited), true))
	client.CloseIdleConnections()
	waitState(t, a.addr, mcphealth.Up)
	a.kill()
	waitState(t, a.addr, mcphealth.Down)
	got := make(chan reply, 3)
	go func() { got <- e.call("1") }()
	if !isCaddy210 { // to which JSON is a placeholder there
		go func() { got <- e.do(http.MethodPost, "/set/mcp", "{}") }()
	} else {
		go func() { got <- e.call("3") }()
	}
	go func() {
		call := callBody("2")
		c := slowly(t, e, len(call), call[:10])
		time.Sleep(200 * time.Millisecond)
		fmt.Fprint(c, call[10:])
		got <- answerOn(t, c)
	}()
	time.Sleep(1500 * time.Millisecond)
	a.revive()
	for range 3 {
		r := <-got
		assert.Equal(t, "a", r.servedBy(), "%d %s", r.status, r.body)
	}
}

// A server may refuse an upload from its first bytes on (413, 401). The client hears
// of it while it still sends.
func TestEarlyAnswerReachesASlowClient(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, _ = c.Read(make([]byte, 4096))
				io.WriteString(c, "HTTP/1.1 413 x\r\nContent-Length: 5\r\nConnection: close\r\n\r\nearly")
				c.(*net.TCPConn).CloseWrite()
				io.Copy(io.Discard, c)
			}()
		}
	}()
	e := newEdge(t, "", guarded("", ln.Addr().String()))
	c := slowly(t, e, 10_000_000, strings.Repeat("a", 3000))
	done := make(chan struct{})
	defer close(done)
	go func() {
		for tick := time.Tick(20 * time.Millisecond); ; {
			select {
			case <-done:
				return
			case <-tick:
				io.WriteString(c, "aaaa")
			}
		}
	}()
	r := answerOn(t, c)
	require.Equal(t, http.StatusRequestEntityTooLarge, r.status)
	require.Equal(t, "early", r.body)
}

// Clients that send their bodies slowly take neither the places nor the memory of
// those who have sent theirs.
func TestSlowClientsTakeNoPlaces(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(html)
	e := newEdge(t, "", guarded("hold 1m\nhold_max 2", a.addr))
	waitState(t, a.addr, mcphealth.Down)
	const slow = 10
	for range slow {
		slowly(t, e, maxHeldBody, "{")
	}
	eventually(t, func() bool { return heldBytes.Load() == slow*keptAtFirst }, "want what arrives to be reserved, not what is declared")
	answer := make(chan reply)
	go func() { answer <- e.call("1") }()
	eventually(t, func() bool { return groupOf(t).room.len() == 1 }, "the call is not held")
	a.onProbe(nil)
	require.Equal(t, "a", (<-answer).servedBy())
}

// The hold is over when it is over, whether the body is in or not.
func TestHoldEndsForSlowClients(t *testing.T) {
	e := newEdge(t, "", guarded("hold 200ms", freeAddr(t)))
	start := time.Now()
	for _, c := range []net.Conn{
		slowly(t, e, 100_000, `{"jsonrpc":"2.0","id":7,"method":"m",`),
		slowly(t, e, 100, `{"jsonrpc":"2.0","id":7,"method":"m",`),
	} {
		r := answerOn(t, c)
		require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
		require.Equal(t, "7", string(decodeOutage(t, r).ID))
	}
	require.Less(t, time.Since(start), 5*time.Second)
	require.Zero(t, heldBytes.Load())

	t.Run("h2c", func(t *testing.T) {
		h2c := &http.Client{Transport: &http.Transport{Protocols: protocols("h2c")}}
		defer h2c.CloseIdleConnections()
		body, w := io.Pipe()
		defer w.Close()
		go io.WriteString(w, `{"jsonrpc":"2.0","id":7,"method":"m",`)
		resp, err := h2c.Post(e.url+"/mcp", "application/json", body)
		require.NoError(t, err)
		defer resp.Body.Close()
		require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
		text, _ := io.ReadAll(resp.Body)
		require.Contains(t, string(text), `"id":7,`)
	})
}

// Whoever is refused at once hears so at once, with the id if that has arrived.
func TestSlowClientsAreRefusedPromptly(t *testing.T) {
	e := newEdge(t, "", guarded("hold 0", freeAddr(t)))
	for _, tt := range []struct{ beginning, id string }{
		{`{"jsonrpc":"2.0","id":7,"method":"m",`, `7`},
		{`{"jsonrpc":"2.0",`, `null`},
	} {
		start := time.Now()
		r := answerOn(t, slowly(t, e, 100_000, tt.beginning))
		require.Equal(t, http.StatusServiceUnavailable, r.status)
		require.Equal(t, tt.id, string(decodeOutage(t, r).ID))
		if tt.id != "null" {
			require.Less(t, time.Since(start), idWait, "waited for a body that nobody wants")
		}
		require.Less(t, time.Since(start), 5*time.Second)
	}
}

// A client that is still sending a body too large to be held gets its 503, and no reset
// connection, whatever it sends with, and whether it reads meanwhile or not.
func TestLargeBodiesGetTheirRefusal(t *testing.T) {
	e := newEdge(t, "", guarded("hold 10s", freeAddr(t)))
	for _, size := range []int{3 << 20, 7 << 20} {
		text := `{"jsonrpc":"2.0","id":7,"method":"m","params":"` + strings.Repeat("y", size) + `"}`
		dir := t.TempDir()
		file, answer := filepath.Join(dir, "body"), filepath.Join(dir, "answer")
		require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
		curl := func(more ...string) func() string {
			return func() string {
				args := append([]string{"-sS", "-o", answer, "-w", "%{http_code}", "--data-binary", "@" + file}, more...)
				out, err := exec.Command("curl", append(args, e.url+"/mcp")...).CombinedOutput()
				body, _ := os.ReadFile(answer)
				return fmt.Sprint(string(out), " ", strings.Contains(string(body), `"id":7,`), " ", err)
			}
		}
		golang := func(body func() io.Reader) func() string {
			return func() string {
				resp, err := client.Post(e.url+"/mcp", "application/json", body())
				if err != nil {
					return err.Error()
				}
				defer resp.Body.Close()
				body, err := io.ReadAll(resp.Body)
				return fmt.Sprint(resp.StatusCode, " ", strings.Contains(string(body), `"id":7,`), " ", err)
			}
		}
		for name, do := range map[string]func() string{
			"Go":                  golang(func() io.Reader { return strings.NewReader(text) }),
			"Go, chunked":         golang(func() io.Reader { return io.MultiReader(strings.NewReader(text)) }),
			"curl":                curl(),
			"curl, sends at once": curl("-H", "Expect:"),
			"curl, chunked":       curl("-H", "Expect:", "-H", "Transfer-Encoding: chunked"),
			"sends all, then reads": func() string {
				c, err := net.Dial("tcp", e.addr)
				if err != nil {
					return err.Error()
				}
				defer c.Close()
				if _, err := fmt.Fprintf(c, "POST /mcp HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n%s", e.addr, len(text), text); err != nil {
					return err.Error()
				}
				resp, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					return err.Error()
				}
				defer resp.Body.Close()
				body, err := io.ReadAll(resp.Body)
				return fmt.Sprint(resp.StatusCode, " ", strings.Contains(string(body), `"id":7,`), " ", err)
			},
		} {
			t.Run(fmt.Sprintf("%d MiB, %s", size>>20, name), func(t *testing.T) {
				if _, err := exec.LookPath("curl"); err != nil && strings.HasPrefix(name, "curl") {
					t.Skip(err)
				}
				for range 4 {
					assert.Equal(t, "503 true <nil>", do())
				}
			})
		}
	}
}

func TestReadIDReadsNoMoreThanItTakes(t *testing.T) {
	for beginning, known := range map[string]bool{
		``:                               false,
		`{`:                              false,
		`{"id":1`:                        false, // 12?
		`{"id":12,`:                      true,
		`{"id":"a`:                       false,
		`{"id":"a"`:                      true,
		`{"method":"m","params":{"id":1`: false,
		`[`:                              true, // a batch has none
		`hello`:                          true,
	} {
		assert.Equal(t, known, idIsIn([]byte(beginning)), beginning)
	}
	rest := strings.NewReader(strings.Repeat("x", 1<<20))
	b := &body{from: io.MultiReader(strings.NewReader(`{"id":"mine","params":"`), rest)}
	b.readID()
	require.Equal(t, `"mine"`, mustJSON(t, mcphealth.RequestID(b.first())))
	require.Equal(t, 1<<20, rest.Len(), "read on though the id was known")

	b = &body{from: iotest.OneByteReader(strings.NewReader(`{"params":"` + strings.Repeat("x", 2*mcphealth.MaxIDBody)))}
	b.readID()
	require.Equal(t, int64(mcphealth.MaxIDBody), b.total)
}

func mustJSON(t *testing.T, id mcphealth.ID) string {
	t.Helper()
	text := string(mcphealth.Unavailable(http.MethodPost, id, mcphealth.Refused, 0).Body)
	_, text, _ = strings.Cut(text, `"id":`)
	text, _, _ = strings.Cut(text, `,"error"`)
	return text
}

// A body that its client breaks is the client's fault: 400, and nobody looks after
// the upstream.
func TestBrokenBodiesAreTheClients(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", `request_body {
		max_size 10KB
	}
	mcp_guard
	reverse_proxy `+a.addr+` {
		lb_policy mcp_health {
			interval 1h
			watch off
		}
	}`)
	waitState(t, a.addr, mcphealth.Up)
	c, err := net.Dial("tcp", e.addr)
	require.NoError(t, err)
	defer c.Close()
	io.WriteString(c, "POST /mcp HTTP/1.1\r\nHost: "+e.addr+"\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"id\"\r\nzz\r\n")
	require.Equal(t, http.StatusBadRequest, answerOn(t, c).status)

	r := e.do(http.MethodPost, "/mcp", strings.Repeat(" ", 20_000))
	require.Equal(t, http.StatusRequestEntityTooLarge, r.status, "the limit's own answer")

	require.Equal(t, mcphealth.TierUp, checkers.list()[0].checker.Tier(), "the upstream is suspected")
	require.Equal(t, int64(1), a.probes.Load())
}

// What a proxy with request_buffers has read before it had an upstream is held as
// well.
func TestBufferedBodiesAreHeld(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(html)
	e := newEdge(t, "", `mcp_proxy `+a.addr+` {
		request_buffers 2MB
		check_fast 20ms
		hold 1m
	}`)
	waitState(t, a.addr, mcphealth.Down)
	body := `{"jsonrpc":"2.0","id":1,"method":"m","params":"` + strings.Repeat("x", 200_000) + `"}`
	answer := make(chan reply)
	go func() { answer <- e.do(http.MethodPost, "/mcp", body) }()
	eventually(t, func() bool { return groupOf(t).room.len() == 1 }, "the call is not held")
	a.onProbe(nil)
	r := <-answer
	require.Equal(t, "a", r.servedBy(), r.body)
	require.Contains(t, r.body, fmt.Sprintf(`"got":%d}`, len(body)))
	require.Equal(t, int32(1), buffering.Load())
}

// Where the upstreams live but the proxy itself takes none, the reason says why.
func TestReasonsOfTheProxysOwn(t *testing.T) {
	t.Run("all places taken", func(t *testing.T) {
		a := newServer(t, "a")
		began, end := make(chan struct{}), make(chan struct{})
		a.on(func(w http.ResponseWriter, r *http.Request) {
			close(began)
			<-end
			a.answer(w, r)
		})
		e := newEdge(t, "", `mcp_proxy `+a.addr+` {
			hold 0
			unhealthy_request_count 1
		}`)
		waitState(t, a.addr, mcphealth.Up)
		answer := make(chan reply)
		go func() { answer <- e.call("1") }()
		<-began
		require.Equal(t, "rate_limited", decodeOutage(t, e.call("2")).Error.Data.Reason)
		close(end)
		require.Equal(t, "a", (<-answer).servedBy())
	})
	t.Run("the proxy's own check", func(t *testing.T) {
		a := newServer(t, "a")
		e := newEdge(t, "", `mcp_proxy `+a.addr+` {
			hold 0
			health_uri /health
			health_interval 20ms
		}`)
		waitState(t, a.addr, mcphealth.Up)
		var r reply
		eventually(t, func() bool { r = e.call("1"); return r.status == http.StatusServiceUnavailable }, "health_uri has no effect")
		require.Equal(t, "health_down", decodeOutage(t, r).Error.Data.Reason)
	})
}

// Documents about the server are neither held nor answered by the guard: clients
// look for several and go on without.
func TestMetadataIsNotHeld(t *testing.T) {
	a := newServer(t, "a")
	a.on(http.NotFound)
	proxy := `mcp_proxy ` + a.addr + ` {
		hold 1m
		check_fast 20ms
	}`
	e := newEdge(t, "", "handle_path /.well-known/moved {\nrewrite * /meta\n"+proxy+"\n}\nhandle {\n"+proxy+"\n}")
	waitState(t, a.addr, mcphealth.Up)
	paths := []string{"/.well-known/oauth-protected-resource/mcp", "/mcp/.well-known/openid-configuration", "/.well-known/moved"}
	for _, path := range paths {
		require.Equal(t, http.StatusNotFound, e.do(http.MethodGet, path, "").status)
	}
	a.onProbe(html)
	checkers.list()[0].checker.Probe()
	waitState(t, a.addr, mcphealth.Down)
	for _, path := range paths {
		r := e.do(http.MethodGet, path, "")
		require.Equal(t, http.StatusServiceUnavailable, r.status)
		require.Empty(t, r.body)
		require.Empty(t, r.header.Get("X-Mcp-Health"))
	}
}

// Whose client left before the answer is no fault of the upstream.
func TestAClientThatLeavesCountsForNothing(t *testing.T) {
	a := newServer(t, "a")
	begun, over := make(chan struct{}), make(chan struct{})
	a.on(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		close(begun)
		<-r.Context().Done()
		close(over)
	})
	e := newEdge(t, "", guarded("hold 0", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	ctx, leave := context.WithCancel(t.Context())
	req := must(http.NewRequestWithContext(ctx, http.MethodPost, e.url+"/mcp", strings.NewReader(callBody("1"))))
	go func() { <-begun; leave() }()
	_, err := client.Do(req)
	require.ErrorIs(t, err, context.Canceled)
	<-over
	e.load("", "respond ok") // waits for the handlers
	require.Zero(t, entryOf(a.addr).account.requests.now())
}

// A call that a proxy without our policy has had an answer to has run, whatever stands in
// for the answer.
func TestGuardNeverRepeatsWhatOthersAnswered(t *testing.T) {
	var runs atomic.Int64
	a, m := newServer(t, "a"), newServer(t, "m")
	a.on(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		runs.Add(1)
		w.WriteHeader(http.StatusInternalServerError)
	})
	e := newEdge(t, "", "handle /api* {\nreverse_proxy "+a.addr+" {\n@bad status 5xx\nhandle_response @bad {\nreverse_proxy "+freeAddr(t)+"\n}\n}\n}\n"+
		"handle {\nreverse_proxy "+m.addr+" {\nlb_policy mcp_health\n}\n}\nmcp_guard {\nhold 300ms\n}")
	require.Equal(t, http.StatusBadGateway, e.do(http.MethodPost, "/api/pay", `{"amount":1}`).status)
	require.EqualValues(t, 1, runs.Load())
}
