package e2e

import (
	"testing"
	"time"
)

func TestCheckCall(t *testing.T) {
	const right = `{"jsonrpc":"2.0","id":"a-1","result":{"content":[{"type":"text","text":"a-1"}]}}`
	tests := []struct {
		name, body string
		ok         bool
	}{
		{"JSON", right, true},
		{"SSE after progress and a comment", ": hi\ndata: {\"method\":\"notifications/progress\"}\n\ndata: " + right + "\n\n", true},
		{"somebody else's id", `{"jsonrpc":"2.0","id":"a-2","result":{"content":[{"text":"a-1"}]}}`, false},
		{"somebody else's text", `{"jsonrpc":"2.0","id":"a-1","result":{"content":[{"text":"a-2"}]}}`, false},
		{"an error", `{"jsonrpc":"2.0","id":"a-1","error":{"code":-32603,"message":"a-1"}}`, false},
		{"an error without id", `{"jsonrpc":"2.0","error":{"code":-32603,"message":"a-1"}}`, false},
		{"a tool error", `{"jsonrpc":"2.0","id":"a-1","result":{"isError":true,"content":[{"text":"a-1"}]}}`, false},
		{"a stream without an answer", "data: {\"method\":\"notifications/progress\"}\n\n", false},
		{"HTML", "<html>a-1</html>", false},
		{"nothing", "", false},
		{"cut off", right[:40], false},
	}
	for _, tt := range tests {
		if err := CheckCall([]byte(tt.body), "a-1"); (err == nil) != tt.ok {
			t.Errorf("%s: CheckCall = %v, want ok = %v", tt.name, err, tt.ok)
		}
	}
}

// Every modern server serves the load, and what it counted is what was sent.
func TestLoad(t *testing.T) {
	for _, s := range All {
		if s.Era != "modern" {
			continue
		}
		t.Run(s.Name, func(t *testing.T) {
			i := s.Start(t, FreePort(t))
			r := Load{URL: i.URL, Clients: 4, Rate: 50}.Start(t)
			time.Sleep(time.Second)
			rep, stats := r.Stop(), i.Stats(t)
			if rep.Count[OK] != rep.Sent || rep.Sent < 100 || rep.Sent > 204 {
				t.Errorf("%v, want 100 to 204, all ok", rep)
			}
			if stats.Calls["echo"] != rep.Sent || stats.Duplicates != 0 {
				t.Errorf("server executed %v with %d duplicates, want %d with none", stats.Calls, stats.Duplicates, rep.Sent)
			}
			i.AwaitSessions(t, 0)
		})
	}
}

func TestLoadH2C(t *testing.T) {
	i := Get(t, "go-sdk-v1.8.0-stateless").Start(t, FreePort(t), "--h2c")
	r := Load{URL: i.URL, Clients: 2, Rate: 20, H2C: true}.Start(t)
	time.Sleep(300 * time.Millisecond)
	if rep := r.Stop(); rep.Count[OK] != rep.Sent || rep.Sent == 0 {
		t.Errorf("over h2c: %v", rep)
	}
}

// A killed server shows: no failure before the kill, only failures after it,
// and those under way at the kill can be told from later ones.
func TestLoadSeesAKill(t *testing.T) {
	i := Get(t, "go-sdk-v1.8.0-stateless").Start(t, FreePort(t))
	r := Load{URL: i.URL, Clients: 8, Rate: 50, Slow: 20 * time.Millisecond}.Start(t)
	for r.Report().Count[OK] < 50 {
		time.Sleep(10 * time.Millisecond)
	}
	killed := time.Now()
	i.Kill(t)
	time.Sleep(200 * time.Millisecond)
	rep := r.Stop()
	under, later := 0, 0
	for _, f := range rep.Failures {
		switch {
		case f.At(killed):
			under++
		case f.Start.After(killed):
			later++
		default:
			t.Errorf("failed before the kill: %v", f)
		}
	}
	if rep.Count[OK] < 50 || under == 0 || later == 0 || under > 8 || rep.Count[Transport] != under+later {
		t.Errorf("%d ok, %d failed under way, %d later: %v", rep.Count[OK], under, later, rep)
	}
}
