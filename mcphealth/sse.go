//go:build go1.21

package mcphealth

import (
	"bufio"
	"bytes"
	"errors"
	"io"
)

// errTooLong is a stream that sent more than a probe reads.
var errTooLong = errors.New("answer too long")

// sseEvent is one event of a text/event-stream.
type sseEvent struct {
	Name string // "message" if the stream names none
	Data []byte
}

// sseReader reads events as the HTML standard §9.2.6 says: lines end in LF,
// CRLF or CR; a blank line ends an event; several data lines are joined by LF;
// comments and other fields are skipped.
type sseReader struct {
	r    *bufio.Reader
	left int // bytes that may still be read
	cr   bool
}

// newSSEReader reads at most limit bytes from r.
func newSSEReader(r io.Reader, limit int) *sseReader {
	return &sseReader{r: bufio.NewReader(r), left: limit}
}

// next returns the next event that has data. io.EOF ends a stream; an event
// that the end cuts off is dropped, as the standard says.
func (s *sseReader) next() (sseEvent, error) {
	ev := sseEvent{Name: "message"}
	data := false
	for {
		line, err := s.line()
		if err != nil {
			return ev, err
		}
		if len(line) == 0 {
			if data {
				return ev, nil
			}
			ev = sseEvent{Name: "message"}
			continue
		}
		field, value := splitField(line)
		switch field {
		case "data":
			if data {
				ev.Data = append(ev.Data, '\n')
			}
			ev.Data = append(ev.Data, value...)
			data = true
		case "event":
			ev.Name = string(value)
		}
	}
}

func splitField(line []byte) (string, []byte) {
	name, value, _ := bytes.Cut(line, []byte(":"))
	return string(name), bytes.TrimPrefix(value, []byte(" "))
}

// line returns one line without its end. A CR ends a line at once: waiting for
// a possible LF would hold back the last event of a quiet stream.
func (s *sseReader) line() ([]byte, error) {
	var line []byte
	for {
		c, err := s.r.ReadByte()
		if err != nil {
			return nil, err
		}
		if s.left--; s.left < 0 {
			return nil, errTooLong
		}
		after := s.cr
		s.cr = c == '\r'
		if c == '\n' && after {
			continue
		}
		if c == '\n' || c == '\r' {
			return line, nil
		}
		line = append(line, c)
	}
}
