package mcpfake

import (
	"bytes"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func files(t *testing.T) []string {
	t.Helper()
	fs, err := filepath.Glob("../../mcphealth/testdata/captures/*.txtar")
	if err != nil || len(fs) == 0 {
		t.Fatalf("no captures: %v", err)
	}
	return fs
}

func TestFormatWritesWhatParseReads(t *testing.T) {
	for _, f := range files(t) {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		c, err := Parse(data)
		if err != nil {
			t.Fatalf("%s: %v", f, err)
		}
		if got := c.Format(); !bytes.Equal(got, data) {
			t.Errorf("%s: written again it has %d bytes instead of %d, or others", f, len(got), len(data))
		}
	}
}

// TestReplaySaysWhatWasRecorded: each recorded question, asked again outside of a
// session, gets its own answer, in the id of whoever asks.
func TestReplaySaysWhatWasRecorded(t *testing.T) {
	for _, f := range files(t) {
		c, err := Load(f)
		if err != nil {
			t.Fatal(err)
		}
		r, err := Play(c)
		if err != nil {
			t.Fatal(err)
		}
		for i := range c.Exchanges {
			e := &c.Exchanges[i]
			if s := c.stateOf(i); e.Verb != http.MethodPost || e.Hang || e.Closed || e.HeldOpen || e.Lasted > 0 || s == live || s == over {
				continue
			}
			checkReplay(t, c.Name, r, e)
		}
		r.Close()
	}
}

func checkReplay(t *testing.T, name string, r *Replay, e *Exchange) {
	t.Helper()
	body := e.Body
	if id := rpcOf(body).ID; len(id) > 0 {
		body = strings.Replace(body, `"id":`+string(id), `"id":"another"`, 1)
	}
	req, err := http.NewRequest(e.Verb, r.URL(), strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range e.Header {
		req.Header[k] = v
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatalf("%s %s: %v", name, e.Probe, err)
	}
	defer resp.Body.Close()
	got, _ := io.ReadAll(resp.Body)
	want := swapID(e.Answer, rpcOf(e.Body).ID, []byte(`"another"`))
	if resp.StatusCode != e.Status || string(got) != want {
		t.Errorf("%s %s: %d %q, want %d %q", name, e.Probe, resp.StatusCode, got, e.Status, want)
	}
}
