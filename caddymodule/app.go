// Package caddymodule puts MCP-aware health into Caddy: a selection policy and an
// upstream source which send requests only to upstreams whose MCP server lives, a
// handler which keeps clients working while none does, and the app behind them.
//
// It knows Caddy's life cycle and configuration; what an MCP server is, only
// package mcphealth knows.
package caddymodule

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyevents"

	"github.com/mcphealth/mcphealth/mcphealth"
)

func init() {
	caddy.RegisterModule(new(App))
	httpcaddyfile.RegisterGlobalOption("mcp_health", parseGlobalOption)
}

// App checks the health of MCP servers for the `mcp_health` selection policy and
// upstream source. It need not be configured: what stands here are defaults for
// every check.
//
// State survives a reload: an upstream whose settings did not change keeps its
// verdict, its counters and its schedule.
//
// It emits the events `healthy` and `unhealthy` when an upstream changes between
// up (or degraded) and down. Event data:
//
// Key | Meaning
// ----|--------
// `upstream` | The upstream's address as configured
// `path` | The path that is asked
// `host` | The Host header, if configured
// `from`, `to` | State: `up`, `degraded`, `down` or `unknown`
// `reason` | One word; see docs/verdicts.md
//
// The events `budget_burning` and `budget_ok` say that an endpoint spends its error
// budget too fast, and that it does not any more:
//
// Key | Meaning
// ----|--------
// `path` | The endpoint
// `severity` | `page` or `ticket`; of `budget_ok`, what it was
// `objective` | The share of good requests that is asked for
// `burn_rate_5m`, `…_30m`, `…_1h`, `…_6h`, `…_3d` | How many times too fast, over each window
type App struct {
	Check
	Fleet

	// What share of requests should be answered well; burn rates are measured by it.
	// Default: 0.999
	Objective float64 `json:"objective,omitempty"`

	ctx    caddy.Context
	logger *zap.Logger
	events *caddyevents.App
	unwind context.CancelFunc // ends the goroutine that Start began
	sharer *sharer            // nil: nothing is shared

	mu     sync.Mutex
	groups []*group
	honest map[*http.Transport]*atomic.Bool // whether one of its connections spoke HTTP/2

	// Events wait until every app has started: before that, the events app still
	// takes subscriptions, without a lock.
	eventMu sync.Mutex
	ready   bool
	queue   []event
}

type event struct {
	name string
	data map[string]any
}

// CaddyModule returns the Caddy module information.
func (*App) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "mcp_health",
		New: func() caddy.Module { return new(App) },
	}
}

// Provision sets up the app.
func (a *App) Provision(ctx caddy.Context) error {
	a.ctx = ctx
	a.logger = ctx.Logger()
	app, err := ctx.App("events")
	if err != nil {
		return fmt.Errorf("getting events app: %w", err)
	}
	a.events = app.(*caddyevents.App)
	if err := a.events.On("started", eventHandler(a.allStarted)); err != nil {
		return fmt.Errorf("waiting for the start: %w", err)
	}
	if err := registerMetrics(ctx); err != nil {
		return fmt.Errorf("registering metrics: %w", err)
	}
	return a.provisionShare()
}

// Validate checks the defaults.
func (a *App) Validate() error {
	if a.Objective != 0 {
		if err := validObjective(a.Objective); err != nil {
			return fmt.Errorf("objective %v: %w", a.Objective, err)
		}
	}
	return errors.Join(a.validate(), a.validFleet(), a.contradictions())
}

// maxObjective is the highest objective: 0.99999. Above it, a single bad request
// of a month burns the budget of years.
const maxObjective = 0.99999

func validObjective(share float64) error {
	if !(share >= 0.5 && share <= maxObjective) {
		return fmt.Errorf("want a share of requests from 0.5 to %v, such as 0.999", maxObjective)
	}
	return nil
}

// appOf returns the app of the configuration that ctx belongs to.
func appOf(ctx caddy.Context) (*App, error) {
	app, err := ctx.App("mcp_health")
	if err != nil {
		return nil, fmt.Errorf("getting mcp_health app: %w", err)
	}
	return app.(*App), nil
}

// adopt has g started and stopped with the app.
func (a *App) adopt(g *group) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.groups = append(a.groups, g)
}

func (a *App) allGroups() []*group {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.groups)
}

// Start begins to check. All handlers are provisioned by now.
func (a *App) Start() error {
	apps.add(a)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.govern()
	ctx, cancel := context.WithCancel(context.Background())
	a.unwind = cancel
	go ledger.keepBudgets(ctx)
	if a.sharer != nil {
		a.sharer.start()
	}
	for _, g := range a.groups {
		g.start()
	}
	return nil
}

// govern has what holds for the whole process be as a says.
func (a *App) govern() {
	objective.Store(math.Float64bits(a.Objective))
	scheduler.SetLimits(a.limits())
}

// Stop gives the checkers back. They go on for a while, for the next configuration may
// want them; if the process exits, all ends with the servers.
func (a *App) Stop() error {
	if !caddy.Exiting() {
		a.stop()
	}
	return nil
}

func (a *App) stop() {
	apps.remove(a)
	serving.CompareAndSwap(a, nil)
	if other := apps.current(); other != nil { // that before us, if we could not start
		other.govern()
		a.leave(other)
	}
	a.mu.Lock()
	groups := a.groups
	if a.unwind != nil {
		a.unwind()
	}
	a.mu.Unlock()
	for _, g := range groups {
		g.stop()
	}
	if a.sharer != nil {
		a.sharer.stop()
	}
}

// announce logs a change of state and emits an event for it.
func (a *App) announce(e *entry, c mcphealth.Change) {
	logChange(a.logger, e, c)
	name := ""
	switch {
	case c.To == mcphealth.Down:
		name = "unhealthy"
	case isUp(c.To) && !isUp(c.From):
		name = "healthy"
	default:
		return
	}
	a.emit(event{name, map[string]any{
		"upstream": e.upstream,
		"path":     e.path,
		"host":     e.host,
		"from":     string(c.From),
		"to":       string(c.To),
		"reason":   string(c.Reason),
	}})
}

// announceBudget logs that an endpoint's error budget is spent too fast, or not any
// more, and emits an event for it.
func (a *App) announceBudget(path string, was, is mcphealth.Severity, all []mcphealth.Availability) {
	name, severity, level, message := "budget_burning", is, zapcore.WarnLevel, "error budget is spent too fast"
	if is == mcphealth.SeverityNone {
		name, severity, level, message = "budget_ok", was, zapcore.InfoLevel, "error budget is not spent too fast any more"
	}
	fields := []zap.Field{zap.String("path", path), zap.String("severity", string(severity)), zap.Float64("objective", objectiveNow())}
	data := map[string]any{"path": path, "severity": string(severity), "objective": objectiveNow()}
	for _, w := range all {
		rate := math.Round(w.BurnRate*10) / 10
		data["burn_rate_"+w.Window] = rate
		fields = append(fields, zap.Float64("burn_rate_"+w.Window, rate))
	}
	a.logger.Log(level, message, fields...)
	a.emit(event{name, data})
}

// emit lets the event out, once every app has started.
func (a *App) emit(ev event) {
	a.eventMu.Lock()
	if !a.ready {
		a.queue = append(a.queue, ev)
		a.eventMu.Unlock()
		return
	}
	a.eventMu.Unlock()
	a.send(ev)
}

// send has the events app call the handlers, which are not ours.
func (a *App) send(ev event) {
	defer caught("a handler of the event " + ev.name)
	a.events.Emit(a.ctx, ev.name, ev.data)
}

// leave has other let out the events of which a, never ready, did not.
func (a *App) leave(other *App) {
	a.eventMu.Lock()
	queue := a.queue
	a.queue = nil
	a.eventMu.Unlock()
	for _, ev := range queue {
		other.emit(ev)
	}
}

// serving is the configuration that started last, with all of its apps.
var serving atomic.Pointer[App]

// allStarted notes who is in a list now, and lets the events out that came while the apps
// were being started.
func (a *App) allStarted(context.Context, caddy.Event) error {
	serving.Store(a)
	for _, g := range a.allGroups() {
		if s := g.static.Load(); s != nil {
			for _, m := range *s {
				m.listed()
			}
		}
	}
	for {
		a.eventMu.Lock()
		queue := a.queue
		a.queue = nil
		a.ready = len(queue) == 0
		a.eventMu.Unlock()
		if len(queue) == 0 {
			return nil
		}
		for _, ev := range queue {
			a.send(ev)
		}
	}
}

// logChange writes one line per transition.
func logChange(log *zap.Logger, e *entry, c mcphealth.Change) {
	level, message := zapcore.InfoLevel, "upstream is "+string(c.To)
	if c.To == mcphealth.Down || c.To == mcphealth.UpDegraded && c.From == mcphealth.Up {
		level = zapcore.WarnLevel
	}
	if ce := log.Check(level, message); ce != nil {
		ce.Write(
			zap.String("upstream", e.upstream),
			zap.String("path", e.path),
			zap.String("host", e.host),
			zap.String("from", string(c.From)),
			zap.String("to", string(c.To)),
			zap.String("reason", string(c.Reason)),
			zap.String("detail", c.Detail),
		)
	}
}

// caught ends a panic in what a goroutine of ours does for others, where it would end
// the process. Defer it.
func caught(where string) {
	if v := recover(); v != nil {
		caddy.Log().Named("mcp_health").Error("panic", zap.String("in", where), zap.Any("panic", v), zap.Stack("stack"))
	}
}

func isUp(s mcphealth.State) bool { return s == mcphealth.Up || s == mcphealth.UpDegraded }

// pathOf is what is shown of a URL: its path.
func pathOf(rawURL string) string {
	u, err := url.Parse(rawURL)
	if err != nil {
		return ""
	}
	return shownPath(u.RequestURI())
}

// shownPath leaves out the query, which may hold a key.
func shownPath(path string) string {
	before, _, cut := strings.Cut(path, "?")
	if cut {
		return before + "?…"
	}
	return before
}

// apps are those started and not stopped, oldest first: during a reload there
// are two, and if the new one fails, the old one goes on.
var apps appList

type appList struct {
	mu  sync.Mutex
	all []*App
}

func (l *appList) add(a *App) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, a)
}

func (l *appList) remove(a *App) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = slices.DeleteFunc(l.all, func(o *App) bool { return o == a })
}

func (l *appList) list() []*App {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.all)
}

func (l *appList) current() *App {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.all) == 0 {
		return nil
	}
	return l.all[len(l.all)-1]
}

// eventHandler is a function that handles events.
type eventHandler func(context.Context, caddy.Event) error

// Handle calls the function.
func (h eventHandler) Handle(ctx context.Context, e caddy.Event) error { return h(ctx, e) }

// parseGlobalOption reads the global option `mcp_health`. Syntax:
//
//	mcp_health {
//	    objective   <share>
//	    path        <path>
//	    host        <host>
//	    header      <name> <value>
//	    interval    <duration>
//	    timeout     <duration>
//	    fall        <count>
//	    rise        <count>
//	    fast        <duration>
//	    initial     optimistic|wait
//	    era         auto|modern|legacy|sse
//	    alive_if    mcp|any_response
//	    deep        on|off
//	    expect_tool <name>
//	    call        <tool> [<json>]
//	    slow_after  <duration>
//	    health_path <path>
//	    fresh       on|off
//	    require_auth on|off
//	    error_rate  <percent>|off
//	    watch       on|off
//	    passive     on|off
//	    slow_start   <duration>
//	    probe_ceiling <probes>/s
//	    probe_budget  <probes>/s <edges>
//	    share         <redis url>
//	}
//
// All but objective, probe_ceiling, probe_budget and share are defaults for the checks of all handlers.
func parseGlobalOption(d *caddyfile.Dispenser, existing any) (any, error) {
	app := new(App)
	if err := app.UnmarshalCaddyfile(d); err != nil {
		return nil, err
	}
	if existing != nil {
		return nil, d.Err("global option 'mcp_health' is given twice")
	}
	return httpcaddyfile.App{Name: "mcp_health", Value: caddyconfig.JSON(app, nil)}, nil
}

// UnmarshalCaddyfile reads the block of the global option; see parseGlobalOption.
func (a *App) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the name
	if d.NextArg() {
		return d.ArgErr()
	}
	return a.unmarshalBlock(d, func(name string) (bool, error) {
		if name != "objective" {
			return a.unmarshalFleet(d, name)
		}
		if a.Objective != 0 {
			return true, d.Err("option 'objective' is given twice")
		}
		if !d.NextArg() || d.CountRemainingArgs() > 0 {
			return true, d.ArgErr()
		}
		share, err := strconv.ParseFloat(d.Val(), 64)
		if err != nil {
			err = fmt.Errorf("want a share of requests such as 0.999")
		} else {
			err = validObjective(share)
		}
		if err != nil {
			return true, d.Errf("bad value of 'objective': '%s': %v", d.Val(), err)
		}
		a.Objective = share
		return true, nil
	})
}

// Interface guards
var (
	_ caddy.App             = (*App)(nil)
	_ caddy.Provisioner     = (*App)(nil)
	_ caddy.Validator       = (*App)(nil)
	_ caddyfile.Unmarshaler = (*App)(nil)
)
