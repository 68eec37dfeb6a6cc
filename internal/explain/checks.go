package explain

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// check is one of the health checks that people configure.
type check struct {
	name, rule string
	method     string // of HTTP
	rpc        string // what is POSTed
	up         func(outcome) bool
}

var checks = []check{
	{"get", "GET, 200 to 399 is up", http.MethodGet, "",
		func(o outcome) bool { return o.status >= 200 && o.status < 400 }},
	{"ping", "ping, a result is up", http.MethodPost, "ping",
		func(o outcome) bool { return o.status == http.StatusOK && o.rpc == "result" }},
	{"initialize", "initialize, 200 or dead", http.MethodPost, "initialize",
		func(o outcome) bool { return o.status == http.StatusOK && o.err == "" }},
	{"any_2xx", "POST, any 2xx is up", http.MethodPost, "server/discover",
		func(o outcome) bool { return o.status >= 200 && o.status < 300 }},
}

const (
	// ghost is a session that no server issued: who carries it gets none.
	ghost = "mcphealth-no-session"
	// maxRead is how much of an answer a check reads: 64 KiB.
	maxRead = 64 << 10
	// endTimeout bounds the DELETE of a session that a check was given.
	endTimeout = 2 * time.Second
)

// outcome is what came back.
type outcome struct {
	status  int
	err     string // why nothing came, in words; with a status: why no answer was in it
	media   string
	rpc     string // "result" or "error" if our question was answered
	code    int    // of the error
	version string // that initialize settled on
	open    bool   // the answer had come, and the stream did not end
	empty   bool
	login   bool // it challenges for credentials
}

// ask makes the request. It follows no redirect, and ends what it opens.
func (c check) ask(ctx context.Context, t Target) outcome {
	transport := t.Transport()
	transport.DisableKeepAlives = true
	client := &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	req, id, err := c.request(ctx, t)
	if err != nil {
		return outcome{err: "no request"}
	}
	resp, err := client.Do(req)
	if err != nil {
		return outcome{err: inWords(ctx, err)}
	}
	media, _, _ := mime.ParseMediaType(resp.Header.Get("Content-Type"))
	o := outcome{status: resp.StatusCode, media: media, login: resp.Header.Get("WWW-Authenticate") != ""}
	if c.method == http.MethodPost {
		o.read(ctx, resp.Body, id)
	}
	_ = resp.Body.Close()
	if given := resp.Header.Get("Mcp-Session-Id"); given != "" && given != ghost {
		end(ctx, client, t, given, o.version)
	}
	return o
}

// request builds the check's request and the id of its question.
func (c check) request(ctx context.Context, t Target) (*http.Request, string, error) {
	var b [8]byte
	_, _ = rand.Read(b[:])
	id := "mcphealth-" + hex.EncodeToString(b[:])
	req, err := http.NewRequestWithContext(ctx, c.method, t.URL, strings.NewReader(c.body(id)))
	if err != nil {
		return nil, "", err
	}
	common(req, t)
	if c.method == http.MethodGet {
		// Without it mcp-go and the Python SDK open a session for every GET, which
		// nobody can end. The answer is up or down with it as it is without.
		req.Header.Set("Mcp-Session-Id", ghost)
		return req, id, nil
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json, text/event-stream")
	if c.name == "any_2xx" {
		req.Header.Set("MCP-Protocol-Version", "2026-07-28")
		req.Header.Set("Mcp-Method", c.rpc)
	}
	return req, id, nil
}

func common(req *http.Request, t Target) {
	req.Header.Set("User-Agent", "mcphealth/"+mcphealth.Version+" explain")
	for k, vs := range t.Header {
		req.Header[k] = vs
	}
	if t.Host != "" {
		req.Host = t.Host
	}
}

func (c check) body(id string) string {
	params := ""
	switch c.rpc {
	case "":
		return ""
	case "initialize":
		params = `,"params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":` + clientInfo + `}`
	case "server/discover":
		params = `,"params":{"_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientInfo":` +
			clientInfo + `,"io.modelcontextprotocol/clientCapabilities":{}}}`
	}
	return fmt.Sprintf(`{"jsonrpc":"2.0","id":%q,"method":%q%s}`, id, c.rpc, params)
}

const clientInfo = `{"name":"mcphealth explain","version":"` + mcphealth.Version + `"}`

// read looks for the answer to id, as a JSON body or as an event, until the body
// or ctx ends.
func (o *outcome) read(ctx context.Context, body io.Reader, id string) {
	lines := bufio.NewReader(io.LimitReader(body, maxRead))
	var whole []byte
	for {
		line, err := lines.ReadBytes('\n')
		whole = append(whole, line...)
		if data, ok := bytes.CutPrefix(line, []byte("data:")); ok && o.take(data, id) {
			o.open = err == nil && o.media == "text/event-stream" && !atEnd(lines)
			return
		}
		if err == nil {
			continue
		}
		if !o.take(whole, id) && err != io.EOF {
			o.err = inWords(ctx, err)
		}
		o.empty = len(whole) == 0 && o.err == ""
		return
	}
}

// atEnd: the stream ends with the answer, or a little later.
func atEnd(r *bufio.Reader) bool {
	ended := make(chan bool, 1)
	go func() { // ends with the body, which its caller closes
		_, err := io.Copy(io.Discard, r)
		ended <- err == nil
	}()
	select {
	case e := <-ended:
		return e
	case <-time.After(100 * time.Millisecond):
		return false
	}
}

// take keeps data if it is the answer.
func (o *outcome) take(data []byte, id string) bool {
	var m struct {
		JSONRPC string          `json:"jsonrpc"`
		ID      json.RawMessage `json:"id"`
		Result  json.RawMessage `json:"result"`
		Error   *struct {
			Code float64 `json:"code"`
		} `json:"error"`
	}
	if json.Unmarshal(data, &m) != nil || m.JSONRPC != "2.0" {
		return false
	}
	switch {
	case m.Result != nil && string(m.ID) == `"`+id+`"`:
		var settled struct {
			ProtocolVersion string `json:"protocolVersion"`
		}
		_ = json.Unmarshal(m.Result, &settled)
		o.rpc, o.version = "result", settled.ProtocolVersion
	case m.Error != nil:
		o.rpc, o.code = "error", int(m.Error.Code)
	}
	return o.rpc != ""
}

// end ends a session that the server gave to a check.
func end(ctx context.Context, client *http.Client, t Target, session, version string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodDelete, t.URL, nil)
	if err != nil {
		return
	}
	common(req, t)
	req.Header.Set("Mcp-Session-Id", session)
	if version != "" {
		req.Header.Set("MCP-Protocol-Version", version)
	}
	if resp, err := client.Do(req); err == nil {
		_ = resp.Body.Close()
	}
}

// inWords is an error of the connection, without addresses.
func inWords(ctx context.Context, err error) string {
	if ctx.Err() != nil {
		return "no answer in time"
	}
	for _, w := range [][2]string{
		{"connection refused", "connection refused"}, {"tls:", "TLS fails"}, {"x509:", "TLS fails"},
		{"lookup ", "the name does not resolve"}, {"HTTP response", "no HTTP"}, {"malformed", "no HTTP"},
		{"EOF", "connection closed, no answer"}, {"reset", "connection closed, no answer"},
	} {
		if strings.Contains(err.Error(), w[0]) {
			return w[1]
		}
	}
	return "no connection"
}

// String is the outcome in at most 34 characters.
func (o outcome) String() string {
	if o.status == 0 {
		return o.err
	}
	what := map[string]string{"text/html": "a web page", "text/event-stream": "an event stream",
		"application/json": "JSON", "text/plain": "text"}[o.media]
	switch {
	case o.rpc == "error":
		what = fmt.Sprintf("JSON-RPC error %d", o.code)
	case o.rpc == "result":
		what = "JSON-RPC result"
	case o.err != "" && o.media == "text/event-stream":
		what = "a stream without answer"
	case o.err != "":
		what = o.err
	case o.status == http.StatusUnauthorized || o.login:
		what = "wants credentials"
	case o.status >= 300 && o.status < 400:
		what = "a redirect"
	case o.empty:
		what = "empty"
	}
	if what == "" {
		return fmt.Sprint(o.status)
	}
	return fmt.Sprintf("%d, %s", o.status, what)
}
