package caddymodule

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// provisioned makes a policy in front of real upstreams, as Caddy would, and
// starts it.
func provisioned(t testing.TB, raw string, dials ...string) (*Policy, *reverseproxy.Handler) {
	t.Helper()
	cfg := fmt.Sprintf(`{"admin":{"disabled":true,"config":{"persist":false}},"storage":{"module":"file_system","root":%q},
		"logging":{"logs":{"default":{"writer":{"output":"discard"}}}},"apps":{"http":{"servers":{"s":{"listen":["127.0.0.1:0"],"routes":[{"handle":[
		{"handler":"reverse_proxy","load_balancing":{"selection_policy":%s},"upstreams":[`, storageDir(t), raw)
	for i, d := range dials {
		if i > 0 {
			cfg += ","
		}
		cfg += fmt.Sprintf(`{"dial":%q}`, d)
	}
	cfg += `]}]}]}}}}}`
	require.NoError(t, caddy.Load([]byte(cfg), true))
	t.Cleanup(func() {
		require.NoError(t, caddy.Stop())
		forgetAll(t)
	})
	app, err := caddy.ActiveContext().App("mcp_health")
	require.NoError(t, err)
	groups := app.(*App).groups
	require.Len(t, groups, 1)
	h := groups[0].handler
	return h.LoadBalancing.SelectionPolicy.(*Policy), h
}

func request(t testing.TB) *http.Request {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, "http://example.com/mcp", nil)
	return caddyhttp.PrepareRequest(r, caddy.NewReplacer(), httptest.NewRecorder(), &caddyhttp.Server{})
}

func BenchmarkSelect(b *testing.B) {
	for _, n := range []int{2, 10} {
		var dials []string
		for i := range n {
			dials = append(dials, newServer(b, fmt.Sprint(i)).addr)
		}
		p, h := provisioned(b, `{"policy":"mcp_health","interval":"1h"}`, dials...)
		for _, d := range dials {
			waitState(b, d, mcphealth.Up)
		}
		r, w := request(b), httptest.NewRecorder()
		t := &transit{req: r}
		run := func(name string, f func() *reverseproxy.Upstream) {
			b.Run(fmt.Sprintf("%s/%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if f() == nil {
						b.Fatal("none")
					}
				}
			})
		}
		for _, fallback := range []reverseproxy.Selector{reverseproxy.RandomSelection{}, reverseproxy.FirstSelection{}} {
			p.fallback = fallback
			kind := fmt.Sprintf("%T", fallback)
			run(kind+"/alone", func() *reverseproxy.Upstream { return fallback.Select(h.Upstreams, r, w) })
			run(kind+"/policy", func() *reverseproxy.Upstream { return p.Select(h.Upstreams, r, w) })
			run(kind+"/guarded", func() *reverseproxy.Upstream {
				u := p.Select(h.Upstreams, r, t)
				t.picked = pick{}
				return u
			})
		}
		m := h.Upstreams[0]
		p.group.memberOf(m.Dial).failed()
		run("oneSuspect", func() *reverseproxy.Upstream { return p.Select(h.Upstreams, r, w) })
	}
}

// The guard alone, around a handler that reads the request and answers.
func BenchmarkGuard(b *testing.B) {
	g := new(Guard)
	require.NoError(b, g.Provision(caddy.Context{Context: b.Context()}))
	defer g.Cleanup()
	payload := []byte(callBody("1"))
	next := caddyhttp.HandlerFunc(func(w http.ResponseWriter, r *http.Request) error {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "application/json")
		_, err := w.Write(payload)
		return err
	})
	run := func(name string, h func(http.ResponseWriter, *http.Request) error) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				r := request(b)
				r.Method, r.Body, r.ContentLength = http.MethodPost, io.NopCloser(bytes.NewReader(payload)), int64(len(payload))
				for i := range 12 {
					r.Header.Set(fmt.Sprintf("X-Header-%d", i), "some value of a usual length")
				}
				w := httptest.NewRecorder()
				b.StartTimer()
				if err := h(w, r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	run("without", next.ServeHTTP)
	run("with", func(w http.ResponseWriter, r *http.Request) error { return g.ServeHTTP(w, r, next) })
}
