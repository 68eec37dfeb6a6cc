//go:build go1.21

package mcphealth

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"time"
)

// eventStream asks an HTTP+SSE server (MCP 2024-11-05 "HTTP with SSE"): GET the
// stream, take the address from its first event, post initialize there, and read
// the answer from the stream. Only where configured: a GET opens a stream that
// never ends on other servers.
func (p *Prober) eventStream(ctx context.Context) finding {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream, and the session with it
	a := answer{q: question{method: "initialize"}}
	opened := p.openStream(ctx, &a)
	if opened == nil {
		p.note(&a)
		f := p.judge(a)
		if a.err != nil {
			return f
		}
		return p.sum([]finding{f})
	}
	defer opened.Body.Close()
	p.noteMove(a)
	limit := maxAnswer
	if len(p.target.ExpectTools) > 0 {
		limit += maxToolList
	}
	events, post, err := p.endpoint(opened, a.at, limit)
	if err != nil {
		a.err = err
		a.reason = bodyReason(ctx, err)
		p.note(&a)
		return p.judge(a)
	}
	if post == nil {
		p.note(&a)
		return finding{verdict: Dead, reason: NotMCP, a: a, detail: "the stream names no endpoint of the same origin to post to"}
	}
	return p.settled(p.overStream(ctx, a, events, post))
}

// openStream GETs the stream, also behind one redirect of the same origin; without one,
// a says what came instead.
func (p *Prober) openStream(ctx context.Context, a *answer) *http.Response {
	start := time.Now()
	resp := p.getStream(ctx, a, p.url)
	if to := p.sameOrigin(*a, p.url); to != nil {
		moved := a.status
		*a = answer{q: a.q}
		resp = p.getStream(ctx, a, to)
		a.moved = moved
	}
	a.took = time.Since(start)
	return resp
}

func (p *Prober) getStream(ctx context.Context, a *answer, u *url.URL) *http.Response {
	a.at = u
	stage := &stage{}
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, stage.trace()), http.MethodGet, u.String(), nil)
	if err != nil {
		a.err, a.reason = err, ProbeRejected
		return nil
	}
	p.common(req)
	req.Header.Set("Accept", "text/event-stream")
	resp, err := p.line.roundTrip(req)
	if err != nil {
		a.err = err
		a.reason = stage.reason(ctx, err)
		return nil
	}
	a.status, a.header = resp.StatusCode, resp.Header
	media, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if resp.StatusCode != http.StatusOK || media != "text/event-stream" {
		if resp.StatusCode >= 300 && resp.StatusCode < 400 {
			a.target = resp.Header.Get("Location")
		}
		if resp.StatusCode == http.StatusForbidden || resp.StatusCode == http.StatusServiceUnavailable {
			p.read(a, resp, newID()) // about the Host, or that it shuts down
			if ctx.Err() == context.Canceled {
				a.err, a.reason = context.Canceled, Canceled
			} else {
				a.err = nil // the status says enough
			}
		}
		_ = resp.Body.Close()
		return nil
	}
	return resp
}

// endpoint reads the event that names where to post, as seen from the stream's own URL. It
// should be the first; the SDKs of Python and TypeScript wait for it.
func (p *Prober) endpoint(stream *http.Response, at *url.URL, limit int) (*sseReader, *url.URL, error) {
	body, err := decoded(stream)
	if err != nil {
		return nil, nil, err
	}
	events := newSSEReader(body, limit)
	ev, err := events.next()
	for err == nil && ev.Name != "endpoint" {
		ev, err = events.next()
	}
	if err == io.EOF {
		return nil, nil, nil // it ended, or ran on, without the event
	}
	if err != nil {
		return nil, nil, err
	}
	to, err := at.Parse(string(bytes.TrimSpace(ev.Data)))
	if err != nil || to.User != nil {
		return nil, nil, nil
	}
	return events, p.atUpstream(to, at), nil
}

// overStream asks initialize over the stream, and then whatever deeper the target
// wants. The server has shown itself as MCP: what fails from here on is its
// handshake.
func (p *Prober) overStream(ctx context.Context, opened answer, events *sseReader, post *url.URL) finding {
	p.carrier = p.streamCarrier(opened, events, post)
	defer func() { p.carrier = nil }()
	a := p.ask(ctx, question{method: "initialize",
		params: `{"protocolVersion":"2024-11-05","capabilities":{},"clientInfo":` + clientInfo + `}`})
	if a.reason == Canceled {
		return p.judge(a)
	}
	if a.kind != rpcAnswer {
		if f := p.judge(p.carrier.refused); f.reason == AuthRequired || f.reason == CredentialsRejected || f.reason == RateLimited {
			return f // the stream was open to all, what is posted is not
		}
		return finding{verdict: Degraded, reason: HandshakeFailed, mcp: true, a: a, detail: "the stream opens, but initialize over it is not answered"}
	}
	if a.msg.Error != nil {
		return finding{verdict: Alive, reason: RPCError, mcp: true, a: a, detail: describe(a)}
	}
	if p.heard(a.msg.Result) == "" {
		return finding{verdict: Degraded, reason: HandshakeFailed, mcp: true, a: a, detail: "initialize over the event stream: a JSON-RPC result without protocolVersion"}
	}
	f := finding{verdict: Ready, reason: OK, mcp: true, a: a, detail: "initialize over the event stream: a JSON-RPC result"}
	if p.bare || len(p.target.ExpectTools) == 0 && p.target.CallTool == "" && !p.target.Fresh {
		return f
	}
	_ = p.carrier.Send(ctx, []byte(initialized)) // the next question tells
	return p.deeper(ctx, f)
}

// streamCarrier posts messages where the stream's first event said, and reads
// what comes on the stream.
func (p *Prober) streamCarrier(opened answer, events *sseReader, post *url.URL) *Carrier {
	c := &Carrier{status: opened.status, header: opened.header}
	c.Send = func(ctx context.Context, message []byte) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, post.String(), bytes.NewReader(message))
		if err != nil {
			return err
		}
		p.common(req)
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "application/json, text/event-stream")
		resp, err := p.line.beside(req)
		if err != nil {
			return err
		}
		_ = resp.Body.Close()
		if resp.StatusCode >= 300 {
			c.refused = answer{q: question{method: "POST to the stream's endpoint"}, status: resp.StatusCode, header: resp.Header}
			p.scrub(&c.refused)
			return fmt.Errorf("POST to the stream's endpoint: HTTP status %d, want 200..299", resp.StatusCode)
		}
		return nil
	}
	c.Receive = func(_ context.Context, _ int) ([]byte, error) { // the stream ends with its context, and at its limit
		ev, err := events.next()
		for err == nil && ev.Name != "message" { // as in readStream
			ev, err = events.next()
		}
		return ev.Data, err
	}
	return c
}
