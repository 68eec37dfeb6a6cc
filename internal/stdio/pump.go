package stdio

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"time"
)

const (
	// maxLine is how much of one line of a kept server is read: 4 MiB, what a probe
	// reads of a list of tools.
	maxLine = 4 << 20
	// replyWithin is how long a server may take to read our answer to its question.
	replyWithin = time.Second
)

// pump reads what a kept server writes, all the time, for one whose pipe is full
// stands still. Lines go to whoever asks a question just then, and nowhere between.
// Requests of the server it answers itself: MCP wants each side to answer a ping
// (2025-11-25 "Ping"), and we offer nothing else.
type pump struct {
	c     *child
	lines chan []byte
	done  chan struct{} // the pipe has ended
	err   error         // why; set before done

	sending sync.Mutex
	mu      sync.Mutex
	quiet   chan struct{} // closed while nobody asks
}

func newPump(c *child) *pump {
	p := &pump{c: c, lines: make(chan []byte), done: make(chan struct{}), quiet: make(chan struct{})}
	close(p.quiet)
	go p.run()
	return p
}

// run ends when the child's stdout does, as it does after child.stop.
func (p *pump) run() {
	defer close(p.done)
	for {
		line, err := p.c.receive(context.Background(), maxLine)
		if err != nil {
			p.err = err
			return
		}
		if p.reply(line) {
			continue
		}
		p.mu.Lock()
		quiet := p.quiet
		p.mu.Unlock()
		select {
		case p.lines <- line:
		case <-quiet:
		}
	}
}

// listen has lines kept for receive until it is released.
func (p *pump) listen() (release func()) {
	quiet := make(chan struct{})
	p.mu.Lock()
	p.quiet = quiet
	p.mu.Unlock()
	return func() { close(quiet) }
}

// receive is child.receive, from the pump.
func (p *pump) receive(ctx context.Context, limit int) ([]byte, error) {
	select {
	case line := <-p.lines:
		return line[:min(len(line), limit)], nil
	case <-p.done:
		return nil, p.err
	case <-ctx.Done():
		return nil, errSilent
	}
}

func (p *pump) send(ctx context.Context, message []byte) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	return p.c.send(ctx, message)
}

// reply answers line if it is a request of the server.
func (p *pump) reply(line []byte) bool {
	var m struct {
		JSONRPC, Method string
		ID              json.RawMessage
	}
	if !bytes.Contains(line, []byte(`"method"`)) || json.Unmarshal(line, &m) != nil || m.JSONRPC != "2.0" || m.Method == "" || len(m.ID) == 0 || string(m.ID) == "null" {
		return false
	}
	rest := `"error":{"code":-32601,"message":"Method not found"}`
	if m.Method == "ping" {
		rest = `"result":{}`
	}
	ctx, cancel := context.WithTimeout(context.Background(), replyWithin)
	defer cancel()
	_ = p.send(ctx, fmt.Appendf(nil, `{"jsonrpc":"2.0","id":%s,%s}`, m.ID, rest)) // a broken pipe shows in the next question
	return true
}
