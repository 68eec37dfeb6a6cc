package mcpfake

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"
)

// A Hostile is a server that answers every request on its socket by one function,
// and then closes the connection.
type Hostile struct {
	net.Listener
	done sync.WaitGroup
	mu   sync.Mutex
	open []net.Conn
}

// Misbehave starts a server on loopback. Stop ends it.
func Misbehave(do func(*Socket)) (*Hostile, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	return MisbehaveOn(l, do), nil
}

// MisbehaveOn starts a server on a listener, such as one of TLS, which becomes its own.
func MisbehaveOn(l net.Listener, do func(*Socket)) *Hostile {
	h := &Hostile{Listener: l}
	h.done.Add(1)
	go h.accept(do)
	return h
}

func (h *Hostile) accept(do func(*Socket)) {
	defer h.done.Done()
	for {
		c, err := h.Accept()
		if err != nil {
			return
		}
		h.mu.Lock()
		h.open = append(h.open, c)
		h.mu.Unlock()
		h.done.Add(1)
		go func() {
			defer h.done.Done()
			defer c.Close()
			if s := readSocket(c); s != nil {
				do(s)
			}
		}()
	}
}

// Stop closes all connections and waits for their goroutines.
func (h *Hostile) Stop() {
	_ = h.Close()
	h.mu.Lock()
	for _, c := range h.open {
		_ = c.Close()
	}
	h.mu.Unlock()
	h.done.Wait()
}

// Socket is one connection to answer on, after a request has been read.
type Socket struct {
	net.Conn
	Request *http.Request
	ID      string        // of the JSON-RPC request, as JSON; "" if it has none
	In      *bufio.Reader // what comes behind the request, such as HTTP/2 behind "PRI *"
}

func readSocket(c net.Conn) *Socket {
	in := bufio.NewReader(c)
	req, err := http.ReadRequest(in)
	if err != nil {
		return nil
	}
	body, _ := io.ReadAll(req.Body)
	return &Socket{c, req, string(rpcOf(string(body)).ID), in}
}

// Say sends text, with $ID filled in, and reports whether the other side listens.
func (s *Socket) Say(text string) bool { return s.Send([]byte(strings.ReplaceAll(text, "$ID", s.ID))) }

// Send sends b and reports whether the other side listens.
func (s *Socket) Send(b []byte) bool { _, err := s.Write(b); return err == nil }

// Forever sends text again and again, until the other side has had enough.
func (s *Socket) Forever(text string) {
	b := []byte(strings.Repeat(text, 1+4096/len(text)))
	for s.Send(b) {
	}
}

// Drip sends text a byte every 100 ms.
func (s *Socket) Drip(text string) {
	text = strings.ReplaceAll(text, "$ID", s.ID)
	for i := 0; i < len(text) && s.Send([]byte{text[i]}); i++ {
		time.Sleep(100 * time.Millisecond)
	}
}

// Hang says nothing until the other side hangs up.
func (s *Socket) Hang() { _, _ = io.Copy(io.Discard, s.Conn) }

// Reset ends the connection with a RST.
func (s *Socket) Reset() {
	if c, ok := s.Conn.(*net.TCPConn); ok {
		_ = c.SetLinger(0)
	}
	_ = s.Close()
}
