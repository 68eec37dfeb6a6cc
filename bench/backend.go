package main

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// A backend is an MCP server in a process of its own that does nothing else than
// answer, so that the proxy is what is measured. It listens on every loopback
// address: 127.0.a.b is upstream number 256·a+b.
type backend struct {
	kind string
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	port string
}

// counts is what a backend saw since it was asked before.
type counts struct {
	Requests, Probes, Conns, BytesIn, BytesOut int64
	Open                                       int64 // connections now
}

// startBackend runs this program again as a backend.
func startBackend(kind string) (*backend, error) {
	b := &backend{kind: kind, port: "0"}
	return b, b.start()
}

// restart starts a backend that was killed, on the port that it had.
func (b *backend) restart() error {
	_ = b.cmd.Wait()
	return b.start()
}

func (b *backend) start() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	b.cmd = exec.Command(self, "-backend", b.kind, "-port", b.port)
	b.cmd.Stderr = os.Stderr
	if b.in, err = b.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := b.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	b.out = bufio.NewReader(out)
	if err := b.cmd.Start(); err != nil {
		return err
	}
	b.port, err = b.out.ReadString('\n')
	b.port = strings.TrimSpace(b.port)
	return err
}

func (b *backend) stop() {
	_ = b.in.Close()
	_ = b.cmd.Process.Kill()
	_ = b.cmd.Wait()
}

// addr is the address of upstream i.
func (b *backend) addr(i int) string { return fmt.Sprintf("127.0.%d.%d:%s", i/256, i%256, b.port) }

// addrs are those of n upstreams; 127.0.0.0 is none.
func (b *backend) addrs(n int) string {
	var all []string
	for i := range n {
		all = append(all, b.addr(i+1))
	}
	return strings.Join(all, " ")
}

// setMode has it answer as another kind of server does: "page", "absent".
func (b *backend) setMode(mode string) error {
	_, err := b.ask(mode)
	return err
}

// counts asks what came since it was asked last.
func (b *backend) counts() (counts, error) { return b.ask("") }

func (b *backend) ask(mode string) (c counts, err error) {
	if _, err = io.WriteString(b.in, mode+"\n"); err != nil {
		return c, err
	}
	line, err := b.out.ReadBytes('\n')
	if err != nil {
		return c, err
	}
	return c, json.Unmarshal(line, &c)
}

var seen struct {
	requests, probes, conns, in, out, open atomic.Int64
}

// exitInGoodOrder waits for SIGTERM, and for the calls that are under way then.
func exitInGoodOrder(server *http.Server) {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	<-term
	_ = server.Shutdown(context.Background())
	os.Exit(0)
}

// serveBackend is a backend's process: it prints its port, and its counts for each
// line that it reads, which may change its mode, until there are no more.
func serveBackend(kind string, port int) error {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		outer := c.Control(func(fd uintptr) { // all of 127.0.0.0/8, and nothing else
			err = syscall.SetsockoptString(int(fd), syscall.SOL_SOCKET, syscall.SO_BINDTODEVICE, "lo")
		})
		if outer != nil {
			return outer
		}
		return err
	}}
	ln, err := lc.Listen(context.Background(), "tcp4", fmt.Sprintf("0.0.0.0:%d", port))
	if err != nil {
		return err
	}
	a := &answerer{kind: kind, answer: answerOf(kind)}
	server := &http.Server{Handler: a}
	go func() { _ = server.Serve(countingListener{ln}) }()
	go exitInGoodOrder(server)
	fmt.Println(ln.Addr().(*net.TCPAddr).Port)
	for in := bufio.NewReader(os.Stdin); ; {
		mode, err := in.ReadString('\n')
		if err != nil {
			return nil
		}
		if mode = strings.TrimSpace(mode); mode != "" {
			a.mode.Store(mode)
		}
		line, err := json.Marshal(counts{
			Requests: seen.requests.Swap(0), Probes: seen.probes.Swap(0), Conns: seen.conns.Swap(0),
			BytesIn: seen.in.Swap(0), BytesOut: seen.out.Swap(0), Open: seen.open.Load(),
		})
		if err != nil {
			return err
		}
		fmt.Printf("%s\n", line)
	}
}

// answerer answers calls with the same bytes each time.
type answerer struct {
	kind   string
	answer []byte
	mode   atomic.Value // string
}

const smallResult = `{"jsonrpc":"2.0","id":"bench","result":{"content":[{"type":"text","text":"%s"}],"resultType":"complete"}}`

// events is how many an answer of the kind "events" has.
const events = 1000

func answerOf(kind string) []byte {
	switch kind {
	case "large":
		return fmt.Appendf(nil, smallResult, strings.Repeat("x", 1<<20))
	case "sse":
		return fmt.Appendf(nil, "event: message\ndata: "+smallResult+"\n\n", "hello")
	}
	return fmt.Appendf(nil, smallResult, "hello")
}

// ServeHTTP answers calls, probes of ours, native health checks, and streams.
func (a *answerer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch mode, _ := a.mode.Load().(string); {
	case mode == "page":
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, "<!doctype html><title>Welcome</title>")
		return
	case mode == "absent" && r.URL.Path != "/health":
		http.NotFound(w, r)
		return
	case r.Method == http.MethodGet && r.URL.Path == "/health":
		seen.probes.Add(1)
		_, _ = io.WriteString(w, "ok")
		return
	case r.Method == http.MethodGet:
		a.serveStream(w, r)
		return
	case r.Header.Get("Mcp-Method") != "tools/call":
		a.serveQuestion(w, r)
		return
	}
	seen.requests.Add(1)
	_, _ = io.Copy(io.Discard, r.Body)
	switch a.kind {
	case "sse":
		w.Header().Set("Content-Type", "text/event-stream")
	case "events":
		a.serveEvents(w)
		return
	case "slow": // as a server that works
		time.Sleep(20 * time.Millisecond)
		fallthrough
	default:
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Length", strconv.Itoa(len(a.answer)))
	}
	_, _ = w.Write(a.answer)
}

// serveQuestion answers a probe of ours, and a client's initialize with a session.
func (a *answerer) serveQuestion(w http.ResponseWriter, r *http.Request) {
	var m struct {
		ID     json.RawMessage `json:"id"`
		Method string          `json:"method"`
	}
	_ = json.NewDecoder(r.Body).Decode(&m)
	w.Header().Set("Content-Type", "application/json")
	if m.Method == "initialize" {
		w.Header().Set("Mcp-Session-Id", rand.Text())
		fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-11-25","capabilities":{},"serverInfo":{"name":"bench","version":"1"}}}`, m.ID)
		return
	}
	seen.probes.Add(1)
	fmt.Fprintf(w, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28"],"capabilities":{},"resultType":"complete"}}`, m.ID)
}

// serveEvents streams progress, event by event, and the answer.
func (a *answerer) serveEvents(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "text/event-stream")
	rc := http.NewResponseController(w)
	for i := range events - 1 {
		fmt.Fprintf(w, "event: message\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{\"progressToken\":1,\"progress\":%d}}\n\n", i)
		_ = rc.Flush()
	}
	_, _ = fmt.Fprintf(w, "event: message\ndata: %s\n\n", a.answer)
}

// serveStream is a stream on which nothing comes until the client leaves.
func (a *answerer) serveStream(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, ": hello\n\n")
	_ = http.NewResponseController(w).Flush()
	<-r.Context().Done()
}

// countingListener counts connections and their bytes.
type countingListener struct{ net.Listener }

// Accept accepts.
func (l countingListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	seen.conns.Add(1)
	seen.open.Add(1)
	return &countingConn{Conn: c}, nil
}

type countingConn struct {
	net.Conn
	closed atomic.Bool
}

// Read reads.
func (c *countingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	seen.in.Add(int64(n))
	return n, err
}

// Write writes.
func (c *countingConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	seen.out.Add(int64(n))
	return n, err
}

// Close closes.
func (c *countingConn) Close() error {
	if !c.closed.Swap(true) {
		seen.open.Add(-1)
	}
	return c.Conn.Close()
}
