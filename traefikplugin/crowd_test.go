package traefikplugin

import (
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// Configurations come and go while requests run, in all roles at once, by many at a time,
// and with a server that stops and starts: nothing hangs, panics, or is left.
func TestConfigurationsInAHurry(t *testing.T) {
	a, b := startMCP(t), startMCP(t)
	await(t, "no servers of other tests", func() bool { return len(servers()) == 0 })
	groups.mu.Lock()
	groupsBefore := len(groups.m)
	groups.mu.Unlock()
	stop := make(chan struct{})
	var flapping, configuring sync.WaitGroup
	flapping.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				b.stop()
				time.Sleep(5 * time.Millisecond)
				b.start()
			}
		}
	})
	for n := range 4 {
		configuring.Go(func() {
			for i := range 12 {
				config, end := context.WithCancel(t.Context())
				plain, stuck := balancerOf(fakeServer{URL: a.URL}, fakeServer{URL: b.URL, Fenced: i%3 == 0}), stickyOf(a, b)
				c := Config{Hold: "50ms", Interval: "100ms"}
				sticky := c
				sticky.Sticky = true
				gate := c
				gate.Upstreams = []string{b.URL + "/mcp"}
				name := string(rune('a' + (n+i)%3))
				handlers := []http.Handler{
					newHandler(t, routerContext(config, name+"@docker"), plain, c),
					newHandler(t, routerContext(config, "two@docker"), plain, c),
					newHandler(t, routerContext(config, "stuck@docker"), stuck, sticky),
					newHandler(t, routerContext(config, name+"@file"), http.HandlerFunc(fakeInternalHandlers), c),
					newHandler(t, routerContext(config, "gone@file"), http.HandlerFunc(fakeInternalHandlers), c),
					newHandler(t, routerContext(config, "gate@file"), http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {}), gate),
				}
				var calls sync.WaitGroup
				for _, h := range handlers {
					calls.Go(func() {
						rec := call(h, 100)
						if rec.Code != 200 && rec.Code != 503 && rec.Code != 404 {
							t.Errorf("%d %s", rec.Code, rec.Body)
						}
					})
				}
				if i%2 == 0 {
					calls.Wait()
				}
				end()
				calls.Wait()
				for _, balancer := range []*fakeBalancer{plain, &stuck.fakeBalancer} {
					balancer.mu.Lock()
					if len(balancer.looped) > 0 {
						t.Errorf("wrr would hang: %s", strings.Join(balancer.looped, ", "))
					}
					balancer.mu.Unlock()
				}
			}
		})
	}
	configuring.Wait()
	close(stop)
	flapping.Wait()
	await(t, "all released", func() bool {
		routes.mu.Lock()
		groups.mu.Lock()
		defer routes.mu.Unlock()
		defer groups.mu.Unlock()
		return len(servers()) == 0 && len(routes.m) == 0 && len(groups.m) <= groupsBefore
	})
}
