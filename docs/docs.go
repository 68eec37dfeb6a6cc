// Package docs holds the pages that programs quote: what a reason means and what
// to do about it is written once, in verdicts.md.
package docs

import (
	_ "embed"
	"regexp"
	"strings"
	"sync"
)

// Verdicts is verdicts.md.
//
//go:embed verdicts.md
var Verdicts string

// Words says what a reason means and what to do about it, as verdicts.md does. Both
// are empty for a word that is no reason.
func Words(reason string) (meaning, advice string) {
	w := words()[reason]
	return w[0], w[1]
}

// row is a reason's row: word, meaning, example on the wire, what to do.
var row = regexp.MustCompile("^\\| `([a-z_]+)` \\| (.+) \\| .+ \\| (.+) \\|$")

var words = sync.OnceValue(func() map[string][2]string {
	all := map[string][2]string{}
	for line := range strings.Lines(Verdicts) {
		if m := row.FindStringSubmatch(strings.TrimSpace(line)); m != nil {
			all[m[1]] = [2]string{strings.ReplaceAll(m[2], "`", ""), strings.ReplaceAll(m[3], "`", "")}
		}
	}
	return all
})
