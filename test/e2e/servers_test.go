package e2e

import (
	"context"
	"path/filepath"
	"testing"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// A real client is served by every server, is seen there, and neither a
// session nor a process stays behind.
func TestServersAnswer(t *testing.T) {
	for _, s := range All {
		t.Run(s.Name, func(t *testing.T) {
			i := s.Start(t, FreePort(t))
			c := Dial(t, i.URL, "", nil)
			if err := Echo(t.Context(), c, "hello"); err != nil {
				t.Error(err)
			}
			modern := c.InitializeResult().ProtocolVersion >= "2026-07-28"
			if modern != (s.Era == "modern") {
				t.Errorf("client negotiated %s, table says %s", c.InitializeResult().ProtocolVersion, s.Era)
			}
			if s.Stateful && !modern {
				i.AwaitSessions(t, 1)
			}
			if err := c.Close(); err != nil {
				t.Errorf("close: %v", err)
			}
			i.AwaitSessions(t, 0)
			if s.sessions == nil {
				if n := i.Stats(t).Calls["echo"]; n != 1 {
					t.Errorf("%d executions of echo, want 1", n)
				}
			}
			i.Terminate(t)
		})
	}
}

// A session that nobody closes is counted: a count that is always 0 would pass
// every leak test. A client that stays does not keep the server from ending.
func TestSessionsAreCounted(t *testing.T) {
	for _, s := range All {
		if !s.Stateful {
			continue
		}
		t.Run(s.Name, func(t *testing.T) {
			i := s.Start(t, FreePort(t))
			c := Dial(t, i.URL, LegacyVersion, nil)
			i.AwaitSessions(t, 1)
			c.Close()
			i.AwaitSessions(t, 0)

			defer Dial(t, i.URL, LegacyVersion, nil).Close()
			i.AwaitSessions(t, 1)
			start := time.Now()
			i.Terminate(t)
			if took := time.Since(start); took > 4*time.Second {
				t.Errorf("ended %s after SIGTERM: it waited for the client's stream", took)
			}
		})
	}
}

// slow reports progress while it works, on every server that has it.
func TestSlowReportsProgress(t *testing.T) {
	for _, s := range All {
		json := s.Name == "go-sdk-v1.8.0-json" || s.Name == "go-sdk-v1.8.0-stateless-json"
		if s.sessions != nil || json {
			continue // server-everything has another tool for it; one JSON answer has no room for it
		}
		t.Run(s.Name, func(t *testing.T) {
			i := s.Start(t, FreePort(t))
			events := make(chan time.Time, 100)
			c := Dial(t, i.URL, "", &mcp.ClientOptions{ProgressNotificationHandler: func(context.Context, *mcp.ProgressNotificationClientRequest) {
				events <- time.Now()
			}})
			defer c.Close()
			p := &mcp.CallToolParams{Name: "slow", Arguments: map[string]any{"ms": 500}}
			p.SetProgressToken("token")
			if _, err := c.CallTool(t.Context(), p); err != nil {
				t.Fatal(err)
			}
			if len(events) < 3 {
				t.Fatalf("%d progress notifications in 500 ms, want 3 or more", len(events))
			}
			if early := time.Since(<-events); early < 200*time.Millisecond {
				t.Errorf("the first one came %s before the end, want 200ms or more", early)
			}
		})
	}
}

// The helpers do what they say: a paused server accepts and does not answer, a
// killed one refuses, a restarted one is back on its port, a terminated one
// finishes its calls.
func TestProcess(t *testing.T) {
	log := filepath.Join(t.TempDir(), "executions")
	i := Get(t, "go-sdk-v1.8.0-stateless").Start(t, FreePort(t), "--log", log)
	probe := func(want Outcome) {
		t.Helper()
		r := Load{URL: i.URL, Clients: 1, Rate: 1, Timeout: 500 * time.Millisecond}.Start(t)
		if time.Sleep(100 * time.Millisecond); r.Stop().Count[want] != 1 {
			t.Errorf("outcome %v, want one %s", r.Stop(), want)
		}
	}
	probe(OK)
	i.Pause(t)
	probe(Transport)
	i.Continue(t)
	probe(OK)
	i.Kill(t)
	probe(Transport)
	i.Restart(t)
	probe(OK)

	r := Load{URL: i.URL, Clients: 1, Slow: time.Second}.Start(t)
	time.Sleep(300 * time.Millisecond)
	i.Terminate(t)
	if rep := r.Stop(); rep.Count[OK] != 1 {
		t.Errorf("a call that ran at SIGTERM: %v", rep)
	}
	for message, n := range Executions(t, log) {
		if n != 1 {
			t.Errorf("%q was executed %d times", message, n)
		}
	}
}
