//go:build go1.21

package traefikplugin

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// maxHeldBody is the largest body that is held: 1 MiB (design.md §4).
	maxHeldBody = 1 << 20
	// maxPasses is how often one request may come back here: a balancer whose
	// status was changed behind our back hands it to us again, without end.
	maxPasses = 4
	// routeRetry is what clients are told to wait for a route: Traefik's providers
	// apply changes every 2 s.
	routeRetry = 2 * time.Second
	// maxDrain is how much is read of a body that was refused: 8 MiB, twice what servers
	// with the TypeScript SDK accept. drainTime bounds how long; of a client that says
	// nothing, Traefik's respondingTimeouts.readTimeout does. maxDrains is how many are
	// read at once, as many as are held.
	maxDrain  = 8 << 20
	drainTime = 5 * time.Second
	maxDrains = 1024
	// drained is what net/http reads itself: 256 KiB.
	drained = 256 << 10
	// clientGone is the status of a request whose client left; nobody reads it.
	clientGone = 499
)

// passKey marks requests that have been here: Yaegi erases the types of other keys.
var passKey = new(int)

// passage is what is remembered of a request between two visits.
type passage struct {
	times   int
	end     time.Time // of its hold
	held    bool      // it has waited until then
	slow    bool      // its client was still sending then
	body    []byte    // all of it if kept, else perhaps its beginning
	kept    bool
	got     atomic.Int32 // bytes of body, while it is read
	sent    atomic.Bool  // it got a connection, and may have been executed
	refused bool         // it got none, and is not answered yet
	foreign bool         // for the server's certificate is not trusted
	ticket  *ticket      // nil: it is not sticky
	owner   *server      // of its session, for which it waits
}

// mark is req with this passage.
func (p *passage) mark(req *http.Request) *http.Request {
	return req.WithContext(context.WithValue(req.Context(), passKey, p))
}

// keeper answers requests that nothing can serve at the moment: it holds them,
// hands them on when their group can serve again, and refuses them with a reason.
type keeper struct {
	set     *settings
	group   *group
	router  string                      // it stands on, with its provider; "" if unknown
	door    string                      // the entry point that it was built for
	above   string                      // the routers that requests pass before (parentRefs)
	ctx     context.Context             // ends with the configuration
	entry   http.Handler                // where a service's requests go in, if sticky; nil: Traefik's balancer
	toOwner func(*passage) http.Handler // of a held request of a session, if sticky
}

// serve keeps one request until pick finds a handler for it. The ResponseWriter is
// passed on as it is, so that streams stay live.
func (k *keeper) serve(rw http.ResponseWriter, req *http.Request, pick func() http.Handler) {
	pass, _ := req.Context().Value(passKey).(*passage)
	if pass == nil {
		pass = &passage{}
		req = pass.mark(req)
	}
	if pass.times == 0 {
		pass.end = startOf(req.Context()).Add(k.set.hold)
	}
	pass.times++
	if pass.times > maxPasses {
		k.refuse(rw, req, pass)
		return
	}
	if h := pick(); h != nil {
		h.ServeHTTP(rw, req)
		return
	}
	pass.held = k.set.hold > 0 && !time.Now().Before(pass.end)
	if pass.held || k.set.hold <= 0 || stopping.Load() || !pass.kept && sizeOf(req) > maxHeldBody {
		k.refuse(rw, req, pass)
		return
	}
	k.wait(rw, req, pass, pick)
}

// starts is when the requests that are under way began to wait, by the channel that tells
// of their end: a retry in front sends one several times, each time without what we know of
// it, and its client has waited all the time. nStarts is how many there are, maxStarts how
// many there may be, ten times as many as a group holds: others wait anew each time.
var (
	starts  sync.Map
	nStarts atomic.Int32
)

const maxStarts = 10_000

// startOf is when the request of that context began to wait: now, if it is here for the
// first time.
func startOf(ctx context.Context) time.Time {
	now := time.Now()
	done := ctx.Done()
	if done == nil || done != ctx.Done() { // copies for Traefik's mirrors get a new one each time, which is never closed
		return now
	}
	if first, ok := starts.Load(done); ok {
		return first.(time.Time)
	}
	if nStarts.Add(1) > maxStarts {
		nStarts.Add(-1)
		return now
	}
	starts.Store(done, now)
	context.AfterFunc(ctx, func() {
		defer func() { complain("the end of a request", recover()) }()
		starts.Delete(done)
		nStarts.Add(-1)
	})
	return now
}

// sizeOf is how much room a request's body may need.
func sizeOf(req *http.Request) int {
	if req.ContentLength < 0 {
		return maxHeldBody
	}
	if req.ContentLength > maxHeldBody {
		return maxHeldBody + 1
	}
	return int(req.ContentLength)
}

// rewind puts the kept body back.
func (p *passage) rewind(req *http.Request) {
	if p.kept && p.body != nil {
		req.Body = io.NopCloser(bytes.NewReader(p.body))
	}
}

// wait takes a place, then the body, and serves, refuses or drops the request. At
// the end of the hold it loses its place even if the client is still sending: that
// Traefik ends (respondingTimeouts.readTimeout), for it lets no middleware do so.
func (k *keeper) wait(rw http.ResponseWriter, req *http.Request, pass *passage, pick func() http.Handler) {
	size := sizeOf(req)
	if pass.kept {
		size = len(pass.body)
	}
	id, box := k.group.enlist(size, k.set.holdMax)
	if box == nil {
		k.refuse(rw, req, pass)
		return
	}
	k.group.stay() // the hold may be longer than linger
	late := time.AfterFunc(time.Until(pass.end), func() {
		defer func() { complain("hold", recover()) }()
		k.group.expire(id, int(pass.got.Load()))
		post(box)
	})
	gone := context.AfterFunc(req.Context(), func() {
		defer func() { complain("hold", recover()) }()
		post(box)
	})
	since := time.Now()
	leave := func() { // called, not deferred: interpreted, that would hang the request
		late.Stop()
		gone()
		k.group.unlist(id)
		k.group.leave()
		countHeld(since)
	}
	if !pass.kept {
		if err := pass.keep(req, pass.end); err != nil {
			leave()
			pass.slow = errors.Is(err, errTooLate)
			k.unread(rw, req, pass)
			return
		}
		k.group.resize(id, len(pass.body))
	}
	for {
		if req.Context().Err() != nil {
			leave()
			rw.WriteHeader(clientGone)
			return
		}
		if h := pick(); h != nil {
			leave()
			pass.rewind(req)
			if len(pass.body) > 0 && withheld(rw) && !resends(rw) {
				req = onceOnly(req)
			}
			h.ServeHTTP(rw, req)
			return
		}
		if !time.Now().Before(pass.end) || stopping.Load() {
			leave()
			pass.held = true
			k.refuse(rw, req, pass)
			return
		}
		<-box
	}
}

// onceOnly is req for a body that is in our hands alone: Traefik's retry, in front, would
// send it again without one. Its proxies do not find it then, and so tell it of no failure
// (WrapHandler in pkg/middlewares/retry, by a key in the context, another one in 3.4 to 3.6).
func onceOnly(req *http.Request) *http.Request {
	var ctx context.Context = &withoutRetry{req.Context()}
	return req.WithContext(ctx)
}

type withoutRetry struct{ context.Context }

func (c *withoutRetry) Value(key interface{}) interface{} {
	if strings.HasPrefix(fmt.Sprintf("%T", key), "retry.") {
		return nil
	}
	return c.Context.Value(key)
}

// unread answers a request whose body could not be kept.
func (k *keeper) unread(rw http.ResponseWriter, req *http.Request, pass *passage) {
	if req.Context().Err() != nil {
		rw.WriteHeader(clientGone)
		return
	}
	k.refuse(rw, req, pass)
}

var (
	errTooLarge = errors.New("body too large to hold")
	errTooLate  = errors.New("the hold ended before the body")
	errNoBody   = errors.New("the body has been read before")
)

// readSize is how much of a body is read at once.
const readSize = 32 << 10

// keep takes the whole body into memory, until end if that is set: net/http notices
// that a client leaves only once its body has been read, and a call that nobody waits
// for must not be executed. After an error body is its beginning; one that is too
// large can still be read in full, as if nothing had happened.
func (p *passage) keep(req *http.Request, end time.Time) error {
	if req.Body == nil || req.Body == http.NoBody {
		p.kept = true
		return nil
	}
	p.body = nil
	chunk := make([]byte, readSize)
	for {
		n, err := req.Body.Read(chunk)
		p.body = append(p.body, chunk[:n]...)
		p.got.Store(int32(len(p.body)))
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		if len(p.body) > maxHeldBody {
			break
		}
		if !end.IsZero() && !time.Now().Before(end) {
			return errTooLate
		}
	}
	if len(p.body) > maxHeldBody {
		var whole io.ReadCloser = &restored{r: io.MultiReader(bytes.NewReader(p.body), req.Body), c: req.Body}
		req.Body = whole
		return errTooLarge
	}
	if int64(len(p.body)) < req.ContentLength || len(p.body) == 0 && req.ContentLength < 0 && req.Method == http.MethodPost {
		return errNoBody // a retry in front sends what another attempt has read
	}
	p.kept = true
	req.Body = io.NopCloser(bytes.NewReader(p.body))
	req.ContentLength = int64(len(p.body))
	req.TransferEncoding = nil
	return nil
}

// restored is a body of which the beginning has been read.
type restored struct {
	r io.Reader
	c io.Closer
}

func (b *restored) Read(to []byte) (int, error) { return b.r.Read(to) }
func (b *restored) Close() error                { return b.c.Close() }

// refuse answers 503 (design.md §4).
func (k *keeper) refuse(rw http.ResponseWriter, req *http.Request, pass *passage) {
	if pass == nil {
		pass = &passage{}
	}
	countRefused(k.set.pathOf(req.URL.Path))
	reason, retry := k.why(pass)
	if pass.held && k.set.retryAfter == 0 && retry > routeRetry {
		retry = routeRetry // it has waited long enough
	}
	mcphealth.Unavailable(req.Method, mcphealth.RequestID(pass.beginning(req)), reason, retry).Send(rw)
	if !pass.slow {
		drain(rw, req)
	}
}

// drain reads what a client is still sending though it has its answer: net/http reads some,
// and then ends the connection, whose reset the client may see instead of the answer.
// HTTP/2 ends the stream alone; who has too much is not waited for.
func drain(rw http.ResponseWriter, req *http.Request) {
	if req.Body == nil || req.ProtoMajor > 1 ||
		req.ContentLength >= 0 && req.ContentLength <= drained || req.ContentLength > maxDrain || withheld(rw) {
		return
	}
	if draining.Add(1) <= maxDrains {
		_ = http.NewResponseController(rw).Flush()
		end := time.Now().Add(drainTime)
		for left := maxDrain; left > 0 && time.Now().Before(end); left -= readSize {
			if _, err := io.CopyN(io.Discard, req.Body, readSize); err != nil {
				break
			}
		}
	}
	draining.Add(-1)
}

// draining is how many bodies are read in vain.
var draining atomic.Int32

// beginning is as much of a request's body as its id is looked for in.
func (p *passage) beginning(req *http.Request) []byte {
	if p.body == nil && req.Body != nil && req.Method == http.MethodPost {
		p.body, _ = io.ReadAll(io.LimitReader(req.Body, mcphealth.MaxIDBody))
	}
	return firstOf(p.body)
}

// why is the reason for a refusal, and what to tell the client to wait: until the
// first of the servers is asked again, or the owner of its session.
func (k *keeper) why(pass *passage) (mcphealth.Reason, time.Duration) {
	reason, retry := mcphealth.RouteAbsent, routeRetry
	var all []*server
	switch {
	case pass.owner != nil:
		all = append(all, pass.owner)
	case pass.ticket == nil || !pass.ticket.pinned:
		all = k.group.servers()
	}
	now := time.Now()
	for i := 0; i < len(all); i++ {
		s := all[i].checker.Snapshot()
		if i == 0 || s.RetryAfter(now) < retry {
			retry = s.RetryAfter(now)
		}
		if i > 0 && reason != mcphealth.NeverProbed {
			continue // the first one's, which is the newest route's
		}
		reason = s.Reason
		if s.State != mcphealth.Down && s.Last.Verdict == mcphealth.Dead {
			reason = s.Last.Reason // not confirmed yet
		}
	}
	if reason == mcphealth.OK {
		reason = mcphealth.RouteAbsent // they are up, and yet nothing took the request
	}
	if k.set.retryAfter > 0 {
		retry = k.set.retryAfter
	}
	return reason, retry
}
