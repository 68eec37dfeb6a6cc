package caddymodule

import (
	"bytes"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html/template"
	"math"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// fewRows is up to how many rows that need no attention are shown at once: 8, what
	// fits beside those that do.
	fewRows = 8

	// maxRows is how many upstreams the page shows, the worst first: 1000, which
	// browsers still take at once. The JSON has all.
	maxRows = 1000

	// maxFull is up to how many upstreams have all that is known of them in the page: 50.
	// Of more, those that need no attention get it when they are opened.
	maxFull = 50

	// maxBudgets is how many endpoints have their budgets shown in full, and maxBriefs
	// how many more in one line: 3 and 100.
	maxBudgets = 3
	maxBriefs  = 100
)

// The page is one document: what it looks like and does is in it, and its policy
// allows exactly that, by the hashes.
var (
	//go:embed status/page.html
	pageText string
	//go:embed status/page.css
	pageStyle string
	//go:embed status/page.js
	pageScript string

	pageTemplate = template.Must(template.New("").Funcs(template.FuncMap{
		"style":   func() template.CSS { return template.CSS(pageStyle) },
		"script":  func() template.JS { return template.JS(pageScript) },
		"iso":     func(t time.Time) string { return t.UTC().Format(isoMillis) },
		"ms":      inMilliseconds,
		"percent": inPercent,
		"rate":    asRate,
		"newest":  newestFirst,
		"strip":   stripOf,
		"list":    func(s []string) string { return strings.Join(s, ", ") },
	}).Parse(pageText))

	// contentPolicy is the page's Content-Security-Policy.
	contentPolicy = "default-src 'none'; style-src 'sha256-" + hashOf(pageStyle) + "'; script-src 'sha256-" + hashOf(pageScript) +
		"'; img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)

const isoMillis = "2006-01-02T15:04:05.000Z"

func hashOf(s string) string {
	sum := sha256.Sum256([]byte(s))
	return base64.StdEncoding.EncodeToString(sum[:])
}

// A layout is the page in pieces: elements with an id of their own, each of which
// stands in a container and may change by itself.
type layout struct {
	doc    *statusDocument
	pieces map[string]piece
	order  map[string][]string // container → pieces
}

// A piece is what its template shows.
type piece interface{ template() string }

type (
	// overviewPiece is the band on top.
	overviewPiece struct {
		State    mcphealth.State
		None     bool // no pools
		Headline string
		Since    *time.Time
		Counts   statusCounts
	}
	// poolPiece is a pool with containers for its rows.
	poolPiece struct {
		ID        string
		Path      string
		State     mcphealth.State
		Since     *time.Time
		Counts    statusCounts
		Unchecked int
		Names     string
		Calm      int // rows that need no attention
		Few       bool
	}
	rowPiece struct {
		ID    string
		Open  bool
		Brief bool // the rest comes when it is opened
		U     statusUpstream
	}
	// restPiece has the container for the pools that need no attention.
	restPiece struct {
		Calm, Left int
		Few        bool
	}
	budgetPiece struct {
		Full, Brief []statusEndpoint
		Left        int
	}
	changesPiece struct{ Changes []statusChange }
)

func (overviewPiece) template() string { return "overview" }
func (poolPiece) template() string     { return "pool" }
func (rowPiece) template() string      { return "row" }
func (restPiece) template() string     { return "rest" }
func (budgetPiece) template() string   { return "budget" }
func (changesPiece) template() string  { return "changes" }

// Calm: it needs no attention.
func (r rowPiece) Calm() bool { return r.U.calm() }

// Chart is the last probes.
func (r rowPiece) Chart() chart { return chartOf(r.U.upstreamDetail.History) }

// Line is what the filter searches, in lower case.
func (r rowPiece) Line() string {
	u := r.U
	return strings.ToLower(strings.Join([]string{
		u.Upstream, u.Path, u.Host, string(u.State), string(u.Reason), u.Server.Name, u.Server.Version, string(u.Era),
	}, " "))
}

func (d *statusDocument) layout() *layout {
	l := &layout{doc: d, pieces: make(map[string]piece, d.Counts.Total+len(d.Pools)+4), order: map[string][]string{}}
	l.add("top", "overview", overviewPiece{d.State, len(d.Pools) == 0, d.Headline, d.Since, d.Counts})
	calm, left := 0, maxRows
	for _, p := range d.Pools {
		if p.calm() {
			calm++
		}
	}
	for _, p := range d.Pools {
		if left == 0 {
			break
		}
		rows := p.Upstreams[:min(left, len(p.Upstreams))]
		left -= len(rows)
		l.addPool(p, rows)
	}
	l.add("more", "rest", restPiece{Calm: calm, Left: d.Counts.Total - (maxRows - left), Few: calm <= fewRows})
	full := min(len(d.Endpoints), maxBudgets)
	brief := min(len(d.Endpoints), maxBudgets+maxBriefs)
	l.add("aside", "budget", budgetPiece{d.Endpoints[:full], d.Endpoints[full:brief], len(d.Endpoints) - brief})
	l.add("aside", "changes", changesPiece{d.Changes})
	return l
}

func (l *layout) add(container, id string, p piece) {
	l.order[container] = append(l.order[container], id)
	l.pieces[id] = p
}

func (l *layout) addPool(p statusPool, rows []statusUpstream) {
	v := poolPiece{ID: p.id, Path: p.Path, State: p.State, Since: p.Since, Counts: p.Counts, Unchecked: p.Unchecked}
	container := "pools"
	if p.calm() {
		container = "calm"
	}
	var names []string
	for _, u := range rows {
		names = append(names, u.Upstream)
		row := "-bad"
		if u.calm() {
			v.Calm++
			row = "-calm"
		}
		l.add(p.id+row, u.id, rowPiece{ID: u.id, Open: u.open, Brief: u.calm() && l.doc.Counts.Total > maxFull, U: u})
	}
	v.Few = v.Calm <= fewRows
	v.Names = someOf(names)
	l.add(container, p.id, v)
}

// someOf names the first of many.
func someOf(names []string) string {
	const some = 3
	slices.Sort(names)
	if len(names) <= some {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:some], ", "), len(names)-some)
}

// A pageFilter is what the visitor wants to see.
type pageFilter struct {
	Text     string // in the upstream's line
	Problems bool   // only what needs attention
}

func filterOf(q url.Values) pageFilter {
	return pageFilter{Text: strings.TrimSpace(q.Get("q")), Problems: q.Get("show") == "problems"}
}

// On reports whether anything is filtered.
func (f pageFilter) On() bool { return f.Text != "" || f.Problems }

// hides reports whether the filter hides the row. The script does the same.
func (f pageFilter) hides(r rowPiece) bool {
	return f.Problems && r.Calm() || !strings.Contains(r.Line(), strings.ToLower(f.Text))
}

// sheet is what the templates get.
type sheet struct {
	*layout
	Filter pageFilter
	whole  bool // the whole page: containers are filled
	V      piece
}

// page renders all of it.
func (l *layout) page(f pageFilter) ([]byte, error) {
	var b bytes.Buffer
	err := pageTemplate.ExecuteTemplate(&b, "page", sheet{layout: l, Filter: f, whole: true})
	return b.Bytes(), err
}

// piece renders a piece alone, its containers empty.
func (l *layout) piece(p piece) string {
	var b strings.Builder
	if err := (sheet{layout: l, V: p}).write(&b); err != nil {
		return "" // cannot happen: the page is made of the same
	}
	return b.String()
}

// row renders a row with all that is known; empty if there is none of this id.
func (l *layout) row(id string) string {
	r, ok := l.pieces[id].(rowPiece)
	if !ok {
		return ""
	}
	r.Brief = false
	return l.piece(r)
}

func (s sheet) write(b *strings.Builder) error {
	return pageTemplate.ExecuteTemplate(b, s.V.template(), s)
}

// Fill is what stands in the container.
func (s sheet) Fill(container string) (template.HTML, error) {
	if !s.whole {
		return "", nil
	}
	var b strings.Builder
	for _, id := range s.order[container] {
		s.V = s.pieces[id]
		if r, ok := s.V.(rowPiece); ok && s.Filter.Text != "" && !s.Hidden() {
			r.Brief = false // it was asked for, perhaps without JavaScript
			s.V = r
		}
		if err := s.write(&b); err != nil {
			return "", err
		}
	}
	return template.HTML(b.String()), nil
}

// Hidden reports whether the filter hides the piece.
func (s sheet) Hidden() bool {
	switch v := s.V.(type) {
	case rowPiece:
		return s.Filter.hides(v)
	case poolPiece:
		return s.Filter.On() && s.Shown(v.ID+"-bad")+s.Shown(v.ID+"-calm") == 0
	}
	return false
}

// Shown counts the rows of a container that the filter does not hide.
func (s sheet) Shown(container string) (n int) {
	for _, id := range s.order[container] {
		if r, ok := s.pieces[id].(rowPiece); ok && !s.Filter.hides(r) {
			n++
		}
	}
	return n
}

func (s sheet) Now() time.Time     { return s.doc.At }
func (s sheet) Public() bool       { return s.doc.public }
func (s sheet) Title() string      { return s.title() }
func (s sheet) Icon() template.URL { return s.icon() }
func (s sheet) State() string      { return string(s.doc.State) }

// title is that of the window: the sign first, for a narrow tab.
func (l *layout) title() string { return signs[l.doc.State].text + " " + l.doc.Headline }

func (l *layout) icon() template.URL { return signs[l.doc.State].icon }

// signs tell the states apart by their shape.
var signs = map[mcphealth.State]struct {
	text string
	icon template.URL
}{
	mcphealth.Up:           {"✓", favicon(`<circle cx='8' cy='8' r='8' fill='#1a7f4b'/><path d='M4 8.5l3 3 5-6' fill='none' stroke='#fff' stroke-width='2'/>`)},
	mcphealth.UpDegraded:   {"▲", favicon(`<path d='M8 0l8 15H0z' fill='#e0a100'/><path d='M8 5v5m0 1.5v2' stroke='#000' stroke-width='2'/>`)},
	mcphealth.Down:         {"✕", favicon(`<path d='M5 0h6l5 5v6l-5 5H5l-5-5V5z' fill='#c5221f'/><path d='M5 5l6 6m0-6l-6 6' stroke='#fff' stroke-width='2'/>`)},
	mcphealth.StateUnknown: {"?", favicon(`<path d='M8 0l8 8-8 8-8-8z' fill='#5f6672'/><path d='M6 6.500a2 2 0 1 1 2 2v1m0 1v1.500' fill='none' stroke='#fff' stroke-width='1.500'/>`)},
}

func favicon(body string) template.URL {
	svg := "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>" + body + "</svg>"
	return template.URL("data:image/svg+xml," + url.PathEscape(svg))
}

// Clock is the time of day, with the date if that is another.
func (s sheet) Clock(t time.Time) string {
	if t, now := t.UTC(), s.Now(); t.Format(time.DateOnly) != now.Format(time.DateOnly) {
		return t.Format("Jan 2, 15:04 UTC")
	}
	return t.UTC().Format("15:04:05 UTC")
}

// Ago is how long ago it was. The script says this, and what follows, in the same words.
func (s sheet) Ago(t time.Time) string { return s.For(t) + " ago" }

// For is how long it has been so.
func (s sheet) For(t time.Time) string { return span(max(0, s.Now().Sub(t))) }

// Due is how long until then.
func (s sheet) Due(t time.Time) string {
	if d := t.Sub(s.Now()); d >= time.Second {
		return "in " + span(d)
	}
	return "now"
}

func span(d time.Duration) string {
	n := int(d.Seconds())
	switch {
	case n < 60:
		return fmt.Sprintf("%d s", n)
	case n < 3600:
		return fmt.Sprintf("%d min", n/60)
	case n < 48*3600:
		return fmt.Sprintf("%d h %d min", n/3600, n/60%60)
	}
	return fmt.Sprintf("%d d %d h", n/86400, n/3600%24)
}

func inMilliseconds(ms float64) string {
	switch {
	case ms >= 10:
		return strconv.FormatFloat(math.Round(ms), 'f', 0, 64) + " ms"
	case ms >= 1:
		return strconv.FormatFloat(ms, 'f', 1, 64) + " ms"
	}
	return strconv.FormatFloat(ms, 'f', 2, 64) + " ms"
}

// inPercent cuts, for what is not whole must not look so: 99.999 is "99.99%".
func inPercent(share *float64) string {
	if share == nil {
		return "–"
	}
	return strconv.FormatFloat(math.Floor(*share*1e4+1e-6)/100, 'f', -1, 64) + "%"
}

func asRate(rate *float64) string {
	switch {
	case rate == nil:
		return "–"
	case *rate >= 10 || *rate == 0:
		return strconv.FormatFloat(*rate, 'f', 0, 64) + "×"
	case *rate < 0.1:
		return "<0.1×"
	}
	return strconv.FormatFloat(*rate, 'f', 1, 64) + "×"
}

func newestFirst(all []upstreamMove) []upstreamMove {
	all = slices.Clone(all)
	slices.Reverse(all)
	return all
}

// A chart is bars side by side. Bars that are bad reach to the top, those that are not
// never do.
type chart struct {
	Label          string
	Width          int
	Ok, Weak, Fail string // paths
}

const (
	barStep   = 3  // from bar to bar
	barHeight = 24 // of one that is bad
	barMax    = 19 // of one that is not
)

// chartOf shows how long the last probes took, and which failed. What took much longer
// than usual is cut off: the first one, which connects, always does.
func chartOf(all []probeSample) chart {
	var took []float64
	for _, s := range all {
		if s.Verdict != mcphealth.Dead {
			took = append(took, s.Ms)
		}
	}
	label, scale := fmt.Sprintf("last %d probes, %d failed", len(all), len(all)-len(took)), 0.0
	if len(took) > 0 {
		slices.Sort(took)
		median, longest := took[len(took)/2], took[len(took)-1]
		label += fmt.Sprintf("; median %s, longest %s", inMilliseconds(median), inMilliseconds(longest))
		scale = barMax / max(min(longest, 4*median), 1e-6)
	}
	var ok, weak, fail []byte
	for i, s := range all {
		n, h := maxHistory-len(all)+i, int(min(barMax, max(2, s.Ms*scale)))
		switch s.Verdict {
		case mcphealth.Dead:
			fail = appendBar(fail, n, barHeight, barHeight)
		case mcphealth.Ready, mcphealth.Alive:
			ok = appendBar(ok, n, barHeight, h)
		default:
			weak = appendBar(weak, n, barHeight, h)
		}
	}
	return chart{label, maxHistory * barStep, string(ok), string(weak), string(fail)}
}

// stripOf shows the availability of spans of time, named by their unit: what was lost
// hangs from the top.
func stripOf(shares []*float64, unit string) chart {
	var ok, fail []byte
	known, lossy := 0, 0
	for i, s := range shares {
		if s == nil {
			continue
		}
		known++
		lost := 0
		if *s < 1 {
			lossy++
			lost = max(5, int((1-*s)*barHeight)) // the least that is seen
			fail = appendBar(fail, i, lost, lost)
		}
		if rest := barMax - lost; rest > 0 {
			ok = appendBar(ok, i, barHeight, rest)
		}
	}
	label := fmt.Sprintf("last %d %ss: nothing known", len(shares), unit)
	if known > 0 {
		label = fmt.Sprintf("last %d %ss: losses in %d of the %d that are known", len(shares), unit, lossy, known)
	}
	return chart{Label: label, Width: len(shares) * barStep, Ok: string(ok), Fail: string(fail)}
}

// appendBar appends the n-th bar to a path, drawn upwards from bottom.
func appendBar(b []byte, n, bottom, height int) []byte {
	b = strconv.AppendInt(append(b, 'M'), int64(n*barStep+1), 10)
	b = strconv.AppendInt(append(b, ' '), int64(bottom), 10)
	return strconv.AppendInt(append(b, "v-"...), int64(height), 10)
}
