package caddymodule

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// A store that failed once, of which the listener noticed nothing, is away again when it
// fails the next time.
func TestShareSaysEachOutage(t *testing.T) {
	core, log := observer.New(zap.InfoLevel)
	s := &sharer{log: zap.New(core)}
	s.hears.Store(true)
	away := func() int { return log.FilterMessageSnippet("is away").Len() }
	back := func() int { return log.FilterMessageSnippet("is back").Len() }

	s.lost(errors.New("i/o timeout"))
	require.True(t, s.isAway())
	s.served()
	require.Equal(t, 0, back(), "at once")
	s.away.Store(clock() - int64(storeSteady) - 1)
	s.hears.Store(false)
	s.served()
	require.Equal(t, 0, back(), "and nobody listens")
	s.hears.Store(true)
	s.served()
	s.served()
	require.Equal(t, 1, back())
	s.lost(errors.New("EOF"))
	s.lost(errors.New("EOF"))
	require.Equal(t, 2, away())
}

// What still asks a sharer as its configuration ends says nothing of the store: no line
// in the log, and nobody probes for it.
func TestShareEndsQuietly(t *testing.T) {
	core, log := observer.New(zap.InfoLevel)
	s, err := newSharer("redis://"+freeAddr(t), zap.New(core))
	require.NoError(t, err)
	s.stop()
	e := &entry{shared: "x", interval: time.Second}
	require.Zero(t, s.lease(e, false))
	s.tell(e, mcphealth.Result{Verdict: mcphealth.Ready, Reason: mcphealth.OK})
	require.Empty(t, log.All())
	require.False(t, s.isAway())
}
