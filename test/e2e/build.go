// Package e2e runs real MCP servers, real clients and the real command against
// each other, on loopback. Linux only: servers die with the test that started
// them (Pdeathsig).
package e2e

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
)

// Root is the top of the repository.
func Root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

// Cache is where built servers stay from one run to the next: $E2E_CACHE, or
// test/e2e/.cache.
func Cache() string {
	if dir := os.Getenv("E2E_CACHE"); dir != "" {
		return dir
	}
	return filepath.Join(Root(), "test", "e2e", ".cache")
}

// built remembers what this process has built; Go's own cache does the rest.
var built sync.Map // name → *sync.Once

// once runs build unless it has run for name, with other test processes locked
// out of the cache folder.
func once(t testing.TB, name string, build func()) {
	t.Helper()
	o, _ := built.LoadOrStore(name, new(sync.Once))
	o.(*sync.Once).Do(func() {
		if err := os.MkdirAll(filepath.Join(Cache(), "bin"), 0o755); err != nil {
			t.Fatal(err)
		}
		lock, err := os.Create(filepath.Join(Cache(), "lock"))
		if err != nil {
			t.Fatal(err)
		}
		defer lock.Close()
		if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		build()
	})
}

// GoBuild builds the program in dir (relative to the repository) as name and
// returns its path. flags are flags of go build, such as -modfile=… (relative
// to dir) or -tags=….
func GoBuild(t testing.TB, name, dir string, flags ...string) string {
	t.Helper()
	bin := filepath.Join(Cache(), "bin", name)
	once(t, bin, func() {
		run(t, filepath.Join(Root(), dir), "go", append(append([]string{"build", "-o", bin}, flags...), ".")...)
	})
	if _, err := os.Stat(bin); err != nil {
		t.Fatalf("%s was not built: %v", name, err) // an earlier test said why
	}
	return bin
}

// npmServers installs the servers of servers/npm and returns their folder, a
// copy in the cache: node looks for packages beside the program.
func npmServers(t testing.TB) string {
	t.Helper()
	from, to := filepath.Join(Root(), "test/e2e/servers/npm"), filepath.Join(Cache(), "npm")
	once(t, to, func() {
		if err := os.MkdirAll(to, 0o755); err != nil {
			t.Fatal(err)
		}
		installed := filepath.Join(to, "installed-lock.json")
		want, err := os.ReadFile(filepath.Join(from, "package-lock.json"))
		if err != nil {
			t.Fatal(err)
		}
		files, _ := filepath.Glob(filepath.Join(from, "*.*"))
		run(t, from, "cp", append(files, to)...)
		if have, _ := os.ReadFile(installed); bytes.Equal(have, want) {
			return
		}
		run(t, to, "npm", "ci", "--no-audit", "--no-fund")
		if err := os.WriteFile(installed, want, 0o644); err != nil {
			t.Fatal(err)
		}
	})
	if _, err := os.Stat(filepath.Join(to, "installed-lock.json")); err != nil {
		t.Fatalf("npm servers are not installed: %v", err)
	}
	return to
}

func run(t testing.TB, dir, name string, args ...string) {
	t.Helper()
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v in %s: %v\n%s", cmd.Args, dir, err, out)
	}
}
