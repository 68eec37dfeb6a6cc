package caddymodule

import (
	"bytes"
	"context"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// transitKey is where in a request's context a policy or source finds the guard
// that it came through. It is no variable of Caddy's: those are a plain map, which
// a dial that a transport began for a request may read after the request got
// another connection, so that a write to it could end the process.
type transitKey struct{}

const (
	// idWait is how long a client that is refused may take to send the id of its
	// request: 1 s, a bad mobile link.
	idWait = time.Second

	// restWait is how long net/http's server may then read on, for a connection
	// whose request was read to its end can be used again: 200 ms.
	restWait = 200 * time.Millisecond

	// maxDrain is how much is read of a body that was refused: 8 MiB, twice what servers
	// with the TypeScript SDK accept. drainTime bounds how long, maxDrains how many at
	// once: as many as are held.
	maxDrain  = 8 << 20
	drainTime = 5 * time.Second
	maxDrains = 1024

	// drained is what net/http's server reads itself: 256 KiB.
	drained = 256 << 10
)

// draining is how many bodies are read in vain.
var draining atomic.Int32

// guards is how many guards there are in the process. Without any, policies need
// not look for one.
var guards atomic.Int32

// A transit is one request on its way through a guard: the response writer that
// the proxy writes to, and the note in which a policy says what it chose. Only the
// handler's goroutine uses it.
type transit struct {
	caddyhttp.ResponseWriterWrapper

	req      *http.Request
	body     *body // nil: none
	reader   *bodyReader
	replay   *replay // the held body, once it was sent again
	whole    []byte  // a small body, gathered before it was sent; nil: it was not
	wholeFor *group  // for whose upstreams
	ticket   ticket
	picked   pick
	status   int  // of the answer; 0: nothing was written
	standsIn bool // the guard answers in place of an upstream
	left     bool // the client has left before there was an answer
	returned bool // the handler did not panic
	over     bool // the guard has returned

	outcome mcphealth.OutcomeReader // of a JSON-RPC answer

	// mayHaveRun: an earlier try may have reached an upstream, whatever the last
	// one says.
	mayHaveRun bool
}

// pick is what a policy chose for a request.
type pick struct {
	group  *group
	member *member // nil: unknown, or none
	dial   string
	none   bool // there was nothing to choose
	byName bool // a source: what the proxy's own policy chose is known by name only
	done   bool // the member's checker was told how it ended

	// Only of a request that one upstream alone may serve, and could not.
	owner  *member          // nil: unknown
	gone   time.Time        // when it went away; zero: it has not
	why    mcphealth.Reason // "": what its checker says
	others bool             // there are others that are up

	elsewhere bool // the next configuration has it: the client is to ask there
}

// transitOf finds the guard that a request came through; nil if there is none.
func transitOf(w http.ResponseWriter, r *http.Request) *transit {
	if t, ok := w.(*transit); ok {
		return t
	}
	if guards.Load() == 0 {
		return nil
	}
	t, _ := r.Context().Value(transitKey{}).(*transit)
	if t != nil && t.over { // an error handler has a proxy of its own
		return nil
	}
	return t
}

// watchBody has the body's first bytes kept.
func (t *transit) watchBody(r *http.Request) {
	if !hasBody(r) {
		return
	}
	t.body = &body{from: r.Body, early: buffering.Load() > 0}
	t.reader = t.body.reader()
	r.Body = t.reader
}

// goesOn notes that r is now the business of a proxy that has not had it yet. One that
// had it before, and an answer to it, has another one stand in for that
// (handle_response): what this one fails to send has run.
func (t *transit) goesOn(r *http.Request) {
	if t.bodyWasRead() && wasAnswered(r) {
		t.mayHaveRun = true
	}
	t.settle()
}

// wasAnswered reports whether an answer to r is being handled: by reverse_proxy, or by
// intercept.
func wasAnswered(r *http.Request) bool {
	repl, ok := r.Context().Value(caddy.ReplacerCtxKey).(*caddy.Replacer)
	if !ok {
		return false
	}
	_, proxied := repl.Get("http.reverse_proxy.status_code")
	_, intercepted := repl.Get("http.intercept.status_code")
	return proxied || intercepted
}

// chosen notes that r, the proxy's copy of the request, now goes to an upstream of
// g, and lets net/http have the body once more if it speaks HTTP/1.1. With HTTP/2 it
// may use it after resets that prove nothing (PROTOCOL_ERROR), and back off for a
// minute where the server refuses: there the guard decides.
func (t *transit) chosen(r *http.Request, g *group) {
	if t.body == nil {
		return
	}
	if t.body.early {
		t.body.chosen()
	}
	if !g.speaksHTTP1() || g.keyed.Load() || !mayRepeat(r.Header) {
		return
	}
	if t.gather(r, g) {
		r.GetBody = t.wholeAgain
		r.Body, _ = t.wholeAgain()
		return
	}
	if t.replaced() {
		return
	}
	anew := t.body.anew
	if t.replay != nil {
		anew = t.replay.anew
	}
	if r.GetBody = anew; g.agrees.Load() {
		r.GetBody = func() (io.ReadCloser, error) {
			if !g.speaksHTTP1() { // this very connection is the first that does
				return nil, errHTTP2
			}
			return anew()
		}
	}
}

// gather takes a small body into memory before it is sent, as far as the proxy has not
// done that, and reports whether it is there. Where net/http does not know the reader
// of a body, it writes the head of the request by itself, and then the body; what is in
// memory goes out with it, which saves the proxy a system call and the upstream a wait.
//
// Only for an upstream that is known to live, for a client may be slow to send, and
// should hear of an outage meanwhile; and only over plain HTTP/1.1, where a failed
// dial proves without the body that nothing was sent.
func (t *transit) gather(r *http.Request, g *group) bool {
	switch {
	case t.whole != nil:
		return t.replay == nil && t.wholeFor == g // what one proxy has sent, another one does not send anew
	case t.replay != nil, r.Body == nil, r.ContentLength <= 0, r.ContentLength > keptAtFirst, len(r.Trailer) > 0,
		r.Header["Expect"] != nil, // the upstream is to say whether it wants the body
		!g.plain.Load(), g.rematches.Load(), g.handler.RequestBuffers != 0,
		t.picked.member == nil || !t.picked.member.isUp():
		return false
	}
	all := make([]byte, r.ContentLength)
	if _, err := io.ReadFull(r.Body, all); err != nil {
		t.reader.rewind() // whoever reads it gets the error
		return false
	}
	t.whole, t.wholeFor = all, g
	return true
}

// wholeAgain reads the gathered body from the start, in a shape that net/http knows.
func (t *transit) wholeAgain() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(t.whole)), nil
}

// readUntil bounds how long the client may take to send what is not in yet; the
// zero time lifts the bound. Where the server cannot do that, nothing is bounded.
//
// Once all of the body is here, net/http itself is told: it reads on, to notice that the
// client leaves, and Caddy 2.11.9 would put the server's read_body in the place of none,
// at which the request would end.
func (t *transit) readUntil(when time.Time) {
	w := t.ResponseWriter
	if t.body != nil && t.body.isWhole() {
		w = innermost(w)
	}
	_ = http.NewResponseController(w).SetReadDeadline(when)
}

// innermost is the writer that net/http has made.
func innermost(w http.ResponseWriter) http.ResponseWriter {
	for {
		outer, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return w
		}
		w = outer.Unwrap()
	}
}

// tooSlow reports whether the client's time to send the body has passed. Its request's
// context has then ended too, over HTTP/1, but it may still wait for an answer.
func (t *transit) tooSlow() bool {
	return t.body != nil && errors.Is(t.body.broken(), os.ErrDeadlineExceeded)
}

// hurry bounds how long the client may keep its own answer waiting: net/http's
// server reads on before it sends one.
func (t *transit) hurry() {
	if t.body != nil && !t.body.isWhole() {
		t.readUntil(time.Now().Add(restWait))
	}
}

// replaced reports whether a handler behind the guard has put another body in the place
// of the client's. Who has read of that is not known, nor can it be given again.
func (t *transit) replaced() bool {
	switch b := t.req.Body.(type) {
	case *bodyReader:
		return b != t.reader
	case *replay:
		return b != t.replay
	}
	return true
}

// bodyWasRead reports whether anything may have been taken from the body since
// the request was last sent on. What has no body was not read.
func (t *transit) bodyWasRead() bool {
	switch {
	case t.body != nil && t.replaced():
		return true
	case t.replay != nil:
		return t.replay.begun.Load()
	case t.body != nil:
		return t.body.wasRead()
	}
	return false
}

// rewind has the body read from the start again.
func (t *transit) rewind() {
	switch {
	case t.replay != nil:
		_, _ = t.replay.Seek(0, io.SeekStart)
	case t.reader != nil:
		t.reader.rewind()
	}
}

// WriteHeader notes the status and passes it on.
func (t *transit) WriteHeader(status int) {
	if t.status == 0 && (status >= 200 || status == http.StatusSwitchingProtocols) {
		t.status = status
		t.left = t.left || status == statusClientGone && t.req.Context().Err() != nil // as reverse_proxy says it
		t.answerBegins()
	}
	t.ResponseWriter.WriteHeader(status)
}

// answerBegins decides whether the answer is read, as proof of life and for its outcome.
func (t *transit) answerBegins() {
	if t.body != nil {
		t.body.letGo()
	}
	t.findPick()
	t.stampTicket()
	t.hearDrain()
	if t.standsIn || t.picked.group == nil {
		return
	}
	if t.status != http.StatusOK || t.req.Method != http.MethodPost || !t.outcome.Begin(fieldOf(t.Header(), "Content-Type"), fieldOf(t.Header(), "Content-Encoding")) {
		if m := t.picked.member; m != nil && t.looksForeign() {
			m.doubted()
		}
		t.settle()
	}
}

// looksForeign reports whether a call got what no MCP server answers: a page, a bare
// "not found", a proxy's error.
func (t *transit) looksForeign() bool {
	switch {
	case t.req.Method != http.MethodPost:
		return false
	case t.status == http.StatusOK, t.status == http.StatusNotFound, t.status == http.StatusMethodNotAllowed, t.status == http.StatusGone, t.status >= 500:
		media, _, _ := strings.Cut(fieldOf(t.Header(), "Content-Type"), ";")
		return media != "application/json" && media != "text/event-stream"
	}
	return false
}

// fieldOf is the first value of a header field whose name is spelled as Go spells it.
func fieldOf(h http.Header, name string) string {
	if values := h[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

// findPick finds out what was picked by name only.
func (t *transit) findPick() {
	if !t.picked.byName || t.picked.done || t.picked.none {
		return
	}
	t.picked.byName = false
	if t.picked.member = t.picked.group.dialled(t.req); t.picked.member != nil {
		t.picked.member.sent()
	}
}

// Write passes p on, and reads it on its way.
func (t *transit) Write(p []byte) (int, error) {
	if t.status == 0 {
		t.WriteHeader(http.StatusOK)
	}
	if t.outcome.Active() {
		t.read(p)
	}
	return t.ResponseWriter.Write(p)
}

// read tells the picked upstream's checker of the first JSON-RPC that passes.
func (t *transit) read(p []byte) {
	t.outcome.Write(p)
	switch m := t.picked.member; {
	case m == nil || t.picked.done:
	case t.outcome.IsRPC():
		t.picked.done = true
		m.answered(t.req.Host)
	case !t.outcome.Active():
		t.settle()
	}
}

// readSize is how much of what ReadFrom passes on is read at a time: 32 KiB, as Go's
// own copies do.
const readSize = 32 << 10

// readPool is for what ReadFrom reads.
var readPool = sync.Pool{New: func() any { return new([readSize]byte) }}

// ReadFrom passes r on, by Write as long as it is to be read.
func (t *transit) ReadFrom(r io.Reader) (n int64, err error) {
	if t.status == 0 {
		t.WriteHeader(http.StatusOK)
	}
	for t.outcome.Active() {
		buf := readPool.Get().(*[readSize]byte)
		nr, rerr := r.Read(buf[:])
		nw, werr := t.Write(buf[:nr])
		readPool.Put(buf)
		n += int64(nw)
		switch {
		case werr != nil:
			return n, werr
		case rerr == io.EOF:
			return n, nil
		case rerr != nil:
			return n, rerr
		}
	}
	rest, err := t.ResponseWriterWrapper.ReadFrom(r)
	return n + rest, err
}

// FlushError flushes; the answer has then begun.
func (t *transit) FlushError() error {
	if t.status == 0 {
		t.WriteHeader(http.StatusOK)
	}
	return http.NewResponseController(t.ResponseWriter).Flush()
}

// settle tells the picked upstream's checker that the request ended without proof
// of anything.
func (t *transit) settle() {
	if t.picked.member != nil && !t.picked.done {
		t.picked.done = true
		t.picked.member.settled()
	}
}

// failed tells the picked upstream's checker that it did not answer.
func (t *transit) failed() {
	t.findPick()
	if t.picked.member != nil && !t.picked.done {
		t.picked.done = true
		t.picked.member.failed()
	}
}

// end closes the account of the request. A handler that panicked in the middle of
// an answer, while the client was still there, lost its upstream.
func (t *transit) end() {
	m := t.picked.member
	if t.brokeOff() && t.status != 0 && m != nil {
		if t.picked.done {
			m.sent() // its account was closed when the answer began
		}
		t.picked.done = true
		m.failed()
	}
	t.settle()
	t.count()
	t.over = true
	if t.body != nil {
		t.body.letGo()
	}
}

// standIn sends the guard's own answer in place of an upstream's.
func (t *transit) standIn(a mcphealth.Answer) {
	t.standsIn = true
	a.Send(t)
}

// refuse sends the guard's own answer to who may still be sending, and reads on for a
// while: net/http's server reads some, and then ends the connection, whose reset the
// client may see instead of the answer. HTTP/2 ends the stream alone; who has too much,
// or says nothing, is not waited for.
func (t *transit) refuse(a mcphealth.Answer) {
	length, slow := t.req.ContentLength, t.tooSlow()
	t.hurry()
	t.standIn(a)
	if t.body == nil || t.body.isWhole() || slow || t.req.ProtoMajor > 1 ||
		length >= 0 && length <= drained || length > maxDrain {
		return
	}
	defer draining.Add(-1)
	if draining.Add(1) <= maxDrains {
		_ = http.NewResponseController(t.ResponseWriter).Flush()
		t.readUntil(time.Now().Add(drainTime))
		t.body.drain()
	}
}

// clientLeft ends a request whose client has left.
func (t *transit) clientLeft() {
	t.left = true
	t.WriteHeader(statusClientGone)
}

// count counts the request by how it ended. One whose client left before there was an
// answer tells nothing.
func (t *transit) count() {
	group := t.picked.group
	if group == nil || t.status == 0 || t.left {
		return
	}
	m := t.picked.member
	if m == nil {
		m = t.picked.owner
	}
	outcome, wasted := outcomeUnavailable, true
	switch {
	case t.standsIn:
	case t.brokeOff():
		outcome = outcomeHTTPError
	case t.status >= http.StatusBadRequest:
		outcome, wasted = outcomeHTTPError, t.status >= http.StatusInternalServerError
	default:
		outcome, wasted = outcomeIndex(t.outcome.Outcome()), t.outcome.IsInternal()
		if m != nil && t.outcome.IsRPC() {
			m.served(wasted || outcome == outcomeToolError)
		}
	}
	a := group.nobody.Load()
	if m != nil && m.entry != nil {
		a = m.entry.account
	}
	if a != nil {
		a.served(outcome, wasted)
	}
}

// brokeOff reports whether the answer ended in the middle, while the client was there.
func (t *transit) brokeOff() bool { return !t.returned && t.req.Context().Err() == nil }

// before is what a request and its answer's headers were when they came to the
// guard: handlers may change them, and a request that is sent on again must be as
// it was. Pooled, for every request needs one and hardly any uses it.
type before struct {
	req     http.Request
	url     url.URL
	header  fields
	answer  fields
	matched []string // route groups that a route had been chosen from
}

// fields is a copy of a header in two flat slices.
type fields struct {
	names  []string
	counts []int
	values []string
}

func (f *fields) take(h http.Header) {
	f.names, f.counts, f.values = f.names[:0], f.counts[:0], f.values[:0]
	for name, values := range h {
		f.names = append(f.names, name)
		f.counts = append(f.counts, len(values))
		f.values = append(f.values, values...)
		if values == nil {
			f.counts[len(f.counts)-1] = -1 // "leave this header out", to net/http and Caddy
		}
	}
}

func (f *fields) restore(h http.Header) {
	clear(h)
	at := 0
	for i, name := range f.names {
		if f.counts[i] < 0 {
			h[name] = nil
			continue
		}
		h[name] = slices.Clone(f.values[at : at+f.counts[i]])
		at += f.counts[i]
	}
}

// routeGroupKey is where Caddy notes which route groups a request has had its
// route from (caddyhttp/routes.go, routeGroupCtxKey).
const routeGroupKey caddy.CtxKey = "route_group"

var befores = sync.Pool{New: func() any { return new(before) }}

func remember(w http.ResponseWriter, r *http.Request) *before {
	b := befores.Get().(*before)
	b.req, b.url = *r, *r.URL
	b.header.take(r.Header)
	b.answer.take(w.Header())
	b.matched = b.matched[:0]
	if groups, ok := r.Context().Value(routeGroupKey).(map[string]struct{}); ok {
		for name := range groups {
			b.matched = append(b.matched, name)
		}
	}
	return b
}

// restore makes r and the answer's headers what they were. The body is the
// caller's; trailers came with it. Variables are in a map of their own from now on:
// a dial of the last try may still read the old one.
func (b *before) restore(w http.ResponseWriter, r *http.Request) {
	trailer := r.Trailer
	*r = b.req
	*r.URL = b.url
	r.Trailer = trailer
	if vars, ok := r.Context().Value(caddyhttp.VarsCtxKey).(map[string]any); ok {
		setContext(r, context.WithValue(r.Context(), caddyhttp.VarsCtxKey, maps.Clone(vars)))
	}
	b.header.restore(r.Header)
	b.answer.restore(w.Header())
	if groups, ok := r.Context().Value(routeGroupKey).(map[string]struct{}); ok {
		for name := range groups {
			if !slices.Contains(b.matched, name) {
				delete(groups, name)
			}
		}
	}
}

// setContext gives r another context in place: Caddy's placeholders look at this
// very request.
func setContext(r *http.Request, ctx context.Context) { *r = *r.WithContext(ctx) }

func (b *before) forget() {
	b.req, b.url = http.Request{}, url.URL{}
	clear(b.header.values)
	clear(b.answer.values)
	befores.Put(b)
}

// Interface guards
var (
	_ http.ResponseWriter = (*transit)(nil)
	_ http.Pusher         = (*transit)(nil)
	_ io.ReaderFrom       = (*transit)(nil)
)
