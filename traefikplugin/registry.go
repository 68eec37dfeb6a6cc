//go:build go1.21

package traefikplugin

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// linger is how long a server that nothing uses any more stays known: Traefik
// ends the old configuration just before it builds the new one.
var linger = 10 * time.Second

// server is one upstream, probed once for all routers that use it.
type server struct {
	key     string
	checker *mcphealth.Checker
	way     *http.Transport // to it, as probes go
	refs    int             // guarded by registry.mu
	gone    atomic.Bool     // refuses connections, and no probe has said otherwise since
	proved  atomic.Bool     // a probe has got an answer from it, once
	account *account
	every   time.Duration // it is probed, while nothing is the matter

	mu        sync.Mutex
	goneAt    time.Time
	foreignAt time.Time // directTransport did not trust its certificate, which probes do
	nextID    int
	followers map[int]func()
	farewell  func(http.RoundTripper) // nil: no session is held
}

// registry holds all servers. It lives as long as the interpreter, and so over
// Traefik's reloads.
var registry struct {
	mu        sync.Mutex
	servers   map[string]*server
	scheduler *mcphealth.Scheduler // of all of them
}

// acquire finds or makes the server that is probed at url as set says. Each call
// needs a release.
func acquire(set *settings, url string) (*server, error) {
	t := set.target
	t.URL = url
	key := fingerprint(t, set.schedule)
	registry.mu.Lock()
	defer registry.mu.Unlock()
	if registry.servers == nil {
		registry.servers = map[string]*server{}
		registry.scheduler = mcphealth.NewScheduler(mcphealth.Limits{})
	}
	if s := registry.servers[key]; s != nil {
		s.refs++
		return s, nil
	}
	s := &server{key: key, refs: 1, followers: map[int]func(){}}
	c, err := newChecker(t, set.schedule, s)
	if err != nil {
		return nil, err
	}
	s.checker = c
	s.account = openAccount(url)
	s.every = set.schedule.Interval
	registry.servers[key] = s
	c.OnChange(func(c mcphealth.Change) {
		logChange(c)
		s.moved(c)
	})
	c.OnResult(func(r mcphealth.Result) {
		defer func() { complain("OnResult", recover()) }()
		s.account.probed(r)
		if r.Verdict != mcphealth.Dead && r.Verdict != mcphealth.Unknown {
			s.proved.Store(true)
		}
		s.answered(r.At)
		s.prepare()
		s.tell()
	})
	if !stopping.Load() {
		c.Start()
	}
	return s, nil
}

// release gives a server back; the last one to do so ends it.
func release(s *server) {
	registry.mu.Lock()
	s.refs--
	last := s.refs == 0
	if last {
		delete(registry.servers, s.key)
	}
	registry.mu.Unlock()
	if last {
		_ = s.checker.Close()
		closeAccount(s.account, s.checker.Snapshot().State)
	}
}

// moved counts a change, unless it is one of reason only.
func (s *server) moved(c mcphealth.Change) {
	defer func() { complain("moved", recover()) }()
	if c.From != c.To {
		s.account.moved(c)
	}
}

// servers lists all that are known, by URL.
func servers() []*server {
	registry.mu.Lock()
	var all []*server
	for _, s := range registry.servers {
		all = append(all, s)
	}
	registry.mu.Unlock()
	sort.Slice(all, func(i, j int) bool { return all[i].key < all[j].key })
	return all
}

func newChecker(t mcphealth.Target, sched mcphealth.Schedule, s *server) (*mcphealth.Checker, error) {
	transport := &http.Transport{TLSHandshakeTimeout: t.Timeout}
	if len(t.Header) == 0 {
		// Whom to trust is the serversTransport's business, which a plugin cannot
		// read: without credentials to protect, a probe asks whether it lives.
		transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	}
	s.way = transport
	line := mcphealth.NewLine(transport)
	line.Ended = func(addr string, born time.Time) { s.ended(addr, born) }
	p, err := mcphealth.NewProber(t, line)
	if err != nil {
		return nil, err
	}
	sched.Scheduler = registry.scheduler
	return mcphealth.NewChecker(p, sched)
}

// fingerprint holds everything that can change a verdict.
func fingerprint(t mcphealth.Target, s mcphealth.Schedule) string {
	var header []string
	for k, v := range t.Header {
		header = append(header, k+":"+strings.Join(v, ","))
	}
	sort.Strings(header)
	return fmt.Sprintf("%s|%s|%q|%s|%q|%s|%s|%d|%d", t.URL, t.Host, header, t.AliveIf, t.ExpectTools, t.Timeout, s.Interval, s.Fall, s.Rise)
}

// logChange writes one line per change of state.
func logChange(c mcphealth.Change) {
	defer func() { complain("logChange", recover()) }()
	switch {
	case c.To == mcphealth.Down:
		warn("%s is down: %s (%s)", withoutQuery(c.URL), c.Reason, c.Detail)
	case c.From == mcphealth.Down:
		warn("%s is %s again (%s)", withoutQuery(c.URL), c.To, c.Reason)
	default:
		tell("%s is %s (%s)", withoutQuery(c.URL), c.To, c.Reason)
	}
}

// withoutQuery is a URL as it is shown: its query may hold a key.
func withoutQuery(url string) string {
	before, _, cut := strings.Cut(url, "?")
	if cut {
		return before + "?…"
	}
	return url
}

// alert is how crypto/tls says that the other side ended a handshake: a server lives
// there, which wants what probes have not, unless it has answered them before.
const alert = "remote error: tls: "

// tier is how willingly the server may be chosen. One that has not proved itself
// yet is waited for where requests can wait: a new container seldom listens at once.
// One that cannot be connected to is out before that is confirmed: its calls would
// fail, where they can wait some ms. One that is slow to answer is not.
func (s *server) tier(canHold bool) mcphealth.Tier {
	if s.gone.Load() {
		return mcphealth.TierDown
	}
	t := s.checker.Tier()
	if t != mcphealth.TierSuspect && t != mcphealth.TierUp && t != mcphealth.TierDown {
		return t
	}
	now := s.checker.Snapshot()
	if now.Last.Reason == mcphealth.TLS && !s.proved.Load() && strings.Contains(now.Last.Detail, alert) {
		warnOnce("%s refuses our TLS handshake (%s): if it wants what the serversTransport has, such as a client "+
			"certificate, it cannot be probed; it is left in the load balancer", withoutQuery(now.URL), now.Last.Detail)
		return mcphealth.TierSuspect
	}
	if t == mcphealth.TierDown {
		return t
	}
	if canHold && now.Probes == 0 && !stopping.Load() {
		return mcphealth.TierDown
	}
	if t == mcphealth.TierUp || now.Last.Verdict != mcphealth.Dead {
		return t
	}
	switch now.Last.Reason {
	case mcphealth.Refused, mcphealth.Reset, mcphealth.ConnectTimeout, mcphealth.DNS, mcphealth.TLS:
		return mcphealth.TierDown
	}
	if canHold && now.State == mcphealth.StateUnknown {
		return mcphealth.TierDown
	}
	return t
}

// best is the lowest tier among servers, TierDown if there are none.
func best(all []*server, canHold bool) mcphealth.Tier {
	b := mcphealth.TierDown
	for i := 0; i < len(all); i++ {
		if t := all[i].tier(canHold); t < b {
			b = t
		}
	}
	return b
}
