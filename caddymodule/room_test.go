package caddymodule

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// worldOf is a room whose upstreams the test turns on and off.
func worldOf(tier mcphealth.Tier) (*room, *atomic.Int32, *atomic.Int32) {
	var now, nudges atomic.Int32
	now.Store(int32(tier))
	return newRoom(func() mcphealth.Tier { return mcphealth.Tier(now.Load()) }, func() { nudges.Add(1) }), &now, &nudges
}

func TestRoomLetsGoInOrderAndInBatches(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // by several, some overtake others
	synctest.Test(t, func(t *testing.T) {
		r, tier, _ := worldOf(mcphealth.TierDown)
		const n = 4 * batchSize
		start := time.Now()
		var mu sync.Mutex
		var order []uint64
		var at []time.Duration
		for range n {
			w := r.enter()
			go func() {
				assert.True(t, r.wait(t.Context(), w))
				mu.Lock()
				defer mu.Unlock()
				order, at = append(order, w.seq), append(at, time.Since(start))
			}()
			synctest.Wait()
		}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		require.Empty(t, order, "let go while all are down")
		tier.Store(int32(mcphealth.TierUp))
		r.kick(true)
		time.Sleep(time.Second)
		synctest.Wait()
		require.Len(t, order, n)
		for i := range n {
			assert.InDelta(t, i, int(order[i]-1), 4, "place %d was let go at turn %d", order[i], i)
			assert.Equal(t, 3*time.Second+time.Duration(i/batchSize)*batchEvery, at[i])
		}
		require.False(t, r.running, "the room goes on though nobody waits")
	})
}

// Who left as he was let go, and is back, has his turn still to come: to let him go twice
// would end the process.
func TestRoomLetsGoOnce(t *testing.T) {
	r, _, _ := worldOf(mcphealth.TierUp)
	w := &waiter{let: make(chan struct{})}
	r.queue = []*waiter{w}
	let, _ := r.release(mcphealth.TierUp)
	require.Len(t, let, 1)
	w.let = make(chan struct{}) // as wait does
	close(let[0])
	close(w.let)
}

// What a look meets, such as a circuit breaker that panics, ends no process: whoever
// waits goes as a scout, and meets it where net/http takes it.
func TestRoomLookMayPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRoom(func() mcphealth.Tier { panic("a circuit breaker") }, nil)
		require.True(t, r.wait(t.Context(), r.enter()))
		r.wake()
	})
}

func TestRoomSendsScouts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, nudges := worldOf(mcphealth.TierSuspect)
		w := r.enter()
		start := time.Now()
		var tries []time.Duration
		for range 7 {
			require.True(t, r.wait(t.Context(), w))
			tries = append(tries, time.Since(start).Round(time.Millisecond))
		}
		ms := time.Millisecond
		require.Equal(t, []time.Duration{50 * ms, 150 * ms, 350 * ms, 750 * ms, 1550 * ms, 2550 * ms, 3550 * ms}, tries)
		require.NotZero(t, nudges.Load())
		time.Sleep(5 * time.Second)
	})
}

func TestRoomNudgesLessAndLess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _, nudges := worldOf(mcphealth.TierDown)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		require.False(t, r.wait(ctx, r.enter()))
		require.LessOrEqual(t, nudges.Load(), int32(16)) // 50, 100, 200, 400, 800 ms, then each second
		require.GreaterOrEqual(t, nudges.Load(), int32(10))
		synctest.Wait()
		require.Empty(t, r.queue)
	})
}

func TestBodyIsReadAgainFromTheStart(t *testing.T) {
	for _, size := range []int{0, 1, 4096, mcphealth.MaxIDBody, mcphealth.MaxIDBody + 1, 3 * mcphealth.MaxIDBody} {
		text := strings.Repeat("x", size)
		for _, read := range []int{0, 1, 100, size} {
			if read > size {
				continue
			}
			b := &body{from: strings.NewReader(text)}
			_, err := io.CopyN(io.Discard, b.reader(), int64(read))
			require.NoError(t, err)
			again, err := b.anew()
			if read > mcphealth.MaxIDBody {
				require.ErrorIs(t, err, errNotHeld, "size %d, read %d", size, read)
				continue
			}
			require.NoError(t, err)
			b.letGo() // too early: the second reader has not read yet
			got, err := io.ReadAll(again)
			require.NoError(t, err, "size %d, read %d", size, read)
			require.Equal(t, text, string(got))
		}
	}
}

func TestBodyHold(t *testing.T) {
	for _, size := range []int{0, 1, 5000, 70_000, maxHeldBody, maxHeldBody + 1} {
		for _, known := range []bool{true, false} {
			for _, read := range []int{0, 10, mcphealth.MaxIDBody + 10} {
				text := strings.Repeat("0123456789", size/10+1)[:size]
				b := &body{from: strings.NewReader(text)}
				if !known {
					b.from = iotest.DataErrReader(b.from) // the end comes with the last bytes, as of chunks
				}
				_, _ = io.CopyN(io.Discard, b.reader(), int64(min(read, size)))
				length := int64(-1)
				if known {
					length = int64(size)
				}
				var mine budget
				got, err := b.hold(length, &mine, time.Now().Add(time.Minute))
				if size > maxHeldBody || read > mcphealth.MaxIDBody && size > mcphealth.MaxIDBody {
					require.ErrorIs(t, err, errNotHeld, "size %d, read %d", size, read)
				} else {
					require.NoError(t, err)
					require.Equal(t, text, string(got))
					require.Equal(t, int64(len(got)), mine.held.Load())
					mine.unhold(len(got))
				}
				require.Zero(t, heldBytes.Load(), "size %d, read %d", size, read)
			}
		}
	}
}

func TestBodiesAreHeldWithinTheBudget(t *testing.T) {
	var mine, others budget
	later := time.Now().Add(time.Minute)
	require.True(t, mine.reserve(maxHeldBytes-keptAtFirst))
	defer mine.unhold(maxHeldBytes - keptAtFirst)
	big := func() *body { return &body{from: strings.NewReader(strings.Repeat("x", 10_000))} }
	_, err := big().hold(10_000, &mine, later)
	require.ErrorIs(t, err, errNotHeld)
	got, err := (&body{from: strings.NewReader("x")}).hold(1, &mine, later)
	require.NoError(t, err)
	mine.unhold(len(got))
	require.Equal(t, int64(maxHeldBytes-keptAtFirst), mine.held.Load())

	got, err = big().hold(10_000, &others, later)
	require.NoError(t, err, "another guard has its own")
	others.unhold(len(got))
}

// A connection that the other side has ended refuses the next request, and only
// that: nothing was written.
func TestHonestConn(t *testing.T) {
	if !canPeek {
		t.Skip("this system cannot look")
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer ln.Close()
	raw, err := net.Dial("tcp", ln.Addr().String())
	require.NoError(t, err)
	other, err := ln.Accept()
	require.NoError(t, err)
	c := newHonestConn(raw)
	defer c.Close()
	_, err = c.Write([]byte("request 1"))
	require.NoError(t, err)
	_, err = other.Write([]byte("answer"))
	require.NoError(t, err)
	_, err = c.Read(make([]byte, 16))
	require.NoError(t, err)
	go c.Read(make([]byte, 16)) // net/http keeps one going; it must not be waited for
	_, err = c.Write([]byte("request 2"))
	require.NoError(t, err, "a living connection")
	other.Close()
	eventually(t, func() bool {
		c.(*honestConn).rest.Store(true) // as after an answer
		_, err = c.Write(nil)
		return err == errEnded
	}, "the end was not noticed")
}

// Calls that meet connections which were idle when their server was killed are not
// lost: nothing of them was written.
func TestKilledServersIdleConnections(t *testing.T) {
	if !canPeek {
		t.Skip("this system cannot look")
	}
	for _, size := range []int{10, 20_000} {
		pad := strings.Repeat("x", size)
		for range 5 {
			a, b := newServer(t, "a"), newServer(t, "b")
			e := newEdge(t, "", `mcp_proxy `+a.addr+` `+b.addr+` {
				check_interval 1h
				check_watch off
			}`)
			waitState(t, a.addr, mcphealth.Up)
			waitState(t, b.addr, mcphealth.Up)
			burst := func() {
				var wg sync.WaitGroup
				for range 16 {
					wg.Go(func() {
						r, err := e.try(http.MethodPost, "/mcp", `{"jsonrpc":"2.0","id":1,"method":"m","params":"`+pad+`"}`)
						if assert.NoError(t, err) {
							assert.NotEmpty(t, r.servedBy(), "%v", r)
						}
					})
				}
				wg.Wait()
			}
			burst() // connections to both
			a.kill()
			burst()
			burst()
			b.kill()
		}
	}
}

// net/http reads the body for a connection that it finds dead, and then cannot dial
// again: the next upstream must get all of it nevertheless.
func TestBodyAfterADeadConnection(t *testing.T) {
	if !canPeek {
		t.Skip("this system cannot look")
	}
	for _, size := range []int{10, 3_000, 60_000} {
		pad := strings.Repeat("x", size)
		for range 5 {
			a, b := newServer(t, "a"), newServer(t, "b")
			e := newEdge(t, "", `mcp_proxy `+a.addr+` `+b.addr+` {
				lb_policy first
				check_interval 1h
				check_watch off
				hold 0
			}`)
			waitState(t, a.addr, mcphealth.Up)
			waitState(t, b.addr, mcphealth.Up)
			body := `{"jsonrpc":"2.0","id":1,"method":"m","params":"` + pad + `"}`
			require.Equal(t, "a", e.do(http.MethodPost, "/mcp", body).servedBy())
			a.kill()
			r := e.do(http.MethodPost, "/mcp", body)
			require.Equal(t, "b", r.servedBy(), "size %d: %v", size, r)
			require.Contains(t, r.body, fmt.Sprintf(`"got":%d}`, len(body)))
		}
	}
}
