package traefikplugin

import (
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"
)

// A hundred reloads: the probers go on, and nothing is left when all is over.
func TestReloads(t *testing.T) {
	a := startMCP(t)
	await(t, "no servers of other tests", func() bool { return len(servers()) == 0 })
	groups.mu.Lock()
	before, groupsBefore := runtime.NumGoroutine(), len(groups.m)
	groups.mu.Unlock()
	var end func()
	for i := range 100 {
		ctx, cancel := onRouter(t, "app@docker")
		fctx, fcancel := onRouter(t, "app@file")
		if end != nil {
			end() // Traefik ends the old one just before it builds the new one
		}
		end = func() { cancel(); fcancel() }
		b := balancerOf(fakeServer{URL: a.URL})
		newHandler(t, ctx, b, Config{})
		newHandler(t, fctx, http.NotFoundHandler(), Config{Mode: modeFallback})
		if i > 0 && !b.up(a.URL) {
			t.Fatalf("reload %d: the server is down, want its state kept", i)
		}
		if i == 0 {
			await(t, "up", func() bool { return b.up(a.URL) && !b.up(childName) })
		}
	}
	if all := servers(); len(all) != 1 || all[0].checker.Snapshot().Probes > 3 {
		t.Errorf("%d servers, the first probed %d times; want one, which reloads do not probe", len(all), all[0].checker.Snapshot().Probes)
	}
	end()
	await(t, "all released", func() bool {
		routes.mu.Lock()
		groups.mu.Lock()
		defer routes.mu.Unlock()
		defer groups.mu.Unlock()
		return len(servers()) == 0 && len(routes.m) == 0 && len(groups.m) <= groupsBefore
	})
	await(t, "goroutines as before", func() bool { return runtime.NumGoroutine() <= before+1 })
}

func TestConfig(t *testing.T) {
	tests := []struct {
		name   string
		config Config
		want   string // of the error; "" = none
	}{
		{"nothing", Config{}, ""},
		{"all", Config{Mode: "gate", Paths: []string{"/a", "/b*"}, Upstreams: []string{"https://x:1/mcp"}, Interval: "1s", Timeout: "2", Fall: "3", Rise: "1",
			Hold: "5s", HoldMax: "9", AbsentAfter: "0", RetryAfter: "1m", StatusPath: "/s", Headers: map[string]string{"A": "b"}, AliveIf: "any_response",
			ExpectTools: []string{"t"}, Host: "mcp.example.com"}, ""},
		{"unknown key", Config{Unknown: map[string]interface{}{"hodl": 1, "abc": 2}}, "unknown key abc, hodl"},
		{"mode", Config{Mode: "x"}, `mode "x": want auto, health, fallback or gate`},
		{"interval", Config{Interval: "x"}, `interval "x": want a duration`},
		{"interval too short", Config{Interval: "1ms"}, `interval "1ms": want at least 100ms`},
		{"timeout", Config{Timeout: "-1s"}, "timeout"},
		{"fall", Config{Fall: "0"}, `fall "0": want a whole number from 1 on`},
		{"rise", Config{Rise: "1.5"}, "rise"},
		{"hold", Config{Hold: "-3"}, "hold"},
		{"holdMax", Config{HoldMax: "x"}, "holdMax"},
		{"absentAfter", Config{AbsentAfter: "ten"}, "absentAfter"},
		{"retryAfter", Config{RetryAfter: "ten"}, "retryAfter"},
		{"retryAfter nothing", Config{RetryAfter: "0s"}, `retryAfter "0s": want a positive duration`},
		{"expectTools without a name", Config{ExpectTools: []string{"echo", " "}}, `expectTools "": want the name of a tool`},
		{"paths without one", Config{Paths: []string{" "}}, `paths "": want a path`},
		{"upstreams without one", Config{Upstreams: []string{""}}, `upstreams "": want the URL`},
		{"paths", Config{Paths: []string{"mcp"}}, "paths"},
		{"paths with a query", Config{Paths: []string{"/mcp?key=s3cret"}}, `paths "/mcp?…": want a path, with * at the end alone and without a query`},
		{"paths with a fragment", Config{Paths: []string{"/mcp#a"}}, "paths"},
		{"paths with a star within", Config{Paths: []string{"/mcp", "/*/mcp"}}, `paths "/*/mcp"`},
		{"paths that no URL has", Config{Paths: []string{"/mcp%zz"}}, `paths "/mcp%zz": want a path that can stand in a URL`},
		{"statusPath", Config{StatusPath: "s"}, "statusPath"},
		{"statusPath with a star", Config{StatusPath: "/status*"}, `statusPath "/status*": want one path`},
		{"paths with a URL", Config{Paths: []string{"http://a/mcp?key=s3cret"}}, `paths "http://a/mcp?…": want a path that begins`},
		{"statusPath without a slash", Config{StatusPath: "status?key=s3cret"}, `statusPath "status?…": want a path that begins`},
		{"statusPath with a query", Config{StatusPath: "/status?key=s3cret"}, `statusPath "/status?…": want one path`},
		{"headers", Config{Headers: map[string]string{"A b": "c"}}, `headers: header name "A b"`},
		{"headers in two spellings", Config{Headers: map[string]string{"x-a": "s3cret", "X-A": "b"}}, `headers "X-A": want it once`},
		{"headers of the probe's own", Config{Headers: map[string]string{"accept": "s3cret"}}, "headers: header Accept contradicts"},
		{"headers with a control character", Config{Headers: map[string]string{"X-A": "s3cret\x01"}}, "headers: value of header X-A"},
		{"headers with a secret", Config{Headers: map[string]string{"Authorization": "s3cret\n"}}, "headers"},
		{"aliveIf", Config{AliveIf: "x"}, "aliveIf"},
		{"host", Config{Host: "http://x"}, `host "http://x": want`},
		{"host of a template", Config{Host: "{host}"}, `host "{host}": want`},
		{"upstreams", Config{Upstreams: []string{"http://a/mcp", "b"}}, "upstreams"},
		{"upstreams without a scheme", Config{Upstreams: []string{"app:8000/mcp?key=s3cret"}}, `url "app:8000/mcp": want http://host`},
		{"upstreams with a password", Config{Upstreams: []string{"http://u:s3cret@a/mcp"}}, "upstreams"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := tt.config.parse()
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q", err, tt.want)
			}
			if err != nil && strings.Contains(err.Error(), "s3cret") {
				t.Errorf("error %v shows a secret", err)
			}
		})
	}
	set, _ := (&Config{Hold: "1.5"}).parse()
	if set.hold != 1500*time.Millisecond {
		t.Errorf("hold 1.5 = %s, want 1.5 s", set.hold)
	}
}

// One way to ask a server is one checker; another way is another one.
func TestCheckersAreShared(t *testing.T) {
	a := startMCP(t)
	set, _ := (&Config{}).parse()
	other, _ := (&Config{Headers: map[string]string{"Authorization": "x"}}).parse()
	one, _ := acquire(set, a.URL+"/mcp")
	two, _ := acquire(set, a.URL+"/mcp")
	three, _ := acquire(other, a.URL+"/mcp")
	defer release(one)
	defer release(two)
	defer release(three)
	if one != two || one == three {
		t.Errorf("%p %p %p, want the first two to be one", one, two, three)
	}
}
