//go:build go1.21

package mcphealth

import (
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// Answer is what a client gets from the edge itself. It is never HTML, and says
// nothing of addresses.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Unavailable is the answer while nothing can serve an MCP endpoint: 503, which
// clients survive, where they would read 404 as the end of their session. It
// echoes the id of the request; retryAfter is rounded up to whole seconds, at
// least one. HEAD and OPTIONS get status and headers.
func Unavailable(method string, id ID, reason Reason, retryAfter time.Duration) Answer {
	seconds := int64((retryAfter + time.Second - 1) / time.Second)
	if seconds < 1 {
		seconds = 1
	}
	message := fmt.Sprintf("MCP server temporarily unavailable, retry in %d s", seconds)
	a := rpcFailure(method, id, http.StatusServiceUnavailable, message,
		fmt.Sprintf(`{"reason":%s,"retryAfterMs":%d}`, quote(string(reason)), seconds*1000))
	a.Header.Set("Retry-After", strconv.FormatInt(seconds, 10))
	a.Header.Set("X-Mcp-Health", string(reason))
	return a
}

// MayHaveRun is the answer to a request that reached a server which then did not
// answer: it may have been executed, is never replayed, and carries no
// Retry-After.
func MayHaveRun(method string, id ID, reason Reason) Answer {
	a := rpcFailure(method, id, http.StatusBadGateway,
		"MCP server did not answer; the request may have been executed, do not repeat it blindly",
		fmt.Sprintf(`{"reason":%s,"mayHaveRun":true}`, quote(string(reason))))
	a.Header.Set("X-Mcp-Health", string(reason))
	return a
}

// SessionLost is the answer to a request of a session whose server is gone for good
// while others live: 404, which has clients open a new session (MCP 2025-11-25
// "Session Management"). The spec gives that no JSON-RPC code; "Session not found" is
// what servers say, and what clients that read texts look for.
func SessionLost(method string, id ID, reason Reason) Answer {
	a := rpcFailure(method, id, http.StatusNotFound,
		"Session not found: the server that held it is gone, start a new session",
		fmt.Sprintf(`{"reason":%s,"sessionLost":true}`, quote(string(reason))))
	a.Header.Set("X-Mcp-Health", string(reason))
	return a
}

// rpcFailure is a JSON-RPC error with the HTTP status as its code: the spec wants
// codes outside -32768..-32000 for purposes it does not define (JSON-RPC 2.0 §5.1).
func rpcFailure(method string, id ID, status int, message, data string) Answer {
	a := Answer{Status: status, Header: http.Header{}}
	a.Header.Set("Content-Type", "application/json")
	a.Header.Set("Cache-Control", "no-store")
	if method == http.MethodHead || method == http.MethodOptions {
		return a
	}
	if method != http.MethodPost {
		id = NullID
	}
	body := `{"jsonrpc":"2.0",`
	if raw := id.JSON(); raw != "" {
		body += `"id":` + raw + `,`
	}
	a.Body = []byte(body + `"error":{"code":` + strconv.Itoa(status) + `,"message":` + quote(message) + `,"data":` + data + `}}`)
	return a
}

// Send writes the answer.
func (a Answer) Send(w http.ResponseWriter) {
	for k, v := range a.Header {
		w.Header()[k] = v
	}
	if len(a.Body) > 0 {
		w.Header().Set("Content-Length", strconv.Itoa(len(a.Body)))
	}
	w.WriteHeader(a.Status)
	_, _ = w.Write(a.Body)
}
