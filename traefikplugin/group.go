//go:build go1.21

package traefikplugin

import (
	"context"
	"net/http"
	"os"
	"reflect"
	"sort"
	"sync"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// maxHeldBytes bounds the bodies of all held requests of a group: 64 MiB.
	maxHeldBytes = 64 << 20
	// wakePause lies between two held requests that go on, so that they arrive about in order,
	// and a server that has just come back is not met by all of them in one instant: 50
	// per 20 ms at most, as in Caddy, and 18 where the kernel sleeps no less than 1 ms. On
	// a machine that is too busy to be exact, they go on every latestWake all the same.
	wakePause  = 400 * time.Microsecond
	latestWake = 2 * time.Millisecond
	// latePause is when those are woken who came meanwhile.
	latePause = 20 * time.Millisecond
	// pokePause is how often servers are asked while requests wait for them.
	pokePause = 250 * time.Millisecond
)

// member is one way to serve a group's requests.
type member struct {
	id      int
	direct  bool                        // through configured upstreams, not through Traefik's route
	router  string                      // with its provider: whose requests these are
	door    string                      // the entry point that it was built for
	above   string                      // the routers that requests pass before (parentRefs)
	route   *route                      // nil for a gate and for a direct way
	ctx     context.Context             // ends with the configuration; nil = never
	servers []*server                   // whose health decides
	handler func() http.Handler         // nil while it cannot serve
	toOwner func(*passage) http.Handler // to the owner of a session; nil: there are none
}

// group is what belongs together: the middleware's instances on the routers of
// one name. What one of them holds, another one serves when it can.
type group struct {
	key string

	mu      sync.Mutex
	refs    int
	nextID  int
	members map[int]*member
	since   time.Time        // the route is absent since, if it is
	routed  map[uintptr]bool // the configurations that have, or had, a route

	waiters map[int]*waiter
	late    map[int]*waiter // whose hold is over, but not their body
	bytes   int             // of held bodies
	missing *mcphealth.Absentees
	waking  bool // a wake is under way
	poking  bool // servers are being asked for the waiters' sake
}

// waiter is one held request.
type waiter struct {
	box  chan int
	size int // of its body
}

var groups struct {
	mu      sync.Mutex
	m       map[string]*group
	signals chan os.Signal // to stop; nil while there are no groups, and after the first
}

// join finds or makes a group. Each call needs a leave.
func join(key string) *group {
	groups.mu.Lock()
	defer groups.mu.Unlock()
	if groups.m == nil {
		groups.m = map[string]*group{}
	}
	listen()
	g := groups.m[key]
	if g == nil {
		g = &group{key: key, members: map[int]*member{}, waiters: map[int]*waiter{}, late: map[int]*waiter{}, missing: &mcphealth.Absentees{}, routed: map[uintptr]bool{}, since: time.Now()}
		groups.m[key] = g
	}
	g.refs++
	return g
}

// stay is another join of the same group, for what may last longer than the instance
// that has joined it. It needs a leave.
func (g *group) stay() {
	groups.mu.Lock()
	defer groups.mu.Unlock()
	g.refs++
}

func (g *group) leave() {
	groups.mu.Lock()
	defer groups.mu.Unlock()
	if g.refs--; g.refs == 0 && groups.m[g.key] == g {
		delete(groups.m, g.key)
	}
	if len(groups.m) == 0 {
		deafen()
	}
}

// add brings in a member; what it returns takes it out again.
func (g *group) add(m *member) (remove func()) {
	g.mu.Lock()
	id := g.nextID
	g.nextID++
	m.id = id
	g.members[id] = m
	config := configOf(m.ctx)
	if !m.direct && config != 0 {
		g.routed[config] = true
	}
	g.mu.Unlock()
	if m.handler() != nil || m.toOwner != nil {
		g.wake()
	}
	return func() {
		g.mu.Lock()
		delete(g.members, id)
		if !m.direct {
			g.since = time.Now()
		}
		g.mu.Unlock()
		time.AfterFunc(linger, func() {
			defer func() { complain("the end of a configuration", recover()) }()
			g.mu.Lock()
			delete(g.routed, config)
			g.mu.Unlock()
		})
	}
}

// configOf tells configurations apart: all contexts of one end together.
func configOf(ctx context.Context) uintptr {
	if ctx == nil {
		return 0
	}
	return reflect.ValueOf(ctx.Done()).Pointer()
}

// hadRoute: that configuration has a route of this group, or had one as it ended.
func (g *group) hadRoute(config uintptr) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.routed[config]
}

// routers is the names of the routers that there are, with their providers.
func (g *group) routers() []string {
	all := g.list()
	var names []string
	for i := 0; i < len(all); i++ {
		known := all[i].direct
		for j := 0; j < len(names); j++ {
			known = known || names[j] == all[i].router
		}
		if !known {
			names = append(names, all[i].router)
		}
	}
	return names
}

// routersOf is the routers of another group at one entry point.
func routersOf(key, door string) []string {
	groups.mu.Lock()
	g := groups.m[key]
	groups.mu.Unlock()
	var names []string
	if g == nil {
		return names
	}
	all := g.list()
	for i := 0; i < len(all); i++ {
		if !all[i].direct && all[i].door == door {
			names = append(names, all[i].router)
		}
	}
	return names
}

// list is the members: Traefik's routes before direct ways, the newest first. Those
// of a configuration that has ended are none any more.
func (g *group) list() []*member {
	g.mu.Lock()
	var all []*member
	for _, m := range g.members {
		if m.ctx == nil || m.ctx.Err() == nil {
			all = append(all, m)
		}
	}
	g.mu.Unlock()
	sort.Slice(all, func(i, j int) bool {
		if all[i].direct != all[j].direct {
			return !all[i].direct
		}
		return all[i].id > all[j].id
	})
	return all
}

// pick is the handler that can serve now, of the members that may, or nil.
func (g *group) pick(may func(m *member) bool) http.Handler {
	all := g.list()
	for i := 0; i < len(all); i++ {
		if !may(all[i]) {
			continue
		}
		if h := all[i].handler(); h != nil {
			return h
		}
	}
	return nil
}

func anyMember(_ *member) bool { return true }

// fellow is the direct way of that router in m's configuration; nil: it has none, or not
// yet.
func (g *group) fellow(router string, m *member) *member {
	all := g.list()
	for i := 0; i < len(all); i++ {
		if all[i].direct && all[i].router == router && configOf(all[i].ctx) == configOf(m.ctx) {
			return all[i]
		}
	}
	return nil
}

// toOwner is how a held request of that router gets on to the owner of its session; nil
// while it does not, and while the router is away.
func (g *group) toOwner(router string, pass *passage) http.Handler {
	all := g.list()
	for i := 0; i < len(all); i++ {
		if all[i].toOwner != nil && all[i].router == router {
			return all[i].toOwner(pass)
		}
	}
	return nil
}

// absent is how long there has been no route. A server that is down does not make
// its route absent, and what is configured as an upstream is there for good.
func (g *group) absent(now time.Time) time.Duration {
	all := g.list()
	for i := 0; i < len(all); i++ {
		if !all[i].direct || len(all[i].servers) > 0 {
			return 0
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, m := range g.members {
		if !m.direct { // its configuration has ended, and since is not of that yet
			return 0
		}
	}
	return now.Sub(g.since)
}

// servers is all whose health decides for the group.
func (g *group) servers() []*server {
	var all []*server
	members := g.list()
	for i := 0; i < len(members); i++ {
		all = append(all, members[i].servers...)
	}
	return all
}

// enlist adds one who waits, unless max do already. The box gets a token whenever
// it may be worth to look again.
func (g *group) enlist(size, max int) (id int, box chan int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.waiters) >= max || g.bytes+size > maxHeldBytes {
		return 0, nil
	}
	g.nextID++
	box = make(chan int, 1)
	g.waiters[g.nextID] = &waiter{box: box, size: size}
	g.bytes += size
	if !g.poking {
		g.poking = true
		time.AfterFunc(0, func() { g.poke() })
	}
	return g.nextID, box
}

// unlist takes one who waits out, if it is still in.
func (g *group) unlist(id int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	w := g.waiters[id]
	if w == nil {
		w = g.late[id]
	}
	if w != nil {
		g.bytes -= w.size
		delete(g.waiters, id)
		delete(g.late, id)
	}
}

// expire frees the place of one whose hold is over, and keeps account of the bytes that
// have come until it is gone: its client may not have sent the last one yet.
func (g *group) expire(id, got int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w := g.waiters[id]; w != nil {
		g.bytes += got - w.size
		w.size = got
		delete(g.waiters, id)
		g.late[id] = w
	}
}

// resize notes how large the body of one who waits turned out to be.
func (g *group) resize(id, size int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if w := g.waiters[id]; w != nil {
		g.bytes += size - w.size
		w.size = size
	}
}

// take makes room for a body that is kept while it is sent; give returns it.
func (g *group) take(size int) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.bytes+size > maxHeldBytes {
		return false
	}
	g.bytes += size
	return true
}

func (g *group) give(size int) {
	g.mu.Lock()
	g.bytes -= size
	g.mu.Unlock()
}

// held is how many wait.
func (g *group) held() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.waiters)
}

// poke asks the servers that are not up, now and again, while anyone waits.
func (g *group) poke() {
	defer func() { complain("poke", recover()) }()
	g.mu.Lock()
	waiting := len(g.waiters) > 0
	g.poking = waiting
	g.mu.Unlock()
	if !waiting {
		return
	}
	time.AfterFunc(pokePause, func() { g.poke() })
	if g.pick(anyMember) != nil || stopping.Load() {
		g.wake() // a token may have come before its reader looked, or shutDown waits for one that hangs
	}
	all := g.servers()
	for i := 0; i < len(all); i++ {
		if all[i].tier(true) > mcphealth.TierDegraded {
			all[i].checker.Probe()
		}
	}
}

// wake tells those who wait to look again, in the order in which they came.
func (g *group) wake() {
	g.mu.Lock()
	if g.waking || len(g.waiters) == 0 {
		g.mu.Unlock()
		return
	}
	g.waking = true
	var ids []int
	for id := range g.waiters {
		ids = append(ids, id)
	}
	g.mu.Unlock()
	sort.Ints(ids)
	time.AfterFunc(0, func() { g.wakeEach(ids) })
}

// wakeEach wakes them one after the other: of those woken in one instant the last might
// be the first to go on.
func (g *group) wakeEach(ids []int) {
	defer func() { complain("wake", recover()) }()
	begin := time.Now()
	for i := 0; i < len(ids); i++ {
		g.mu.Lock()
		w := g.waiters[ids[i]]
		if w != nil {
			post(w.box)
		}
		g.mu.Unlock()
		if w != nil && i+1 < len(ids) && time.Since(begin) < time.Duration(i+1)*latestWake {
			time.Sleep(wakePause)
		}
	}
	g.mu.Lock()
	g.waking = false
	again := len(g.waiters) > 0
	g.mu.Unlock()
	if again {
		time.AfterFunc(latePause, func() { g.wakeLate() })
	}
}

// wakeLate wakes those who came while a wake was under way.
func (g *group) wakeLate() {
	defer func() { complain("wake", recover()) }()
	if g.pick(anyMember) != nil {
		g.wake()
	}
}

// post puts a token into a box of one and never waits.
func post(box chan int) { reflect.ValueOf(box).TrySend(reflect.ValueOf(1)) }
