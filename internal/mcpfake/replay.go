package mcpfake

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A Replay plays a capture on a loopback listener: it answers each request with
// the recorded exchange that resembles it most, in the caller's id and session.
type Replay struct {
	c        *Capture
	listener net.Listener
	stop     chan struct{}
	done     sync.WaitGroup

	mu       sync.Mutex
	conns    map[net.Conn]bool
	sessions map[string]string // id we issued → live, ended
	requests []Request
}

// Request is one request that came, and how it was answered.
type Request struct {
	Verb, Path, Host string
	RPC, ID          string // method and raw id of the JSON-RPC request
	Session, Version string // Mcp-Session-Id and MCP-Protocol-Version as they came
	Header           http.Header
	State            string // none, ghost, live, ended
	Probe            string // which exchange answered; "" if none resembles it
	Status           int
	Issued           string // the session id handed out
	Negotiated       string // the version that an initialize result settled on
}

// The states of the session that a request carries.
const (
	none  = "none"
	ghost = "ghost" // never issued here
	live  = "live"
	over  = "ended" // by DELETE
)

// Play starts a replay of c. Close ends it.
func Play(c *Capture) (*Replay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &Replay{c: c, listener: l, stop: make(chan struct{}), conns: map[net.Conn]bool{}, sessions: map[string]string{}}
	r.done.Add(1)
	go r.accept()
	return r, nil
}

// URL is the endpoint that the capture was recorded at, here.
func (r *Replay) URL() string { return "http://" + r.listener.Addr().String() + r.c.Get("endpoint") }

// Requests are those that came so far.
func (r *Replay) Requests() []Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]Request(nil), r.requests...)
}

// Close ends all connections and waits for their goroutines.
func (r *Replay) Close() {
	close(r.stop)
	_ = r.listener.Close()
	r.mu.Lock()
	for c := range r.conns {
		_ = c.Close()
	}
	r.mu.Unlock()
	r.done.Wait()
}

func (r *Replay) accept() {
	defer r.done.Done()
	for {
		c, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		r.conns[c] = true
		r.mu.Unlock()
		r.done.Add(1)
		go r.serve(c)
	}
}

func (r *Replay) serve(c net.Conn) {
	defer r.done.Done()
	defer func() {
		r.mu.Lock()
		delete(r.conns, c)
		r.mu.Unlock()
		_ = c.Close()
	}()
	in := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		body, err := io.ReadAll(req.Body)
		if err != nil || !r.answer(c, in, req, string(body)) {
			return
		}
	}
}

// answer reports whether the connection can carry another request.
func (r *Replay) answer(c net.Conn, in *bufio.Reader, req *http.Request, body string) bool {
	e, got := r.pick(req, body)
	if e == nil {
		e = &Exchange{Status: 404, Phrase: "Not Found", Answer: "mcpfake: no exchange of this capture resembles the request\n"}
	}
	switch {
	case e.Closed:
		return false
	case e.Hang:
		r.wait(in, 0)
		return false
	}
	head, text, framed := e.wire(got, rpcOf(body))
	if _, err := io.WriteString(c, head); err != nil {
		return false
	}
	if e.HeldOpen || e.Lasted > 0 {
		if text != "" {
			text = fmt.Sprintf("%x\r\n%s\r\n", len(text), text)
		}
		_, _ = io.WriteString(c, text)
		r.wait(in, e.Lasted)
		_, _ = io.WriteString(c, "0\r\n\r\n")
		return false
	}
	_, err := io.WriteString(c, text)
	return err == nil && framed
}

// wait returns when the client hangs up, the replay ends, or d has passed; 0 is
// for ever.
func (r *Replay) wait(in *bufio.Reader, d time.Duration) {
	gone := make(chan struct{})
	go func() { // ends with the connection, which its caller closes
		_, _ = in.Peek(1)
		close(gone)
	}()
	var timeout <-chan time.Time
	if d > 0 {
		timeout = time.After(d)
	}
	select {
	case <-gone:
	case <-timeout:
	case <-r.stop:
	}
}

// wire is the answer's head and body as they go out, and whether the body ends
// without the connection.
func (e *Exchange) wire(got Request, caller rpc) (head, body string, framed bool) {
	body = swapID(e.Answer, rpcOf(e.Body).ID, caller.ID)
	var b strings.Builder
	fmt.Fprintf(&b, "HTTP/1.1 %03d %s\r\n", e.Status, e.Phrase)
	length := strconv.Itoa(len(body))
	framed = true
	for _, h := range e.AnswerHeader {
		switch strings.ToLower(h[0]) {
		case "mcp-session-id":
			h[1] = got.Issued
			if got.Issued == "" {
				h[1] = got.Session
			}
		case "content-length": // recorded only where it lies
			length, framed = "", false
		}
		fmt.Fprintf(&b, "%s: %s\r\n", h[0], strings.ReplaceAll(h[1], "{{host}}", got.Host))
	}
	switch {
	case e.HeldOpen || e.Lasted > 0:
		b.WriteString("Transfer-Encoding: chunked\r\n")
	case length != "" && e.Status != http.StatusNoContent:
		fmt.Fprintf(&b, "Content-Length: %s\r\n", length)
	}
	return b.String() + "\r\n", body, framed
}

// swapID puts the caller's id where the recorded request's id was answered.
func swapID(answer string, recorded, caller []byte) string {
	if len(recorded) == 0 || len(caller) == 0 {
		return answer
	}
	if recorded[0] == '"' { // unmistakable wherever it stands, also inside an escaped echo
		return strings.ReplaceAll(answer, strings.Trim(string(recorded), `"`), strings.Trim(string(caller), `"`))
	}
	number := regexp.MustCompile(`("id":\s*)` + regexp.QuoteMeta(string(recorded)) + `([,}\s])`)
	return number.ReplaceAllString(answer, `${1}`+strings.ReplaceAll(string(caller), "$", "$$")+`${2}`)
}

// pick finds the exchange that resembles the request most, and notes both.
func (r *Replay) pick(req *http.Request, body string) (*Exchange, Request) {
	call := rpcOf(body)
	got := Request{Verb: req.Method, Path: req.URL.Path, Host: req.Host, RPC: call.Method, ID: string(call.ID), Header: req.Header,
		Session: req.Header.Get("Mcp-Session-Id"), Version: req.Header.Get("MCP-Protocol-Version")}
	r.mu.Lock()
	defer r.mu.Unlock()
	got.State = r.state(got.Session)
	best, most := (*Exchange)(nil), -1
	for i := range r.c.Exchanges {
		if n := r.c.likeness(i, req, got); n > most {
			best, most = &r.c.Exchanges[i], n
		}
	}
	if best != nil {
		got.Probe, got.Status = best.Probe, best.Status
		r.keepSessions(best, &got)
	}
	r.requests = append(r.requests, got)
	return best, got
}

func (r *Replay) state(id string) string {
	if id == "" {
		return none
	}
	if s := r.sessions[id]; s != "" {
		return s
	}
	return ghost
}

var negotiated = regexp.MustCompile(`"protocolVersion":\s*"([^"]+)"`)

func (r *Replay) keepSessions(e *Exchange, got *Request) {
	if e.Issued() != "" && got.State != live && got.State != over {
		got.Issued = fmt.Sprintf("replay-%s-%d", r.c.Name, len(r.sessions)+1)
		r.sessions[got.Issued] = live
	}
	if m := negotiated.FindStringSubmatch(e.Answer); m != nil && got.RPC == "initialize" {
		got.Negotiated = m[1]
	}
	if e.Verb == http.MethodDelete && e.Status < 300 && got.State == live {
		r.sessions[got.Session] = over
	}
}

// likeness rates exchange i as an answer to the request: -1 is no answer at all.
// What a server cannot tell apart counts little: one that issues no session ids
// cannot tell a ghost from none.
func (c *Capture) likeness(i int, req *http.Request, got Request) int {
	e := &c.Exchanges[i]
	if e.Verb != got.Verb || e.Path != got.Path || rpcOf(e.Body).Method != got.RPC {
		return -1
	}
	if c.guarded() && authorized(e.Header) != authorized(req.Header) {
		return -1
	}
	n := 0
	if (e.Header.Get("Mcp-Method") != "") == (got.Header.Get("Mcp-Method") != "") {
		n += 64
	}
	if e.Header.Get("MCP-Protocol-Version") == got.Version {
		n += 8
	}
	weight := 16
	if !c.issues() {
		weight = 2
	}
	switch state := c.stateOf(i); {
	case state == got.State:
		n += 2 * weight
	case unknown(state) && unknown(got.State):
		n += weight
	}
	return n
}

// unknown: the server does not know the session (any more).
func unknown(state string) bool { return state == ghost || state == over }

// authorized: the recorder's good token reads GoodToken in a capture.
func authorized(h http.Header) bool { return h.Get("Authorization") == GoodToken }

// GoodToken is the Authorization that a capture's server accepts.
const GoodToken = "Bearer good"

func (c *Capture) guarded() bool {
	for i := range c.Exchanges {
		if authorized(c.Exchanges[i].Header) {
			return true
		}
	}
	return false
}

func (c *Capture) issues() bool {
	for i := range c.Exchanges {
		if e := &c.Exchanges[i]; e.Issued() != "" && rpcOf(e.Body).Method == "initialize" {
			return true
		}
	}
	return false
}

// stateOf is the state of the session that exchange i carried when recorded.
func (c *Capture) stateOf(i int) string {
	id := c.Exchanges[i].Header.Get("Mcp-Session-Id")
	switch {
	case id == "":
		return none
	case !strings.HasPrefix(id, "SESSION-"):
		return ghost
	}
	for _, e := range c.Exchanges[:i] {
		if e.Verb == http.MethodDelete && e.Header.Get("Mcp-Session-Id") == id {
			return over
		}
	}
	return live
}
