//go:build go1.21

package mcphealth

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"time"
)

// deeper asks, of an upstream that lives, what the target wants besides: a method
// that no cache can answer, the tools it expects, a canary call.
func (p *Prober) deeper(ctx context.Context, f finding) finding {
	if f.verdict != Ready && f.verdict != Alive {
		return f
	}
	if p.target.Fresh {
		fresh := p.judge(p.ask(ctx, p.inEra("mcphealth/"+newID(), "")))
		if fresh.final && fresh.verdict == Dead {
			return fresh
		}
	}
	if (len(p.target.ExpectTools) > 0 || p.target.CallTool != "") && f.verdict == Ready {
		p.tell(ctx)
	}
	if len(p.target.ExpectTools) > 0 && f.verdict == Ready {
		if worse := p.tools(ctx); worse.verdict != "" {
			p.session.told = p.session.heard
			return worse
		}
	}
	if p.target.CallTool != "" && f.verdict == Ready {
		if worse := p.call(ctx); worse.verdict != "" {
			p.session.told = p.session.heard
			return worse
		}
	}
	return f
}

// inEra is a question in the form that this upstream takes.
func (p *Prober) inEra(method, params string) question {
	q := question{method: method, params: params, session: ghostID}
	switch {
	case p.habit == modern:
		q.modern, q.version = true, p.modern
	case p.session.open:
		q.session, q.version = p.session.id, p.session.version
	}
	return q
}

// maxPages is how many pages of tools/list are read: no real server has more, a
// hostile one has no end.
const maxPages = 50

// maxCursor is the longest cursor that is followed: 64 KiB. It is kept, and sent back.
const maxCursor = 64 << 10

// tools looks for the expected tools, page by page.
func (p *Prober) tools(ctx context.Context) finding {
	missing := map[string]bool{}
	for i := 0; i < len(p.target.ExpectTools); i++ {
		missing[p.target.ExpectTools[i]] = true
	}
	cursor := ""
	var f finding
	seen := map[string]bool{}
	for page := 0; page < maxPages && len(missing) > 0 && !seen[cursor]; page++ {
		seen[cursor] = true
		params := ""
		if cursor != "" {
			params = `{"cursor":` + quote(cursor) + `}`
		}
		q := p.inEra("tools/list", params)
		q.limit = maxToolList
		f = p.judge(p.ask(ctx, q))
		if page > 0 && (f.reason == Timeout || f.reason == Stalled) {
			break // it has answered all before: the list is long, or without end
		}
		if f.verdict != Ready {
			return failedCall(f)
		}
		var list struct {
			Tools []struct {
				Name string `json:"name"`
			} `json:"tools"`
			NextCursor string `json:"nextCursor"`
		}
		_ = json.Unmarshal(f.a.msg.Result, &list)
		for i := 0; i < len(list.Tools); i++ {
			delete(missing, list.Tools[i].Name)
		}
		if cursor = list.NextCursor; cursor == "" || len(cursor) > maxCursor {
			break
		}
	}
	for i := 0; i < len(p.target.ExpectTools); i++ {
		if name := p.target.ExpectTools[i]; missing[name] {
			return finding{verdict: Degraded, reason: ToolsMissing, a: f.a, mcp: true,
				detail: "tools/list does not name the expected tool " + quote(name)}
		}
	}
	return finding{}
}

// failedCall is what a question after a good ladder means when it fails: its own
// verdict where that speaks of the upstream, else a degraded one.
func failedCall(f finding) finding {
	switch {
	case f.final || f.reason == RateLimited:
	case f.reason == MethodNotFound:
		f.verdict, f.reason = Degraded, ToolsMissing
	default:
		f.verdict, f.reason = Degraded, HandshakeFailed
	}
	return f
}

// call runs the canary tool. Whatever goes wrong in it is the tool's failure: the
// server itself has just answered.
func (p *Prober) call(ctx context.Context) finding {
	q := p.inEra("tools/call", `{"name":`+quote(p.target.CallTool)+`,"arguments":`+p.target.CallArgs+`}`)
	q.name = p.target.CallTool
	f := p.judge(p.ask(ctx, q))
	if f.verdict == Degraded && f.final || f.reason == RateLimited || f.reason == Canceled {
		return f
	}
	if f.verdict == Ready {
		if f.detail = whyNoSuccess(f.a.msg.Result); f.detail == "" {
			return finding{}
		}
		f.detail = "tools/call " + quote(p.target.CallTool) + ": " + f.detail
	}
	f.verdict, f.reason, f.mcp = Degraded, ToolFailing, true
	return f
}

// whyNoSuccess says why a result is not that of a tool which did its work, or "".
func whyNoSuccess(result json.RawMessage) string {
	var r struct {
		IsError    bool   `json:"isError"`
		ResultType string `json:"resultType"`
	}
	switch err := json.Unmarshal(result, &r); {
	case err != nil || !isObject(result):
		return "the result is no CallToolResult"
	case r.IsError:
		return "the result says isError"
	case r.ResultType == "input_required": // MCP 2026-07-28, "Multi Round-Trip Requests"
		return "the tool asks for input, which a probe has not; choose one that needs none"
	}
	return ""
}

// health fetches the health document, if one is configured. Only a document that
// says something counts: where it is absent or no JSON, the MCP endpoint decides.
func (p *Prober) health(ctx context.Context) finding {
	if p.target.HealthPath == "" {
		return finding{}
	}
	half, cancel := context.WithTimeout(ctx, p.target.Timeout/2) // the question itself needs the rest
	defer cancel()
	a := p.getHealth(half)
	status := healthStatus(a.text)
	detail := "GET " + p.target.HealthPath + ": " + describeHealth(a, clean(p.redact(status)))
	switch {
	case a.reason == Canceled: // the question itself says so, too
	case a.err != nil:
		p.warn("health_path: %s", detail)
	case status == "draining":
		return finding{verdict: Degraded, reason: Draining, a: a, detail: detail, mcp: true}
	case a.status == http.StatusServiceUnavailable || saysDown[status]:
		return finding{verdict: Dead, reason: HealthDown, a: a, detail: detail, final: true}
	case status == "degraded" || status == "warn":
		return finding{verdict: Degraded, reason: InternalError, a: a, detail: detail, mcp: true}
	case a.status != http.StatusOK:
		p.warn("health_path: %s", detail)
	}
	return finding{}
}

// saysDown are the words of frameworks for it: ours and ASP.NET Core's, Spring Boot
// Actuator's, and those of the draft "Health Check Response Format for HTTP APIs".
var saysDown = map[string]bool{"unhealthy": true, "down": true, "fail": true, "error": true}

// healthStatus is the status that a health document names, in lower case: a member of
// a JSON object, or the whole of a text (ASP.NET Core).
func healthStatus(document string) string {
	text := strings.TrimSpace(strings.TrimPrefix(document, byteOrderMark))
	var doc struct {
		Status string `json:"status"`
	}
	switch {
	case json.Unmarshal([]byte(text), &doc) == nil:
		text = doc.Status
	case len(text) > 16 || strings.ContainsAny(text, " <{[\"\n"):
		return "" // no word
	}
	return strings.ToLower(strings.TrimSpace(text))
}

func describeHealth(a answer, status string) string {
	if a.err != nil {
		return clean(a.err.Error())
	}
	return fmt.Sprintf("HTTP %d, status %q", a.status, status)
}

func (p *Prober) getHealth(ctx context.Context) answer {
	start := time.Now()
	a := answer{q: question{method: "GET " + p.target.HealthPath}}
	p.readHealth(ctx, &a)
	a.took = time.Since(start)
	p.note(&a)
	return a
}

func (p *Prober) readHealth(ctx context.Context, a *answer) {
	u := *p.url
	to, _ := url.ParseRequestURI(p.target.HealthPath) // Validate has done it before
	u.Path, u.RawPath, u.RawQuery = to.Path, to.RawPath, to.RawQuery
	stage := &stage{}
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, stage.trace()), http.MethodGet, u.String(), nil)
	if err != nil {
		a.err, a.reason = err, ProbeRejected
		return
	}
	p.common(req)
	req.Header.Set("Accept", "application/json")
	resp, err := p.line.roundTrip(req)
	if err != nil {
		a.err = err
		a.reason = stage.reason(ctx, err)
		return
	}
	defer resp.Body.Close()
	a.status, a.header = resp.StatusCode, resp.Header
	body, err := decoded(resp)
	if err != nil {
		a.err = err
		a.reason = bodyReason(ctx, err)
		return
	}
	b, err := io.ReadAll(io.LimitReader(body, maxAnswer))
	if err != nil {
		a.err = err
		a.reason = bodyReason(ctx, err)
		return
	}
	a.text = string(b)
}
