//go:build go1.21

package mcphealth

import (
	"context"
	"errors"
	"net"
	"strings"
)

// errorWords tells transport errors by their text: package syscall, which would
// tell them by number, cannot be imported under Yaegi, and Caddy's DialError
// hides what it wraps. First match wins.
var errorWords = []struct {
	word   string
	reason Reason
}{
	{"malformed HTTP", NotMCP}, // before all others, for it quotes the server
	{"malformed MIME", NotMCP},
	{"no such host", DNS}, // before the rest, for it quotes a name
	{"lookup ", DNS},
	{"server gave HTTP response to HTTPS client", TLS},
	{"tls: ", TLS},
	{"x509: ", TLS},
	{"certificate", TLS},
	{"connection refused", Refused},
	{"no route to host", Refused},
	{"network is unreachable", Refused},
	{"host is down", Refused},
	{"no such file or directory", Refused},
	{"permission denied", Refused},
	{"response headers exceeded", NotMCP},
	{"net/http: invalid header field", ProbeRejected}, // ours: a credential that cannot be sent
	{"invalid header", NotMCP},
	{"transfer encoding", NotMCP},
	{"Content-Length", NotMCP},
	{"gzip: ", NotMCP},
	{"flate: ", NotMCP},
	{"chunk", NotMCP},
	{"header line too long", NotMCP}, // of a chunk
	{"protocol error", NotMCP},
	{"unexpected EOF", NotMCP},
	{"timeout awaiting response headers", Timeout},
}

// scarce are the errors of a dial that is short of something on this machine: of
// files or memory. They say nothing of the server.
var scarce = []string{"too many open files", "no buffer space available", "cannot allocate memory"}

func isScarcity(err error) bool {
	for i := 0; i < len(scarce); i++ {
		if strings.Contains(err.Error(), scarce[i]) {
			return true
		}
	}
	return false
}

func reasonByWords(err error) Reason {
	for i := 0; i < len(errorWords); i++ {
		if strings.Contains(err.Error(), errorWords[i].word) {
			return errorWords[i].reason
		}
	}
	return ""
}

// reason classifies why no answer came.
func (s *stage) reason(ctx context.Context, err error) Reason {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() == context.Canceled {
		return Canceled
	}
	if !s.connected && !s.shaking && isScarcity(err) { // later it may be the server's words
		return ProbeRejected
	}
	if ctx.Err() != nil || isTimeout(err) {
		switch {
		case s.connected:
			return Timeout
		case s.resolving:
			return DNS
		case s.shaking:
			return TLS
		}
		return ConnectTimeout
	}
	if r := reasonByWords(err); r != "" && !(s.connected && r == Refused) {
		if r == NotMCP && strings.HasSuffix(err.Error(), "EOF") {
			return Reset
		}
		return r
	}
	if s.connected || s.shaking {
		return Reset // EOF, connection reset, broken pipe: it ended before an answer
	}
	return Refused
}

// bodyReason classifies why an answer that had begun did not end.
func bodyReason(ctx context.Context, err error) Reason {
	switch {
	case ctx.Err() == context.Canceled:
		return Canceled
	case ctx.Err() != nil || isTimeout(err):
		return Stalled
	}
	if reasonByWords(err) == NotMCP {
		return NotMCP // truncated, or not what its headers say
	}
	return Reset
}

func isTimeout(err error) bool {
	var ne net.Error
	if errors.Is(err, context.DeadlineExceeded) || (errors.As(err, &ne) && ne.Timeout()) {
		return true
	}
	return strings.Contains(err.Error(), "i/o timeout")
}
