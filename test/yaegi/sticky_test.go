package yaegi_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"
)

// balancer has the shape of Traefik's own: what the plugin reads by reflection.
type balancer struct {
	handlers []*balanced
	sticky   *stickiness

	mu sync.Mutex
	up map[string]bool
}

type balanced struct {
	http.Handler
	name string
}

type (
	stickiness    struct{ cookie *stickyCookie }
	stickyCookie  struct{ name string }
	serverOptions struct{ Weight *int }
)

func (b *balancer) SetStatus(_ context.Context, name string, up bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.up[name] = up
}

func (b *balancer) AddServer(name string, h http.Handler, _ serverOptions) {
	b.handlers = append(b.handlers, &balanced{h, name})
	b.up[name] = true
}

func cookieOf(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:])[:16]
}

// ServeHTTP serves by the cookie, or by the first server that is up, and says so.
func (b *balancer) ServeHTTP(rw http.ResponseWriter, req *http.Request) {
	b.mu.Lock()
	var to *balanced
	c, err := req.Cookie(b.sticky.cookie.name)
	for _, h := range b.handlers {
		if b.up[h.name] && (to == nil || err == nil && c.Value == cookieOf(h.name)) {
			to = h
		}
	}
	b.mu.Unlock()
	if err != nil {
		http.SetCookie(rw, &http.Cookie{Name: b.sticky.cookie.name, Value: cookieOf(to.name)})
	}
	to.ServeHTTP(rw, req)
}

// Interpreted, sessions find their owner, streams stay live, and what is not ours passes
// as it came.
func TestPluginSticky(t *testing.T) {
	b := loadPlugin(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	bal := &balancer{up: map[string]bool{}, sticky: &stickiness{&stickyCookie{"stick"}}}
	more := make(chan bool)
	for range 2 {
		srv := httptest.NewServer(http.HandlerFunc(sums))
		t.Cleanup(func() { _ = srv.Listener.Close() }) // not Close, which waits for the probes' connections
		bal.AddServer(srv.URL, http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
			body, _ := io.ReadAll(req.Body)
			rw.Header().Set("X-Served-By", srv.URL)
			status := http.StatusOK
			switch string(body) {
			case "open":
				rw.Header().Set("Mcp-Session-Id", "id-of-its-own")
			case "elsewhere": // Traefik chose another one, whose answer this is
				rw.Header().Set("Set-Cookie", "stick="+cookieOf(bal.handlers[1].name))
				status = http.StatusNotFound
			case "stream":
				rw.WriteHeader(http.StatusOK)
				for range more {
					_, _ = io.WriteString(rw, "data: x\n\n")
				}
			}
			rw.WriteHeader(status)
			_, _ = io.WriteString(rw, req.Header.Get("Mcp-Session-Id"))
		}), serverOptions{})
	}
	a, z := bal.handlers[0].name, bal.handlers[1].name
	h, err := b.middleware(ctx, bal, map[string]interface{}{"sticky": true})
	if err != nil {
		t.Fatal(err)
	}
	edge := httptest.NewServer(h)
	defer edge.Close()
	post := func(body string, header ...string) (*http.Response, string) {
		req, _ := http.NewRequest(http.MethodPost, edge.URL+"/mcp", strings.NewReader(body))
		for i := 0; i < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		return resp, string(text)
	}
	eventually(t, 10*time.Second, "both up", func() bool {
		bal.mu.Lock()
		defer bal.mu.Unlock()
		return bal.up[a] && bal.up[z]
	})
	resp, _ := post("open")
	id := resp.Header.Get("Mcp-Session-Id")
	if !strings.HasPrefix(id, "id-of-its-own.") || resp.Header.Get("Set-Cookie") != "" {
		t.Fatalf("session %q, Set-Cookie %q", id, resp.Header.Get("Set-Cookie"))
	}
	tests := []struct {
		name   string
		header []string
		by, id string
	}{
		{"in the session", []string{"Mcp-Session-Id", id}, a, "id-of-its-own"},
		{"with another's cookie", []string{"Mcp-Session-Id", id, "Cookie", "stick=" + cookieOf(z)}, a, "id-of-its-own"},
		{"again", []string{"Mcp-Session-Id", id}, a, "id-of-its-own"},
		{"forged", []string{"Mcp-Session-Id", "x" + id, "Cookie", "stick=" + cookieOf(z)}, z, "x" + id},
		{"modern", []string{"Mcp-Session-Id", id, "Mcp-Protocol-Version", "2026-07-28", "Cookie", "stick=" + cookieOf(z)}, a, id},
	}
	for _, tt := range tests {
		if resp, got := post("call", tt.header...); resp.Header.Get("X-Served-By") != tt.by || got != tt.id {
			t.Errorf("%s: %s got %q, want %s to get %q", tt.name, resp.Header.Get("X-Served-By"), got, tt.by, tt.id)
		}
	}
	if resp, got := post("elsewhere", "Mcp-Session-Id", id); resp.StatusCode != 503 || !strings.HasSuffix(got, "}") || resp.Header.Get("Set-Cookie") != "" {
		t.Errorf("%s %v %s, want 503 and nothing after it", resp.Status, resp.Header, got)
	}
	req, _ := http.NewRequestWithContext(ctx, http.MethodPost, edge.URL+"/mcp", strings.NewReader("stream"))
	req.Header.Set("Mcp-Session-Id", id)
	resp, err = http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	for range 3 {
		more <- true
		event := make([]byte, 9)
		if _, err := io.ReadFull(resp.Body, event); err != nil || string(event) != "data: x\n\n" {
			t.Fatalf("%q %v", event, err)
		}
	}
	close(more)
}
