//go:build go1.21

package mcphealth

import (
	"fmt"
	"net/http"
	"regexp"
	"strings"
)

// finding is what one answer means on its own.
type finding struct {
	verdict Verdict
	reason  Reason
	detail  string
	a       answer
	mcp     bool // only an MCP layer, or the authorization in front of it, says this
	final   bool // ends the probe: it tells nothing of the era, and asking on would hurt
	bare    bool // a 404, 405 or 410 without an MCP signature
}

// The wordings by which real servers refuse; sources in mcp-wire.md §3.3. They
// count in JSON-RPC errors and in short plain text, never in HTML or other JSON,
// and never where they only repeat the request ("Cannot POST /mcp").
var (
	sessionWords = regexp.MustCompile(`(?i)session( with)?( id)?([: ]{1,2}['"]?[\w.:-]{1,64}['"]?)? ?(was |is |has )?(not found|terminated|expired|closed)|(invalid|unknown|expired) .*session|no valid session id|(missing|requires?|without|no) (an? )?.{0,30}session|mcp-session-id|session.{0,20}(required|missing|invalid|unknown|expired|does not exist|must be provided)|not initialized`)
	versionWords = regexp.MustCompile(`(?i)protocol.?version|(unsupported .*version|version .*(not supported|unsupported|mismatch)).*\b20\d\d-\d\d-\d\d\b`)
	listWords    = regexp.MustCompile(`(?i)version|supported`)
	otherWords   = regexp.MustCompile(`(?i)json.?rpc not handled|expect(s|ed)?( an?)? initialize`)
	formWords    = regexp.MustCompile(`(?i)not acceptable|accept must contain|must accept|unsupported media type|content-type`)
	hostWords    = regexp.MustCompile(`(?i)\bhosts?\b.{0,60}\b(not|invalid|forbidden|denied|unknown|rejected|blocked|mismatch)|\b(invalid|forbidden|unknown|untrusted|disallowed|rejected|blocked|bad|unrecognized|unexpected)\b.{0,20}\bhosts?\b|only allowed at|dns.rebinding`)
	badHostWords = regexp.MustCompile(`(?i)\b(invalid|disallowed|untrusted)\b.{0,12}\bhost(name)?\b|\bhost header\b.{0,30}\b(not|invalid)|\bDisallowedHost\b`)
	drainWords   = regexp.MustCompile(`(?i)shutting down|draining`)
	fullWords    = regexp.MustCompile(`(?i)too many|\blimit|\bmax|capacity|exceed|\bfull\b|no more|\b(available|allowed)\b`)
	soloWords    = regexp.MustCompile(`(?i)server (is )?not initialized|already initialized|duplicate .{0,3}initialize`)
	dates        = regexp.MustCompile(`\b20\d\d-\d\d-\d\d\b`)
)

// judge says what one answer means. Statuses that speak first come first: 401,
// 403, 421 and 429 whatever their body, then gateways; after them the content
// decides and the status does not (200 can be a login page, 404 a healthy
// modern server).
func (p *Prober) judge(a answer) finding {
	f := p.judgeStatus(a)
	if f.verdict == "" {
		f = judgeContent(a)
	}
	f.a = a
	if f.detail == "" {
		f.detail = describe(a)
	}
	return f
}

// speaksFirst: the status says enough, whatever the body, or its lack.
func speaksFirst(status int) bool {
	switch status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusMisdirectedRequest, http.StatusTooManyRequests:
		return true
	}
	return isGateway(status)
}

// isGateway: a hop in between says that it got no answer; 520 to 530 are Cloudflare's.
func isGateway(status int) bool {
	return status >= 502 && status <= 504 || status >= 520 && status <= 530
}

func (p *Prober) judgeStatus(a answer) finding {
	switch {
	case a.err != nil:
		v := Dead
		if a.reason == Canceled || a.reason == ProbeRejected {
			v = Unknown
		}
		return finding{verdict: v, reason: a.reason, final: true}
	case p.sessionDenied(a):
		return finding{verdict: Alive, reason: SessionRequired, mcp: true}
	case a.status == http.StatusBadRequest && (a.kind != foreign || a.page) && badHostWords.MatchString(a.words()):
		return p.judgeHost(a)
	case a.status == http.StatusUnauthorized:
		return p.judgeAuth()
	case a.status == http.StatusForbidden:
		return p.judgeForbidden(a)
	case a.status == http.StatusMisdirectedRequest:
		return p.judgeHost(a)
	case a.status == http.StatusTooManyRequests:
		// Some servers mask an unknown session by a 429 (mcp-gitlab); one that
		// says when to come back means it.
		masked := a.q.session == ghostID && a.header.Get("Retry-After") == ""
		return finding{verdict: Degraded, reason: RateLimited, final: !masked}
	case a.status == http.StatusRequestTimeout:
		return finding{verdict: Dead, reason: Timeout, final: true}
	case isGateway(a.status):
		return judgeGateway(a)
	case a.status >= 301 && a.status <= 303 || a.status == http.StatusTemporaryRedirect || a.status == http.StatusPermanentRedirect:
		return finding{verdict: Unknown, reason: Redirected, final: true}
	}
	return finding{}
}

// sessionDenied: a status that is about the session which the question carried, and
// not about credentials or load. rmcp (Rust) said 401 "Unauthorized: Session not found"
// before it took to 404, go-sdk says 403 of another user's session, Neotoma said 503 in
// JSON-RPC of one that it lost in a restart. Where initialize does not have the last word,
// what a full or a starting server may say as well proves nothing.
func (p *Prober) sessionDenied(a answer) bool {
	switch {
	case a.q.session == "" || a.kind == foreign || !sessionWords.MatchString(a.words()):
		return false
	case a.status == http.StatusServiceUnavailable:
		return a.kind == rpcAnswer && a.header.Get("X-Mcp-Health") == "" && p.initializes() &&
			!soloWords.MatchString(a.words()) && !fullWords.MatchString(a.words())
	}
	return (a.status == http.StatusUnauthorized || a.status == http.StatusForbidden) && a.header.Get("WWW-Authenticate") == ""
}

// initializes: whoever refuses a session is asked for one.
func (p *Prober) initializes() bool {
	return !p.target.Shallow && p.target.Era != Modern && p.habit != solo && (p.habit != stateful || p.holds())
}

func (p *Prober) judgeAuth() finding {
	if p.credentials() {
		return finding{verdict: Degraded, reason: CredentialsRejected, mcp: true, final: true}
	}
	return finding{verdict: Alive, reason: AuthRequired, mcp: true, final: true}
}

func (p *Prober) judgeForbidden(a answer) finding {
	switch {
	case a.header.Get("WWW-Authenticate") != "":
		return p.judgeAuth()
	case hostWords.MatchString(a.words()):
		return p.judgeHost(a)
	case p.credentials():
		return p.judgeAuth()
	case a.kind == rpcAnswer:
		return finding{verdict: Alive, reason: RPCError, mcp: true, final: true}
	}
	return finding{verdict: Dead, reason: NotMCP, final: true}
}

func (p *Prober) judgeHost(a answer) finding {
	if p.target.Host != "" {
		return finding{verdict: Dead, reason: HostRejected, final: true,
			detail: fmt.Sprintf("%s; the Host was %q, as clients send it", describe(a), clean(p.target.Host))}
	}
	guess := p.host
	if guess == "" {
		guess = p.url.Host
	}
	p.learned.CompareAndSwap(p.host, "") // one client's Host, perhaps no longer served: guess again
	p.hostWorks.Store(false)
	return finding{verdict: Unknown, reason: HostGuessed, final: true,
		detail: fmt.Sprintf("%s; the Host was %q, only a guess: configure the one that clients use", describe(a), clean(guess))}
}

// judgeGateway: a 503 that another mcphealth made says that its upstream is
// gone; a JSON-RPC body is the server's own.
func judgeGateway(a answer) finding {
	switch {
	case a.header.Get("X-Mcp-Health") != "":
		return finding{verdict: Dead, reason: GatewayError, final: true}
	case a.status == http.StatusServiceUnavailable && drainWords.MatchString(a.words()):
		return finding{verdict: Degraded, reason: Draining, mcp: true, final: true}
	case a.kind == rpcAnswer && a.status == http.StatusServiceUnavailable:
		return finding{verdict: Degraded, reason: SessionLimit, mcp: true, final: true}
	case a.kind == rpcAnswer:
		return finding{verdict: Degraded, reason: InternalError, mcp: true, final: true}
	}
	return finding{verdict: Dead, reason: GatewayError, final: true}
}

func judgeContent(a answer) finding {
	switch {
	case a.kind == rpcAnswer && a.msg.Error == nil:
		return finding{verdict: Ready, reason: OK, mcp: true}
	case a.kind == rpcAnswer:
		return judgeError(a)
	case a.kind == text && refusalWords(a.text) && a.status >= 400 && a.status < 500:
		if formWords.MatchString(a.text) && !sessionWords.MatchString(a.text) {
			return finding{verdict: Unknown, reason: ProbeRejected}
		}
		return finding{verdict: Alive, reason: SessionRequired, mcp: true}
	case a.status >= 500:
		return finding{verdict: Dead, reason: ServerError}
	case a.status == http.StatusNotFound || a.status == http.StatusMethodNotAllowed || a.status == http.StatusGone:
		return finding{verdict: Unknown, reason: EndpointNotFound, bare: true}
	case a.status == http.StatusNotAcceptable || a.status == http.StatusUnsupportedMediaType ||
		a.status == http.StatusBadRequest && a.kind == text && formWords.MatchString(a.text):
		return finding{verdict: Unknown, reason: ProbeRejected}
	}
	return finding{verdict: Dead, reason: NotMCP}
}

func refusalWords(s string) bool {
	return sessionWords.MatchString(s) || versionWords.MatchString(s) || otherWords.MatchString(s) || formWords.MatchString(s)
}

func judgeError(a answer) finding {
	switch code := a.code(); {
	case code == codeMethodNotFound:
		return finding{verdict: Alive, reason: MethodNotFound}
	case (code == codeInternal || a.status == http.StatusInternalServerError) && !(a.q.session != "" && sessionWords.MatchString(a.msg.Error.Message)):
		return finding{verdict: Degraded, reason: InternalError, mcp: true}
	case sessionWords.MatchString(a.msg.Error.Message):
		return finding{verdict: Alive, reason: SessionRequired, mcp: true}
	}
	return finding{verdict: Alive, reason: RPCError, mcp: true}
}

// words are what the answer says for itself, where wordings may count.
func (a answer) words() string {
	if a.kind == rpcAnswer && a.msg.Error != nil {
		return a.msg.Error.Message
	}
	return a.text
}

// sessionLost: the server does not know the session that the question carried.
func (f finding) sessionLost() bool {
	if f.a.err != nil || f.verdict == Ready || f.reason == MethodNotFound {
		return false
	}
	return f.a.status == http.StatusNotFound || f.a.status == http.StatusGone || f.reason == SessionRequired
}

// versions are the protocol versions that a refusal lists.
func (f finding) versions() []string {
	if f.a.kind == rpcAnswer && f.a.msg.Error != nil {
		all := f.a.msg.Error.Message + " " + string(f.a.msg.Error.Data)
		if f.a.code() == codeVersion || listWords.MatchString(all) {
			return dates.FindAllString(all, -1)
		}
	} else if f.a.kind == text && versionWords.MatchString(f.a.text) {
		return dates.FindAllString(f.a.text, -1)
	}
	return nil
}

// isModern: initialize is refused as a server does that knows none: for its version, or
// as a method that is not found, which is 404 (MCP 2026-07-28, "Error codes").
func (f finding) isModern() bool {
	code := f.a.code()
	return code == codeHeaderMismatch || code == codeMissingCap || code == codeVersion ||
		code == codeMethodNotFound && f.a.status == http.StatusNotFound
}

// refusal is the answer's shape without what changes between two of its kind: by
// it a refusal that a working server gave is known again later.
func (a answer) refusal() string {
	if a.err != nil || a.status < 400 || a.status >= 500 {
		return ""
	}
	media, _, _ := strings.Cut(a.header.Get("Content-Type"), ";")
	body := a.text
	if a.kind == rpcAnswer && a.msg.Error != nil {
		body = string(a.msg.Error.Code) + a.msg.Error.Message
	}
	if body = strings.ReplaceAll(body, ghostID, ""); body == "" {
		return "" // any proxy can say that
	}
	return fmt.Sprintf("%d %s %s", a.status, media, body)
}

// describe says for a person what came, in one sentence.
func describe(a answer) string {
	what := fmt.Sprintf("%s: HTTP %d", a.q.method, a.status)
	if a.status == 0 {
		what = a.q.method + " was answered" // over a carrier that is not HTTP
	}
	switch {
	case a.err != nil && a.reason == Timeout:
		return a.q.method + ": no answer in time"
	case a.err != nil && a.reason == Stalled && a.status == 0:
		return a.q.method + ": other messages came, but no answer in time"
	case a.err != nil && a.reason == Stalled:
		return what + ", and then no answer in time"
	case a.err != nil:
		return fmt.Sprintf("%s: %s", a.q.method, clean(a.err.Error()))
	case a.kind == rpcAnswer && a.msg.Error == nil:
		return what + " with a JSON-RPC result"
	case a.kind == rpcAnswer:
		return fmt.Sprintf("%s with JSON-RPC error %d %q", what, a.code(), clean(a.msg.Error.Message))
	case a.target != "":
		return fmt.Sprintf("%s, a redirect to %q, which a probe does not follow; configure the final path", what, clean(a.target))
	case a.event != "":
		return fmt.Sprintf("%s with a JSON-RPC message in an event named %q; clients read only events without a name or named message", what, clean(a.event))
	case a.otherID:
		return what + " with a JSON-RPC answer to another id than ours"
	case a.kind == text:
		return fmt.Sprintf("%s with the text %q", what, clean(a.text))
	}
	return fmt.Sprintf("%s with %s, which is no JSON-RPC answer", what, mediaName(a))
}

func mediaName(a answer) string {
	if m := clean(a.header.Get("Content-Type")); m != "" {
		return m
	}
	return "no content type"
}
