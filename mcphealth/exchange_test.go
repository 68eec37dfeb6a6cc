package mcphealth

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
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
