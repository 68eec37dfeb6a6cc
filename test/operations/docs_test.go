package operations

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// Every block that the pages show is part of an example, which another test here
// runs; documents that programs answer with, and Go, have tests of their own.
func TestBlocksAreExamples(t *testing.T) {
	examples := ""
	err := filepath.WalkDir(filepath.Join(e2e.Root(), "examples"), func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		examples += string(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	blocks := 0
	for _, page := range []string{"docs/operations.md", "docs/kubernetes.md"} {
		b, err := os.ReadFile(filepath.Join(e2e.Root(), page))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$").FindAllStringSubmatch(string(b), -1) {
			if m[1] == "json" || m[1] == "go" {
				continue
			}
			blocks++
			if !strings.Contains(examples, m[2]) {
				t.Errorf("%s shows what is in no example:\n%s", page, m[2])
			}
		}
	}
	if blocks < 12 {
		t.Errorf("%d blocks, want 12 or more: this test looks at the wrong place", blocks)
	}
}
