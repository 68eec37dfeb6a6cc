//go:build go1.21

package mcphealth

import (
	"strings"
	"time"
	"unicode"
)

// Result is what one probe found. It is also the JSON document of the command,
// hence all fields are exported and none is embedded.
type Result struct {
	URL     string  `json:"url"`
	Verdict Verdict `json:"verdict"`
	Reason  Reason  `json:"reason"`
	// Detail is one sentence for a person. It holds no credentials.
	Detail string `json:"detail"`
	Era    Era    `json:"era"`
	// ProtocolVersions are those the server named, or the one negotiated.
	ProtocolVersions []string   `json:"protocolVersions"`
	Server           ServerInfo `json:"server"`
	// HTTPStatus and RPCCode are those of the answer that decided; 0 if none.
	HTTPStatus int `json:"httpStatus"`
	RPCCode    int `json:"rpcCode"`
	// LatencyMs is how long the answer that decided took, in milliseconds.
	LatencyMs float64 `json:"latencyMs"`
	// SessionOpened and SessionClosed: this probe opened or ended a session.
	SessionOpened bool `json:"sessionOpened"`
	SessionClosed bool `json:"sessionClosed"`
	// Warnings begin with a word and a colon, as in "cacheable: …".
	Warnings []string `json:"warnings"`
	Steps    []Step   `json:"steps"`
	// At is when the probe began.
	At time.Time `json:"-"`
	// RetryAfter is how long the server asked to be left alone; 0 if it did not.
	RetryAfter time.Duration `json:"-"`
}

// ServerInfo is what the server calls itself: its own words, cleaned and cut,
// and still not to be trusted.
type ServerInfo struct {
	Name    string `json:"name"`
	Version string `json:"version"`
}

// Step is one question of a probe.
type Step struct {
	Step       string  `json:"step"`
	HTTPStatus int     `json:"httpStatus"`
	RPCCode    int     `json:"rpcCode"`
	Ms         float64 `json:"ms"`
	// Outcome is "result", "error", "text", "foreign", or the reason why no
	// answer came.
	Outcome string `json:"outcome"`
}

// maxWord is how much of a server's own words a Result keeps, in characters.
const maxWord = 120

// clean makes a server's own words safe to show on one line: printable, short.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if r == unicode.ReplacementChar || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
	s = strings.TrimSpace(s)
	if r := []rune(s); len(r) > maxWord {
		s = string(r[:maxWord-1]) + "…"
	}
	return s
}
