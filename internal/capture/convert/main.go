// Command convert turns the recorder's JSON captures into the txtar files of
// mcphealth/testdata/captures: of some hundred exchanges with each server those
// that a prober may meet, with the facts of facts.go on top.
//
//	go run ./internal/capture/convert -from DIR -to mcphealth/testdata/captures
//
// DIR holds one JSON file per server, and those that are no MCP server in
// not-mcp/. The files need not be at hand to run the tests.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/mcphealth/mcphealth/internal/mcpfake"
)

// recording is a capture as the recorder wrote it (format 1).
type recording struct {
	Server struct {
		Name, Version, Mode, Runtime, Endpoint, Notes string
	}
	Exchanges []struct {
		Probe, Title string
		Request      struct {
			Method, Path, Host string
			Headers            map[string]string
			Body               json.RawMessage
		}
		Match    struct{ NoAuth bool }
		Response struct {
			Status  int
			Reason  string
			Headers [][2]string
			Body    string
			CutFrom int `json:"body_cut_from"`
			End     string
			Ms      float64
			Error   string
		}
	}
}

// What a prober may meet, by the recorder's names: server/discover without (a,
// a2) and with a ghost session (f7), ping without a session (d2), with a ghost
// (f), in a session (e3) and after its end (e8), initialize (e1), tools/list
// (e4), DELETE (e7), and what a server says without credentials (z1, z2).
// GET (h1) is asked of HTTP+SSE servers only.
var kept = map[string]bool{"a2": true, "d2": true, "e1": true, "e3": true, "e4": true, "e7": true, "e8": true,
	"f": true, "f7": true, "z1": true, "z2": true}

func main() {
	from := flag.String("from", "", "folder of JSON captures")
	to := flag.String("to", "mcphealth/testdata/captures", "folder for txtar files")
	flag.Parse()
	for _, f := range facts {
		if err := convert(*from, *to, f); err != nil {
			log.Fatal(err)
		}
	}
}

func convert(from, to string, f fact) error {
	source := f.name
	if f.of != "" {
		source = f.of
	}
	data, err := os.ReadFile(filepath.Join(from, source+".json"))
	if err != nil {
		return err
	}
	var r recording
	if err := json.Unmarshal(data, &r); err != nil {
		return fmt.Errorf("%s: %w", source, err)
	}
	name := strings.ReplaceAll(f.name, "/", "-")
	return os.WriteFile(filepath.Join(to, name+".txtar"), capture(r, f).Format(), 0o644)
}

func capture(r recording, f fact) *mcpfake.Capture {
	c := &mcpfake.Capture{Prose: f.why}
	add := func(k, v string) {
		if v = strings.TrimSpace(v); v != "" && v != "-" {
			c.Facts = append(c.Facts, mcpfake.Fact{Key: k, Value: v})
		}
	}
	s := r.Server
	add("server", s.Name)
	add("version", s.Version)
	add("mode", s.Mode)
	add("endpoint", s.Endpoint)
	add("recorded", "raw HTTP/1.1 over loopback"+prefixed(", server on ", s.Runtime)+", Host "+r.Exchanges[0].Request.Host)
	add("notes", s.Notes)
	for _, w := range strings.Split(f.want, "; ") {
		option, verdict, ok := strings.Cut(w, ": ")
		if !ok {
			add("want", w)
			continue
		}
		add("want "+option, verdict)
	}
	guarded := false
	for _, e := range r.Exchanges {
		guarded = guarded || e.Match.NoAuth
	}
	keep := kept
	switch {
	case strings.HasPrefix(f.name, "not-mcp/"):
		keep = map[string]bool{"a": true, "d2": true, "e1": true}
	case f.only != "":
		keep = map[string]bool{}
		for _, p := range strings.Fields(f.only) {
			keep[p] = true
		}
	}
	for i, e := range r.Exchanges {
		if keep[e.Probe] || e.Probe == "h1" && strings.Contains(f.want, "sse: ") {
			c.Exchanges = append(c.Exchanges, exchange(r, i, guarded))
		}
	}
	return c
}

func prefixed(before, s string) string {
	if s == "" {
		return ""
	}
	return before + s
}

// late is how long an answer may take without its duration being kept: the
// prober's default timeout. Tests need not wait for a slow laptop of then.
const late = 5 * time.Second

func exchange(r recording, i int, guarded bool) mcpfake.Exchange {
	from := r.Exchanges[i]
	q, a := from.Request, from.Response
	e := mcpfake.Exchange{Probe: from.Probe, Title: from.Title, Verb: q.Method, Path: q.Path, Header: http.Header{},
		Status: a.Status, Phrase: a.Reason, Answer: a.Body, HeldOpen: a.End == "held-open"}
	for k, v := range q.Headers {
		switch k {
		case "Content-Type", "Accept": // those that a prober sends
		default:
			e.Header.Set(k, v)
		}
	}
	if guarded && !from.Match.NoAuth {
		e.Header.Set("Authorization", mcpfake.GoodToken)
	}
	if len(q.Body) > 0 {
		var b bytes.Buffer
		_ = json.Compact(&b, q.Body)
		e.Body = b.String()
	}
	if took := time.Duration(a.Ms) * time.Millisecond; took > late && !e.HeldOpen {
		e.Lasted = took
	}
	e.Hang = strings.HasPrefix(a.Error, "TimeoutError")
	e.Closed = a.Error != "" && !e.Hang
	for _, h := range a.Headers {
		if telling(h[0], h[1], a.Body, a.CutFrom) {
			e.AnswerHeader = append(e.AnswerHeader, [2]string{h[0], strings.ReplaceAll(h[1], q.Host, "{{host}}")})
		}
	}
	return e
}

// telling: framing is left out, but for a Content-Length that lies.
func telling(name, value, body string, cut int) bool {
	switch name = strings.ToLower(name); name {
	case "transfer-encoding", "connection", "keep-alive", "date", "x-powered-by", "etag", "vary":
		return false
	case "content-length":
		return value != strconv.Itoa(len(body)) && cut == 0
	}
	return !strings.HasPrefix(name, "access-control-")
}
