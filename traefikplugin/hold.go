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
	// clientGone is the status of a request whose client left; nobody reads it.
	clientGone = 499
)

// passKey marks requests that have been here: Yaegi erases the types of other keys.
var passKey = new(int)

// passage is what is remembered of a request between two visits.
type passage struct {
	times   int
	end     time.Time // of its hold
	body    []byte    // if it is kept
	kept    bool
	refused bool // the last dial failed: it was not executed
}

// keeper answers requests that nothing can serve at the moment: it holds them,
// hands them on when their group can serve again, and refuses them with a reason.
type keeper struct {
	set   *settings
	group *group
}

// serve keeps one request. The ResponseWriter is passed on as it is, so that
// streams stay live.
func (k *keeper) serve(rw http.ResponseWriter, req *http.Request) {
	pass, _ := req.Context().Value(passKey).(*passage)
	first := pass == nil
	if first {
		pass = &passage{end: time.Now().Add(k.set.hold)}
		req = req.WithContext(context.WithValue(req.Context(), passKey, pass))
	}
	if pass.times++; pass.times > maxPasses {
		k.refuse(rw, req, nil)
		return
	}
	if h := k.group.pick(); h != nil {
		h.ServeHTTP(rw, req)
		return
	}
	if k.set.hold <= 0 {
		k.refuse(rw, req, nil)
		return
	}
	if !pass.kept && first && !replayed(rw) {
		if err := pass.keep(req); err != nil {
			if req.Context().Err() != nil {
				rw.WriteHeader(clientGone)
				return
			}
			k.refuse(rw, req, pass.body)
			return
		}
	}
	k.wait(rw, req, pass.body, pass.end)
}

// keep takes the body into memory. With an error, body is its beginning.
func (p *passage) keep(req *http.Request) error {
	b, err := readBody(req)
	p.body = b
	p.kept = err == nil
	return err
}

// rewind puts the kept body back.
func (p *passage) rewind(req *http.Request) {
	if p.body != nil {
		req.Body = io.NopCloser(bytes.NewReader(p.body))
	}
}

// wait enlists the request and serves, refuses or drops it.
func (k *keeper) wait(rw http.ResponseWriter, req *http.Request, body []byte, end time.Time) {
	id, box := k.group.enlist(len(body), k.set.holdMax)
	if box == nil {
		k.refuse(rw, req, body)
		return
	}
	late := time.AfterFunc(time.Until(end), func() { post(box) })
	gone := context.AfterFunc(req.Context(), func() { post(box) })
	leave := func() {
		late.Stop()
		gone()
		k.group.unlist(id, len(body))
	}
	for {
		if req.Context().Err() != nil {
			leave()
			rw.WriteHeader(clientGone)
			return
		}
		if h := k.group.pick(); h != nil {
			leave()
			h.ServeHTTP(rw, req)
			return
		}
		if !time.Now().Before(end) {
			leave()
			k.refuse(rw, req, body)
			return
		}
		<-box
	}
}

var errTooLarge = errors.New("body too large to hold")

// readBody takes the whole body into memory: net/http notices that a client
// leaves only once its body has been read, and a call that nobody waits for must
// not be executed. What it returns with an error is the beginning.
func readBody(req *http.Request) ([]byte, error) {
	if req.Body == nil || req.Body == http.NoBody {
		return nil, nil
	}
	b, err := io.ReadAll(io.LimitReader(req.Body, maxHeldBody+1))
	if err == nil && len(b) > maxHeldBody {
		err = errTooLarge
	}
	if err != nil {
		return b, err
	}
	req.Body = io.NopCloser(bytes.NewReader(b))
	req.ContentLength = int64(len(b))
	req.TransferEncoding = nil
	return b, nil
}

// replayed: Traefik's retry middleware is in front. It keeps the body itself, and
// would send an empty one after we had read it.
func replayed(rw http.ResponseWriter) bool { return strings.Contains(fmt.Sprintf("%T", rw), "retry.") }

// refuse answers 503 (design.md §4).
func (k *keeper) refuse(rw http.ResponseWriter, req *http.Request, body []byte) {
	if body == nil && req.Body != nil && req.Method == http.MethodPost {
		body, _ = io.ReadAll(io.LimitReader(req.Body, mcphealth.MaxIDBody))
	}
	reason, retry := k.why()
	mcphealth.Unavailable(req.Method, mcphealth.RequestID(firstOf(body)), reason, retry).Send(rw)
}

// why is the reason for a refusal, and what to tell the client to wait: until the
// first of the servers is asked again.
func (k *keeper) why() (mcphealth.Reason, time.Duration) {
	reason, retry := mcphealth.RouteAbsent, routeRetry
	all := k.group.servers()
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
