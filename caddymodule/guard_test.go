package caddymodule

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// guarded is a site with a guard in front of these upstreams, fast enough for
// tests.
func guarded(guard string, upstreams ...string) string {
	return "mcp_guard {\n" + guard + "\n}\n" + balanced(upstreams...)
}

// balanced is a proxy that soon knows what becomes of its upstreams.
func balanced(upstreams ...string) string {
	return `reverse_proxy ` + strings.Join(upstreams, " ") + ` {
		lb_policy mcp_health {
			interval 200ms
			fast     20ms
			fallback round_robin
		}
		lb_retries 3
		lb_try_interval 5ms
	}`
}

// outage is the body of design.md §4.
type outage struct {
	JSONRPC string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id"`
	Error   struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
		Data    struct {
			Reason       string `json:"reason"`
			RetryAfterMs int    `json:"retryAfterMs"`
			MayHaveRun   bool   `json:"mayHaveRun"`
		} `json:"data"`
	} `json:"error"`
}

func decodeOutage(t *testing.T, r reply) outage {
	t.Helper()
	var o outage
	require.NoError(t, json.Unmarshal([]byte(r.body), &o), "body: %q", r.body)
	require.Equal(t, "application/json", r.header.Get("Content-Type"))
	require.Equal(t, "no-store", r.header.Get("Cache-Control"))
	return o
}

func TestGuardAnswersWithTheCallersID(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", guarded("hold 0", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	a.kill()

	big := `{"jsonrpc":"2.0","id":"far","method":"tools/call","params":{"pad":"` + strings.Repeat("x", 3<<20) + `"}}`
	tests := []struct {
		name, method, body string
		wantID             string // as JSON; "" = none
	}{
		{"number", http.MethodPost, callBody(`7`), `7`},
		{"string", http.MethodPost, callBody(`"a-1"`), `"a-1"`},
		{"large number keeps its digits", http.MethodPost, callBody(`12345678901234567890`), `12345678901234567890`},
		{"id after the parameters", http.MethodPost, `{"jsonrpc":"2.0","method":"tools/call","params":{"id":3},"id":9}`, `9`},
		{"notification", http.MethodPost, `{"jsonrpc":"2.0","method":"notifications/cancelled"}`, ``},
		{"batch", http.MethodPost, `[{"jsonrpc":"2.0","id":1,"method":"ping"}]`, `null`},
		{"no JSON", http.MethodPost, `hello`, `null`},
		{"a body far larger than what is read", http.MethodPost, big, `"far"`},
		{"GET", http.MethodGet, ``, `null`},
		{"DELETE", http.MethodDelete, ``, `null`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := e.do(tt.method, "/mcp", tt.body)
			require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
			o := decodeOutage(t, r)
			assert.Equal(t, tt.wantID, string(o.ID))
			assert.Equal(t, "2.0", o.JSONRPC)
			assert.Equal(t, 503, o.Error.Code)
			assert.Equal(t, "refused", o.Error.Data.Reason)
			assert.Equal(t, "refused", r.header.Get("X-Mcp-Health"))
			secs, err := strconv.Atoi(r.header.Get("Retry-After"))
			require.NoError(t, err)
			assert.GreaterOrEqual(t, secs, 1)
			assert.Equal(t, secs*1000, o.Error.Data.RetryAfterMs)
			assert.NotContains(t, r.body, "127.0.0.1", "an upstream's address shows")
		})
	}
	r := e.do(http.MethodHead, "/mcp", "")
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.NotEmpty(t, r.header.Get("Retry-After"))
}

func TestGuardRetryAfterIsAtLeastTheConfigured(t *testing.T) {
	e := newEdge(t, "", guarded("hold 0\nretry_after 7s", freeAddr(t)))
	require.Equal(t, "7", e.call("1").header.Get("Retry-After"))
}

func TestGuardPassesTheBackendsAnswersUntouched(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	for _, status := range []int{200, 202, 400, 401, 403, 404, 405, 429, 500, 502, 503, 504} {
		body := fmt.Sprintf(`{"jsonrpc":"2.0","id":1,"error":{"code":-32001,"message":"session not found %d"}}`, status)
		a.on(func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "application/json; charset=utf-8")
			w.Header().Set("WWW-Authenticate", "Bearer")
			w.WriteHeader(status)
			io.WriteString(w, body)
		})
		r := e.call("1")
		require.Equal(t, status, r.status)
		require.Equal(t, body, r.body)
		require.Equal(t, "application/json; charset=utf-8", r.header.Get("Content-Type"))
		require.Equal(t, "Bearer", r.header.Get("WWW-Authenticate"))
		require.Empty(t, r.header.Get("X-Mcp-Health"))
	}
}

func TestGuardHoldsUntilTheUpstreamIsBack(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	a.kill()
	waitState(t, a.addr, mcphealth.Down)

	body := `{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"pad":"` + strings.Repeat("0123456789", 70_000) + `"}}`
	var got string
	a.on(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got = string(b)
		assert.Equal(t, int64(len(body)), r.ContentLength)
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"jsonrpc":"2.0","id":5,"result":{"served_by":"a"}}`)
	})
	answer := make(chan reply)
	go func() { answer <- e.do(http.MethodPost, "/mcp", body) }()
	eventually(t, func() bool { return heldBytes.Load() > 0 }, "the call is not held")
	a.revive()
	r := <-answer
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Equal(t, "a", r.servedBy())
	require.Equal(t, body, got, "the body changed on the way")
	require.Equal(t, int64(1), a.calls.Load())
	require.Zero(t, heldBytes.Load(), "held bytes were not given back")
}

func TestGuardHoldsChunkedBodies(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Up)
	a.kill()
	waitState(t, a.addr, mcphealth.Down)
	got := make(chan string, 1)
	a.on(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got <- string(b) + r.Trailer.Get("X-Sum")
	})
	body := strings.Repeat("abcdefgh", 20_000)
	pr, pw := io.Pipe()
	req, err := http.NewRequest(http.MethodPost, e.url+"/mcp", pr)
	require.NoError(t, err)
	req.Trailer = http.Header{"X-Sum": nil}
	go func() {
		io.WriteString(pw, body)
		req.Trailer.Set("X-Sum", "42")
		pw.Close()
	}()
	done := make(chan error, 1)
	go func() {
		resp, err := client.Do(req)
		if err == nil {
			resp.Body.Close()
		}
		done <- err
	}()
	eventually(t, func() bool { return heldBytes.Load() >= int64(len(body)) }, "the call is not held")
	a.revive()
	require.NoError(t, <-done)
	require.Equal(t, body+"42", <-got)
}

func TestGuardHoldEnds(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(html)
	e := newEdge(t, "", guarded("hold 150ms", a.addr))
	waitState(t, a.addr, mcphealth.Down)
	start := time.Now()
	r := e.call(`"x"`)
	took := time.Since(start)
	require.Equal(t, http.StatusServiceUnavailable, r.status)
	require.GreaterOrEqual(t, took, 150*time.Millisecond)
	require.Less(t, took, 5*time.Second)
	o := decodeOutage(t, r)
	require.Equal(t, `"x"`, string(o.ID))
	require.Equal(t, "not_mcp", o.Error.Data.Reason)
	require.Zero(t, a.calls.Load())
	require.Zero(t, heldBytes.Load())
}

func TestGuardHoldsAtMost(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(html)
	e := newEdge(t, "", guarded("hold 1m\nhold_max 2", a.addr))
	waitState(t, a.addr, mcphealth.Down)
	var wg sync.WaitGroup
	for i := range 2 {
		wg.Go(func() { assert.Equal(t, "a", e.call(strconv.Itoa(i)).servedBy()) })
	}
	eventually(t, func() bool { return heldBytes.Load() >= int64(2*len(callBody("0"))) }, "two calls are not held")
	start := time.Now()
	require.Equal(t, http.StatusServiceUnavailable, e.call("3").status)
	require.Less(t, time.Since(start), 10*time.Second)
	a.onProbe(nil)
	wg.Wait()
}

func TestGuardDoesNotHoldHugeBodies(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(html)
	e := newEdge(t, "", guarded("hold 1m", a.addr))
	waitState(t, a.addr, mcphealth.Down)
	for _, length := range []bool{true, false} {
		text := `{"jsonrpc":"2.0","id":77,"method":"m","params":"` + strings.Repeat("y", 2<<20) + `"}`
		var body io.Reader = strings.NewReader(text)
		if !length {
			body = io.MultiReader(body)
		}
		req, err := http.NewRequest(http.MethodPost, e.url+"/mcp", body)
		require.NoError(t, err)
		resp, err := client.Do(req)
		require.NoError(t, err)
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		require.Equal(t, http.StatusServiceUnavailable, resp.StatusCode)
		require.Contains(t, string(b), `"id":77,`)
		require.Zero(t, heldBytes.Load())
	}
}

func TestGuardClientLeaves(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", guarded("hold 1m", a.addr))
	waitState(t, a.addr, mcphealth.Up)

	t.Run("while its call runs", func(t *testing.T) {
		began := make(chan struct{})
		a.on(func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			close(began)
			<-r.Context().Done()
		})
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+"/mcp", strings.NewReader(callBody("1")))
		require.NoError(t, err)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, err := client.Do(req)
			assert.ErrorIs(t, err, context.Canceled)
		}()
		<-began
		cancel()
		<-done
		a.on(nil)
		require.Equal(t, "a", e.call("2").servedBy())
		require.Equal(t, mcphealth.Up, snapshots(a.addr)[0].State)
	})

	t.Run("while it is held", func(t *testing.T) {
		a.onProbe(html)
		waitState(t, a.addr, mcphealth.Down)
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, e.url+"/mcp", strings.NewReader(callBody("1")))
		require.NoError(t, err)
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, err := client.Do(req)
			assert.ErrorIs(t, err, context.Canceled)
		}()
		eventually(t, func() bool { return heldBytes.Load() > 0 }, "the call is not held")
		cancel()
		<-done
		eventually(t, func() bool { return heldBytes.Load() == 0 }, "the hold goes on without its client")
	})
}

// A server that took the call and then died may have executed it.
func TestGuardNeverRepeatsWhatMayHaveRun(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	log := filepath.Join(t.TempDir(), "log")
	e := newEdge(t, "log calls {\noutput file "+log+"\nlevel ERROR\n}", guarded("", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	die := func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		conn, _, err := http.NewResponseController(w).Hijack()
		if assert.NoError(t, err) {
			conn.(*net.TCPConn).SetLinger(0)
			conn.Close()
		}
	}
	a.on(die)
	b.on(die)
	for i := range 6 {
		r := e.do(http.MethodPost, "/mcp", callBody(strconv.Itoa(i)), "Idempotency-Key", "k"+strconv.Itoa(i))
		require.Equal(t, http.StatusBadGateway, r.status, r.body)
		o := decodeOutage(t, r)
		require.Equal(t, strconv.Itoa(i), string(o.ID))
		require.True(t, o.Error.Data.MayHaveRun)
		require.Equal(t, "reset", o.Error.Data.Reason)
		require.Empty(t, r.header.Get("Retry-After"))
	}
	require.Equal(t, int64(6), a.calls.Load()+b.calls.Load(), "calls were repeated")
	lines, err := os.ReadFile(log)
	require.NoError(t, err)
	for _, s := range []*server{a, b} {
		require.Equal(t, int(s.calls.Load()), strings.Count(string(lines), `"upstream":"`+s.addr+`"`), "%s", lines)
	}
}

// Nor does it where the proxy itself calls requests repeatable, or where another handler
// has put a body of its own in the place of the client's, which says nothing about what
// was sent.
func TestGuardNeverRepeatsWhatOthersChange(t *testing.T) {
	for name, site := range map[string]string{
		"a key":                  "route {\nmcp_guard\nreverse_proxy %s {\nlb_policy mcp_health\nlb_retries 3\nheader_up X-Idempotency-Key {http.request.uuid}\n}\n}",
		"a body":                 "route {\nmcp_guard\nrequest_body {\nset changed\n}\nreverse_proxy %s {\nlb_policy mcp_health\nlb_retries 3\n}\n}",
		"a body that is limited": "route {\nmcp_guard\nrequest_body {\nmax_size 1MB\n}\nreverse_proxy %s {\nlb_policy mcp_health\nlb_retries 3\n}\n}",
	} {
		t.Run(name, func(t *testing.T) {
			a := newServer(t, "a")
			e := newEdge(t, "", fmt.Sprintf(site, a.addr))
			waitState(t, a.addr, mcphealth.Up)
			var fine, ran atomic.Int64
			a.on(func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				if fine.Add(-1) >= 0 {
					w.WriteHeader(http.StatusNoContent) // and the connection is kept
					return
				}
				ran.Add(1)
				conn, _, err := http.NewResponseController(w).Hijack()
				if assert.NoError(t, err) {
					conn.(*net.TCPConn).SetLinger(0)
					conn.Close()
				}
			})
			for i, body := range []string{callBody("1"), callBody(`"` + strings.Repeat("x", keptAtFirst) + `"`)} {
				fine.Store(1)
				require.Equal(t, http.StatusNoContent, e.do(http.MethodPost, "/mcp", body).status)
				r := e.do(http.MethodPost, "/mcp", body)
				require.Equal(t, http.StatusBadGateway, r.status, r.body)
				require.Equal(t, int64(i+1), ran.Load(), "calls were repeated")
				waitState(t, a.addr, mcphealth.Up)
			}
		})
	}
}

// A small body that one proxy has sent is not there once more for the proxy that is to
// stand in when the answer was a bad one: the call has run.
func TestGuardGivesNoBodyToASecondProxy(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	const proxy = "reverse_proxy %s {\nlb_policy mcp_health\n%s\n}"
	e := newEdge(t, "", "route {\nmcp_guard\n"+fmt.Sprintf(proxy, a.addr,
		"@failed status 500\nhandle_response @failed {\n"+fmt.Sprintf(proxy, b.addr, "")+"\n}")+"\n}")
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	a.on(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.WriteHeader(http.StatusInternalServerError)
	})
	var ran atomic.Int64
	b.on(func(w http.ResponseWriter, r *http.Request) {
		if body, err := io.ReadAll(r.Body); err == nil && len(body) > 0 {
			ran.Add(1)
		}
	})
	r := e.call("1")
	require.Equal(t, int64(0), ran.Load(), "the second proxy sent the call, too")
	require.Equal(t, http.StatusBadGateway, r.status, r.body)
}

// Nor is a call repeated that one proxy has had an answer to, because the one that is to
// stand in for that answer cannot be reached: neither by the check's own knowledge nor by
// a failed dial.
func TestGuardNeverRepeatsWhatWasAnswered(t *testing.T) {
	const picks = "lb_policy mcp_health {\nfast 20ms\ninterval 200ms\n}\n"
	standIn := "handle_response @failed {\nreverse_proxy %[2]s {\n" + picks + "}\n}\n"
	for name, site := range map[string]string{
		"two policies":    "reverse_proxy %[1]s {\n" + picks + "@failed status 500\n" + standIn + "}",
		"the second only": "reverse_proxy %[1]s {\n@failed status 500\n" + standIn + "}",
		"intercept":       "intercept {\n@failed status 500\n" + standIn + "}\nreverse_proxy %[1]s {\n" + picks + "}",
		"a source": "reverse_proxy %[1]s {\n" + picks + "@failed status 500\nhandle_response @failed {\n" +
			"reverse_proxy {\ndynamic mcp_health {\nsource test\nfast 20ms\ninterval 200ms\n}\n}\n}\n}",
	} {
		for _, known := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, known to be down: %v", name, known), func(t *testing.T) {
				a, b := newServer(t, "a"), newServer(t, "b")
				down := b.addr
				list(down)
				e := newEdge(t, "", "route {\nmcp_guard {\nhold 500ms\n}\n"+fmt.Sprintf(site, a.addr, down)+"\n}")
				waitState(t, down, mcphealth.Up)
				a.on(func(w http.ResponseWriter, r *http.Request) {
					io.Copy(io.Discard, r.Body)
					w.WriteHeader(http.StatusInternalServerError)
				})
				b.kill()
				if known {
					waitState(t, down, mcphealth.Down)
				}
				for i, body := range []string{callBody("1"), callBody(`"` + strings.Repeat("x", keptAtFirst) + `"`)} {
					r := e.do(http.MethodPost, "/mcp", body)
					require.Equal(t, int64(i+1), a.calls.Load(), "the call was repeated")
					require.Equal(t, http.StatusBadGateway, r.status, r.body)
					require.True(t, decodeOutage(t, r).Error.Data.MayHaveRun)
				}
			})
		}
	}
}

// An authorization that asks elsewhere, behind the guard, keeps no call from being held.
func TestGuardHoldsBehindForwardAuth(t *testing.T) {
	a, auth := newServer(t, "a"), newServer(t, "auth")
	auth.on(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) })
	e := newEdge(t, "", "route {\nmcp_guard {\nhold 30s\n}\nforward_auth "+auth.addr+" {\nuri /auth\n}\nreverse_proxy "+a.addr+
		" {\nlb_policy mcp_health {\nfast 20ms\n}\n}\n}")
	waitState(t, a.addr, mcphealth.Up)
	a.kill()
	answer := make(chan reply)
	go func() { answer <- e.call("1") }()
	eventually(t, func() bool { return heldBytes.Load() > 0 }, "the call is not held")
	a.revive()
	require.Equal(t, "a", (<-answer).servedBy())
	require.Equal(t, int64(1), a.calls.Load())
}

// A proxy that had its answer handled by another one has no request under way any more:
// nothing is silent there.
func TestGuardClosesTheAccountOfTheFirstProxy(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	const proxy = "reverse_proxy %s {\nlb_policy mcp_health {\ninterval 1h\nfast 20ms\nwatch off\n}\n%s\n}"
	e := newEdge(t, "", "route {\nmcp_guard\n"+fmt.Sprintf(proxy, a.addr,
		"@elsewhere status 421\nhandle_response @elsewhere {\n"+fmt.Sprintf(proxy, b.addr, "")+"\n}")+"\n}")
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	a.on(answering(http.StatusMisdirectedRequest, "application/json", ""))
	require.Equal(t, http.StatusBadRequest, e.do(http.MethodGet, "/mcp", "").status) // b's
	time.Sleep(200 * time.Millisecond)                                               // ten times fast
	require.Equal(t, int64(1), a.probes.Load(), "an upstream that has answered is asked for its silence")
}

func TestGuardRetriesDialErrorsElsewhere(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	e := newEdge(t, "", `mcp_proxy `+a.addr+` `+b.addr+` {
		check_interval 1h
		check_watch off
		check_passive off
	}`)
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	a.kill()
	for i := range 50 {
		require.Equal(t, "b", e.call(strconv.Itoa(i)).servedBy(), "call %d", i)
	}
}

func TestGuardKillOneOfTwoUnderLoad(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	e := newEdge(t, "", `mcp_proxy `+a.addr+` `+b.addr)
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	var bad []string
	total := 0
	for w := range 4 {
		wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				r, err := e.try(http.MethodPost, "/mcp", callBody(strconv.Itoa(w*1_000_000+i)))
				mu.Lock()
				total++
				// a call that was under way when the server died cannot be saved
				if err != nil || r.servedBy() == "" && !strings.Contains(r.body, "mayHaveRun") {
					bad = append(bad, fmt.Sprint(r, err))
				}
				mu.Unlock()
			}
		})
	}
	time.Sleep(100 * time.Millisecond)
	a.kill()
	waitState(t, a.addr, mcphealth.Down)
	time.Sleep(100 * time.Millisecond)
	close(stop)
	wg.Wait()
	require.Empty(t, bad, "of %d", total)
}

// A page or a bare 404 in place of an answer has the upstream asked at once, not at the
// end of the interval: calls find the other one within a moment.
func TestGuardNoticesForeignAnswers(t *testing.T) {
	for name, foreign := range map[string]http.HandlerFunc{"page": html, "404": http.NotFound} {
		t.Run(name, func(t *testing.T) {
			a, b := newServer(t, "a"), newServer(t, "b")
			e := newEdge(t, "", `mcp_proxy `+a.addr+` `+b.addr+` {
				lb_policy first
				check_interval 1h
			}`)
			waitState(t, a.addr, mcphealth.Up)
			waitState(t, b.addr, mcphealth.Up)
			require.Equal(t, "a", e.call("1").servedBy())
			a.onProbe(foreign)
			a.on(foreign)
			e.call("2") // its answer is passed on: the upstream said so
			waitState(t, a.addr, mcphealth.Down)
			require.Equal(t, "b", e.call("3").servedBy())
		})
	}
}

// Handlers between the guard and the proxy change the request. When it is sent on
// again, it must be as it came, and routes must match again.
func TestGuardSendsOnTheRequestAsItCame(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", `route {
		mcp_guard
		request_header +X-Times one
		request_header X-Replaced "b"
		header +X-Answer one
		handle_path /api/* {
			reverse_proxy `+a.addr+` {
				lb_policy mcp_health {
					interval 50ms
					fast 10ms
				}
			}
		}
		respond "no route" 404
	}`)
	waitState(t, a.addr, mcphealth.Up)
	a.onProbe(html)
	waitState(t, a.addr, mcphealth.Down)
	a.on(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.URL.RequestURI(), r.Header["X-Times"], r.Header["X-Replaced"], r.Header["X-Mine"])
	})
	answer := make(chan reply)
	go func() {
		answer <- e.do(http.MethodPost, "/api/mcp?q=1", callBody("1"), "X-Mine", "m", "X-Replaced", "a")
	}()
	eventually(t, func() bool { return heldBytes.Load() > 0 }, "the call is not held")
	a.onProbe(nil)
	r := <-answer
	require.Equal(t, http.StatusOK, r.status, r.body)
	require.Equal(t, "/mcp?q=1[one] [b] [m]", r.body)
	require.Equal(t, []string{"one"}, r.header["X-Answer"])
}

func TestGuardWithBuffersOfTheProxy(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", `mcp_guard
	reverse_proxy `+a.addr+` {
		request_buffers 1MiB
		lb_policy mcp_health {
			interval 1h
			watch off
		}
	}`)
	waitState(t, a.addr, mcphealth.Up)
	a.kill()
	answer := make(chan reply)
	go func() { answer <- e.call("1") }()
	eventually(t, func() bool { return heldBytes.Load() > 0 }, "the call is not held")
	a.revive()
	require.Equal(t, "a", (<-answer).servedBy())
}

func TestGuardWithoutPolicy(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", `mcp_guard {
		hold 5s
	}
	reverse_proxy `+a.addr)
	a.kill()
	answer := make(chan reply)
	go func() { answer <- e.call("1") }()
	eventually(t, func() bool { return heldBytes.Load() > 0 }, "the call is not held")
	a.revive()
	require.Equal(t, "a", (<-answer).servedBy())
}

func TestGuardLeavesOtherErrorsAlone(t *testing.T) {
	e := newEdge(t, "", `route {
		mcp_guard
		error /a 502
		error /b "gone" 503
		respond /c 504
	}
	handle_errors {
		respond "handled {err.status_code}"
	}`)
	require.Equal(t, "handled 502", e.do(http.MethodPost, "/a", callBody("1")).body)
	require.Equal(t, "handled 503", e.do(http.MethodPost, "/b", callBody("1")).body)
	require.Equal(t, http.StatusGatewayTimeout, e.do(http.MethodPost, "/c", callBody("1")).status)
}

func TestGuardReleasesManyInOrder(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(html)
	e := newEdge(t, "", guarded("hold 30s", a.addr))
	waitState(t, a.addr, mcphealth.Down)
	var mu sync.Mutex
	var at []time.Time
	a.on(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		at = append(at, time.Now())
		mu.Unlock()
		a.answer(w, r)
	})
	const n = 3 * batchSize
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { assert.Equal(t, "a", e.call(strconv.Itoa(i)).servedBy()) })
	}
	eventually(t, func() bool { return groupOf(t).room.len() == n }, "not all calls are held")
	a.onProbe(nil)
	wg.Wait()
	require.Len(t, at, n)
	require.GreaterOrEqual(t, at[n-1].Sub(at[0]), 2*batchEvery-5*time.Millisecond, "all were let go in one instant")
}

// An event stream passes as it comes, over HTTP/1.1 and h2c.
func TestGuardStreams(t *testing.T) {
	for _, proto := range []string{"h1", "h2c"} {
		t.Run(proto, func(t *testing.T) {
			a := newServer(t, "a")
			e := newEdge(t, "", guarded("", a.addr))
			waitState(t, a.addr, mcphealth.Up)
			next := make(chan string)
			a.on(func(w http.ResponseWriter, r *http.Request) {
				io.Copy(io.Discard, r.Body)
				w.Header().Set("Content-Type", "text/event-stream")
				rc := http.NewResponseController(w)
				rc.Flush()
				for ev := range next {
					io.WriteString(w, ev)
					rc.Flush()
				}
			})
			c := &http.Client{Transport: &http.Transport{Protocols: protocols(proto)}}
			defer c.CloseIdleConnections()
			resp, err := c.Do(must(http.NewRequest(http.MethodPost, e.url+"/mcp", strings.NewReader(callBody("1")))))
			require.NoError(t, err)
			defer resp.Body.Close()
			br := bufio.NewReader(resp.Body)
			for i, ev := range []string{": hello\n\n", "id: 1\ndata:\n\n", `data: {"jsonrpc":"2.0","method":"notifications/progress"}` + "\n\n", `data: {"jsonrpc":"2.0","id":1,"result":{}}` + "\n\n"} {
				next <- ev
				got := make([]byte, len(ev))
				_, err := io.ReadFull(br, got) // would block for ever if it were held back
				require.NoError(t, err)
				require.Equal(t, ev, string(got), "event %d", i)
			}
			close(next)
			rest, err := io.ReadAll(br)
			require.NoError(t, err)
			require.Empty(t, rest)
		})
	}
}

func protocols(name string) *http.Protocols {
	p := new(http.Protocols)
	p.SetHTTP1(name == "h1")
	p.SetUnencryptedHTTP2(name == "h2c")
	return p
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// A stream that breaks off is the server's death, not the client's leave.
func TestGuardReportsBrokenStreams(t *testing.T) {
	a := newServer(t, "a")
	e := newEdge(t, "", `mcp_guard
	reverse_proxy `+a.addr+` {
		lb_policy mcp_health {
			interval 1h
			watch off
		}
	}`)
	waitState(t, a.addr, mcphealth.Up)
	a.on(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, `data: {"jsonrpc":"2.0","method":"m"}`+"\n\n")
		http.NewResponseController(w).Flush()
		a.http.CloseClientConnections()
	})
	before := a.probes.Load()
	_, err := e.try(http.MethodPost, "/mcp", callBody("1"))
	require.Error(t, err)
	eventually(t, func() bool { return a.probes.Load() > before }, "nobody looked after the server")
}

// A server that refuses the Host which probes guess is asked with that of the first
// client who got an answer.
func TestGuardLearnsTheHostOfClients(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(func(w http.ResponseWriter, r *http.Request) {
		if r.Host == a.addr {
			http.Error(w, "Invalid Host header", http.StatusMisdirectedRequest)
			return
		}
		a.answer(w, r)
	})
	e := newEdge(t, "", guarded("", a.addr))
	eventually(t, func() bool { return a.probes.Load() > 0 }, "no probe came")
	require.Equal(t, "a", e.call("1").servedBy())
	waitState(t, a.addr, mcphealth.Up)
	v, _ := a.probeHdr.Load("Host")
	require.Equal(t, e.addr, v)
}

func groupOf(t testing.TB) *group {
	t.Helper()
	app := apps.current()
	require.NotNil(t, app)
	require.Len(t, app.groups, 1)
	return app.groups[0]
}

func (r *room) len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.queue)
}

// An upstream that fails its calls inside HTTP 200 is second choice while the
// other one serves, and is never down.
func TestErrorRate(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	b.on(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"isError":true}}`)
	})
	e := newEdge(t, "", `mcp_proxy `+a.addr+` `+b.addr+` {
		lb_policy round_robin
		check_interval 1m
		check_error_rate 50%
	}`)
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	for range 40 {
		e.call("1")
	}
	s := waitState(t, b.addr, mcphealth.UpDegraded)
	require.Equal(t, mcphealth.ErrorRate, s.Reason)
	for range 10 {
		require.Equal(t, "a", e.call("1").servedBy())
	}
	a.kill()
	eventually(t, func() bool { return strings.Contains(e.call("1").body, "isError") }, "the second choice is not taken")
}
