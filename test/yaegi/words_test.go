package yaegi_test

import (
	"fmt"
	"strings"
	"testing"
)

// bodies are what clients post, well formed and not.
var bodies = []string{
	`{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"x","arguments":{"id":8,"deep":[{"id":9}]}}}`,
	`{"method":"ping","params":[[1,[2]],{}],"id":"a\u0022b","jsonrpc":"2.0"}`,
	`{"jsonrpc":"2.0","id":-1.5e3,"method":"x"}`,
	`{"jsonrpc":"2.0","id":12345678901234567890,"method":"x"}`,
	`{"jsonrpc":"2.0","id":null,"method":"x"}`,
	`{"jsonrpc":"2.0","id":true,"method":"x"}`,
	`{"jsonrpc":"2.0","id":{"a":1},"method":"x"}`,
	`{"jsonrpc":"2.0","method":"notifications/cancelled"}`,
	`{"jsonrpc":"2.0","id":3,"result":{}}`,
	`{"jsonrpc":"2.0","method":"x","params":{"cut":"o`,
	`{"jsonrpc":"2.0","id":5,"method":"x","params":{"cut":"o`,
	`{"jsonrpc":"2.0","id":5`,
	`{"id":1,"id":2,"method":"x"}`,
	`[{"jsonrpc":"2.0","id":1,"method":"x"}]`,
	`{"id":"` + strings.Repeat("i", 2000) + `","method":"x"}`,
	"", " ", "null", "7", "{", "}", "{}", `{"a"}`, "<html>", "\xff\xfe", "{\"id\":1,\"method\":\"\xff\"}",
}

func TestSameRequestID(t *testing.T) {
	d := interpreted(t)
	for _, body := range bodies {
		if c, i := compiled.RequestID(body), d.RequestID(body); c != i {
			t.Errorf("RequestID(%.80q) = %q compiled, %q interpreted", body, c, i)
		}
	}
	if got := compiled.RequestID(bodies[0]); got != "7" {
		t.Errorf("RequestID(%q) = %q compiled, want 7", bodies[0], got)
	}
}

func TestSameAnswers(t *testing.T) {
	d := interpreted(t)
	for _, method := range []string{"POST", "GET", "HEAD", "OPTIONS", "DELETE", ""} {
		for _, body := range bodies {
			for _, ms := range []int{-5, 0, 1, 1000, 1001, 90_000} {
				c, i := compiled.Unavailable(method, body, "route_absent", ms), d.Unavailable(method, body, "route_absent", ms)
				if diff := diff(c, i); diff != "" {
					t.Errorf("Unavailable(%q, %.80q, %d ms) differs (- compiled, + interpreted):\n%s", method, body, ms, diff)
				}
			}
			c, i := compiled.MayHaveRun(method, body, `odd "reason"`), d.MayHaveRun(method, body, `odd "reason"`)
			if diff := diff(c, i); diff != "" {
				t.Errorf("MayHaveRun(%q, %.80q) differs (- compiled, + interpreted):\n%s", method, body, diff)
			}
		}
	}
}

func TestSameIsRPCAnswer(t *testing.T) {
	d := interpreted(t)
	yes := 0
	for _, status := range []int{200, 202, 204, 400, 404, 401, 500, 503} {
		for _, media := range []string{"application/json", "application/json; charset=utf-8", " text/event-stream ;x", "text/html", "", "Application/JSON"} {
			for _, first := range []string{`{"jsonrpc":"2.0"`, "data: {\"jsonrpc\"", `{"status":"ok"}`, ""} {
				c, i := compiled.IsRPCAnswer(status, media, first), d.IsRPCAnswer(status, media, first)
				if c != i {
					t.Errorf("IsRPCAnswer(%d, %q, %q) = %v compiled, %v interpreted", status, media, first, c, i)
				}
				if c {
					yes++
				}
			}
		}
	}
	if yes == 0 {
		t.Error("IsRPCAnswer said yes to nothing: the table is no good")
	}
}

// TestSameSettings: the texts reach users of the Traefik plugin, and errors.Is
// through %w is what tells the classes apart.
func TestSameSettings(t *testing.T) {
	d := interpreted(t)
	for _, settings := range []map[string]string{
		{}, {"URL": "http://a/mcp"}, {"URL": "://"}, {"URL": "ftp://a"}, {"URL": "http://u:p@a/"}, {"URL": "http://a", "Era": "old"},
		{"URL": "http://a", "Era": "sse"}, {"URL": "http://a", "AliveIf": "x"}, {"URL": "http://a", "Timeout": "-1s"},
		{"URL": "http://a", "HealthPath": "x"}, {"URL": "http://a", "Shallow": "true", "CallTool": "x"}, {"URL": "http://a", "CallArgs": "{}"},
		{"URL": "http://a", "CallTool": "x", "CallArgs": "[1]"}, {"URL": "http://a", "CallTool": "x", "CallArgs": `{"a":[1]}`},
	} {
		if c, i := compiled.BadTarget(settings), d.BadTarget(settings); c != i {
			t.Errorf("Target %v: %q compiled, %q interpreted", settings, c, i)
		}
	}
	for _, s := range [][4]int{{0, 0, 0, 0}, {-1, 0, 0, 0}, {1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, -1, 0}, {0, 0, 0, -1}} {
		if c, i := compiled.BadSchedule(s[0], s[1], s[2], s[3]), d.BadSchedule(s[0], s[1], s[2], s[3]); c != i {
			t.Errorf("Schedule %v: %q compiled, %q interpreted", s, c, i)
		}
	}
	if diff := diff(compiled.Words(), d.Words()); diff != "" {
		t.Errorf("the vocabulary differs (- compiled, + interpreted):\n%s", diff)
	}
	if got := fmt.Sprint(compiled.BadTarget(map[string]string{"URL": "ftp://a"})); !strings.HasSuffix(got, "ErrTarget true, ErrSchedule false") {
		t.Errorf("BadTarget = %q, want class ErrTarget", got)
	}
}
