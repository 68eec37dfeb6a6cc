package mcphealth

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"unicode/utf8"
)

// fuzzID is the id of the question that fuzzed answers answer, if any.
const fuzzID = "mcphealth-7f3a"

// FuzzMessage: the JSON-RPC reader never panics; the id that RequestID takes from
// a body is a JSON value of at most 1 KiB, and of a whole body the one that
// encoding/json finds.
func FuzzMessage(f *testing.F) {
	for _, c := range captures(f) {
		for _, e := range c.Exchanges {
			f.Add([]byte(e.Body))
			f.Add([]byte(e.Answer))
		}
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		if m := parseMessage(body); m != nil {
			m.answers(fuzzID)
			m.Error.code()
			if !json.Valid(body) {
				t.Errorf("parseMessage(%q) found a message in what is no JSON", body)
			}
		}
		got := RequestID(body).JSON()
		if got != "" && (!json.Valid([]byte(got)) || len(got) > maxID) {
			t.Errorf("RequestID(%q) = %q, want JSON of at most %d bytes", body, got, maxID)
		}
		if want, ok := idByMap(body); ok && got != want {
			t.Errorf("RequestID(%q) = %q, want %q", body, got, want)
		}
		if half := RequestID(body[:len(body)/2]).JSON(); half != "" && !json.Valid([]byte(half)) {
			t.Errorf("RequestID(%q) = %q, want JSON", body[:len(body)/2], half)
		}
	})
}

// idByMap finds the id of a whole body the plain way.
func idByMap(body []byte) (id string, ok bool) {
	var m map[string]json.RawMessage
	if json.Unmarshal(body, &m) != nil || m == nil {
		return "", false
	}
	raw, hasID := m["id"]
	_, hasMethod := m["method"]
	switch {
	case hasID && !hasMethod, hasMethod && !hasID:
		return "", true // a response, a notification: nothing to answer
	case !hasID || len(raw) > maxID || !utf8.Valid(raw) || strings.ContainsAny(string(raw[:1]), "{[tfn"):
		return "null", true
	}
	return string(raw), true
}

// FuzzSSE: the stream reader never panics, never reads more than its limit, and
// finds the events that a plain splitter finds.
func FuzzSSE(f *testing.F) {
	for _, c := range captures(f) {
		for _, e := range c.Exchanges {
			if strings.Contains(e.Answer, "data:") {
				f.Add([]byte(e.Answer), 1<<10)
			}
		}
	}
	f.Add([]byte("\xef\xbb\xbfdata: a\r\rdata\rdata:  b\r\n\r\n\n:c\nevent: x\ndata:1\n\n"), 100)
	f.Add([]byte("event\ndata:\n\n"), 100)
	f.Fuzz(func(t *testing.T, stream []byte, limit int) {
		limit &= 1<<16 - 1
		in := &counting{r: bytes.NewReader(stream)}
		var got []sseEvent
		s := newSSEReader(in, limit)
		for {
			ev, err := s.next()
			if err != nil {
				break
			}
			got = append(got, ev)
		}
		if in.n > limit {
			t.Errorf("read %d bytes, want at most %d", in.n, limit)
		}
		want := splitEvents(stream[:atMost(len(stream), limit)])
		if len(got) != len(want) {
			t.Fatalf("events of %q: got %q, want %q", stream, got, want)
		}
		for i := range got {
			if got[i].Name != want[i].Name || !bytes.Equal(got[i].Data, want[i].Data) {
				t.Errorf("event %d of %q: got %q, want %q", i, stream, got[i], want[i])
			}
		}
	})
}

// splitEvents takes a whole stream apart.
func splitEvents(stream []byte) (events []sseEvent) {
	s := strings.TrimPrefix(string(stream), "\xef\xbb\xbf")
	s = strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "\r", "\n")
	lines := strings.Split(s, "\n")
	name, data := "message", []string(nil)
	for _, line := range lines[:len(lines)-1] { // the last one has no end
		field, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case line == "":
			if data != nil {
				events = append(events, sseEvent{name, []byte(strings.Join(data, "\n"))})
			}
			name, data = "message", nil
		case field == "data":
			data = append(data, value)
		case field == "event":
			if name = value; name == "" {
				name = "message"
			}
		}
	}
	return events
}

type counting struct {
	r io.Reader
	n int
}

func (c *counting) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += n
	return n, err
}

// FuzzJudge: whatever comes, of whatever type and status, reading it stays within
// the limit, and the finding is a verdict with a reason of its list and a detail
// fit for one line. Ready takes our id.
func FuzzJudge(f *testing.F) {
	for _, c := range captures(f) {
		for _, e := range c.Exchanges {
			media := ""
			for _, h := range e.AnswerHeader {
				if strings.EqualFold(h[0], "Content-Type") {
					media = h[1]
				}
			}
			f.Add([]byte(strings.ReplaceAll(e.Answer, `"id":1`, `"id":"`+fuzzID+`"`)), media, e.Status, false)
		}
	}
	f.Add(bomb[:2000], "application/json", 200, true)
	p, err := NewProber(Target{URL: "http://127.0.0.1:1/mcp"}, nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, body []byte, media string, status int, zipped bool) {
		in := &counting{r: bytes.NewReader(body)}
		resp := &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {media}}, Body: io.NopCloser(in)}
		if zipped {
			resp.Header.Set("Content-Encoding", "gzip")
		}
		a := answer{q: question{method: "ping", session: ghostID}, status: status, header: resp.Header}
		p.read(&a, resp, fuzzID)
		if a.err != nil {
			a.reason = bodyReason(context.Background(), a.err)
		}
		found := p.judge(a)

		if in.n > maxAnswer {
			t.Errorf("read %d bytes, want at most %d", in.n, maxAnswer)
		}
		if !belongs(found.verdict, found.reason) {
			t.Errorf("%s with %s is no pair of the list", found.verdict, found.reason)
		}
		if d := found.detail; d == "" || len(d) > 1<<10 || !utf8.ValidString(d) || strings.ContainsAny(d, "\n\r\x00\x1b") {
			t.Errorf("detail %q, want one short printable line", d)
		}
		if found.verdict == Ready && !zipped && !bytes.Contains(body, []byte(fuzzID)) {
			t.Errorf("ready without our id in %q", body)
		}
		if n := len(found.a.words()); n > maxWords {
			t.Errorf("%d bytes of words to search, want at most %d", n, maxWords)
		}
		found.versions()
		found.a.refusal()
		if _, err := json.Marshal(p.result(found)); err != nil {
			t.Errorf("the result is no JSON: %v", err)
		}
	})
}

func belongs(v Verdict, r Reason) bool {
	for _, of := range ReasonsOf(v) {
		if of == r {
			return true
		}
	}
	return false
}

// FuzzSplit: what is no tag of ours comes back as it is, and what is one comes back
// to the id and owner that it was made for, in this one spelling.
func FuzzSplit(f *testing.F) {
	k := NewSessionKey([]byte("0123456789abcdef"))
	for _, id := range []string{"", ".", "a", "a.b.c", "7f0c-41", k.Tag("a", 5), k.Tag(k.Tag("a", 5), 6), strings.Repeat(".", 40)} {
		f.Add(id, uint64(1))
	}
	f.Fuzz(func(t *testing.T, s string, owner uint64) {
		if id, o, ok := k.Split(s); ok {
			if k.Tag(id, o) != s {
				t.Errorf("Split(%q) = %q, %x, which Tag spells %q", s, id, o, k.Tag(id, o))
			}
		} else if id != s || o != 0 {
			t.Errorf("Split(%q) = %q, %x, false, want what came", s, id, o)
		}
		want := Owner(owner) & (1<<(8*ownerSize) - 1)
		tagged := k.Tag(s, want)
		if len(tagged) > len(s)+24 {
			t.Errorf("Tag(%q) is %d bytes longer, want at most 24", s, len(tagged)-len(s))
		}
		if tagged == s {
			return
		}
		if id, o, ok := k.Split(tagged); !ok || id != s || o != want {
			t.Errorf("Split(Tag(%q, %x)) = %q, %x, %v", s, want, id, o, ok)
		}
	})
}
