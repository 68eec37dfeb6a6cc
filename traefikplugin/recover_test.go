package traefikplugin

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"strings"
	"testing"
)

// A panic on a goroutine of a plugin ends Traefik: whatever runs on one of its own begins
// with a recover, itself or in the function that it calls.
func TestGoroutinesRecover(t *testing.T) {
	fset := token.NewFileSet()
	pkgs, err := parser.ParseDir(fset, ".", func(f fs.FileInfo) bool { return !strings.HasSuffix(f.Name(), "_test.go") }, 0)
	if err != nil {
		t.Fatal(err)
	}
	guarded := map[string]bool{} // functions by name
	ast.Inspect(pkgs["traefikplugin"], func(n ast.Node) bool {
		if f, ok := n.(*ast.FuncDecl); ok && recovers(f.Body) {
			guarded[f.Name.Name] = true
		}
		return true
	})
	found := 0
	ast.Inspect(pkgs["traefikplugin"], func(n ast.Node) bool {
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
	})
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
