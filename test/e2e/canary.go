package e2e

import (
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// What must show nowhere: the credentials that every client here sends, and those that
// every Caddy of ours probes with, unless it has global options of its own on mcp_health.
const (
	clientCanary = "canary-client-2c26b46b68ffc68f"
	probeCanary  = "canary-probe-fcde2b2edba56bf4"
)

// showsCanary is the first place in text that shows one, as it is or in base64; "" = none.
func showsCanary(text string) string {
	for _, secret := range []string{clientCanary, probeCanary} {
		for _, form := range []string{secret, base64.StdEncoding.EncodeToString([]byte(secret))} {
			if at := strings.Index(text, form); at >= 0 {
				return text[max(0, at-200):min(len(text), at+100)]
			}
		}
	}
	return ""
}

// authorize gives a client's request its credentials.
func authorize(h http.Header) { h.Set("Authorization", "Bearer "+clientCanary) }

// authorized is a client whose requests all have them.
var authorized = &http.Client{Transport: withCanary{}}

type withCanary struct{}

func (withCanary) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	authorize(req.Header)
	return http.DefaultTransport.RoundTrip(req)
}

// wantNoCanary looks for them in all that this Caddy has said: its log, its output, and,
// if it still answers, its metrics and all of the admin endpoint that is ours.
func (c *Caddy) wantNoCanary(t testing.TB) {
	t.Helper()
	said := map[string]string{"output": c.Output()}
	log, err := os.ReadFile(c.log)
	if err != nil {
		t.Error(err)
	}
	said["log"] = string(log)
	client := http.Client{Timeout: 2 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	read := func(path string) string {
		resp, err := client.Get(c.admin + path)
		if err != nil {
			return "" // a test may have ended it
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		said[path] = string(body)
		return string(body)
	}
	var list []Upstream
	if json.Unmarshal([]byte(read("/mcp_health/upstreams")), &list) == nil {
		for _, u := range list {
			read("/mcp_health/upstreams/" + u.ID)
		}
		read("/mcp_health/endpoints")
		read("/mcp_health/sessions")
		read("/metrics")
	}
	for where, text := range said {
		if at := showsCanary(text); at != "" {
			t.Errorf("%s of Caddy shows a secret: …%s…", where, at)
		}
	}
}
