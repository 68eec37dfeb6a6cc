// Package docs holds the pages that programs quote: what a reason means and what
// to do about it is written once, in verdicts.md.
package docs

import _ "embed"

// Verdicts is verdicts.md.
//
//go:embed verdicts.md
var Verdicts string
