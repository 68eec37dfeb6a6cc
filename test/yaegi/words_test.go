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

func TestSameSessionLost(t *testing.T) {
	d := interpreted(t)
	for _, method := range []string{"POST", "GET", "HEAD", "DELETE"} {
		for _, body := range bodies {
			if diff := diff(compiled.SessionLost(method, body, "refused"), d.SessionLost(method, body, "refused")); diff != "" {
				t.Errorf("SessionLost(%q, %.80q) differs (- compiled, + interpreted):\n%s", method, body, diff)
			}
		}
	}
}

// TestSameTags: an edge that is compiled and one that is interpreted read each
// other's tags.
func TestSameTags(t *testing.T) {
	d := interpreted(t)
	tagged := "9f86d081-884c.Q28gdGhpcyBpcyBubyB0YWcu"
	ids := []string{"", ".", "a", "a.b..c.", "a b", "\r\n", "é", "9f86d081-884c-4d63-a3b5-1f0c5e1d2a3b", tagged,
		strings.Repeat("i", 4096), strings.Repeat("i", 4097), "x." + strings.Repeat("A", 23), "x." + strings.Repeat("=", 23)}
	for i := 0; i < 20; i++ { // of the size of a tag, wherever its dot is
		ids = append(ids, strings.Repeat("t", i)+"."+strings.Repeat("-", 23))
	}
	for _, secret := range []string{"0123456789abcdef", strings.Repeat("long", 50)} {
		for _, owner := range []string{"tcp/10.0.0.1:8000", "unix//run/mcp.sock", ""} {
			if diff := diff(strings.Join(compiled.Tags(secret, owner, ids), "\n"), strings.Join(d.Tags(secret, owner, ids), "\n")); diff != "" {
				t.Errorf("tags of %q under %q differ (- compiled, + interpreted):\n%s", owner, secret, diff)
			}
		}
	}
	if got := compiled.Tags("0123456789abcdef", "a", []string{"x"})[0]; !strings.HasSuffix(got, "true") {
		t.Errorf("a tag is not read again: %s", got)
	}
}

func TestSameSessionWords(t *testing.T) {
	d := interpreted(t)
	for _, v := range []string{"", "2025-03-26", "2025-11-25", "2026-07-28", "2027-01-01", "2026-07-28x", "DRAFT-2026", "2026/07/28"} {
		if c, i := compiled.HasSessions(v), d.HasSessions(v); c != i {
			t.Errorf("HasSessions(%q) = %v compiled, %v interpreted", v, c, i)
		}
	}
	opens := append([]string{`{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}`, `{"params":{"method":"x"},"method":"initialize"`}, bodies...)
	yes := 0
	for _, method := range []string{"POST", "GET"} {
		for _, body := range opens {
			c, i := compiled.OpensSession(method, body), d.OpensSession(method, body)
			if c != i {
				t.Errorf("OpensSession(%s, %.80q) = %v compiled, %v interpreted", method, body, c, i)
			}
			if c {
				yes++
			}
		}
	}
	if yes != 2 {
		t.Errorf("OpensSession said yes %d times, want 2", yes)
	}
}

func TestSameOutcome(t *testing.T) {
	d := interpreted(t)
	seen := map[string]bool{}
	for _, body := range []string{
		`{"jsonrpc":"2.0","id":1,"result":{"content":[{"text":"{\"isError\":true}"}]}}`,
		`{"result":{"a":[{"b":"\\"}],"isError": true},"jsonrpc":"2.0"}`,
		`[{"jsonrpc":"2.0","id":1,"error":{"code":-32602}},{"jsonrpc":"2.0","id":1,"error":{"code":-32603}},3]`,
		`{"jsonrpc":"2.0","id":"\"","error":{"code":-32602}}`,
		`{"status":"ok","jsonrpc":"2.0","error":{}}`, `{"jsonrpc":"2.0"`, "",
		"\xef\xbb\xbfdata: {\"jsonrpc\":\r\ndata:\"2.0\",\"result\":{\"isError\":true}}\r\n\n: x\rdata\r\r",
	} {
		for _, media := range []string{"application/json", "application/json; charset=utf-8", " text/event-stream ;x", "text/html", "", "Application/JSON"} {
			for _, n := range []int{1, 5, 1 << 10} {
				c, i := compiled.Outcome(media, body, n), d.Outcome(media, body, n)
				if c != i {
					t.Errorf("%q %q in pieces of %d: %s compiled, %s interpreted", media, body, n, c, i)
				}
				seen[c] = true
			}
		}
	}
	if len(seen) != 5 {
		t.Errorf("the table has %d different outcomes, want 5: %v", len(seen), seen)
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
