package caddymodule

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// maxHeldBody is the largest body that a held request may have: 1 MiB, far
	// above any tool call without a file in it.
	maxHeldBody = 1 << 20

	// maxHeldBytes is how many bytes of bodies the process holds at once: 64 MiB.
	maxHeldBytes = 64 << 20

	// keptAtFirst is the size of the buffers in which requests' first bytes are
	// kept: 4 KiB, nearly every JSON-RPC request.
	keptAtFirst = 4 << 10
)

var (
	// errNotHeld is a body that is too large to hold, or that is partly gone.
	errNotHeld = errors.New("the body cannot be held")

	// errLost is what a second reader of a body gets where another one has taken
	// what is not kept.
	errLost = errors.New("this part of the body is gone")
)

// heldBytes counts the bytes of bodies held by all guards.
var heldBytes atomic.Int64

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

	reading sync.Mutex // one at a time reads from the client

	mu    sync.Mutex
	begun bool    // somebody has read, or is reading
	ended bool    // io.EOF was read
	again bool    // there are readers besides the first
	let   bool    // nothing is kept any more
	total int64   // bytes read
	kept  *[]byte // the first of them; nil: none
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
	b.mu.Lock()
	b.begun = true
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

// Close does nothing: the server closes the body when the handler has returned.
// Until then, it may have to be read again.
func (*bodyReader) Close() error { return nil }

// keep notes what was read from the client. The caller holds b.mu.
func (b *body) keep(p []byte, err error) {
	b.ended = b.ended || err == io.EOF
	if b.total < mcphealth.MaxIDBody && len(p) > 0 && !b.let {
		if b.kept == nil {
			b.kept = keptPool.Get().(*[]byte)
		}
		*b.kept = append(*b.kept, p[:min(int64(len(p)), mcphealth.MaxIDBody-b.total)]...)
	}
	b.total += int64(len(p))
}

// wasRead reports whether anything may have been taken from the body.
func (b *body) wasRead() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.begun
}

// letGo gives the buffer back: the answer has begun, nothing can fail any more. But
// a second reader may not have read it yet.
func (b *body) letGo() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.again || b.let {
		return
	}
	b.let = true
	if b.kept != nil && cap(*b.kept) <= mcphealth.MaxIDBody {
		*b.kept = (*b.kept)[:0]
		keptPool.Put(b.kept)
	}
	b.kept = nil
}

// anew gives net/http's transport the body a second time. It asks for it only where
// nothing was written to the connection that it had chosen, or the server said that
// it did not begin (GOAWAY, REFUSED_STREAM).
func (b *body) anew() (io.ReadCloser, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.let || b.kept != nil && b.total > int64(len(*b.kept)) {
		return nil, errNotHeld
	}
	b.again = true
	return b.reader(), nil
}

// hold takes the whole body into memory. The caller gives back len(body) by unhold.
// An error other than errNotHeld is the client's.
func (b *body) hold(length int64) ([]byte, error) {
	if length > maxHeldBody {
		return nil, errNotHeld
	}
	size := int(length) + 1 // one byte more, to see the end without growing
	if length < 0 {
		size = keptAtFirst
	}
	if !reserve(size) {
		return nil, errNotHeld
	}
	r, all := b.reader(), make([]byte, 0, size)
	for {
		n, err := r.Read(all[len(all):cap(all)])
		all = all[:len(all)+n]
		if err == io.EOF {
			unhold(cap(all) - len(all))
			return all, nil
		}
		if err == errLost || err == nil && len(all) > maxHeldBody {
			err = errNotHeld
		}
		if err == nil && len(all) == cap(all) {
			more := min(2*cap(all), maxHeldBody+1)
			if reserve(more - cap(all)) {
				all = append(make([]byte, 0, more), all...)
			} else {
				err = errNotHeld
			}
		}
		if err != nil {
			unhold(cap(all))
			return nil, err
		}
	}
}

// first returns the first bytes, reading as much as it takes to find the id unless
// somebody else reads.
func (b *body) first(read bool) []byte {
	if read {
		_, _ = io.CopyN(io.Discard, b.reader(), mcphealth.MaxIDBody)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.kept == nil {
		return nil
	}
	return bytes.Clone(*b.kept)
}

func reserve(n int) bool {
	if heldBytes.Add(int64(n)) > maxHeldBytes {
		heldBytes.Add(int64(-n))
		return false
	}
	return true
}

func unhold(n int) { heldBytes.Add(int64(-n)) }

// replay is a held body on its way to an upstream.
type replay struct {
	bytes.Reader
	begun atomic.Bool
}

func newReplay(body []byte) *replay {
	r := new(replay)
	r.Reset(body)
	return r
}

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

// mayRepeat reports whether net/http may be given the body again. It would take
// an idempotency key as leave to repeat a request that was executed.
func mayRepeat(r *http.Request) bool {
	return r.Header["Idempotency-Key"] == nil && r.Header["X-Idempotency-Key"] == nil
}
