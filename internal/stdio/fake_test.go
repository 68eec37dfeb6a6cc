package stdio

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/mcphealth/mcphealth/internal/leak"
)

// fakeName is how the test binary knows that it is a server.
const fakeName = "STDIO_FAKE"

func TestMain(m *testing.M) {
	if name := os.Getenv(fakeName); name != "" {
		fakes[name]()
		return
	}
	leak.Main(m)
}

// call is one request as a fake reads it.
type call struct {
	Method string
	ID     json.RawMessage
	Params json.RawMessage
}

// each reads requests until stdin ends, and has f say what comes after "id".
func each(f func(call) string) {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 8<<20)
	for lines.Scan() {
		var c call
		if json.Unmarshal(lines.Bytes(), &c) != nil {
			continue
		}
		if rest := f(c); rest != "" && len(c.ID) > 0 {
			fmt.Printf(`{"jsonrpc":"2.0","id":%s,%s}`+"\n", c.ID, rest)
		}
	}
}

const (
	discovered = `"result":{"supportedVersions":["2026-07-28"],"capabilities":{},"serverInfo":{"name":"fake","version":"1"}}`
	settled    = `"result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"fake","version":"1"}}`
	tools      = `"result":{"tools":[{"name":"echo"}]}`
	unknown    = `"error":{"code":-32601,"message":"Method not found"}`
)

func modernFake(c call) string {
	return map[string]string{"server/discover": discovered, "tools/list": tools, "tools/call": `"result":{"content":[]}`}[c.Method]
}

// legacyFake refuses everything before initialize, and everything but ping until
// it has been told that initialize is over.
func legacyFake() func(call) string {
	state := ""
	return func(c call) string {
		switch {
		case c.Method == "initialize":
			state = "initialize"
			return settled
		case c.Method == "notifications/initialized":
			state = "open"
			return ""
		case state == "open" && c.Method == "tools/list":
			return tools
		case state == "open" && c.Method == "ping":
			return `"result":{}`
		}
		return `"error":{"code":-32602,"message":"Received request before initialization was complete"}`
	}
}

// fakes are servers, and programs that are none.
var fakes = map[string]func(){
	"modern": func() { each(modernFake) },
	"legacy": func() { each(legacyFake()) },
	"no tools": func() {
		each(func(c call) string {
			return map[string]string{"initialize": settled, "notifications/initialized": "", "server/discover": unknown, "tools/list": unknown}[c.Method]
		})
	},
	"silent before initialize": func() {
		legacy := legacyFake()
		each(func(c call) string {
			if c.Method == "server/discover" {
				return ""
			}
			return legacy(c)
		})
	},
	"ends on discover": func() {
		legacy := legacyFake()
		each(func(c call) string {
			if c.Method == "server/discover" {
				fmt.Fprintln(os.Stderr, "ExpectedInitializeRequest")
				os.Exit(1)
			}
			return legacy(c)
		})
	},
	"older version only": func() {
		each(func(c call) string {
			switch {
			case c.Method == "initialize" && strings.Contains(string(c.Params), `"2025-03-26"`):
				return settled
			case c.Method == "initialize":
				return `"error":{"code":-32602,"message":"Unsupported protocol version","data":{"supported":["2025-03-26","2024-11-05"]}}`
			case c.Method == "tools/list":
				return tools
			}
			return `"error":{"code":-32600,"message":"not initialized"}`
		})
	},
	"slow start, modern": func() { time.Sleep(800 * time.Millisecond); each(modernOnly) },
	"tools/list hangs": func() {
		legacy := legacyFake()
		each(func(c call) string {
			if c.Method == "tools/list" {
				return ""
			}
			return legacy(c)
		})
	},
	"tools/list fails": func() {
		legacy := legacyFake()
		each(func(c call) string {
			if c.Method == "tools/list" {
				return `"error":{"code":-32603,"message":"database is locked"}`
			}
			return legacy(c)
		})
	},
	"isError": func() {
		each(func(c call) string {
			if c.Method == "tools/call" {
				return `"result":{"isError":true,"content":[]}`
			}
			return modernFake(c)
		})
	},
	"banner first": func() {
		fmt.Println("Server running on stdio")
		fmt.Println()
		each(modernFake)
	},
	"talks between": func() {
		each(func(c call) string {
			fmt.Println(`{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"hello"}}`)
			fmt.Println(`{"jsonrpc":"2.0","id":1,"method":"ping"}`)
			fmt.Println(`{"jsonrpc":"2.0","id":"somebody","result":{}}`)
			return modernFake(c)
		})
	},
	"pings before it answers": func() { asksFirst(`"method":"ping"`, `"result":{}`) },
	"asks for roots first":    func() { asksFirst(`"method":"roots/list"`, `"error"`) },
	"CRLF": func() {
		each(func(c call) string { return modernFake(c) + "}\r\n" + `{"jsonrpc":"2.0","method":"x"` })
	},
	"answers late without id": func() {
		legacy := legacyFake()
		each(func(c call) string {
			switch c.Method {
			case "server/discover":
				return ""
			case "initialize":
				fmt.Println(`{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"Invalid Request"}}`)
			}
			return legacy(c)
		})
	},
	"says goodbye at length": func() {
		each(modernFake)
		for range 1000 {
			fmt.Println(strings.Repeat("bye ", 300))
		}
	},
	"deaf": func() {
		signal.Ignore(syscall.SIGTERM)
		time.Sleep(time.Hour)
	},
	"ends after the answer": func() {
		each(func(c call) string {
			fmt.Printf(`{"jsonrpc":"2.0","id":%s,%s}`+"\n", c.ID, discovered)
			os.Exit(3)
			return ""
		})
	},
	"1 MiB of tools": func() {
		legacy := legacyFake()
		each(func(c call) string {
			if c.Method == "tools/list" {
				legacy(c)
				return `"result":{"tools":[{"name":"echo","description":"` + strings.Repeat("x", 1<<20) + `"}]}`
			}
			return legacy(c)
		})
	},

	"garbage":         func() { fmt.Println("Usage: server [options]"); _, _ = io.Copy(io.Discard, os.Stdin) },
	"garbage, ends":   func() { fmt.Println("Usage: server [options]"); os.Exit(2) },
	"foreign JSON":    func() { fmt.Println(`{"status":"ok"}`); _, _ = io.Copy(io.Discard, os.Stdin) },
	"echo":            func() { _, _ = io.Copy(os.Stdout, os.Stdin) },
	"silent":          func() { _, _ = io.Copy(io.Discard, os.Stdin) },
	"ends at once":    func() { os.Exit(7) },
	"closes stdout":   func() { _ = os.Stdout.Close(); _, _ = io.Copy(io.Discard, os.Stdin) },
	"never reads":     func() { time.Sleep(time.Hour) },
	"notifications":   func() { talk(`{"jsonrpc":"2.0","method":"notifications/progress"}` + "\n") },
	"flood, no lines": func() { talk(strings.Repeat("x", 4096)) },
	"flood of lines":  func() { talk(strings.Repeat("x", 100) + "\n") },
	"flood of errors": func() {
		for {
			if _, err := os.Stderr.WriteString(strings.Repeat("e", 4096) + "\n"); err != nil {
				return
			}
		}
	},
	"stderr, then modern": func() {
		fmt.Fprintln(os.Stderr, "listening \x1b[31mred\x1b[0m")
		for range 100 {
			fmt.Fprintln(os.Stderr, strings.Repeat("s", 10000))
		}
		each(modernFake)
	},

	"ignores stdin's end": func() { each(modernFake); time.Sleep(time.Hour) },
	"ignores SIGTERM":     func() { signal.Ignore(syscall.SIGTERM, syscall.SIGINT); each(modernFake); time.Sleep(time.Hour) },
	"leaves a grandchild": func() { spawn(false); each(modernFake) },
	"leaves a daemon":     func() { spawn(true); each(modernFake) },
	"a wrapper": func() {
		c := exec.Command(os.Args[0])
		c.Env = append(os.Environ(), fakeName+"=modern")
		c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
		_ = c.Run()
	},
	"hangs after the first answer": func() {
		asked := 0
		each(func(c call) string {
			if asked++; asked > 1 {
				return ""
			}
			return modernFake(c)
		})
	},
	"ends after two answers": func() {
		asked := 0
		each(func(c call) string {
			if asked++; asked > 2 {
				os.Exit(5)
			}
			return modernFake(c)
		})
	},
	"wants answers, and talks": func() {
		fmt.Println(`{"jsonrpc":"2.0","id":"p1","method":"ping"}`)
		fmt.Println(`{"jsonrpc":"2.0","id":"p2","method":"roots/list"}`)
		answered, asked := "", 0
		lines := bufio.NewScanner(os.Stdin)
		for lines.Scan() {
			var c struct {
				call
				Result json.RawMessage
			}
			if json.Unmarshal(lines.Bytes(), &c) != nil {
				continue
			}
			if c.Method == "" {
				answered += string(c.ID) + string(c.Result)
				continue
			}
			if asked++; asked > 1 && answered != `"p1"{}"p2"` {
				os.Exit(6)
			}
			fmt.Printf(`{"jsonrpc":"2.0","id":%s,%s}`+"\n", c.ID, modernFake(c.call))
			for range 3000 { // more than a pipe holds, and more than a probe reads
				fmt.Println(`{"jsonrpc":"2.0","method":"notifications/message","params":{"data":"` + strings.Repeat("x", 100) + `"}}`)
			}
		}
	},
	"forks and ends": func() { spawn(true); os.Exit(0) },
	"sleeper":        func() { signal.Ignore(syscall.SIGTERM); time.Sleep(time.Hour) },
}

// asksFirst asks the client before each answer, and waits until it has replied.
func asksFirst(question, reply string) {
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var c call
		if json.Unmarshal(lines.Bytes(), &c) != nil || len(c.ID) == 0 {
			continue
		}
		fmt.Printf(`{"jsonrpc":"2.0","id":"theirs",%s}`+"\n", question)
		for lines.Scan() && !(strings.Contains(lines.Text(), `"theirs"`) && strings.Contains(lines.Text(), reply)) {
		}
		fmt.Printf(`{"jsonrpc":"2.0","id":%s,%s}`+"\n", c.ID, modernFake(c))
	}
}

func modernOnly(c call) string {
	if c.Method == "initialize" {
		return `"error":{"code":-32022,"message":"Unsupported protocol version","data":{"supported":["2026-07-28"]}}`
	}
	return modernFake(c)
}

// talk writes until nobody reads any more.
func talk(s string) {
	for {
		if _, err := os.Stdout.WriteString(s); err != nil {
			return
		}
	}
}

// spawn starts a grandchild that holds our stdout and stderr, in a session of its
// own or not.
func spawn(daemon bool) {
	c := exec.Command(os.Args[0])
	c.Env = append(os.Environ(), fakeName+"=sleeper")
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: daemon}
	if err := c.Start(); err != nil {
		panic(err)
	}
}
