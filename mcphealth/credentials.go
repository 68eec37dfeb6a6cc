//go:build go1.21

package mcphealth

import (
	"context"
	"encoding/base64"
	"errors"
	"net/http"
	"net/url"
	"sort"
	"strings"
)

// SetHeader replaces the target's Header from the next probe on, as when a token
// in a file was renewed. A session that the old one had opened is ended, and the
// upstream is asked from the first question: other credentials may see another
// server. The same header again changes nothing. It does not wait for a probe
// that runs, and keeps no reference to h.
func (p *Prober) SetHeader(h http.Header) {
	if h == nil {
		h = http.Header{}
	}
	p.nextHeader.Store(h.Clone())
}

// takeHeader goes over to the header set last.
func (p *Prober) takeHeader(ctx context.Context) {
	h, ok := p.nextHeader.Load().(http.Header)
	if !ok || sameHeader(h, p.header) {
		return
	}
	p.hangUp(ctx) // by the credentials that opened it
	p.session = session{}
	p.habit = unasked
	p.useHeader(h)
}

// useHeader also notes what must never be repeated: the words of this header and
// of the one before, which an upstream may still have in a cache or a log line.
func (p *Prober) useHeader(h http.Header) {
	p.secrets = append(secretsIn(h), secretsIn(p.header)...)
	if p.url != nil {
		p.secrets = append(p.secrets, secretsInQuery(p.url.RawQuery)...)
	}
	sort.Slice(p.secrets, func(i, j int) bool { return len(p.secrets[i]) > len(p.secrets[j]) })
	p.header = h
}

func sameHeader(a, b http.Header) bool {
	if len(a) != len(b) {
		return false
	}
	for k, vs := range a {
		if strings.Join(vs, "\n") != strings.Join(b[k], "\n") || len(vs) != len(b[k]) {
			return false
		}
	}
	return true
}

// minSecret is the shortest word that is taken for a secret: below four
// characters the text around it would be lost, and guessed at once.
const minSecret = 4

// secretsIn are the header's values, and what follows a scheme as in "Bearer …".
func secretsIn(h http.Header) []string {
	var all []string
	for _, vs := range h {
		for i := 0; i < len(vs); i++ {
			_, token, _ := strings.Cut(vs[i], " ")
			if len(vs[i]) >= minSecret {
				all = append(all, vs[i])
			}
			if token = strings.TrimSpace(token); len(token) >= minSecret {
				all = append(all, token)
			}
			all = append(all, partsOf(vs[i])...)
		}
	}
	return all
}

// partsOf are what of a header's value a server may repeat by itself: the password of
// Basic (RFC 7617), each cookie's value, each of several keys.
func partsOf(value string) []string {
	var all []string
	scheme, token, _ := strings.Cut(value, " ")
	if strings.EqualFold(scheme, "Basic") {
		b, _ := base64.StdEncoding.DecodeString(strings.TrimSpace(token))
		if _, password, _ := strings.Cut(string(b), ":"); len(password) >= minSecret {
			all = append(all, password)
		}
	}
	parts := strings.Split(strings.ReplaceAll(value, ",", ";"), ";")
	for i := 0; i < len(parts); i++ {
		part := strings.TrimSpace(parts[i])
		if _, v, named := strings.Cut(part, "="); named {
			part = strings.Trim(v, `"`)
		}
		if len(part) >= minQuerySecret {
			all = append(all, part)
		}
	}
	return all
}

// minQuerySecret is the same in a URL's query, and in a part of a header, where a short
// word is an option (?mode=json) and a long one may be a key.
const minQuerySecret = 8

// secretsInQuery are the values in a URL's query, as they stand there and as they are
// meant: a redirect, or an error page, repeats them.
func secretsInQuery(raw string) []string {
	var all []string
	pairs := strings.Split(raw, "&")
	for i := 0; i < len(pairs); i++ {
		_, v, named := strings.Cut(pairs[i], "=")
		if !named {
			v = pairs[i]
		}
		if len(v) < minQuerySecret {
			continue
		}
		all = append(all, v)
		if meant, err := url.QueryUnescape(v); err == nil && meant != v && len(meant) >= minQuerySecret {
			all = append(all, meant)
		}
	}
	return all
}

// redact takes our credentials out of words that may repeat them. It comes before
// anything that cuts or quotes: half a secret is not found any more.
func (p *Prober) redact(s string) string {
	for i := 0; i < len(p.secrets); i++ {
		s = strings.ReplaceAll(s, p.secrets[i], "[redacted]")
	}
	return s
}

// shownHeaders are those of an answer that a detail or a warning may quote.
var shownHeaders = []string{"Content-Type", "Age", "X-Cache", "CF-Cache-Status"}

// scrub redacts what of an answer may be shown, and only then cuts it.
func (p *Prober) scrub(a *answer) {
	if a.msg != nil && a.msg.Error != nil {
		a.msg.Error.Message = p.redact(a.msg.Error.Message)
		a.msg.Error.cut()
	}
	if len(p.secrets) == 0 {
		return
	}
	a.text = p.redact(a.text)
	a.target = p.redact(a.target)
	a.event = p.redact(a.event)
	if a.err != nil { // its class is known by now
		if s := a.err.Error(); p.redact(s) != s {
			a.err = errors.New(p.redact(s))
		}
	}
	for i := 0; i < len(shownHeaders); i++ {
		if v := a.header.Get(shownHeaders[i]); v != "" && p.redact(v) != v {
			a.header.Set(shownHeaders[i], p.redact(v))
		}
	}
}

// credentials reports whether the questions carry any.
func (p *Prober) credentials() bool { return len(p.header) > 0 && !p.bare }

// demandsAuth asks, where the target says that the endpoint must demand credentials,
// whether it answers without any. Only a result counts: an error may come from a
// router in front of the lock.
func (p *Prober) demandsAuth(ctx context.Context, f finding) finding {
	if !p.target.RequireAuth || f.verdict != Ready && f.verdict != Alive {
		return f
	}
	open := f
	if p.credentials() {
		p.bare = true
		open = p.askBare(ctx)
		p.bare = false
	}
	switch {
	case open.verdict == Ready:
		p.warn("auth_missing: %s was answered without credentials", open.a.q.method)
		return finding{verdict: Degraded, reason: HandshakeFailed, a: open.a, mcp: true,
			detail: open.a.q.method + " without credentials was answered with a result; require_auth says that they must be demanded"}
	case open.reason != AuthRequired && open.a.status != http.StatusForbidden:
		p.warn("auth_unproven: %s without credentials was neither answered nor refused for want of them (%s)", open.a.q.method, open.reason)
	}
	return f
}

// askBare repeats, without credentials, the question that has just been answered
// with them: in the held session, so that it opens none.
func (p *Prober) askBare(ctx context.Context) finding {
	switch {
	case p.target.Era == SSE:
		return p.eventStream(ctx)
	case p.habit == modern:
		return p.ghost(ctx, "server/discover")
	case p.habit == stateless || p.session.open:
		return p.judge(p.ask(ctx, p.inEra("ping", "")))
	}
	return p.askRouter(ctx)
}
