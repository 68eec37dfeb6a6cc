package caddymodule

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// defaultPath is where MCP servers are mounted unless they say otherwise.
const defaultPath = "/mcp"

// defaultErrorRate is the share of failed calls that makes an upstream second choice
// while another one answers well: half of them.
const defaultErrorRate = 0.5

// Check is how upstreams are asked whether their MCP server lives. Whatever is
// not set here is taken from the `mcp_health` app, and then from the defaults.
type Check struct {
	// The path of the MCP endpoint, as the reverse proxy receives it: the proxy's
	// own `rewrite` is applied. Global placeholders such as `{env.*}` are
	// replaced. Default: `/mcp`
	Path string `json:"path,omitempty"`

	// The Host header of probes. Set it if the upstream refuses other Hosts
	// before the first client came by. Default: what the reverse proxy sets with
	// `header_up Host`, else the Host of clients whose requests were answered,
	// else (until then) the upstream's address.
	Host string `json:"host,omitempty"`

	// Header fields sent with every probe, such as Authorization. Global
	// placeholders such as `{env.*}` and `{file.*}` are replaced, again after each
	// probe: a token that is renewed in its file is taken up without a reload. The
	// values never show in logs, events or the admin API. Default: none
	Header http.Header `json:"header,omitempty"`

	// How often an upstream whose state is settled is asked. Default: `10s`
	Interval caddy.Duration `json:"interval,omitempty"`

	// How long one whole probe may take. Default: `5s`
	Timeout caddy.Duration `json:"timeout,omitempty"`

	// How many dead verdicts in a row take an upstream down. Default: 2
	Fall int `json:"fall,omitempty"`

	// How many living verdicts in a row bring it up again. Default: 1
	Rise int `json:"rise,omitempty"`

	// How often an upstream is asked while a verdict is unconfirmed or it is
	// freshly down; backs off to the interval. Default: `1s`
	Fast caddy.Duration `json:"fast,omitempty"`

	// Whether an upstream gets requests before its first verdict: `optimistic`
	// (it does) or `wait` (it does not). Default: `optimistic`
	Initial string `json:"initial,omitempty"`

	// The protocol generation: `auto`, `modern` (2026-07-28 and later), `legacy`
	// (2025-03-26 to 2025-11-25) or `sse` (2024-11-05). Default: `auto`
	Era string `json:"era,omitempty"`

	// Which answers count as life: `mcp` (those that only an MCP server, or the
	// authorization in front of it, gives) or `any_response` (any HTTP answer).
	// Default: `mcp`
	AliveIf string `json:"alive_if,omitempty"`

	// Whether a stateful server is asked inside one session that is held open,
	// or only what its session router answers. Default: true
	Deep *bool `json:"deep,omitempty"`

	// Tools that the server must list; a missing one makes the upstream second
	// choice. Default: none
	ExpectTool []string `json:"expect_tool,omitempty"`

	// A tool to call in every probe; a failure makes the upstream second choice.
	// The tool must be safe to run that often. Default: none
	Call *ToolCall `json:"call,omitempty"`

	// An upstream that takes longer to answer is second choice. Default: never
	SlowAfter caddy.Duration `json:"slow_after,omitempty"`

	// The path of a health document on the same upstream, which is fetched as
	// well. Default: none
	HealthPath string `json:"health_path,omitempty"`

	// Whether to ask, besides, a question that no cache can answer. Default: false
	Fresh *bool `json:"fresh,omitempty"`

	// An upstream of whose JSON-RPC answers more than this share (0.5 is half), and
	// at least 10 within an interval, report an internal error or a failed tool call
	// is second choice for two intervals, and for two more each time that it fails again
	// soon, up to twenty; if another one answers well, that is: where all fail
	// alike, it is what they are asked. At most one in ten is second choice for that,
	// and at least one may be. Needs the mcp_guard handler. 0 is never. Default: 0.5
	ErrorRate *float64 `json:"error_rate,omitempty"`

	// Whether the endpoint must refuse questions without credentials; one that
	// answers them is second choice. Default: false
	RequireAuth *bool `json:"require_auth,omitempty"`

	// Whether to keep the connection of a good probe open, so that the end
	// of the server is noticed at once. Default: true
	Watch *bool `json:"watch,omitempty"`

	// How long an upstream that was down takes to get its full share of new work; at
	// first it gets hardly any. Sessions that it holds are not held back. Default: 0,
	// at once
	SlowStart caddy.Duration `json:"slow_start,omitempty"`

	// Whether answers that pass through count as proof of life, so that a busy
	// upstream need not be asked. Needs the mcp_guard handler. Default: true
	Passive *bool `json:"passive,omitempty"`
}

// ToolCall is a tool and what to call it with.
type ToolCall struct {
	// The name of the tool.
	Tool string `json:"tool"`

	// Its arguments, a JSON object. Default: `{}`
	Arguments json.RawMessage `json:"arguments,omitempty"`
}

// inherit fills what is not set in c from the app's defaults.
func (c Check) inherit(from Check) Check {
	c.Path = or(c.Path, from.Path)
	c.Host = or(c.Host, from.Host)
	if c.Header == nil {
		c.Header = from.Header
	}
	c.Interval = or(c.Interval, from.Interval)
	c.Timeout = or(c.Timeout, from.Timeout)
	c.Fall = or(c.Fall, from.Fall)
	c.Rise = or(c.Rise, from.Rise)
	c.Fast = or(c.Fast, from.Fast)
	c.Initial = or(c.Initial, from.Initial)
	c.Era = or(c.Era, from.Era)
	c.AliveIf = or(c.AliveIf, from.AliveIf)
	c.Deep = or(c.Deep, from.Deep)
	if c.ExpectTool == nil {
		c.ExpectTool = from.ExpectTool
	}
	c.Call = or(c.Call, from.Call)
	c.SlowAfter = or(c.SlowAfter, from.SlowAfter)
	c.HealthPath = or(c.HealthPath, from.HealthPath)
	c.Fresh = or(c.Fresh, from.Fresh)
	c.RequireAuth = or(c.RequireAuth, from.RequireAuth)
	c.ErrorRate = or(c.ErrorRate, from.ErrorRate)
	c.Watch = or(c.Watch, from.Watch)
	c.Passive = or(c.Passive, from.Passive)
	c.SlowStart = or(c.SlowStart, from.SlowStart)
	return c
}

func or[T comparable](a, b T) T {
	var zero T
	if a == zero {
		return b
	}
	return a
}

// resolved is c with its placeholders replaced, those of headers aside, and its
// path filled in.
func (c Check) resolved() Check {
	repl := caddy.NewReplacer()
	c.Path = or(repl.ReplaceKnown(c.Path, ""), defaultPath)
	c.Host = repl.ReplaceKnown(c.Host, "")
	return c
}

// headerNow is h with its placeholders replaced by what they are now, without the
// line end that a file may have. Where one is empty, as a file is that cannot be read
// or is being written, the value stays what it was before.
func headerNow(h, before http.Header) http.Header {
	repl := caddy.NewReplacer()
	now := make(http.Header, len(h))
	for name, values := range h {
		for _, v := range values {
			value, err := repl.ReplaceOrErr(v, true, false)
			if old, at := before.Values(name), len(now.Values(name)); err != nil && at < len(old) {
				value = old[at]
			} else if err != nil {
				value = repl.ReplaceKnown(v, "")
			}
			now.Add(name, strings.TrimSpace(value))
		}
	}
	return now
}

// target is what the core is told to ask at url.
func (c Check) target(url string) mcphealth.Target {
	t := mcphealth.Target{
		URL:         url,
		Host:        c.Host,
		Header:      c.Header,
		AliveIf:     mcphealth.AliveIf(c.AliveIf),
		Shallow:     c.Deep != nil && !*c.Deep,
		ExpectTools: c.ExpectTool,
		SlowAfter:   time.Duration(c.SlowAfter),
		HealthPath:  c.HealthPath,
		Fresh:       c.Fresh != nil && *c.Fresh,
		RequireAuth: c.RequireAuth != nil && *c.RequireAuth,
		Timeout:     time.Duration(c.Timeout),
	}
	if c.Era != "auto" {
		t.Era = mcphealth.Era(c.Era)
	}
	if c.Call != nil {
		t.CallTool, t.CallArgs = c.Call.Tool, string(c.Call.Arguments)
	}
	return t.WithDefaults()
}

// schedule is when the core asks. The limit on probes at once is the process's.
func (c Check) schedule() mcphealth.Schedule {
	s := mcphealth.Schedule{
		Interval:  time.Duration(c.Interval),
		Fast:      time.Duration(c.Fast),
		Fall:      c.Fall,
		Rise:      c.Rise,
		Wait:      c.Initial == "wait",
		NoWatch:   c.Watch != nil && !*c.Watch,
		NoTraffic: c.Passive != nil && !*c.Passive,
		ErrorRate: defaultErrorRate,
	}
	if c.ErrorRate != nil {
		s.ErrorRate = *c.ErrorRate
	}
	return s.WithDefaults()
}

// validate refuses what the core would refuse, and the words it does not know.
func (c Check) validate() error {
	if err := c.validPlaceholders(); err != nil {
		return err
	}
	switch path := withoutPlaceholders(c.Path); {
	case c.Path != "" && c.Path[0] != '/' && c.Path[0] != '{':
		return fmt.Errorf("path '%s': want a path that begins with /", c.Path)
	case strings.ContainsAny(path, "*#"):
		return fmt.Errorf("path '%s': want the path of the endpoint, not a matcher: without * and #", c.Path)
	case !isPath(path):
		return fmt.Errorf("path '%s': want the path of a URL, without line breaks, and %% only as in %%20", c.Path)
	}
	if c.Era == string(mcphealth.EraUnknown) {
		return fmt.Errorf("era '%s': want auto, modern, legacy or sse", c.Era)
	}
	if c.Initial != "" && c.Initial != "optimistic" && c.Initial != "wait" {
		return fmt.Errorf("initial '%s': want optimistic or wait", c.Initial)
	}
	if c.Call != nil && c.Call.Tool == "" {
		return fmt.Errorf("call: want the name of a tool")
	}
	if slices.Contains(c.ExpectTool, "") {
		return fmt.Errorf("expect_tool: want the name of a tool")
	}
	for name := range c.Header {
		if http.CanonicalHeaderKey(name) == "Host" {
			return fmt.Errorf("header Host: use the option 'host'")
		}
	}
	t := c.target("http://localhost/")
	t.Host = withoutPlaceholders(t.Host)
	if err := t.Validate(); err != nil {
		return err
	}
	if c.Timeout < 0 || c.SlowAfter < 0 || c.SlowStart < 0 {
		return fmt.Errorf("want a positive duration")
	}
	return c.schedule().Validate()
}

// isPath reports whether a request can be made for it: if not, no upstream could be probed.
func isPath(path string) bool {
	_, err := url.Parse("http://localhost/" + path)
	return err == nil
}

// validPlaceholders refuses those of requests: a probe is none.
func (c Check) validPlaceholders() error {
	const request, want = "{http.", "a probe is no client's request, and has nothing to put there: want a global placeholder, such as {env.*} or {file.*}, or the value"
	for _, option := range c.texts() {
		if strings.Contains(option[1], request) {
			return fmt.Errorf("%s '%s': %s", option[0], option[1], want)
		}
	}
	for name, values := range c.Header {
		if slices.ContainsFunc(values, func(v string) bool { return strings.Contains(v, request) }) {
			return fmt.Errorf("header %s: %s", name, want)
		}
	}
	return nil
}

// texts are the options in which placeholders may stand, and their values.
func (c Check) texts() [][2]string { return [][2]string{{"path", c.Path}, {"host", c.Host}} }

// withoutPlaceholders is s with a letter for each.
func withoutPlaceholders(s string) string { return caddy.NewEmptyReplacer().ReplaceAll(s, "x") }

// contradictions refuses what cannot be meant together, though each by itself can.
// Of values from two places (this check, and the app's defaults) the shorter interval
// bounds fast without a word.
func (c Check) contradictions() error {
	switch {
	case c.Interval > 0 && c.Fast > c.Interval:
		return fmt.Errorf("fast %v is longer than interval %v: want at most that, since fast is how often an upstream in doubt is asked",
			time.Duration(c.Fast), time.Duration(c.Interval))
	case c.Timeout > 0 && c.SlowAfter >= c.Timeout:
		return fmt.Errorf("slow_after %v can never be: after the timeout of %v an upstream counts as dead; want less, or a longer timeout",
			time.Duration(c.SlowAfter), time.Duration(c.Timeout))
	case c.HealthPath != "" && c.HealthPath == c.Path:
		return fmt.Errorf("health_path %s is the MCP endpoint itself, where a GET opens a stream: want the path of a health document", c.HealthPath)
	case c.Era == string(mcphealth.SSE) && c.Deep != nil && !*c.Deep:
		return fmt.Errorf("era sse contradicts deep off: such a server is asked by a handshake in its own stream; leave one of them out")
	}
	return nil
}

// atLine says where in the Caddyfile err was found; nil stays nil.
func atLine(d *caddyfile.Dispenser, err error) error {
	if err == nil {
		return nil
	}
	return d.WrapErr(err)
}

// whole refuses what cannot be meant once everything is filled in.
func (c Check) whole() error {
	for _, option := range c.texts() {
		if withoutPlaceholders(option[1]) != option[1] {
			return fmt.Errorf("%s '%s': there is no such placeholder; want one such as {env.*} or {file.*}, or the value", option[0], option[1])
		}
	}
	if c.Interval > 0 {
		c.Fast = 0 // of another place, maybe
	}
	c.Interval = or(c.Interval, caddy.Duration(mcphealth.Schedule{}.WithDefaults().Interval))
	c.Timeout = or(c.Timeout, caddy.Duration(mcphealth.DefaultTimeout))
	return c.contradictions()
}

// options are the names that unmarshalOption knows, with their arguments.
var options = map[string]string{
	"path":         "<path>",
	"host":         "<host>",
	"header":       "<name> <value>",
	"interval":     "<duration>",
	"timeout":      "<duration>",
	"fall":         "<count>",
	"rise":         "<count>",
	"fast":         "<duration>",
	"initial":      "optimistic|wait",
	"era":          "auto|modern|legacy|sse",
	"alive_if":     "mcp|any_response",
	"deep":         "on|off",
	"expect_tool":  "<name>",
	"call":         "<tool> [<json>]",
	"slow_after":   "<duration>",
	"health_path":  "<path>",
	"fresh":        "on|off",
	"require_auth": "on|off",
	"error_rate":   "<percent>|off",
	"watch":        "on|off",
	"passive":      "on|off",
	"slow_start":   "<duration>",
}

// repeatable are the options that may be given more than once.
var repeatable = []string{"header", "expect_tool"}

// unmarshalOption reads the option that d stands on; name is its name without
// any prefix, seen the names read before. Names it does not know are an error.
func (c *Check) unmarshalOption(d *caddyfile.Dispenser, name string, seen map[string]bool) error {
	written := d.Val()
	usage, known := options[name]
	if !known {
		return d.Errf("unrecognized option '%s'", written)
	}
	if seen[name] && !slices.Contains(repeatable, name) {
		return d.Errf("option '%s' is given twice", written)
	}
	seen[name] = true
	args := d.RemainingArgs()
	want := 1
	switch name {
	case "header":
		want = 2
	case "call":
		want = max(1, min(len(args), 2))
	}
	if len(args) != want {
		return d.Errf("wrong argument count after '%s': want %s %s", written, written, usage)
	}

	err := c.set(name, args)
	if err == nil {
		err = c.validate()
	}
	if err != nil {
		return d.Errf("bad value of '%s': %v", written, err)
	}
	return nil
}

// set gives the option of that name its value.
//
//nolint:gocyclo // one case per option
func (c *Check) set(name string, args []string) (err error) {
	switch arg := args[0]; name {
	case "path":
		c.Path = arg
	case "host":
		c.Host = arg
	case "header":
		if c.Header == nil {
			c.Header = make(http.Header)
		}
		c.Header.Add(arg, args[1])
	case "interval":
		c.Interval, err = parseDuration(arg)
	case "timeout":
		c.Timeout, err = parseDuration(arg)
	case "fall":
		c.Fall, err = parseCount(arg)
	case "rise":
		c.Rise, err = parseCount(arg)
	case "fast":
		c.Fast, err = parseDuration(arg)
	case "initial":
		c.Initial = arg
	case "era":
		c.Era = arg
	case "alive_if":
		c.AliveIf = arg
	case "deep":
		c.Deep, err = parseSwitch(arg)
	case "expect_tool":
		c.ExpectTool = append(c.ExpectTool, arg)
	case "call":
		c.Call = &ToolCall{Tool: arg}
		if len(args) == 2 {
			if !json.Valid([]byte(args[1])) {
				return fmt.Errorf("arguments '%s': want a JSON object", args[1])
			}
			c.Call.Arguments = json.RawMessage(args[1])
		}
	case "slow_after":
		c.SlowAfter, err = parseDuration(arg)
	case "health_path":
		c.HealthPath = arg
	case "fresh":
		c.Fresh, err = parseSwitch(arg)
	case "require_auth":
		c.RequireAuth, err = parseSwitch(arg)
	case "error_rate":
		c.ErrorRate, err = parseShare(arg)
	case "watch":
		c.Watch, err = parseSwitch(arg)
	case "passive":
		c.Passive, err = parseSwitch(arg)
	case "slow_start":
		c.SlowStart, err = parseDuration(arg)
	}
	return err
}

func parseDuration(s string) (caddy.Duration, error) {
	dur, err := caddy.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("'%s': want a duration such as 10s", s)
	}
	if dur <= 0 {
		return 0, fmt.Errorf("'%s': want a positive duration", s)
	}
	return caddy.Duration(dur), nil
}

func parseCount(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("'%s': want a number, 1 or more", s)
	}
	return n, nil
}

func parseShare(s string) (*float64, error) {
	if s == "off" {
		return new(float64), nil
	}
	n, err := strconv.ParseFloat(strings.TrimSuffix(s, "%"), 64)
	if err != nil || !strings.HasSuffix(s, "%") || !(n > 0 && n < 100) { // NaN is neither
		return nil, fmt.Errorf("'%s': want a percentage such as 50%%, or off", s)
	}
	n /= 100
	return &n, nil
}

func parseSwitch(s string) (*bool, error) {
	on := s == "on"
	if !on && s != "off" {
		return nil, fmt.Errorf("'%s': want on or off", s)
	}
	return &on, nil
}

// unmarshalBlock reads a block that holds nothing but check options and what
// extra takes; extra reports whether it knew the option that d stands on.
func (c *Check) unmarshalBlock(d *caddyfile.Dispenser, extra func(name string) (bool, error)) error {
	seen := make(map[string]bool)
	for d.NextBlock(0) {
		name := d.Val()
		if extra != nil {
			known, err := extra(name)
			if err != nil {
				return err
			}
			if known {
				continue
			}
		}
		if err := c.unmarshalOption(d, name, seen); err != nil {
			return err
		}
	}
	return atLine(d, c.contradictions())
}
