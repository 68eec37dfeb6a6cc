package caddymodule

import (
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

func init() { caddy.RegisterModule(testSource{}) }

// testSource gives what the test says, as a container runtime would.
type testSource struct {
	NeedRequest bool `json:"need_request,omitempty"`
}

var listed struct {
	sync.Mutex
	dials []string
	err   error
}

func list(dials ...string) {
	listed.Lock()
	defer listed.Unlock()
	listed.dials, listed.err = dials, nil
}

func (testSource) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "http.reverse_proxy.upstreams.test", New: func() caddy.Module { return new(testSource) }}
}

func (s testSource) GetUpstreams(r *http.Request) ([]*reverseproxy.Upstream, error) {
	if s.NeedRequest && r.Header.Get("Content-Type") == "" {
		return nil, errors.New("no client, no upstreams")
	}
	listed.Lock()
	defer listed.Unlock()
	if listed.err != nil {
		return nil, listed.err
	}
	var all []*reverseproxy.Upstream
	for _, d := range listed.dials {
		all = append(all, &reverseproxy.Upstream{Dial: d})
	}
	return all, nil
}

func (s *testSource) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next()
	s.NeedRequest = d.NextArg()
	return nil
}

// ways are the two ways to put health on a dynamic source.
var dynamicWays = map[string]string{
	"policy": `reverse_proxy {
		dynamic test %s
		lb_policy mcp_health {
			interval 50ms
			fast 10ms
		}
		lb_retries 3
		lb_try_interval 5ms
	}`,
	"source": `reverse_proxy {
		dynamic mcp_health {
			source test %s
			interval 50ms
			fast 10ms
		}
		lb_policy round_robin
		lb_retries 3
		lb_try_interval 5ms
	}`,
}

func TestDynamic(t *testing.T) {
	for name, site := range dynamicWays {
		t.Run(name, func(t *testing.T) {
			a, b := newServer(t, "a"), newServer(t, "b")
			list(a.addr, b.addr)
			e := newEdge(t, "", "mcp_guard\n"+fmt.Sprintf(site, ""))
			waitState(t, a.addr, mcphealth.Up) // before any request
			waitState(t, b.addr, mcphealth.Up)
			a.onProbe(html)
			waitState(t, a.addr, mcphealth.Down)
			for range 10 {
				require.Equal(t, "b", e.call("1").servedBy())
			}
			a.onProbe(nil)
			waitState(t, a.addr, mcphealth.Up)

			b.kill() // and nobody has noticed yet
			for range 10 {
				r := e.call("1")
				require.Equal(t, "a", r.servedBy(), "%v", r)
			}
		})
		t.Run(name+", all down", func(t *testing.T) {
			a := newServer(t, "a")
			a.onProbe(html)
			list(a.addr)
			e := newEdge(t, "", "mcp_guard {\nhold 0\n}\n"+fmt.Sprintf(site, ""))
			waitState(t, a.addr, mcphealth.Down)
			r := e.call("1")
			require.Equal(t, http.StatusServiceUnavailable, r.status)
			require.Equal(t, "not_mcp", r.header.Get("X-Mcp-Health"))
			require.Zero(t, a.calls.Load())
		})
		t.Run(name+", not without a request", func(t *testing.T) {
			a := newServer(t, "a")
			list(a.addr)
			e := newEdge(t, "", "mcp_guard\n"+fmt.Sprintf(site, "needs-request"))
			require.Equal(t, "a", e.call("1").servedBy(), "an upstream nobody has probed yet is tried")
			waitState(t, a.addr, mcphealth.Up)
		})
		t.Run(name+", the only container is made anew", func(t *testing.T) {
			a := newServer(t, "a")
			list(a.addr)
			e := newEdge(t, "", "mcp_guard\n"+fmt.Sprintf(site, ""))
			waitState(t, a.addr, mcphealth.Up)
			list()
			a.kill()
			answer := make(chan reply)
			go func() { answer <- e.call("1") }()
			eventually(t, func() bool { return heldBytes.Load() > 0 }, "the call is not held")
			b := newServer(t, "b")
			list(b.addr)
			require.Equal(t, "b", (<-answer).servedBy())
		})
	}
}

func TestSourcePassesErrorsOn(t *testing.T) {
	a := newServer(t, "a")
	listed.Lock()
	listed.err = errors.New("no DNS today")
	listed.Unlock()
	defer list()
	e := newEdge(t, "", `reverse_proxy `+a.addr+` {
		dynamic mcp_health {
			source test
		}
	}`)
	require.Equal(t, "a", e.call("1").servedBy(), "the static list is for when the source fails")
}

func TestDynamicUpstreamsAreForgotten(t *testing.T) {
	a, b := newServer(t, "a"), newServer(t, "b")
	list(a.addr, b.addr)
	newEdge(t, "", fmt.Sprintf(dynamicWays["policy"], ""))
	waitState(t, a.addr, mcphealth.Up)
	waitState(t, b.addr, mcphealth.Up)
	list(b.addr)
	g := groupOf(t)
	entry := checkers.list()
	time.Sleep(60 * time.Millisecond)
	for range 11 {
		g.grow()
		g.ensure([]string{b.addr})
	}
	require.Len(t, *g.dynamic.Load(), 1)
	for _, e := range entry {
		want := 0
		if e.upstream == b.addr {
			want = 1
		}
		require.Equal(t, want, checkers.inUse(e), e.upstream)
	}
}

// Nor is it kept that they could not be probed: clients may choose the names that a
// source looks up, and so the addresses.
func TestWarningsAreForgotten(t *testing.T) {
	list()
	newEdge(t, "", fmt.Sprintf(dynamicWays["policy"], ""))
	g := groupOf(t)
	for i := range 3 {
		g.ensure([]string{fmt.Sprintf("{http.request.header.X%d}", i)})
		require.Len(t, g.warned, 1)
		for range 11 {
			g.grow()
		}
	}
	require.Empty(t, g.warned)
}

func TestDynamicUpstreamsAreBounded(t *testing.T) {
	list()
	newEdge(t, "", fmt.Sprintf(dynamicWays["policy"], ""))
	g := groupOf(t)
	many := make([]string, maxDynamic+5)
	for i := range many {
		many[i] = fmt.Sprintf("{http.request.header.X%d}", i) // no checkers: too many sockets
	}
	g.ensure(many)
	require.Len(t, *g.dynamic.Load(), maxDynamic)
}

func TestInitialWait(t *testing.T) {
	a := newServer(t, "a")
	release := make(chan struct{})
	a.onProbe(func(w http.ResponseWriter, r *http.Request) { <-release; a.answer(w, r) })
	e := newEdge(t, "", `reverse_proxy `+a.addr+` {
		lb_policy mcp_health {
			initial wait
		}
	}`)
	require.Equal(t, http.StatusServiceUnavailable, e.call("1").status)
	close(release)
	waitState(t, a.addr, mcphealth.Up)
	require.Equal(t, "a", e.call("1").servedBy())
}
