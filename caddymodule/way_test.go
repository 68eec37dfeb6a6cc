package caddymodule

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// tlsServer is a server over TLS, and the file with its root.
func tlsServer(t *testing.T, name string) (s *server, root string) {
	t.Helper()
	s = &server{t: t, name: name}
	s.http = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
	s.http.EnableHTTP2 = true
	s.http.StartTLS()
	s.addr = s.http.Listener.Addr().String()
	t.Cleanup(s.kill)
	root = filepath.Join(t.TempDir(), "root.pem")
	require.NoError(t, os.WriteFile(root, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.http.Certificate().Raw}), 0o600))
	return s, root
}

// Probes go the way that traffic goes.
func TestWays(t *testing.T) {
	check := `lb_policy mcp_health {
		interval 50ms
		fast 10ms
	}
	`
	t.Run("unix socket", func(t *testing.T) {
		s := &server{t: t, name: "u"}
		path := filepath.Join(t.TempDir(), "s")
		ln, err := net.Listen("unix", path)
		require.NoError(t, err)
		s.http = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
		s.http.Listener.Close()
		s.http.Listener = ln
		s.http.Start()
		t.Cleanup(s.kill)
		e := newEdge(t, "", "reverse_proxy unix/"+path+" {\n"+check+"}")
		waitState(t, "unix/"+path, mcphealth.Up)
		require.Equal(t, "u", e.call("1").servedBy())
	})

	t.Run("h2c", func(t *testing.T) {
		a := newServer(t, "a")
		proto := make(chan string, 100)
		a.onProbe(func(w http.ResponseWriter, r *http.Request) { proto <- r.Proto; a.answer(w, r) })
		e := newEdge(t, "", "reverse_proxy h2c://"+a.addr+" {\n"+check+"}")
		waitState(t, a.addr, mcphealth.Up)
		require.Equal(t, "HTTP/2.0", <-proto)
		require.Equal(t, "a", e.call("1").servedBy())
		require.Equal(t, "HTTP/2.0", <-proto)
	})

	t.Run("TLS, trusted", func(t *testing.T) {
		s, root := tlsServer(t, "s")
		proto := make(chan string, 100)
		s.onProbe(func(w http.ResponseWriter, r *http.Request) { proto <- r.Proto; s.answer(w, r) })
		e := newEdge(t, "", "reverse_proxy https://"+s.addr+" {\n"+check+`
			transport http {
				tls_trust_pool file `+root+`
				tls_server_name example.com
			}
		}`)
		waitState(t, s.addr, mcphealth.Up)
		require.Equal(t, "HTTP/2.0", <-proto)
		require.Equal(t, "s", e.call("1").servedBy())
		if isCaddy210 { // whose Host is the client's, which a guard would have to learn
			return
		}
		host, _ := s.headers.Load("Host")
		probed, _ := s.probeHdr.Load("Host")
		require.Equal(t, host, probed, "the Host of traffic and probe")
		require.Equal(t, s.addr, probed)
	})

	t.Run("TLS, a name that a request says", func(t *testing.T) { // none is right for a probe, and so all are tried
		s, root := tlsServer(t, "s")
		e := newEdge(t, "", "reverse_proxy https://"+s.addr+" {\n"+check+`
			transport http {
				tls_trust_pool file `+root+`
				tls_server_name {http.request.uri.query.name}
			}
		}`)
		require.Equal(t, "s", e.do(http.MethodPost, "/mcp?name=example.com", callBody("1")).servedBy())
		require.Zero(t, s.probes.Load())
		require.Empty(t, checkers.list())
	})

	t.Run("TLS, a name that the upstream says", func(t *testing.T) {
		s, root := tlsServer(t, "s")
		newEdge(t, "", "reverse_proxy https://"+s.addr+" {\n"+check+`
			transport http {
				tls_trust_pool file `+root+`
				tls_server_name {http.reverse_proxy.upstream.host}
			}
		}`)
		waitState(t, s.addr, mcphealth.Up)
	})

	t.Run("TLS, a name that is empty here", func(t *testing.T) {
		s, _ := tlsServer(t, "s")
		newEdge(t, "", "reverse_proxy https://"+s.addr+" {\n"+check+`
			transport http {
				tls_insecure_skip_verify
				tls_server_name {env.MCPHEALTH_NO_NAME}
			}
		}`)
		waitState(t, s.addr, mcphealth.Up)
	})

	t.Run("TLS, not trusted", func(t *testing.T) {
		s, _ := tlsServer(t, "s")
		e := newEdge(t, "", "reverse_proxy https://"+s.addr+" {\n"+check+"}")
		require.Equal(t, mcphealth.TLS, waitState(t, s.addr, mcphealth.Down).Reason)
		require.Equal(t, http.StatusServiceUnavailable, e.call("1").status)
	})

	t.Run("mutual TLS", func(t *testing.T) {
		s := &server{t: t, name: "s"}
		s.http = httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
		s.http.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
		s.http.StartTLS()
		s.addr = s.http.Listener.Addr().String()
		t.Cleanup(s.kill)
		pair := s.http.TLS.Certificates[0] // will do for a client's, too
		key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
		require.NoError(t, err)
		dir := t.TempDir()
		cert, keyFile := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
		require.NoError(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), 0o600))
		require.NoError(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}), 0o600))
		site := func(auth string) string {
			return "reverse_proxy https://" + s.addr + " {\n" + check + "transport http {\ntls_trust_pool file " + cert +
				"\ntls_server_name example.com\n" + auth + "\n}\n}"
		}
		e := newEdge(t, "", site(""))
		require.Equal(t, mcphealth.TLS, waitState(t, s.addr, mcphealth.Down).Reason)
		e.load("", site("tls_client_auth "+cert+" "+keyFile))
		eventually(t, func() bool {
			r, err := e.try(http.MethodPost, "/mcp", callBody("1")) // the first may cross the reload
			return err == nil && r.servedBy() == "s"
		}, "want it up by its certificate")
	})

	t.Run("two transports, two checkers", func(t *testing.T) {
		s, root := tlsServer(t, "s")
		otherRoot, err := filepath.Abs("testdata/other-root.pem") // the same subject, another key
		require.NoError(t, err)
		handle := func(path, root string) string {
			return "handle " + path + " {\nreverse_proxy https://" + s.addr + " {\n" + check + `
				transport http {
					tls_trust_pool file ` + root + `
					tls_server_name example.com
				}
			}
			}
			`
		}
		e := newEdge(t, "", handle("/mcp", root)+handle("/other", otherRoot))
		eventually(t, func() bool {
			states := map[mcphealth.State]int{}
			for _, s := range snapshots(s.addr) {
				states[s.State]++
			}
			return states[mcphealth.Up] == 1 && states[mcphealth.Down] == 1
		}, "want one up and one down, by their roots")
		require.Equal(t, "s", e.call("1").servedBy())
	})

	t.Run("Host and path of the handler", func(t *testing.T) {
		a := newServer(t, "a")
		paths := make(chan string, 100)
		a.onProbe(func(w http.ResponseWriter, r *http.Request) { paths <- r.URL.RequestURI(); a.answer(w, r) })
		newEdge(t, "", "reverse_proxy "+a.addr+" {\n"+check+`
			header_up Host mcp.internal
			rewrite /v2{uri}
		}`)
		waitState(t, a.addr, mcphealth.Up)
		require.Equal(t, "/v2/mcp", <-paths)
		host, _ := a.probeHdr.Load("Host")
		require.Equal(t, "mcp.internal", host)
	})

	t.Run("Host from the upstream's placeholder", func(t *testing.T) {
		a := newServer(t, "a")
		newEdge(t, "", "reverse_proxy "+a.addr+" {\n"+check+"header_up Host {upstream_hostport}\n}")
		waitState(t, a.addr, mcphealth.Up)
		require.Equal(t, a.addr, checkers.list()[0].host)
	})

	t.Run("PROXY protocol", func(t *testing.T) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { ln.Close() })
		first := make(chan string, 100)
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				buf := make([]byte, 6)
				c.Read(buf)
				first <- string(buf)
				c.Close()
			}
		}()
		newEdge(t, "", "reverse_proxy "+ln.Addr().String()+" {\n"+check+"transport http {\nproxy_protocol v1\n}\n}")
		require.Equal(t, "PROXY ", <-first)
	})

	t.Run("placeholder of the environment", func(t *testing.T) {
		a := newServer(t, "a")
		t.Setenv("MCP_TEST_ADDR", a.addr)
		t.Setenv("MCP_TEST_TOKEN", "sesame")
		e := newEdge(t, "", `reverse_proxy {env.MCP_TEST_ADDR} {
			lb_policy mcp_health {
				interval 50ms
				header Authorization "Bearer {env.MCP_TEST_TOKEN}"
			}
		}`)
		waitState(t, "{env.MCP_TEST_ADDR}", mcphealth.Up)
		auth, _ := a.probeHdr.Load("Authorization")
		require.Equal(t, "Bearer sesame", auth)
		require.Equal(t, "a", e.call("1").servedBy())
	})

	t.Run("placeholder of the request", func(t *testing.T) {
		a := newServer(t, "a")
		e := newEdge(t, "", "mcp_guard\nreverse_proxy {header.X-To} {\n"+check+"}")
		require.Equal(t, "a", e.do(http.MethodPost, "/mcp", callBody("1"), "X-To", a.addr).servedBy())
		require.Empty(t, checkers.list())
	})
}
