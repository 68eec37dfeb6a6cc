//go:build go1.21

package mcphealth

import (
	"bytes"
	"strings"
)

// Outcome is what became of one request of a client.
type Outcome string

// The outcomes; the list is closed.
const (
	OutcomeOK          Outcome = "ok"          // an answer below status 400, and no error in it
	OutcomeRPCError    Outcome = "rpc_error"   // a JSON-RPC error inside HTTP 200
	OutcomeToolError   Outcome = "tool_error"  // a result with isError, inside HTTP 200
	OutcomeHTTPError   Outcome = "http_error"  // status 400 or more from the upstream, or an answer that broke off
	OutcomeUnavailable Outcome = "unavailable" // no upstream answered, and the edge did in its place: 502, 503, or 404 for a lost session
)

// Outcomes lists every outcome, from best to none.
func Outcomes() []Outcome {
	return []Outcome{OutcomeOK, OutcomeRPCError, OutcomeToolError, OutcomeHTTPError, OutcomeUnavailable}
}

// An OutcomeReader reads an answer with status 200 as it passes, and finds out what
// its JSON-RPC responses say. It keeps nothing of what it is given but a few bytes,
// and its work is proportional to what it is given, whatever that is: answers are
// hostile input. What is no JSON-RPC it gives up on at the first foreign member.
// The zero value reads nothing.
type OutcomeReader struct {
	doc    document
	active bool
	worst  finality
	rpc    bool
	mark   int // how many bytes of a byte order mark it began with; 3: what follows is it

	// Of an event stream: the line that is being read.
	stream bool
	line   lineState
	name   int  // how many bytes of "data" the field's name has
	any    bool // the line is not empty
	cr     bool // the last line ended with CR: an LF that follows belongs to it
	data   bool // the event has a line of data
}

// finality is what a response says, from best to worst.
type finality uint8

const (
	silent finality = iota // no response was read to its end
	success
	toolError
	rpcFailureMinor // a JSON-RPC error other than -32603: often the client's
	internal        // -32603
)

type lineState uint8

const (
	inName lineState = iota
	afterColon
	inData
	inOther
)

// Begin starts over for an answer with these headers, and reports whether there is
// anything to read. A compressed answer is not readable.
func (r *OutcomeReader) Begin(contentType, contentEncoding string) bool {
	*r = OutcomeReader{}
	if contentEncoding != "" && contentEncoding != "identity" {
		return false
	}
	media, _, _ := strings.Cut(contentType, ";")
	switch strings.TrimSpace(media) {
	case "application/json":
	case "text/event-stream":
		r.stream = true
	default:
		return false
	}
	r.active = true
	return true
}

// Write reads on. It keeps no reference to p.
func (r *OutcomeReader) Write(p []byte) {
	if !r.active {
		return
	}
	p = r.afterMark(p)
	if r.stream {
		r.events(p)
		return
	}
	r.doc.write(p)
	r.take()
	r.active = r.doc.state != docOver
}

// Active reports whether it still wants to read.
func (r *OutcomeReader) Active() bool { return r.active }

// IsRPC reports whether a JSON-RPC message has been seen: an MCP server lives.
func (r *OutcomeReader) IsRPC() bool { return r.rpc || r.doc.rpc && !r.stream }

// Outcome is what the answer says so far; the worst of several responses counts.
// Without one it is OutcomeOK, for the status was 200.
func (r *OutcomeReader) Outcome() Outcome {
	switch r.worst {
	case toolError:
		return OutcomeToolError
	case rpcFailureMinor, internal:
		return OutcomeRPCError
	}
	return OutcomeOK
}

// IsInternal reports whether a response was an internal error (-32603), which is
// never the client's fault.
func (r *OutcomeReader) IsInternal() bool { return r.worst == internal }

// take moves what the document has said so far to the answer.
func (r *OutcomeReader) take() {
	if r.doc.worst > r.worst {
		r.worst = r.doc.worst
	}
	r.rpc = r.rpc || r.doc.rpc
}

// afterMark is p without the byte order mark that the answer may begin with.
func (r *OutcomeReader) afterMark(p []byte) []byte {
	for len(p) > 0 && r.mark < len(byteOrderMark) {
		if p[0] == byteOrderMark[r.mark] {
			r.mark++
			p = p[1:]
			continue
		}
		if r.mark > 0 { // a part of one: no JSON, and some other field
			r.line, r.any = inOther, true
			if !r.stream {
				r.doc.state = docOver
			}
		}
		r.mark = len(byteOrderMark)
	}
	return p
}

// events reads a part of a text/event-stream, as the HTML standard §9.2.6 has it.
func (r *OutcomeReader) events(p []byte) {
	lf := -1 // the next LF and CR in p, where they are known
	cr := -1
	for i := 0; i < len(p); {
		c := p[i]
		if r.cr {
			r.cr = false
			if c == '\n' {
				i++
				continue
			}
		}
		if r.line == inName {
			if !r.any && bytes.HasPrefix(p[i:], usualField) {
				i += len(usualField)
				r.line, r.any = inData, true
				r.beginData()
				continue
			}
			i++
			r.nameByte(c)
			continue
		}
		if r.line == afterColon {
			r.line = inData
			if c == ' ' {
				i++
				continue
			}
		}
		if lf < i {
			lf = nextOf(p, i, '\n')
		}
		if cr < i {
			cr = nextOf(p, i, '\r')
		}
		end := lf
		if cr < end {
			end = cr
		}
		if r.line == inData {
			r.doc.write(p[i:end])
		}
		i = end
		if end < len(p) {
			r.endLine(p[end])
			i++
		}
	}
}

// nextOf is the index of the next c in p from i on; len(p) if there is none.
func nextOf(p []byte, i int, c byte) int {
	at := bytes.IndexByte(p[i:], c)
	if at < 0 {
		return len(p)
	}
	return i + at
}

// nameByte reads one byte of a field's name, or what ends it.
func (r *OutcomeReader) nameByte(c byte) {
	const field = "data"
	switch {
	case c == '\n' || c == '\r':
		if r.name == len(field) {
			r.beginData()
		}
		r.endLine(c)
		return
	case r.name == len(field) && c == ':':
		r.line = afterColon
		r.beginData()
	case r.name < len(field) && c == field[r.name]:
		r.name++
	default:
		r.line = inOther
	}
	r.any = true
}

// beginData joins lines of data by LF.
func (r *OutcomeReader) beginData() {
	if r.data {
		r.doc.write([]byte{'\n'})
	}
	r.data = true
}

// endLine ends a line, and at an empty one the event.
func (r *OutcomeReader) endLine(c byte) {
	if !r.any {
		r.take()
		r.doc = document{}
		r.data = false
	}
	r.line, r.name, r.any = inName, 0, false
	r.cr = c == '\r'
}

// document reads one JSON document, as far as it matters: a JSON-RPC message, or a
// batch of them. It does not validate.
type document struct {
	state   docState
	level   docLevel
	batch   bool
	escaped bool // the string so far ends with a backslash that counts
	depth   int  // of a value that is skipped

	word [8]byte // the name or value that is read, as far as it can matter
	n    int     // its length; more than fits: it does not matter
	name docName

	// The message so far.
	version, method, result, failed, code, toolFailed bool

	rpc   bool
	worst finality
}

type docState uint8

const (
	docValue      docState = iota // a value is to come, or in a batch its end
	docMember                     // a member is to come, or the object's end
	docInName                     // inside a member's name
	docColon                      // its colon is to come
	docWord                       // inside true, null, a number
	docText                       // inside a string that is read
	docSkip                       // inside a value that is skipped
	docSkipString                 // inside a string of it
	docOver                       // nothing more is read
)

type docLevel uint8

const (
	outside   docLevel = iota
	inBatch            // among messages
	inMessage          // among the members of a message
	inResult           // of its result
	inError            // of its error
)

// docName is a member whose value is read.
type docName uint8

const (
	nameOther docName = iota
	nameVersion
	nameResult
	nameError
	nameToolError
	nameCode
)

// How nearly all lines of data and messages begin. To know them at once is faster than
// byte by byte, and means the same.
var (
	usualField    = []byte("data: ")
	usualQuestion = []byte(`{"jsonrpc":"2.0","method":"`)
	usualAnswer   = []byte(`{"jsonrpc":"2.0","id":`)
)

// usual reads the usual beginning of a message, and returns where to go on.
func (d *document) usual(p []byte) int {
	n := 0
	switch {
	case bytes.HasPrefix(p, usualQuestion):
		d.openMessage()
		d.method, d.state = true, docOver
		n = len(usualQuestion)
	case bytes.HasPrefix(p, usualAnswer):
		d.openMessage()
		d.name, d.state = nameOther, docValue
		n = len(usualAnswer)
	default:
		return 0
	}
	d.version, d.rpc = true, true
	return n
}

func (d *document) write(p []byte) {
	i := 0
	if d.state == docValue && d.level == outside {
		i = d.usual(p)
	}
	for i < len(p) && d.state != docOver {
		switch d.state {
		case docSkip:
			i = d.skip(p, i)
		case docSkipString, docInName, docText:
			end := d.stringEnd(p, i)
			if d.state != docSkipString {
				d.keep(p[i:end])
			}
			i = end
			if end < len(p) {
				i++
				d.stringEnded()
			}
		case docWord:
			i = d.wordByte(p[i], i)
		default:
			c := p[i]
			i++
			if c != ' ' && c != '\n' && c != '\r' && c != '\t' {
				d.structure(c)
			}
		}
	}
}

// structure reads one byte between names and values that is no space.
func (d *document) structure(c byte) {
	switch d.state {
	case docValue:
		d.begin(c)
	case docColon:
		d.state = docValue
		if c != ':' {
			d.state = docOver
		}
	case docMember:
		switch c {
		case ',':
		case '"':
			d.state, d.n = docInName, 0
		case '}':
			d.endObject()
		default:
			d.state = docOver
		}
	}
}

// begin reads the first byte of a value, or what may stand in its place.
func (d *document) begin(c byte) {
	if d.level == outside || d.level == inBatch {
		switch {
		case c == '{':
			d.openMessage()
			return
		case c == '[' && d.level == outside:
			d.batch, d.level = true, inBatch
			return
		case c == ',' && d.level == inBatch:
			return
		case d.level == outside || c == ']':
			d.state = docOver
			return
		}
		d.name = nameOther
	}
	switch c {
	case '"':
		d.state = docSkipString
		if d.name == nameVersion {
			d.state, d.n = docText, 0
		}
	case '{':
		switch d.name {
		case nameResult:
			d.level, d.state = inResult, docMember
		case nameError:
			d.level, d.state, d.failed = inError, docMember, true
		default:
			d.state, d.depth = docSkip, 1
		}
	case '[':
		d.state, d.depth = docSkip, 1
	case '}', ']', ':', ',':
		d.state = docOver
	default:
		d.state, d.n = docWord, 0
		d.keepByte(c)
	}
}

func (d *document) openMessage() {
	d.level, d.state = inMessage, docMember
	d.version, d.method, d.result, d.failed, d.code, d.toolFailed = false, false, false, false, false, false
}

// endObject ends a result, an error or a message.
func (d *document) endObject() {
	if d.level == inResult || d.level == inError {
		d.level = inMessage
		return
	}
	if d.version && !d.method {
		switch {
		case d.failed && d.code:
			d.rank(internal)
		case d.failed:
			d.rank(rpcFailureMinor)
		case d.result && d.toolFailed:
			d.rank(toolError)
		case d.result:
			d.rank(success)
		}
	}
	d.level = inBatch
	d.state = docValue
	if !d.batch {
		d.state = docOver
	}
}

func (d *document) rank(f finality) {
	if f > d.worst {
		d.worst = f
	}
}

// valueEnded goes on after a value.
func (d *document) valueEnded() {
	d.state = docMember
	if d.level == inBatch {
		d.state = docValue
	}
}

// shortString is up to how many bytes are looked at one by one, which is faster.
const shortString = 16

// stringEnd is the index of the quote that ends the string which p[i:] goes on with;
// len(p) if it goes on after that.
func (d *document) stringEnd(p []byte, i int) int {
	for i <= len(p) {
		end := i
		for end < len(p) && end < i+shortString && p[end] != '"' {
			end++ // most strings are over sooner than a search has begun
		}
		if end == i+shortString && end < len(p) {
			end = nextOf(p, end, '"')
		}
		run := end // of backslashes before it
		for run > i && p[run-1] == '\\' {
			run--
		}
		odd := (end-run)%2 == 1
		if run == i && d.escaped {
			odd = !odd
		}
		d.escaped = odd && end == len(p)
		if !odd || end == len(p) {
			return end
		}
		i = end + 1
	}
	return len(p)
}

func (d *document) stringEnded() {
	switch d.state {
	case docInName:
		d.nameEnded()
		return
	case docText:
		d.version = d.n == 3 && string(d.word[:3]) == "2.0"
		d.rpc = d.rpc || d.version
	case docSkipString:
		if d.depth > 0 {
			d.state = docSkip
			return
		}
	}
	d.valueEnded()
}

// nameEnded decides what the value is for. A message has few members, by the
// specification: what has others before it says "jsonrpc" is none.
func (d *document) nameEnded() {
	d.state, d.name = docColon, nameOther
	word := ""
	if d.n <= len(d.word) {
		word = string(d.word[:d.n])
	}
	switch d.level {
	case inResult:
		if word == "isError" {
			d.name = nameToolError
		}
	case inError:
		if word == "code" {
			d.name = nameCode
		}
	case inMessage:
		switch word {
		case "jsonrpc":
			d.name = nameVersion
		case "result":
			d.name, d.result = nameResult, true
		case "error":
			d.name = nameError
		case "method":
			d.method = true
			if d.version && !d.batch {
				d.state = docOver // a notification or a question: nothing in it is an answer
			}
		case "id", "params":
		default:
			if !d.version {
				d.state = docOver
			}
		}
	}
}

// skip reads on in a value that does not matter, and returns where it stopped.
func (d *document) skip(p []byte, i int) int {
	for i < len(p) {
		c := p[i]
		i++
		if c == '"' {
			i = d.stringEnd(p, i)
			if i == len(p) {
				d.state = docSkipString
				return i
			}
			i++
		} else if c == '{' || c == '[' {
			d.depth++
		} else if c == '}' || c == ']' {
			d.depth--
			if d.depth == 0 {
				d.valueEnded()
				return i
			}
		}
	}
	return i
}

// wordByte reads one byte of a bare word, and returns where to go on: at the same
// byte, if it is what ends it.
func (d *document) wordByte(c byte, i int) int {
	switch c {
	case ',', '}', ']', ' ', '\n', '\r', '\t':
		word := string(d.word[:])
		switch d.name {
		case nameToolError:
			d.toolFailed = d.toolFailed || d.n == 4 && word[:4] == "true"
		case nameCode:
			d.code = d.code || d.n == 6 && word[:6] == "-32603"
		}
		d.valueEnded()
		return i
	}
	d.keepByte(c)
	return i + 1
}

func (d *document) keep(p []byte) {
	for i := 0; i < len(p) && d.n <= len(d.word); i++ {
		d.keepByte(p[i])
	}
}

func (d *document) keepByte(c byte) {
	if d.n < len(d.word) {
		d.word[d.n] = c
	}
	if d.n <= len(d.word) {
		d.n++
	}
}
