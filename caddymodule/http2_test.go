package caddymodule

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// An h2Server speaks as much HTTP/2 as it takes to end calls in the ways that only
// HTTP/2 has.
type h2Server struct {
	addr  string
	calls atomic.Int64
	// end is told of the nth call, and returns false to have it answered.
	end func(c net.Conn, stream uint32, n int64) bool
}

func newH2Server(t *testing.T, end func(c net.Conn, stream uint32, n int64) bool) *h2Server {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	s := &h2Server{addr: ln.Addr().String(), end: end}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() }) // proxies keep idle ones
			go s.serve(c)
		}
	}()
	return s
}

func (s *h2Server) serve(c net.Conn) {
	defer c.Close()
	if _, err := io.ReadFull(c, make([]byte, len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))); err != nil {
		return
	}
	frame(c, 4, 0, 0, nil) // SETTINGS
	bodies := make(map[uint32]string)
	for {
		var head [9]byte
		if _, err := io.ReadFull(c, head[:]); err != nil {
			return
		}
		payload := make([]byte, int(head[0])<<16|int(head[1])<<8|int(head[2]))
		if _, err := io.ReadFull(c, payload); err != nil {
			return
		}
		kind, flags, stream := head[3], head[4], binary.BigEndian.Uint32(head[5:])
		switch {
		case kind == 4 && flags&1 == 0:
			frame(c, 4, 1, 0, nil)
		case kind == 6 && flags&1 == 0:
			frame(c, 6, 1, 0, payload)
		case kind == 0:
			bodies[stream] += string(payload)
		}
		if kind > 1 || flags&1 == 0 {
			continue // not the end of a request
		}
		body := bodies[stream]
		if strings.Contains(body, "tools/call") && s.end(c, stream, s.calls.Add(1)) {
			continue
		}
		answerH2(c, stream, body)
	}
}

// answerH2 answers with the id of the request.
func answerH2(c net.Conn, stream uint32, body string) {
	_, id, _ := strings.Cut(body, `"id":`)
	if at := strings.IndexAny(id, ",}"); at >= 0 {
		id = id[:at]
	}
	result := ready
	if strings.Contains(body, "tools/call") {
		result = `{"served_by":"h2"}`
	}
	const json = "application/json"
	frame(c, 1, 4, stream, append([]byte{0x88, 0x0f, 0x10, byte(len(json))}, json...)) // :status 200, content-type
	frame(c, 0, 1, stream, []byte(`{"jsonrpc":"2.0","id":`+id+`,"result":`+result+`}`))
}

func frame(c net.Conn, kind, flags byte, stream uint32, payload []byte) {
	n := len(payload)
	b := []byte{byte(n >> 16), byte(n >> 8), byte(n), kind, flags}
	b = binary.BigEndian.AppendUint32(b, stream)
	_, _ = c.Write(append(b, payload...))
}

func resetStream(c net.Conn, stream, code uint32) bool {
	frame(c, 3, 0, stream, binary.BigEndian.AppendUint32(nil, code))
	return true
}

// goAway says that no stream was processed, and ends the connection.
func goAway(c net.Conn) bool {
	frame(c, 7, 0, 0, make([]byte, 8))
	c.Close()
	return true
}

const (
	protocolError uint32 = 1
	refusedStream uint32 = 7
)

// HTTP/2 has ways to end a request that prove it was not executed, and others that
// do not. The guard decides, within the hold; net/http may repeat some of both.
func TestEndsOfHTTP2(t *testing.T) {
	site := func(s *h2Server, hold string) string {
		return fmt.Sprintf("mcp_proxy h2c://%s {\nhold %s\ncheck_interval 1h\ncheck_watch off\n}", s.addr, hold)
	}
	t.Run("PROTOCOL_ERROR proves nothing", func(t *testing.T) {
		s := newH2Server(t, func(c net.Conn, stream uint32, _ int64) bool { return resetStream(c, stream, protocolError) })
		e := newEdge(t, "", site(s, "5s"))
		r := e.call("1")
		require.Equal(t, http.StatusBadGateway, r.status, r.body)
		require.True(t, decodeOutage(t, r).Error.Data.MayHaveRun)
		require.Equal(t, int64(1), s.calls.Load(), "the call was repeated")
	})
	t.Run("REFUSED_STREAM once", func(t *testing.T) {
		s := newH2Server(t, func(c net.Conn, stream uint32, n int64) bool {
			return n == 1 && resetStream(c, stream, refusedStream)
		})
		e := newEdge(t, "", site(s, "1m"))
		r := e.call("1")
		require.Equal(t, "h2", r.servedBy(), r.body)
	})
	t.Run("REFUSED_STREAM for ever", func(t *testing.T) {
		s := newH2Server(t, func(c net.Conn, stream uint32, _ int64) bool { return resetStream(c, stream, refusedStream) })
		e := newEdge(t, "", site(s, "300ms"))
		start := time.Now()
		r := e.call("1")
		require.Equal(t, http.StatusServiceUnavailable, r.status, r.body)
		require.Less(t, time.Since(start), 5*time.Second)
	})
	t.Run("GOAWAY", func(t *testing.T) {
		s := newH2Server(t, func(c net.Conn, _ uint32, n int64) bool { return n == 1 && goAway(c) })
		e := newEdge(t, "", site(s, "1m"))
		r := e.call("1")
		require.Equal(t, "h2", r.servedBy(), r.body)
	})
	t.Run("without our policy", func(t *testing.T) {
		s := newH2Server(t, func(c net.Conn, stream uint32, _ int64) bool { return resetStream(c, stream, protocolError) })
		e := newEdge(t, "", "mcp_guard\nreverse_proxy h2c://"+s.addr)
		require.Equal(t, http.StatusBadGateway, e.call("1").status)
		require.Equal(t, int64(1), s.calls.Load(), "the call was repeated")
	})
}

// Over TLS, each server chooses. Those that stay with HTTP/1.1 are treated as such.
func TestHTTP2IsNoticed(t *testing.T) {
	for _, h2 := range []bool{true, false} {
		s := &server{t: t, name: "s"}
		s.http = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
		s.http.EnableHTTP2 = h2
		s.http.StartTLS()
		s.addr = s.http.Listener.Addr().String()
		t.Cleanup(s.kill)
		t.Run(fmt.Sprint(h2), func(t *testing.T) {
			e := newEdge(t, "", "mcp_proxy https://"+s.addr+" {\ntransport http {\ntls_insecure_skip_verify\n}\n}")
			require.Equal(t, "s", e.call("1").servedBy())
			require.Equal(t, !h2, groupOf(t).speaksHTTP1())
		})
	}
}
