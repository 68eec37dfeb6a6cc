//go:build go1.21

package mcphealth

// Outcome is what became of one request of a client.
type Outcome string

// The outcomes; the list is closed.
const (
	OutcomeOK          Outcome = "ok"          // an answer below status 400, and no error in it
	OutcomeRPCError    Outcome = "rpc_error"   // a JSON-RPC error inside HTTP 200
	OutcomeToolError   Outcome = "tool_error"  // a result with isError, inside HTTP 200
	OutcomeHTTPError   Outcome = "http_error"  // status 400 or more from the upstream, or an answer that broke off
	OutcomeUnavailable Outcome = "unavailable" // no upstream answered, and the edge did in its place: 503 or 502
)

// Outcomes lists every outcome, from best to none.
func Outcomes() []Outcome {
	return []Outcome{OutcomeOK, OutcomeRPCError, OutcomeToolError, OutcomeHTTPError, OutcomeUnavailable}
}
