package mcphealth

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// answers are what a server may write, $ID being that of the question, and what comes
// of it whichever way the question goes.
var answers = []struct {
	name, bytes, want string
	hold              bool // the connection stays open
	kept              bool // and is one to watch
}{
	{name: "with its length", hold: true, kept: true, want: "ready ok",
		bytes: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: $LEN\r\n\r\n$BODY"},
	{name: "in chunks, with a trailer", hold: true, kept: true, want: "ready ok",
		bytes: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n$HEX\r\n$BODY\r\n0\r\nA: b\r\n\r\n"},
	{name: "to the end of the connection", want: "ready ok",
		bytes: "HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n$BODY"},
	{name: "the last one", hold: true, want: "ready ok",
		bytes: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: $LEN\r\n\r\n$BODY"},
	{name: "after early hints", hold: true, kept: true, want: "ready ok",
		bytes: "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: $LEN\r\n\r\n$BODY"},
	{name: "another one behind it", hold: true, want: "ready ok",
		bytes: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: $LEN\r\n\r\n$BODYHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"},
	{name: "hints without end", bytes: strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", maxHeader/10), hold: true, want: "dead not_mcp"},
	{name: "nothing in it", bytes: "HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n", hold: true, kept: true, want: "dead not_mcp"},
	{name: "a header without end", bytes: "HTTP/1.1 200 OK\r\nA: " + strings.Repeat("x", 2*maxHeader), hold: true, want: "dead not_mcp"},
	{name: "no HTTP", bytes: "SSH-2.0-OpenSSH_9.2\r\n", hold: true, want: "dead not_mcp"},
	{name: "no HTTP, about a certificate", bytes: "no-certificate\r\n", hold: true, want: "dead not_mcp"},
	{name: "nothing", bytes: "", want: "dead reset"},
	{name: "silence", bytes: "", hold: true, want: "dead timeout"},
	{name: "half a header", bytes: "HTTP/1.1 200 OK\r\nContent-Ty", want: "dead not_mcp"},
	{name: "half a body", bytes: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{", want: "dead not_mcp"},
	{name: "half a body and silence", bytes: "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{", hold: true, want: "dead stalled"},
	{name: "two lengths", bytes: "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx", hold: true, want: "dead not_mcp"},
	{name: "another protocol", bytes: "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n", hold: true, want: "dead not_mcp"},
}

// A plain line finds what net/http's transport finds, and keeps the connections that
// that keeps.
func TestExchange(t *testing.T) {
	for _, a := range answers {
		for way, newLine := range lines {
			t.Run(a.name+"/"+way, func(t *testing.T) {
				open := &atomic.Int32{}
				l := newLine(&http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
					ours, theirs := net.Pipe()
					open.Add(1)
					go func() {
						defer open.Add(-1)
						serveBytes(theirs, a.bytes, a.hold)
					}()
					return ours, nil
				}})
				p, err := NewProber(Target{URL: "http://upstream.test/mcp", Timeout: 200 * time.Millisecond, Era: Modern}, l)
				if err != nil {
					t.Fatal(err)
				}
				r := p.Probe(context.Background())
				if got := string(r.Verdict) + " " + string(r.Reason); got != a.want {
					t.Errorf("Probe = %q (%s), want %q", got, r.Detail, a.want)
				}
				kept := p.line.watchIdle(nil, func() {})
				if way == "plain" && kept != a.kept {
					t.Errorf("a connection is watched: %t, want %t", kept, a.kept)
				}
				p.Close(context.Background())
				for i := 0; open.Load() > 0 && i < 500; i++ {
					time.Sleep(2 * time.Millisecond)
				}
				if n := open.Load(); n > 0 {
					t.Errorf("%d connections are left open", n)
				}
			})
		}
	}
}

// serveBytes reads one request, answers with these bytes, and hangs up or waits for the
// other side to.
func serveBytes(c net.Conn, text string, hold bool) {
	defer c.Close()
	req, err := http.ReadRequest(bufio.NewReader(c))
	if err != nil {
		return
	}
	question, _ := io.ReadAll(req.Body)
	body := strings.ReplaceAll(discovery.body, "$ID", RequestID(question).JSON())
	text = strings.ReplaceAll(text, "$LEN", fmt.Sprint(len(body)))
	text = strings.ReplaceAll(text, "$HEX", fmt.Sprintf("%x", len(body)))
	if _, err := io.WriteString(c, strings.ReplaceAll(text, "$BODY", body)); err == nil && hold {
		_, _ = io.Copy(io.Discard, c)
	}
}

// A credential that would be another header on the wire is not sent.
func TestExchangeChecksHeaders(t *testing.T) {
	for way, newLine := range lines {
		p, err := NewProber(Target{URL: "http://upstream.test/mcp"}, newLine(&http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			t.Error(way + ": dialled")
			return nil, io.EOF
		}}))
		if err != nil {
			t.Fatal(err)
		}
		p.SetHeader(http.Header{"Authorization": {"a\r\nB: c"}})
		if r := p.Probe(context.Background()); r.Reason != ProbeRejected {
			t.Errorf("%s: Probe = %s %s (%s), want probe_rejected", way, r.Verdict, r.Reason, r.Detail)
		}
	}
}

// timedConn sets a deadline of its own for each Read, as Caddy does for read_timeout, and
// reads on just after the one that asks has heard of the end.
type timedConn struct {
	net.Conn
	reads int
	once  sync.Once
	told  chan struct{} // closed with the first Close or SetDeadline
}

func (c *timedConn) Read(p []byte) (int, error) {
	if c.reads++; c.reads > 1 {
		<-c.told
	}
	_ = c.Conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	return c.Conn.Read(p)
}

func (c *timedConn) SetDeadline(t time.Time) error {
	c.once.Do(func() { close(c.told) })
	return c.Conn.SetDeadline(t)
}

func (c *timedConn) Close() error {
	err := c.Conn.Close()
	c.once.Do(func() { close(c.told) })
	return err
}

// A probe ends in time over a connection that has timeouts of its own.
func TestExchangeEndsWithItsContext(t *testing.T) {
	for way, newLine := range lines {
		l := newLine(&http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go serveBytes(theirs, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{", true)
			return &timedConn{Conn: ours, told: make(chan struct{})}, nil
		}})
		p, err := NewProber(Target{URL: "http://upstream.test/mcp", Timeout: 200 * time.Millisecond, Era: Modern}, l)
		if err != nil {
			t.Fatal(err)
		}
		r := p.Probe(context.Background())
		if took := time.Since(r.At); took > 5*time.Second || r.Reason != Stalled {
			t.Errorf("%s: Probe = %s %s (%s) after %v, want dead stalled after 200ms", way, r.Verdict, r.Reason, r.Detail, took)
		}
		p.Close(context.Background())
	}
}

// What bounds the header of live answers bounds that of a probe's.
func TestExchangeKeepsTheTransportsBounds(t *testing.T) {
	for way, newLine := range lines {
		for _, tt := range []struct {
			name string
			base *http.Transport
			slow time.Duration
			want Reason
		}{
			{"response_header_timeout", &http.Transport{ResponseHeaderTimeout: 50 * time.Millisecond}, 500 * time.Millisecond, Timeout},
			{"max_response_header_size", &http.Transport{MaxResponseHeaderBytes: 1 << 10}, 0, NotMCP},
		} {
			base := tt.base.Clone()
			base.DialContext = func(context.Context, string, string) (net.Conn, error) {
				ours, theirs := net.Pipe()
				go serveBytes(&slowConn{theirs, tt.slow}, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nA: "+strings.Repeat("x", 8<<10)+"\r\nContent-Length: $LEN\r\n\r\n$BODY", true)
				return ours, nil
			}
			p, err := NewProber(Target{URL: "http://upstream.test/mcp", Timeout: 5 * time.Second, Era: Modern}, newLine(base))
			if err != nil {
				t.Fatal(err)
			}
			if r := p.Probe(context.Background()); r.Reason != tt.want {
				t.Errorf("%s, %s: Probe = %s %s (%s), want %s", tt.name, way, r.Verdict, r.Reason, r.Detail, tt.want)
			}
			p.Close(context.Background())
		}
	}
}

// slowConn takes its time before it writes.
type slowConn struct {
	net.Conn
	slow time.Duration
}

func (c *slowConn) Write(p []byte) (int, error) {
	time.Sleep(c.slow)
	return c.Conn.Write(p)
}

// brokenConn says that nothing could be written, though it was.
type brokenConn struct{ net.Conn }

func (c *brokenConn) Write(p []byte) (int, error) {
	n, _ := c.Conn.Write(p)
	return n, io.ErrClosedPipe
}

// An early answer counts, but a connection over which the question did not go is none to
// watch: its end would be an alarm.
func TestExchangeWatchesNoBrokenConnection(t *testing.T) {
	p, err := NewProber(Target{URL: "http://upstream.test/mcp", Timeout: time.Second, Era: Modern}, NewPlainLine(&http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go serveBytes(theirs, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: $LEN\r\n\r\n$BODY", true)
		return &brokenConn{ours}, nil
	}}))
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close(context.Background())
	if r := p.Probe(context.Background()); r.Verdict != Ready {
		t.Errorf("Probe = %s %s (%s), want ready", r.Verdict, r.Reason, r.Detail)
	}
	if p.line.watchIdle(nil, func() {}) {
		t.Error("the connection is watched")
	}
}

// A name in another script is dialled as net/http's transport does, by a plain line, too.
func TestExchangeDialsForeignNames(t *testing.T) {
	for way, newLine := range lines {
		got := ""
		l := newLine(&http.Transport{DialContext: func(_ context.Context, _, addr string) (net.Conn, error) {
			got = addr
			return nil, io.EOF
		}})
		p, err := NewProber(Target{URL: "http://b\u00fccher.example/mcp"}, l)
		if err != nil {
			t.Fatal(err)
		}
		p.Probe(t.Context())
		if want := "xn--bcher-kva.example:80"; got != want {
			t.Errorf("%s: dialled %q, want %q", way, got, want)
		}
	}
}
