//go:build go1.21

package traefikplugin

import (
	"net/http"
	"reflect"
	"sort"
	"sync"
	"time"
)

const (
	// maxHeldBytes bounds the bodies of all held requests of a group: 64 MiB.
	maxHeldBytes = 64 << 20
	// wakeSize held requests go on every wakePause, so that a server that has just
	// come back is not met by all of them in one instant.
	wakeSize  = 50
	wakePause = 20 * time.Millisecond
	// pokePause is how often servers are asked while requests wait for them.
	pokePause = 250 * time.Millisecond
)

// member is one way to serve a group's requests.
type member struct {
	id      int
	direct  bool                // through configured upstreams, not through Traefik's route
	servers []*server           // whose health decides
	handler func() http.Handler // nil while it cannot serve
}

// group is what belongs together: the middleware's instances on the routers of
// one name. What one of them holds, another one serves when it can.
type group struct {
	key string

	mu      sync.Mutex
	refs    int
	nextID  int
	members map[int]*member
	since   time.Time // the route is absent since, if it is

	waiters map[int]chan int
	bytes   int  // of held bodies
	waking  bool // a wake is under way
	poking  bool // servers are being asked for the waiters' sake
}

var groups struct {
	mu sync.Mutex
	m  map[string]*group
}

// join finds or makes a group. Each call needs a leave.
func join(key string) *group {
	groups.mu.Lock()
	defer groups.mu.Unlock()
	if groups.m == nil {
		groups.m = map[string]*group{}
	}
	g := groups.m[key]
	if g == nil {
		g = &group{key: key, members: map[int]*member{}, waiters: map[int]chan int{}, since: time.Now()}
		groups.m[key] = g
	}
	g.refs++
	return g
}

func (g *group) leave() {
	groups.mu.Lock()
	defer groups.mu.Unlock()
	if g.refs--; g.refs == 0 {
		delete(groups.m, g.key)
	}
}

// add brings in a member; what it returns takes it out again.
func (g *group) add(m *member) (remove func()) {
	g.mu.Lock()
	id := g.nextID
	g.nextID++
	m.id = id
	g.members[id] = m
	g.mu.Unlock()
	g.wake()
	return func() {
		g.mu.Lock()
		delete(g.members, id)
		if !m.direct {
			g.since = time.Now()
		}
		g.mu.Unlock()
	}
}

// list is the members: Traefik's routes before direct ways, the newest first.
func (g *group) list() []*member {
	g.mu.Lock()
	var all []*member
	for _, m := range g.members {
		all = append(all, m)
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

// pick is the handler that can serve now, or nil.
func (g *group) pick() http.Handler {
	all := g.list()
	for i := 0; i < len(all); i++ {
		if h := all[i].handler(); h != nil {
			return h
		}
	}
	return nil
}

// absent is how long neither a route nor a direct way has been there. A server
// that is down does not make its route absent.
func (g *group) absent(now time.Time) time.Duration {
	all := g.list()
	for i := 0; i < len(all); i++ {
		if !all[i].direct || all[i].handler() != nil {
			g.mu.Lock()
			g.since = now
			g.mu.Unlock()
			return 0
		}
	}
	g.mu.Lock()
	defer g.mu.Unlock()
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
	g.waiters[g.nextID] = box
	g.bytes += size
	if !g.poking {
		g.poking = true
		time.AfterFunc(0, func() { g.poke() })
	}
	return g.nextID, box
}

func (g *group) unlist(id, size int) {
	g.mu.Lock()
	delete(g.waiters, id)
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
	if g.pick() != nil {
		g.wake() // a token may have come before its reader looked
	}
	all := g.servers()
	for i := 0; i < len(all); i++ {
		if all[i].tier(true) > 1 {
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
	time.AfterFunc(0, func() { g.wakeSome(ids) })
}

func (g *group) wakeSome(ids []int) {
	defer func() { complain("wake", recover()) }()
	n := len(ids)
	if n > wakeSize {
		n = wakeSize
	}
	g.mu.Lock()
	for i := 0; i < n; i++ {
		if box := g.waiters[ids[i]]; box != nil {
			post(box)
		}
	}
	g.waking = n < len(ids)
	again := !g.waking && len(g.waiters) > 0
	g.mu.Unlock()
	if n < len(ids) {
		time.AfterFunc(wakePause, func() { g.wakeSome(ids[n:]) })
	} else if again {
		time.AfterFunc(wakePause, func() { g.wakeLate() })
	}
}

// wakeLate wakes those who came while a wake was under way.
func (g *group) wakeLate() {
	defer func() { complain("wake", recover()) }()
	if g.pick() != nil {
		g.wake()
	}
}

// post puts a token into a box of one and never waits.
func post(box chan int) { reflect.ValueOf(box).TrySend(reflect.ValueOf(1)) }
