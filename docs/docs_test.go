package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// pages are the pages that name tests, cases and each other.
func pages(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("*.md")
	if err != nil || len(files) == 0 {
		t.Fatalf("no pages: %v", err)
	}
	all := map[string]string{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all[f] = string(b)
	}
	return all
}

// testNames are the tests of the repository.
func testNames(t *testing.T) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w+)\(`)
	err := filepath.WalkDir("..", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() && (e.Name() == ".cache" || e.Name() == "bin" || e.Name() == ".git" || e.Name() == "node_modules") {
			if e != nil && e.IsDir() {
				return filepath.SkipDir
			}
			return err
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		b, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(b, -1) {
			names[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// A page that promises a test keeps the promise.
func TestNamedTestsExist(t *testing.T) {
	names, named := testNames(t), 0
	for file, page := range pages(t) {
		for _, m := range regexp.MustCompile("`((?:Test|Fuzz)\\w+)`").FindAllStringSubmatch(page, -1) {
			named++
			if !names[m[1]] {
				t.Errorf("%s names the test %s, which does not exist", file, m[1])
			}
		}
		for _, m := range regexp.MustCompile("`((?:FD|FU|RA|SE|PC|ST)\\d+\\w?)`").FindAllStringSubmatch(page, -1) {
			if _, err := os.Stat(filepath.Join("../test/suite/cases", m[1]+".json")); err != nil {
				t.Errorf("%s names the case %s, which is not in test/suite/cases", file, m[1])
			}
		}
	}
	if named == 0 {
		t.Error("no page names a test: this test looks for the wrong thing")
	}
}

// Each line of the probe specification has a test behind it, or says that it has none.
func TestProbeSpecification(t *testing.T) {
	sections := strings.Split(pages(t)["probe-spec.md"], "\n## ")[1:]
	if len(sections) != 7 {
		t.Errorf("%d sections, want one per line of the specification, 7", len(sections))
	}
	for _, s := range sections {
		title, _, _ := strings.Cut(s, "\n")
		for _, row := range []string{"| where |", "| literally |", "| tests |"} {
			if strings.Count(s, row) != 1 {
				t.Errorf("%q: want one row %s", title, row)
			}
		}
		if !strings.Contains(s, "`Test") && !strings.Contains(s, "| tests | none yet |") {
			t.Errorf("%q names no test", title)
		}
	}
}

// The runbook has a paragraph for each reason and each alert, and alerts lead to them.
func TestRunbook(t *testing.T) {
	page := pages(t)["runbook.md"]
	anchors := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^### (\w+)\n\n\w.{10,}$`).FindAllStringSubmatch(page, -1) {
		anchors[m[1]] = true
	}
	rules, err := os.ReadFile("../examples/prometheus/rules.yml")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{}
	for _, v := range mcphealth.Verdicts() {
		for _, r := range mcphealth.ReasonsOf(v) {
			want = append(want, string(r))
		}
	}
	alerts := regexp.MustCompile(`- alert: (\w+)`).FindAllStringSubmatch(string(rules), -1)
	leads := regexp.MustCompile(`runbook_url: \S+/docs/runbook\.md#(\w+)`).FindAllStringSubmatch(string(rules), -1)
	if len(alerts) < 10 || len(leads) != len(alerts) {
		t.Errorf("%d alerts, %d of them lead to the runbook: want at least 10, and all", len(alerts), len(leads))
	}
	lower := map[string]bool{}
	for a := range anchors {
		lower[strings.ToLower(a)] = true
	}
	for i, a := range alerts {
		if a[1] != "McpCredentialsRejected" { // its reason has one
			want = append(want, a[1])
		}
		if !lower[leads[i][1]] {
			t.Errorf("%s leads to #%s, which the runbook does not have", a[1], leads[i][1])
		}
	}
	for _, w := range want {
		if !anchors[w] {
			t.Errorf("the runbook has no paragraph for %s", w)
		}
		delete(anchors, w)
	}
	if len(anchors) > 0 {
		t.Errorf("the runbook has paragraphs for %v, which are no reason and no alert", anchors)
	}
}

// Links between pages lead somewhere.
func TestLinks(t *testing.T) {
	for file, page := range pages(t) {
		for _, m := range regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`).FindAllStringSubmatch(page, -1) {
			if _, err := os.Stat(m[1]); err != nil {
				t.Errorf("%s links to %s, which does not exist", file, m[1])
			}
		}
	}
}

// Flags that a page shows exist (docs/command.md is checked against the command).
func TestFlagsExist(t *testing.T) {
	all := pages(t)
	known := map[string]bool{}
	for _, m := range regexp.MustCompile("`(--[a-z-]+)").FindAllStringSubmatch(all["command.md"], -1) {
		known[m[1]] = true
	}
	for _, m := range regexp.MustCompile(`(?:^|[\s`+"`"+`])(--[a-z][a-z-]+)`).FindAllStringSubmatch(all["probe-spec.md"], -1) {
		if !known[m[1]] {
			t.Errorf("probe-spec.md shows %s, which docs/command.md does not know", m[1])
		}
	}
}
