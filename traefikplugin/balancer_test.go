package traefikplugin

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

func TestNewReturnsNextItself(t *testing.T) {
	a := startMCP(t)
	b := balancerOf(fakeServer{URL: a.URL})
	ctx, _ := onRouter(t, "app@docker")
	if h := newHandler(t, ctx, b, Config{}); h != http.Handler(b) {
		t.Errorf("New = %T, want next: requests must not enter the interpreter", h)
	}
}

// The life of a balancer with two servers: our child serves only while none does.
func TestChildServesWhileNoneDoes(t *testing.T) {
	x, y := startMCP(t), startMCP(t)
	b := balancerOf(fakeServer{URL: x.URL}, fakeServer{URL: y.URL})
	ctx, _ := onRouter(t, "app@docker")
	newHandler(t, ctx, b, Config{Hold: "0.05"})
	await(t, "both up, child down", func() bool { return b.up(x.URL) && b.up(y.URL) && !b.up(childName) })
	x.stop()
	await(t, "x down", func() bool { return !b.up(x.URL) })
	if b.up(childName) || !b.up(y.URL) {
		t.Error("one server left: want it up, and the child down")
	}
	y.stop()
	await(t, "child up", func() bool { return b.up(childName) && !b.up(y.URL) })
	if rec := call(b, 10); rec.Code != 503 || rec.Header().Get("Retry-After") == "" || !strings.Contains(rec.Body.String(), `"id":7`) {
		t.Errorf("all down: %d %v %s, want the 503 of the edge", rec.Code, rec.Header(), rec.Body)
	}
	y.start()
	await(t, "y up again", func() bool { return b.up(y.URL) && !b.up(childName) })
	if len(b.looped) > 0 {
		t.Errorf("wrr would hang: %v", b.looped)
	}
}

// A killed server is out before its death is confirmed, and long before the
// next probe is due.
func TestKilledServerIsOutAtOnce(t *testing.T) {
	x, y := startMCP(t), startMCP(t)
	b := balancerOf(fakeServer{URL: x.URL}, fakeServer{URL: y.URL})
	ctx, _ := onRouter(t, "app@docker")
	newHandler(t, ctx, b, Config{Interval: "1h"})
	await(t, "both up", func() bool { return b.up(x.URL) && b.up(y.URL) })
	start := time.Now()
	x.stop()
	await(t, "x down", func() bool { return !b.up(x.URL) })
	if took := time.Since(start); took > 500*time.Millisecond {
		t.Errorf("out after %s, want some ms", took)
	}
}

// What reconcile does for every mix of tiers: no order of calls may leave wrr
// without an unfenced server while something is up.
func TestReconcile(t *testing.T) {
	const u, d = true, false
	tests := []struct {
		name    string
		fenced  string // y = that server is fenced
		parents int
		steps   []string // tiers of the servers: U up, G degraded, D down
		want    []string // after each step: + up, - down; the child last
	}{
		{"two servers", "..", 0, []string{"UU", "UD", "DD", "DU", "UU"}, []string{"++-", "+--", "--+", "-+-", "++-"}},
		{"a degraded one waits behind one that is up", "..", 0, []string{"UG", "GG", "DG", "UG"}, []string{"+--", "++-", "-+-", "+--"}},
		{"fenced ones serve sticky clients only", ".y", 0, []string{"UU", "DU", "DD", "UU"}, []string{"++-", "-++", "--+", "++-"}},
		{"only fenced servers", "yy", 0, []string{"UU", "DD"}, []string{"+++", "--+"}},
		{"a parent that fails over must see it", "..", 1, []string{"UU", "DD", "UD"}, []string{"++-", "---", "+--"}},
		{"with a parent and a fenced server", ".y", 1, []string{"UU", "DU", "UU"}, []string{"++-", "---", "++-"}},
		{"no server at all", "", 0, []string{""}, []string{"+"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var servers []fakeServer
			for i, f := range tt.fenced {
				servers = append(servers, fakeServer{URL: "http://10.0.0." + string(rune('1'+i)), Fenced: f == 'y'})
			}
			fake := balancerOf(servers...)
			for range tt.parents {
				fake.updaters = append(fake.updaters, func(bool) {})
			}
			b := inspect(fake)
			r := &route{b: b, is: map[string]bool{}}
			for _, n := range b.names {
				r.is[n] = true
			}
			if b.addChild(http.NotFoundHandler()) {
				r.child = 2
			}
			for i, step := range tt.steps {
				tiers := map[string]mcphealth.Tier{}
				for j, c := range step {
					tiers[servers[j].URL] = map[rune]mcphealth.Tier{'U': mcphealth.TierUp, 'G': mcphealth.TierDegraded, 'D': mcphealth.TierDown}[c]
				}
				r.reconcile(r.wanted(tiers))
				got := ""
				for _, s := range servers {
					got += map[bool]string{u: "+", d: "-"}[fake.up(s.URL)]
				}
				got += map[bool]string{u: "+", d: "-"}[fake.up(childName)]
				if got != tt.want[i] {
					t.Errorf("after %s: %s, want %s (%v)", step, got, tt.want[i], fake.said)
				}
			}
			if len(fake.looped) > 0 {
				t.Errorf("wrr would hang: %v in %v", fake.looped, fake.said)
			}
		})
	}
}

// What is no balancer of servers is left alone.
func TestLeftAlone(t *testing.T) {
	other := http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(299) })
	weighted := balancerOf(fakeServer{URL: "app@docker"}, fakeServer{URL: "app-v2@docker"})
	for name, next := range map[string]http.Handler{"a function": other, "a struct": http.NewServeMux(), "a weighted service": weighted} {
		ctx, _ := onRouter(t, "app@docker")
		if h := newHandler(t, ctx, next, Config{Mode: modeHealth}); name != "a function" && h != next {
			t.Errorf("%s: New = %T, want next", name, h)
		}
	}
	if len(weighted.said) > 0 || len(weighted.handlers) != 2 {
		t.Errorf("a weighted service was touched: %v, %d children", weighted.said, len(weighted.handlers))
	}
}

// Two routers of one service share its balancer: one child, driven once.
func TestRoutersShareABalancer(t *testing.T) {
	a := startMCP(t)
	b := balancerOf(fakeServer{URL: a.URL})
	ctx1, end1 := onRouter(t, "one@docker")
	ctx2, end2 := onRouter(t, "two@docker")
	newHandler(t, ctx1, b, Config{})
	newHandler(t, ctx2, b, Config{})
	if len(b.handlers) != 2 {
		t.Errorf("%d children, want the server and one of ours", len(b.handlers))
	}
	await(t, "up", func() bool { return b.up(a.URL) && !b.up(childName) })
	end1()
	time.Sleep(5 * linger)
	a.stop()
	await(t, "the other router still drives it", func() bool { return b.up(childName) })
	end2()
	await(t, "no servers left", func() bool { return len(servers()) == 0 })
}

// Two routers that do not agree on one service's servers are named, in one order.
func TestRoutersDisagree(t *testing.T) {
	a := startMCP(t)
	left, right := "left"+a.addr, "right"+a.addr // what is said once is remembered
	warned := func() bool {
		told.mu.Lock()
		defer told.mu.Unlock()
		for text := range told.m {
			if strings.HasPrefix(text, "routers "+left+" and "+right+" lead to one service") {
				return true
			}
		}
		return false
	}
	for _, second := range []Config{{AbsentAfter: "1m"}, {Hold: "3s"}} {
		if warned() {
			t.Error("warned of routers that agree")
		}
		ctx, _ := onRouter(t, right)
		b := balancerOf(fakeServer{URL: a.URL})
		newHandler(t, ctx, b, Config{})
		ctx, _ = onRouter(t, left)
		newHandler(t, ctx, b, second)
	}
	if !warned() {
		t.Error("no warning of two values of hold")
	}
}

// A server of which Traefik knows no URL (a container that does not run,
// traefik#13261) never serves.
func TestServerWithoutURL(t *testing.T) {
	b := balancerOf(fakeServer{URL: ""})
	ctx, _ := onRouter(t, "app@docker")
	newHandler(t, ctx, b, Config{Hold: "0"})
	if rec := call(b, 0); rec.Code != 503 || rec.Header().Get("X-Mcp-Health") != "route_absent" {
		t.Errorf("%d %v, want 503 route_absent", rec.Code, rec.Header())
	}
}

func TestUnstick(t *testing.T) {
	h := http.Header{"Set-Cookie": {"stick=5f2b; Path=/", "other=1"}}
	h.Add("Set-Cookie", "stick="+childCookie+"; Path=/; HttpOnly")
	unstick(h)
	if got := h["Set-Cookie"]; !slices.Equal(got, []string{"stick=5f2b; Path=/", "other=1"}) {
		t.Errorf("Set-Cookie = %q, want our own one gone", got)
	}
}

// A panic in New would end Traefik's reloads for good.
func TestNewRecovers(t *testing.T) {
	next := http.NotFoundHandler()
	//lint:ignore SA1012 a nil context panics
	h, err := New(nil, next, &Config{Upstreams: []string{"http://127.0.0.1:1/mcp"}}, "mcp")
	if err != nil || h == nil {
		t.Errorf("New = %v, %v, want next", h, err)
	}
	if rec := call(h, 0); rec.Code != 404 {
		t.Errorf("%d, want next's answer", rec.Code)
	}
	g := join(fmt.Sprintf("mcp%s?%d", atRouter, lonely.Load())) // what New joined, and nothing ends
	g.leave()
	g.leave()
}

func TestRouterOf(t *testing.T) {
	ctx, _ := onRouter(t, "app@docker")
	type key struct{}
	deep, cancel := context.WithTimeout(context.WithValue(ctx, key{}, 1), time.Hour)
	defer cancel()
	tests := []struct {
		ctx  context.Context
		want string
	}{{ctx, "app@docker"}, {deep, "app@docker"}, {serviceContext(ctx, "a@file"), "service a@file"}, {context.Background(), ""}, {context.WithValue(context.Background(), key{}, "x"), ""},
		{httptest.NewRequest("GET", "/", nil).Context(), ""}}
	for _, tt := range tests {
		if got := routerOf(tt.ctx); got != tt.want {
			t.Errorf("routerOf(%v) = %q, want %q", tt.ctx, got, tt.want)
		}
	}
}

// The halves of one route find each other by the router's name.
func TestGroupOf(t *testing.T) {
	tests := []struct{ a, b string }{
		{"app@docker", "app@file"},
		{"app@docker", "app-fallback@docker"},
		{"default-app-4f2a@kubernetescrd", "default-app-fallback-4f2a@kubernetescrd"},
	}
	for _, tt := range tests {
		ctxA, _ := onRouter(t, tt.a)
		ctxB, _ := onRouter(t, tt.b)
		if a, b := groupOf(ctxA, "mcp"), groupOf(ctxB, "mcp"); a != b {
			t.Errorf("groupOf %s = %q, of %s = %q, want one", tt.a, a, tt.b, b)
		}
	}
	ctxA, _ := onRouter(t, "app@docker")
	ctxB, _ := onRouter(t, "other@docker")
	//lint:ignore SA4000 two groups of unknown routers are no group
	if groupOf(ctxA, "mcp") == groupOf(ctxB, "mcp") || groupOf(ctxA, "mcp") == groupOf(ctxA, "mcp2") || groupOf(context.Background(), "mcp") == groupOf(context.Background(), "mcp") {
		t.Error("other routers, other middlewares and unknown routers must not meet")
	}
	if a, b := groupOf(serviceContext(ctxA, "a@file"), "mcp"), groupOf(serviceContext(ctxA, "b@file"), "mcp"); a == b {
		t.Errorf("two services of one router are both %q", a)
	}
}
