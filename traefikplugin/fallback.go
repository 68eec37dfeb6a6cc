//go:build go1.21

package traefikplugin

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/url"
	"reflect"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// isNoop: next is noop@internal, which answers 418. Traefik's services have no
// name that a plugin could read; the function that makes this one has.
func isNoop(next http.Handler) bool { return isNoopFunc(reflect.ValueOf(next)) }

func isNoopFunc(v reflect.Value) bool {
	if v.Kind() != reflect.Func || v.IsNil() {
		return false
	}
	f := runtime.FuncForPC(v.Pointer())
	return f != nil && strings.Contains(f.Name(), "InternalHandlers")
}

// leadsToNoop: other middlewares come next, and then noop@internal. Traefik's keep what
// follows them in a field next, or handler.
func leadsToNoop(next http.Handler) bool {
	v := elem(reflect.ValueOf(next))
	for i := 0; i < maxDepth && v.Kind() == reflect.Struct; i++ {
		follows := v.FieldByName("next")
		if !follows.IsValid() {
			follows = v.FieldByName("handler")
		}
		v = elem(follows)
	}
	return isNoopFunc(v)
}

// fallback is the handler for a router of low priority: it gets what no service's
// router takes, among that the requests for one that is away.
func (k *keeper) fallback(next http.Handler) http.Handler {
	other := next
	if isNoop(next) {
		other = http.NotFoundHandler()
	}
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		switch {
		case k.set.statusPath != "" && req.URL.Path == k.set.statusPath:
			serveStatus(rw, req)
		case !k.set.isMCP(req.URL.Path):
			other.ServeHTTP(rw, req)
		case k.refused():
			other.ServeHTTP(rw, req)
		case k.set.absentAfter > 0 && k.group.absent(time.Now()) > k.set.absentAfter:
			other.ServeHTTP(rw, req) // not coming back: say so
		default:
			k.serve(rw, req, func() http.Handler { return k.successor() })
		}
	})
}

// refused reports whether a request that came to a fallback did so because the
// service's router is there and did not want it. Of a configuration that has ended
// counts what it had: the next one's routers have not been asked.
func (k *keeper) refused() bool {
	if k.ctx.Err() != nil {
		return k.group.hadRoute(configOf(k.ctx))
	}
	names := k.group.routers()
	if len(names) > 0 {
		warnOnce("%s: the fallback got a request for an MCP path that router %s did not match. Give both the same rule and entryPoints: "+
			"while that router is away such requests wait, and then reach its service", where(k.group.key), names[0])
	}
	return len(names) > 0
}

// successor is where a fallback's held requests go on. Where two routers could have
// matched them, nothing tells which. The router of another entry point is not waited for.
func (k *keeper) successor() http.Handler {
	names := k.group.routers()
	if len(names) == 0 {
		k.renamed()
	}
	if len(names) < 2 {
		elsewhere := false
		h := k.group.pick(func(m *member) bool {
			same, sure := k.sameDoor(m)
			elsewhere = elsewhere || sure && !same
			return same
		})
		if h != nil || !elsewhere || len(k.set.upstreams) > 0 {
			return h
		}
	} else {
		warnOnce("%s: the fallback stands for both routers %s and %s: it refuses what it held. Give one of them another name",
			where(k.group.key), names[0], names[1])
	}
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		pass, _ := req.Context().Value(passKey).(*passage)
		k.refuse(rw, req, pass)
	})
}

// sameDoor reports whether a fallback and m stand at the same entry point: what came in at
// another one has passed other middlewares, perhaps no authentication. Traefik builds a
// router for one of its entry points, which one is chance, but in one configuration the
// same for all that have the same; for one that has middlewares it builds a router of its
// own. Until m's configuration is built in full, that is not sure.
func (k *keeper) sameDoor(m *member) (same, sure bool) {
	if m.direct {
		return true, true
	}
	mine := k.group.fellow(k.router, m)
	if mine == nil {
		return m.door == k.door && m.above == k.above, false
	}
	switch {
	case mine.door != m.door:
		warnOnce("%s: what the fallback router %s (entry point %s) held is refused, for router %s is on another entry point (%s). "+
			"Give both the same entryPoints", where(k.group.key), k.router, mine.door, m.router, m.door)
	case mine.above != m.above:
		warnOnce("%s: what the fallback router %s held is refused, for requests pass other routers before %s. "+
			"Give both the same parentRefs", where(k.group.key), k.router, m.router)
	}
	return m.door == mine.door && m.above == mine.above, true
}

// renamed warns of a router at this entry point whose name differs from ours by that of the
// entry point: a router of several Traefik splits, as <entry point>-<name>, where they have
// middlewares, TLS or observability of their own.
func (k *keeper) renamed() {
	before, name, _ := strings.Cut(k.group.key, atRouter)
	other := strings.TrimPrefix(name, k.door+"-")
	if other == name {
		other = k.door + "-" + name
	}
	names := routersOf(before+atRouter+other, k.door)
	if k.door != "" && len(names) > 0 {
		warnOnce("%s: the fallback router %s stands for no router, but there is %s on its entry point %s: "+
			"Traefik renames routers of several entry points. Give both the same entryPoints", where(k.group.key), k.router, names[0], k.door)
	}
}

// gate is the handler where something else than Traefik's balancer comes next: it
// lets requests pass while any of the configured upstreams can serve.
func (k *keeper) gate(next http.Handler, open *atomic.Int32) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		switch {
		case k.set.statusPath != "" && req.URL.Path == k.set.statusPath:
			serveStatus(rw, req)
		case open.Load() != 0 || !k.set.isMCP(req.URL.Path):
			next.ServeHTTP(rw, req)
		default:
			k.serve(rw, req, func() http.Handler {
				return k.group.pick(func(m *member) bool { return m.router == k.router })
			})
		}
	})
}

// acquireAll acquires the configured upstreams.
func (s *settings) acquireAll() []*server {
	var all []*server
	for i := 0; i < len(s.upstreams); i++ {
		one, err := acquire(s, s.upstreams[i])
		if err != nil {
			warnOnce("cannot probe %s: %v", withoutQuery(s.upstreams[i]), err)
			continue
		}
		all = append(all, one)
	}
	return all
}

// direct is the way through configured upstreams, past Traefik's services, for
// requests that are held while there is no route.
func (k *keeper) direct(all []*server) *member {
	var ways []http.Handler
	for i := 0; i < len(all); i++ {
		ways = append(ways, k.way(all[i]))
	}
	var turn atomic.Int32
	return &member{direct: true, router: k.router, door: k.door, above: k.above, ctx: k.ctx, servers: all, handler: func() http.Handler {
		tier := best(trusted(all), true)
		start := int(turn.Add(1)&0xffff) % atLeastOne(len(all))
		for i := 0; tier < mcphealth.TierSuspect && i < len(all); i++ {
			n := (start + i) % len(all)
			if all[n].tier(true) == tier && all[n].trusted() {
				return ways[n]
			}
		}
		return nil
	}}
}

// mistrust is how long an upstream whose certificate directTransport did not trust is left
// to its router: one may be renewed. A request has maxPasses tries, and may be held for long.
const mistrust = 10 * time.Minute

func (s *server) trusted() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.foreignAt.IsZero() || time.Since(s.foreignAt) >= mistrust
}

func (s *server) distrust(at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.foreignAt = at
}

func trusted(all []*server) []*server {
	var some []*server
	for i := 0; i < len(all); i++ {
		if all[i].trusted() {
			some = append(some, all[i])
		}
	}
	return some
}

func atLeastOne(n int) int {
	if n < 1 {
		return 1
	}
	return n
}

// directTransport carries requests to configured upstreams, each on a connection of
// its own: a failed dial proves that the request was not executed, the end of a
// connection that was open before proves nothing.
var directTransport http.RoundTripper = &http.Transport{
	DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) { // no method value: Yaegi mistypes it
		return (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, network, addr)
	},
	DisableKeepAlives: true,
}

// way forwards to one upstream. What could not be sent waits for another one, or
// for this one to come back.
func (k *keeper) way(s *server) http.Handler {
	forward := proxyTo(s.checker.Target().URL)
	return http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		pass, _ := req.Context().Value(passKey).(*passage)
		if pass == nil {
			http.NotFound(rw, req) // nobody comes here but through serve
			return
		}
		if k.send(rw, req, pass, forward) {
			s.checker.Sent()
			s.checker.Failed()
			if pass.foreign {
				s.distrust(time.Now())
				warnOnce("%s: its certificate is not trusted: held calls go on to it by its router alone", withoutQuery(s.checker.Target().URL))
			}
			pass.rewind(req)
			k.serve(rw, req, func() http.Handler { return k.successor() })
		}
	})
}

// send forwards a request, and keeps its body meanwhile, if there is room. It
// reports whether it could not be sent, in which case it has not been answered.
func (k *keeper) send(rw http.ResponseWriter, req *http.Request, pass *passage, forward http.Handler) (refused bool) {
	size := sizeOf(req)
	if !pass.kept && size <= maxHeldBody && k.group.take(size) {
		defer func() { k.group.give(size) }()
		if err := pass.keep(req, time.Time{}); err != nil && !errors.Is(err, errTooLarge) {
			k.unread(rw, req, pass)
			return false
		}
	}
	pass.sent.Store(false)
	pass.refused = false
	pass.foreign = false
	trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { pass.sent.Store(true) }}
	forward.ServeHTTP(rw, req.WithContext(httptrace.WithClientTrace(req.Context(), trace)))
	return pass.refused
}

// proxyTo forwards requests to the MCP endpoint at upstream, with the Host that
// the client used.
func proxyTo(upstream string) http.Handler {
	to, err := url.Parse(upstream)
	if err != nil {
		return http.NotFoundHandler() // its checker would not have been made
	}
	return &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			p.Out.URL.Scheme = to.Scheme
			p.Out.URL.Host = to.Host
			p.Out.URL.Path = to.Path
			p.Out.URL.RawPath = to.RawPath
			forward(p)
			if to.RawQuery != "" { // as its probes have it
				p.Out.URL.RawQuery = strings.TrimSuffix(to.RawQuery+"&"+p.Out.URL.RawQuery, "&")
			}
		},
		Transport:     directTransport,
		FlushInterval: -1,
		ErrorHandler:  failed,
	}
}

// forward keeps what Traefik says of the client and the query as it is, which
// Rewrite starts without, and adds the client's address as Traefik's own proxy does.
func forward(p *httputil.ProxyRequest) {
	p.Out.URL.RawQuery = p.In.URL.RawQuery
	for _, name := range []string{"Forwarded", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v, ok := p.In.Header[name]; ok {
			p.Out.Header[name] = v
		}
	}
	before, given := p.In.Header["X-Forwarded-For"]
	ip, _, err := net.SplitHostPort(p.In.RemoteAddr)
	if err != nil || given && before == nil {
		return // Traefik is told not to
	}
	if len(before) > 0 {
		ip = strings.Join(before, ", ") + ", " + ip
	}
	p.Out.Header.Set("X-Forwarded-For", ip)
}

// failed answers a forwarded request that got no answer. It was surely not executed
// only if it got no connection, the TLS handshake included: way goes on with that.
func failed(rw http.ResponseWriter, req *http.Request, err error) {
	if errors.Is(err, context.Canceled) {
		rw.WriteHeader(clientGone)
		return
	}
	pass, _ := req.Context().Value(passKey).(*passage)
	unsent := pass != nil && !pass.sent.Load()
	if unsent && pass.kept {
		pass.refused = true
		pass.foreign = strings.Contains(err.Error(), "failed to verify certificate")
		return
	}
	id := mcphealth.NullID
	if pass != nil {
		id = mcphealth.RequestID(firstOf(pass.body))
	}
	if unsent {
		mcphealth.Unavailable(req.Method, id, mcphealth.Refused, routeRetry).Send(rw)
		return
	}
	mcphealth.MayHaveRun(req.Method, id, mcphealth.Reset).Send(rw)
}

// firstOf is as much of a body as its id is looked for in.
func firstOf(body []byte) []byte {
	if len(body) > mcphealth.MaxIDBody {
		return body[:mcphealth.MaxIDBody]
	}
	return body
}
