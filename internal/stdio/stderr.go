package stdio

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"unicode"
)

const (
	// maxStderr is how much of a child's stderr is passed on: 64 KiB, several
	// stack traces.
	maxStderr = 64 << 10
	// maxStderrLine cuts what has no line ends.
	maxStderrLine = 4 << 10
)

// passStderr copies r to w, line by line and printable only, up to maxStderr
// bytes; the rest is read and dropped, for a child must never wait for us.
func passStderr(w io.Writer, r io.Reader) {
	if w != nil {
		left := maxStderr
		lines := bufio.NewReaderSize(r, maxStderrLine)
		for left > 0 {
			line, _, err := lines.ReadLine()
			if err != nil {
				return
			}
			line = line[:min(len(line), left)]
			left -= len(line) + 1
			fmt.Fprintf(w, "stderr: %s\n", printable(string(line)))
		}
		fmt.Fprintln(w, "stderr: … (the rest is not shown)")
		r = lines
	}
	_, _ = io.Copy(io.Discard, r)
}

// printable keeps a server from writing to the terminal's controls.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return '�'
	}, s)
}
