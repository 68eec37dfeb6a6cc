package reliability

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/mcphealth/mcphealth/internal/mcpfake"
)

// frames is one connection to a server that speaks HTTP/2 frame by frame, and so may
// send what no library would.
type frames struct {
	mu  sync.Mutex // of what is written
	out *http2.Framer
	enc *hpack.Encoder
	buf bytes.Buffer // of enc
}

// write sends frames and reports whether the other side still listens.
func (c *frames) write(do func(*http2.Framer) error) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return do(c.out) == nil
}

// A stream is one request on such a connection.
type stream struct {
	*frames
	id     uint32
	header http.Header
	body   []byte
	left   chan struct{} // closed when the other side reset the stream, or hung up
}

// inFrames answers probes in HTTP/2 well, and hands each other stream to do, in a
// goroutine of its own.
func inFrames(do func(*stream)) func(*mcpfake.Socket) {
	return func(s *mcpfake.Socket) {
		if s.Request.Method != "PRI" {
			return
		}
		if _, err := s.In.Discard(len("SM\r\n\r\n")); err != nil {
			return
		}
		c := &frames{out: http2.NewFramer(s, s.In)}
		c.out.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
		c.enc = hpack.NewEncoder(&c.buf)
		c.serve(do)
	}
}

// serve reads until the other side hangs up, and waits for what misbehaves.
func (c *frames) serve(do func(*stream)) {
	streams := map[uint32]*stream{}
	var all sync.WaitGroup
	defer all.Wait()
	defer func() {
		for _, s := range streams {
			close(s.left)
		}
	}()
	c.write(func(f *http2.Framer) error { return f.WriteSettings() })
	for {
		frame, err := c.out.ReadFrame()
		if err != nil {
			return
		}
		s, ended := streams[frame.Header().StreamID], false
		switch frame := frame.(type) {
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				c.write((*http2.Framer).WriteSettingsAck)
			}
		case *http2.MetaHeadersFrame:
			s = &stream{frames: c, id: frame.StreamID, header: http.Header{}, left: make(chan struct{})}
			for _, h := range frame.RegularFields() {
				s.header.Add(h.Name, h.Value)
			}
			streams[s.id], ended = s, frame.StreamEnded()
		case *http2.DataFrame:
			if s != nil {
				s.body, ended = append(s.body, frame.Data()...), frame.StreamEnded()
			}
		case *http2.RSTStreamFrame:
			if s != nil {
				close(s.left)
				delete(streams, s.id)
			}
		}
		if !ended {
			continue
		}
		if isProbe(&http.Request{Header: s.header}) {
			s.answer(strings.ReplaceAll(discovered, "$ID", s.rpcID()))
			continue
		}
		all.Go(func() { do(s) })
	}
}

func (s *stream) rpcID() string {
	var m struct{ ID json.RawMessage }
	_ = json.Unmarshal(s.body, &m)
	return string(m.ID)
}

// headers sends a header block in one frame; pairs are names and values.
func (s *stream) headers(end bool, pairs ...string) bool {
	return s.write(func(f *http2.Framer) error {
		return f.WriteHeaders(http2.HeadersFrameParam{StreamID: s.id, BlockFragment: s.block(pairs...), EndHeaders: true, EndStream: end})
	})
}

// block compresses fields. The caller writes it before the next one.
func (c *frames) block(pairs ...string) []byte {
	c.buf.Reset()
	for i := 0; i+1 < len(pairs); i += 2 {
		_ = c.enc.WriteField(hpack.HeaderField{Name: pairs[i], Value: pairs[i+1]})
	}
	return c.buf.Bytes()
}

func (s *stream) data(end bool, text string) bool {
	return s.write(func(f *http2.Framer) error { return f.WriteData(s.id, end, []byte(text)) })
}

func (s *stream) answer(body string) {
	s.headers(false, ":status", "200", "content-type", "application/json")
	s.data(true, body)
}

// flood has frames written until the other side resets the stream or hangs up.
func (s *stream) flood(do func(*http2.Framer) error) {
	const atOnce = 256
	for s.write(func(f *http2.Framer) error {
		for range atOnce {
			if err := do(f); err != nil {
				return err
			}
		}
		return nil
	}) {
		select {
		case <-s.left:
			return
		default:
		}
	}
}

// hang says nothing until the other side resets the stream or hangs up.
func (s *stream) hang() { <-s.left }

// hostileStreams are servers that answer probes well and then misbehave in HTTP/2.
var hostileStreams = []hostile{
	// Streams and connections that end.
	{name: "every stream is reset", do: inFrames(func(s *stream) { s.reset(http2.ErrCodeInternal) }), want: "502"},
	{name: "every stream is refused", do: inFrames(func(s *stream) { s.reset(http2.ErrCodeRefusedStream) }), want: "502 503"},
	{name: "reset in the answer", do: inFrames(func(s *stream) {
		s.headers(false, ":status", "200", "content-type", "text/event-stream")
		s.data(false, "data: {}\n\n")
		time.Sleep(20 * time.Millisecond)
		s.reset(http2.ErrCodeCancel)
	}), want: "cut"},
	{name: "GOAWAY, nothing was done", do: inFrames(func(s *stream) { s.goAway(0, http2.ErrCodeNo) }), want: "502 503"},
	{name: "GOAWAY in the answer, and silence", do: inFrames(func(s *stream) {
		s.headers(false, ":status", "200", "content-type", "text/event-stream")
		s.data(false, "data: {}\n\n")
		s.goAway(s.id, http2.ErrCodeNo)
		s.hang()
	}), want: "cut left 502"},
	{name: "GOAWAY: calm down", do: inFrames(func(s *stream) { s.goAway(s.id, http2.ErrCodeEnhanceYourCalm) }), want: "502 left"},
	{name: "GOAWAY again and again", do: inFrames(func(s *stream) {
		s.flood(func(f *http2.Framer) error { return f.WriteGoAway(s.id, http2.ErrCodeNo, nil) })
	}), want: "left 502"},

	// Floods.
	{name: "SETTINGS without end", do: inFrames(func(s *stream) {
		s.flood(func(f *http2.Framer) error {
			return f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 65535})
		})
	}), want: "left"},
	{name: "PING without end", do: inFrames(func(s *stream) {
		s.flood(func(f *http2.Framer) error { return f.WritePing(false, [8]byte{1}) })
	}), want: "left"},
	{name: "RST_STREAM without end", do: inFrames(func(s *stream) {
		s.flood(func(f *http2.Framer) error { return f.WriteRSTStream(s.id, http2.ErrCodeCancel) })
	}), want: "502"},
	{name: "WINDOW_UPDATE without end", do: inFrames(func(s *stream) {
		s.flood(func(f *http2.Framer) error { return f.WriteWindowUpdate(0, 1) })
	}), want: "left 502"},
	{name: "unknown frames without end", do: inFrames(func(s *stream) {
		s.flood(func(f *http2.Framer) error { return f.WriteRawFrame(0xfa, 0, s.id, make([]byte, 1000)) })
	}), want: "left"},
	{name: "empty DATA without end", do: inFrames(func(s *stream) {
		s.headers(false, ":status", "200", "content-type", "text/event-stream")
		s.flood(func(f *http2.Framer) error { return f.WriteData(s.id, false, nil) })
	}), want: "left 502"},
	{name: "padding without end", do: inFrames(func(s *stream) {
		s.headers(false, ":status", "200", "content-type", "text/event-stream")
		s.flood(func(f *http2.Framer) error { return f.WriteDataPadded(s.id, false, nil, make([]byte, 255)) })
	}), want: "left cut"},

	// Headers.
	{name: "CONTINUATION without end", do: inFrames(func(s *stream) {
		s.write(func(f *http2.Framer) error {
			if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: s.id, BlockFragment: s.block(":status", "200")}); err != nil {
				return err
			}
			bomb := s.block("x-bomb", strings.Repeat("~", 4000)) // no shorter in Huffman's code
			for {
				if err := f.WriteContinuation(s.id, false, bomb); err != nil {
					return err
				}
			}
		})
	}), want: "502"},
	{name: "empty CONTINUATION without end", do: inFrames(func(s *stream) {
		s.write(func(f *http2.Framer) error {
			if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: s.id, BlockFragment: s.block(":status", "200")}); err != nil {
				return err
			}
			for start := time.Now(); time.Since(start) < maxStay; {
				if err := f.WriteContinuation(s.id, false, nil); err != nil {
					return err
				}
			}
			return io.EOF
		})
		s.hang()
	}), want: "left 502"},
	{name: "one field a million times", do: inFrames(func(s *stream) { // 4 KB once, a byte each time after
		s.headers(false, append([]string{":status", "200"}, strings.Fields(strings.Repeat("x-bomb "+strings.Repeat("~", 4000)+" ", 12000))...)...)
		s.hang()
	}), want: "502"},
	{name: "early hints without end", do: inFrames(func(s *stream) {
		for s.headers(false, ":status", "103", "link", "</style.css>") {
			select {
			case <-s.left:
				return
			default:
			}
		}
	}), want: "502 left"},
	{name: "trailers without end", do: inFrames(func(s *stream) {
		s.headers(false, ":status", "200", "content-type", "application/json", "trailer", "x-t")
		s.data(false, "{}")
		s.write(func(f *http2.Framer) error {
			if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: s.id, BlockFragment: s.block("x-t", "1"), EndStream: true}); err != nil {
				return err
			}
			for {
				if err := f.WriteContinuation(s.id, false, s.block("x-t", strings.Repeat("~", 4000))); err != nil {
					return err
				}
			}
		})
	}), want: "cut 502"},
	{name: "a line break in a header", do: inFrames(func(s *stream) {
		s.headers(true, ":status", "200", "mcp-session-id", "a\r\nSet-Cookie: evil=1")
	}), want: "502"},
	{name: "no status", do: inFrames(func(s *stream) { s.headers(true, "content-type", "text/plain") }), want: "502"},

	// Windows and lengths.
	{name: "no window, for ever", do: inFrames((*stream).hang), size: 200 << 10, want: "left"},
	{name: "no streams any more", do: inFrames(func(s *stream) {
		s.write(func(f *http2.Framer) error {
			return f.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 0}, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
		})
		s.hang()
	}), want: "left"},
	{name: "a window that overflows", do: inFrames(func(s *stream) {
		s.write(func(f *http2.Framer) error { return f.WriteWindowUpdate(0, 1<<31-1) })
		s.hang()
	}), want: "502"},
	{name: "more than the window", do: inFrames(func(s *stream) {
		s.headers(false, ":status", "200", "content-type", "application/json")
		for s.data(false, strings.Repeat(" ", 16<<10)) {
			select {
			case <-s.left:
				return
			default:
			}
		}
	}), want: "cut left 502"},
	{name: "a frame of 16 MiB", do: inFrames(func(s *stream) {
		s.write(func(f *http2.Framer) error { return f.WriteRawFrame(http2.FrameData, 0, s.id, make([]byte, 1<<24-1)) })
		s.hang()
	}), want: "502"},
	{name: "a length and less", do: inFrames(func(s *stream) {
		s.headers(false, ":status", "200", "content-type", "application/json", "content-length", "400")
		s.data(true, "{")
	}), want: "cut"},
	{name: "a length and more", do: inFrames(func(s *stream) {
		s.headers(false, ":status", "200", "content-type", "application/json", "content-length", "2")
		s.data(true, "{}"+smuggled)
	}), want: "200 cut"},

	// Nonsense.
	{name: "a promise nobody wants", do: inFrames(func(s *stream) {
		s.write(func(f *http2.Framer) error {
			return f.WritePushPromise(http2.PushPromiseParam{StreamID: s.id, PromiseID: 2, EndHeaders: true,
				BlockFragment: s.block(":method", "GET", ":scheme", "http", ":authority", "x", ":path", "/smuggled")})
		})
		s.hang()
	}), want: "502"},
	{name: "an answer for a stream nobody opened", do: inFrames(func(s *stream) {
		other := *s
		other.id += 1000
		other.answer(smuggled)
		s.hang()
	}), want: "502"},
	{name: "HTTP/1.1 in between", do: inFrames(func(s *stream) {
		s.write(func(f *http2.Framer) error {
			return f.WriteRawFrame('H', 'T', 0x54502f31, []byte("HTTP/1.1 200 OK\r\n\r\n{}"))
		})
		s.hang()
	}), want: "left 502"},
}

func (s *stream) reset(code http2.ErrCode) {
	s.write(func(f *http2.Framer) error { return f.WriteRSTStream(s.id, code) })
}

func (s *stream) goAway(last uint32, code http2.ErrCode) {
	s.write(func(f *http2.Framer) error { return f.WriteGoAway(last, code, nil) })
}
