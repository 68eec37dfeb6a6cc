//go:build go1.21

package mcphealth

import (
	"bufio"
	"bytes"
	"io"
)

// sseEvent is one event of a text/event-stream.
type sseEvent struct {
	Name string // "message" if the stream names none
	Data []byte
}

// sseReader reads events as the HTML standard §9.2.6 says: lines end in LF,
// CRLF or CR; a blank line ends an event; several data lines are joined by LF;
// comments and other fields are skipped, as is a byte order mark.
type sseReader struct {
	r     *bufio.Reader
	begun bool // a line has been read
	cr    bool
}

// newSSEReader reads at most limit bytes from r; a longer stream ends there.
func newSSEReader(r io.Reader, limit int) *sseReader {
	return &sseReader{r: bufio.NewReaderSize(io.LimitReader(r, int64(limit)), smallBuffer)}
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
		if !s.begun {
			s.begun = true
			line = bytes.TrimPrefix(line, []byte(byteOrderMark))
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
			if ev.Name = string(value); ev.Name == "" {
				ev.Name = "message" // as if there were no such field
			}
		}
	}
}

func splitField(line []byte) (string, []byte) {
	name, value, _ := bytes.Cut(line, []byte(":"))
	return string(name), bytes.TrimPrefix(value, []byte(" "))
}

// line returns one line without its end. A CR ends a line at once: waiting for
// a possible LF would hold back the last event of a quiet stream. It goes by what
// has been read ahead and not by bytes, which would cost 2 µs each under Yaegi: a
// tool list of 4 MiB would take longer than a probe may.
func (s *sseReader) line() ([]byte, error) {
	var line []byte
	for {
		if _, err := s.r.Peek(1); err != nil {
			return nil, err
		}
		ahead, _ := s.r.Peek(s.r.Buffered())
		after := s.cr && ahead[0] == '\n' // the LF of a CRLF
		s.cr = false
		end := bytes.IndexAny(ahead, "\r\n")
		n := end + 1
		if end < 0 {
			n = len(ahead)
		}
		if end >= 0 {
			line = append(line, ahead[:end]...)
			s.cr = ahead[end] == '\r'
		} else {
			line = append(line, ahead...)
		}
		_, _ = s.r.Discard(n)
		if end >= 0 && !after {
			return line, nil
		}
	}
}
