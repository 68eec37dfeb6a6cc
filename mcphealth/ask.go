//go:build go1.21

package mcphealth

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Version is ours, as User-Agent and clientInfo carry it.
const Version = "0.1.0"

const (
	// ghostID is the session id that no server issued: session routers refuse it
	// before they create anything, modern servers ignore it (mcp-wire.md §2.2).
	ghostID = "mcphealth-no-session"
	// maxAnswer is how many bytes of an answer a probe reads: 255 KiB, far above
	// the largest discover answer in testdata/captures and far below what hurts;
	// one more and json.Decoder doubles its buffer once more, to 512 KiB.
	maxAnswer = 255 << 10
	// maxToolList is the same for tools/list, whose schemas are long: 4 MiB.
	maxToolList = 4 << 20
	// maxText is the longest plain-text refusal that can be a server's: 512 bytes.
	maxText = 512
	// settle is how long a probe waits for the end of an answer it has already
	// understood, so that its connection can stay open as death watch.
	settle = 50 * time.Millisecond
)

// question is one JSON-RPC request of a probe.
type question struct {
	method  string
	params  string // JSON object; "" = none
	session string // Mcp-Session-Id; "" = none
	version string // MCP-Protocol-Version; "" = none
	name    string // Mcp-Name, where a modern request needs one
	modern  bool   // adds Mcp-Method and _meta
	limit   int    // bytes of answer; 0 = maxAnswer
}

// kind is what an answer's body turned out to be.
type kind int

const (
	foreign   kind = iota // not an answer to our question
	rpcAnswer             // a JSON-RPC answer to it
	text                  // short plain text
)

// answer is what came back for one question.
type answer struct {
	q       question
	err     error  // no answer: why
	reason  Reason // the class of err
	status  int
	header  http.Header
	kind    kind
	msg     *message
	text    string   // of a text answer, or the beginning of a foreign one
	page    bool     // HTML
	otherID bool     // a JSON-RPC answer came, with another id
	event   string   // the name of the event in which it came, which clients ignore
	target  string   // Location of a redirect that was not followed
	moved   int      // status of a redirect that was followed
	at      *url.URL // that answered; nil over a carrier
	took    time.Duration
	read    int64 // bytes of the body
}

func (a answer) code() int {
	if a.msg == nil {
		return 0
	}
	return a.msg.Error.code()
}

// newID makes an unguessable string id. A small integer can take a real client's
// answer on servers that share one transport between clients (mcp-wire.md §2.4).
func newID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24; a weak id would still be an id
	return "mcphealth-" + hex.EncodeToString(b[:])
}

// body is the question as JSON.
func (q question) body(id string) []byte {
	var b bytes.Buffer
	b.Grow(384 + len(q.params)) // all of it, with a modern question's _meta
	b.WriteString(`{"jsonrpc":"2.0","id":"` + id + `","method":"` + q.method + `"`)
	rest := q.params
	if rest != "" || q.modern {
		b.WriteString(`,"params":`)
	}
	if q.modern {
		b.WriteString(`{"_meta":{"io.modelcontextprotocol/protocolVersion":`)
		b.WriteString(quote(q.version))
		b.WriteString(`,"io.modelcontextprotocol/clientInfo":` + clientInfo + `,"io.modelcontextprotocol/clientCapabilities":{}}`)
		if rest == "" || rest == "{}" {
			rest = "}"
		} else {
			rest = "," + rest[1:]
		}
	}
	b.WriteString(rest)
	b.WriteString("}")
	return b.Bytes()
}

const clientInfo = `{"name":"mcphealth","version":"` + Version + `"}`

func quote(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

// request builds the POST of a question (MCP 2025-11-25 "Sending Messages to the
// Server"; 2026-07-28 "HTTP headers").
func (p *Prober) request(ctx context.Context, q question, id string, u *url.URL) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "", bytes.NewReader(q.body(id)))
	if err != nil {
		return nil, err
	}
	at := *u // for what is on the way to change
	req.URL, req.Host = &at, u.Host
	p.common(req)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	if q.session != "" {
		req.Header.Set("Mcp-Session-Id", q.session)
	}
	if q.version != "" {
		req.Header.Set("MCP-Protocol-Version", q.version)
	}
	if q.modern {
		req.Header.Set("Mcp-Method", q.method)
		if q.name != "" {
			req.Header.Set("Mcp-Name", headerValue(q.name))
		}
	}
	return req, nil
}

// common sets what every request of a probe carries. Credentials come last.
func (p *Prober) common(req *http.Request) {
	req.Header.Set("Accept-Encoding", "identity")
	req.Header.Set("Cache-Control", "no-cache, no-store")
	req.Header.Set("User-Agent", "mcphealth/"+Version)
	for k, vs := range p.header {
		if p.bare {
			break
		}
		req.Header[http.CanonicalHeaderKey(k)] = append([]string(nil), vs...)
	}
	if p.host != "" {
		req.Host = p.host
	}
}

// ask sends one question and reads its answer. It follows one same-origin 307 or
// 308, and never anything else.
func (p *Prober) ask(ctx context.Context, q question) answer {
	if p.carrier != nil {
		return p.askCarried(ctx, q)
	}
	start := time.Now()
	u := p.url
	a := p.askAt(ctx, q, u)
	if to := p.sameOrigin(a, u); to != nil {
		moved := a.status
		a = p.askAt(ctx, q, to)
		a.moved = moved
		u = to
	}
	a.at = u
	a.took = time.Since(start)
	p.note(&a)
	return a
}

func (p *Prober) askAt(ctx context.Context, q question, u *url.URL) answer {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	a := answer{q: q}
	if ctx.Err() == context.DeadlineExceeded { // the questions before took all the time there was
		a.err, a.reason = context.DeadlineExceeded, Timeout
		return a
	}
	id := newID()
	stage := &stage{}
	req, err := p.request(httptrace.WithClientTrace(ctx, stage.trace()), q, id, u)
	if err != nil {
		a.err, a.reason = err, ProbeRejected
		return a
	}
	resp, err := p.line.roundTrip(req)
	if err != nil {
		a.err = err // not both in one: Yaegi drops all but the call (test/yaegi TestTraps)
		a.reason = stage.reason(ctx, err)
		return a
	}
	defer resp.Body.Close()
	a.status, a.header = resp.StatusCode, resp.Header
	if resp.StatusCode >= 300 && resp.StatusCode < 400 {
		a.target = resp.Header.Get("Location")
		return a
	}
	p.read(&a, resp, id)
	if a.err != nil && (a.page || speaksFirst(a.status)) && ctx.Err() != context.Canceled {
		a.err = nil // the body could not be read, and need not be
	}
	if a.err != nil {
		a.reason = bodyReason(ctx, a.err)
	} else if a.kind == rpcAnswer || a.status == http.StatusUnauthorized || a.status == http.StatusForbidden {
		settleBody(resp, a.read, cancel)
	}
	return a
}

// settleBody reads the short rest of an answer of which n bytes were read, so that its
// connection can be kept; it gives up after the settle time, for streams may stay open.
func settleBody(resp *http.Response, n int64, cancel func()) {
	if n != resp.ContentLength || resp.Header.Get("Content-Encoding") != "" { // else the end alone is left, which nobody has to wait for
		t := time.AfterFunc(settle, cancel)
		defer t.Stop()
	}
	_, _ = io.CopyN(io.Discard, resp.Body, 4<<10)
}

// read finds the answer in the body, by the declared media type as clients do;
// without a telling one, by the first byte.
func (p *Prober) read(a *answer, resp *http.Response, id string) {
	limit := a.q.limit
	if limit == 0 {
		limit = maxAnswer
	}
	media, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	a.page = media == "text/html" || media == "application/xhtml+xml"
	if a.page && a.status != http.StatusForbidden && a.status != http.StatusBadRequest {
		return // no MCP server answers with one, and it may never end
	}
	body, err := decoded(resp)
	if err != nil {
		a.err = err
		return
	}
	if a.page { // development servers and frameworks refuse a Host so; that proves nothing, but explains
		b, err := io.ReadAll(io.LimitReader(body, maxText))
		a.text = string(b)
		a.err = err
		return
	}
	r := readers.Get().(*bufio.Reader)
	defer putReader(r)
	limited := &io.LimitedReader{R: body, N: int64(limit)}
	r.Reset(limited)
	switch {
	case media == "text/event-stream":
		readStream(a, r, id, limit)
	case strings.HasSuffix(media, "json"):
		readJSON(a, r, id)
	default:
		sniff(a, r, id, limit)
	}
	a.read = int64(limit) - limited.N
}

// decoded is the body without the gzip that nobody asked for; some hops do it all
// the same.
func decoded(resp *http.Response) (io.Reader, error) {
	var body io.Reader = resp.Body
	switch strings.ToLower(resp.Header.Get("Content-Encoding")) {
	case "gzip", "x-gzip": // one and the same (RFC 9110 §8.4.1.3)
	default:
		return body, nil
	}
	z, err := gzip.NewReader(body)
	if err == io.EOF {
		return body, nil // nothing, compressed or not
	}
	if err != nil {
		return nil, err
	}
	body = z
	return body, nil
}

// byteOrderMark begins what some encoders of UTF-8 write. Browsers and Node skip it.
const byteOrderMark = "\xef\xbb\xbf"

func skipMark(r *bufio.Reader) {
	if first, err := r.Peek(1); err != nil || first[0] != byteOrderMark[0] {
		return // do not wait for more of another body
	}
	if mark, _ := r.Peek(len(byteOrderMark)); string(mark) == byteOrderMark {
		_, _ = r.Discard(len(byteOrderMark))
	}
}

// streamFields are what an event stream may begin with.
var streamFields = []string{"data:", "event:", "id:", "retry:", ":"}

// sniff reads an answer whose media type does not tell: old SDKs send JSON-RPC
// errors without one.
func sniff(a *answer, r *bufio.Reader, id string, limit int) {
	skipMark(r)
	first, err := r.Peek(1)
	for err == nil && (first[0] == ' ' || first[0] == '\n' || first[0] == '\r' || first[0] == '\t') {
		_, _ = r.Discard(1)
		first, err = r.Peek(1)
	}
	if err != nil {
		if err != io.EOF {
			a.err = err
		}
		return
	}
	if first[0] == '{' || first[0] == '[' {
		readJSON(a, r, id)
		return
	}
	head, _ := r.Peek(6)
	for i := 0; i < len(streamFields); i++ {
		if strings.HasPrefix(string(head), streamFields[i]) {
			readStream(a, r, id, limit)
			return
		}
	}
	b, err := io.ReadAll(io.LimitReader(r, maxText+1))
	if err != nil {
		a.err = err
		return
	}
	a.text = string(b)
	if len(b) <= maxText && first[0] != '<' {
		a.kind = text
	}
}

// readJSON reads one JSON value: the end of the body is not waited for.
func readJSON(a *answer, r *bufio.Reader, id string) {
	skipMark(r)
	var raw json.RawMessage
	if err := json.NewDecoder(r).Decode(&raw); err != nil {
		var syntax *json.SyntaxError
		if err != io.EOF && err != io.ErrUnexpectedEOF && !errors.As(err, &syntax) {
			a.err = err // else it ended before or within a value: no answer, but the end of one
		}
		return
	}
	if !a.takeAny(raw, id) {
		a.text = string(raw[:atMost(len(raw), maxText)])
	}
}

// takeAny keeps the answer to id if data is it, or a batch with it: servers of
// 2025-03-26 may send one, as JSON and as an event.
func (a *answer) takeAny(data []byte, id string) bool {
	data = bytes.TrimSpace(data)
	if len(data) == 0 || data[0] != '[' {
		return a.take(parseMessage(data), id)
	}
	var all []json.RawMessage
	_ = json.Unmarshal(data, &all)
	for i := 0; i < len(all); i++ {
		if a.take(parseMessage(all[i]), id) {
			return true
		}
	}
	return false
}

func readStream(a *answer, r io.Reader, id string, limit int) {
	s := newSSEReader(r, limit)
	for {
		ev, err := s.next()
		if err != nil {
			if err != io.EOF {
				a.err = err
			}
			return
		}
		if ev.Name != "message" { // the SDKs of Go, Python and TypeScript read no other
			if parseMessage(ev.Data) != nil {
				a.event = ev.Name
			}
			continue
		}
		if a.takeAny(ev.Data, id) {
			return
		}
	}
}

// take keeps m if it answers the question with this id.
func (a *answer) take(m *message, id string) bool {
	if m == nil {
		return false
	}
	if !m.answers(id) {
		a.otherID = true
		return false
	}
	a.kind, a.msg = rpcAnswer, m
	return true
}

// sameOrigin is where a 307 or 308 may be replayed: at the same upstream, under
// another path. It is nil for every other answer. RFC 9110 §15.4.8 and .9: only
// these keep method and body.
func (p *Prober) sameOrigin(a answer, at *url.URL) *url.URL {
	if a.status != http.StatusTemporaryRedirect && a.status != http.StatusPermanentRedirect {
		return nil
	}
	to, err := at.Parse(a.target)
	if err != nil || to.User != nil || a.target == "" {
		return nil
	}
	return p.atUpstream(to, at)
}

// atUpstream is the path of to at the upstream of at, if both have one origin: as we
// see it, or as clients do, by the Host that they use. For them there may be TLS where
// for us, behind what ends it, there is none. It is nil for every other origin.
func (p *Prober) atUpstream(to, at *url.URL) *url.URL {
	ours := to.Scheme == at.Scheme && (sameHost(to, at.Host) || sameHost(to, p.host))
	theirs := to.Scheme == "https" && at.Scheme == "http" && sameHost(to, p.host)
	if !ours && !theirs {
		return nil
	}
	u := *at
	u.Path, u.RawPath, u.RawQuery = to.Path, to.RawPath, to.RawQuery
	return &u
}

// sameHost: RFC 9110 §4.2.3, the port of the scheme may be left out.
func sameHost(u *url.URL, host string) bool {
	port := map[string]string{"http": ":80", "https": ":443"}[u.Scheme]
	return strings.EqualFold(strings.TrimSuffix(u.Host, port), strings.TrimSuffix(host, port))
}

// headerValue is s as a modern request header carries it: as it is where that
// is safe, else in the spec's base64 form (SEP-2243).
func headerValue(s string) string {
	safe := s != "" && strings.TrimSpace(s) == s && !strings.HasPrefix(s, "=?base64?")
	for i := 0; i < len(s); i++ {
		safe = safe && s[i] >= 0x20 && s[i] < 0x7f
	}
	if safe {
		return s
	}
	return "=?base64?" + base64.StdEncoding.EncodeToString([]byte(s)) + "?="
}

// retryAfter reads the header in its two forms (RFC 9110 §10.2.3), at most an hour.
func retryAfter(h http.Header, now time.Time) time.Duration {
	v := h.Get("Retry-After")
	if v == "" {
		return 0
	}
	d := time.Duration(0)
	if n, err := strconv.Atoi(strings.TrimSpace(v)); err == nil {
		d = time.Duration(atMost(n, 3600)) * time.Second
	} else if t, err := http.ParseTime(v); err == nil {
		d = t.Sub(now)
	}
	if d < 0 {
		return 0
	}
	if d > time.Hour {
		return time.Hour
	}
	return d
}

func atMost(n, most int) int {
	if n > most {
		return most
	}
	return n
}

// stage is how far a request came; net/http calls its hooks from several goroutines.
type stage struct {
	mu                            sync.Mutex
	resolving, shaking, connected bool
}

func (s *stage) set(f func()) {
	s.mu.Lock()
	f()
	s.mu.Unlock()
}

func (s *stage) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		DNSStart:          func(_ httptrace.DNSStartInfo) { s.set(func() { s.resolving = true }) },
		DNSDone:           func(i httptrace.DNSDoneInfo) { s.set(func() { s.resolving = i.Err != nil }) },
		TLSHandshakeStart: func() { s.set(func() { s.shaking = true }) },
		GotConn: func(_ httptrace.GotConnInfo) {
			s.set(func() { s.connected = true; s.shaking = false })
		},
	}
}
