package reliability

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/test/e2e"
)

// What every release of Caddy that we say works does; test/versions/run asks it of each,
// CADDY in the environment being the binary.
func TestRelease(t *testing.T) {
	t.Run("caddy", func(t *testing.T) {
		a, b := newServer(t), newServer(t)
		socket := filepath.Join(t.TempDir(), "s")
		ln, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		c := newServer(t)
		go c.srv.Serve(ln)
		site := fmt.Sprintf(`	mcp_proxy /pair/* %s %s {
		check_path /pair/mcp
		check_interval 1s
		check_timeout 1s
		hold 0
	}
	mcp_proxy /socket/* unix/%s {
		check_path /socket/mcp
		check_interval 1s
	}
	mcp_proxy /h2c/* h2c://%s {
		check_path /h2c/mcp
		check_interval 1s
	}
	mcp_proxy /sticky/* %[1]s %[2]s {
		check_path /sticky/mcp
		check_interval 1s
		sticky
	}
	mcp_status /status
`, a.Addr, b.Addr, socket, c.Addr)
		edge := e2e.StartCaddyGlobal(t, "metrics", site)
		url := func(route string) string { return fmt.Sprintf("http://%s/%s/mcp", edge.Addr, route) }
		up := func(addr string) { edge.AwaitState(t, addr, "up", 10*time.Second) }
		for _, addr := range []string{a.Addr, b.Addr, c.Addr, "unix/" + socket} {
			up(addr)
		}
		for _, route := range []string{"pair", "socket", "h2c", "sticky"} {
			ask(t, url(route), callBody(`"`+route+`"`))
		}

		a.srv.Close()
		for n := range 20 { // also before anybody knows
			ask(t, url("pair"), callBody(fmt.Sprintf(`"one dead, %d"`, n)))
		}
		edge.AwaitState(t, a.Addr, "down", 10*time.Second)
		b.srv.Close()
		edge.AwaitState(t, b.Addr, "down", 10*time.Second)
		if wrong := answerTo(url("pair"), callBody(`7`), `7`); wrong != "" {
			t.Errorf("both dead: %s", wrong)
		}

		edge.Reload(t, strings.Replace(site, "hold 0", "hold 10s", 1))
		if state := edge.Upstreams(t)[a.Addr].State; state != "down" {
			t.Errorf("%s after a reload, want the state kept: down", state)
		}
		held := make(chan string, 1)
		go func() {
			resp, err := alone.Post(url("pair"), "application/json", strings.NewReader(callBody(`"held"`)))
			if err != nil {
				held <- err.Error()
				return
			}
			defer resp.Body.Close()
			body, _ := io.ReadAll(resp.Body)
			held <- resp.Status + string(body)
		}()
		time.Sleep(500 * time.Millisecond)
		revived := revive(t, a.Addr)
		if got := <-held; !strings.Contains(got, "done") {
			t.Errorf("a held call got %s", got)
		}
		up(a.Addr)
		wantOnce(t, a, b, c, revived)

		metrics := edge.Metrics(t)
		for _, line := range []string{
			fmt.Sprintf(`caddy_mcp_health_upstream_up{path="/pair/mcp",upstream="%s"} 1`, a.Addr),
			fmt.Sprintf(`caddy_mcp_health_upstream_up{path="/pair/mcp",upstream="%s"} 0`, b.Addr),
			fmt.Sprintf(`caddy_mcp_health_transitions_total{path="/pair/mcp",reason="refused",to="down",upstream="%s"} 1`, b.Addr),
		} {
			if !strings.Contains(metrics, line) {
				t.Errorf("metrics have no %s", line)
			}
		}
		if status, page := get(t, strings.TrimSuffix(url("x"), "/x/mcp")+"/status"); status != http.StatusOK || !strings.Contains(page, b.Addr) {
			t.Errorf("status page: %d %.200s", status, page)
		}
	})
}
