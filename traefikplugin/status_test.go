package traefikplugin

import (
	"bytes"
	"context"
	"encoding/json"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
)

// metricsOf asks the status page as Prometheus does, and has its linter read it.
func metricsOf(t *testing.T, h http.Handler) string {
	t.Helper()
	req := httptest.NewRequest("GET", "/status", nil)
	req.Header.Set("Accept", "text/plain;version=0.0.4")
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, req)
	problems, err := promlint.New(strings.NewReader(rec.Body.String())).Lint()
	if err != nil || len(problems) > 0 || rec.Code != 200 {
		t.Fatalf("%d %v %v\n%s", rec.Code, err, problems, rec.Body)
	}
	return rec.Body.String()
}

// All that is counted, over a death, a return and a reload; gone with the server.
func TestMetrics(t *testing.T) {
	a := startMCP(t)
	config := Config{Mode: modeFallback, StatusPath: "/status", Hold: "100ms", Upstreams: []string{a.URL + "/mcp"}}
	ctx, end := onRouter(t, "app@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), config)
	awaitState(t, "up", a)
	a.stop()
	awaitState(t, "down", a)
	if rec := call(h, 0); rec.Code != 503 {
		t.Fatalf("%d, want 503", rec.Code)
	}
	a.start()
	awaitState(t, "up", a)
	end()
	ctx2, end2 := onRouter(t, "app@file")
	h = newHandler(t, ctx2, http.NotFoundHandler(), config)
	labels := `{upstream="` + a.addr + `",path="/mcp"`
	await(t, "counted", func() bool { return strings.Contains(metricsOf(t, h), labels+`,to="up",reason="ok"} 2`) })
	text := metricsOf(t, h)
	for _, want := range []string{
		"upstream_up" + labels + "} 1\n",
		"upstream_state" + labels + `,state="down"} 0` + "\n",
		"upstream_info" + labels + `,era="modern",protocol="2026-07-28",server="a\"b",version="1"} 1` + "\n",
		"probes_total" + labels + `,verdict="dead",reason="refused"} `,
		"probes_total" + labels + `,verdict="ready",reason="ok"} `,
		"transitions_total" + labels + `,to="down",reason="refused"} 1` + "\n",
		"transitions_total" + labels + `,to="up",reason="ok"} 2` + "\n",
		"probe_duration_seconds_bucket" + labels + `,le="+Inf"} `,
		"last_probe_timestamp_seconds" + labels + "} ",
		"probe_interval_seconds" + labels + "} 10\n",
		`burn_rate{path="/mcp",window="5m"} `,
		`requests_total{upstream="",path="/mcp",outcome="unavailable"} `,
		"hold_seconds_count ",
		"held_requests 0\n",
	} {
		if !strings.Contains(text, "\n"+metricPrefix+want) {
			t.Errorf("no line %s%s in\n%s", metricPrefix, want, text)
		}
	}
	end2()
	await(t, "gone", func() bool { n, _ := state(a.URL); return n == 0 })
	ctx3, _ := onRouter(t, "app@file")
	h = newHandler(t, ctx3, http.NotFoundHandler(), Config{Mode: modeFallback, StatusPath: "/status"})
	await(t, "its series, too", func() bool { return !strings.Contains(metricsOf(t, h), a.addr) })
	var doc struct {
		Servers   []any
		Endpoints []any
		Held      map[string]int
	}
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequestWithContext(context.Background(), "GET", "/status", nil))
	if err := json.Unmarshal(rec.Body.Bytes(), &doc); err != nil || doc.Servers == nil || doc.Endpoints == nil {
		t.Errorf("%v: %s", err, rec.Body)
	}
}

// Words of a server that would break the text, or fill a disk, do neither.
func TestEscape(t *testing.T) {
	for in, want := range map[string]string{"a\"b\\c\nd": `a\"b\\c\nd`, "\xff": "\uFFFD", strings.Repeat("é", 100): strings.Repeat("é", 64)} {
		if got := escape(in); got != want {
			t.Errorf("escape(%q) = %q, want %q", in, got, want)
		}
	}
}

// lines is what was logged.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// The page is there to be read.
func TestStatusTakesNoPost(t *testing.T) {
	ctx, _ := onRouter(t, "status@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, StatusPath: "/status"})
	for method, want := range map[string]int{"GET": 200, "HEAD": 200, "POST": 405, "OPTIONS": 405} {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, httptest.NewRequest(method, "/status", nil))
		if allow := rec.Header().Get("Allow"); rec.Code != want || (want == 405) != (allow == "GET, HEAD") {
			t.Errorf("%s: %d, Allow %q, want %d", method, rec.Code, allow, want)
		}
	}
}

// The query of an upstream may hold a key: it shows nowhere.
func TestNoQueryShows(t *testing.T) {
	logged := &lines{}
	before := log.Writer()
	log.SetOutput(logged)
	defer log.SetOutput(before)
	a := startMCP(t)
	ctx, _ := onRouter(t, "keyed@file")
	h := newHandler(t, ctx, http.NotFoundHandler(), Config{Mode: modeFallback, StatusPath: "/status", Hold: "100ms", Upstreams: []string{a.URL + "/mcp?key=s3cret-s3cret"}})
	awaitState(t, "up", a)
	a.stop()
	awaitState(t, "down", a)
	await(t, "a line", func() bool { return strings.Contains(logged.String(), a.URL+"/mcp?… is down") })
	a.start()
	awaitState(t, "up", a)
	rec := httptest.NewRecorder()
	h.ServeHTTP(rec, httptest.NewRequest("GET", "/status", nil))
	if shown := logged.String() + rec.Body.String() + metricsOf(t, h); strings.Contains(shown, "s3cret") || !strings.Contains(rec.Body.String(), a.URL+"/mcp?…") {
		t.Errorf("the key shows, or no URL:\n%s", shown)
	}
}

// Settings that do nothing are said to.
func TestSessionSettingsWithoutSticky(t *testing.T) {
	logged := &lines{}
	before := log.Writer()
	log.SetOutput(logged)
	defer log.SetOutput(before)
	told.m = nil // or it has been said, if this runs twice
	ctx, _ := onRouter(t, "idle@file")
	newHandler(t, ctx, http.NotFoundHandler(), Config{SessionKey: "0123456789abcdef"})
	if !strings.Contains(logged.String(), "no effect without sticky") {
		t.Errorf("logged %q", logged)
	}
}
