package caddymodule

import (
	"regexp"
	"strings"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

// What errors of Caddy and Go say where neither their type nor what they wrap tells.
// TestTexts provokes each of them, so that a new version which words one in another
// way is noticed.

// proxyTrace begins the trace of each error that reverse_proxy made.
const proxyTrace = "reverseproxy."

// saysNoUpstream: reverse_proxy had no upstream to choose.
func saysNoUpstream(he caddyhttp.HandlerError) bool {
	return he.Err != nil && he.Err.Error() == "no upstreams available"
}

// saysClosedIdle: the connection was closed before net/http began a request on it.
func saysClosedIdle(err error) bool {
	return strings.Contains(err.Error(), "http: server closed idle connection")
}

// notProcessed is how net/http says that an HTTP/2 server has not processed the
// request (RFC 9113, 6.8 and 8.7), in the words of its own refusal to try again if
// the request had a body.
var notProcessed = regexp.MustCompile(`^(http2: Transport: cannot retry err \[)?(` +
	`stream error: stream ID \d+; REFUSED_STREAM; received from peer|` +
	`http2: Transport received Server's graceful shutdown GOAWAY` +
	`)(\] after Request\.Body was written; define Request\.GetBody to avoid this error)?$`)

func saysNotProcessed(he caddyhttp.HandlerError) bool {
	return he.Err != nil && notProcessed.MatchString(he.Err.Error())
}

// saysDNS: the name was not resolved. reverse_proxy's DialError hides the type.
func saysDNS(err error) bool {
	return strings.Contains(err.Error(), "no such host") || strings.Contains(err.Error(), "lookup ")
}

// saysTimeout: the dial took too long.
func saysTimeout(err error) bool { return strings.Contains(err.Error(), "timeout") }

// handshakes are what only a TLS handshake fails with, on our side. An alert of the
// other side is not among them: it may come after the request.
var handshakes = []string{
	"x509: ",
	"tls: failed to verify certificate",
	"tls: first record does not look like a TLS handshake",
	"net/http: TLS handshake timeout",
	"http: server gave HTTP response to HTTPS client",
}

func failedHandshake(err error) bool {
	for _, text := range handshakes {
		if strings.Contains(err.Error(), text) {
			return true
		}
	}
	return false
}

// saysTLS: it has to do with TLS, before the request or after.
func saysTLS(err error) bool {
	return failedHandshake(err) || strings.Contains(err.Error(), "tls: ")
}
