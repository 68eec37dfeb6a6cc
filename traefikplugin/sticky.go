//go:build go1.21

package traefikplugin

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// sessionField and versionField are the header fields by which a request says
	// what session it belongs to, spelled as Go spells them.
	sessionField = "Mcp-Session-Id"
	versionField = "Mcp-Protocol-Version"
	// minSecret is the shortest sessionKey: 16 bytes, which nobody finds by trying
	// if they are random.
	minSecret = 16
	// maxKnown is how many sessions a router knows the owners of: 10,000, some MB. Of
	// others each request reads the tag anew.
	maxKnown = 10_000
	// maxPath is the longest path that one is known for: 1 KiB. Clients may choose up to 1 MiB.
	maxPath = 1 << 10
)

// sticky brings the requests of a session to the server that opened it. The owner
// stands in the id that clients get (mcphealth.SessionKey); what chooses a server in
// Traefik's balancer is the service's sticky cookie, which is put into the request.
type sticky struct {
	k     *keeper
	route *route
	names *roll
	turn  atomic.Int32
	known *sync.Map    // by ids as clients have them: *ticket
	n     atomic.Int32 // of them
}

// roll is how the servers of a route are called where sessions are concerned. It points
// to nothing that leads back to a ticket, which Yaegi could not bear.
type roll struct {
	key    *mcphealth.SessionKey
	cookie string            // its name
	owner  []mcphealth.Owner // by the index of route.b.names
	value  []string          // the cookie's, by the same
}

// ticket is what a request says of the session that it belongs to. One that is known is
// never changed.
type ticket struct {
	method string   // of HTTP
	given  string   // the id as the client has it; "" = none
	again  []string // the same, as the field of an answer
	id     string   // as the server has it
	sent   []string // the same, as the field of a request; if it is known
	cookie []string // the field that has the owner chosen; if it is known
	path   string   // that it was met with; if it is known
	owner  mcphealth.Owner
	pinned bool   // the owner is known, and nobody else is asked
	other  bool   // another one, which nothing can be told any more, is at the answer
	chosen string // the cookie by which we chose a server; "" = Traefik chose
	by     *roll  // of who sent it on last: what is held may be in the next configuration
}

// errSticky is why sticky cannot be: whoever configured it must know, for sessions
// would be lost silently.
func errSticky(where, why, do string) error {
	return fmt.Errorf("%w: sticky on %s: %s: %s", errConfig, where, why, do)
}

// stick makes the handler that brings sessions to their owners, behind r.
func (k *keeper) stick(r *route) error {
	if strings.HasPrefix(k.router, onService) {
		return errSticky(where(k.group.key), "it is a middleware of a service, and a service above that one may send a session's requests elsewhere",
			"put it on the router, as the last middleware")
	}
	name := r.b.cookieName()
	if name == "" {
		return errSticky(where(k.group.key), "the service has no sticky cookie, by which Traefik could be told whom to choose",
			"set loadBalancer.sticky.cookie on it, with a strategy that knows it (wrr, p2c, leasttime)")
	}
	names := &roll{key: k.set.key, cookie: name}
	for i := 0; i < len(r.b.names); i++ {
		names.owner = append(names.owner, k.set.key.Owner(r.b.names[i]))
		names.value = append(names.value, cookieOf(r.b.names[i]))
	}
	s := &sticky{k: k, route: r, names: names, known: &sync.Map{}}
	r.serves(s)
	k.entry = s.entry()
	k.toOwner = func(pass *passage) http.Handler { return s.way(pass) }
	return nil
}

// entry is where requests come in. Calls in sessions whose owner is up go on at once, all
// in one function that does nothing else: in Yaegi each expression that stands in one
// costs, reached or not, and a call of a method four times that of a function. What brings
// a cookie does not, and a websocket is no POST. The header is what clients sent again when
// the call is over.
func (s *sticky) entry() http.Handler {
	next := s.route.b.handler
	known := s.known
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		h := req.Header
		if ids := h[sessionField]; len(ids) == 1 {
			if h["Cookie"] == nil && req.Method == http.MethodPost {
				if found, ok := known.Load(ids[0]); ok {
					t := found.(*ticket)
					if t.path == req.URL.Path {
						h[sessionField] = t.sent
						h["Cookie"] = t.cookie
						next.ServeHTTP(&stamp{ResponseWriter: rw, t: t}, req)
						h[sessionField] = ids
						delete(h, "Cookie")
						return
					}
				}
			}
		}
		enter(s, rw, req)
	})
}

// enter has requests of no session go on at once while they may go anywhere.
func enter(s *sticky, rw http.ResponseWriter, req *http.Request) {
	h := req.Header
	if v := h[versionField]; len(v) == 1 && v[0] == mcphealth.SessionlessVersion && s.route.free.Load() && len(h["Cookie"]) == 0 {
		s.route.b.handler.ServeHTTP(rw, req)
		return
	}
	s.serve(rw, req)
}

// learn has the next requests of a session whose owner is up as it stands, and that are
// for the same path, go on at once.
func (s *sticky) learn(path string, t *ticket, i int, now *standing) {
	if len(path) > maxPath {
		return
	}
	value := s.names.value[i]
	known := &ticket{given: t.given, again: []string{t.given}, id: t.id, owner: t.owner, pinned: true, chosen: value, by: s.names,
		sent: []string{t.id}, cookie: []string{s.names.cookie + "=" + value}, path: strings.Clone(path)} // not the whole line that it came in
	if _, ok := s.known.LoadOrStore(t.given, known); !ok && s.n.Add(1) > maxKnown {
		s.n.Add(-1)
		s.known.Range(func(id, _ interface{}) bool {
			s.known.Delete(id)
			return false
		})
	}
	if s.route.standing() != now { // forget may have come before
		s.known.Delete(t.given)
	}
}

// forget has requests look again whether the owner is up.
func (s *sticky) forget() {
	s.known.Range(func(id, _ interface{}) bool {
		s.known.Delete(id)
		return true
	})
	s.n.Store(0)
}

// resume is the passage of a request that went on at once and came to our child all the
// same, since its owner had gone: nothing but its header tells what it is. nil: it did not.
func (s *sticky) resume(req *http.Request) *passage {
	ids := req.Header[sessionField]
	lines := req.Header["Cookie"]
	if len(ids) != 1 || len(lines) != 1 {
		return nil
	}
	name, value, _ := strings.Cut(lines[0], "=")
	i := s.names.position(value)
	if i < 0 || name != s.names.cookie {
		return nil
	}
	owner := s.names.owner[i]
	return &passage{ticket: &ticket{method: req.Method, given: s.k.set.key.Tag(ids[0], owner), id: ids[0], owner: owner, pinned: true, other: true}}
}

// cookieName is that of the service's sticky cookie (sticky.cookie.name in
// pkg/server/service/loadbalancer); "" if it has none.
func (b *balancer) cookieName() string {
	v := reflect.ValueOf(b.handler).Elem()
	fields := []string{"sticky", "cookie", "name"}
	for i := 0; i < len(fields); i++ {
		v = elem(v)
		if v.Kind() != reflect.Struct {
			return ""
		}
		v = v.FieldByName(fields[i])
	}
	if v.Kind() != reflect.String {
		return ""
	}
	return v.String()
}

// serve takes a request as the client sent it, or as an instance before us held it.
func (s *sticky) serve(rw http.ResponseWriter, req *http.Request) {
	pass, _ := req.Context().Value(passKey).(*passage)
	if pass != nil && pass.ticket != nil {
		s.send(rw, req, pass)
		return
	}
	if s.k.set.pathOf(req.URL.Path) == "" || strings.EqualFold(req.Header.Get("Upgrade"), "websocket") { // h2c is what Java's client tries
		s.route.b.handler.ServeHTTP(rw, req)
		return
	}
	t := s.read(req)
	if t == nil {
		s.anywhere(rw, req, nil)
		return
	}
	if pass == nil {
		pass = &passage{}
	}
	pass.ticket = t
	req = pass.mark(req)
	req.Header = req.Header.Clone()
	if t.pinned {
		req.Header[sessionField] = []string{t.id}
	}
	var w http.ResponseWriter = &stamp{ResponseWriter: rw, t: t}
	s.send(w, req, pass)
}

// read finds out what session a request belongs to; nil: it belongs to none, and its
// answer opens none.
func (s *sticky) read(req *http.Request) *ticket {
	if v := req.Header[versionField]; len(v) > 0 && !mcphealth.HasSessions(v[0]) {
		return nil
	}
	values := req.Header[sessionField]
	if len(values) != 1 || values[0] == "" {
		if req.Method != http.MethodPost {
			return nil
		}
		return &ticket{method: req.Method}
	}
	t := &ticket{method: req.Method, given: values[0], again: values}
	t.id, t.owner, t.pinned = s.k.set.key.Split(t.given)
	return t
}

// send sends a request of a session to its owner, others to anyone. While the owner
// is away it waits for it, then refuses; when that is over, the session is lost.
func (s *sticky) send(rw http.ResponseWriter, req *http.Request, pass *passage) {
	t := pass.ticket
	t.by = s.names
	switch {
	case t.given == "":
		s.anywhere(rw, req, t)
		return
	case !t.pinned: // an id that is not ours goes as it came, with its cookie
		s.route.b.handler.ServeHTTP(rw, req)
		return
	}
	now := s.route.standing()
	if i := s.index(t.owner); i >= 0 && now.up[i] {
		s.learn(req.URL.Path, t, i, now)
		s.to(rw, req, t, s.names.value[i])
		return
	}
	k := s.k
	k.serve(rw, req, func() http.Handler { return k.group.toOwner(k.router, pass) })
}

// way is how a request gets on whose owner was away: to it, to somebody else if it opens
// a session, or to the news that its own is lost; nil while none of these.
func (s *sticky) way(pass *passage) http.Handler {
	i := s.index(pass.ticket.owner)
	pass.owner = nil
	if i >= 0 {
		if s.route.standing().up[i] {
			value := s.names.value[i]
			return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) { s.to(rw, req, pass.ticket, value) })
		}
		pass.owner = s.route.server[i]
	}
	opens := mcphealth.OpensSession(pass.ticket.method, firstOf(pass.body)) && s.others(i)
	if !s.lost(i, pass.ticket.owner) && !opens {
		return nil
	}
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		if mcphealth.OpensSession(req.Method, pass.beginning(req)) {
			s.reopen(rw, req, pass)
			return
		}
		lostSessions.Add(1)
		reason, _ := s.k.why(pass)
		tell("%s: a session is lost with its server (%s): the client is told to open a new one", where(s.k.group.key), reason)
		mcphealth.SessionLost(req.Method, mcphealth.RequestID(pass.beginning(req)), reason).Send(rw)
		drain(rw, req)
	})
}

// reopen sends a request that opens a session to anyone: its client has understood that
// the old one is over, and only kept its id. Nobody would take that for a new one.
func (s *sticky) reopen(rw http.ResponseWriter, req *http.Request, pass *passage) {
	if !pass.kept { // its beginning has been read
		var whole io.ReadCloser = &restored{r: io.MultiReader(bytes.NewReader(pass.body), req.Body), c: req.Body}
		req.Body = whole
	}
	t := pass.ticket
	t.given = ""
	t.id = ""
	t.pinned = false
	t.by = s.names
	pass.owner = nil
	delete(req.Header, sessionField)
	s.anywhere(rw, req, t)
}

// index is the owner's position among the servers; -1: there is no such server.
func (s *sticky) index(o mcphealth.Owner) int {
	owner := s.names.owner
	for i := 0; i < len(owner); i++ {
		if owner[i] == o && s.route.server[i] != nil {
			s.k.group.missing.Found(o)
			return i
		}
	}
	return -1
}

// to has the balancer choose the server of that cookie. The request's header is ours.
func (s *sticky) to(rw http.ResponseWriter, req *http.Request, t *ticket, value string) {
	t.chosen = value
	t.by = s.names
	if len(req.Header["Cookie"]) == 0 {
		req.Header["Cookie"] = []string{s.names.cookie + "=" + value}
	} else {
		setCookie(req.Header, s.names.cookie, value)
	}
	s.route.b.handler.ServeHTTP(rw, req)
}

// anywhere sends new work to one of the servers that want it: Traefik chooses while
// all do, and where only its cookie can tell who answered. A cookie that the client
// brought along does not count: it may name a server that drains, and binds requests
// that belong to no session.
func (s *sticky) anywhere(rw http.ResponseWriter, req *http.Request, t *ticket) {
	value := ""
	if prefer := s.route.standing().prefer; len(prefer) > 0 && (t == nil || !t.other) {
		value = s.names.value[prefer[int(s.turn.Add(1)&0xffff)%len(prefer)]]
	}
	if value != "" || len(req.Header["Cookie"]) > 0 {
		if t == nil {
			req = req.WithContext(req.Context())
			req.Header = req.Header.Clone()
		}
		setCookie(req.Header, s.names.cookie, value)
	}
	if t != nil {
		t.chosen = value
	}
	s.route.b.handler.ServeHTTP(rw, req)
}

// setCookie puts that cookie into the header of a request, and takes out any other of
// the name; with an empty value it puts in none.
func setCookie(h http.Header, name, value string) {
	var keep []string
	lines := h["Cookie"]
	for i := 0; i < len(lines); i++ {
		all := strings.Split(lines[i], ";")
		for j := 0; j < len(all); j++ {
			c := strings.TrimSpace(all[j])
			called, _, _ := strings.Cut(c, "=") // the name ends as net/http has it end
			if c != "" && strings.TrimSpace(called) != name {
				keep = append(keep, c)
			}
		}
	}
	if value != "" {
		keep = append(keep, name+"="+value)
	}
	if len(keep) > 0 {
		h["Cookie"] = []string{strings.Join(keep, "; ")}
	} else {
		delete(h, "Cookie")
	}
}

// stamp is the way of an answer to the client: it writes the owner into the id of a
// session. Its Header and its Write are those of the writer that it embeds at the time, by
// the compiler's rules and by Yaegi's, which costs nothing: what writes no head first, as
// none of Traefik's proxies does, passes as it comes. What most answers need is in
// WriteHeader, the rest elsewhere (see entry).
type stamp struct {
	http.ResponseWriter
	t     *ticket
	from  string // the cookie of who was chosen, if it came with an early head
	begun bool   // begin has written the head
}

func (w *stamp) WriteHeader(status int) {
	h := w.Header()
	if status < http.StatusBadRequest {
		if h["Set-Cookie"] == nil {
			ids := h[sessionField]
			if ids != nil {
				if ids[0] == w.t.id {
					h[sessionField] = w.t.again
					ids = nil
				}
			}
			if ids == nil {
				w.ResponseWriter.WriteHeader(status)
				if h["Content-Length"] == nil {
					flow(w, status)
				}
				return
			}
		}
	}
	begin(w, h, status)
}

// begin writes a head that has more to it than the id which the client knows.
func begin(w *stamp, h http.Header, status int) {
	if w.begun {
		return
	}
	t := w.t
	if len(h["Set-Cookie"]) > 0 {
		if from := t.by.takeCookie(h); from != "" {
			w.from = from
		}
	}
	if status < http.StatusOK { // early hints and the like, after which the header is cleared; upgrades do not come here
		w.ResponseWriter.WriteHeader(status)
		return
	}
	w.begun = true
	from := w.from
	if from == "" {
		from = t.chosen
	}
	if t.pinned && from != t.chosen && status >= http.StatusBadRequest {
		w.refuse(h)
		return
	}
	if len(h[sessionField]) > 0 {
		t.by.mark(h, t, from)
	}
	w.ResponseWriter.WriteHeader(status)
	if h["Content-Length"] == nil || status >= http.StatusBadRequest { // its client may still be sending
		flow(w, status)
	}
}

// flow has the head go on at once, and all pieces.
func flow(w *stamp, status int) {
	if status < http.StatusOK { // early hints and the like: another head follows
		return
	}
	if status >= http.StatusBadRequest && withheld(w.ResponseWriter) {
		return
	}
	c := http.NewResponseController(w.ResponseWriter)
	_ = c.Flush()
	w.ResponseWriter = &flushed{ResponseWriter: w.ResponseWriter, c: c}
}

// withheld reports whether Traefik's retry, in front, has kept the head that was written
// to itself, and will try again. A flush it would let through all the same, as a 200
// without header.
func withheld(rw http.ResponseWriter) bool {
	v := retryOf(rw)
	return v.IsValid() && !v.FieldByName("written").Bool()
}

// resends reports whether that retry has the body itself: it keeps it where it goes by the
// status of answers too, and may do so for this call. It has since Traefik 3.7.
func resends(rw http.ResponseWriter) bool {
	v := retryOf(rw)
	if !v.IsValid() {
		return false
	}
	f := v.FieldByName("statusCodeRange")
	return f.Kind() == reflect.Slice && f.Len() > 0
}

// retryOf is the writer of Traefik's retry, which others may stand between (its field
// written is the same in 3.4 to 3.7, pkg/middlewares/retry); not valid: there is none.
func retryOf(rw http.ResponseWriter) reflect.Value {
	v := elem(reflect.ValueOf(rw))
	for v.Kind() == reflect.Struct {
		f := v.FieldByName("written")
		if f.Kind() == reflect.Bool {
			return v
		}
		if f.IsValid() { // in net/http's own a number
			break
		}
		v = inner(v)
	}
	return reflect.Value{}
}

// inner is the writer that a writer writes to; ours are in what Yaegi puts around them.
func inner(v reflect.Value) reflect.Value {
	for i := 0; i < v.NumField(); i++ {
		field := v.Type().Field(i)
		if field.Type.String() == "http.ResponseWriter" || field.Name == "IValue" {
			return elem(v.Field(i))
		}
	}
	return reflect.Value{}
}

// refuse replaces what a server said that was not the owner: that went down as it
// was chosen.
func (w *stamp) refuse(h http.Header) {
	h.Del("Content-Encoding")
	h.Del(sessionField)
	mcphealth.Unavailable(http.MethodPost, mcphealth.NullID, mcphealth.Refused, routeRetry).Send(w.ResponseWriter)
	w.ResponseWriter = &dropped{ResponseWriter: w.ResponseWriter}
}

// flushed is how the pieces of a stream go on: at once. Interpreted, a writer has no Flush
// that Traefik could call, and so flushes itself what Traefik's proxy would.
type flushed struct {
	http.ResponseWriter
	c *http.ResponseController
}

func (w *flushed) Write(b []byte) (int, error) {
	n, err := w.ResponseWriter.Write(b)
	_ = w.c.Flush()
	return n, err
}

// dropped takes what is left of an answer that was replaced.
type dropped struct{ http.ResponseWriter }

func (*dropped) Write(b []byte) (int, error) { return len(b), nil }

// takeCookie takes back the cookie by which Traefik says whom it chose, and returns
// its value: clients have the session's id for that. After a reload it may name one that
// we do not know.
func (r *roll) takeCookie(h http.Header) string {
	chosen := ""
	var keep []string
	all := h["Set-Cookie"]
	for i := 0; i < len(all); i++ {
		pair, _, _ := strings.Cut(all[i], ";")
		name, value, _ := strings.Cut(pair, "=")
		if name == r.cookie {
			chosen = value
		} else {
			keep = append(keep, all[i])
		}
	}
	if chosen == "" {
		return ""
	}
	if len(keep) == 0 {
		h.Del("Set-Cookie")
	} else {
		h["Set-Cookie"] = keep
	}
	return chosen
}

func (r *roll) position(value string) int {
	for i := 0; i < len(r.value); i++ {
		if r.value[i] == value {
			return i
		}
	}
	return -1
}

// mark writes the owner into the id that an answer gives out. Who has an id gets back
// what it sent: clients take any other one for a foreign session.
func (r *roll) mark(h http.Header, t *ticket, from string) {
	values := h[sessionField]
	if len(values) != 1 || values[0] == "" {
		return
	}
	if t.given != "" && values[0] == t.id {
		h[sessionField] = []string{t.given}
		return
	}
	if i := r.position(from); i >= 0 {
		h[sessionField] = []string{r.key.Tag(values[0], r.owner[i])}
	}
}

// lost reports whether the sessions of an owner ended with it: it is gone for longer
// than the grace, and somebody else could open a new one.
func (s *sticky) lost(i int, o mcphealth.Owner) bool {
	var since time.Time
	if i < 0 {
		since = s.k.group.missing.Since(o)
	} else {
		since = s.route.server[i].downSince()
	}
	return s.others(i) && !since.IsZero() && time.Since(since) >= s.k.set.sessionGrace
}

// others reports whether anybody but server i could open a session: one that ends cannot.
func (s *sticky) others(i int) bool {
	up := s.route.standing().up
	for j := 0; j < len(up); j++ {
		if up[j] && j != i && !s.route.b.fenced[s.route.b.names[j]] {
			return true
		}
	}
	return false
}

// sessionKeys are those in use, by their secret: that for "" is made when it is needed, and
// ends with the process.
var sessionKeys struct {
	mu sync.Mutex
	m  map[string]*mcphealth.SessionKey
}

func keyOf(secret string) (*mcphealth.SessionKey, error) {
	sessionKeys.mu.Lock()
	defer sessionKeys.mu.Unlock()
	if sessionKeys.m == nil {
		sessionKeys.m = map[string]*mcphealth.SessionKey{}
	}
	if k := sessionKeys.m[secret]; k != nil {
		return k, nil
	}
	b := []byte(secret)
	if secret == "" {
		b = make([]byte, 2*minSecret)
		if _, err := rand.Read(b); err != nil {
			return nil, fmt.Errorf("mcphealth: making a session key: %w", err)
		}
	}
	k := mcphealth.NewSessionKey(b)
	sessionKeys.m[secret] = k
	return k, nil
}
