package traefikplugin

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// What Traefik says of the client reaches the upstream, with the client's address
// added; the query arrives as it is.
func TestProxyForwards(t *testing.T) {
	var got *http.Request
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r }))
	defer upstream.Close()
	tests := []struct {
		name   string
		before []string
		want   string
	}{
		{"no proxy before", []string{}, "192.0.2.1"},
		{"one before", []string{"198.51.100.7"}, "198.51.100.7, 192.0.2.1"},
		{"Traefik is told not to", nil, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := httptest.NewRequest(http.MethodGet, "http://mcp.example/mcp?a=1;b=%zz", nil)
			r.Header["X-Forwarded-For"] = tt.before
			r.Header.Set("X-Forwarded-Proto", "https")
			r.Header.Set("X-Forwarded-Host", "mcp.example")
			r.Header.Set("Forwarded", "proto=https")
			rec := httptest.NewRecorder()
			proxyTo(upstream.URL+"/mcp").ServeHTTP(rec, r)
			if rec.Code != 200 || got == nil {
				t.Fatalf("status %d", rec.Code)
			}
			h := got.Header
			if h.Get("X-Forwarded-For") != tt.want || h.Get("X-Forwarded-Proto") != "https" || h.Get("X-Forwarded-Host") != "mcp.example" || h.Get("Forwarded") != "proto=https" {
				t.Errorf("headers %v, want X-Forwarded-For %q and the others as they came", h, tt.want)
			}
			if got.Host != "mcp.example" || got.URL.RawQuery != "a=1;b=%zz" {
				t.Errorf("host %q, query %q", got.Host, got.URL.RawQuery)
			}
		})
	}
}

// What the upstream's own URL asks for, such as a key, comes before the client's query.
func TestProxyForwardsTheUpstreamsQuery(t *testing.T) {
	var got string
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.URL.RawQuery }))
	defer upstream.Close()
	for client, want := range map[string]string{"": "key=k", "?a=1;b=%zz": "key=k&a=1;b=%zz"} {
		proxyTo(upstream.URL+"/mcp?key=k").ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "http://mcp.example/mcp"+client, nil))
		if got != want {
			t.Errorf("query %q, want %q", got, want)
		}
	}
}
