//go:build go1.21

// Package traefikplugin is a Traefik middleware that keeps MCP clients through
// restarts of MCP servers. On a service's router it drives Traefik's own load
// balancer by real MCP probes; on a fallback router it answers 503, or waits,
// where Traefik would answer 404. Traefik interprets it with Yaegi (docs/adr/0003).
package traefikplugin

import (
	"context"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// CreateConfig is called by Traefik before it fills in what the user configured.
func CreateConfig() *Config { return &Config{} }

// New is called by Traefik for each router that uses the middleware, again on
// each reload; ctx ends with the configuration. In the good case it returns next:
// requests never enter the interpreter. It fails on a bad configuration only.
func New(ctx context.Context, next http.Handler, config *Config, name string) (h http.Handler, err error) {
	defer func() {
		if v := recover(); v != nil { // it would end Traefik's reloads for good
			complain("New", v)
			h = next
			err = nil
		}
	}()
	set, err := config.parse()
	if err != nil {
		return nil, err
	}
	if !set.sticky && config != nil && config.SessionKey+config.SessionGrace != "" {
		warnOnce("%s: sessionKey and sessionGrace have no effect without sticky", name)
	}
	k := &keeper{set: set, group: join(groupOf(ctx, name)), router: routerOf(ctx), door: placeOf(ctx, "entryPointName"), above: aboveOf(ctx), ctx: ctx}
	l := live(ctx)
	l.later(func() { k.group.leave() })
	role, err := k.role(l, next)
	if err != nil {
		return nil, err
	}
	switch role {
	case modeHealth:
		if k.entry != nil {
			return k.entry, nil
		}
		return next, nil
	case modeFallback:
		if err := set.forwards(); err != nil {
			return nil, err
		}
		return k.beside(l, next), nil
	case modeGate:
		return k.guard(l, next), nil
	}
	return next, nil
}

// role finds out what to do here, and takes over next if that is a balancer.
func (k *keeper) role(l *life, next http.Handler) (string, error) {
	mode := k.set.mode
	if mode == modeAuto || mode == modeHealth {
		if r := steer(k.set, k, next); r != nil {
			l.later(func() { r.drop() })
			if k.set.sticky {
				if err := k.stick(r); err != nil {
					return "", err
				}
			}
			l.now(k.group.add(r.member(k)))
			return modeHealth, nil
		}
	}
	if mode == modeFallback || mode == modeAuto && isNoop(next) {
		return modeFallback, nil
	}
	if mode == modeHealth && isNoop(next) { // which would answer 418
		warnOnce("%s: mode health in front of noop@internal: this is a fallback", where(k.group.key))
		return modeFallback, nil
	}
	if k.set.sticky {
		return "", errSticky(where(k.group.key), fmt.Sprintf("next is %T, not Traefik's load balancer of servers", next),
			"make this the last middleware of a service's router")
	}
	if len(k.set.upstreams) > 0 {
		if leadsToNoop(next) {
			warnOnce("%s: noop@internal comes after other middlewares, and answers 418: on a fallback router make this the last middleware", where(k.group.key))
		} else if mode != modeGate {
			tell("%s: next is %T, not Traefik's load balancer of servers: gate over the configured upstreams", where(k.group.key), next)
		}
		return modeGate, nil
	}
	warnOnce("%s: nothing to do: next is %T, not Traefik's load balancer of servers, and no upstreams are set. "+
		"Make this the last middleware of a service's router, or set upstreams", where(k.group.key), next)
	return "", nil
}

// beside makes a fallback for next's router.
func (k *keeper) beside(l *life, next http.Handler) http.Handler {
	all := k.set.acquireAll()
	l.hold(all)
	way := k.direct(all)
	for i := 0; i < len(all); i++ {
		l.later(all[i].follow(func() {
			defer func() { complain("fallback", recover()) }()
			if way.handler() != nil {
				k.group.wake()
			}
		}))
	}
	l.now(k.group.add(way))
	return k.fallback(next)
}

// guard makes a gate in front of next.
func (k *keeper) guard(l *life, next http.Handler) http.Handler {
	all := k.set.acquireAll()
	l.hold(all)
	open := &atomic.Int32{}
	canHold := k.set.hold > 0
	m := &member{router: k.router, door: k.door, above: k.above, ctx: k.ctx, servers: all, handler: func() http.Handler {
		if best(all, canHold) == mcphealth.TierDown { // open may be late, and a fallback's own way be faster
			return nil
		}
		return next
	}}
	update := func() {
		defer func() { complain("gate", recover()) }()
		if best(all, canHold) == mcphealth.TierDown {
			open.Store(0)
			return
		}
		open.Store(1)
		k.group.wake()
	}
	for i := 0; i < len(all); i++ {
		l.later(all[i].follow(func() { update() }))
	}
	update()
	l.now(k.group.add(m))
	return k.gate(next, open)
}

// life is how long an instance lives: it ends with ctx, what it shares a while
// later, so that the next configuration finds it as it was.
type life struct {
	ctx context.Context
}

func live(ctx context.Context) *life { return &life{ctx: ctx} }

// now has f called as the configuration ends.
func (l *life) now(f func()) {
	context.AfterFunc(l.ctx, func() {
		defer func() { complain("the end of a configuration", recover()) }()
		f()
	})
}

// later has f called some time after that.
func (l *life) later(f func()) {
	l.now(func() {
		time.AfterFunc(linger, func() {
			defer func() { complain("the end of a configuration", recover()) }()
			f()
		})
	})
}

// hold releases servers later.
func (l *life) hold(all []*server) {
	l.later(func() {
		for i := 0; i < len(all); i++ {
			release(all[i])
		}
	})
}

var lonely atomic.Int32

// atRouter stands between the two names of a group's key.
const atRouter = " on router "

// groupOf is what the instances on a service's router and on its fallback router
// have in common: the middleware, and the router's name without its provider and
// without "-fallback", for two routers of one provider need two names. Kubernetes'
// go on after that, with a hash of the rule.
func groupOf(ctx context.Context, name string) string {
	place := routerOf(ctx)
	if strings.HasPrefix(place, onService) { // other services of its router are others
		return name + " on " + place
	}
	router := commonName(place)
	if router == "" { // nobody to hand over to
		return name + atRouter + "?" + strconv.Itoa(int(lonely.Add(1)))
	}
	return name + atRouter + router
}

// commonName is what a router's name and its fallback's have in common.
func commonName(router string) string {
	router, _, _ = strings.Cut(router, "@")
	return strings.Replace(strings.TrimSuffix(router, "-fallback"), "-fallback-", "-", 1)
}

// where is the group's name for a log line, the same on each reload.
func where(key string) string {
	known, _, _ := strings.Cut(key, atRouter+"?")
	return known
}

// maxDepth is how many contexts are looked through for the router's name.
const maxDepth = 40

// onService begins the place of a middleware that is a service's, not a router's.
const onService = "service "

// routerOf reads the name of the router being built, or of the service, from the logger
// that Traefik keeps in its context: nothing else tells a middleware where it stands.
func routerOf(ctx context.Context) string {
	if service := placeOf(ctx, "serviceName"); service != "" {
		return onService + service
	}
	return placeOf(ctx, "routerName")
}

// aboveOf is the routers that a request passes before that one (parentRefs, since Traefik
// 3.6), by what their names have in common with those above a fallback.
func aboveOf(ctx context.Context) string {
	all := placesOf(ctx, "routerName")
	above := ""
	for i := 0; i < len(all)-1; i++ {
		above += commonName(all[i]) + " "
	}
	return above
}

// placeOf reads a field of that logger.
func placeOf(ctx context.Context, field string) string {
	all := placesOf(ctx, field)
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1]
}

// placesOf reads a field that the logger has once for each level.
func placesOf(ctx context.Context, field string) (names []string) {
	defer func() {
		if v := recover(); v != nil {
			names = nil
		}
	}()
	v := reflect.ValueOf(ctx)
	for i := 0; i < maxDepth; i++ {
		v = elem(v)
		if v.Kind() != reflect.Struct {
			return nil
		}
		if all := loggerField(v.FieldByName("val"), field); len(all) > 0 {
			return all
		}
		v = v.FieldByName("Context")
	}
	return nil
}

// loggerField is the values of a field in a zerolog.Logger's context.
func loggerField(logger reflect.Value, key string) []string {
	logger = elem(logger)
	if logger.Kind() != reflect.Struct {
		return nil
	}
	b := logger.FieldByName("context")
	if b.Kind() != reflect.Slice || b.Type().Elem().Kind() != reflect.Uint8 {
		return nil
	}
	var all []string
	parts := strings.Split(string(b.Bytes()), `"`+key+`":"`)
	for i := 1; i < len(parts); i++ {
		value, _, _ := strings.Cut(parts[i], `"`)
		if value != "" {
			all = append(all, value)
		}
	}
	return all
}

func elem(v reflect.Value) reflect.Value {
	for v.Kind() == reflect.Interface || v.Kind() == reflect.Ptr {
		v = v.Elem()
	}
	return v
}
