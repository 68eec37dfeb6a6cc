//go:build go1.21

package mcphealth

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"unicode/utf8"
)

// message is one JSON-RPC 2.0 message, read as far as a probe needs it.
// All fields are exported because Yaegi hands this type to encoding/json.
type message struct {
	JSONRPC string          `json:"jsonrpc"`
	ID      json.RawMessage `json:"id"`
	Method  string          `json:"method"`
	Result  json.RawMessage `json:"result"`
	Error   *rpcError       `json:"error"`
}

// rpcError is the error object. Code is raw: servers have been seen to send
// strings and floats there, and a strict type would lose the whole message.
// All fields are exported because Yaegi hands this type to encoding/json.
type rpcError struct {
	Code    json.RawMessage `json:"code"`
	Message string          `json:"message"`
	Data    json.RawMessage `json:"data"`
}

// The JSON-RPC error codes that a probe tells apart (JSON-RPC 2.0 §5.1; MCP
// 2026-07-28, "Error codes").
const (
	codeMethodNotFound = -32601
	codeInternal       = -32603
	codeHeaderMismatch = -32020
	codeMissingCap     = -32021
	codeVersion        = -32022
)

func (e *rpcError) code() int {
	var n float64
	if e == nil || json.Unmarshal(bytes.Trim(e.Code, `"`), &n) != nil {
		return 0
	}
	return int(n)
}

// maxWords is how much of a server's own words wordings are looked for in: 4 KiB.
// Sixty times that keeps the expressions of judge.go busy for 100 ms.
const maxWords = 4 << 10

// cut shortens what a hostile server may have blown up, and lets go of the rest.
func (e *rpcError) cut() {
	if len(e.Message) > maxWords {
		e.Message = string([]byte(e.Message[:maxWords]))
	}
	if len(e.Data) > maxWords {
		e.Data = append(json.RawMessage(nil), e.Data[:maxWords]...)
	}
}

// readMessage reads data as one JSON-RPC message. It is nil for anything else, and
// where names are written in another case: encoding/json takes "Result" for "result",
// and no client does. An error whose message is no string, as frameworks make it of what
// they validate, is an error all the same.
func readMessage(data []byte) *message {
	var m message
	var odd *json.UnmarshalTypeError
	if err := json.Unmarshal(data, &m); err != nil && !(errors.As(err, &odd) && odd.Field == "error.message") || m.JSONRPC != "2.0" || !bytes.Contains(data, []byte(`"jsonrpc"`)) {
		return nil
	}
	if m.Result != nil && !bytes.Contains(data, []byte(`"result"`)) || m.Error != nil && !bytes.Contains(data, []byte(`"error"`)) {
		return nil
	}
	return &m
}

// parseMessage reads data as one JSON-RPC response. It is nil for anything
// else: foreign JSON, a request (an echo of ours, say), a batch.
func parseMessage(data []byte) *message {
	m := readMessage(data)
	if m == nil || m.Method != "" || (m.Result == nil && m.Error == nil) {
		return nil
	}
	return m
}

func isObject(raw json.RawMessage) bool { return len(raw) > 0 && raw[0] == '{' }

// answers reports whether m answers the request with this id. Results must
// carry the id; errors may carry none, null, or the literal by which an SDK marks an
// error that belongs to no request: "server-error" (Python), "" (C#, PHP).
func (m *message) answers(id string) bool {
	if m == nil {
		return false
	}
	var theirs string // decoded: another encoder may escape what ours does not
	isString := json.Unmarshal(m.ID, &theirs) == nil && len(m.ID) > 0 && m.ID[0] == '"'
	if isString && theirs == id {
		return true
	}
	return m.Error != nil && (len(m.ID) == 0 || string(m.ID) == "null" || isString && (theirs == "server-error" || theirs == ""))
}

// MaxIDBody is how many bytes of a request body RequestID needs at most:
// 64 KiB, far above any request whose id comes before its parameters.
const MaxIDBody = 64 << 10

// maxID is the longest id that is echoed, in bytes of JSON.
const maxID = 1 << 10

// ID is the id of a client's JSON-RPC request as it goes into an error answer:
// a JSON value, null (batch, unreadable), or absent (a notification).
type ID struct {
	raw    string
	absent bool
}

// NullID is the id of an error that answers no readable request.
var NullID = ID{raw: "null"}

// JSON is the id as it stands in the answer; "" means that it has none.
func (id ID) JSON() string {
	if id.absent {
		return ""
	}
	if id.raw == "" {
		return "null"
	}
	return id.raw
}

// RequestID finds the id of the JSON-RPC request in the first bytes of a body,
// which may be cut off. A batch, an unreadable body and an id that is neither
// string nor number give null; a notification or a response has no id.
func RequestID(body []byte) ID {
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	if tok, err := dec.Token(); err != nil || tok != json.Delim('{') {
		return NullID
	}
	id, hasID, hasMethod := NullID, false, false
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return id
		}
		if key == "id" {
			var v json.RawMessage
			if dec.Decode(&v) != nil {
				return id
			}
			id = idFrom(v)
			hasID = true
			continue
		}
		hasMethod = hasMethod || key == "method"
		if skip(dec) != nil {
			return id
		}
	}
	if _, err := dec.Token(); err != nil || hasID == hasMethod {
		return id // cut off (the id may come later), a request, or no JSON-RPC at all
	}
	return ID{absent: true}
}

// OpensSession reports whether a request with this HTTP method, whose body begins
// with first, opens a session: it belongs to none, whatever id it carries.
func OpensSession(httpMethod string, first []byte) bool {
	if httpMethod != http.MethodPost {
		return false
	}
	dec := json.NewDecoder(bytes.NewReader(first))
	if tok, err := dec.Token(); err != nil || tok != json.Delim('{') {
		return false
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return false
		}
		if key == "method" {
			name, err := dec.Token()
			return err == nil && name == "initialize"
		}
		if skip(dec) != nil {
			return false
		}
	}
	return false
}

// idFrom keeps a string or number as it was written.
func idFrom(raw json.RawMessage) ID {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || len(raw) > maxID || !utf8.Valid(raw) { // JSON is UTF-8 (RFC 8259 §8.1)
		return NullID
	}
	if c := raw[0]; c == '"' || c == '-' || (c >= '0' && c <= '9') {
		return ID{raw: string(raw)}
	}
	return NullID
}

// skip reads over the next value without building it.
func skip(dec *json.Decoder) error {
	depth := 0 // not in the for: without a condition Yaegi sets it anew in each turn
	for {
		tok, err := dec.Token()
		if err != nil {
			return err
		}
		if d, ok := tok.(json.Delim); ok {
			if d == '{' || d == '[' {
				depth++
			} else {
				depth--
			}
		}
		if depth == 0 {
			return nil
		}
	}
}
