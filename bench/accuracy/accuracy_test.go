package main

import (
	"maps"
	"strings"
	"testing"
)

func TestWant(t *testing.T) {
	tests := []struct {
		verdicts, last string // last: those of the last run
		want           vote
	}{
		{"ready", "", up},
		{"alive degraded", "", up},
		{"dead", "", down},
		{"dead unknown", "", down},
		{"unknown", "", none},
		{"dead unknown", "ready", up},
	}
	for _, tt := range tests {
		var c bugCase
		c.Want.Verdicts = strings.Fields(tt.verdicts)
		if tt.last != "" {
			c.Probe.Runs = []struct{ Verdicts []string }{{[]string{"dead"}}, {[]string{tt.last}}}
		}
		if got := c.want(); got != tt.want {
			t.Errorf("want() of %q, last run %q = %s, want %s", tt.verdicts, tt.last, got, tt.want)
		}
	}
}

func TestCount(t *testing.T) {
	r := row{}
	for _, x := range []struct {
		id        string
		want, got vote
	}{
		{"a", up, up}, {"b", up, down}, {"c", up, none}, {"d", down, down}, {"e", down, up}, {"f", down, none},
		{"g", none, up}, {"h", none, down}, {"i", none, none},
	} {
		r.count(x.id, x.want, x.got)
	}
	for _, x := range []struct {
		name string
		ids  []string
		want string
	}{{"right", r.right, "ad"}, {"false down", r.falseDown, "b"}, {"false up", r.falseUp, "e"}, {"no vote", r.noVote, "cf"}} {
		if got := strings.Join(x.ids, ""); got != x.want {
			t.Errorf("%s = %q, want %q", x.name, got, x.want)
		}
	}
	if r.neutralUp != 1 || r.neutralDown != 1 || r.quiet != 1 {
		t.Errorf("neutral = %d, %d, %d, want one each", r.neutralUp, r.neutralDown, r.quiet)
	}
}

func TestCaddyLog(t *testing.T) {
	const log = `{"level":"info","logger":"http.handlers.reverse_proxy.health_checker.active","msg":"status code out of tolerances","status_code":405,"host":"127.0.0.1:1"}
{"level":"info","logger":"http.handlers.reverse_proxy.health_checker.active","msg":"HTTP request failed","host":"127.0.0.1:2","error":"refused"}
{"level":"info","logger":"http.handlers.reverse_proxy.health_checker.active","msg":"host is up","host":"127.0.0.1:2"}
{"level":"warn","logger":"mcp_health","msg":"upstream is down","upstream":"127.0.0.1:3"}
not JSON
`
	got := map[int]vote{1: up, 2: up, 3: up}
	if err := caddyLog(strings.NewReader(log), got); err != nil {
		t.Fatal(err)
	}
	if want := (map[int]vote{1: down, 2: up, 3: up}); !maps.Equal(got, want) {
		t.Errorf("caddyLog = %v, want %v", got, want)
	}
	strange := `{"logger":"http.handlers.reverse_proxy.health_checker.active","msg":"a line of a later Caddy"}`
	if err := caddyLog(strings.NewReader(strange), got); err == nil {
		t.Error("caddyLog takes a line that it does not know")
	}
}

func TestHAProxyStat(t *testing.T) {
	const table = "# pxname,svname,status,\nfd01-0,1,UP,\nfd01-0,BACKEND,UP,\nfd01-1,2,DOWN 1/2,\nfd01-2,3,UP 1/3,\n\n"
	got, err := haproxyStat(strings.NewReader(table))
	if err != nil {
		t.Fatal(err)
	}
	if want := (map[int]vote{1: up, 2: down, 3: up}); !maps.Equal(got, want) {
		t.Errorf("haproxyStat = %v, want %v", got, want)
	}
	if _, err := haproxyStat(strings.NewReader("# pxname,svname,status,\nfd01-0,1,no check,\n")); err == nil {
		t.Error("haproxyStat takes a server that is not checked")
	}
}

// TestConfigurations looks at what is made of the options of cases.
func TestConfigurations(t *testing.T) {
	cases, err := loadCases("../../test/suite/cases", "FU09b,FD19b,PC13b,FU19d")
	if err != nil {
		t.Fatal(err)
	}
	tests := map[string][]string{ // ours, then what Caddy's POST has
		"FU09b": {"call base_readQuery `{\"sql\":\"select 1\"}`\n", "health_method POST\n"},
		"FD19b": {"host mcp.example.com\n", "Host \"mcp.example.com\"\n"},
		"PC13b": {"header Authorization \"Bearer good\"\n", "Authorization \"Bearer good\"\n"},
		"FU19d": {"fresh on\n", "health_timeout 5s\n"},
	}
	for _, c := range cases {
		for i, row := range []int{ours, 1} {
			if got := caddyCheck(target{bugCase: c, row: row}); !strings.Contains(got, tests[c.ID][i]) {
				t.Errorf("%s, row %d: no %q in\n%s", c.ID, row, tests[c.ID][i], got)
			}
		}
	}
	if len(cases) != len(tests) {
		t.Errorf("%d cases, want %d", len(cases), len(tests))
	}
}
