//go:build go1.21

package traefikplugin

import (
	"net"
	"strings"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// The death watch of the core asks a whole probe when a server's connection ends,
// and after a false alarm not again for an interval. Here, where live calls cannot be
// caught, each millisecond until the server is out costs some. So the plugin hears of
// the end itself: a refused dial is the quickest proof of death, and a
// healthy server that hung up, as Node's do after 5 s, is probed for a new one.

// maxLooks is how often a server whose connection has ended is dialled: a dying
// process may close its connections before its listener, so the first dial may
// succeed. The pauses double from 2 ms on.
const maxLooks = 5

// minLife is how long a connection must have lived for its end to be worth a probe:
// servers that hang up at once would be probed without end.
const minLife = time.Second

// lookTimeout bounds one dial. A host that drops packets is left to the probe.
const lookTimeout = time.Second

// ended is told by the core that the other side has ended the connection.
func (s *server) ended(addr string, born time.Time) {
	again := time.Since(born) >= minLife
	time.AfterFunc(0, func() { s.look(addr, 0, again) })
}

func isTimeout(err error) bool { return strings.Contains(err.Error(), "timeout") }

// look dials the server whose connection has ended, and takes it out at once if it
// refuses. A probe follows, also, if again, when it does not.
func (s *server) look(addr string, times int, again bool) {
	defer func() { complain("look", recover()) }()
	c, err := net.DialTimeout("tcp", addr, lookTimeout)
	if err != nil && isTimeout(err) {
		return
	}
	if err == nil || !strings.Contains(err.Error(), "refused") {
		if err == nil {
			_ = c.Close()
		} else {
			again = true // reset while it dies: look on, and ask in any case
		}
		times++
		if times < maxLooks {
			time.AfterFunc(time.Millisecond<<times, func() { s.look(addr, times, again) })
		} else if again {
			s.checker.Probe()
		}
		return
	}
	s.left(time.Now())
	s.tell()
	s.checker.Probe()
}

// left notes that the server refused a connection.
func (s *server) left(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.goneAt = at
	s.gone.Store(true)
}

// downSince is when the server went down; zero: it did not.
func (s *server) downSince() time.Time {
	if now := s.checker.Snapshot(); now.State == mcphealth.Down {
		return now.Since
	}
	if !s.gone.Load() {
		return time.Time{}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.goneAt
}

// answered notes the end of a probe that began then: one that is older than the
// refusal does not know of it.
func (s *server) answered(began time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if began.After(s.goneAt) {
		s.gone.Store(false)
	}
}

// follow has f called after each probe, and when the server is found gone.
func (s *server) follow(f func()) (stop func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := s.nextID
	s.nextID++
	s.followers[id] = f
	return func() {
		s.mu.Lock()
		delete(s.followers, id)
		s.mu.Unlock()
	}
}

func (s *server) tell() {
	s.mu.Lock()
	var all []func()
	for _, f := range s.followers {
		all = append(all, f)
	}
	s.mu.Unlock()
	for i := 0; i < len(all); i++ {
		all[i]()
	}
}
