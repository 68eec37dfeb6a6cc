package reliability

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
	"github.com/quic-go/quic-go/http3"
)

// Caddy answers HTTP/3 wherever it has a certificate: calls are held there, refused and
// pinned as everywhere, also those whose body is too large to hold, or never ends.
func TestHTTP3(t *testing.T) {
	dir := t.TempDir()
	cert := newAuthority(t, filepath.Join(dir, "ca.pem")).issue(t, time.Hour)
	key, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "cert.pem")
	both := append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key})...)
	if err := os.WriteFile(file, both, 0o600); err != nil {
		t.Fatal(err)
	}
	s := e2e.Get(t, "go-sdk-v1.8.0-stateful")
	a, b := s.Start(t, e2e.FreePort(t)), s.Start(t, e2e.FreePort(t))
	edge := fmt.Sprintf("127.0.0.1:%d", e2e.FreePort(t))
	c := e2e.StartCaddyGlobal(t, "\tservers "+edge+" {\n\t\tprotocols h1 h2 h3\n\t}", `	respond 404
}
https://`+edge+` {
	bind 127.0.0.1
	tls `+file+` `+file+`
	mcp_proxy /mcp* `+a.Addr+` `+b.Addr+` {
		check_interval 500ms
		hold 2s
		sticky
	}`)
	over := &http3.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer over.Close()
	post := func(session string, length int64, body io.Reader) (*http.Response, string) {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+edge+"/mcp", body)
		req.ContentLength = length
		for k, v := range map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Mcp-Session-Id": session} {
			if v != "" {
				req.Header.Set(k, v)
			}
		}
		resp, err := over.RoundTrip(req)
		if err != nil {
			t.Error(err)
			return new(http.Response), ""
		}
		defer resp.Body.Close()
		all, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Errorf("%d %v", resp.StatusCode, err)
		}
		return resp, string(all)
	}
	const opens = `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18","capabilities":{},"clientInfo":{"name":"h3","version":"1"}}}`
	for _, addr := range []string{a.Addr, b.Addr} {
		c.AwaitState(t, addr, "up", 10*time.Second)
	}
	opened, _ := post("", int64(len(opens)), strings.NewReader(opens))
	session := opened.Header.Get("Mcp-Session-Id")
	if opened.ProtoMajor != 3 || opened.StatusCode != http.StatusOK || session == "" {
		t.Fatalf("%s %s %v", opened.Proto, opened.Status, opened.Header)
	}
	const lists = `{"jsonrpc":"2.0","id":2,"method":"tools/list"}`
	for range 4 {
		if resp, body := post(session, -1, strings.NewReader(lists)); resp.StatusCode != http.StatusOK || !strings.Contains(body, `"echo"`) {
			t.Errorf("in a session: %s %s", resp.Status, body)
		}
	}
	a.Kill(t)
	b.Kill(t)
	for _, addr := range []string{a.Addr, b.Addr} {
		c.AwaitState(t, addr, "down", 10*time.Second)
	}
	large, never := sizedCall("9", 3<<20), func(first string) io.Reader { return &endless{first, t.Context()} }
	var all sync.WaitGroup
	for name, call := range map[string]struct {
		length int64
		body   io.Reader
		id     string
	}{
		"small":              {int64(len(callBody("7"))), strings.NewReader(callBody("7")), "7"},
		"of unknown length":  {-1, strings.NewReader(callBody("8")), "8"},
		"large":              {int64(len(large)), strings.NewReader(large), "9"},
		"never whole":        {2000, never(callBody("10")[:50]), "10"},
		"large, never whole": {3 << 20, never(`{"jsonrpc"`), "null"},
	} {
		all.Go(func() {
			resp, body := post("", call.length, call.body)
			if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" || !strings.Contains(body, `"id":`+call.id+`,"error"`) {
				t.Errorf("%s: %s %v %s", name, resp.Status, resp.Header, body)
			}
		})
	}
	all.Wait()
	held := make(chan int)
	go func() {
		resp, _ := post("", int64(len(opens)), strings.NewReader(opens))
		held <- resp.StatusCode
	}()
	time.Sleep(500 * time.Millisecond)
	b.Restart(t)
	if status := <-held; status != http.StatusOK {
		t.Errorf("held: %d, want 200", status)
	}
}

// endless is a body that begins, and does not go on.
type endless struct {
	first string
	until context.Context
}

func (e *endless) Read(p []byte) (int, error) {
	if e.first == "" {
		<-e.until.Done()
		return 0, e.until.Err()
	}
	n := copy(p, e.first)
	e.first = e.first[n:]
	return n, nil
}
