package traefikplugin

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// A panic on a goroutine of a plugin ends Traefik: whatever runs on one of its own begins
// with a recover, itself or in the function that it calls.
func TestGoroutinesRecover(t *testing.T) {
	fset := token.NewFileSet()
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var files []*ast.File
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	guarded := map[string]bool{} // functions by name
	for _, file := range files {
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && recovers(f.Body) {
				guarded[f.Name.Name] = true
			}
		}
	}
	found := 0
	look := func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			t.Errorf("%s: a go statement: use time.AfterFunc(0, …)", fset.Position(n.Pos()))
		case *ast.CallExpr:
			if f, ok := n.Fun.(*ast.SelectorExpr); !ok || f.Sel.Name != "AfterFunc" {
				return true
			}
			found++
			f, ok := n.Args[1].(*ast.FuncLit)
			if !ok || !recovers(f.Body) && !guarded[called(f.Body)] {
				t.Errorf("%s: no recover", fset.Position(n.Pos()))
			}
		}
		return true
	}
	for _, file := range files {
		ast.Inspect(file, look)
	}
	if found < 10 {
		t.Errorf("%d calls of AfterFunc found, want ten or more", found)
	}
}

// recovers: the first statement is the deferred recover.
func recovers(body *ast.BlockStmt) bool {
	if body == nil || len(body.List) == 0 {
		return false
	}
	d, ok := body.List[0].(*ast.DeferStmt)
	found := false
	if ok {
		ast.Inspect(d, func(n ast.Node) bool {
			id, ok := n.(*ast.Ident)
			found = found || ok && id.Name == "recover"
			return true
		})
	}
	return found
}

// called is the method that a body of one statement calls.
func called(body *ast.BlockStmt) string {
	if len(body.List) != 1 {
		return ""
	}
	e, _ := body.List[0].(*ast.ExprStmt)
	if e == nil {
		return ""
	}
	c, _ := e.X.(*ast.CallExpr)
	if c == nil {
		return ""
	}
	if s, ok := c.Fun.(*ast.SelectorExpr); ok {
		return s.Sel.Name
	}
	return ""
}
