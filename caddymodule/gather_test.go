package caddymodule

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// chunks listens, and notes what each read of a connection got.
type chunks struct {
	net.Listener
	mu   sync.Mutex
	read []string
}

func (l *chunks) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return &chunkConn{c, l}, err
}

type chunkConn struct {
	net.Conn
	l *chunks
}

func (c *chunkConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.l.mu.Lock()
	c.l.read = append(c.l.read, string(p[:n]))
	c.l.mu.Unlock()
	return n, err
}

// together reports whether head and body of the request with this mark came in one read.
func (l *chunks) together(t *testing.T, mark string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, read := range l.read {
		if strings.Contains(read, mark) {
			return strings.Contains(read, " /mcp HTTP/1.1\r\n") // a server may have read the first byte before
		}
	}
	t.Fatalf("nothing with %s was read", mark)
	return false
}

// A small body goes to a server that lives in one write with its head; others are whole,
// too.
func TestSmallBodiesGoOutAtOnce(t *testing.T) {
	l := &chunks{}
	var err error
	l.Listener, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28"],"capabilities":{},"length":%d}}`, mcphealth.RequestID(body).JSON(), len(body))
	})}
	go s.Serve(l)
	t.Cleanup(func() { s.Close() })
	addr := l.Addr().String()
	e := newEdge(t, "", guarded("", addr))
	waitState(t, addr, mcphealth.Up)

	for _, tt := range []struct {
		name, header, value string
		length              int
		together            bool
	}{
		{name: "usual", length: 200, together: true},
		{name: "longer", length: keptAtFirst / 2, together: true},
		{name: "long", length: keptAtFirst + 1},
		{name: "the upstream is to say whether it wants it", header: "Expect", value: "100-continue", length: 200},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mark := strings.ReplaceAll(tt.name, " ", "-")
			body := fmt.Sprintf(`{"jsonrpc":"2.0","id":"%s","method":"m","params":{"a":"`, mark)
			body += strings.Repeat("x", tt.length-len(body)-3) + `"}}`
			var header []string
			if tt.header != "" {
				header = []string{tt.header, tt.value}
			}
			r := e.do(http.MethodPost, "/mcp", body, header...)
			require.Equal(t, http.StatusOK, r.status, r.body)
			require.Contains(t, r.body, fmt.Sprintf(`"length":%d}`, tt.length))
			if tt.together { // others may come so by chance
				require.True(t, l.together(t, `"id":"`+mark))
			}
		})
	}

	t.Run("of a slow client", func(t *testing.T) {
		text := `{"jsonrpc":"2.0","id":"slow","method":"m"}`
		c := slowly(t, e, len(text), text[:20])
		_, err := io.WriteString(c, text[20:])
		require.NoError(t, err)
		r := answerOn(t, c)
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.True(t, l.together(t, `"id":"slow"`))
	})
	t.Run("of a client that leaves", func(t *testing.T) {
		c := slowly(t, e, 100, `{"jsonrpc":"2.0","id":"left",`)
		require.NoError(t, c.Close())
		require.Equal(t, http.StatusOK, e.do(http.MethodPost, "/mcp", callBody("1")).status)
		l.mu.Lock()
		defer l.mu.Unlock()
		require.NotContains(t, strings.Join(l.read, ""), `"id":"left"`)
	})
}

// A gathered body is whole at the next upstream when the first refuses.
func TestGatheredBodiesAreSentAgain(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	e := newEdge(t, "", guarded("", a.addr, b.addr))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	a.kill()
	for range 4 { // the first of them finds out
		r := e.do(http.MethodPost, "/mcp", callBody("1"))
		require.Equal(t, http.StatusOK, r.status, r.body)
		require.Equal(t, "b", r.servedBy())
	}
}
