//go:build go1.21

package mcphealth

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"hash"
	"sync"
)

// A session of the legacy era lives in one server. The edge writes into the id who
// that is, so that it finds the server again without a table: <id>.<tag>.
//
// A tag is 17 bytes, as 23 letters: the owner's name under the key, hidden by a pad
// made of the session's id, so that nobody sees which sessions are neighbours; then
// a MAC over both, so that a tag can be neither guessed nor moved to another session.
const (
	ownerSize = 6  // bytes of the owner's name: 10,000 owners collide once in 5 million fleets
	macSize   = 11 // bytes of the MAC: 2^87 guesses on average, each a request
	tagBytes  = ownerSize + macSize
	tagLength = 1 + (tagBytes*8+5)/6 // the dot, and 6 bits per letter

	// maxSessionID is the longest id that is tagged, or looked at for a tag: 4 KiB,
	// thirty times the longest in testdata/captures.
	maxSessionID = 4 << 10
)

// The first byte of what is hashed, one for each purpose of the key.
const (
	forOwner = 'o'
	forPad   = 'p'
	forMAC   = 'm'
)

// An Owner is an upstream's name as only the key's holders can compute it.
type Owner uint64

// SessionKey makes tags and reads them. Edges with the same secret read each
// other's.
type SessionKey struct {
	secret []byte
	pool   sync.Pool // *tagger
}

// NewSessionKey makes the key of a secret, which should be 16 random bytes or more.
func NewSessionKey(secret []byte) *SessionKey {
	return &SessionKey{secret: append([]byte(nil), secret...)}
}

// tagger is what one tag is made in.
type tagger struct {
	mac  hash.Hash
	text []byte // what is hashed
	sum  []byte
	raw  []byte // the tag's bytes
}

func (k *SessionKey) tagger() *tagger {
	if t, ok := k.pool.Get().(*tagger); ok {
		return t
	}
	return &tagger{mac: hmac.New(sha256.New, k.secret), raw: make([]byte, tagBytes)}
}

// hashText leaves the HMAC of text in sum.
func (t *tagger) hashText() {
	t.mac.Reset()
	_, _ = t.mac.Write(t.text)
	t.sum = t.mac.Sum(t.sum[:0])
}

// pad hides the owner in raw, or shows it again.
func (t *tagger) pad(id string) {
	t.text = append(append(t.text[:0], forPad), id...)
	t.hashText()
	for i := 0; i < ownerSize; i++ {
		t.raw[i] ^= t.sum[i]
	}
}

// sign leaves the MAC over the hidden owner in raw and the id in sum.
func (t *tagger) sign(id string) {
	t.text = append(append(t.text[:0], forMAC), t.raw[:ownerSize]...)
	t.text = append(t.text, id...)
	t.hashText()
}

// Owner is the name of an upstream. All edges must give it the same address.
func (k *SessionKey) Owner(address string) Owner {
	t := k.tagger()
	t.text = append(append(t.text[:0], forOwner), address...)
	t.hashText()
	o := Owner(0)
	for i := 0; i < ownerSize; i++ {
		o = o<<8 | Owner(t.sum[i])
	}
	k.pool.Put(t)
	return o
}

// Tag is the id that a client gets for a session of this owner: at most 24 bytes
// longer, visible ASCII. What is no session id (empty, not visible ASCII) or far too
// long stays as it is.
func (k *SessionKey) Tag(id string, o Owner) string {
	if !isSessionID(id) || len(id) > maxSessionID {
		return id
	}
	t := k.tagger()
	for i := ownerSize - 1; i >= 0; i-- {
		t.raw[i] = byte(o)
		o >>= 8
	}
	t.pad(id)
	t.sign(id)
	copy(t.raw[ownerSize:], t.sum[:macSize])
	t.text = append(append(t.text[:0], id...), '.')
	at := len(t.text)
	t.text = append(t.text, noTag...)
	base64.RawURLEncoding.Encode(t.text[at:], t.raw)
	tagged := string(t.text)
	k.pool.Put(t)
	return tagged
}

const noTag = "-----------------------" // room for one: tagLength-1 letters

// strict refuses a second spelling of the same tag.
var strict = base64.RawURLEncoding.Strict()

// Split takes the tag off an id that came from a client. Where there is none, or one
// that this key did not make for this very id, it reports false: the id is then the
// server's own, and goes on as it is.
func (k *SessionKey) Split(tagged string) (id string, o Owner, ok bool) {
	dot := len(tagged) - tagLength
	if dot < 1 || dot > maxSessionID || tagged[dot] != '.' {
		return tagged, 0, false
	}
	id = tagged[:dot]
	t := k.tagger()
	t.text = append(t.text[:0], tagged[dot+1:]...)
	n, err := strict.Decode(t.raw, t.text)
	if err == nil && n == tagBytes {
		t.sign(id)
		ok = hmac.Equal(t.sum[:macSize], t.raw[ownerSize:])
	}
	if ok {
		t.pad(id)
		for i := 0; i < ownerSize; i++ {
			o = o<<8 | Owner(t.raw[i])
		}
	} else {
		id = tagged
	}
	k.pool.Put(t)
	return id, o, ok
}

// isSessionID: visible ASCII, at least one byte (MCP 2025-11-25 "Session Management").
func isSessionID(id string) bool {
	for i := 0; i < len(id); i++ {
		if id[i] < 0x21 || id[i] > 0x7e {
			return false
		}
	}
	return id != ""
}

// SessionlessVersion is the first protocol version whose requests belong to no session,
// 2026-07-28, which has no initialize (mcp-wire.md).
const SessionlessVersion = modernVersion

// HasSessions reports whether requests that carry this MCP-Protocol-Version may
// belong to a session: those of 2026-07-28 and later do not, whatever else they
// carry. No version means 2025-03-26.
func HasSessions(version string) bool {
	if version == legacyVersion || version == modernVersion { // at once: traffic passes here, interpreted too
		return version == legacyVersion
	}
	if len(version) != len(modernVersion) {
		return true
	}
	for i := 0; i < len(version); i++ {
		if c := version[i]; c != '-' && (c < '0' || c > '9') {
			return true // no date: nothing is known of it
		}
	}
	return version < modernVersion
}
