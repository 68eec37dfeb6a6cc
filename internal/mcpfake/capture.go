// Package mcpfake plays MCP servers for tests: recorded ones, from the captures
// in mcphealth/testdata. It knows the wire and no verdicts.
package mcpfake

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"
)

// A Capture is a recorded conversation with one server, as one txtar file keeps
// it: prose with "key: value" lines on top, then one section per exchange.
type Capture struct {
	Name      string // the file's, without directory and .txtar
	Facts     []Fact // server, version, mode, recorded, notes, want, …, in order
	Prose     string // what a reader should know
	Exchanges []Exchange
}

// Fact is one "key: value" line.
type Fact struct{ Key, Value string }

// Get is the value of the first fact with this key.
func (c *Capture) Get(key string) string {
	for _, f := range c.Facts {
		if f.Key == key {
			return f.Value
		}
	}
	return ""
}

// An Exchange is one request and what came back.
type Exchange struct {
	Probe, Title string // the recorder's name for the question, and its meaning

	Verb, Path string
	Header     http.Header // the telling request headers only
	Body       string

	Status       int
	Phrase       string      // as in "404 Not Found"
	AnswerHeader [][2]string // in order and case as they came, without framing
	Answer       string
	HeldOpen     bool          // the answer had not ended when the recorder hung up
	Lasted       time.Duration // how long an answer took that ended late; else 0
	Hang         bool          // nothing came
	Closed       bool          // the connection ended before an answer
}

// How a section says what came beside, or instead of, an answer.
const (
	hangs  = "=> hangs"
	closes = "=> closes the connection without an answer"
	held   = ", held open"
	ended  = ", ended after "
)

// Format writes the capture as txtar.
func (c *Capture) Format() []byte {
	var b bytes.Buffer
	for _, f := range c.Facts {
		fmt.Fprintf(&b, "%s: %s\n", f.Key, f.Value)
	}
	fmt.Fprintf(&b, "\n%s\n\n", strings.TrimSpace(c.Prose))
	for _, e := range c.Exchanges {
		fmt.Fprintf(&b, "-- %s: %s --\n%s", e.Probe, e.Title, e.format())
	}
	return b.Bytes()
}

func (e *Exchange) format() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s\n", e.Verb, e.Path)
	names := make([]string, 0, len(e.Header))
	for k := range e.Header {
		names = append(names, k)
	}
	sort.Strings(names)
	for _, k := range names {
		fmt.Fprintf(&b, "%s: %s\n", k, e.Header.Get(k))
	}
	fmt.Fprintf(&b, "\n%s\n", e.Body)
	switch {
	case e.Hang:
		return b.String() + hangs + "\n"
	case e.Closed:
		return b.String() + closes + "\n"
	}
	fmt.Fprintf(&b, "=> %s", strings.TrimSpace(fmt.Sprintf("%d %s", e.Status, e.Phrase)))
	if e.HeldOpen {
		b.WriteString(held)
	}
	if e.Lasted > 0 {
		b.WriteString(ended + e.Lasted.String())
	}
	b.WriteString("\n")
	for _, h := range e.AnswerHeader {
		fmt.Fprintf(&b, "%s: %s\n", h[0], h[1])
	}
	fmt.Fprintf(&b, "\n%s\n", e.Answer)
	return b.String()
}

// Load reads one capture.
func Load(file string) (*Capture, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	c, err := Parse(data)
	if err != nil {
		return nil, fmt.Errorf("capture %s: %w", file, err)
	}
	c.Name = strings.TrimSuffix(filepath.Base(file), ".txtar")
	return c, nil
}

// Parse reads what Format writes.
func Parse(data []byte) (*Capture, error) {
	comment, sections := split(string(data))
	c := &Capture{}
	prose := strings.Split(comment, "\n")
	for len(prose) > 0 && prose[0] != "" {
		k, v, ok := strings.Cut(prose[0], ": ")
		if !ok {
			return nil, fmt.Errorf("line %q: want key: value", prose[0])
		}
		c.Facts, prose = append(c.Facts, Fact{k, v}), prose[1:]
	}
	c.Prose = strings.TrimSpace(strings.Join(prose, "\n"))
	for _, s := range sections {
		e, err := parseExchange(s.body)
		if err != nil {
			return nil, fmt.Errorf("section %q: %w", s.name, err)
		}
		e.Probe, e.Title, _ = strings.Cut(s.name, ": ")
		c.Exchanges = append(c.Exchanges, e)
	}
	return c, nil
}

type section struct{ name, body string }

// split takes a txtar archive apart: "-- name --" lines begin its files.
func split(s string) (comment string, sections []section) {
	var b strings.Builder
	flush := func() {
		if sections == nil {
			comment = b.String()
		} else {
			sections[len(sections)-1].body = b.String()
		}
		b.Reset()
	}
	for _, line := range strings.SplitAfter(s, "\n") {
		name, ok := strings.CutPrefix(strings.TrimSuffix(line, "\n"), "-- ")
		if name, end := strings.CutSuffix(name, " --"); ok && end {
			flush()
			sections = append(sections, section{name: name})
			continue
		}
		b.WriteString(line)
	}
	flush()
	return comment, sections
}

func parseExchange(s string) (Exchange, error) {
	e := Exchange{Header: http.Header{}}
	first, s, _ := strings.Cut(s, "\n")
	e.Verb, e.Path, _ = strings.Cut(first, " ")
	header, s := headers(s)
	for _, h := range header {
		e.Header.Set(h[0], h[1])
	}
	e.Body, s, _ = strings.Cut(s, "\n")
	head, s, ok := strings.Cut(s, "\n")
	switch {
	case head == hangs:
		e.Hang = true
		return e, nil
	case head == closes:
		e.Closed = true
		return e, nil
	case !ok || !strings.HasPrefix(head, "=> "):
		return e, fmt.Errorf("line %q: want => status", head)
	}
	head, e.HeldOpen = strings.CutSuffix(head[3:], held)
	head, lasted, late := strings.Cut(head, ended)
	code, phrase, _ := strings.Cut(head, " ")
	e.Phrase = phrase
	var err error
	if e.Status, err = strconv.Atoi(code); err != nil {
		return e, fmt.Errorf("status %q: %w", code, err)
	}
	if late {
		if e.Lasted, err = time.ParseDuration(lasted); err != nil {
			return e, err
		}
	}
	e.AnswerHeader, s = headers(s)
	e.Answer = strings.TrimSuffix(s, "\n") // the last newline is the file's, not the answer's
	return e, nil
}

// headers reads lines up to the empty one.
func headers(s string) ([][2]string, string) {
	var hs [][2]string
	for {
		line, rest, ok := strings.Cut(s, "\n")
		if line == "" || !ok {
			return hs, rest
		}
		k, v, _ := strings.Cut(line, ": ")
		hs, s = append(hs, [2]string{k, v}), rest
	}
}

// rpc is a JSON-RPC request as far as a replay needs it.
type rpc struct {
	Method string          `json:"method"`
	ID     json.RawMessage `json:"id"`
}

func rpcOf(body string) rpc {
	var r rpc
	_ = json.Unmarshal([]byte(body), &r)
	return r
}

// Issued is the session id that the answer hands out, "" if none.
func (e *Exchange) Issued() string {
	for _, h := range e.AnswerHeader {
		if strings.EqualFold(h[0], "Mcp-Session-Id") {
			return h[1]
		}
	}
	return ""
}
