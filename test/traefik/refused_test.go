package traefik

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// A client that is still sending a body too large to be held gets its 503, and no reset
// connection, whatever it sends with, and whether it reads meanwhile or not.
func TestLargeBodiesAreRefused(t *testing.T) {
	tr := Start(t, Options{Dynamic: config{plugin: "hold: 10s", noRoute: true}.yaml()})
	const times = 4
	for _, size := range []int{3 << 20, 7 << 20} {
		body := `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"x","arguments":{"data":"` + strings.Repeat("x", size) + `"}}}`
		file := filepath.Join(t.TempDir(), "body")
		if err := os.WriteFile(file, []byte(body), 0o644); err != nil {
			t.Fatal(err)
		}
		curl := func(more ...string) func() string {
			return func() string {
				args := append([]string{"-sS", "-o", filepath.Join(filepath.Dir(file), "answer"), "-w", "%{http_code}", "-H", "Content-Type: application/json", "--data-binary", "@" + file}, more...)
				out, err := exec.Command("curl", append(args, tr.URL+"/mcp")...).CombinedOutput()
				answer, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "answer"))
				return fmt.Sprint(string(out), " ", bytes.Contains(answer, []byte(`"id":7`)), " ", err)
			}
		}
		node := func(options string) func() string {
			script := `const body=require('fs').readFileSync(process.argv[2]);
				const stream=()=>new ReadableStream({start(c){for(let i=0;i<body.length;i+=65536)c.enqueue(body.subarray(i,i+65536));c.close()}});
				fetch(process.argv[1],{method:'POST',headers:{'Content-Type':'application/json'},` + options + `})
				.then(async r=>console.log(r.status,(await r.text()).includes('"id":7'),'<nil>'),e=>console.log(e.cause||e))`
			return func() string {
				out, _ := exec.Command("node", "-e", script, tr.URL+"/mcp", file).CombinedOutput()
				return strings.TrimSpace(string(out))
			}
		}
		golang := func(body func() io.Reader) func() string {
			client := &http.Client{Transport: &http.Transport{}}
			return func() string {
				resp, err := client.Post(tr.URL+"/mcp", "application/json", body())
				if err != nil {
					return err.Error()
				}
				defer resp.Body.Close()
				answer, err := io.ReadAll(resp.Body)
				return fmt.Sprint(resp.StatusCode, " ", bytes.Contains(answer, []byte(`"id":7`)), " ", err)
			}
		}
		clients := []struct {
			name string
			do   func() string
		}{
			{"curl", curl()},
			{"curl, sends at once", curl("-H", "Expect:")},
			{"curl, chunked", curl("-H", "Expect:", "-H", "Transfer-Encoding: chunked")},
			{"Go", golang(func() io.Reader { return strings.NewReader(body) })},
			{"Go, chunked", golang(func() io.Reader { return io.MultiReader(strings.NewReader(body)) })},
			{"Node fetch", node("body")},
			{"Node fetch, chunked", node("body:stream(),duplex:'half'")},
			{"sends all, then reads", func() string {
				head := fmt.Sprintf("POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", len(body))
				resp, answer, _ := raw(t, tr, 10*time.Second, head, body)
				if resp == nil {
					return "no answer"
				}
				return fmt.Sprint(resp.StatusCode, " ", bytes.Contains(answer, []byte(`"id":7`)), " <nil>")
			}},
		}
		for _, c := range clients {
			t.Run(fmt.Sprintf("%d MiB, %s", size>>20, c.name), func(t *testing.T) {
				got := map[string]int{}
				for range times {
					got[c.do()]++
				}
				if got["503 true <nil>"] != times {
					t.Errorf("%v, want %d × 503 with its id", got, times)
				}
			})
		}
	}
}

// A held call whose server has gone by the time that it goes on is not sent again, behind
// Traefik's retry, without its body, which came in pieces and was read as it was held. A
// retry that goes by the status too has the body itself.
func TestHeldBehindRetry(t *testing.T) {
	counts := heldBehindRetry(t, "attempts: 4")
	if counts["200 true"] == 0 || counts["502 false"] == 0 || counts["200 true"]+counts["502 false"] != heldCalls {
		t.Errorf("%v, want the server's answer to the call as it was sent, or 502", counts)
	}
	if counts := heldBehindRetry(t, "attempts: 12, status: ['503'], retryNonIdempotentMethod: true"); counts["200 true"] != heldCalls {
		t.Errorf("behind one that keeps bodies: %v, want the other server's answer to all", counts)
	}
}

const heldCalls = 8

// heldBehindRetry is how calls end that were held behind a retry with these settings, and
// one of whose two servers is gone as they go on.
func heldBehindRetry(t *testing.T, settings string) map[string]int {
	t.Helper()
	all, addrs := openers(t, 2)
	c := config{plugin: "hold: 5s", service: "serversTransport: fresh", servers: addrs}
	y := func(noRoute bool) string {
		c.noRoute = noRoute
		y := strings.ReplaceAll(c.yaml(), "middlewares: [mcp]", "middlewares: [again, mcp]")
		return strings.Replace(y, "  middlewares:\n", "  serversTransports:\n    fresh: {maxIdleConnsPerHost: -1}\n  middlewares:\n    again:\n      retry: {"+settings+", initialInterval: 20ms}\n", 1)
	}
	tr := Start(t, Options{Dynamic: y(false)})
	await(t, 10*time.Second, "both up", func() bool { return strings.Count(tr.Output(), "/mcp is up") == 2 })
	tr.Reload(t, y(true))
	got := make(chan string)
	for i := range heldCalls {
		go func() {
			var body io.Reader = strings.NewReader(`{"jsonrpc":"2.0","id":7,"method":"tools/call"}`)
			if i%2 == 0 {
				body = io.MultiReader(body) // in pieces
			}
			resp, err := http.Post(tr.URL+"/mcp", "application/json", body)
			if err != nil {
				got <- err.Error()
				return
			}
			defer resp.Body.Close()
			answer, _ := io.ReadAll(resp.Body)
			got <- fmt.Sprint(resp.StatusCode, " ", bytes.Contains(answer, []byte(`"id":7`)))
		}()
	}
	time.Sleep(300 * time.Millisecond)
	_ = all[0].Listener.Close() // who dials is refused; the probes keep their connections
	tr.Reload(t, y(false))
	counts := map[string]int{}
	for range heldCalls {
		counts[<-got]++
	}
	return counts
}

// The hold is the client's wait, also where Traefik sends a call several times.
func TestHoldBehindRetryIsOne(t *testing.T) {
	for name, again := range map[string]string{
		"retry":     "retry: {attempts: 4, initialInterval: 20ms, status: ['503'], retryNonIdempotentMethod: true}",
		"buffering": "buffering: {retryExpression: 'ResponseCode() == 503 && Attempts() < 4'}",
	} {
		t.Run(name, func(t *testing.T) {
			y := config{plugin: "hold: 1s", noRoute: true}.yaml()
			y = strings.ReplaceAll(y, "middlewares: [mcp]", "middlewares: [again, mcp]")
			tr := Start(t, Options{Dynamic: strings.Replace(y, "  middlewares:\n", "  middlewares:\n    again:\n      "+again+"\n", 1)})
			start := time.Now()
			status, h := post(t, tr.URL+"/mcp")
			if took := time.Since(start); status != 503 || h.Get("X-Mcp-Health") == "" || took < time.Second || took > 1900*time.Millisecond {
				t.Errorf("%d %v after %s, want our 503 after a hold of 1s", status, h, took)
			}
		})
	}
}
