package e2e

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// The canaries are on their way in every test, so that it says something if none of
// them shows in what Caddy says.
func TestCanariesAreSent(t *testing.T) {
	var seen sync.Map
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		client, probe := strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "), r.Header.Get("X-Probe-Token")
		seen.Store(client, true)
		seen.Store(probe, true)
		http.Error(w, probe, http.StatusInternalServerError)
	}))
	t.Cleanup(s.Close)
	t.Cleanup(s.CloseClientConnections)
	addr := strings.TrimPrefix(s.URL, "http://")
	c := StartCaddy(t, fmt.Sprintf("mcp_proxy /mcp* %s {\n\tcheck_interval 200ms\n}", addr))
	Load{URL: c.URL(), Rate: 10}.Start(t)
	if s, err := Connect(t.Context(), c.URL()); err == nil {
		s.Close()
		t.Error("connected to a server that answers nothing")
	}
	for _, canary := range []string{clientCanary, probeCanary} {
		for start := time.Now(); ; time.Sleep(20 * time.Millisecond) {
			if _, ok := seen.Load(canary); ok {
				break
			}
			if time.Since(start) > 10*time.Second {
				t.Fatalf("%s was not sent", canary)
			}
		}
	}
	c.AwaitState(t, addr, "down", 10*time.Second)
	if log, err := os.ReadFile(c.log); err != nil || !strings.Contains(string(log), addr) {
		t.Errorf("nothing of the server in the log: %v\n%s", err, log)
	}
}
