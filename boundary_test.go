// Package boundary_test keeps the walls between the parts (docs/adr/0001, 0003):
// what may import what, and what the packages that Traefik interprets must not
// contain. The compiler accepts all of it; Yaegi would fail, or go wrong silently
// (test/yaegi shows how).
package boundary_test

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/mcphealth/mcphealth"

// interpreted are the packages that Traefik interprets.
var interpreted = []string{"mcphealth", "traefikplugin"}

// arrows are the imports of our own that each part may have, in non-test files.
// A part that is not here yet has nothing to check.
var arrows = map[string][]string{
	"mcphealth":        nil,
	"traefikplugin":    {"mcphealth"},
	"caddymodule":      {"mcphealth", "docs"},
	"cmd/mcphealth":    {"mcphealth", "internal/stdio", "internal/explain", "internal/serve"},
	"deephealth":       nil,
	"internal/serve":   {"mcphealth", "internal/stdio"},
	"internal/stdio":   {"mcphealth"},
	"internal/explain": {"mcphealth", "docs"},
	"internal/mcpfake": nil,
	"internal/leak":    nil,
}

// source is one parsed file.
type source struct {
	path string
	text string
	file *ast.File
	fset *token.FileSet
}

func (s source) at(n ast.Node) string { return s.fset.Position(n.Pos()).String() }

// sources parses the non-test Go files below dir; none if there is no dir.
func sources(t *testing.T, dir string) []source {
	t.Helper()
	var all []source
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if e.IsDir() && e.Name() == "testdata" {
			return filepath.SkipDir
		}
		if e.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		s := source{path: path, text: string(text), fset: token.NewFileSet()}
		s.file, err = parser.ParseFile(s.fset, path, text, parser.ParseComments|parser.SkipObjectResolution)
		all = append(all, s)
		return err
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return all
}

func interpretedSources(t *testing.T) []source {
	t.Helper()
	var all []source
	for _, dir := range interpreted {
		all = append(all, sources(t, dir)...)
	}
	if len(all) == 0 {
		t.Fatalf("no Go files in %v: this test looks at the wrong place", interpreted)
	}
	return all
}

func imports(s source) []string {
	var paths []string
	for _, i := range s.file.Imports {
		path, err := strconv.Unquote(i.Path.Value)
		if err != nil {
			panic(err) // the parser accepted it
		}
		paths = append(paths, path)
	}
	return paths
}

// TestArrows: the core knows no proxy, the proxies' parts do not know each other,
// and the fake server can be wrong in no way that the core is.
func TestArrows(t *testing.T) {
	for dir, may := range arrows {
		for _, s := range sources(t, dir) {
			for _, path := range imports(s) {
				own, ours := strings.CutPrefix(path, module+"/")
				if ours && own != dir && !slices.Contains(may, own) {
					t.Errorf("%s imports %s: of our packages %s may import %q only (docs/design.md §1)", s.path, path, dir, may)
				}
			}
		}
	}
}

// banned are packages that Yaegi cannot import without its unsafe switch, which
// the plugin catalogue does not set, or cannot import at all.
var banned = map[string]string{
	"embed":   "Yaegi does not fill in embedded files",
	"os/exec": "the catalogue's interpreter has no os/exec",
	"unsafe":  "the catalogue's interpreter has no unsafe",
	"syscall": "the catalogue's interpreter has no syscall; tell errors by their text or by types of package net",
	"plugin":  "Yaegi knows no package plugin",
	"C":       "Yaegi knows no cgo",
	"slices":  "generic, and younger than Yaegi's library: write the loop, or sort.Slice",
	"maps":    "generic, and younger than Yaegi's library: write the loop",
	"cmp":     "generic, and younger than Yaegi's library: write the comparison",
	"iter":    "Yaegi cannot range over functions",
	"unique":  "younger than Yaegi's library",
}

func TestInterpretedImports(t *testing.T) {
	for _, s := range interpretedSources(t) {
		for _, path := range imports(s) {
			first, _, _ := strings.Cut(path, "/")
			if strings.Contains(first, ".") && !strings.HasPrefix(path, module+"/") {
				t.Errorf("%s imports %s: Traefik interprets this package, and a plugin's archive carries nothing else's source: the standard library only", s.path, path)
			}
			if why := banned[path]; why != "" {
				t.Errorf("%s imports %s: Traefik interprets this package; %s", s.path, path, why)
			}
		}
	}
}

// TestStoreClient: the client of the store that edges may share is Caddy's room's alone.
func TestStoreClient(t *testing.T) {
	for _, dir := range []string{"mcphealth", "traefikplugin", "cmd", "internal", "docs"} {
		for _, s := range sources(t, dir) {
			for _, path := range imports(s) {
				if strings.HasPrefix(path, "github.com/redis/") {
					t.Errorf("%s imports %s: only caddymodule talks to a store", s.path, path)
				}
			}
		}
	}
}

// TestBuildLine: the line makes the compiler treat the file as Go 1.21, so that it
// refuses range over int and func, and gives loop variables the shared meaning
// that Yaegi gives them. Yaegi itself ignores it.
func TestBuildLine(t *testing.T) {
	const want = "//go:build go1.21"
	for _, s := range interpretedSources(t) {
		if first, _, _ := strings.Cut(s.text, "\n"); first != want {
			t.Errorf("%s begins with %q, want %q: without it the compiler accepts what Traefik's interpreter cannot run", s.path, first, want)
		}
	}
}

// TestInterpretedSyntax: what Yaegi 0.16.1 cannot run, or runs wrong. Each rule
// that is not in docs/adr/0003 is proved by a row of TestTraps in test/yaegi.
func TestInterpretedSyntax(t *testing.T) {
	for _, s := range interpretedSources(t) {
		ast.Inspect(s.file, func(n ast.Node) bool {
			if n != nil {
				if why := trap(n); why != "" {
					t.Errorf("%s: %s", s.at(n), why)
				}
			}
			return true
		})
	}
}

// trap says what Yaegi does to n, "" if it does it right.
func trap(n ast.Node) string {
	switch n := n.(type) {
	case *ast.SelectStmt:
		return "select: Yaegi keeps the cases of one statement in one slice, so that goroutines take each other's values; receive from one mailbox channel instead"
	case *ast.RangeStmt:
		return cmp.Or(trapRange(n.X), trapLater(n.Body))
	case *ast.CallExpr:
		if f, ok := n.Fun.(*ast.Ident); ok && (f.Name == "min" || f.Name == "max" || f.Name == "clear") {
			return f.Name + ": Yaegi does not know this builtin; write a helper of another name"
		}
	case *ast.FuncDecl:
		return trapFunc(n.Type)
	case *ast.FuncLit:
		return trapFunc(n.Type)
	case *ast.TypeSpec:
		if n.TypeParams != nil {
			return "type parameters: Yaegi runs the simplest cases only; write the type out"
		}
	case *ast.ForStmt:
		if n.Init != nil && n.Cond == nil && n.Post == nil {
			return "for with neither condition nor step: Yaegi runs the first clause again in each turn; move it before the loop"
		}
		return trapLater(n.Body)
	case *ast.SwitchStmt:
		if n.Tag == nil {
			return trapSwitch(n)
		}
	case *ast.AssignStmt:
		return trapAssign(n)
	case *ast.BlockStmt:
		return trapDefer(n)
	}
	return ""
}

// trapDefer: a deferred closure runs with the frame of its function locked, which one
// that was made in there locks, too.
func trapDefer(b *ast.BlockStmt) string {
	local := map[string]bool{}
	for _, s := range b.List {
		switch s := s.(type) {
		case *ast.AssignStmt:
			for i, x := range s.Rhs {
				_, made := x.(*ast.FuncLit)
				if name, ok := s.Lhs[min(i, len(s.Lhs)-1)].(*ast.Ident); ok && made {
					local[name.Name] = true
				}
			}
		case *ast.DeferStmt:
			hangs := false
			ast.Inspect(s.Call, func(n ast.Node) bool {
				if c, ok := n.(*ast.CallExpr); ok {
					f, named := c.Fun.(*ast.Ident)
					hangs = hangs || named && local[f.Name]
				}
				return true
			})
			if hangs {
				return "a deferred call of a closure that was made in the same function: Yaegi hangs; call it before each return"
			}
		}
	}
	return ""
}

// trapLater: what a turn of a loop defines is still the frame's, and by the time that
// compiled code calls a closure the last turn's.
func trapLater(body *ast.BlockStmt) string {
	local := map[string]bool{}
	late := false
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			return false // what it defines is its own
		case *ast.AssignStmt:
			for _, x := range n.Lhs {
				if name, ok := x.(*ast.Ident); ok && n.Tok == token.DEFINE {
					local[name.Name] = true
				}
			}
		case *ast.ValueSpec:
			for _, name := range n.Names {
				local[name.Name] = true
			}
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.SelectorExpr); ok && f.Sel.Name == "AfterFunc" {
				ast.Inspect(n.Args[len(n.Args)-1], func(n ast.Node) bool {
					name, ok := n.(*ast.Ident)
					late = late || ok && local[name.Name]
					return true
				})
			}
		}
		return true
	})
	if late {
		return "AfterFunc in a loop, with what the turn defined: Yaegi's closure sees the last turn's; start it in a function of its own"
	}
	return ""
}

// trapRange sees what can be seen without types; the compiler refuses the rest,
// as the build line has it.
func trapRange(x ast.Expr) string {
	switch x := ast.Unparen(x).(type) {
	case *ast.FuncLit:
		return "range over a function: Yaegi panics; write the loop"
	case *ast.BasicLit:
		if x.Kind == token.INT {
			return "range over an int: Yaegi panics; write a loop of three clauses"
		}
	case *ast.CallExpr:
		if f, ok := x.Fun.(*ast.Ident); ok && (f.Name == "len" || f.Name == "cap") {
			return "range over an int: Yaegi panics; write a loop of three clauses"
		}
	}
	return ""
}

func trapFunc(f *ast.FuncType) string {
	if f.TypeParams != nil {
		return "type parameters: Yaegi runs the simplest cases only; write the type out"
	}
	for _, p := range f.Params.List {
		if len(p.Names) == 0 {
			return "a parameter without a name: Yaegi gives it the place of the first variable, and panics; name it _"
		}
	}
	return ""
}

func trapSwitch(n *ast.SwitchStmt) string {
	for _, c := range n.Body.List {
		if len(c.(*ast.CaseClause).List) > 1 {
			return "several expressions in a case of a switch without tag: Yaegi looks at the first only; write ||"
		}
	}
	return ""
}

// trapAssign: Yaegi turns the whole statement into nothing where one of its values
// is already in place, as that of a call or a composite literal is.
func trapAssign(n *ast.AssignStmt) string {
	if len(n.Rhs) < 2 {
		return ""
	}
	for _, x := range n.Rhs {
		switch x := ast.Unparen(x).(type) {
		case *ast.CallExpr:
			if n.Tok == token.ASSIGN {
				return "a call among several values assigned: Yaegi drops the other values, silently; assign one by one"
			}
		case *ast.CompositeLit:
			return "a composite literal among several values: Yaegi drops the other values, silently; assign one by one"
		case *ast.UnaryExpr:
			if x.Op == token.ARROW {
				return "a receive among several values: Yaegi drops the other values, silently; assign one by one"
			}
		case *ast.Ident:
			if x.Name == "nil" {
				return "nil among several values: Yaegi panics; assign one by one"
			}
		}
	}
	return ""
}

// TestTrapSeesTraps: a rule that no longer fires would pass in silence.
func TestTrapSeesTraps(t *testing.T) {
	tests := []struct {
		code string
		want bool
	}{
		{"select {}", true},
		{"for range 3 {}", true},
		{"for i := range len(s) { _ = i }", true},
		{"for range (func(func() bool) {}) {}", true},
		{"for i := range s { _ = i }", false},
		{"_ = min(1, 2)", true},
		{"clear(m)", true},
		{"_ = x.min(1, 2)", false},
		{"f := func(int) {}", true},
		{"f := func(_ int) {}", false},
		{"type g[T any] struct{ v T }", true},
		{"for i := 0; ; { i++ }", true},
		{"for i := 0; ; i++ { }", false},
		{"switch { case a, b: }", true},
		{"switch { case a || b: }", false},
		{"switch x { case a, b: }", false},
		{"a, b = c, f()", true},
		{"a, b = c, nil", true},
		{"a, b = c, (<-d)", true},
		{"a, b := c, T{}", true},
		{"a, b := c, f()", false},
		{"a, b = f()", false},
		{"a, b = b, a+1", false},
		{"f := func() {}; defer f()", true},
		{"f := func() {}; defer func() { f() }()", true},
		{"f := func() {}; defer g(f)", false},
		{"defer func() {}()", false},
		{"for i := 0; i < 3; i++ { x := all[i]; time.AfterFunc(0, func() { x.f() }) }", true},
		{"for _, x := range all { y := x; if y != nil { context.AfterFunc(ctx, func() { f(y) }) } }", true},
		{"for i := 0; i < 3; i++ { var x = all[i]; time.AfterFunc(0, func() { x.f() }) }", true},
		{"for i := 0; i < 3; i++ { x := all[i]; soon(x) }", false},
		{"for i := 0; i < 3; i++ { time.AfterFunc(0, func() { x.f() }) }", false},
	}
	for _, tt := range tests {
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, "", fmt.Sprintf("package p\nfunc _() { %s }", tt.code), parser.SkipObjectResolution)
		if err != nil {
			t.Fatalf("%s: %v", tt.code, err)
		}
		seen := false
		ast.Inspect(file, func(n ast.Node) bool {
			seen = seen || n != nil && trap(n) != ""
			return true
		})
		if seen != tt.want {
			t.Errorf("trap(%s) = %v, want %v", tt.code, seen, tt.want)
		}
	}
}

// TestNoProtocolInAdapters: what is said to an MCP server is the core's to decide;
// a second place would come to disagree with it.
func TestNoProtocolInAdapters(t *testing.T) {
	words := []string{"initialize", "server/discover", "notifications/initialized"}
	for _, dir := range []string{"caddymodule", "traefikplugin"} {
		for _, s := range sources(t, dir) {
			ast.Inspect(s.file, func(n ast.Node) bool {
				lit, ok := n.(*ast.BasicLit)
				if !ok || lit.Kind != token.STRING {
					return true
				}
				text, _ := strconv.Unquote(lit.Value)
				for _, w := range words {
					if strings.Contains(text, w) {
						t.Errorf("%s: the string %s names %q: the protocol belongs into mcphealth/ alone", s.at(lit), lit.Value, w)
					}
				}
				return true
			})
		}
	}
}

// TestRootModule: the plugin catalogue rejects a plugin whose go.mod requires
// Traefik or Yaegi, directly or not; what needs them has a go.mod of its own.
func TestRootModule(t *testing.T) {
	b, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		for _, not := range []string{"github.com/traefik/yaegi", "github.com/traefik/traefik"} {
			if strings.Contains(line, not) {
				t.Errorf("go.mod: %q: Traefik's plugin catalogue rejects a plugin that requires %s", strings.TrimSpace(line), not)
			}
		}
	}
}

// TestNoWorkspace: a committed go.work changes what every user of the module
// builds with, and Traefik's catalogue does not know it.
func TestNoWorkspace(t *testing.T) {
	out, err := exec.Command("git", "ls-files", "--", "go.work", "*/go.work").Output()
	if err != nil {
		t.Skipf("git ls-files: %v; outside a checkout nothing is committed", err)
	}
	if files := strings.TrimSpace(string(out)); files != "" {
		t.Errorf("%s is committed; keep it out of the repository", files)
	}
}
