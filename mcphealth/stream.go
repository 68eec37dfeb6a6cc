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
	body := p.openStream(ctx, &a)
	if body == nil {
		p.scrub(&a)
		p.note(a)
		f := p.judge(a)
		if a.err != nil {
			return f
		}
		return p.sum([]finding{f})
	}
	defer body.Close()
	limit := maxAnswer
	if len(p.target.ExpectTools) > 0 {
		limit += maxToolList
	}
	events := newSSEReader(body, limit)
	post, err := p.endpoint(events)
	if err != nil {
		a.err = err
		a.reason = bodyReason(ctx, err)
		p.note(a)
		return p.judge(a)
	}
	if post == nil {
		p.note(a)
		return finding{verdict: Dead, reason: NotMCP, a: a, detail: "the stream's first event is no endpoint of the same origin"}
	}
	return p.settled(p.overStream(ctx, a, events, post))
}

// openStream GETs the stream; without one, a says what came instead.
func (p *Prober) openStream(ctx context.Context, a *answer) io.ReadCloser {
	start := time.Now()
	stage := &stage{}
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, stage.trace()), http.MethodGet, p.url.String(), nil)
	if err != nil {
		a.err, a.reason = err, ProbeRejected
		return nil
	}
	p.common(req)
	req.Header.Set("Accept", "text/event-stream")
	resp, err := p.line.roundTrip(req)
	a.took = time.Since(start)
	if err != nil {
		a.err = err
		a.reason = stage.reason(ctx, err)
		return nil
	}
	a.status, a.header = resp.StatusCode, resp.Header
	media, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if resp.StatusCode != http.StatusOK || media != "text/event-stream" {
		_ = resp.Body.Close()
		return nil
	}
	return resp.Body
}

// endpoint reads the first event, which names where to post.
func (p *Prober) endpoint(events *sseReader) (*url.URL, error) {
	ev, err := events.next()
	if err == io.EOF {
		return nil, nil // it ended, or ran on, without an event
	}
	if err != nil {
		return nil, err
	}
	to, err := p.url.Parse(string(bytes.TrimSpace(ev.Data)))
	if ev.Name != "endpoint" || err != nil || to.Scheme != p.url.Scheme || (to.Host != p.url.Host && to.Host != p.host()) {
		return nil, nil
	}
	u := *p.url
	u.Path, u.RawPath, u.RawQuery = to.Path, to.RawPath, to.RawQuery
	return &u, nil
}

// overStream asks initialize over the stream, and then whatever deeper the target
// wants. The server has shown itself as MCP: what fails from here on is its
// handshake.
func (p *Prober) overStream(ctx context.Context, opened answer, events *sseReader, post *url.URL) finding {
	p.carrier = p.streamCarrier(opened, events, post)
	defer func() { p.carrier = nil }()
	a := p.ask(ctx, question{method: "initialize",
		params: `{"protocolVersion":"2024-11-05","capabilities":{},"clientInfo":` + clientInfo + `}`})
	if a.kind != rpcAnswer {
		return finding{verdict: Degraded, reason: HandshakeFailed, mcp: true, a: a, detail: "the stream opens, but initialize over it is not answered"}
	}
	if a.msg.Error != nil {
		return finding{verdict: Alive, reason: RPCError, mcp: true, a: a, detail: describe(a)}
	}
	p.heard(a.msg.Result)
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
	send := func(ctx context.Context, message []byte) error {
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
			return fmt.Errorf("POST to the stream's endpoint: HTTP status %d, want 200..299", resp.StatusCode)
		}
		return nil
	}
	receive := func(_ context.Context, _ int) ([]byte, error) { // the stream ends with its context, and at its limit
		ev, err := events.next()
		return ev.Data, err
	}
	return &Carrier{Send: send, Receive: receive, status: opened.status, header: opened.header}
}
