package caddymodule

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/stretchr/testify/require"
)

// roundTrip sends a call, or a request without a body, and returns the error.
func roundTrip(t *testing.T, tr *http.Transport, url, body string) error {
	t.Helper()
	defer tr.CloseIdleConnections()
	var r io.Reader
	method := http.MethodGet
	if body != "" {
		r, method = io.MultiReader(strings.NewReader(body)), http.MethodPost // no GetBody, as a proxy has none
	}
	resp, err := tr.RoundTrip(must(http.NewRequestWithContext(t.Context(), method, url, r)))
	if err == nil {
		resp.Body.Close()
	}
	require.Error(t, err)
	return err
}

// speak accepts connections and has f talk on them.
func speak(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				f(c)
			}()
		}
	}()
	return ln.Addr().String()
}

// The guard goes by what errors say. Each of the texts is what Caddy and Go really
// say now.
func TestTexts(t *testing.T) {
	t.Run("no upstream", func(t *testing.T) {
		a := newServer(t, "a")
		a.onProbe(html)
		e := newEdge(t, "", `reverse_proxy `+a.addr+` {
			lb_policy mcp_health {
				fast 20ms
			}
		}
		handle_errors {
			respond "{err.trace} {err.message}"
		}`)
		var r reply
		eventually(t, func() bool {
			r = e.call("1")
			_, text, _ := strings.Cut(r.body, ".go:")
			_, text, _ = strings.Cut(text, ") ")
			return strings.HasPrefix(r.body, proxyTrace) && saysNoUpstream(caddyhttp.HandlerError{Err: errors.New(text)})
		}, "reverse_proxy says it in other words: %v", &r)
	})

	t.Run("closed idle connection", func(t *testing.T) { require.True(t, saysClosedIdle(closedIdle(t))) })

	t.Run("not processed", func(t *testing.T) {
		says := func(body string, end func(c net.Conn, stream uint32, n int64) bool) bool {
			s := newH2Server(t, end)
			return saysNotProcessed(caddyhttp.HandlerError{Err: roundTrip(t, &http.Transport{Protocols: protocols("h2c")}, "http://"+s.addr, body)})
		}
		refuse := func(code uint32) func(c net.Conn, stream uint32, n int64) bool {
			return func(c net.Conn, stream uint32, _ int64) bool { return resetStream(c, stream, code) }
		}
		require.True(t, says(callBody("1"), refuse(refusedStream)))
		require.False(t, says(callBody("1"), refuse(protocolError)))
		require.True(t, says(callBody("1"), func(c net.Conn, _ uint32, _ int64) bool { return goAway(c) }))
		require.False(t, says(callBody("1"), func(c net.Conn, _ uint32, _ int64) bool { c.Close(); return true }))
	})

	t.Run("DNS", func(t *testing.T) {
		broken := &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) { return nil, errors.New("no network") }}
		d := &net.Dialer{Resolver: broken}
		require.True(t, saysDNS(roundTrip(t, &http.Transport{DialContext: d.DialContext}, "http://nowhere.example", "")))
		require.True(t, saysDNS(&net.DNSError{Err: "no such host", IsNotFound: true}))
	})

	t.Run("timeout of a dial", func(t *testing.T) {
		d := &net.Dialer{Timeout: time.Nanosecond}
		require.True(t, saysTimeout(roundTrip(t, &http.Transport{DialContext: d.DialContext}, "http://127.0.0.1:1", "")))
	})

	t.Run("TLS", func(t *testing.T) {
		s, root := tlsServer(t, "s")
		handshake := func(url string, tr *http.Transport) {
			t.Helper()
			err := roundTrip(t, tr, url, "")
			require.True(t, failedHandshake(err), "%v", err)
			require.True(t, saysTLS(err))
		}
		handshake("https://"+s.addr, &http.Transport{})
		roots := x509.NewCertPool()
		require.True(t, roots.AppendCertsFromPEM(must(os.ReadFile(root))))
		handshake("https://"+s.addr, &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "other.test"}})
		plain := newServer(t, "plain")
		handshake("https://"+plain.addr, &http.Transport{})
		garbage := speak(t, func(c net.Conn) { io.WriteString(c, "SSH-2.0-x\r\n"); io.Copy(io.Discard, c) })
		handshake("https://"+garbage, &http.Transport{})
		silent := speak(t, func(c net.Conn) { io.Copy(io.Discard, c) })
		handshake("https://"+silent, &http.Transport{TLSHandshakeTimeout: time.Millisecond})

		// The other side's alert may come after the request was written.
		strict := httptest.NewUnstartedServer(http.NotFoundHandler())
		strict.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
		strict.StartTLS()
		defer strict.Close()
		err := roundTrip(t, &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, strict.URL, "")
		require.True(t, saysTLS(err), "%v", err)
		require.False(t, failedHandshake(err), "%v", err)
	})
}

// closeNoted tells when net/http gives up a connection.
type closeNoted struct {
	net.Conn
	closed chan struct{}
}

func (c closeNoted) Close() error {
	defer close(c.closed)
	return c.Conn.Close()
}

// closedIdle has a server end an idle connection between its choice and its use.
func closedIdle(t *testing.T) error {
	hangUp := make(chan struct{})
	addr := speak(t, func(c net.Conn) {
		_, _ = c.Read(make([]byte, 4096))
		io.WriteString(c, "HTTP/1.1 204 x\r\n\r\n")
		<-hangUp
	})
	closed := make(chan struct{})
	tr := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, network, addr)
		return closeNoted{c, closed}, err
	}}
	resp, err := tr.RoundTrip(must(http.NewRequest(http.MethodGet, "http://"+addr, nil)))
	require.NoError(t, err)
	resp.Body.Close()
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) {
		require.True(t, info.Reused)
		close(hangUp)
		<-closed
	}})
	body := io.MultiReader(strings.NewReader("x"))
	_, err = tr.RoundTrip(must(http.NewRequestWithContext(ctx, http.MethodPost, "http://"+addr, body)))
	require.Error(t, err)
	return err
}

// The same options stand in the comments of all that take them.
func TestUsagesNameEveryOption(t *testing.T) {
	for file, directive := range map[string]string{"policy.go": "lb_policy mcp_health", "source.go": "dynamic mcp_health", "app.go": "mcp_health"} {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		_, usage, found := strings.Cut(string(source), "//	"+directive+" {\n")
		require.True(t, found, file)
		usage, _, _ = strings.Cut(usage, "//	}\n")
		named := make(map[string]string)
		for _, m := range regexp.MustCompile(`(?m)^//\t    (\w+) +(.+)$`).FindAllStringSubmatch(usage, -1) {
			if !slices.Contains([]string{"fallback", "source", "objective", "probe_ceiling", "probe_budget", "share"}, m[1]) {
				named[m[1]] = m[2]
			}
		}
		require.Equal(t, options, named, file)
	}
}
