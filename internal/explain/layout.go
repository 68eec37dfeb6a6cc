package explain

import (
	"fmt"
	"io"
	"strings"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// width is that of a terminal nobody has widened.
const width = 80

// Print writes the report for a person, in lines of 80 characters.
func (r Report) Print(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", r.URL)
	row := func(check, got, concludes, mark string) {
		b.WriteString(strings.TrimRight(fmt.Sprintf("%-25s%-36s%-11s%s", check, got, concludes, mark), " ") + "\n")
	}
	row("CHECK", "GOT", "CONCLUDES", "")
	for _, c := range r.Checks {
		row(c.Rule, c.Got, c.Concludes, map[bool]string{true: "wrong"}[c.Wrong])
	}
	row("mcphealth", ourAnswer(r.MCPHealth), ourConclusion(r.MCPHealth), "")

	o := r.MCPHealth
	b.WriteString("\n")
	paragraph(&b, "", fmt.Sprintf("mcphealth: %s (%s). %s", o.Verdict, o.Reason, r.Meaning))
	paragraph(&b, "  ", o.Detail)
	paragraph(&b, "  ", "What to do: "+r.Advice)
	for _, warning := range o.Warnings {
		paragraph(&b, "  ", "Warning: "+warning)
	}
	for _, c := range r.Checks {
		if who := r.alike(c); c.Why != "" && who != "" {
			b.WriteString("\n")
			paragraph(&b, "", who+": "+c.Why)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// alike says whose reason c's is, as the head of its paragraph; "" if an earlier
// check has the same and has said it.
func (r Report) alike(c Check) string {
	var names []string
	for _, other := range r.Checks {
		if other.Why == c.Why && other.Concludes == c.Concludes {
			name, _, _ := strings.Cut(other.Rule, ",")
			names = append(names, name)
		}
	}
	if first, _, _ := strings.Cut(c.Rule, ","); names[0] != first {
		return ""
	}
	who, verb := names[0], " is"
	if n := len(names) - 1; n > 0 {
		who, verb = strings.Join(names[:n], ", ")+" and "+names[n], " are"
	}
	switch {
	case c.Concludes == notAsked:
		return who + verb + " not asked"
	case c.Wrong:
		return who + verb + " wrong"
	}
	return who
}

// ourAnswer is the answer that decided, as the checks' are written.
func ourAnswer(r mcphealth.Result) string {
	if len(r.Steps) == 0 {
		return "-"
	}
	last := r.Steps[len(r.Steps)-1]
	what := map[string]string{"result": "JSON-RPC result", "text": "text", "foreign": "no JSON-RPC"}[last.Outcome]
	switch {
	case last.Outcome == "error":
		what = fmt.Sprintf("JSON-RPC error %d", last.RPCCode)
	case what == "":
		what = last.Outcome
	}
	if last.HTTPStatus == 0 {
		return what
	}
	return fmt.Sprintf("%d, %s", last.HTTPStatus, what)
}

func ourConclusion(r mcphealth.Result) string {
	switch r.Verdict.Vote() {
	case 1:
		return up
	case -1:
		return down
	}
	return "unknown"
}

// paragraph writes s in lines of at most width, the first and the rest behind
// indent.
func paragraph(b *strings.Builder, indent, s string) {
	line := indent
	for _, word := range strings.Fields(s) {
		if line != indent && len([]rune(line))+1+len([]rune(word)) > width {
			b.WriteString(line + "\n")
			line = indent
		}
		if line != indent {
			line += " "
		}
		line += word
	}
	b.WriteString(line + "\n")
}
