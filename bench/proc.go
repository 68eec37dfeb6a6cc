package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// proc is a proxy that is measured.
type proc struct {
	cmd   *exec.Cmd
	dir   string
	admin string // of a Caddy: where its admin endpoint listens
}

// stop ends the process.
func (p *proc) stop() {
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait()
	_ = os.RemoveAll(p.dir)
}

// global is the beginning of every Caddyfile here; %s is where the admin endpoint
// listens.
const global = `{
	admin %s
	auto_https off
	persist_config off
	log {
		level ERROR
	}
%s}
`

// startCaddy runs Caddy with these sites and waits until each listens. options go
// into the global block.
func startCaddy(options, sites string) (*proc, error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return nil, err
	}
	p := &proc{dir: dir, admin: freeAddr()}
	file := filepath.Join(dir, "Caddyfile")
	if err := os.WriteFile(file, fmt.Appendf(nil, global+"%s", p.admin, options, sites), 0o644); err != nil {
		return nil, err
	}
	p.cmd = exec.Command(*caddyBin, "run", "--config", file, "--adapter", "caddyfile")
	p.cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+dir)
	return p, p.start(sites)
}

var siteLine = regexp.MustCompile(`(?m)^http://(\S+) \{`)

// start starts the process and waits until what it says in its configuration
// listens.
func (p *proc) start(sites string) error {
	var stderr bytes.Buffer
	p.cmd.Stderr = &stderr
	if err := p.cmd.Start(); err != nil {
		return err
	}
	for _, m := range siteLine.FindAllStringSubmatch(sites, -1) {
		if err := awaitListen(m[1]); err != nil {
			p.stop()
			return fmt.Errorf("%s: %w\n%s", filepath.Base(p.cmd.Path), err, stderr.Bytes())
		}
	}
	return nil
}

func awaitListen(addr string) error {
	var err error
	for range 500 {
		var c net.Conn
		if c, err = net.Dial("tcp", addr); err == nil {
			return c.Close()
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("it does not listen: %w", err)
}

// freeAddr is an address that nobody listens on, of a port below those that connections
// take for themselves (32768 and up): there are many here.
func freeAddr() string {
	for {
		addr := fmt.Sprintf("127.0.0.1:%d", 10_000+rand.IntN(22_000))
		if ln, err := net.Listen("tcp", addr); err == nil {
			_ = ln.Close()
			return addr
		}
	}
}

// usage is what a process holds.
type usage struct {
	rss        float64 // bytes resident
	live       float64 // bytes of Go objects in use, after a collection
	stacks     float64 // bytes of goroutine stacks
	goroutines float64
}

// cpuTime is what the process has used so far, without asking it.
func (p *proc) cpuTime() (time.Duration, error) {
	fields, err := p.stat("stat", ") ")
	if err != nil || len(fields) < 13 {
		return 0, fmt.Errorf("/proc stat of %s: %v", p.cmd.Path, err)
	}
	user, err1 := strconv.Atoi(fields[11])
	system, err2 := strconv.Atoi(fields[12])
	const tick = time.Second / 100 // sysconf(_SC_CLK_TCK), on every Linux that Go knows
	return time.Duration(user+system) * tick, errors.Join(err1, err2)
}

// stat is a file of /proc about the process, in fields; what is before the last mark is
// left out.
func (p *proc) stat(file, mark string) ([]string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", p.cmd.Process.Pid, file))
	text := string(b)
	if i := strings.LastIndex(text, mark); mark != "" && i >= 0 {
		text = text[i+len(mark):]
	}
	return strings.Fields(text), err
}

var (
	heapLine      = regexp.MustCompile(`(?m)^# HeapAlloc = (\d+)`)
	stackLine     = regexp.MustCompile(`(?m)^# Stack = (\d+)`)
	goroutineLine = regexp.MustCompile(`^goroutine profile: total (\d+)`)
)

// usage has Caddy collect its garbage and tell what is left.
func (p *proc) usage() (u usage, err error) {
	heap, err1 := p.profile("heap?debug=1&gc=1")
	goroutines, err2 := p.profile("goroutine?debug=1")
	rss, err3 := p.stat("statm", "")
	if err := errors.Join(err1, err2, err3); err != nil {
		return u, err
	}
	number := func(re *regexp.Regexp, text []byte) float64 {
		n := 0.0
		if m := re.FindSubmatch(text); m != nil {
			n, err = strconv.ParseFloat(string(m[1]), 64)
		} else {
			err = fmt.Errorf("no %s in a profile", re)
		}
		return n
	}
	u.live, u.stacks, u.goroutines = number(heapLine, heap), number(stackLine, heap), number(goroutineLine, goroutines)
	pages, _ := strconv.ParseFloat(rss[1], 64)
	u.rss = pages * float64(os.Getpagesize())
	return u, err
}

func (p *proc) profile(name string) ([]byte, error) {
	resp, err := http.Get("http://" + p.admin + "/debug/pprof/" + name)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}
