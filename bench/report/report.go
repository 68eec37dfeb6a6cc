// Package report writes what the benchmarks measured into the pages that show it.
package report

import (
	"fmt"
	"os"
	"strings"
)

// ReplaceSection puts text between the marks of a section: "<!-- bench NAME -->" and
// "<!-- end -->".
func ReplaceSection(file, name, text string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	begin, end := "<!-- bench "+name+" -->\n", "<!-- end -->"
	before, rest, ok := strings.Cut(string(b), begin)
	_, after, ended := strings.Cut(rest, end)
	if !ok || !ended {
		return fmt.Errorf("%s has no section %q", file, begin+end)
	}
	return os.WriteFile(file, []byte(before+begin+"\n"+strings.TrimSpace(text)+"\n\n"+end+after), 0o644)
}

// Table is rows of cells as markdown; the first is the head.
func Table(rows [][]string) string {
	var out strings.Builder
	for i, cells := range rows {
		fmt.Fprintf(&out, "| %s |\n", strings.Join(cells, " | "))
		if i == 0 {
			fmt.Fprintf(&out, "|%s\n", strings.Repeat("---|", len(cells)))
		}
	}
	return out.String()
}
