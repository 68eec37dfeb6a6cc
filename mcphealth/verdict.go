//go:build go1.21

// Package mcphealth asks an MCP server a question in its own protocol and says,
// with a reason, whether it lives.
//
// A [Prober] asks one upstream one question and reports a [Result]. A [Checker]
// owns the schedule: it counts results into a [State], tells its listeners of
// changes, and answers the request path with one atomic load. The package knows
// no logger, no metrics library and no configuration syntax; it imports the
// standard library only, because Traefik interprets it (docs/adr/0003).
package mcphealth

// Verdict is what one probe concluded about one MCP server.
type Verdict string

// The verdicts. Ready, Alive and Degraded vote up, Dead votes down, Unknown
// does not vote.
const (
	Ready    Verdict = "ready"    // a JSON-RPC result to our own question
	Alive    Verdict = "alive"    // an answer that only an MCP layer, or the authorization in front of it, gives
	Degraded Verdict = "degraded" // alive, but prefer another upstream
	Dead     Verdict = "dead"     // silence, refusal, or an answer that proves no MCP server spoke
	Unknown  Verdict = "unknown"  // the probe could not find out; also before the first probe
)

// Reason is the one closed word behind a verdict: the same in log, JSON,
// metric label, event, 503 body and docs/verdicts.md.
type Reason string

// The reasons, grouped by the verdict they belong to.
const (
	OK Reason = "ok" // ready

	MethodNotFound  Reason = "method_not_found" // -32601 to our id: weak proof
	RPCError        Reason = "rpc_error"        // any other JSON-RPC error
	SessionRequired Reason = "session_required" // a session router's refusal
	AuthRequired    Reason = "auth_required"    // 401, or 403 with a challenge, and we sent no credentials
	VersionMismatch Reason = "version_mismatch" // no common protocol version after negotiating down
	HTTPAnswer      Reason = "http_answer"      // only with AliveIf AnyResponse

	Slow                Reason = "slow"                 // slower than SlowAfter
	RateLimited         Reason = "rate_limited"         // 429
	SessionLimit        Reason = "session_limit"        // 503 with a JSON-RPC body
	Draining            Reason = "draining"             // the server says that it is going away
	InternalError       Reason = "internal_error"       // -32603, or 500 with a JSON-RPC body
	HandshakeFailed     Reason = "handshake_failed"     // the cheap question is answered, initialize is not
	ToolsMissing        Reason = "tools_missing"        // an expected tool is not listed
	ToolFailing         Reason = "tool_failing"         // the canary tool call fails
	CredentialsRejected Reason = "credentials_rejected" // 401 or 403 although we sent credentials
	ErrorRate           Reason = "error_rate"           // JSON-RPC errors inside HTTP 200, seen in traffic

	Refused        Reason = "refused"         // connection refused, no route to the host
	ConnectTimeout Reason = "connect_timeout" // no connection in time
	DNS            Reason = "dns"             // the name does not resolve
	TLS            Reason = "tls"             // the TLS handshake failed
	Reset          Reason = "reset"           // the connection ended before an answer
	Timeout        Reason = "timeout"         // no answer in time
	Stalled        Reason = "stalled"         // headers or a stream, but no JSON-RPC answer in time
	GatewayError   Reason = "gateway_error"   // 502, 503, 504 or 52x without JSON-RPC
	ServerError    Reason = "server_error"    // another 5xx without JSON-RPC on every rung
	NotMCP         Reason = "not_mcp"         // an answer that no MCP layer gives, on every rung
	RouteAbsent    Reason = "route_absent"    // a bare 404, 405 or 410 where MCP answered before
	HostRejected   Reason = "host_rejected"   // the Host that clients use is refused
	HealthDown     Reason = "health_down"     // the health document says so

	NeverProbed      Reason = "never_probed"       // no probe has ended yet
	Canceled         Reason = "canceled"           // our own shutdown or reload
	EndpointNotFound Reason = "endpoint_not_found" // a bare 404, 405 or 410 on every rung, never seen alive
	HostGuessed      Reason = "host_guessed"       // refused for its Host while we only guessed the Host
	Redirected       Reason = "redirected"         // a redirect that a probe must not follow
	ProbeRejected    Reason = "probe_rejected"     // 400, 406 or 415 about our own request's form; or it could not be made here
)

// reasons is the closed list: which words belong to which verdict.
var reasons = map[Verdict][]Reason{
	Ready: {OK},
	Alive: {MethodNotFound, RPCError, SessionRequired, AuthRequired, VersionMismatch, HTTPAnswer},
	Degraded: {Slow, RateLimited, SessionLimit, Draining, InternalError, HandshakeFailed,
		ToolsMissing, ToolFailing, CredentialsRejected, ErrorRate},
	Dead: {Refused, ConnectTimeout, DNS, TLS, Reset, Timeout, Stalled, GatewayError, ServerError,
		NotMCP, RouteAbsent, HostRejected, HealthDown},
	Unknown: {NeverProbed, Canceled, EndpointNotFound, HostGuessed, Redirected, ProbeRejected},
}

// Verdicts lists every verdict, from best to none.
func Verdicts() []Verdict { return []Verdict{Ready, Alive, Degraded, Dead, Unknown} }

// ReasonsOf lists the reasons that belong to v; the list is closed.
func ReasonsOf(v Verdict) []Reason { return append([]Reason(nil), reasons[v]...) }

// Vote is what the verdict counts for: +1 up, -1 down, 0 none.
func (v Verdict) Vote() int {
	switch v {
	case Ready, Alive, Degraded:
		return 1
	case Dead:
		return -1
	}
	return 0
}

// Era is the protocol generation that an upstream speaks.
type Era string

const (
	EraUnknown Era = "unknown"
	Modern     Era = "modern" // 2026-07-28 and later: no initialize, no session; server/discover
	Legacy     Era = "legacy" // 2025-03-26 to 2025-11-25, Streamable HTTP with initialize
	SSE        Era = "sse"    // 2024-11-05 HTTP+SSE, asked only where configured
)

// State is what the request path knows of an upstream after rise and fall.
type State string

const (
	Up           State = "up"
	UpDegraded   State = "degraded" // up, second tier
	Down         State = "down"
	StateUnknown State = "unknown" // no verdict yet
)
