package caddymodule

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/require"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// Calls that are held when a reload changes how their upstream is asked, or drops
// their site, go on when the upstream is back: it is asked for them until the last
// one has gone.
func TestHeldCallsOutliveTheirConfiguration(t *testing.T) {
	for name, next := range map[string]func(addr string) string{
		"the check changes": func(addr string) string {
			return `mcp_proxy ` + addr + ` { 
			check_interval 1h
		}`
		},
		"the site is dropped": func(string) string { return `respond "another"` },
	} {
		t.Run(name, func(t *testing.T) {
			a := newServer(t, "a")
			a.onProbe(html)
			e := newEdge(t, "", guarded("hold 1m", a.addr))
			waitState(t, a.addr, mcphealth.Down)
			old, room := checkers.list()[0], groupOf(t).room
			const calls = 3
			answers := make(chan reply, calls)
			for range calls {
				go func() { answers <- e.call("1") }()
			}
			eventually(t, func() bool { return room.len() == calls }, "the calls are not held")
			e.load("", next(a.addr))
			require.Equal(t, 1, checkers.inUse(old), "nobody asks for the held calls")
			a.onProbe(nil)
			for range calls {
				require.Equal(t, "a", (<-answers).servedBy())
			}
			eventually(t, func() bool { return checkers.inUse(old) == 0 }, "the old checker is kept")
		})
	}
}

// A request of an old configuration that comes to be held late finds checkers that
// ask nothing any more. What they know of a dead upstream is no reason to wait.
func TestRestingCheckersKeepNobodyWaiting(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(html)
	e := newEdge(t, "", guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Down)
	old := groupOf(t)
	require.Equal(t, mcphealth.TierDown, old.best())
	e.load("", `respond "another"`)
	require.Equal(t, mcphealth.TierSuspect, old.best())
	reason, _ := old.outage(time.Now())
	require.Equal(t, mcphealth.NotMCP, reason, "what is refused now, as where the process exits, tells it all the same")
	reason, _ = (&pick{owner: (*old.static.Load())[0]}).ownersOutage(time.Now())
	require.Equal(t, mcphealth.NotMCP, reason)
	old.enter()
	old.leave() // gives nothing back twice
	require.Equal(t, 0, checkers.inUse(checkers.list()[0]))
}

// Who waits for an upstream hears of its return before anybody handles the event.
func TestHeldCallsComeBeforeEvents(t *testing.T) {
	a := newServer(t, "a")
	a.onProbe(html)
	newEdge(t, "events {\n on healthy slow_test\n}", guarded("", a.addr))
	waitState(t, a.addr, mcphealth.Down)
	handling, heard := make(chan struct{}), make(chan struct{})
	slowHandler.Store(&handling)
	defer slowHandler.Store(nil)
	defer checkers.list()[0].listen(func(mcphealth.Change) { close(heard) })()
	a.onProbe(nil)
	select {
	case <-heard:
	case <-time.After(10 * time.Second):
		t.Error("waited for the event's handler")
	}
	close(handling)
}

func init() { caddy.RegisterModule(slowTestHandler{}) }

// slowTestHandler handles events for as long as slowHandler says.
type slowTestHandler struct{}

var slowHandler atomic.Pointer[chan struct{}]

func (slowTestHandler) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{ID: "events.handlers.slow_test", New: func() caddy.Module { return new(slowTestHandler) }}
}

func (slowTestHandler) Handle(context.Context, caddy.Event) error {
	if c := slowHandler.Load(); c != nil {
		<-*c
	}
	return nil
}

func (slowTestHandler) UnmarshalCaddyfile(d *caddyfile.Dispenser) error { d.Next(); return nil }
