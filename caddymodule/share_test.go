package caddymodule

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
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
	s.lost(errors.New("use of closed network connection")) // what a call under way gets
	require.Empty(t, log.All())
	require.False(t, s.isAway())
}

// Around a reload the old configuration still listens: each verdict counts once, and
// none of this process's own.
func TestShareHearsOnce(t *testing.T) {
	a := newServer(t, "a")
	newEdge(t, "", `reverse_proxy `+a.addr+` {
		lb_policy mcp_health {
			interval 1h
		}
	}`)
	waitState(t, a.addr, mcphealth.Up)
	key := checkers.list()[0].shared
	before, now := &sharer{local: true}, &sharer{local: true}
	app := &App{sharer: now}
	apps.add(app)
	t.Cleanup(func() { apps.remove(app) })
	say := func(edge, server string) string {
		r := mcphealth.Result{Verdict: mcphealth.Ready, Reason: mcphealth.OK, Server: mcphealth.ServerInfo{Name: server}}
		b, err := json.Marshal(told{Edge: edge, Key: key, Result: r.Share()})
		require.NoError(t, err)
		return string(b)
	}
	heard := func() string { return snapshots(a.addr)[0].Last.Server.Name }

	before.receive(say("x", "by the old one"))
	now.receive(say(edgeName, "of our own"))
	require.NotContains(t, []string{"by the old one", "of our own"}, heard())
	now.receive(say("x", "by the new one"))
	require.Equal(t, "by the new one", heard())
	now.local = false
	now.receive(say("x", "over another machine's store"))
	require.Equal(t, "by the new one", heard())
}

// An address that is another server on each machine is nobody else's business.
func TestShareOwnAddresses(t *testing.T) {
	for _, tt := range []struct {
		network, address string
		own              bool
	}{
		{"tcp", "127.0.0.1:8000", true}, {"tcp", "127.3.2.1:8000", true}, {"tcp", "[::1]:8000", true}, {"tcp", "[::ffff:127.0.0.1]:8000", true},
		{"tcp", "localhost:8000", true}, {"tcp", "LOCALHOST.:8000", true}, {"tcp", "app.localhost:8000", true}, {"tcp", ":8000", true},
		{"tcp", "0.0.0.0:8000", true}, {"tcp", "169.254.1.1:80", true}, {"tcp", "[fe80::1%eth0]:80", true},
		{"unix", "/run/mcp.sock", true}, {"unix+h2c", "/run/mcp.sock", true},
		{"tcp", "10.0.0.7:8000", false}, {"tcp", "app1:8000", false}, {"tcp", "localhost.example.com:8000", false}, {"tcp", "[2001:db8::1]:80", false},
	} {
		require.Equal(t, tt.own, isOwn(tt.network, tt.address), "%s %s", tt.network, tt.address)
	}
	for url, local := range map[string]bool{"redis://localhost": true, "unix:///run/redis.sock": true, "redis://redis.internal:6379/1": false, "rediss://10.0.0.1": false} {
		s, err := newSharer(url, zap.NewNop())
		require.NoError(t, err)
		require.Equal(t, local, s.shares(&entry{shared: "x", own: true}), url)
		require.True(t, s.shares(&entry{shared: "x"}), url)
		require.False(t, s.shares(&entry{}), url)
		_ = s.client.Close()
	}
}

// Whatever a URL asks of the client library, it makes neither a panic nor a connection
// before the start.
func TestShareURL(t *testing.T) {
	const huge = "99999999999"
	for _, size := range []string{"-1", huge} {
		_, err := newSharer("redis://localhost?pool_size="+size, zap.NewNop())
		require.ErrorContains(t, err, "pool_size "+size)
	}
	met := make(chan struct{}, 8)
	url := "redis://" + speak(t, func(net.Conn) { met <- struct{}{} })
	for _, option := range []string{"min_idle_conns=3", "min_idle_conns=" + huge, "max_idle_conns=" + huge, "max_active_conns=" + huge,
		"max_concurrent_dials=-1", "pipeline_pool_size=" + huge, "pool_size=10000"} {
		s, err := newSharer(url+"?"+option, zap.NewNop())
		require.NoError(t, err, option)
		require.Zero(t, s.client.Options().MinIdleConns, option)
		s.stop()
	}
	require.Empty(t, met)
}

// fakeStore answers each question in its own way, those of the client library about
// itself aside.
func fakeStore(t *testing.T, answer func(asked string) string) (url string) {
	t.Helper()
	return "redis://" + speak(t, func(c net.Conn) {
		for b := make([]byte, 1024); ; {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			asked := strings.ToLower(string(b[:n]))
			said := strings.Repeat("-ERR unknown command\r\n", strings.Count(asked, "\nhello\r")+strings.Count(asked, "\nclient\r"))
			if said == "" {
				said = answer(asked)
			}
			_, _ = io.WriteString(c, said)
		}
	})
}

// A configuration ends though its store does well, and nothing comes from it.
func TestShareStops(t *testing.T) {
	url := fakeStore(t, func(asked string) string {
		if strings.Contains(asked, "subscribe") {
			return "*3\r\n$9\r\nsubscribe\r\n$21\r\nmcphealth:1:results:0\r\n:1\r\n"
		}
		return "*2\r\n$4\r\npong\r\n$0\r\n\r\n"
	})
	s, err := newSharer(url, zap.NewNop())
	require.NoError(t, err)
	s.start()
	eventually(t, s.hears.Load, "it does not listen")
	time.Sleep(storePing + 100*time.Millisecond) // until it has made sure
	require.True(t, s.hears.Load())
	stopped := make(chan struct{})
	go func() { s.stop(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(5 * time.Second):
		t.Fatal("it still listens after 5 s")
	}
}

// As many questions as probes that run at once do not make a store that is far off away.
func TestShareFarStore(t *testing.T) {
	url := fakeStore(t, func(string) string {
		time.Sleep(40 * time.Millisecond)
		return "*2\r\n:0\r\n$-1\r\n"
	})
	s, err := newSharer(url, zap.NewNop())
	require.NoError(t, err)
	defer s.stop()
	var all sync.WaitGroup
	for i := range 512 {
		all.Go(func() { s.lease(&entry{shared: strconv.Itoa(i), interval: time.Second}, false) })
	}
	all.Wait()
	require.False(t, s.isAway())
}

// A store that says nonsense, here of a text longer than memory, is away, and ends nothing.
func TestShareNonsense(t *testing.T) {
	url := fakeStore(t, func(string) string { return "$9223372036854775800\r\n" })
	core, log := observer.New(zap.InfoLevel)
	s, err := newSharer(url, zap.New(core))
	require.NoError(t, err)
	s.start()
	defer s.stop()
	app := &App{sharer: s}
	apps.add(app)
	defer apps.remove(app)
	e := &entry{shared: "x", interval: time.Second}
	for range 3 {
		require.Zero(t, e.lease(false))
		e.tell(mcphealth.Result{Verdict: mcphealth.Ready, Reason: mcphealth.OK})
		s.away.Store(0)
	}
	eventually(t, func() bool { return log.FilterMessageSnippet("is away").Len() == 1 }, "the store is not said to be away")
}
