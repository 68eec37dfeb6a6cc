package mcphealth

import (
	"bytes"
	"errors"
	"math"
	"net/http"
	"strings"
	"testing"
)

// What could not be written into a request is refused when it is configured: found
// out when probing, it would take a living upstream down.
func TestTargetRefusesWhatCannotBeSent(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Target)
		want   string // in the error
	}{
		{"port out of range", func(t *Target) { t.URL = "http://127.0.0.1:99999/mcp" }, "port"},
		{"no scheme", func(t *Target) { t.URL = "app:8000/mcp?key=secret-1" }, `"app:8000/mcp"`},
		{"no scheme before a password", func(t *Target) { t.URL = "u:secret-1?@app/mcp" }, "url"},
		{"port zero", func(t *Target) { t.URL = "http://127.0.0.1:0/mcp" }, "port"},
		{"Host with a space", func(t *Target) { t.Host = "ev il" }, "host"},
		{"Host with a path", func(t *Target) { t.Host = "example.com/x" }, "host"},
		{"Host with a line break", func(t *Target) { t.Host = "a\r\nX: y" }, "host"},
		{"header name with a space", func(t *Target) { t.Header = http.Header{"Bad Name": {"x"}} }, "header name"},
		{"empty header name", func(t *Target) { t.Header = http.Header{"": {"x"}} }, "header name"},
		{"header value with a line break", func(t *Target) { t.Header = http.Header{"Authorization": {"secret-1\nX: y"}} }, "Authorization"},
		{"health_path with a wrong escape", func(t *Target) { t.HealthPath = "/100%" }, "escape"},
		{"arguments that are no object", func(t *Target) { t.CallTool, t.CallArgs = "echo", "null" }, "JSON object"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			target := Target{URL: "http://127.0.0.1:8000/mcp"}
			tt.change(&target)
			err := target.Validate()
			if !errors.Is(err, ErrTarget) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Validate() = %v, want an ErrTarget about %s", err, tt.want)
			}
			if err != nil && strings.Contains(err.Error(), "secret-1") {
				t.Errorf("the error shows a credential: %v", err)
			}
		})
	}
}

// What is no number is no share: each call would be one too many.
func TestScheduleRefusesNoNumber(t *testing.T) {
	for _, rate := range []float64{math.NaN(), math.Inf(1), -0.1, 1} {
		if err := (Schedule{ErrorRate: rate}).Validate(); !errors.Is(err, ErrSchedule) {
			t.Errorf("ErrorRate %v: Validate() = %v, want an ErrSchedule", rate, err)
		}
	}
}

// A Host is accepted if net/http writes it as it is: it leaves out one that it does not
// like, such as a placeholder that nobody has replaced, and servers refuse what comes then.
func TestTargetTakesTheHostsThatCanBeSent(t *testing.T) {
	for c := byte(' '); c < 0x7f; c++ {
		host := "a" + string(rune(c)) + "b"
		req, err := http.NewRequest(http.MethodPost, "http://127.0.0.1/", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		var b bytes.Buffer
		werr := req.Write(&b)
		sent := werr == nil && strings.Contains(b.String(), "\r\nHost: "+host+"\r\n")
		if err := (Target{URL: "http://127.0.0.1/mcp", Host: host}).Validate(); (err == nil) != sent {
			t.Errorf("host %q: Validate() = %v, and written: %v", host, err, sent)
		}
	}
}
