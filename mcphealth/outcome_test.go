package mcphealth

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand"
	"strings"
	"testing"
)

// said is what a reader makes of an answer: its outcome, an exclamation mark for an
// internal error, and "none" where no JSON-RPC was seen.
func (r *OutcomeReader) said() string {
	s := string(r.Outcome())
	if r.IsInternal() {
		s += "!"
	}
	if !r.IsRPC() {
		s += " none"
	}
	return s
}

func readOutcome(media string, chunks ...[]byte) string {
	var r OutcomeReader
	r.Begin(media, "")
	for _, c := range chunks {
		r.Write(bytes.Clone(c)) // it must not keep it
	}
	return r.said()
}

const jsonMedia, eventMedia = "application/json", "text/event-stream"

func TestOutcomeReader(t *testing.T) {
	tests := []struct {
		name, media, body, want string
	}{
		{"a result", jsonMedia, `{"jsonrpc":"2.0","id":1,"result":{"content":[]}}`, "ok"},
		{"a failed tool call", jsonMedia, `{"jsonrpc":"2.0","id":1,"result":{"content":[],"isError":true}}`, "tool_error"},
		{"isError before the content, with spaces", jsonMedia, "{ \"result\" : { \"isError\" : true , \"content\":[] } ,\n\"id\":1,\"jsonrpc\" : \"2.0\" }", "tool_error"},
		{"a result that is no failure", jsonMedia, `{"jsonrpc":"2.0","id":1,"result":{"isError":false}}`, "ok"},
		{"isError must be a boolean", jsonMedia, `{"jsonrpc":"2.0","id":1,"result":{"isError":"true"}}`, "ok"},
		{"an internal error", jsonMedia, `{"jsonrpc":"2.0","id":1,"error":{"code":-32603,"message":"x"}}`, "rpc_error!"},
		{"an error that is the client's", jsonMedia, `{"jsonrpc":"2.0","id":1,"error":{"code":-32602,"message":"-32603"}}`, "rpc_error"},
		{"error null is none", jsonMedia, `{"jsonrpc":"2.0","id":1,"error":null,"result":{}}`, "ok"},
		{"text that quotes a failure", jsonMedia, `{"jsonrpc":"2.0","id":1,"result":{"content":[{"text":"{\"isError\":true},\"error\":{}"}]}}`, "ok"},
		{"isError deeper down is the tool's own data", jsonMedia, `{"jsonrpc":"2.0","id":1,"result":{"structuredContent":{"isError":true,"error":{"code":-32603}}}}`, "ok"},
		{"isError beside the result", jsonMedia, `{"jsonrpc":"2.0","id":1,"isError":true,"result":{}}`, "ok"},
		{"a code deeper down", jsonMedia, `{"jsonrpc":"2.0","id":1,"error":{"data":{"code":-32603},"code":-32000}}`, "rpc_error"},
		{"a request of the server's", jsonMedia, `{"jsonrpc":"2.0","id":1,"method":"ping","params":{"isError":true},"error":{"code":-32603}}`, "ok"},
		{"strings end where they end", jsonMedia, `{"id":"\\","jsonrpc":"2.0","result":{"a":"\\\"","b":"\\\\","isError":true}}`, "tool_error"},
		{"a batch, the worst counts", jsonMedia, ` [{"jsonrpc":"2.0","id":1,"result":{"isError":true}}, 7, [], "x", {"jsonrpc":"2.0","id":2,"error":{"code":-32603}},{"jsonrpc":"2.0","id":3,"result":{}}]`, "rpc_error!"},
		{"cut off", jsonMedia, `{"jsonrpc":"2.0","id":1,"result":{"isError":true}`, "ok"},
		{"foreign JSON", jsonMedia, `{"isError":true,"jsonrpc":"2.0","error":{}}`, "ok none"},
		{"an extension after the version", jsonMedia, `{"jsonrpc":"2.0","x":{"y":[1]},"error":{}}`, "rpc_error"},
		{"another version", jsonMedia, `{"jsonrpc":"1.0","error":{}}`, "ok none"},
		{"no JSON", jsonMedia, `<p>"jsonrpc":"2.0"`, "ok none"},
		{"nothing", jsonMedia, ``, "ok none"},
		{"a byte order mark", jsonMedia, byteOrderMark + `{"jsonrpc":"2.0","error":{}}`, "rpc_error"},
		{"half of one", jsonMedia, "\xef\xbb" + `{"jsonrpc":"2.0","error":{}}`, "ok none"},
		{"half of one, then an event", eventMedia, "\xefdata: {\"jsonrpc\":\"2.0\",\"error\":{}}\n\n", "ok none"},
		{"with a charset", "application/json; charset=utf-8", `{"jsonrpc":"2.0","error":{}}`, "rpc_error"},
		{"a page that quotes it", "text/html", `{"jsonrpc":"2.0","error":{}}`, "ok none"},

		{"an event", eventMedia, "event: message\ndata: {\"jsonrpc\":\"2.0\",\"result\":{\"isError\":true}}\n\n", "tool_error"},
		{"after comments, a priming event and a notification", eventMedia,
			": hi\r\n\r\nid: 1\r\ndata:\r\n\r\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\"}\r\n\r\ndata:{\"jsonrpc\":\"2.0\",\"error\":{\"code\":-32603}}\r\n\r\n", "rpc_error!"},
		{"several lines of data", eventMedia, "data: {\"jsonrpc\":\"2.0\",\ndata:\"result\":\ndata: {\"isError\":\ndata:true}}\n\n", "tool_error"},
		{"lines that end in CR", eventMedia, "data: {\"jsonrpc\":\"2.0\",\"error\":{}}\r\r", "rpc_error"},
		{"after a byte order mark", eventMedia, "\xef\xbb\xbfdata: {\"jsonrpc\":\"2.0\",\"error\":{}}\n\n", "rpc_error"},
		{"fields that are called otherwise", eventMedia, "dat: {\"jsonrpc\":\"2.0\",\"error\":{}}\n\ndatax: {}\n data: {}\n\n", "ok none"},
		{"an event that the end cuts off is none", eventMedia, "data: {\"jsonrpc\":\"2.0\",\"error\":{}}\n", "ok none"},
		{"an error stays one", eventMedia, "data: {\"jsonrpc\":\"2.0\",\"error\":{}}\n\ndata: {\"jsonrpc\":\"2.0\",\"result\":{}}\n\n", "rpc_error"},
		{"a comment", eventMedia, ": keep-alive\n\n", "ok none"},
	}
	for _, tt := range tests {
		if got := readOutcome(tt.media, []byte(tt.body)); got != tt.want {
			t.Errorf("%s: %q says %q, want %q", tt.name, tt.body, got, tt.want)
		}
		bytewise := bytes.SplitAfter([]byte(tt.body), nil)
		if got := readOutcome(tt.media, bytewise...); got != tt.want {
			t.Errorf("%s, byte by byte: %q says %q, want %q", tt.name, tt.body, got, tt.want)
		}
		for i := range len(tt.body) {
			if got := readOutcome(tt.media, []byte(tt.body[:i]), nil, []byte(tt.body[i:])); got != tt.want {
				t.Errorf("%s: %q|%q says %q, want %q", tt.name, tt.body[:i], tt.body[i:], got, tt.want)
			}
		}
	}
	var r OutcomeReader
	for _, encoding := range []string{"gzip", "br", "zstd, gzip"} {
		if r.Begin(jsonMedia, encoding) {
			t.Errorf("Begin(%q) wants to read what is compressed", encoding)
		}
	}
	if !r.Begin(jsonMedia, "identity") {
		t.Error("Begin(identity) reads nothing")
	}
}

// plainOutcome is what encoding/json makes of a whole document.
func plainOutcome(body []byte) (worst finality, rpc bool) {
	var batch []json.RawMessage
	if json.Unmarshal(body, &batch) == nil && batch != nil {
		for _, raw := range batch {
			f, is, foreign := plainMessage(raw)
			worst, rpc = max(worst, f), rpc || is
			if foreign {
				break
			}
		}
		return worst, rpc
	}
	worst, rpc, _ = plainMessage(body)
	return worst, rpc
}

func plainMessage(raw []byte) (said finality, rpc, foreign bool) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	if tok, err := dec.Token(); err != nil || tok != json.Delim('{') {
		return silent, false, false
	}
	version, method, hasResult, hasError, code, failed := false, false, false, false, false, false
	for dec.More() {
		name, _ := dec.Token()
		var value json.RawMessage
		if dec.Decode(&value) != nil {
			return silent, rpc, false
		}
		switch name {
		case "jsonrpc":
			if value[0] == '"' {
				version = string(value) == `"2.0"`
			}
			rpc = rpc || version
		case "method":
			method = true
		case "result":
			hasResult = true
			failed = failed || hasMember(value, "isError", "true")
		case "error":
			if value[0] == '{' {
				hasError = true
				code = code || hasMember(value, "code", "-32603")
			}
		case "id", "params":
		default:
			if !version {
				return silent, rpc, true
			}
		}
	}
	switch {
	case !version || method:
		return silent, rpc, false
	case hasError && code:
		return internal, rpc, false
	case hasError:
		return rpcFailureMinor, rpc, false
	case hasResult && failed:
		return toolError, rpc, false
	case hasResult:
		return success, rpc, false
	}
	return silent, rpc, false
}

// hasMember reports whether an object has a member of that name and raw value.
func hasMember(raw []byte, name, value string) bool {
	if raw[0] != '{' {
		return false
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.Token()
	for dec.More() {
		n, _ := dec.Token()
		var v json.RawMessage
		if dec.Decode(&v) != nil {
			return false
		}
		if n == name && string(v) == value {
			return true
		}
	}
	return false
}

// FuzzOutcome: what the reader says does not depend on where the answer is split,
// and of whole documents it says what encoding/json does.
func FuzzOutcome(f *testing.F) {
	for _, c := range captures(f) {
		for _, e := range c.Exchanges {
			f.Add([]byte(e.Answer), int64(1), strings.Contains(e.Answer, "data:"))
		}
	}
	f.Add([]byte(`[{"id":"\\\"","jsonrpc":"2.0","result":{"a":[{}],"isError":true}},{"error":{"code":-32603},"jsonrpc":"2.0"}]`), int64(2), false)
	f.Add([]byte("\xef\xbb\xbf:\r\n\rdata: {\"jsonrpc\":\r\ndata:\"2.0\",\"result\":{\"isError\":true}}\n\r\n"), int64(3), true)
	f.Fuzz(func(t *testing.T, body []byte, seed int64, stream bool) {
		media := jsonMedia
		if stream {
			media = eventMedia
		}
		whole := readOutcome(media, body)
		rnd := rand.New(rand.NewSource(seed))
		var chunks [][]byte
		for rest := body; len(rest) > 0; {
			n := 1 + rnd.Intn(len(rest))
			if rnd.Intn(3) == 0 {
				n = 1
			}
			chunks = append(chunks, rest[:n])
			rest = rest[n:]
		}
		if got := readOutcome(media, chunks...); got != whole {
			t.Errorf("%q in chunks %q says %q, in one %q", body, chunks, got, whole)
		}

		if bytes.Contains(body, []byte(`\u`)) {
			return // names written with \u escapes are unknown to the reader
		}
		var worst finality
		rpc := false
		if !stream {
			body = bytes.TrimPrefix(body, []byte(byteOrderMark))
			if !json.Valid(body) {
				return
			}
			worst, rpc = plainOutcome(body)
		} else {
			events := newSSEReader(bytes.NewReader(body), len(body)+1)
			for ev, err := events.next(); err != io.EOF; ev, err = events.next() {
				if !json.Valid(ev.Data) {
					if len(bytes.TrimSpace(ev.Data)) > 0 {
						return
					}
					continue
				}
				f, is := plainOutcome(ev.Data)
				worst, rpc = max(worst, f), rpc || is
			}
		}
		want := (&OutcomeReader{worst: worst, rpc: rpc}).said()
		if whole != want {
			t.Errorf("%q says %q, want %q", body, whole, want)
		}
	})
}

// A chunk costs work in proportion to its size, whatever is in it, and no memory.
func TestOutcomeReaderAllocatesNothing(t *testing.T) {
	for name, b := range outcomeBodies() {
		var r OutcomeReader
		if n := testing.AllocsPerRun(10, func() {
			r.Begin(b.media, "")
			for rest := b.body; len(rest) > 0; {
				n := min(len(rest), 4<<10)
				r.Write(rest[:n])
				rest = rest[n:]
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations, want none", name, n)
		}
	}
}

type outcomeBody struct {
	media string
	body  []byte
}

// outcomeBodies are answers of the usual kinds, and the worst that was thought of.
func outcomeBodies() map[string]outcomeBody {
	text := strings.Repeat("The quick brown fox jumps over the lazy dog. ", 1<<10)
	result := func(content string) string {
		return `{"jsonrpc":"2.0","id":7,"result":{"content":[` + content + `],"isError":false}}`
	}
	quoted, _ := json.Marshal(strings.Repeat(`{"name":"a b","size":12,"tags":["x","y"]},`, 1<<10))
	structured := strings.Repeat(`{"name":"a b","size":12,"tags":["x","y"]},`, 1<<10)
	small := result(`{"type":"text","text":"42"}`)
	return map[string]outcomeBody{
		"small":        {jsonMedia, []byte(small)},
		"text":         {jsonMedia, []byte(result(`{"type":"text","text":"` + text + `"}`))},
		"quotedJSON":   {jsonMedia, []byte(result(`{"type":"text","text":` + string(quoted) + `}`))},
		"structured":   {jsonMedia, []byte(result(structured + `{}`))},
		"events":       {eventMedia, []byte(strings.Repeat("event: message\ndata: "+small+"\n\n", 1<<9))},
		"foreignJSON":  {jsonMedia, []byte(`{"status":"ok","items":["` + text + `"]}`)},
		"html":         {"text/html", []byte("<p>" + text)},
		"worstQuotes":  {jsonMedia, []byte(result(`"` + strings.Repeat(`\"`, 1<<15) + `"`))},
		"worstSlashes": {jsonMedia, []byte(result(`"` + strings.Repeat(`\\`, 1<<15) + `"`))},
		"worstCRs":     {eventMedia, bytes.Repeat([]byte(":\r"), 1<<15)},
		"worstDepth":   {jsonMedia, []byte(`{"jsonrpc":"2.0","result":` + strings.Repeat(`[`, 1<<16))},
	}
}

// BenchmarkOutcome reads as the proxy does, 32 KiB at a time.
func BenchmarkOutcome(b *testing.B) {
	for name, body := range outcomeBodies() {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(body.body)))
			var r OutcomeReader
			for b.Loop() {
				r.Begin(body.media, "")
				for rest := body.body; len(rest) > 0; {
					n := min(len(rest), 32<<10)
					r.Write(rest[:n])
					rest = rest[n:]
				}
			}
			_ = fmt.Sprint(r.said())
		})
	}
}
