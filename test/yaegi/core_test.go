package yaegi_test

import (
	"path/filepath"
	"strings"
	"testing"
)

// coreTests are the core's own test files: "" runs interpreted, anything else is
// why it does not. Tests are written in the whole language, which Yaegi does not
// know; where it matters, a test beside this one shows the same by other means.
var coreTests = map[string]string{
	"answer_test.go":    "",
	"absentees_test.go": "imports testing/synctest, as checker_test.go does; TestPluginSticky",
	"share_test.go":     "imports testing/synctest, as checker_test.go does",
	"scheduler_test.go": "imports testing/synctest, as checker_test.go does; TestFleet",
	"refusal_test.go":   "needs depth_test.go; TestSame",
	"past_test.go":      "",
	"outcome_test.go":   "Yaegi panics as it loads it (nil type)",
	"line_test.go":      "puts a method value of a literal where Yaegi mistypes it; TestDeathWatch",
	"burn_test.go":      "Yaegi panics as it loads it (nil type)",
	"config_test.go":    "",
	"threshold_test.go": "",
	"captures_test.go":  "imports internal/mcpfake, which would be interpreted too; TestSameCaptures plays the same captures",
	"checker_test.go":   "imports testing/synctest, which is younger than Yaegi; TestFleet and the tests beside it run checkers in real time",
	"depth_test.go":     "needs checker_test.go; TestSame asks the deeper questions",
	"exchange_test.go":  "needs reasons_test.go; TestSame probes over plain lines",
	"fuzz_test.go":      "fuzz targets, no tests",
	"main_test.go":      "the leak check of the compiled tests",
	"hostile_test.go":   "bounds memory and time as compiled code has them, and needs captures_test.go",
	"probespec_test.go": "needs hostile_test.go; TestSameCaptures knows any_response",
	"race_off_test.go":  "a constant",
	"race_on_test.go":   "a constant",
	"reasons_test.go":   "puts a method value of a literal into a struct, which Yaegi mistypes (TestTraps); TestSameUnreachable and TestSameTLS",
	"steady_test.go":    "needs checker_test.go and has method expressions; TestFleet",
	"tag_test.go":       "takes a minute, and counts allocations as compiled code has them; TestSameTags and TestSameSessionWords",
}

// TestCoreTests runs the core's own tests interpreted, as `yaegi test` would.
func TestCoreTests(t *testing.T) {
	files, err := filepath.Glob("../../mcphealth/*_test.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no test files: %v", err)
	}
	for _, file := range files {
		name := filepath.Base(file)
		t.Run(name, func(t *testing.T) {
			why, known := coreTests[name]
			if !known {
				t.Fatal("not in coreTests: run it interpreted, or say there why not")
			}
			if why != "" {
				t.Skip(why)
			}
			runCoreTests(t, name)
		})
	}
}

// runCoreTests loads the core with one of its test files, and runs what is in it.
func runCoreTests(t *testing.T, file string) {
	t.Helper()
	gopath := t.TempDir()
	others := func(name string) bool { return tests(name) && filepath.Base(name) != file }
	if err := copyPackages(gopath, others, core); err != nil {
		t.Fatal(err)
	}
	i, err := bare(gopath)
	if err != nil {
		t.Fatal(err)
	}
	if err := i.EvalTest(core); err != nil {
		t.Fatal(err)
	}
	for name, symbol := range i.Symbols(core)[core] {
		if f, ok := symbol.Interface().(func(*testing.T)); ok && strings.HasPrefix(name, "Test") {
			t.Run(name, f)
		}
	}
}
