package traefikplugin

import (
	"context"
	"net/http"
	"testing"
	"time"
)

// served is a handler that a future Traefik may put behind us.
type served struct{}

func (served) ServeHTTP(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(299) }

type named struct{ name string }

type oddSticky struct{ cookie *struct{ name int } }

type (
	otherName   struct{ Label string }
	handlersMap struct {
		served
		handlers map[string]named
	}
	handlersInts struct {
		served
		handlers []int
	}
	handlersNil struct {
		served
		handlers []*named
	}
	handlersOther struct {
		served
		handlers []otherName
	}
	handlersAny struct {
		served
		handlers []any
	}
	otherSetStatus struct {
		served
		handlers []named
	}
	noAdd struct {
		served
		handlers []named
		fenced   []string
		updaters func()
		sticky   string
	}
	oddAdd struct {
		served
		handlers []named
		sticky   *oddSticky
	}
	panics struct {
		served
		handlers []named
		sticky   *fakeSticky
	}
	addPanics struct {
		served
		handlers []named
	}
)

func (*handlersMap) SetStatus(context.Context, string, bool)   {}
func (*handlersInts) SetStatus(context.Context, string, bool)  {}
func (*handlersNil) SetStatus(context.Context, string, bool)   {}
func (*handlersOther) SetStatus(context.Context, string, bool) {}
func (*handlersAny) SetStatus(context.Context, string, bool)   {}
func (*otherSetStatus) SetStatus(string, bool) error           { return nil }
func (*noAdd) SetStatus(context.Context, string, bool)         {}
func (*oddAdd) SetStatus(context.Context, string, bool)        {}
func (*oddAdd) AddServer(string, http.Handler, chan int, func(), map[string]int, *int, any) error {
	return nil
}
func (*panics) SetStatus(context.Context, string, bool)       { panic("another meaning") }
func (*addPanics) SetStatus(context.Context, string, bool)    {}
func (*addPanics) AddServer(string, http.Handler, fakeServer) { panic("another meaning") }

// A Traefik whose balancer looks otherwise than those we know is served as it is: no
// panic, no error, and requests get on. Only sticky, which would be silently without
// effect, is refused.
func TestFutureBalancers(t *testing.T) {
	a := startMCP(t)
	one := []named{{a.URL}}
	for name, next := range map[string]http.Handler{
		"handlers are a map":          &handlersMap{handlers: map[string]named{"a": {a.URL}}},
		"handlers are numbers":        &handlersInts{handlers: []int{1}},
		"a handler is nil":            &handlersNil{handlers: []*named{nil}},
		"names are called otherwise":  &handlersOther{handlers: []otherName{{a.URL}}},
		"handlers are of any type":    &handlersAny{handlers: []any{named{a.URL}, 7}},
		"SetStatus is another":        &otherSetStatus{handlers: one},
		"no way to add a child":       &noAdd{handlers: one, fenced: []string{a.URL}, updaters: func() {}, sticky: "yes"},
		"AddServer wants more":        &oddAdd{handlers: one, sticky: &oddSticky{&struct{ name int }{7}}},
		"SetStatus panics":            &panics{handlers: one, sticky: &fakeSticky{&fakeCookie{"c"}}},
		"AddServer panics":            &addPanics{handlers: one},
		"a nil pointer":               (*noAdd)(nil),
		"a struct that is no pointer": handlersInts{},
	} {
		t.Run(name, func(t *testing.T) {
			for _, c := range []Config{{}, {Hold: "0"}, {Mode: modeHealth}, {Upstreams: []string{a.URL + "/mcp"}}} {
				ctx, end := onRouter(t, "app@docker")
				h := newHandler(t, ctx, next, c)
				if h == nil {
					t.Fatal("New returned no handler")
				}
				if name != "a nil pointer" {
					await(t, "served", func() bool { return call(h, 0).Code == 299 })
				}
				end()
				time.Sleep(2 * linger)
			}
			ctx, _ := onRouter(t, "app@docker")
			if _, err := New(ctx, next, &Config{Sticky: true}, "mcp"); err == nil && name != "AddServer panics" && name != "SetStatus panics" {
				t.Error("sticky was accepted")
			}
		})
	}
}
