//go:build go1.21

// Package driver calls the core in terms of plain types. The tests of test/yaegi
// use it twice: compiled, and interpreted by Yaegi from the same source, so that a
// difference between two answers is a difference in how the core runs.
package driver

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// Probe probes one target n times with one Prober, then closes it. It returns one
// text per probe, and one that says whether Close ended a session.
func Probe(n int, settings map[string]string) []string {
	t := target(settings)
	p, err := mcphealth.NewProber(t, line(settings))
	if err != nil {
		return []string{"NewProber: " + err.Error()}
	}
	var all []string
	for i := 0; i < n; i++ {
		all = append(all, Text(p.Probe(context.Background())))
	}
	return append(all, fmt.Sprintf("closed a session: %v", p.Close(context.Background())))
}

// Text is every field of a result but its times.
func Text(r mcphealth.Result) string {
	took := r.LatencyMs > 0
	r.LatencyMs = 0
	for i := 0; i < len(r.Steps); i++ {
		r.Steps[i].Ms = 0
	}
	document, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return "Marshal: " + err.Error()
	}
	return strings.Join([]string{
		"verdict: " + string(r.Verdict),
		"reason: " + string(r.Reason),
		"era: " + string(r.Era),
		"detail: " + r.Detail,
		fmt.Sprintf("status %d, code %d, took time %v", r.HTTPStatus, r.RPCCode, took),
		fmt.Sprintf("votes %d, began %v, retry after %v", r.Verdict.Vote(), !r.At.IsZero(), r.RetryAfter),
		string(document),
	}, "\n")
}

// target turns settings, by the names of Target's fields, into a Target.
func target(settings map[string]string) mcphealth.Target {
	t := mcphealth.Target{Timeout: 5 * time.Second}
	for name, v := range settings {
		switch name {
		case "URL":
			t.URL = v
		case "Host":
			t.Host = v
		case "Authorization":
			t.Header = http.Header{"Authorization": {v}}
		case "RequireAuth":
			t.RequireAuth = v == "true"
		case "Era":
			t.Era = mcphealth.Era(v)
		case "AliveIf":
			t.AliveIf = mcphealth.AliveIf(v)
		case "Shallow":
			t.Shallow = v == "true"
		case "ExpectTools":
			t.ExpectTools = strings.Split(v, ",")
		case "CallTool":
			t.CallTool = v
		case "CallArgs":
			t.CallArgs = v
		case "SlowAfter":
			t.SlowAfter = duration(v)
		case "HealthPath":
			t.HealthPath = v
		case "Fresh":
			t.Fresh = v == "true"
		case "Timeout":
			t.Timeout = duration(v)
		}
	}
	return t
}

// line is the way to the target: nil, or one that trusts any certificate, over
// HTTP/1 or HTTP/2, or a transport that is none of ours.
func line(settings map[string]string) *mcphealth.Line {
	t := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	switch settings["line"] {
	case "insecure":
		return mcphealth.NewLine(t)
	case "h2":
		t.ForceAttemptHTTP2 = true
		return mcphealth.NewLine(t)
	case "foreign":
		return mcphealth.NewForeignLine(t)
	case "prepared":
		l := mcphealth.NewLine(t)
		l.Prepare = func(r *http.Request) *http.Request {
			r = r.Clone(r.Context())
			r.Header.Set("X-Prepared", "yes")
			return r
		}
		return l
	}
	return nil
}

func duration(s string) time.Duration {
	d, err := time.ParseDuration(s)
	if err != nil {
		panic("driver: " + err.Error())
	}
	return d
}

// RequestID is the id that an error answer to this body would carry.
func RequestID(body string) string { return mcphealth.RequestID([]byte(body)).JSON() }

// Unavailable is the whole 503 to a request with this method and body.
func Unavailable(method, body, reason string, retryMs int) string {
	return sent(mcphealth.Unavailable(method, mcphealth.RequestID([]byte(body)),
		mcphealth.Reason(reason), time.Duration(retryMs)*time.Millisecond))
}

// MayHaveRun is the whole 502 to a request with this method and body.
func MayHaveRun(method, body, reason string) string {
	return sent(mcphealth.MayHaveRun(method, mcphealth.RequestID([]byte(body)), mcphealth.Reason(reason)))
}

// sent is an answer as a client would see it.
func sent(a mcphealth.Answer) string {
	w := httptest.NewRecorder()
	a.Send(w)
	var head []string
	for k, vs := range w.Header() {
		head = append(head, k+": "+strings.Join(vs, ", "))
	}
	sort.Strings(head)
	return strconv.Itoa(w.Code) + "\n" + strings.Join(head, "\n") + "\n\n" + w.Body.String()
}

// SessionLost is the whole 404 to a request with this method and body.
func SessionLost(method, body, reason string) string {
	return sent(mcphealth.SessionLost(method, mcphealth.RequestID([]byte(body)), mcphealth.Reason(reason)))
}

// Tags is what becomes of these ids for a session of owner: tagged, and split.
func Tags(secret, owner string, ids []string) []string {
	k := mcphealth.NewSessionKey([]byte(secret))
	o := k.Owner(owner)
	var all []string
	for i := 0; i < len(ids); i++ {
		tagged := k.Tag(ids[i], o)
		id, whose, ok := k.Split(tagged)
		all = append(all, fmt.Sprintf("%q %q %x %v", tagged, id, uint64(whose), ok))
		id, whose, ok = k.Split(ids[i])
		all = append(all, fmt.Sprintf("%q %x %v", id, uint64(whose), ok))
	}
	return all
}

// HasSessions and OpensSession are the core's functions of those names.
func HasSessions(version string) bool { return mcphealth.HasSessions(version) }

// OpensSession takes the body as text.
func OpensSession(method, body string) bool { return mcphealth.OpensSession(method, []byte(body)) }

// Outcome is what a reader makes of an answer that comes in pieces of n bytes.
func Outcome(contentType, body string, n int) string {
	var r mcphealth.OutcomeReader
	r.Begin(contentType, "")
	for i := 0; i < len(body); i += n {
		end := i + n
		if end > len(body) {
			end = len(body)
		}
		r.Write([]byte(body[i:end]))
	}
	return fmt.Sprintf("%s %v %v", string(r.Outcome()), r.IsInternal(), r.IsRPC())
}

// BadTarget says what is wrong with a target, and of which class the error is.
func BadTarget(settings map[string]string) string {
	err := target(settings).Validate()
	return fmt.Sprintf("%v; ErrTarget %v, ErrSchedule %v", err, errors.Is(err, mcphealth.ErrTarget), errors.Is(err, mcphealth.ErrSchedule))
}

// BadSchedule says what is wrong with a schedule, in milliseconds and votes.
func BadSchedule(interval, fast, fall, rise int) string {
	err := mcphealth.Schedule{Interval: time.Duration(interval) * time.Millisecond,
		Fast: time.Duration(fast) * time.Millisecond, Fall: fall, Rise: rise}.Validate()
	return fmt.Sprintf("%v; ErrTarget %v, ErrSchedule %v", err, errors.Is(err, mcphealth.ErrTarget), errors.Is(err, mcphealth.ErrSchedule))
}

// Words is the closed vocabulary: each verdict with its reasons.
func Words() string {
	var b bytes.Buffer
	for _, v := range mcphealth.Verdicts() {
		fmt.Fprintln(&b, v, v.Vote(), mcphealth.ReasonsOf(v))
	}
	return b.String()
}
