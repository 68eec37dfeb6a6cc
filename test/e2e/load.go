package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// maxAnswer is how much of an answer the load reads: far more than any echo.
const maxAnswer = 1 << 20

// Load is a number of clients that call a tool over and over, each on its own
// connection and with one call at a time. A call is the raw POST of a modern
// client; its id and its message are unique, so that a wrong answer and a
// second execution show.
type Load struct {
	URL     string
	Host    string        // Host header; "" = that of URL
	Clients int           // 0 = 1
	Rate    float64       // calls a second and client; 0 = as fast as answers come
	Slow    time.Duration // call slow, which takes that long, instead of echo
	Timeout time.Duration // of one call; 0 = 30 s
	H2C     bool          // HTTP/2 without TLS
}

// Outcome is how a call ended.
type Outcome string

const (
	OK        Outcome = "ok"        // the right answer to this call
	Status    Outcome = "status"    // an HTTP status other than 200
	Transport Outcome = "transport" // no answer: refused, reset, timed out
	Wrong     Outcome = "wrong"     // a 200 that does not answer this call
)

// Report says what became of a load's calls.
type Report struct {
	Sent     int
	Count    map[Outcome]int
	Slowest  time.Duration // of the ok ones
	Failures []Failure     // all that are not ok
}

// Failure is a call that did not end ok.
type Failure struct {
	ID         string
	Start, End time.Time
	Outcome    Outcome
	Status     int // 0 for Transport
	Header     http.Header
	Body       []byte
	Err        error // what is wrong with it
}

// At reports whether the call was on its way at that moment: whether it may
// have suffered from a kill then, where a later one must not.
func (f Failure) At(moment time.Time) bool { return f.Start.Before(moment) && f.End.After(moment) }

func (f Failure) String() string {
	return fmt.Sprintf("%s %s from %s for %s: %v", f.ID, f.Outcome, f.Start.Format("05.000"), f.End.Sub(f.Start).Round(time.Millisecond), f.Err)
}

func (r Report) String() string {
	s := fmt.Sprintf("%d sent %v, slowest %s", r.Sent, r.Count, r.Slowest.Round(time.Millisecond))
	for i, f := range r.Failures {
		if i == 5 {
			return s + fmt.Sprintf("\n  … %d failures", len(r.Failures))
		}
		s += "\n  " + f.String()
	}
	return s
}

// Running is a load under way.
type Running struct {
	load   Load
	run    string // makes the ids of this load unique
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu     sync.Mutex
	report Report
}

// Start starts the load. It runs until Stop, or the end of the test.
func (l Load) Start(t testing.TB) *Running {
	ctx, cancel := context.WithCancel(context.Background())
	r := &Running{load: l, run: fmt.Sprintf("load-%08x", rand.Uint32()), cancel: cancel, report: Report{Count: map[Outcome]int{}}}
	for n := range max(1, l.Clients) {
		r.wg.Go(func() { r.client(ctx, n) })
	}
	t.Cleanup(func() { r.Stop() })
	return r
}

// Stop sends no more calls, waits for those under way and returns the report.
func (r *Running) Stop() Report {
	r.cancel()
	r.wg.Wait()
	return r.Report()
}

// Report is the report so far.
func (r *Running) Report() Report {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.report
	c.Count = map[Outcome]int{}
	for k, v := range r.report.Count {
		c.Count[k] = v
	}
	c.Failures = append([]Failure(nil), r.report.Failures...)
	return c
}

// client makes one client's calls until ctx ends. A call that took longer than
// the pace allows delays the next ones; it is not made up for by a burst.
func (r *Running) client(ctx context.Context, n int) {
	tr := &http.Transport{Protocols: new(http.Protocols)}
	tr.Protocols.SetHTTP1(!r.load.H2C)
	tr.Protocols.SetUnencryptedHTTP2(r.load.H2C)
	defer tr.CloseIdleConnections()
	timeout := r.load.Timeout
	if timeout == 0 {
		timeout = 30 * time.Second
	}
	c := &http.Client{Transport: tr, Timeout: timeout}
	if r.load.Rate > 0 && n > 0 { // clients do not call in step
		select {
		case <-time.After(time.Duration(rand.Float64() / r.load.Rate * float64(time.Second))):
		case <-ctx.Done():
			return
		}
	}
	for k := 0; ctx.Err() == nil; k++ {
		start := time.Now()
		r.record(r.call(c, fmt.Sprintf("%s-%d-%d", r.run, n, k)))
		if r.load.Rate > 0 {
			pause := time.Duration(float64(time.Second)/r.load.Rate) - time.Since(start)
			select {
			case <-time.After(pause):
			case <-ctx.Done():
			}
		}
	}
}

func (r *Running) record(f Failure) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.report.Sent++
	r.report.Count[f.Outcome]++
	if f.Outcome != OK {
		r.report.Failures = append(r.report.Failures, f)
	} else if took := f.End.Sub(f.Start); took > r.report.Slowest {
		r.report.Slowest = took
	}
}

// call makes one call. Its context is not the load's: a call under way at Stop
// ends by itself.
func (r *Running) call(c *http.Client, id string) (f Failure) {
	f = Failure{ID: id, Start: time.Now(), Outcome: Transport}
	defer func() { f.End = time.Now() }()
	resp, err := c.Do(r.load.request(id))
	if err != nil {
		f.Err = err
		return f
	}
	defer resp.Body.Close()
	f.Status, f.Header = resp.StatusCode, resp.Header
	if f.Body, f.Err = io.ReadAll(io.LimitReader(resp.Body, maxAnswer)); f.Err != nil {
		return f // cut off in the middle
	}
	if resp.StatusCode != http.StatusOK {
		f.Outcome, f.Err = Status, fmt.Errorf("status %d: %.200s", resp.StatusCode, f.Body)
		return f
	}
	if f.Err = CheckCall(f.Body, id); f.Err != nil {
		f.Outcome = Wrong
		return f
	}
	f.Outcome = OK
	return f
}

// request is a tools/call as a 2026-07-28 client sends it.
func (l Load) request(id string) *http.Request {
	tool, args := "echo", map[string]any{"message": id}
	if l.Slow > 0 {
		tool, args = "slow", map[string]any{"message": id, "ms": l.Slow.Milliseconds()}
	}
	body, _ := json.Marshal(map[string]any{
		"jsonrpc": "2.0", "id": id, "method": "tools/call",
		"params": map[string]any{
			"name": tool, "arguments": args,
			"_meta": map[string]any{
				"io.modelcontextprotocol/protocolVersion":    "2026-07-28",
				"io.modelcontextprotocol/clientCapabilities": map[string]any{},
				"io.modelcontextprotocol/clientInfo":         map[string]any{"name": "mcphealth-load", "version": "0"},
			},
		},
	})
	req, err := http.NewRequest(http.MethodPost, l.URL, bytes.NewReader(body))
	if err != nil {
		panic(err) // a URL that the test wrote
	}
	req.Host = l.Host
	authorize(req.Header)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	req.Header.Set("MCP-Protocol-Version", "2026-07-28")
	req.Header.Set("Mcp-Method", "tools/call")
	req.Header.Set("Mcp-Name", tool)
	return req
}

// CheckCall reads the answer to a call of echo or slow with the message id, as
// JSON or SSE, and says what is wrong with it.
func CheckCall(body []byte, id string) error {
	for _, m := range messages(body) {
		var a struct {
			ID     any
			Result *struct {
				Content []struct{ Text string }
				IsError bool
			}
			Error json.RawMessage
		}
		if err := json.Unmarshal(m, &a); err != nil {
			return fmt.Errorf("%w in %.200q", err, m)
		}
		switch {
		case a.ID == nil && a.Result == nil && a.Error == nil:
			continue // a notification before the answer
		case a.ID != id:
			return fmt.Errorf("id %v, want %q", a.ID, id)
		case a.Result == nil || a.Result.IsError || len(a.Result.Content) != 1 || !strings.HasSuffix(a.Result.Content[0].Text, id):
			return fmt.Errorf("not the result of this call: %.200s", m)
		}
		return nil
	}
	return fmt.Errorf("no answer in %.200q", body)
}

// messages splits a body into its JSON messages: itself, or the data of its
// events.
func messages(body []byte) (all [][]byte) {
	if bytes.HasPrefix(bytes.TrimSpace(body), []byte("{")) {
		return [][]byte{body}
	}
	lines := bufio.NewScanner(bytes.NewReader(body))
	lines.Buffer(nil, maxAnswer)
	for lines.Scan() {
		// Every server here writes a message on one data line.
		if data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data:")); ok && len(bytes.TrimSpace(data)) > 0 {
			all = append(all, bytes.Clone(data))
		}
	}
	return all
}
