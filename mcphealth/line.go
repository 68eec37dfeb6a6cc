//go:build go1.21

package mcphealth

import (
	"context"
	"net"
	"net/http"
	"sync"
	"time"
)

// maxHeader is how many bytes of answer headers a probe accepts: 64 KiB, far
// above any MCP server's and far below what hurts.
const maxHeader = 64 << 10

// smallBuffer is how much of an answer a probe reads at once, and bigBuffer how much of a
// question it writes: 1 and 2 KiB, for nearly all are shorter.
const (
	smallBuffer = 1 << 10
	bigBuffer   = 2 << 10
)

// watchFor is how long one connection is watched before that of a newer probe takes its
// place: 3 minutes, for load balancers forget idle ones after 4 (Azure) or 6 (AWS), and
// an end on the far side of them would go unheard.
const watchFor = 3 * time.Minute

// Line is the way to one upstream. Each question dials afresh, which proves that
// the server still accepts; the connection of a good one stays open, idle, so
// that its end tells of the server's death at once.
type Line struct {
	// Prepare, if set before the first question, may replace the request, to put
	// what the proxy's transport needs into its context.
	Prepare func(*http.Request) *http.Request

	// Ended, if set before the first question, is called when the other side has ended the
	// connection to this address, which was dialled at born. It must not block.
	Ended func(addr string, born time.Time)

	base    *http.Transport   // each probe's own transport is made from it
	plain   bool              // a question needs none
	foreign http.RoundTripper // anything else; it may reuse connections, and is not watched

	own     *http.Transport // of the probe that runs, or the last if it still has the connection
	crowded bool            // the last probe got no answer beside a watched connection
	single  bool            // and the one after it, without, did: nothing is kept beside a question

	mu    sync.Mutex
	conn  *watchedConn  // the last one dialled, or the one that is watched
	alarm func()        // called once, when conn ends while idle
	lived time.Duration // how old the watched one was when the other side ended it, until a probe tells why
	least time.Duration // the least of them after which the server was well: it hangs up on idle ones; 0: none
}

// NewLine makes a line that goes as t does, with its dialer, TLS settings and
// protocols. t itself carries nothing, and must not change any more.
func NewLine(t *http.Transport) *Line { return &Line{base: t} }

// transport makes the transport of a probe. It is kept no longer than the probe: ten
// thousand of them would take more memory than all that is known of their upstreams.
func (l *Line) transport() *http.Transport {
	if l.own != nil {
		return l.own
	}
	t := l.base.Clone()
	dial := t.DialContext
	if dial == nil {
		dial = dialContext
	}
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return l.watch(c), nil
	}
	if t.TLSNextProto != nil { // it may lead into the pool of the transport it was cloned from
		t.TLSNextProto = nil
		t.ForceAttemptHTTP2 = true
	}
	if t.MaxResponseHeaderBytes == 0 || t.MaxResponseHeaderBytes > maxHeader {
		t.MaxResponseHeaderBytes = maxHeader
	}
	t.ReadBufferSize = smallBuffer
	t.WriteBufferSize = bigBuffer
	t.DisableCompression = true
	t.DisableKeepAlives = false
	t.MaxIdleConnsPerHost = 1
	t.IdleConnTimeout = 0
	l.own = t
	return t
}

// dialContext dials as Go does. No method value: Yaegi mistypes it.
func dialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, network, addr)
}

// NewForeignLine makes a line over any other transport: without death watch, and
// with "Connection: close" on each question.
func NewForeignLine(rt http.RoundTripper) *Line { return &Line{foreign: rt} }

// Close closes the connection, also one that HTTP/2 has yet to find idle, as after a
// question that was given up.
func (l *Line) Close() {
	l.mu.Lock()
	w := l.conn
	l.mu.Unlock()
	l.hangUp()
	l.own = nil
	if w != nil {
		_ = w.close()
	}
}

// fail is Close after a probe that found nothing good: silent, if it got no answer.
func (l *Line) fail(silent bool) {
	l.crowded = silent && l.watched() != nil
	l.Close()
	l.mu.Lock()
	l.lived = 0
	l.mu.Unlock()
}

// roundTrip sends one request over a fresh connection.
func (l *Line) roundTrip(req *http.Request) (*http.Response, error) {
	if l.foreign != nil {
		req.Close = true
	} else if l.watched() == nil {
		l.hangUp()
	}
	return l.beside(req)
}

// beside sends one request without closing what is open.
func (l *Line) beside(req *http.Request) (*http.Response, error) {
	if l.Prepare != nil {
		req = l.Prepare(req)
	}
	resp, err := l.send(req)
	if err == nil && resp.StatusCode == http.StatusSwitchingProtocols {
		// Nobody asked for it, and net/http's transport bounds reading from the
		// connection that is the body now by nothing.
		_ = resp.Body.Close()
		resp.Body = http.NoBody
	}
	return resp, err
}

func (l *Line) send(req *http.Request) (*http.Response, error) {
	switch {
	case l.foreign != nil:
		return l.foreign.RoundTrip(req)
	case l.isDirect(req):
		return l.exchange(req)
	}
	return l.transport().RoundTrip(req)
}

// watched is the connection that is watched and goes on to be, beside those of plain
// questions to come; nil: none.
func (l *Line) watched() *watchedConn {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.conn
	if !l.plain || l.single || w == nil || !w.guarded || w.ended {
		return nil
	}
	age := time.Since(w.born)
	if age >= watchFor || l.least > 0 && age >= l.least-l.least/4 {
		return nil
	}
	return w
}

// hangUp closes what is open and has no use any more.
func (l *Line) hangUp() {
	l.mu.Lock()
	l.alarm = nil
	w := l.conn
	l.conn = nil
	l.mu.Unlock()
	if w != nil {
		w.letGo()
	}
	if l.own != nil {
		l.own.CloseIdleConnections()
	}
}

// watchIdle takes the open connection from the transport, whose two goroutines and
// buffers end with that, and has alarm called once when the other side ends it. by
// does so if it can, a goroutine that reads otherwise. A connection that the
// transport still has a use for stays there and is watched in its hands. Without an
// open connection there is nothing to watch, and watchIdle reports false.
func (l *Line) watchIdle(by func(c net.Conn, ended func()) (stop func()), alarm func()) bool {
	l.single = l.single || l.crowded
	l.crowded = false
	l.mu.Lock()
	if l.lived > 0 && (l.least == 0 || l.lived < l.least) {
		l.least = l.lived
	}
	l.lived = 0
	w := l.conn
	if w == nil || w.ended {
		l.mu.Unlock()
		return false
	}
	l.alarm = alarm
	if w.guarded { // since an earlier probe
		l.mu.Unlock()
		return true
	}
	w.by = by
	if w.taken { // it never was in a transport
		l.mu.Unlock()
		w.guard()
		return true
	}
	w.leaving = true
	l.mu.Unlock()

	l.own.CloseIdleConnections() // which ends in w.Close, if it is idle
	l.mu.Lock()
	w.leaving = false
	taken := w.taken
	l.mu.Unlock()
	if taken {
		l.own = nil
	}
	return true
}

// rest keeps c, over which a plain line has had its answer, as the one to watch, unless
// one to the same address is.
func (l *Line) rest(c net.Conn, born time.Time) {
	if w := l.watched(); w != nil && w.c.RemoteAddr().String() == c.RemoteAddr().String() {
		_ = c.Close()
		return
	}
	l.replace(&watchedConn{c: c, l: l, born: born, taken: true})
}

// replace makes w the connection of the line, in place of one that may be watched.
func (l *Line) replace(w *watchedConn) {
	l.mu.Lock()
	before := l.conn
	l.conn = w
	l.mu.Unlock()
	if before != nil {
		before.letGo()
	}
}

// ended notes the end of w and raises the alarm if w is the one watched.
func (l *Line) ended(w *watchedConn) {
	l.mu.Lock()
	other := !w.ended // not we
	w.ended = true
	var alarm func()
	if l.conn == w {
		alarm = l.alarm
		l.alarm = nil
		if w.guarded {
			l.lived = time.Since(w.born)
		}
	}
	l.mu.Unlock()
	if other && l.Ended != nil {
		l.Ended(w.c.RemoteAddr().String(), w.born)
	}
	if alarm != nil {
		alarm()
	}
}

func (l *Line) watch(c net.Conn) net.Conn {
	w := &watchedConn{c: c, l: l, born: time.Now()}
	l.replace(w)
	var conn net.Conn = w // Yaegi wraps an own type only through a variable of the interface
	return conn
}

// watchedConn tells its line when the other side ends it. While a transport has it,
// that is when a Read fails: net/http keeps one waiting on an idle connection. Once
// taken from the transport it is a bare socket that nothing is written to, with
// whatever protocol state there was (TLS, HTTP/2) gone. Written out, not embedded,
// for Yaegi.
type watchedConn struct {
	c    net.Conn
	l    *Line
	born time.Time

	// guarded by l.mu
	ended   bool
	guarded bool // its end is waited for
	leaving bool // the transport's next Close leaves it open
	taken   bool // it was left open
	gone    bool // closed by letGo
	reading int  // Reads of the transport under way
	by      func(c net.Conn, ended func()) (stop func())
	stop    func()
}

// long ago, as a deadline, has a Read that waits return at once.
var longAgo = time.Unix(1, 0)

func (w *watchedConn) Read(b []byte) (int, error) {
	w.l.mu.Lock()
	if w.taken {
		w.l.mu.Unlock()
		return 0, net.ErrClosed
	}
	w.reading++
	w.l.mu.Unlock()
	n, err := w.c.Read(b)
	w.l.mu.Lock()
	w.reading--
	taken, last := w.taken, w.reading == 0
	w.l.mu.Unlock()
	switch {
	case taken && last:
		w.guard()
		return 0, net.ErrClosed
	case taken:
		return 0, net.ErrClosed
	case err != nil:
		w.l.ended(w)
	}
	return n, err
}

// Close closes the connection, or has it taken from the transport that calls this.
func (w *watchedConn) Close() error {
	w.l.mu.Lock()
	switch {
	case w.taken:
		w.l.mu.Unlock()
		return nil
	case w.leaving && !w.ended:
		w.taken = true
		reading := w.reading
		w.l.mu.Unlock()
		if reading == 0 {
			w.guard()
			return nil
		}
		return w.c.SetReadDeadline(longAgo) // the Read that ends by it goes on to guard
	}
	w.l.mu.Unlock()
	return w.close()
}

// close ends the connection, which is no news to the line.
func (w *watchedConn) close() error {
	w.l.mu.Lock()
	w.ended = true
	w.l.mu.Unlock()
	return w.c.Close()
}

// guard begins to watch the connection that was taken from its transport.
func (w *watchedConn) guard() {
	_ = w.c.SetDeadline(time.Time{})
	w.l.mu.Lock()
	gone, by := w.gone, w.by
	w.guarded = !gone
	w.l.mu.Unlock()
	if gone {
		return
	}
	var stop func()
	if by != nil {
		stop = by(w.c, func() { w.lost() })
	}
	if stop == nil {
		go wait(w)
		return
	}
	w.l.mu.Lock()
	w.stop, gone = stop, w.gone
	w.l.mu.Unlock()
	if gone {
		stop()
	}
}

// maxChatter is how many bytes a connection that is watched may still bring: 64 KiB, far
// above the tickets of TLS and the pings of HTTP/2 that come within watchFor.
const maxChatter = 64 << 10

// wait reads until the other side ends the connection. What it may still send means
// nothing here, but without end it would keep a processor busy.
func wait(w *watchedConn) {
	b := make([]byte, 64)
	n := 0
	for left := maxChatter; left > 0; left -= n {
		var err error
		if n, err = w.c.Read(b); err != nil {
			break
		}
	}
	w.lost()
}

// lost is the end of a connection that was taken from its transport.
func (w *watchedConn) lost() {
	w.l.mu.Lock()
	gone := w.gone
	w.gone = true
	w.l.mu.Unlock()
	if !gone {
		_ = w.c.Close()
		w.l.ended(w)
	}
}

// letGo closes a connection that was taken from its transport.
func (w *watchedConn) letGo() {
	w.l.mu.Lock()
	mine := w.taken && !w.gone
	if mine {
		w.gone = true
		w.ended = true
	}
	stop := w.stop
	w.stop = nil
	w.l.mu.Unlock()
	if !mine {
		return
	}
	if stop != nil {
		stop()
	}
	_ = w.c.Close()
}

// Write writes, but not what a transport says on letting go of the connection, as
// TLS does.
func (w *watchedConn) Write(b []byte) (int, error) {
	w.l.mu.Lock()
	leaving := w.leaving || w.taken
	w.l.mu.Unlock()
	if leaving {
		return len(b), nil
	}
	return w.c.Write(b)
}

// SetDeadline and its kin leave the deadlines of a connection that is being taken
// alone: TLS sets one for its last words.
func (w *watchedConn) SetDeadline(t time.Time) error {
	if w.left() {
		return nil
	}
	return w.c.SetDeadline(t)
}

func (w *watchedConn) SetReadDeadline(t time.Time) error {
	if w.left() {
		return nil
	}
	return w.c.SetReadDeadline(t)
}

func (w *watchedConn) SetWriteDeadline(t time.Time) error {
	if w.left() {
		return nil
	}
	return w.c.SetWriteDeadline(t)
}

func (w *watchedConn) left() bool {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	return w.leaving || w.taken
}

func (w *watchedConn) LocalAddr() net.Addr  { return w.c.LocalAddr() }
func (w *watchedConn) RemoteAddr() net.Addr { return w.c.RemoteAddr() }
