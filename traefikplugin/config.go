//go:build go1.21

package traefikplugin

import (
	"errors"
	"fmt"
	"net/http"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// Config is the middleware's configuration as Traefik hands it over: from YAML,
// TOML, labels or a Kubernetes resource, with weak types. A list may be a string
// with commas; a duration may be a number of seconds.
type Config struct {
	// Mode says what the middleware does on its router. auto, the default, finds
	// out: health on the router of a service, fallback in front of noop@internal,
	// gate where something else comes next and upstreams are set.
	Mode string `json:"mode,omitempty"`
	// Paths are the MCP endpoints as requests arrive here; a * at the end stands
	// for anything. The first is the one that is probed. Default /mcp.
	Paths []string `json:"paths,omitempty"`
	// Upstreams are MCP endpoint URLs, for where the servers cannot be learned
	// from Traefik. On a service's router, one that names the same server
	// replaces the URL that would be probed.
	Upstreams []string `json:"upstreams,omitempty"`
	// Interval between probes of a server whose state is settled. Default 10s.
	Interval string `json:"interval,omitempty"`
	// Timeout of one probe. Default 5s.
	Timeout string `json:"timeout,omitempty"`
	// Fall is how many dead votes in a row take a server down. Default 2.
	Fall string `json:"fall,omitempty"`
	// Rise is how many votes in a row bring it up again. Default 1.
	Rise string `json:"rise,omitempty"`
	// Hold is how long a request waits for a server to come back. 0 = not at
	// all. Default 10s.
	Hold string `json:"hold,omitempty"`
	// HoldMax is how many requests may wait at once. Default 1024.
	HoldMax string `json:"holdMax,omitempty"`
	// AbsentAfter is how long a route may be gone before it is 404 again.
	// 0 = for ever. Default 10m.
	AbsentAfter string `json:"absentAfter,omitempty"`
	// RetryAfter is what a 503 tells clients to wait. Default: until the next probe.
	RetryAfter string `json:"retryAfter,omitempty"`
	// StatusPath shows the state of all servers, on a fallback or gate router.
	// Keep such a router private. Default: off.
	StatusPath string `json:"statusPath,omitempty"`
	// Headers are sent with each probe, as credentials are.
	Headers map[string]string `json:"headers,omitempty"`
	// AliveIf is mcp (default) or any_response.
	AliveIf string `json:"aliveIf,omitempty"`
	// ExpectTools must all be listed by the server, or it is degraded.
	ExpectTools []string `json:"expectTools,omitempty"`
	// Host is the Host header of probes. Default: the server's address.
	Host string `json:"host,omitempty"`
	// Sticky brings the requests of a session to the server that opened it. The
	// service needs a sticky cookie (loadBalancer.sticky.cookie), by which Traefik's
	// balancer is told whom to choose. Default false.
	Sticky bool `json:"sticky,omitempty"`
	// SessionKey is the secret, of 16 bytes or more, by which owners are written into
	// session ids. All Traefiks of one service need the same. Default: a random one,
	// which ends with the process, and the sessions' owners with it.
	SessionKey string `json:"sessionKey,omitempty"`
	// SessionGrace is how long the owner of a session may be away before the client
	// is told that the session is lost. Default 30s.
	SessionGrace string `json:"sessionGrace,omitempty"`
	// Unknown collects every other key: New refuses them by name.
	Unknown map[string]interface{} `json:"-" mapstructure:",remain"`
}

// The modes.
const (
	modeAuto     = "auto"
	modeHealth   = "health"
	modeFallback = "fallback"
	modeGate     = "gate"
)

// settings is the configuration in its types, checked.
type settings struct {
	mode         string
	paths        []string
	upstreams    []string
	hold         time.Duration
	holdMax      int
	absentAfter  time.Duration
	retryAfter   time.Duration
	statusPath   string
	sticky       bool
	key          *mcphealth.SessionKey // nil: not sticky
	sessionGrace time.Duration
	target       mcphealth.Target // all but the URL
	schedule     mcphealth.Schedule
}

var errConfig = errors.New("mcphealth: bad configuration")

// bad is the error about one key.
func bad(key, value, want string) error {
	return fmt.Errorf("%w: %s %q: want %s", errConfig, key, value, want)
}

// keys is what may be configured, for the message about a key that may not.
const keys = "absentAfter, aliveIf, expectTools, fall, headers, hold, holdMax, host, interval, mode, paths, retryAfter, rise, sessionGrace, sessionKey, statusPath, sticky, timeout, upstreams"

// fast is the pause between probes while a server is freshly down: requests wait
// for it meanwhile.
const fast = 200 * time.Millisecond

// parse checks the configuration. Its error names the key.
func (c *Config) parse() (*settings, error) {
	if c == nil {
		c = &Config{}
	}
	if len(c.Unknown) > 0 {
		var names []string
		for k := range c.Unknown {
			names = append(names, k)
		}
		sort.Strings(names)
		return nil, fmt.Errorf("%w: unknown key %s: want one of %s", errConfig, strings.Join(names, ", "), keys)
	}
	s := &settings{}
	if err := c.parseNumbers(s); err != nil {
		return nil, err
	}
	if err := c.parseWords(s); err != nil {
		return nil, err
	}
	if err := c.parseTarget(s); err != nil {
		return nil, err
	}
	if err := c.parseSticky(s); err != nil {
		return nil, err
	}
	return s, c.contradictions(s)
}

// contradictions refuses what cannot be meant together, though each by itself can.
func (c *Config) contradictions(s *settings) error {
	switch {
	case s.hold == 0 && strings.TrimSpace(c.HoldMax) != "":
		return bad("holdMax", c.HoldMax, "no value beside hold 0, with which no request waits")
	case s.statusPath != "" && s.isMCP(s.statusPath):
		return bad("statusPath", s.statusPath, "a path that is none of paths, whose requests go to the servers")
	case s.mode == modeGate && len(s.upstreams) == 0:
		return bad("mode", s.mode, "upstreams as well: a gate goes by their health")
	}
	return nil
}

func (c *Config) parseNumbers(s *settings) error {
	var err error
	if s.schedule.Interval, err = duration("interval", c.Interval, 10*time.Second, 100*time.Millisecond); err != nil {
		return err
	}
	if s.target.Timeout, err = duration("timeout", c.Timeout, mcphealth.DefaultTimeout, 10*time.Millisecond); err != nil {
		return err
	}
	if s.hold, err = duration("hold", c.Hold, 10*time.Second, 0); err != nil {
		return err
	}
	if s.absentAfter, err = duration("absentAfter", c.AbsentAfter, 10*time.Minute, 0); err != nil {
		return err
	}
	if s.retryAfter, err = duration("retryAfter", c.RetryAfter, 0, 0); err != nil {
		return err
	}
	if s.retryAfter == 0 && strings.TrimSpace(c.RetryAfter) != "" {
		return bad("retryAfter", c.RetryAfter, "a positive duration, or no value for the time until the next probe")
	}
	if s.schedule.Fall, err = count("fall", c.Fall, 2); err != nil {
		return err
	}
	if s.schedule.Rise, err = count("rise", c.Rise, 1); err != nil {
		return err
	}
	if s.holdMax, err = count("holdMax", c.HoldMax, 1024); err != nil {
		return err
	}
	s.schedule.Fast = fast
	if s.schedule.Fast > s.schedule.Interval {
		s.schedule.Fast = s.schedule.Interval
	}
	return nil
}

func (c *Config) parseWords(s *settings) error {
	s.mode = c.Mode
	switch s.mode {
	case "":
		s.mode = modeAuto
	case modeAuto, modeHealth, modeFallback, modeGate:
	default:
		return bad("mode", c.Mode, "auto, health, fallback or gate")
	}
	s.paths = list(c.Paths)
	if len(s.paths) == 0 {
		if len(c.Paths) > 0 {
			return bad("paths", "", "a path that begins with /")
		}
		s.paths = []string{"/mcp"}
	}
	for i := 0; i < len(s.paths); i++ {
		p := s.paths[i]
		if !strings.HasPrefix(p, "/") {
			return bad("paths", withoutQuery(p), "a path that begins with /")
		}
		if strings.ContainsAny(strings.TrimSuffix(p, "*"), "*?#") { // no request would match
			return bad("paths", withoutQuery(p), "a path, with * at the end alone and without a query, which the URL under upstreams may have")
		}
	}
	s.statusPath = c.StatusPath
	if s.statusPath != "" && !strings.HasPrefix(s.statusPath, "/") {
		return bad("statusPath", withoutQuery(s.statusPath), "a path that begins with /")
	}
	if strings.ContainsAny(s.statusPath, "*?#") {
		return bad("statusPath", withoutQuery(s.statusPath), "one path, without * and without a query")
	}
	return nil
}

func (c *Config) parseSticky(s *settings) error {
	var err error
	if s.sessionGrace, err = duration("sessionGrace", c.SessionGrace, 30*time.Second, 0); err != nil {
		return err
	}
	s.sticky = c.Sticky
	secret := strings.TrimSpace(c.SessionKey)
	if secret != "" && len(secret) < minSecret {
		return fmt.Errorf("%w: sessionKey has %d bytes: want %d random ones or more", errConfig, len(secret), minSecret)
	}
	if s.sticky {
		s.key, err = keyOf(secret)
	}
	return err
}

func (c *Config) parseTarget(s *settings) error {
	s.target.Host = c.Host
	s.target.ExpectTools = list(c.ExpectTools)
	if len(s.target.ExpectTools) < len(c.ExpectTools) {
		return bad("expectTools", "", "the name of a tool")
	}
	s.target.AliveIf = mcphealth.AliveIf(c.AliveIf)
	switch s.target.AliveIf {
	case "", mcphealth.AliveIfMCP, mcphealth.AliveIfAnyResponse:
	default:
		return bad("aliveIf", c.AliveIf, "mcp or any_response")
	}
	for k, v := range c.Headers {
		if http.CanonicalHeaderKey(k) == "Host" {
			return fmt.Errorf("%w: headers %q: want it as the key host", errConfig, k)
		}
		if s.target.Header == nil {
			s.target.Header = http.Header{}
		}
		if s.target.Header.Values(k) != nil { // of two, chance would send one
			return fmt.Errorf("%w: headers %q: want it once, whether in capitals or not", errConfig, http.CanonicalHeaderKey(k))
		}
		s.target.Header.Set(k, v)
	}
	if err := s.validProbe(); err != nil {
		return err
	}
	s.upstreams = list(c.Upstreams)
	if len(s.upstreams) == 0 && len(c.Upstreams) > 0 {
		return bad("upstreams", "", "the URL of an MCP endpoint")
	}
	for i := 0; i < len(s.upstreams); i++ {
		t := s.target
		t.URL = s.upstreams[i]
		if err := t.Validate(); err != nil {
			return fmt.Errorf("%w: upstreams: %v", errConfig, err)
		}
	}
	return nil
}

// validProbe refuses what would only fail when a server is to be probed.
func (s *settings) validProbe() error {
	t := mcphealth.Target{URL: "http://localhost" + s.probed()}
	if t.Validate() != nil {
		return bad("paths", s.paths[0], "a path that can stand in a URL")
	}
	t.Host = s.target.Host
	t.Header = s.target.Header
	err := t.Validate()
	if err == nil {
		return nil
	}
	text := strings.TrimPrefix(err.Error(), mcphealth.ErrTarget.Error()+": ")
	if !strings.HasPrefix(text, "host ") {
		text = "headers: " + text
	}
	return fmt.Errorf("%w: %s", errConfig, text)
}

// list drops the blanks that a string with commas leaves.
func list(in []string) []string {
	var out []string
	for i := 0; i < len(in); i++ {
		if s := strings.TrimSpace(in[i]); s != "" {
			out = append(out, s)
		}
	}
	return out
}

// duration reads "10s", or a number of seconds, as Traefik itself does.
func duration(key, s string, without, least time.Duration) (time.Duration, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return without, nil
	}
	d, err := time.ParseDuration(s)
	if n, notNumber := strconv.ParseFloat(s, 64); notNumber == nil && n < 1e9 && n > -1e9 {
		d = time.Duration(n * float64(time.Second))
		err = nil
	}
	if err != nil {
		return 0, bad(key, s, "a duration such as 10s")
	}
	if d < least {
		return 0, bad(key, s, "at least "+least.String())
	}
	return d, nil
}

func count(key, s string, without int) (int, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return without, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return 0, bad(key, s, "a whole number from 1 on")
	}
	return n, nil
}

// isMCP reports whether a path is an MCP endpoint. What clients ask at well-known
// paths is discovery: a 404 there is an answer that they understand.
func (s *settings) isMCP(path string) bool { return s.pathOf(path) != "" }

// pathOf is the configured path that this one belongs to; "" if it belongs to none.
func (s *settings) pathOf(path string) string {
	if path == s.paths[0] { // at once: traffic passes here
		return path
	}
	if strings.Contains(path+"/", "/.well-known/") {
		return ""
	}
	for i := 0; i < len(s.paths); i++ {
		p := s.paths[i]
		if path == p || path == p+"/" {
			return p
		}
		if strings.HasSuffix(p, "*") && strings.HasPrefix(path, p[:len(p)-1]) {
			return p
		}
	}
	return ""
}

// together is what routers that lead to one service must agree upon.
func (s *settings) together() string {
	return fmt.Sprintf("%s|%q|%q|%s|%d|%s", fingerprint(s.target, s.schedule), s.paths, s.upstreams, s.hold, s.holdMax, s.retryAfter)
}

// forwards checks what a fallback needs that forwards to upstreams: each of them is
// one endpoint, and so has no place for the rest of a path.
func (s *settings) forwards() error {
	if s.sticky && len(s.upstreams) > 0 {
		return bad("sticky", "true", "no upstreams on a fallback, which would forward to them past Traefik's balancer")
	}
	for i := 0; len(s.upstreams) > 0 && i < len(s.paths); i++ {
		if strings.HasSuffix(s.paths[i], "*") {
			return bad("paths", s.paths[i], "no * on a fallback with upstreams, which are one endpoint each")
		}
	}
	return nil
}

// probed is the path to probe on a server that Traefik knows.
func (s *settings) probed() string { return strings.TrimSuffix(s.paths[0], "*") }
