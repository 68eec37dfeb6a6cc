//go:build go1.21

package traefikplugin

import (
	"os"
	"os/signal"
	"reflect"
	"sync"
	"sync/atomic"
	"time"
)

// Traefik does not end the contexts of its middlewares as it stops, and is gone some ms
// after the signal. So the plugin listens for the signal too, and ends the sessions that
// its probes hold beside Traefik's own graceful stop, which it neither delays nor replaces.

// stopping: Traefik has been told to stop. Nothing is probed any more, so nothing that
// comes back would be noticed: what cannot be served now is refused, not held.
var stopping atomic.Bool

// sigterm is SIGTERM, whose package syscall a plugin cannot import, on Windows too.
const sigterm = 15

// stops is the signals that have Traefik stop.
func stops() []os.Signal {
	all := []os.Signal{os.Interrupt}
	term := reflect.New(reflect.TypeOf(os.Interrupt)).Elem()
	if term.Kind() == reflect.Int {
		term.SetInt(sigterm)
		if s, ok := term.Interface().(os.Signal); ok {
			all = append(all, s)
		}
	}
	return all
}

// listen has the servers given up, and those who wait refused, at a signal to stop, until
// deafen. Both are called with groups.mu held: a fallback holds where there are no servers.
func listen() {
	if groups.signals != nil || stopping.Load() {
		return
	}
	signals := make(chan os.Signal, 1)
	groups.signals = signals
	signal.Notify(signals, stops()...)
	time.AfterFunc(0, func() {
		defer func() { complain("shutdown", recover()) }()
		if s := <-signals; s != nil { // nil: closed
			shutDown()
		}
	})
}

func deafen() {
	if groups.signals != nil {
		signal.Stop(groups.signals)
		close(groups.signals)
		groups.signals = nil
	}
}

// shutDown closes all checkers at once: the sessions must be ended before Traefik is gone.
// Then those who wait look once more. Where Traefik serves for some time yet, requests go
// by what was known last.
func shutDown() {
	stopping.Store(true)
	all := servers() // what is acquired from now on is not probed
	var closed sync.WaitGroup
	closed.Add(len(all))
	for i := 1; i < len(all); i++ {
		all[i].giveUpSoon(&closed)
	}
	if len(all) > 0 {
		all[0].giveUp(&closed) // at once: a goroutine of its own begins later
	}
	closed.Wait()
	for i := 0; i < len(all); i++ {
		all[i].tell() // one that was never probed is in now
	}
	groups.mu.Lock()
	defer groups.mu.Unlock()
	deafen() // a second signal is Traefik's alone
	for _, g := range groups.m {
		g.wake()
	}
}

// prepare has the end of the session at hand that is held now: at the signal there is no
// time to interpret much.
func (s *server) prepare() {
	f := s.checker.Farewell()
	s.mu.Lock()
	s.farewell = f
	s.mu.Unlock()
}

// giveUpSoon is not a closure in the loop, where Yaegi would have all of them give up the
// last server.
func (s *server) giveUpSoon(closed *sync.WaitGroup) {
	time.AfterFunc(0, func() { s.giveUp(closed) })
}

func (s *server) giveUp(closed *sync.WaitGroup) {
	defer func() { complain("shutdown", recover()) }()
	defer closed.Done()
	s.mu.Lock()
	f := s.farewell
	s.mu.Unlock()
	if f != nil {
		f(s.way)
	}
	_ = s.checker.Close()
}
