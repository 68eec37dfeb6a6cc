//go:build go1.21

package mcphealth

import (
	"context"
	"fmt"
	"net/http"
	"time"
)

// A Carrier takes JSON-RPC messages to a server and back where one connection is
// the session: the stdio of a child process, or the event stream of HTTP+SSE.
type Carrier struct {
	// Send writes one message.
	Send func(ctx context.Context, message []byte) error
	// Receive returns what the server wrote next, which need be no message; of
	// something longer than limit bytes it returns the first limit bytes. At the
	// server's end it returns io.EOF.
	Receive func(ctx context.Context, limit int) ([]byte, error)

	status  int // of the stream that carries, over HTTP
	header  http.Header
	refused answer // what its last message got, where that was refused
	unread  int    // questions that were given up: their answers may still come
	spoke   bool   // it has carried JSON-RPC messages
	noise   bool   // it has carried what is none
}

// NewCarrierProber makes a prober for a server behind c. The target's URL only
// names it; what belongs to HTTP must not be set. A carrier holds one session, from
// its start to its end: the first Probe opens it, later ones ask within it. The
// error wraps ErrTarget.
func NewCarrierProber(t Target, c *Carrier) (*Prober, error) {
	if err := t.validateQuestions(); err != nil {
		return nil, err
	}
	if t.Era == SSE || t.RequireAuth || t.HealthPath != "" || t.Host != "" || len(t.Header) > 0 {
		return nil, fmt.Errorf("%w: era sse, require_auth, health_path, host and header belong to HTTP", ErrTarget)
	}
	return &Prober{target: t.WithDefaults(), line: NewLine(&http.Transport{}), carrier: c, modern: modernVersion}, nil
}

// initialized ends a legacy handshake. Over HTTP no server measured waits for it to
// answer a ping.
const initialized = `{"jsonrpc":"2.0","method":"notifications/initialized"}`

// carried asks a server behind a carrier: discover, else initialize, and
// tools/list in the session which that opens.
func (p *Prober) carried(ctx context.Context) finding {
	if p.session.open {
		f := p.judge(p.ask(ctx, p.inEra("ping", "")))
		if f.reason == MethodNotFound {
			f.mcp = true // weak from a stranger; this one was MCP before
		}
		return p.settled(f)
	}
	var before []finding
	if p.target.Era != Legacy {
		f, silent := p.discoverCarried(ctx)
		if !silent {
			if f.final || f.verdict == Ready && p.habit == modern || p.target.Era == Modern {
				return p.settled(f)
			}
			before = append(before, f)
		}
	}
	f := p.handshake(ctx, before)
	if f.verdict == Ready {
		return p.settled(p.listed(ctx, f))
	}
	if p.target.Era != Legacy && len(before) == 0 && f.a.kind == rpcAnswer {
		// It was slow to start, no more: it answers now, and knows no initialize.
		if again := p.discover(ctx); again.verdict == Ready {
			return p.settled(again)
		}
	}
	return p.settled(f)
}

// discoverCarried gives server/discover half of the time: some legacy servers do
// not answer before initialize, and say nothing about it.
func (p *Prober) discoverCarried(ctx context.Context) (f finding, silent bool) {
	first := ctx
	if p.target.Era != Modern {
		half, cancel := context.WithTimeout(ctx, p.target.Timeout/2)
		defer cancel()
		first = half
	}
	f = p.discover(first)
	if f.a.err == nil || ctx.Err() != nil || first.Err() == nil {
		return f, false
	}
	p.carrier.unread++
	return f, true
}

// listed ends the handshake and asks for the tools, as the first thing that every
// client does. A server may have none.
func (p *Prober) listed(ctx context.Context, f finding) finding {
	_ = p.carrier.Send(ctx, []byte(initialized)) // the next question tells
	q := p.inEra("tools/list", "")
	q.limit = maxToolList
	list := p.judge(p.ask(ctx, q))
	switch {
	case list.verdict == Ready:
		return list
	case list.reason == MethodNotFound:
		return f
	}
	return failedCall(list)
}

// askCarried sends one question over the carrier and reads what comes until its
// answer.
func (p *Prober) askCarried(ctx context.Context, q question) answer {
	start := time.Now()
	a := answer{q: q, status: p.carrier.status, header: p.carrier.header}
	id := newID()
	if err := p.carrier.Send(ctx, q.body(id)); err != nil {
		a.err = err
		a.reason = p.unanswered(ctx, err, false)
	} else {
		p.readCarried(ctx, &a, id)
	}
	a.took = time.Since(start)
	p.note(&a)
	return a
}

func (p *Prober) readCarried(ctx context.Context, a *answer, id string) {
	left := a.q.limit
	if left == 0 {
		left = maxAnswer
	}
	busy := false // messages came, to other ends
	replies := 0
	for left > 0 {
		b, err := p.carrier.Receive(ctx, left)
		if err != nil {
			a.err = err
			a.reason = p.unanswered(ctx, err, busy)
			return
		}
		if left -= len(b) + 1; left < 0 {
			return // cut off: more than a probe reads, and foreign
		}
		m := readMessage(b)
		if m == nil || m.Method == "" && m.Result == nil && m.Error == nil {
			if len(b) > 0 {
				p.carrier.noise = true
				p.warn("noise: the server wrote what is no JSON-RPC message")
			}
			continue
		}
		busy, p.carrier.spoke = true, true
		if m.Method != "" {
			theirs := idFrom(m.ID)
			if theirs != NullID && theirs.JSON() != quote(id) && replies < maxReplies { // not to an echo
				replies++
				_ = p.carrier.Send(ctx, m.reply(theirs)) // the next Receive tells
			}
			continue
		}
		if m.Error != nil && string(m.ID) != quote(id) && p.carrier.unread > 0 {
			p.carrier.unread-- // an error without id, to the question before
			continue
		}
		if a.take(m, id) {
			return
		}
	}
}

// maxReplies is how many requests of the server are answered while it is asked one
// question: a server that goes on asking is no server.
const maxReplies = 16

// reply is what a client without capabilities answers to a request of the server.
// Some ask before they answer, and wait for it.
func (m *message) reply(id ID) []byte {
	rest := `"error":{"code":-32601,"message":"Method not found"}`
	if m.Method == "ping" {
		rest = `"result":{}`
	}
	return []byte(`{"jsonrpc":"2.0","id":` + id.JSON() + `,` + rest + `}`)
}

// unanswered classifies why no answer came over the carrier.
func (p *Prober) unanswered(ctx context.Context, err error, busy bool) Reason {
	switch {
	case ctx.Err() == context.Canceled:
		return Canceled
	case p.carrier.noise && !p.carrier.spoke:
		return NotMCP
	case (ctx.Err() != nil || isTimeout(err)) && busy:
		return Stalled
	case ctx.Err() != nil || isTimeout(err):
		return Timeout
	}
	return Reset
}
