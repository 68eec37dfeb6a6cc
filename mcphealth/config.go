//go:build go1.21

package mcphealth

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// AliveIf says which answers count as life.
type AliveIf string

const (
	// AliveIfMCP, the default, takes every answer that a real MCP server, or the
	// authorization in front of it, gives; a proxy's page or a bare 404 is none.
	AliveIfMCP AliveIf = "mcp"
	// AliveIfAnyResponse is the literal rule of the published probe specification:
	// any HTTP answer is life, only a failed connection and a timeout are death.
	AliveIfAnyResponse AliveIf = "any_response"
)

// DrainHeader is the header field by which a server says, with the value 1 in each of
// its answers, that it wants no new work.
const DrainHeader = "Mcp-Health-Drain"

// DefaultTimeout bounds one whole probe: stdio bridges that spawn a child per
// request were measured at up to 4 s on two cores.
const DefaultTimeout = 5 * time.Second

// Target is what one upstream is asked: everything that can change a verdict.
// Zero values mean the defaults.
type Target struct {
	// URL of the MCP endpoint, http or https. Required.
	URL string
	// Host is the Host header that clients use. Empty: learned from traffic,
	// and guessed from URL until then.
	Host string
	// Header is sent with every probe, as credentials are. It never shows in a Result.
	// Prober.SetHeader replaces it, as when a token is renewed.
	Header http.Header
	// RequireAuth: the endpoint must demand credentials. One that answers a question
	// without any by a result is degraded, handshake_failed, with the warning
	// auth_missing. Where Header holds credentials, each probe asks once more, without
	// them. Default false.
	RequireAuth bool
	// Era pins the protocol generation: Modern, Legacy or SSE. Empty or
	// EraUnknown: found out.
	Era Era
	// AliveIf says which answers count as life. Default AliveIfMCP.
	AliveIf AliveIf
	// Shallow never opens a session: a stateful legacy server is then asked only
	// what its session router answers. Default false: one session per upstream
	// and process, held and pinged, ended by Close.
	Shallow bool
	// ExpectTools must all be listed by tools/list, or the verdict is tools_missing.
	ExpectTools []string
	// CallTool names a canary tool, called with CallArgs (a JSON object, default
	// {}) in each probe; an error or isError is tool_failing. The tool must be
	// safe to run every interval.
	CallTool string
	CallArgs string
	// SlowAfter makes a slower answer degraded. 0 = never.
	SlowAfter time.Duration
	// HealthPath is fetched by GET from the same upstream before the question: 503
	// or status "unhealthy" is health_down, "degraded" and "draining" degrade.
	HealthPath string
	// Fresh asks, besides, a method that cannot exist: no cache can answer it.
	Fresh bool
	// Timeout bounds one whole probe. Default 5 s.
	Timeout time.Duration
}

// ErrTarget and ErrSchedule are the classes of bad settings.
var (
	ErrTarget   = errors.New("bad target")
	ErrSchedule = errors.New("bad schedule")
)

// WithDefaults fills in what is not set.
func (t Target) WithDefaults() Target {
	if t.Timeout == 0 {
		t.Timeout = DefaultTimeout
	}
	if t.AliveIf == "" {
		t.AliveIf = AliveIfMCP
	}
	if t.CallTool != "" && t.CallArgs == "" {
		t.CallArgs = "{}"
	}
	if t.Era == "" {
		t.Era = EraUnknown
	}
	return t
}

// Validate says what is wrong with the target, wrapping ErrTarget.
func (t Target) Validate() error {
	u, err := url.Parse(t.URL)
	if err != nil {
		var ue *url.Error
		if errors.As(err, &ue) {
			err = ue.Err // without the URL, which may hold a password
		}
		return fmt.Errorf("%w: url: %v", ErrTarget, err)
	}
	if u.User != nil {
		return fmt.Errorf("%w: url: credentials belong into a header, not into the URL", ErrTarget)
	}
	if (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" {
		shown, _, _ := strings.Cut(t.URL, "?") // after which a key may stand
		if strings.Contains(t.URL, "@") {      // before which a password may
			shown = "…"
		}
		return fmt.Errorf("%w: url %q: want http://host[:port]/path or https://…", ErrTarget, shown)
	}
	if err := t.validateWire(u); err != nil {
		return err
	}
	if path, _, _ := strings.Cut(t.HealthPath, "?"); path != "" && path == u.Path {
		return fmt.Errorf("%w: health_path %q is the MCP endpoint itself, where a GET opens a stream: want the path of a health document", ErrTarget, t.HealthPath)
	}
	return t.validateQuestions()
}

// validateWire refuses what could not be written into a request: found out only
// when probing, it would look like a dead upstream.
func (t Target) validateWire(u *url.URL) error {
	if port := u.Port(); port != "" {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return fmt.Errorf("%w: url: port %s: want 1 to 65535", ErrTarget, port)
		}
	}
	if strings.ContainsAny(t.Host, notInHost) || !printable(t.Host) {
		return fmt.Errorf("%w: host %q: want a name or an address, with a port or without", ErrTarget, t.Host)
	}
	for name, values := range t.Header {
		if !isToken(name) {
			return fmt.Errorf("%w: header name %q: want letters, digits and dashes", ErrTarget, name)
		}
		if ownHeader(name) {
			return fmt.Errorf("%w: header %s contradicts what a probe sets there itself: leave it out", ErrTarget, name)
		}
		for i := 0; i < len(values); i++ {
			if !printable(strings.ReplaceAll(values[i], "\t", " ")) {
				return fmt.Errorf("%w: value of header %s: want no line break and no control character", ErrTarget, name)
			}
		}
	}
	return nil
}

// notInHost are the letters that net/http sends in no Host header (RFC 3986, 3.2.2).
const notInHost = " /\\@?#{}<>|^`\""

// ownHeader: a question is none without it, or says another thing.
func ownHeader(name string) bool {
	switch http.CanonicalHeaderKey(name) {
	case "Accept", "Accept-Encoding", "Connection", "Content-Length", "Content-Type", "Transfer-Encoding",
		"Mcp-Method", "Mcp-Name", "Mcp-Protocol-Version", "Mcp-Session-Id":
		return true
	}
	return false
}

// isToken: RFC 9110 §5.6.2.
func isToken(s string) bool {
	for i := 0; i < len(s); i++ {
		c := s[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && !strings.ContainsRune("!#$%&'*+-.^_`|~", rune(c)) {
			return false
		}
	}
	return s != ""
}

func printable(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] < 0x20 || s[i] == 0x7f {
			return false
		}
	}
	return true
}

// validateQuestions is what is wrong with what is asked, wherever it is asked.
func (t Target) validateQuestions() error {
	switch t.Era {
	case "", EraUnknown, Modern, Legacy, SSE:
	default:
		return fmt.Errorf("%w: era %q: want auto, modern, legacy or sse", ErrTarget, t.Era)
	}
	if t.AliveIf != "" && t.AliveIf != AliveIfMCP && t.AliveIf != AliveIfAnyResponse {
		return fmt.Errorf("%w: alive_if %q: want mcp or any_response", ErrTarget, t.AliveIf)
	}
	if t.Timeout < 0 || t.SlowAfter < 0 {
		return fmt.Errorf("%w: timeout %v, slow_after %v: want a positive duration", ErrTarget, t.Timeout, t.SlowAfter)
	}
	if t.HealthPath != "" && !strings.HasPrefix(t.HealthPath, "/") {
		return fmt.Errorf("%w: health_path %q: want a path that begins with /", ErrTarget, t.HealthPath)
	}
	if strings.ContainsAny(t.HealthPath, " #") || !printable(t.HealthPath) {
		return fmt.Errorf("%w: health_path %q: want no space, no # and no control character", ErrTarget, t.HealthPath)
	}
	if _, err := url.ParseRequestURI(t.HealthPath); t.HealthPath != "" && err != nil {
		return fmt.Errorf("%w: health_path %q: want after each %% the two hex digits of an escape", ErrTarget, t.HealthPath)
	}
	for i := 0; i < len(t.ExpectTools); i++ {
		if t.ExpectTools[i] == "" {
			return fmt.Errorf("%w: expect_tool %q: want the name of a tool", ErrTarget, "")
		}
	}
	if t.Shallow && (len(t.ExpectTools) > 0 || t.CallTool != "") {
		return fmt.Errorf("%w: expect_tool and call need a session on stateful servers: they contradict deep off", ErrTarget)
	}
	return t.validateCall()
}

func (t Target) validateCall() error {
	if t.CallTool == "" {
		if t.CallArgs != "" {
			return fmt.Errorf("%w: call arguments without a tool to call", ErrTarget)
		}
		return nil
	}
	var args map[string]any
	if t.CallArgs != "" && (json.Unmarshal([]byte(t.CallArgs), &args) != nil || args == nil) {
		return fmt.Errorf("%w: arguments of tool %q: %s: want a JSON object", ErrTarget, t.CallTool, t.CallArgs)
	}
	return nil
}

// Schedule is when an upstream is asked, and what its answers count for.
// Zero values mean the defaults.
type Schedule struct {
	// Interval between probes of an upstream whose state is settled. Default 10 s.
	Interval time.Duration
	// Fast is the interval while a verdict is unconfirmed, or an upstream freshly
	// down; it backs off to Interval. Measured from start to start. Default 1 s,
	// at most Interval.
	Fast time.Duration
	// Fall is how many dead votes in a row take an upstream down. Default 2.
	Fall int
	// Rise is how many votes in a row bring it up again. Default 1.
	Rise int
	// Wait keeps an upstream out of rotation until its first verdict. Default
	// false: it is tried at once.
	Wait bool
	// NoWatch turns the death watch off: no connection stays open between probes.
	NoWatch bool
	// NoTraffic asks every interval, also while traffic proves life.
	NoTraffic bool
	// ErrorRate degrades an upstream of whose JSON-RPC answers in traffic more than
	// this share (0.5 = half), and at least 10 within an interval, report an internal
	// error or a failed tool call (Served), while one of its Peers is fine. Default 0:
	// never.
	ErrorRate float64
	// Floor is the least time from one probe to the next, of whatever cause, and
	// spreads what many edges notice in one instant over as long: a random share of it
	// passes before the first probe, and before one that an alarm calls for. With it,
	// n edges send one upstream at most n/Floor probes per second. Default 0: none.
	Floor time.Duration
	// Scheduler is what runs the probes; checkers share one. Default: one of its own.
	Scheduler *Scheduler
	// Lease, if set, is asked before each probe: 0 to probe, or after how long to ask
	// again, because another edge probes and tells (Checker.Hear). urgent: live requests
	// fail or wait, a connection has ended, or what one edge says needs a second one. It
	// may block for as long as a probe may. It is not asked while this edge and others
	// disagree: then each of them probes for itself.
	Lease func(urgent bool) time.Duration
	// Tell, if set, is called after each probe whose result is news for the edges that
	// Lease keeps from probing, as Checker.OnResult's function is. A result without a vote
	// is none: it calls for giving the lease back, for another edge may find out more.
	Tell func(Result)
}

// WithDefaults fills in what is not set.
func (s Schedule) WithDefaults() Schedule {
	if s.Interval == 0 {
		s.Interval = 10 * time.Second
	}
	if s.Fast == 0 {
		s.Fast = time.Second
	}
	if s.Fast > s.Interval {
		s.Fast = s.Interval
	}
	if s.Fall == 0 {
		s.Fall = 2
	}
	if s.Rise == 0 {
		s.Rise = 1
	}
	return s
}

// minInterval keeps a typing mistake from becoming a flood of probes.
const minInterval = 10 * time.Millisecond

// Validate says what is wrong with the schedule, wrapping ErrSchedule.
func (s Schedule) Validate() error {
	switch {
	case s.Interval < 0 || (s.Interval > 0 && s.Interval < minInterval):
		return fmt.Errorf("%w: interval %v: want at least %v", ErrSchedule, s.Interval, minInterval)
	case s.Fast < 0 || (s.Fast > 0 && s.Fast < minInterval):
		return fmt.Errorf("%w: fast %v: want at least %v", ErrSchedule, s.Fast, minInterval)
	case s.Floor < 0:
		return fmt.Errorf("%w: floor %v: want 0 or a positive duration", ErrSchedule, s.Floor)
	case s.Fall < 0:
		return fmt.Errorf("%w: fall %d: want 1 or more", ErrSchedule, s.Fall)
	case s.Rise < 0:
		return fmt.Errorf("%w: rise %d: want 1 or more", ErrSchedule, s.Rise)
	case !(s.ErrorRate >= 0 && s.ErrorRate < 1): // NaN is neither
		return fmt.Errorf("%w: error rate %v: want a share of at least 0 and less than 1", ErrSchedule, s.ErrorRate)
	}
	return nil
}
