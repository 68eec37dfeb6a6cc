//go:build go1.21

package mcphealth

import (
	"bufio"
	"bytes"
	"context"
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
	start := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream, and the session with it
	a := answer{q: question{method: "initialize"}}
	defer func() { p.note(a) }()
	stage := &stage{}
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, stage.trace()), http.MethodGet, p.url.String(), nil)
	if err != nil {
		a.err, a.reason = err, ProbeRejected
		return p.judge(a)
	}
	p.common(req)
	req.Header.Set("Accept", "text/event-stream")
	resp, err := p.line.roundTrip(req)
	if err != nil {
		a.err, a.reason = err, stage.reason(ctx, err)
		return p.judge(a)
	}
	defer resp.Body.Close()
	a.status, a.header = resp.StatusCode, resp.Header
	media, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	if resp.StatusCode != http.StatusOK || media != "text/event-stream" {
		return p.sum([]finding{p.judge(a)})
	}
	events := newSSEReader(bufio.NewReader(resp.Body), maxAnswer)
	post, err := p.endpoint(events)
	if err != nil {
		a.err, a.reason = err, bodyReason(ctx, err)
		return p.judge(a)
	}
	if post == nil {
		return finding{verdict: Dead, reason: NotMCP, a: a, detail: "the stream's first event is no endpoint of the same origin"}
	}
	f := p.overStream(ctx, &a, events, post)
	a.took = time.Since(start)
	f.a = a
	return p.settled(f)
}

// endpoint reads the first event, which names where to post.
func (p *Prober) endpoint(events *sseReader) (*url.URL, error) {
	ev, err := events.next()
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

// overStream posts initialize and waits for its answer on the stream. The server
// has shown itself as MCP: what fails from here on is its handshake.
func (p *Prober) overStream(ctx context.Context, a *answer, events *sseReader, post *url.URL) finding {
	failed := finding{verdict: Degraded, reason: HandshakeFailed, mcp: true, detail: "the stream opens, but initialize over it is not answered"}
	id := newID()
	q := question{method: "initialize", params: `{"protocolVersion":"2024-11-05","capabilities":{},"clientInfo":` + clientInfo + `}`}
	req, err := p.request(ctx, q, id, post)
	if err != nil {
		return failed
	}
	resp, err := p.line.beside(req)
	if err != nil {
		return failed
	}
	_ = resp.Body.Close()
	if resp.StatusCode >= 300 {
		return failed
	}
	for {
		ev, err := events.next()
		if err != nil {
			return failed
		}
		if a.take(parseMessage(ev.Data), id) {
			break
		}
	}
	if a.msg.Error != nil {
		return finding{verdict: Alive, reason: RPCError, mcp: true, detail: describe(*a)}
	}
	p.heard(a.msg.Result)
	return finding{verdict: Ready, reason: OK, mcp: true, detail: "initialize over the event stream: a JSON-RPC result"}
}
