//go:build go1.21

package traefikplugin

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// childName is our own server in Traefik's balancer: it is up only while no real
// one is, and then holds or refuses.
const childName = "mcphealth://hold"

// childCookie is the value of a sticky cookie that names the child: the first 16
// digits of its SHA-256 (pkg/server/service/loadbalancer/sticky.go).
var childCookie = cookieOf(childName)

func cookieOf(name string) string {
	sum := sha256.Sum256([]byte(name))
	return hex.EncodeToString(sum[:])[:16]
}

// balancer is Traefik's own, reached by reflection: a private API, the same in
// every tag from v2.11.0 to v3.7.13. Its fields are read while New builds the
// configuration, later calls go through its methods, which lock.
type balancer struct {
	handler   http.Handler
	setStatus reflect.Value
	updaters  reflect.Value // the parents' hooks: failover and weighted services
	names     []string      // of its servers, each once
	fenced    map[string]bool
}

// inspect reads Traefik's balancer; nil if next is something else, such as the
// next middleware, a failover, or what a future Traefik puts there.
func inspect(next http.Handler) *balancer {
	v := reflect.ValueOf(next)
	if v.Kind() != reflect.Ptr || v.IsNil() || v.Elem().Kind() != reflect.Struct {
		return nil
	}
	set := v.MethodByName("SetStatus")
	list := v.Elem().FieldByName("handlers")
	if !set.IsValid() || !list.IsValid() || list.Kind() != reflect.Slice || !takes(set, reflect.Interface, reflect.String, reflect.Bool) {
		return nil
	}
	b := &balancer{handler: next, setStatus: set, updaters: v.Elem().FieldByName("updaters"), fenced: map[string]bool{}}
	for i := 0; i < list.Len(); i++ {
		name, ok := nameOf(list.Index(i))
		if !ok {
			return nil
		}
		if _, known := b.fenced[name]; !known {
			b.names = append(b.names, name)
		}
		b.fenced[name] = false
	}
	b.readFenced(v.Elem().FieldByName("fenced"))
	return b
}

func takes(method reflect.Value, kinds ...reflect.Kind) bool {
	t := method.Type()
	if t.NumIn() != len(kinds) {
		return false
	}
	for i := 0; i < len(kinds); i++ {
		if t.In(i).Kind() != kinds[i] {
			return false
		}
	}
	return true
}

func nameOf(handler reflect.Value) (string, bool) {
	for handler.Kind() == reflect.Ptr && !handler.IsNil() {
		handler = handler.Elem()
	}
	if handler.Kind() != reflect.Struct {
		return "", false
	}
	name := handler.FieldByName("name")
	if !name.IsValid() || name.Kind() != reflect.String {
		return "", false
	}
	return name.String(), true
}

// readFenced notes the servers that end and serve sticky clients only.
func (b *balancer) readFenced(m reflect.Value) {
	if !m.IsValid() || m.Kind() != reflect.Map || m.Type().Key().Kind() != reflect.String {
		return
	}
	all := m.MapKeys()
	for i := 0; i < len(all); i++ {
		b.fenced[all[i].String()] = true
	}
}

// ours reports whether all children are servers: a weighted service's balancer is
// of the same type, and its children are services.
func (b *balancer) ours() bool {
	for i := 0; i < len(b.names); i++ {
		if b.names[i] != "" && endpoint(b.names[i], "/") == "" {
			return false
		}
	}
	return true
}

// parents is how many services learn of this one's status.
func (b *balancer) parents() int {
	if !b.updaters.IsValid() || b.updaters.Kind() != reflect.Slice {
		return 0
	}
	return b.updaters.Len()
}

func (b *balancer) set(name string, up bool) {
	b.setStatus.Call([]reflect.Value{reflect.ValueOf(context.Background()), reflect.ValueOf(name), reflect.ValueOf(up)})
}

// addChild adds a server of our own, which Traefik takes to be up. It reports false if
// that cannot be done.
func (b *balancer) addChild(h http.Handler) (added bool) {
	defer func() {
		if v := recover(); v != nil {
			complain("AddServer", v)
			added = false
		}
	}()
	v := reflect.ValueOf(b.handler)
	add := v.MethodByName("AddServer")
	if !add.IsValid() {
		add = v.MethodByName("Add")
	}
	if !add.IsValid() || add.Type().NumIn() < 2 {
		return false
	}
	args := []reflect.Value{reflect.ValueOf(childName), reflect.ValueOf(h)}
	for i := 2; i < add.Type().NumIn(); i++ { // weight: none, which means 1; not fenced
		args = append(args, reflect.Zero(add.Type().In(i)))
	}
	add.Call(args)
	return true
}

// endpoint is the URL to probe for a server that Traefik knows by this URL; "" if
// that is none. h2c servers are asked in HTTP/1.1, which Go's also speak.
func endpoint(server, path string) string {
	u, err := url.Parse(server)
	if err != nil || u.Host == "" {
		return ""
	}
	if u.Scheme == "h2c" {
		u.Scheme = "http"
	}
	if u.Scheme != "http" && u.Scheme != "https" {
		return ""
	}
	return u.Scheme + "://" + u.Host + path
}

// route drives one balancer by the health of its servers.
type route struct {
	b      *balancer
	hold   bool         // requests can wait
	server []*server    // by the index of b.names; nil for a name without URL
	refs   int          // guarded by routes.mu
	stands atomic.Value // *standing
	free   atomic.Bool  // new work may go to any server that is up

	mu     sync.Mutex
	used   []*keeper       // the routers that share it
	sticky bool            // any of them is
	is     map[string]bool // status as last set
	child  int             // 0 = none, 1 = down, 2 = up
	counts bool            // an unfenced real server is up
	groups map[string]*group
	stop   []func()
	stuck  []*sticky // those whose sessions it serves
}

// routes are the live balancers by address: routers of one service share one.
var routes struct {
	mu sync.Mutex
	m  map[uintptr]*route
}

// steer finds or makes the route that drives next; nil if it cannot be driven.
// Each call that returns one needs a drop.
func steer(set *settings, k *keeper, next http.Handler) *route {
	v := reflect.ValueOf(next)
	if v.Kind() != reflect.Ptr {
		return nil
	}
	routes.mu.Lock()
	defer routes.mu.Unlock()
	if r := routes.m[v.Pointer()]; r != nil {
		r.refs++
		r.compare(k)
		r.use(k)
		r.update()
		return r
	}
	b := inspect(next)
	if b == nil || !b.ours() {
		return nil
	}
	r := newRoute(set, b)
	if r == nil {
		return nil
	}
	r.use(k)
	h := http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		unstick(rw.Header())
		if !r.isMCP(req.URL.Path) { // as Traefik's balancer says it
			http.Error(rw, "no available server", http.StatusServiceUnavailable)
			return
		}
		k.serve(rw, r.resume(req), func() http.Handler { return k.group.pick(func(m *member) bool { return r.succeeds(m) }) })
	})
	if b.addChild(h) {
		r.child = 2
	}
	r.refs = 1
	if routes.m == nil {
		routes.m = map[uintptr]*route{}
	}
	routes.m[v.Pointer()] = r
	r.watch()
	return r
}

func newRoute(set *settings, b *balancer) *route {
	r := &route{b: b, hold: set.hold > 0, is: map[string]bool{}, groups: map[string]*group{}}
	for i := 0; i < len(b.names); i++ {
		r.is[b.names[i]] = true
		var s *server
		if u := set.endpointOf(b.names[i]); u != "" {
			var err error
			if s, err = acquire(set, u); err != nil {
				warnOnce("cannot probe %s: %v", withoutQuery(u), err)
				r.release()
				return nil
			}
		}
		r.server = append(r.server, s)
	}
	r.stand(map[string]mcphealth.Tier{}) // as Traefik has them: up
	return r
}

// endpointOf is the configured upstream of that server, or its first MCP path.
func (s *settings) endpointOf(name string) string {
	e := endpoint(name, "")
	if e == "" {
		return ""
	}
	for i := 0; i < len(s.upstreams); i++ {
		if endpoint(s.upstreams[i], "") == e {
			return s.upstreams[i]
		}
	}
	return e + s.probed()
}

// watch follows the servers' health from now on.
func (r *route) watch() {
	for i := 0; i < len(r.server); i++ {
		if r.server[i] != nil {
			r.stop = append(r.stop, r.server[i].follow(func() { r.update() }))
		}
	}
	r.update()
}

// release ends what watch began.
func (r *route) release() {
	for i := 0; i < len(r.stop); i++ {
		r.stop[i]()
	}
	for i := 0; i < len(r.server); i++ {
		if r.server[i] != nil {
			release(r.server[i])
		}
	}
}

// drop gives a route back.
func (r *route) drop() {
	routes.mu.Lock()
	r.refs--
	last := r.refs == 0
	if last {
		delete(routes.m, reflect.ValueOf(r.b.handler).Pointer())
	}
	routes.mu.Unlock()
	if last {
		r.release()
	}
}

// use notes a router that leads to this balancer.
func (r *route) use(k *keeper) {
	r.mu.Lock()
	r.used = append(r.used, k)
	r.sticky = r.sticky || k.set.sticky
	r.mu.Unlock()
}

// serves notes that sessions are brought to these servers.
func (r *route) serves(s *sticky) {
	r.mu.Lock()
	r.stuck = append(r.stuck, s)
	r.mu.Unlock()
}

// resume gives a request back what it lost on the short way to its owner.
func (r *route) resume(req *http.Request) *http.Request {
	r.mu.Lock()
	all := append([]*sticky{}, r.stuck...)
	r.mu.Unlock()
	if pass, _ := req.Context().Value(passKey).(*passage); pass != nil {
		return req
	}
	for i := 0; i < len(all); i++ {
		if pass := all[i].resume(req); pass != nil {
			return pass.mark(req)
		}
	}
	return req
}

// compare warns of two routers that would have one service's servers asked, or held
// requests treated, in two ways: the first one's counts, and their order is chance.
func (r *route) compare(k *keeper) {
	first := r.users()[0]
	if first.set.together() == k.set.together() {
		return
	}
	a, b := first.router, k.router
	if b < a {
		a, b = b, a
	}
	warnOnce("routers %s and %s lead to one service, but their settings differ: which of them count for its servers and "+
		"for held requests is chance, and may change with each reload. Use one middleware on both", a, b)
}

func (r *route) users() []*keeper {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]*keeper{}, r.used...)
}

// isMCP reports whether the path is an MCP endpoint for any of the routers.
func (r *route) isMCP(path string) bool {
	all := r.users()
	for i := 0; i < len(all); i++ {
		if all[i].set.isMCP(path) {
			return true
		}
	}
	return false
}

// succeeds reports whether what this route holds may go on to m: which of its
// routers let a request pass is not known, and so m must have them all.
func (r *route) succeeds(m *member) bool {
	if m.route == r {
		return true
	}
	if m.route == nil {
		return false
	}
	mine := r.users()
	theirs := m.route.users()
	for i := 0; i < len(mine); i++ {
		found := false
		for j := 0; j < len(theirs); j++ {
			found = found || theirs[j].router == mine[i].router
		}
		if !found {
			return false
		}
	}
	return true
}

// member is the route as a way to serve the requests of k's group.
func (r *route) member(k *keeper) *member {
	r.mu.Lock()
	r.groups[k.group.key] = k.group
	r.mu.Unlock()
	var known []*server
	for i := 0; i < len(r.server); i++ {
		if r.server[i] != nil {
			known = append(known, r.server[i])
		}
	}
	return &member{router: k.router, door: k.door, above: k.above, route: r, ctx: k.ctx, servers: known, handler: func() http.Handler {
		r.mu.Lock()
		defer r.mu.Unlock()
		switch {
		case !r.counts:
			return nil
		case k.entry != nil:
			return k.entry
		}
		return r.b.handler
	}, toOwner: k.toOwner}
}

// update sets the servers' status by their health, and wakes who waits.
func (r *route) update() {
	defer func() { complain("update", recover()) }()
	wake := r.apply()
	for i := 0; i < len(wake); i++ {
		wake[i].wake()
	}
}

// apply sets the servers' status by their health, and returns the groups that may go on.
// What panics in Traefik's balancer must not leave the lock behind.
func (r *route) apply() []*group {
	r.mu.Lock()
	defer r.mu.Unlock()
	tiers := r.tiers()
	r.reconcile(r.wanted(tiers))
	r.stand(tiers)
	var wake []*group
	for _, g := range r.groups {
		if r.counts {
			wake = append(wake, g)
		}
	}
	return wake
}

// reconcile brings the balancer to what the servers' health wants. The order
// matters: wrr looks for ever for a server, with its lock held, if something is
// up and no unfenced server is (traefik#13511). So an unfenced one comes up
// first and goes down last, and our child, unfenced too, encloses that.
func (r *route) reconcile(want map[string]bool) {
	r.counts = false
	for name, up := range want {
		r.counts = r.counts || up && !r.b.fenced[name]
	}
	// A parent that fails over must see that all are down: then no child.
	raise := !r.counts && r.b.parents() == 0 && r.child != 0
	if raise && r.child == 1 {
		r.b.set(childName, true)
		r.child = 2
	}
	if !r.counts && !raise {
		for name := range want {
			want[name] = want[name] && !r.b.fenced[name]
		}
	}
	r.turn(want, true, false)
	r.turn(want, true, true)
	r.turn(want, false, true)
	r.turn(want, false, false)
	if !raise && r.child == 2 {
		r.b.set(childName, false)
		r.child = 1
	}
}

// turn sets the servers of one kind that are to go up, or down.
func (r *route) turn(want map[string]bool, up, fenced bool) {
	for i := 0; i < len(r.b.names); i++ {
		name := r.b.names[i]
		if want[name] == up && r.is[name] != up && r.b.fenced[name] == fenced {
			r.b.set(name, up)
			r.is[name] = up
		}
	}
}

// tiers is how willingly each server may be chosen, by name. A server without URL,
// which Traefik makes for a container that does not run, has none.
func (r *route) tiers() map[string]mcphealth.Tier {
	all := map[string]mcphealth.Tier{}
	for i := 0; i < len(r.server); i++ {
		if r.server[i] != nil {
			all[r.b.names[i]] = r.server[i].tier(r.hold)
		}
	}
	return all
}

// wanted is which servers should serve: those of the best tier that any of them has.
// With sticky all that live, for the sessions that they hold: what else goes where is
// then chosen by who sends it (standing).
func (r *route) wanted(tiers map[string]mcphealth.Tier) map[string]bool {
	lowest := r.lowest(tiers)
	want := map[string]bool{}
	for i := 0; i < len(r.b.names); i++ {
		t, ok := tiers[r.b.names[i]]
		want[r.b.names[i]] = ok && t < mcphealth.TierDown && (r.sticky || t <= lowest)
	}
	return want
}

// lowest is the best tier that any server has that is not about to end.
func (r *route) lowest(tiers map[string]mcphealth.Tier) mcphealth.Tier {
	lowest := mcphealth.TierDown
	for name, t := range tiers {
		if t < lowest && !r.b.fenced[name] {
			lowest = t
		}
	}
	return lowest
}

// standing is how the servers of a route stand, by their index. It is never changed.
type standing struct {
	up     []bool // may be sent requests
	prefer []int  // those that new work should go to; empty: to any that is up
}

func (r *route) standing() *standing { return r.stands.Load().(*standing) }

// stand publishes how the servers stand, for who may not wait for a lock.
func (r *route) stand(tiers map[string]mcphealth.Tier) {
	s := &standing{}
	lowest := r.lowest(tiers)
	others := false
	for i := 0; i < len(r.b.names); i++ {
		name := r.b.names[i]
		s.up = append(s.up, r.is[name])
		switch {
		case !r.is[name] || r.b.fenced[name]:
		case tiers[name] == lowest:
			s.prefer = append(s.prefer, i)
		default:
			others = true
		}
	}
	if !others {
		s.prefer = nil
	}
	before, _ := r.stands.Load().(*standing)
	r.stands.Store(s)
	r.free.Store(len(s.prefer) == 0)
	for i := 0; before != nil && i < len(r.stuck) && fell(before.up, s.up); i++ {
		r.stuck[i].forget()
	}
}

// fell reports whether one of them was up before, and is not now.
func fell(before, now []bool) bool {
	for i := 0; i < len(before); i++ {
		if before[i] && !now[i] {
			return true
		}
	}
	return false
}

// unstick takes back the cookie by which Traefik would bind the client to our
// child: its own one leads it back to its server.
func unstick(h http.Header) {
	ours := "=" + childCookie
	var keep []string
	all := h["Set-Cookie"]
	for i := 0; i < len(all); i++ {
		pair, _, _ := strings.Cut(all[i], ";")
		if !strings.HasSuffix(pair, ours) {
			keep = append(keep, all[i])
		}
	}
	if len(keep) == 0 {
		h.Del("Set-Cookie")
	} else {
		h["Set-Cookie"] = keep
	}
}
