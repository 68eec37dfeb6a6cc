package reliability

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/mcphealth/mcphealth/test/e2e"
	"github.com/mcphealth/mcphealth/test/traefik"
)

// A machine that was suspended for many intervals finds its servers as they are: it
// calls none down, and does not make up for the probes that it missed.
func TestSuspended(t *testing.T) {
	for _, edge := range edges {
		t.Run(edge.name, func(t *testing.T) {
			t.Parallel()
			a, b := newServer(t), newServer(t)
			e := edge.start(t, Route{Name: "r", Upstreams: []string{a.Addr, b.Addr}, Interval: 300 * time.Millisecond, Timeout: 300 * time.Millisecond, Hold: 10 * time.Second})
			awaitUp(t, e, a.Addr)
			awaitUp(t, e, b.Addr)
			for range 3 {
				e.Proc().Pause(t)
				time.Sleep(3 * time.Second)
				before := a.Probes.Load() + b.Probes.Load()
				e.Proc().Continue(t)
				ask(t, e.URL("r"), callBody(`"awake"`))
				time.Sleep(time.Second)
				if n := a.Probes.Load() + b.Probes.Load() - before; n > 16 {
					t.Errorf("%d probes in the second after 10 intervals of sleep, want no storm", n)
				}
			}
			for _, s := range []*Server{a, b} {
				if n := transitions(t, e, s.Addr); n > 1 { // Traefik logs that it is up
					t.Errorf("%s changed its state %d times", s.Addr, n)
				}
				if state, reason := e.State(t, s.Addr); state != "up" {
					t.Errorf("%s is %s (%s)", s.Addr, state, reason)
				}
			}
		})
	}
}

// resolver is a DNS server for mcp.test. It answers with what is set, or not at all.
type resolver struct {
	addr   string
	ip     atomic.Pointer[[4]byte]
	asked  atomic.Int64
	socket net.PacketConn
}

func newResolver(t testing.TB, addr string) *resolver {
	t.Helper()
	c, err := net.ListenPacket("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	r := &resolver{addr: c.LocalAddr().String(), socket: c}
	go r.serve()
	return r
}

func (r *resolver) serve() {
	buf := make([]byte, 1500)
	for {
		n, from, err := r.socket.ReadFrom(buf)
		if err != nil {
			return
		}
		r.asked.Add(1)
		ip := r.ip.Load()
		var m dnsmessage.Message
		if ip == nil || m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		m.Header.Response, m.Header.RecursionAvailable, m.Additionals = true, true, nil
		if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
			m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: q.Name, Type: q.Type, Class: q.Class, TTL: 0}, Body: &dnsmessage.AResource{A: *ip}}}
		}
		if b, err := m.Pack(); err == nil {
			r.socket.WriteTo(b, from)
		}
	}
}

// No name can be resolved at the start; then it can; then the name flaps between
// addresses, one of which is nobody's. The edge starts, answers, and serves.
func TestNamesFlap(t *testing.T) {
	dns := newResolver(t, "127.0.0.1:0")
	port := e2e.FreePort(t)
	site := fmt.Sprintf(`	mcp_proxy /mcp* {
		dynamic a mcp.test %d {
			refresh 100ms
			resolvers %s
			dial_timeout 300ms
		}
		check_interval 300ms
		check_timeout 1s
		hold 5s
	}
	mcp_proxy /static/* nowhere.invalid:80 {
		hold 0
	}`, port, dns.addr)
	e2e.CaddyBinary(t) // which may have to be built
	start := time.Now()
	c := e2e.StartCaddy(t, site)
	if took := time.Since(start); took > 10*time.Second {
		t.Errorf("Caddy took %s to start without a resolver", took)
	}
	if wrong := answerTo(strings.TrimSuffix(c.URL(), "/mcp")+"/static/mcp", callBody(`1`), `1`); wrong != "" {
		t.Errorf("a name that cannot be resolved: %s", wrong)
	}
	one, two := revive(t, fmt.Sprintf("127.0.0.2:%d", port)), revive(t, fmt.Sprintf("127.0.0.3:%d", port))
	point := func(last byte) { dns.ip.Store(&[4]byte{127, 0, 0, last}) }
	point(2)
	ask(t, c.URL(), callBody(`"first"`))
	done := make(chan struct{})
	time.AfterFunc(5*time.Second, func() { close(done) })
	go func() {
		for n := 0; ; n++ {
			select {
			case <-done:
				point(3)
				return
			case <-time.After(200 * time.Millisecond):
				point([]byte{2, 3, 4, 3}[n%4]) // 127.0.0.4 is nobody's
			}
		}
	}()
	for n := range 50 {
		ask(t, c.URL(), callBody(fmt.Sprintf(`"flap %d"`, n)))
		time.Sleep(100 * time.Millisecond)
	}
	wantOnce(t, one, two)
	if n := len(c.Upstreams(t)); n > 4 {
		t.Errorf("%d upstreams are known, of 3 addresses and a name", n)
	}
	if dns.asked.Load() == 0 {
		t.Error("the resolver was not asked")
	}
}

// A Caddy that is started where there is no network at all, not even loopback, starts,
// listens, and says of its upstreams what it knows.
func TestNoNetworkAtStart(t *testing.T) {
	dir := t.TempDir()
	if out, err := exec.Command("unshare", "--net", "true").CombinedOutput(); err != nil {
		t.Skipf("no network namespaces here: %v %s", err, out)
	}
	file := filepath.Join(dir, "Caddyfile")
	os.WriteFile(file, []byte("{\n\tadmin unix/"+dir+"/admin\n\tauto_https off\n\tpersist_config off\n}\nhttp://:8080 {\n\tbind unix/"+dir+"/site\n"+
		"\tmcp_proxy 192.0.2.1:80 mcp.invalid:80 127.0.0.1:9 {\n\t\tsticky\n\t\thold 0\n\t\tcheck_interval 300ms\n\t}\n\tmcp_status /status\n}\n"), 0o600)
	cmd := exec.Command("unshare", "--net", e2e.CaddyBinary(t), "run", "--config", file, "--adapter", "caddyfile")
	cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME="+dir, "XDG_DATA_HOME="+dir)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(dir, "site"))
	}}}
	await(t, 10*time.Second, "an answer with the caller's id", func() bool {
		resp, err := client.Post("http://edge/mcp", "application/json", strings.NewReader(callBody(`7`)))
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode == http.StatusServiceUnavailable && checkOurs(resp, b, callBody(`7`)) == ""
	})
	time.Sleep(time.Second) // some probes
	if resp, err := client.Get("http://edge/status"); err != nil || resp.StatusCode != http.StatusOK {
		t.Errorf("status page: %v %v", resp, err)
	}
	cmd.Process.Signal(syscall.SIGTERM)
	if err := <-ended; err != nil || strings.Contains(out.String(), "panic") {
		t.Errorf("its end: %v\n%.3000s", err, out.String())
	}
}

// A Caddy whose folders cannot be written serves; with sticky it wants a key, and says
// so.
func TestReadOnly(t *testing.T) {
	a := newServer(t)
	run := func(site string) (*exec.Cmd, string) {
		file := filepath.Join(t.TempDir(), "Caddyfile")
		port := e2e.FreePort(t)
		os.WriteFile(file, []byte(fmt.Sprintf("{\n\tadmin off\n\tauto_https off\n}\nhttp://:%d {\n\tbind 127.0.0.1\n%s\n}\n", port, site)), 0o600)
		cmd := exec.Command(e2e.CaddyBinary(t), "run", "--config", file, "--adapter", "caddyfile")
		cmd.Dir = "/proc"
		cmd.Env = append(os.Environ(), "XDG_CONFIG_HOME=/proc/none", "XDG_DATA_HOME=/proc/none", "HOME=/proc/none")
		return cmd, fmt.Sprintf("127.0.0.1:%d", port)
	}
	for _, site := range []string{"mcp_proxy " + a.Addr, "mcp_proxy " + a.Addr + " {\n\tsticky\n\tsession_key 0123456789abcdef\n}"} {
		cmd, addr := run(site)
		e2e.StartProcess(t, addr, func() *exec.Cmd { return cmd })
		ask(t, "http://"+addr+"/mcp", callBody(`"x"`))
	}
	cmd, _ := run("mcp_proxy " + a.Addr + " {\n\tsticky\n}")
	done := time.AfterFunc(60*time.Second, func() { cmd.Process.Kill() })
	out, err := cmd.CombinedOutput()
	done.Stop()
	if err == nil || !strings.Contains(string(out), "session_key") {
		t.Errorf("sticky without a place for its key: %v\n%s", err, out)
	}
}

// The same of Traefik: where there is not even loopback it starts and finds its servers
// down, and when a network comes, and a server, calls get there without anybody's help.
func TestNoNetworkAtStartInTraefik(t *testing.T) {
	if out, err := exec.Command("unshare", "--net", "true").CombinedOutput(); err != nil {
		t.Skipf("no network namespaces here: %v %s", err, out)
	}
	const server = "127.0.0.1:9000"
	cmd := traefik.Command(t, ":8080", traefikDynamic([]Route{
		{Name: "r", Upstreams: []string{server}, Interval: 300 * time.Millisecond, Traefik: "sticky: true\n", Service: stickyCookie},
		{Name: "none", Upstreams: []string{"192.0.2.1:80", "mcp.invalid:80"}, Interval: 300 * time.Millisecond},
	}))
	file := filepath.Join(t.TempDir(), "output")
	out, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	said := func() string { b, _ := os.ReadFile(file); return string(b) }
	defer func() {
		if t.Failed() {
			t.Logf("%.3000s", said())
		}
	}()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	await(t, 30*time.Second, "the server down", func() bool { return strings.Contains(said(), server+"/r/mcp is down") })

	inside(t, cmd.Process.Pid, func() error { return loopbackUp() })
	client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (c net.Conn, err error) {
		inside(t, cmd.Process.Pid, func() error { c, err = new(net.Dialer).DialContext(ctx, "tcp", "127.0.0.1:8080"); return nil })
		return c, err
	}}}
	call := func(route string) (status int, wrong string) {
		resp, err := client.Post("http://edge/"+route+"/mcp", "application/json", strings.NewReader(callBody(`7`)))
		if err != nil {
			return 0, err.Error()
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return resp.StatusCode, checkOurs(resp, b, callBody(`7`))
	}
	for _, route := range []string{"r", "none"} {
		await(t, 10*time.Second, "an answer with the caller's id for "+route, func() bool {
			status, wrong := call(route)
			return status == http.StatusServiceUnavailable && wrong == ""
		})
	}
	inside(t, cmd.Process.Pid, func() error { revive(t, server); return nil })
	await(t, 10*time.Second, "calls served", func() bool { status, _ := call("r"); return status == http.StatusOK })
	cmd.Process.Signal(syscall.SIGTERM)
	select {
	case err := <-ended:
		if err != nil || strings.Contains(said(), "panic") {
			t.Errorf("its end: %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Error("it does not end")
	}
}

// inside does something in the network of a process: sockets that it opens are there.
func inside(t testing.TB, pid int, do func() error) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	home, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		t.Error(err)
		return
	}
	defer home.Close()
	there, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		t.Error(err)
		return
	}
	defer there.Close()
	if err := unix.Setns(int(there.Fd()), unix.CLONE_NEWNET); err != nil {
		t.Error(err)
		return
	}
	defer func() {
		if err := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); err != nil {
			panic(err) // the thread would be lost to all other tests
		}
	}()
	if err := do(); err != nil {
		t.Error(err)
	}
}

// loopbackUp has the thread's network begin.
func loopbackUp() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	lo.SetUint16(unix.IFF_UP)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo)
}

// A Traefik on a machine where nothing at all can be written serves, sessions too, and
// takes a new configuration.
func TestReadOnlyTraefik(t *testing.T) {
	dir := t.TempDir()
	script := filepath.Join(dir, "traefik")
	text := fmt.Sprintf("#!/bin/sh\nexec unshare --mount sh -c 'for m in $(cut -d\" \" -f2 /proc/self/mounts); do mount -o remount,bind,ro \"$m\" 2>/dev/null; done\n"+
		"for d in . /tmp /var/tmp \"$HOME\" %s; do ! touch \"$d/written\" 2>/dev/null || { echo \"$d can be written\"; exit 1; }; done\nexec %s \"$@\"' sh \"$@\"\n", dir, traefik.Binary(t))
	if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(script, "version").CombinedOutput(); err != nil {
		t.Skipf("no namespaces of mounts here, or not for all of them: %v %s", err, out)
	}
	t.Setenv("TRAEFIK", script)
	a := newServer(t)
	r := Route{Name: "r", Upstreams: []string{a.Addr}, Hold: time.Second, Traefik: "sticky: true\n", Service: stickyCookie}
	e := startTraefik(t, r)
	awaitUp(t, e, a.Addr)
	ask(t, e.URL("r"), callBody(`"x"`))
	id := openSession(t, e.URL("r"))
	r.Hold = 2 * time.Second
	e.Reload(t, r)
	if status := callIn(e.URL("r"), id, `"y"`); status != http.StatusOK || a.Runs()[`"y"`] != 1 {
		t.Errorf("a call in a session: status %d", status)
	}
}

// The same before Traefik, which asks the machine's resolver, and so gets a machine with
// another one. A name that leads to nobody is down; calls that Traefik sends meanwhile fail.
func TestNamesFlapInTraefik(t *testing.T) {
	if err := exec.Command("unshare", "--mount", "mount", "--bind", "/etc/hosts", "/etc/hosts").Run(); err != nil {
		t.Skipf("a resolv.conf of its own takes a namespace of mounts: %v", err)
	}
	ns := fmt.Sprintf("127.53.%d.%d", os.Getpid()>>8&0xff, os.Getpid()&0xff|1)
	dns := newResolver(t, ns+":53")
	dir := t.TempDir()
	conf, script := filepath.Join(dir, "resolv.conf"), filepath.Join(dir, "traefik")
	text := fmt.Sprintf("#!/bin/sh\nexec unshare --mount sh -c 'mount --bind %s /etc/resolv.conf && GODEBUG=netdns=go exec %s \"$@\"' sh \"$@\"\n", conf, traefik.Binary(t))
	for file, text := range map[string]string{conf: "nameserver " + ns + "\n", script: text} {
		if err := os.WriteFile(file, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("TRAEFIK", script)
	port := e2e.FreePort(t)
	addr := fmt.Sprintf("mcp.test:%d", port)
	e := startTraefik(t, Route{Name: "r", Upstreams: []string{addr}, Interval: 300 * time.Millisecond, Timeout: time.Second, Hold: 2 * time.Second})
	if wrong := answerTo(e.URL("r"), callBody(`1`), `1`); wrong != "" {
		t.Errorf("a name that cannot be resolved: %s", wrong)
	}
	revive(t, fmt.Sprintf("127.0.0.2:%d", port))
	revive(t, fmt.Sprintf("127.0.0.3:%d", port))
	point := func(last byte) { dns.ip.Store(&[4]byte{127, 0, 0, last}) }
	point(2)
	awaitUp(t, e, addr)
	for n := range 50 {
		point(byte(2 + n/2%2))
		ask(t, e.URL("r"), callBody(fmt.Sprintf(`"flap %d"`, n)))
		time.Sleep(100 * time.Millisecond)
	}
	if n := transitions(t, e, addr); n > 2 { // down at the start, and up
		t.Errorf("the state changed %d times", n)
	}
	point(4) // nobody's
	await(t, 10*time.Second, "down", func() bool { state, _ := e.State(t, addr); return state == "down" })
	if wrong := answerTo(e.URL("r"), callBody(`2`), `2`); wrong != "" {
		t.Errorf("a name that leads to nobody: %s", wrong)
	}
	point(3)
	awaitUp(t, e, addr)
	ask(t, e.URL("r"), callBody(`"found again"`))
}

// A certificate expires while all is well: the server is down for that reason, calls
// get a 503, and when it is renewed they are served.
func TestCertificateExpires(t *testing.T) {
	ca, addr, renew := expiring(t, 5*time.Second)
	c := e2e.StartCaddy(t, fmt.Sprintf(`	mcp_proxy /mcp* %s {
		check_interval 500ms
		hold 0
		transport http {
			tls_trust_pool file %s
			tls_server_name 127.0.0.1
		}
	}`, addr, ca))
	c.AwaitState(t, addr, "up", 5*time.Second)
	ask(t, c.URL(), callBody(`"valid"`))
	c.AwaitState(t, addr, "down", 20*time.Second)
	if u := c.Upstreams(t)[addr]; u.Reason != "tls" {
		t.Errorf("down for the reason %s, want tls", u.Reason)
	}
	if wrong := answerTo(c.URL(), callBody(`2`), `2`); wrong != "" {
		t.Error(wrong)
	}
	renew()
	c.AwaitState(t, addr, "up", 15*time.Second)
	ask(t, c.URL(), callBody(`"renewed"`))
}

// The same before Traefik. The plugin verifies certificates where it sends credentials;
// without any it cannot know whom the serversTransport trusts, and calls the server up.
func TestCertificateExpiresInTraefik(t *testing.T) {
	ca, addr, renew := expiring(t, 8*time.Second)
	t.Setenv("SSL_CERT_FILE", ca) // whom Traefik and the plugin trust
	e := startTraefik(t, Route{Name: "r", Upstreams: []string{addr}, Scheme: "https", Interval: 500 * time.Millisecond, Traefik: "headers:\n  Authorization: Bearer x"})
	awaitUp(t, e, addr)
	ask(t, e.URL("r"), callBody(`"valid"`))
	await(t, 20*time.Second, "down for its certificate", func() bool {
		state, reason := e.State(t, addr)
		return state == "down" && reason == "tls"
	})
	if wrong := answerTo(e.URL("r"), callBody(`2`), `2`); wrong != "" {
		t.Error(wrong)
	}
	renew()
	awaitUp(t, e, addr)
	ask(t, e.URL("r"), callBody(`"renewed"`))
}

// expiring is an MCP server over TLS whose certificate, of the authority in the file ca,
// expires soon; renew gives it one that does not.
func expiring(t *testing.T, lasts time.Duration) (ca, addr string, renew func()) {
	t.Helper()
	ca = filepath.Join(t.TempDir(), "ca.pem")
	var current atomic.Pointer[tls.Certificate]
	by := newAuthority(t, ca)
	current.Store(by.issue(t, lasts))
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return current.Load(), nil }})
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: newServer(t), ReadHeaderTimeout: time.Minute, IdleTimeout: time.Second}
	go srv.Serve(ln)
	t.Cleanup(func() { srv.Close() })
	return ca, ln.Addr().String(), func() { current.Store(by.issue(t, time.Hour)) }
}

// authority issues certificates for 127.0.0.1.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB, file string) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{cert, key}
}

func (a *authority) issue(t testing.TB, lasts time.Duration) *tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "127.0.0.1"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(lasts)}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}
