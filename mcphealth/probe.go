//go:build go1.21

package mcphealth

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

const (
	modernVersion = "2026-07-28" // the first revision without initialize
	legacyVersion = "2025-11-25" // the newest one that initialize may ask for
)

// habit is what a prober has learned of its upstream: how to ask it next time.
type habit int

const (
	unasked   habit = iota
	modern          // server/discover, each time
	stateless       // legacy, answers a ping with the ghost id: no session anywhere
	stateful        // legacy, hands out sessions: ping in the one we hold
	solo            // one session for all clients: never initialize it
)

// A Prober asks one upstream one question at a time and says what came back. It
// keeps what it learned between probes: the era, the held session, the Host that
// clients use. Probe and Close may be called from any goroutine; one waits for
// the other.
type Prober struct {
	target Target
	url    *url.URL
	// learned is the Host of traffic that got a JSON-RPC answer (a string).
	learned   atomic.Value
	hostWorks atomic.Bool // a probe with the present Host was answered
	// nextLine is the way that the next probe goes (a *Line), nextHeader what it
	// sends (an http.Header).
	nextLine   atomic.Value
	nextHeader atomic.Value

	mu      sync.Mutex
	line    *Line
	carrier *Carrier // instead of HTTP requests, or nil
	host    string   // of this probe; empty: the URL's
	header  http.Header
	secrets []string // what must not show, longest first
	bare    bool     // this question goes without header
	limited int      // answers in a row that were a 429, though no session is kept
	habit   habit
	modern  string // the modern version spoken
	proven  bool   // answered as MCP at least once
	refusal string // how a working server refused the ghost id
	router  string // the question that its session router answers; "" = discover
	session session
	info    ServerInfo
	spoken  []string // protocol versions last heard of

	steps    []Step
	warnings []string
	offered  bool // initialize was asked in this probe
	opened   bool
	closed   bool

	left atomic.Value // string: the session that a farewell has ended
}

// NewProber makes a prober for t. A nil line means a plain one of its own. The
// error wraps ErrTarget.
func NewProber(t Target, l *Line) (*Prober, error) {
	if err := t.Validate(); err != nil {
		return nil, err
	}
	u, err := url.Parse(t.URL)
	if err != nil {
		return nil, fmt.Errorf("%w: url %q: %v", ErrTarget, t.URL, err)
	}
	if u.Path == "" {
		u.Path = "/"
	}
	u.Host = strings.TrimSuffix(u.Host, ":") // RFC 3986, 6.2.3; servers that look at the Host do not
	if l == nil {
		l = lineTo(u)
	}
	p := &Prober{target: t.WithDefaults(), url: u, line: l, modern: modernVersion}
	p.useHeader(t.Header)
	return p, nil
}

// lineTo is a line with Go's defaults.
func lineTo(u *url.URL) *Line {
	if u.Scheme == "http" {
		return NewPlainLine(&http.Transport{})
	}
	return NewLine(&http.Transport{})
}

// Target is what the prober was made for, with defaults.
func (p *Prober) Target() Target { return p.target }

// SetLine changes the way to the upstream from the next probe on, as after a
// reload. It does not wait for a probe that runs.
func (p *Prober) SetLine(l *Line) { p.nextLine.Store(l) }

// takeLine goes over to the line set last.
func (p *Prober) takeLine() {
	if l, _ := p.nextLine.Load().(*Line); l != nil && l != p.line {
		p.line.Close()
		p.line = l
	}
}

// LearnHost notes the Host of a client's request that got a JSON-RPC answer. The
// configured one outranks it, and so does one by which a probe was answered: what
// a client may write into a request must not change what a working probe asks.
func (p *Prober) LearnHost(host string) {
	if p.target.Host == "" && host != "" && !p.hostWorks.Load() && p.learned.Load() != host {
		p.learned.Store(host)
	}
}

// hostNow is the Host that a probe which begins now sends; empty: the URL's.
func (p *Prober) hostNow() string {
	if p.target.Host != "" {
		return p.target.Host
	}
	s, _ := p.learned.Load().(string)
	return s
}

// Probe asks the upstream and says what it found. It blocks until the upstream
// answers, the target's timeout has passed, or ctx ends. It returns no error:
// what went wrong is in the Result.
func (p *Prober) Probe(ctx context.Context) Result {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.steps = nil // one by one: Yaegi panics on a nil among several
	p.warnings = nil
	p.offered, p.opened, p.closed = false, false, false
	p.takeLine()
	p.takeHeader(ctx)
	p.host = p.hostNow()
	at := time.Now()
	ctx, cancel := context.WithTimeout(ctx, p.target.Timeout)
	defer cancel()
	health := p.health(ctx)
	f := health
	if f.verdict != Dead {
		f = p.demandsAuth(ctx, p.ladder(ctx))
		if f.verdict.Vote() > 0 && f.verdict != Degraded && health.verdict == Degraded {
			f = health
		}
	}
	r := p.result(f)
	r.At = at
	return r
}

// ladder asks the question that this upstream is known to answer, and all of
// them from the first where it is not known, or no longer true (mcp-wire.md §3.2).
func (p *Prober) ladder(ctx context.Context) finding {
	if p.target.Era == SSE {
		return p.eventStream(ctx) // which goes deeper while the stream is open
	}
	if p.carrier != nil {
		return p.deeper(ctx, p.carried(ctx))
	}
	return p.deeper(ctx, p.rung(ctx))
}

// rung is the question that fits, or the whole ladder.
func (p *Prober) rung(ctx context.Context) finding {
	var f finding
	switch p.habit {
	case unasked:
		return p.climb(ctx)
	case modern:
		f = p.discover(ctx)
	case stateless:
		q := question{method: "ping", session: ghostID}
		if p.session.open && p.session.id == "" { // it hands out none: asked as by every client
			q.session, q.version = "", p.session.version
		}
		f = p.judge(p.ask(ctx, q))
	case stateful:
		if !p.session.open && p.holds() {
			return p.climb(ctx) // to a new one
		}
		f = p.inSession(ctx)
		if d := p.successor(ctx, f); d.verdict == Ready {
			return p.settled(d)
		}
	case solo:
		f = p.ghost(ctx, "server/discover")
	}
	if p.refusal != "" && f.a.refusal() == p.refusal && f.a.q.session == ghostID {
		f.verdict, f.reason, f.mcp = Alive, SessionRequired, true // as it refused while it worked
	}
	if f.reason == MethodNotFound && p.habit != modern {
		f.mcp = true // weak from a stranger; this one was MCP before
	}
	if p.counts(f) {
		return p.settled(f)
	}
	return p.climb(ctx)
}

// lookAfter is how many 429 in a row have the ladder climbed: a server that masks an
// unknown session so may have taken the place of one without sessions.
const lookAfter = 4

// counts: in steady state this finding needs no second look. An unproven answer,
// and one that another kind of server gives, has the ladder climbed again in the
// same tick; silence does not.
func (p *Prober) counts(f finding) bool {
	if f.final || f.mcp && f.verdict != Alive {
		p.limited = 0
		return true
	}
	if f.reason == RateLimited && p.habit != stateful { // it keeps no session that the 429 could be about
		p.limited++
		return p.limited%lookAfter != 0
	}
	p.limited = 0
	return f.mcp && (p.habit == stateful || p.habit == solo || f.reason == MethodNotFound)
}

// climb goes up the rungs: discover, ping, initialize. The last one asked decides
// about service, whatever the router in front of it answered before.
func (p *Prober) climb(ctx context.Context) finding {
	var all []finding
	router := false // a refusal that names the session: ping would get the same
	if p.target.Era != Legacy {
		f := p.discover(ctx)
		late := ctx.Err() == context.DeadlineExceeded && (f.reason == RateLimited || f.reason == NotMCP) // its body never came
		if f.final || late || f.verdict == Ready && p.habit == modern {
			return p.settled(f)
		}
		if p.target.Era == Modern {
			return p.settled(p.sum([]finding{f}))
		}
		if f.a.kind != foreign && soloWords.MatchString(f.a.words()) {
			p.habit = solo
			return p.settled(f)
		}
		router = f.reason == SessionRequired && len(f.versions()) == 0 || f.reason == RateLimited
		all = append(all, f)
	}
	if !router {
		if p.hurried(ctx, all) {
			return p.settled(p.sum(all))
		}
		f := p.ghost(ctx, "ping")
		if f.verdict == Ready && (answersAnything(all) || !p.proven && !isObject(f.a.msg.Result)) {
			f = finding{verdict: Dead, reason: NotMCP, a: f.a,
				detail: "ping: a JSON-RPC result that proves nothing: other JSON-RPC services know a ping, too"}
		}
		if f.verdict == Ready {
			p.habit = stateless
			p.session.open = p.session.open && p.session.id != "" // the made-up id will do
			return p.settled(f)
		}
		if f.a.kind != foreign && soloWords.MatchString(f.a.words()) {
			p.habit = solo
			return p.settled(f)
		}
		if f.final {
			return p.settled(f)
		}
		all = append(all, f)
	}
	return p.settled(p.handshake(ctx, all))
}

// hurried: the server lives, and needs for an answer more time than is left. Asking on
// would find it dead for being slow, and leave a session of which nobody hears. But what
// initialize has said stands, and where a login may have spoken, it must be asked.
func (p *Prober) hurried(ctx context.Context, before []finding) bool {
	longest, talked := time.Duration(0), false
	if p.offered || p.session.fails > 0 && p.session.talked {
		return false
	}
	for i := 0; i < len(before); i++ {
		if speaksFirst(before[i].a.status) {
			return false
		}
		longest = atLeast(longest, before[i].a.took)
		talked = talked || before[i].mcp || before[i].reason == MethodNotFound
	}
	at, ok := ctx.Deadline()
	if !talked || !ok || time.Until(at) >= longest {
		return false
	}
	p.warn("slow: the %v of the timeout are too short for all questions; an answer takes %v", p.target.Timeout, longest.Round(time.Millisecond))
	return true
}

// answersAnything: discover got a result that is none. Who has a result for whatever
// is asked, as a stub does, has one for ping; initialize tells an MCP server.
func answersAnything(before []finding) bool {
	return len(before) > 0 && before[0].a.kind == rpcAnswer && before[0].a.msg.Error == nil && before[0].reason == NotMCP
}

// settled notes that the upstream has spoken MCP.
func (p *Prober) settled(f finding) finding {
	if f.mcp {
		p.proven = true
		p.hostWorks.Store(true)
	}
	return f
}

// handshake is the last rung: one initialize, if it is allowed now.
func (p *Prober) handshake(ctx context.Context, before []finding) finding {
	spoke := p.sum(before)
	if spoke.mcp {
		p.router = spoke.a.q.method
	}
	if p.target.Shallow {
		if spoke.mcp && spoke.verdict == Alive {
			p.habit = stateful // a router's refusal: only legacy servers have one
		}
		return spoke
	}
	if p.hurried(ctx, before) {
		return spoke
	}
	talked := spoke.mcp || spoke.reason == MethodNotFound
	if talked && !p.session.talked {
		p.session.fails = 0 // what failed last was the way there, which is back
	}
	f := p.session.failure // of the renewal that this probe has tried
	if !p.offered {
		switch {
		case !p.session.tooSoon(time.Now()):
			f = p.initialize(ctx)
		case talked:
			return f
		default:
			return spoke
		}
	}
	if f.a.kind != foreign && soloWords.MatchString(f.a.words()) {
		p.habit = solo
	}
	if f.verdict == Ready {
		if len(before) > 0 && before[0].a.q.method == "server/discover" {
			p.refusal = before[0].a.refusal()
		}
		return f
	}
	switch {
	case f.final:
	case spoke.reason == InternalError && spoke.a.q.method == "server/discover" && f.isModern():
		f = spoke // this server knows the one question, and fails inside at it
	case (f.a.status == http.StatusNotFound || f.a.status == http.StatusGone) && f.reason != MethodNotFound && (f.a.kind == rpcAnswer || f.mcp):
		// It opened no session and still is "not found": this endpoint serves nobody.
		f.verdict, f.reason, f.mcp, f.bare = Dead, RouteAbsent, false, false
	case f.reason == InternalError:
		f.verdict, f.reason = Degraded, HandshakeFailed
	case len(f.versions()) > 0 || f.a.code() == codeVersion:
		f.reason = VersionMismatch
	case f.reason == ServerError || f.reason == MethodNotFound || f.mcp:
	case spoke.mcp:
		f.verdict, f.reason, f.mcp = Degraded, HandshakeFailed, true
	default:
		f = p.sum(append(before, f))
	}
	p.session.failed(time.Now(), f, talked)
	return f
}

// sum is what rungs of which none was a result say together.
func (p *Prober) sum(all []finding) finding {
	if len(all) == 0 {
		return finding{}
	}
	last := all[len(all)-1]
	bare := true
	for i := 0; i < len(all); i++ {
		if all[i].mcp {
			return all[i]
		}
		bare = bare && all[i].bare
	}
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].reason == MethodNotFound {
			return all[i]
		}
	}
	switch {
	case bare && p.proven:
		last.verdict, last.reason = Dead, RouteAbsent
	case last.bare && !bare:
		last.verdict, last.reason = Dead, NotMCP
	}
	return last
}

// discover asks what modern servers must answer and legacy routers refuse, and
// once more with another modern version if the server names one.
func (p *Prober) discover(ctx context.Context) finding {
	f := p.ghost(ctx, "server/discover")
	if f.a.code() == codeVersion && f.a.kind == rpcAnswer {
		if v := p.otherModern(f.versions()); v != "" {
			p.modern = v
			f = p.ghost(ctx, "server/discover")
		}
	}
	if f.verdict != Ready {
		return f
	}
	var d struct {
		SupportedVersions []string                   `json:"supportedVersions"`
		Capabilities      json.RawMessage            `json:"capabilities"`
		TTLMs             float64                    `json:"ttlMs"`
		CacheScope        string                     `json:"cacheScope"`
		ServerInfo        ServerInfo                 `json:"serverInfo"`
		Meta              map[string]json.RawMessage `json:"_meta"`
	}
	_ = json.Unmarshal(f.a.msg.Result, &d) // an odd member does not hide the others
	if len(d.SupportedVersions) == 0 || d.Capabilities == nil {
		return finding{verdict: Dead, reason: NotMCP, a: f.a,
			detail: "server/discover: a JSON-RPC result that is no DiscoverResult (no supportedVersions and capabilities)"}
	}
	if raw := d.Meta["io.modelcontextprotocol/serverInfo"]; raw != nil {
		_ = json.Unmarshal(raw, &d.ServerInfo)
	}
	p.hear(d.ServerInfo, d.SupportedVersions)
	if d.TTLMs > 0 && d.CacheScope == "public" {
		p.warn("cacheable: the server lets shared caches keep its discover answer for %v; one in the path may answer for it", time.Duration(d.TTLMs)*time.Millisecond)
	}
	if p.habit == modern {
		p.habit = unasked
	}
	for i := 0; i < len(d.SupportedVersions); i++ {
		if d.SupportedVersions[i] >= modernVersion {
			p.habit = modern
		}
	}
	return f
}

// otherModern picks the newest modern version that is not the one just refused.
func (p *Prober) otherModern(versions []string) string {
	best := ""
	for i := 0; i < len(versions); i++ {
		if v := versions[i]; v >= modernVersion && v != p.modern && v > best {
			best = v
		}
	}
	return best
}

// ghost asks with the id of no session: the one question that left nothing
// behind on every server measured.
func (p *Prober) ghost(ctx context.Context, method string) finding {
	q := question{method: method, session: ghostID}
	if method == "server/discover" {
		q.modern, q.version = true, p.modern
	}
	return p.judge(p.ask(ctx, q))
}

// hear keeps what the server says of itself.
func (p *Prober) hear(info ServerInfo, versions []string) {
	p.info = ServerInfo{Name: clean(p.redact(info.Name)), Version: clean(p.redact(info.Version))}
	p.spoken = nil
	for i := 0; i < len(versions) && i < 16; i++ {
		p.spoken = append(p.spoken, clean(p.redact(versions[i])))
	}
}

func (p *Prober) warn(format string, args ...any) {
	w := fmt.Sprintf(format, args...)
	for i := 0; i < len(p.warnings); i++ {
		if p.warnings[i] == w {
			return
		}
	}
	p.warnings = append(p.warnings, w)
}

// note records one question and what its answer's headers give away. From here on the
// answer may be shown.
func (p *Prober) note(a *answer) {
	p.scrub(a)
	outcome := "foreign"
	switch {
	case a.err != nil:
		outcome = string(a.reason)
	case a.kind == rpcAnswer && a.msg.Error == nil:
		outcome = "result"
	case a.kind == rpcAnswer:
		outcome = "error"
	case a.kind == text:
		outcome = "text"
	}
	p.steps = append(p.steps, Step{Step: a.q.method, HTTPStatus: a.status, RPCCode: a.code(), Ms: millis(a.took), Outcome: outcome})
	p.noteMove(*a)
	if a.header == nil {
		return
	}
	age, hit := a.header.Get("Age"), strings.ToUpper(a.header.Get("X-Cache")+" "+a.header.Get("CF-Cache-Status"))
	if (age != "" && age != "0") || strings.Contains(hit, "HIT") {
		p.warn("cacheable: a cache answered this probe (Age %q, X-Cache or CF-Cache-Status %q); it may answer for a dead server", clean(age), clean(hit))
	}
}

func (p *Prober) noteMove(a answer) {
	if a.moved != 0 {
		p.warn("redirect: the endpoint answers %d to another path of the same origin; configure the final path", a.moved)
	}
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// result turns what decided into the report.
func (p *Prober) result(f finding) Result {
	if f.verdict == "" {
		f = finding{verdict: Unknown, reason: Canceled, detail: "the probe ended before it asked"}
	}
	r := Result{
		URL: p.target.URL, Verdict: f.verdict, Reason: f.reason, Detail: f.detail,
		Era: p.era(), ProtocolVersions: append([]string{}, p.spoken...), Server: p.info,
		HTTPStatus: f.a.status, RPCCode: f.a.code(), LatencyMs: millis(f.a.took),
		SessionOpened: p.opened, SessionClosed: p.closed,
		Warnings: append([]string{}, p.warnings...), Steps: append([]Step{}, p.steps...),
	}
	if f.a.header != nil {
		r.RetryAfter = retryAfter(f.a.header, time.Now())
	}
	if p.target.AliveIf == AliveIfAnyResponse && f.verdict.Vote() <= 0 && p.answered() {
		r.Verdict, r.Reason = Alive, HTTPAnswer
	}
	if (r.Verdict == Ready || r.Verdict == Alive) && p.target.SlowAfter > 0 && f.a.took > p.target.SlowAfter {
		r.Verdict, r.Reason = Degraded, Slow
		r.Detail = fmt.Sprintf("answered after %v, more than the %v of slow_after", f.a.took.Round(time.Millisecond), p.target.SlowAfter)
	}
	if r.Verdict.Vote() > 0 && f.a.header != nil && f.a.header.Get(DrainHeader) == "1" {
		r.Verdict, r.Reason = Degraded, Draining
		r.Detail = "the server says " + DrainHeader + ": 1"
	}
	return r
}

// answered: an HTTP answer came whole to a question of this probe. The health
// document is none: whoever configured it wants it to count.
func (p *Prober) answered() bool {
	for i := 0; i < len(p.steps); i++ {
		s := p.steps[i]
		if s.HTTPStatus != 0 && !strings.HasPrefix(s.Step, "GET ") && (s.Outcome == "result" || s.Outcome == "error" || s.Outcome == "text" || s.Outcome == "foreign") {
			return true
		}
	}
	return false
}

func (p *Prober) era() Era {
	switch p.habit {
	case modern:
		return Modern
	case stateless, stateful, solo:
		return Legacy
	}
	if p.target.Era != "" {
		return p.target.Era
	}
	return EraUnknown
}

// Close ends the session that the prober holds, within ctx, and its connection.
// It reports whether a session was ended. A later Probe begins anew.
func (p *Prober) Close(ctx context.Context) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.takeLine()
	p.hangUp(ctx)
	p.habit = unasked
	p.line.Close()
	return p.closed
}

// watch has ended called once when the connection that is watched ends. by may be
// nil; see Scheduler.Watch.
func (p *Prober) watch(by func(c net.Conn, ended func()) (stop func()), ended func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.line.watchIdle(by, ended)
}

// hangUpLine closes the connection that was left open, after a probe that found nothing
// good: silent, if it got no answer.
func (p *Prober) hangUpLine(silent bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.line.fail(silent)
}
