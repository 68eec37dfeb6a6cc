//go:build go1.21

package traefikplugin

import (
	"context"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// The death watch of the core asks a whole probe when a server's connection ends,
// and after a false alarm not again for an interval. Here, where live calls cannot be
// caught, each millisecond until the server is out costs some. So the plugin watches
// the same connection itself: a refused dial is the quickest proof of death, and a
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

// watchConn tells its server that the other side has ended it. Written out, not
// embedded, for Yaegi.
type watchConn struct {
	c      net.Conn
	s      *server
	born   time.Time
	closed atomic.Bool // by us
}

// watch has the transport's connections watched for s.
func (s *server) watch(t *http.Transport) {
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		w := &watchConn{c: c, s: s, born: time.Now()}
		var conn net.Conn = w // Yaegi wraps an own type only through a variable of the interface
		return conn, nil
	}
}

func (w *watchConn) Read(b []byte) (int, error) {
	n, err := w.c.Read(b)
	if err != nil && !w.closed.Load() && !isTimeout(err) {
		s := w.s
		addr := w.c.RemoteAddr().String()
		again := time.Since(w.born) >= minLife
		time.AfterFunc(0, func() { s.look(addr, 0, again) })
	}
	return n, err
}

func isTimeout(err error) bool { return strings.Contains(err.Error(), "timeout") }

func (w *watchConn) Close() error {
	w.closed.Store(true)
	return w.c.Close()
}

func (w *watchConn) Write(b []byte) (int, error)        { return w.c.Write(b) }
func (w *watchConn) LocalAddr() net.Addr                { return w.c.LocalAddr() }
func (w *watchConn) RemoteAddr() net.Addr               { return w.c.RemoteAddr() }
func (w *watchConn) SetDeadline(t time.Time) error      { return w.c.SetDeadline(t) }
func (w *watchConn) SetReadDeadline(t time.Time) error  { return w.c.SetReadDeadline(t) }
func (w *watchConn) SetWriteDeadline(t time.Time) error { return w.c.SetWriteDeadline(t) }

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
