// Package yaegi_test runs the core interpreted, as Traefik runs it, and compares
// it with itself compiled. Files outside this module are unknown to the test
// cache: run it with -count=1.
package yaegi_test

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/yaegi/driver"
	"github.com/traefik/yaegi/interp"
	"github.com/traefik/yaegi/stdlib"
)

const (
	module  = "github.com/mcphealth/mcphealth"
	core    = module + "/mcphealth"
	drivers = module + "/test/yaegi/driver"
	// loadLimit is what the plugin catalogue allows an import to take; Traefik
	// itself sets none.
	loadLimit = 10 * time.Second
)

// copyPackages puts packages of this repository where an interpreter with this
// GOPATH finds them: Traefik and its catalogue unpack the module's archive there.
// drop names the files to leave out, beside everything that is not Go.
func copyPackages(gopath string, drop func(name string) bool, paths ...string) error {
	for _, path := range paths {
		from := filepath.Join("..", "..", strings.TrimPrefix(path, module))
		err := filepath.WalkDir(from, func(name string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() || !strings.HasSuffix(name, ".go") || drop(name) {
				return err
			}
			rel, err := filepath.Rel(from, name)
			if err != nil {
				return err
			}
			return copyFile(name, filepath.Join(gopath, "src", path, rel))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o644)
}

func tests(name string) bool { return strings.HasSuffix(name, "_test.go") }

// bare is an interpreter with the standard library and nothing else: no unsafe,
// no syscall, no os/exec, as the catalogue makes it.
func bare(gopath string) (*interp.Interpreter, error) {
	i := interp.New(interp.Options{GoPath: gopath})
	return i, i.Use(stdlib.Symbols)
}

// TestLoads: the catalogue rejects a plugin that does not load within 10 s in a
// bare interpreter, and Traefik would start without it.
func TestLoads(t *testing.T) {
	gopath := t.TempDir()
	if err := copyPackages(gopath, tests, core); err != nil {
		t.Fatal(err)
	}
	i, err := bare(gopath)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), loadLimit)
	defer cancel()
	start := time.Now()
	if _, err := i.EvalWithContext(ctx, `import "`+core+`"`); err != nil {
		t.Fatalf("import %q: %v", core, err)
	}
	t.Logf("loaded in %v", time.Since(start).Round(time.Millisecond))
	v, err := i.EvalWithContext(ctx, `string(mcphealth.Ready)`)
	if err != nil || v.String() != "ready" {
		t.Errorf("mcphealth.Ready = %v, %v, want ready", v, err)
	}
}

// drive is package driver, compiled or interpreted. Its fields are named as the
// functions are.
type drive struct {
	Probe       func(n int, settings map[string]string) []string
	RequestID   func(body string) string
	Unavailable func(method, body, reason string, retryMs int) string
	MayHaveRun  func(method, body, reason string) string
	SessionLost func(method, body, reason string) string
	Outcome     func(contentType, body string, n int) string
	BadTarget   func(settings map[string]string) string
	BadSchedule func(interval, fast, fall, rise int) string
	Words       func() string

	Tags         func(secret, owner string, ids []string) []string
	HasSessions  func(version string) bool
	OpensSession func(method, body string) bool

	StartFleet    func(url string, n, intervalMs, fastMs, timeoutMs, limit int) string
	FleetIn       func(state string) int
	FleetTier     func(tier int) int
	FleetStates   func() []string
	FleetProbes   func() []int
	FleetMixed    func() []string
	FleetSnapshot func(i int) string
	FleetTraffic  func(i int, ended string)
	FleetProbe    func(i int)
	CloseFleet    func()
}

var compiled = drive{
	driver.Probe, driver.RequestID, driver.Unavailable, driver.MayHaveRun, driver.SessionLost, driver.Outcome, driver.BadTarget,
	driver.BadSchedule, driver.Words, driver.Tags, driver.HasSessions, driver.OpensSession, driver.StartFleet, driver.FleetIn, driver.FleetTier, driver.FleetStates,
	driver.FleetProbes, driver.FleetMixed, driver.FleetSnapshot, driver.FleetTraffic, driver.FleetProbe, driver.CloseFleet,
}

var interpretOnce = sync.OnceValues(interpret)

// interpreted is the same from one interpreter for all tests: Traefik, too, keeps
// one for the life of the process.
func interpreted(t *testing.T) drive {
	t.Helper()
	d, err := interpretOnce()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func interpret() (drive, error) {
	var d drive
	gopath, err := os.MkdirTemp("", "mcphealth-yaegi-")
	if err != nil {
		return d, err
	}
	defer os.RemoveAll(gopath) // the sources are read once
	if err := copyPackages(gopath, tests, core, drivers); err != nil {
		return d, err
	}
	i, err := bare(gopath)
	if err != nil {
		return d, err
	}
	if _, err := i.Eval(`import "` + drivers + `"`); err != nil {
		return d, err
	}
	fields := reflect.ValueOf(&d).Elem()
	for n := range fields.NumField() {
		f, err := i.Eval("driver." + fields.Type().Field(n).Name)
		if err != nil {
			return d, err
		}
		fields.Field(n).Set(f)
	}
	return d, nil
}
