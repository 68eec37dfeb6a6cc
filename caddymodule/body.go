package caddymodule

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// maxHeldBody is the largest body that a held request may have: 1 MiB, far
	// above any tool call without a file in it.
	maxHeldBody = 1 << 20

	// maxHeldBytes is how many bytes of bodies one guard holds at once: 64 MiB.
	maxHeldBytes = 64 << 20

	// keptAtFirst is the size of the buffers in which requests' first bytes are
	// kept: 4 KiB, nearly every JSON-RPC request.
	keptAtFirst = 4 << 10
)

var (
	// errNotHeld is a body that is too large to hold, or that is partly gone.
	errNotHeld = errors.New("the body cannot be held")

	// errHTTP2 is a body that is not given again, for nobody knows what became of it.
	errHTTP2 = errors.New("the upstream speaks HTTP/2")

	// errLost is what a second reader of a body gets where another one has taken
	// what is not kept.
	errLost = errors.New("this part of the body is gone")
)

// heldBytes counts the bytes of bodies held by all guards.
var heldBytes atomic.Int64

// A budget bounds the bytes of bodies that one guard holds, so that the clients of
// one site cannot take the memory of another's.
type budget struct{ held atomic.Int64 }

func (b *budget) reserve(n int) bool {
	if b.held.Add(int64(n)) > maxHeldBytes {
		b.held.Add(int64(-n))
		return false
	}
	heldBytes.Add(int64(n))
	return true
}

func (b *budget) unhold(n int) {
	b.held.Add(int64(-n))
	heldBytes.Add(int64(-n))
}

// buffering is how many reverse proxies there are that read a whole body into a
// buffer (request_buffers) before they choose an upstream.
var buffering atomic.Int32

// keptPool is for the first bytes of request bodies.
var keptPool = sync.Pool{New: func() any {
	b := make([]byte, 0, keptAtFirst)
	return &b
}}

// A body is a request body whose first bytes are kept as they are read: the id of a
// request that fails is found there, and a request that provably went nowhere can be
// read again from the start. Several readers may read it; what one takes, the others
// find among what is kept. It is not reused, for a transport may read after it has
// returned.
type body struct {
	from io.Reader

	reading sync.Mutex  // one at a time reads from the client
	begun   atomic.Bool // somebody has read, or is reading

	mu     sync.Mutex
	ended  bool    // io.EOF was read
	again  bool    // there are readers besides the first
	let    bool    // nothing is kept any more
	begins bool    // the answer has begun
	closed bool    // nobody wants to read on
	early  bool    // no upstream was chosen yet: a buffer reads, and its bytes are kept
	err    error   // the client's, other than io.EOF
	total  int64   // bytes read
	kept   *[]byte // the first of them; nil: none
}

// bodyReader reads a body from the start.
type bodyReader struct {
	b  *body
	at int64 // guarded by b.mu
}

func (b *body) reader() *bodyReader { return &bodyReader{b: b} }

// Read reads what is kept, then from the client.
func (r *bodyReader) Read(p []byte) (int, error) {
	b := r.b
	b.begun.Store(true)
	b.mu.Lock()
	b.closed = false
	b.mu.Unlock()
	if n, err, ok := r.readKept(p); ok {
		return n, err
	}
	b.reading.Lock()
	defer b.reading.Unlock()
	if n, err, ok := r.readKept(p); ok { // another reader was here meanwhile
		return n, err
	}
	n, err := b.from.Read(p)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.keep(p[:n], err)
	r.at = b.total
	return n, err
}

// rewind has r read from the start again. What is not kept is then lost.
func (r *bodyReader) rewind() {
	r.b.mu.Lock()
	defer r.b.mu.Unlock()
	r.b.closed = false
	if r.at > 0 {
		r.at, r.b.again = 0, true
	}
}

// readKept reads from what is kept; ok is false at its end, where only the client
// has more. What was read by others and not kept is lost.
func (r *bodyReader) readKept(p []byte) (n int, err error, ok bool) {
	b := r.b
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.kept != nil && r.at < int64(len(*b.kept)) {
		n = copy(p, (*b.kept)[r.at:])
		r.at += int64(n)
		return n, nil, true
	}
	switch {
	case r.at < b.total:
		return 0, errLost, true
	case b.ended:
		return 0, io.EOF, true
	}
	return 0, nil, false
}

// Close notes that this reader wants no more. Until the answer has begun, the body
// may have to be read again; then it is closed, for net/http's server reads up to
// 256 KiB of an open one before it sends an answer.
func (r *bodyReader) Close() error {
	r.b.mu.Lock()
	r.b.closed = true
	begins := r.b.begins
	r.b.mu.Unlock()
	if begins {
		return r.b.closeClients()
	}
	return nil
}

func (b *body) closeClients() error {
	if c, ok := b.from.(io.Closer); ok {
		return c.Close()
	}
	return nil
}

// keep notes what was read from the client. The caller holds b.mu.
func (b *body) keep(p []byte, err error) {
	b.ended = b.ended || err == io.EOF
	if err != nil && err != io.EOF {
		b.err = err
	}
	most := int64(mcphealth.MaxIDBody)
	if b.early {
		most = maxHeldBody
	}
	if b.total < most && len(p) > 0 && !b.let {
		if b.kept == nil {
			b.kept = keptPool.Get().(*[]byte)
		}
		*b.kept = append(*b.kept, p[:min(int64(len(p)), most-b.total)]...)
	}
	b.total += int64(len(p))
}

// chosen notes that an upstream was chosen: what is read from now on goes to it.
func (b *body) chosen() {
	b.mu.Lock()
	b.early = false
	b.mu.Unlock()
}

// broken is the error with which the client's body ended, if it did.
func (b *body) broken() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// isWhole reports whether all of the body was read from the client.
func (b *body) isWhole() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ended
}

// drain reads what nobody wants any more, maxDrain bytes of it at most.
func (b *body) drain() {
	b.reading.Lock()
	defer b.reading.Unlock()
	_, _ = io.CopyN(io.Discard, b.from, maxDrain)
}

// wasRead reports whether anything may have been taken from the body.
func (b *body) wasRead() bool { return b.begun.Load() }

// letGo gives the buffer back: the answer has begun, nothing can fail any more. But
// a second reader may not have read it yet.
func (b *body) letGo() {
	b.mu.Lock()
	over := b.closed && !b.begins
	b.begins = true
	if !b.again && !b.let {
		b.recycle()
	}
	b.mu.Unlock()
	if over {
		_ = b.closeClients()
	}
}

// recycle gives the buffer to the next request. The caller holds b.mu.
func (b *body) recycle() {
	b.let = true
	if b.kept != nil && cap(*b.kept) <= mcphealth.MaxIDBody {
		*b.kept = (*b.kept)[:0]
		keptPool.Put(b.kept)
	}
	b.kept = nil
}

// anew gives net/http's transport the body a second time. Over HTTP/1.1 it asks for
// it only where nothing was written to the connection that it had chosen.
func (b *body) anew() (io.ReadCloser, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.let || b.kept != nil && b.total > int64(len(*b.kept)) {
		return nil, errNotHeld
	}
	b.again, b.closed = true, false
	return b.reader(), nil
}

// hold takes the whole body into memory, which is reserved as it arrives. The caller
// gives back len(body) to the budget. An error other than errNotHeld is the client's;
// a body that is not in by the deadline is not held.
func (b *body) hold(length int64, mine *budget, deadline time.Time) ([]byte, error) {
	if length > maxHeldBody {
		return nil, errNotHeld
	}
	if !mine.reserve(keptAtFirst) {
		return nil, errNotHeld
	}
	r, all := b.reader(), make([]byte, 0, keptAtFirst)
	for {
		n, err := r.Read(all[len(all):cap(all)])
		all = all[:len(all)+n]
		if err == io.EOF && len(all) <= maxHeldBody {
			mine.unhold(cap(all) - len(all))
			return all, nil
		}
		if err == io.EOF || err == errLost || errors.Is(err, os.ErrDeadlineExceeded) || err == nil && (len(all) > maxHeldBody || !time.Now().Before(deadline)) {
			err = errNotHeld
		}
		if err == nil && len(all) == cap(all) {
			all, err = grow(all, length, mine)
		}
		if err != nil {
			mine.unhold(cap(all))
			return nil, err
		}
	}
}

// grow doubles all, up to one byte more than there will be: to see the end without
// growing.
func grow(all []byte, length int64, mine *budget) ([]byte, error) {
	most := maxHeldBody + 1
	if length >= int64(cap(all)) {
		most = int(length) + 1
	}
	more := min(2*cap(all), most)
	if !mine.reserve(more - cap(all)) {
		return all, errNotHeld
	}
	return append(make([]byte, 0, more), all...), nil
}

// readID reads until the id is known, 64 KiB are in, or the client sends no more.
func (b *body) readID() {
	r, buf := b.reader(), make([]byte, keptAtFirst)
	next := int64(1)
	for r.at < mcphealth.MaxIDBody {
		_, err := r.Read(buf)
		if err != nil {
			return
		}
		if r.at < next {
			continue
		}
		if next = 2 * r.at; idIsIn(b.first()) { // not at each byte of a slow client
			return
		}
	}
}

// idIsIn reports whether the id of a request is found in the first bytes of its
// body, whatever follows them.
func idIsIn(first []byte) bool {
	if start := bytes.TrimLeft(first, " \t\r\n"); len(start) > 0 && start[0] != '{' {
		return true // a batch, or no JSON: there is none
	}
	id := mcphealth.RequestID(first)
	more := append(first[:len(first):len(first)], '0') // a number may go on
	return id != mcphealth.NullID && id == mcphealth.RequestID(more)
}

// first returns the first bytes, as many as are kept to find the id in.
func (b *body) first() []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.kept == nil {
		return nil
	}
	return bytes.Clone((*b.kept)[:min(len(*b.kept), mcphealth.MaxIDBody)])
}

// replay is a held body on its way to an upstream.
type replay struct {
	bytes.Reader
	all   []byte
	begun atomic.Bool
}

func newReplay(body []byte) *replay {
	r := &replay{all: body}
	r.Reset(body)
	return r
}

// anew gives net/http's transport the body a second time; see body.anew.
func (r *replay) anew() (io.ReadCloser, error) { return newReplay(r.all), nil }

// Read reads on.
func (r *replay) Read(p []byte) (int, error) {
	r.begun.Store(true)
	return r.Reader.Read(p)
}

// WriteTo writes the rest.
func (r *replay) WriteTo(w io.Writer) (int64, error) {
	r.begun.Store(true)
	return r.Reader.WriteTo(w)
}

// Close does nothing: the body is in memory.
func (*replay) Close() error { return nil }

// hasBody reports whether r may have a body.
func hasBody(r *http.Request) bool {
	return r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0
}

// mayRepeat reports whether net/http may be given the body of a request with this header
// again. It would take an idempotency key as leave to repeat what was executed.
func mayRepeat(h http.Header) bool {
	return h["Idempotency-Key"] == nil && h["X-Idempotency-Key"] == nil
}

// addsKey reports whether a reverse proxy may itself give such a key to requests
// (header_up), which it does after it has chosen an upstream.
func addsKey(h *headers.Handler) bool {
	if h == nil || h.Request == nil {
		return false
	}
	for _, fields := range []http.Header{h.Request.Add, h.Request.Set} {
		for name := range fields {
			if strings.Contains(name, "{") || !mayRepeat(http.Header{http.CanonicalHeaderKey(name): {""}}) {
				return true
			}
		}
	}
	return false
}
