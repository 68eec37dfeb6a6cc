package yaegi_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/traefik/yaegi/interp"
	"github.com/traefik/yaegi/stdlib"
)

// traps is what Yaegi does otherwise than the compiler, silently for the most
// part. The core fell into each of them; boundary_test.go keeps it out of them.
// Each body is that of func f() string. When a newer Yaegi agrees with the
// compiler, its row fails, and the rule can be lifted.
var traps = []struct {
	name       string
	before     string // declarations beside f
	body       string
	go1, yaegi string
}{
	{"an assignment of several does nothing but its calls",
		"type s struct{ err error; n int }\nfunc seven() int { return 7 }",
		`var x s; err := errors.New("e"); x.err, x.n = err, seven(); return fmt.Sprint(x.err, x.n)`, "e 7", "<nil> 7"},
	{"a definition of several does nothing beside a composite literal",
		"type s struct{ n int }",
		`x, y := s{n: 1}, len("abc"); return fmt.Sprint(x.n, y)`, "1 3", "1 0"},
	{"a nil among several panics",
		"type s struct{ a, b []int }",
		`x := &s{a: []int{1}}; x.a, x.b = nil, nil; return fmt.Sprint(x.a, x.b)`, "[] []", "panic: reflect: New(nil)"},
	{"a tagless case counts its first expression only", "",
		`n := 2; switch { case n == 1, n == 2: return "hit" }; return "miss"`, "hit", "miss"},
	{"a for without condition and step starts anew in each turn", "",
		`for n, i := 0, 0; ; { i++; n++; if i == 3 { return fmt.Sprint(n) }; if turns++; turns > 9 { return "endless" } }`, "3", "endless"},
	{"a parameter without name has no place", "",
		`g := func(string) int { n := 1; return n }; return fmt.Sprint(g("x"))`, "1",
		"panic: reflect.Set: value of type string is not assignable to type int"},
	{"a method value of a literal is a method expression", "",
		`var g func([]byte) (int, error) = (&bytes.Buffer{}).Write; n, _ := g([]byte("ab")); return fmt.Sprint(n)`, "2",
		"does not load: 5:52: cannot use type func(*bytes.Buffer, []uint8) (int, error) as type func([]uint8) (int,error) in assignment"},
	{"a closure that compiled code calls later sees the loop's last turn", "",
		`var sum atomic.Int32; for i := 1; i <= 3; i++ { n := int32(i); time.AfterFunc(50*time.Millisecond, func() { sum.Add(n) }) }; ` +
			`time.Sleep(200*time.Millisecond); return fmt.Sprint(sum.Load())`, "6", "9"},
	{"a deferred closure of the same function waits for ever", "",
		`n := 0; func() { leave := func() { n++ }; defer leave(); n += 10 }(); return fmt.Sprint(n)`, "11", "hangs"},
}

func TestTraps(t *testing.T) {
	for _, tt := range traps {
		t.Run(tt.name, func(t *testing.T) {
			if got := trap(tt.before, tt.body); got != tt.yaegi {
				t.Errorf("Yaegi says %q, and said %q when the rule was made; the compiler says %q", got, tt.yaegi, tt.go1)
			}
		})
	}
}

// trapLimit is how long a trap may take; they take milliseconds.
const trapLimit = 3 * time.Second

// trap runs the body of f in a fresh interpreter. One that hangs stays so.
func trap(before, body string) string {
	got := make(chan string, 1)
	go func() { got <- run(before, body) }()
	select {
	case s := <-got:
		return s
	case <-time.After(trapLimit):
		return "hangs"
	}
}

func run(before, body string) (got string) {
	defer func() {
		if v := recover(); v != nil {
			got = fmt.Sprint("panic: ", v)
		}
	}()
	i := interp.New(interp.Options{})
	if err := i.Use(stdlib.Symbols); err != nil {
		return err.Error()
	}
	src := "package main\nimport (\"bytes\"; \"errors\"; \"fmt\"; \"sync/atomic\"; \"time\")\nvar (_ = errors.New; _ = fmt.Sprint; _ bytes.Buffer; _ atomic.Int32; _ time.Duration; turns int)\n" +
		before + "\nfunc f() string {" + body + "}\n"
	if _, err := i.Eval(src); err != nil {
		return "does not load: " + err.Error()
	}
	v, err := i.Eval("f()")
	if p := (interp.Panic{}); errors.As(err, &p) {
		return fmt.Sprint("panic: ", p.Value)
	}
	if err != nil {
		return err.Error()
	}
	return v.String()
}
