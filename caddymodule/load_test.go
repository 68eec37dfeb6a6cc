package caddymodule

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// BenchmarkProxy is one call through Caddy and back, alone and with us in it.
// bench/ measures the same from outside.
func BenchmarkProxy(b *testing.B) {
	a := newServer(b, "a")
	body := callBody("1") + strings.Repeat(" ", 1000)
	sites := []struct{ name, site string }{
		{"plain", "reverse_proxy " + a.addr},
		{"policy", "reverse_proxy " + a.addr + " {\nlb_policy mcp_health\n}"},
		{"proxy", "mcp_proxy " + a.addr},
	}
	for _, s := range sites {
		b.Run(s.name, func(b *testing.B) {
			e := newEdge(b, "", s.site)
			if s.name != "plain" {
				waitState(b, a.addr, mcphealth.Up)
			}
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					resp, err := client.Post(e.url+"/mcp", "application/json", strings.NewReader(body))
					if err != nil {
						b.Error(err)
						return
					}
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
					if resp.StatusCode != http.StatusOK {
						b.Error(resp.Status)
						return
					}
				}
			})
			b.StopTimer()
		})
	}
	require.NotZero(b, a.calls.Load())
}
