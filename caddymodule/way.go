package caddymodule

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/headers"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// A way is how one reverse proxy handler reaches its upstreams: the transport,
// and what the handler does to the path and the Host on the way. Probes take it,
// so that they meet what traffic meets.
type way struct {
	handler   *reverseproxy.Handler
	transport http.RoundTripper
	http      *reverseproxy.HTTPTransport // nil: a transport of another kind
	identity  string                      // tells transports with other settings apart; holds no secrets
}

// newWay reads the handler's transport. Call it after the handler is provisioned.
func newWay(h *reverseproxy.Handler) *way {
	w := &way{handler: h, transport: h.Transport}
	if t, ok := h.Transport.(*reverseproxy.HTTPTransport); ok && t.Transport != nil && !slices.Equal(t.Versions, []string{"3"}) && !ownH2C(t) {
		w.http = t
	}
	w.identity = w.identify()
	return w
}

// ownH2C reports whether t speaks h2c by a transport of its own, beside the exported
// one, as in Caddy 2.10.
func ownH2C(t *reverseproxy.HTTPTransport) bool {
	return slices.Contains(t.Versions, "h2c") && t.Transport.Protocols == nil
}

// speaksHTTP1 reports whether the transport is one of HTTP/1.1 and nothing else.
func (w *way) speaksHTTP1() bool { return w.http != nil && !w.speaksH2C() && !w.agrees() }

// isPlain reports whether it is that, and without TLS.
func (w *way) isPlain() bool { return w.speaksHTTP1() && w.http.TLS == nil }

// speaksH2C reports whether it speaks HTTP/2 without TLS.
func (w *way) speaksH2C() bool { return w.http != nil && slices.Contains(w.http.Versions, "h2c") }

// agrees reports whether it agrees with each server, by TLS, on HTTP/1.1 or HTTP/2.
func (w *way) agrees() bool {
	return w.http != nil && w.http.TLS != nil && slices.Contains(w.http.Versions, "2")
}

// identify hashes the transport's settings. Modules inside them have their JSON
// wiped after loading (Context.LoadModule), so that the trusted roots and the
// forward proxy are told apart by what was made of them.
func (w *way) identify() string {
	settings, err := json.Marshal(w.transport)
	if err != nil {
		settings = fmt.Appendf(nil, "%T", w.transport)
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "%T %s", w.transport, settings)
	if t, ok := w.transport.(*reverseproxy.HTTPTransport); ok && t.Transport != nil {
		if c := t.Transport.TLSClientConfig; c != nil {
			fmt.Fprintf(sum, " roots %d", rootsID(c.RootCAs))
			for _, cert := range c.Certificates {
				for _, der := range cert.Certificate {
					sum.Write(der)
				}
			}
		}
		if t.Transport.Proxy != nil {
			if req, err := http.NewRequest(http.MethodPost, "http://mcphealth.invalid/", nil); err == nil {
				req = req.WithContext(context.WithValue(context.Background(), caddyhttp.VarsCtxKey, map[string]any{}))
				u, err := t.Transport.Proxy(req)
				fmt.Fprintf(sum, " proxy %v %v", u, err)
			}
		}
	}
	return hex.EncodeToString(sum.Sum(nil))
}

// roots are the certificate pools seen so far; a pool has no name, only Equal.
// There are as many as the configurations of this process had different ones.
var roots struct {
	sync.Mutex
	pools []*x509.CertPool
}

func rootsID(pool *x509.CertPool) int {
	if pool == nil {
		return 0
	}
	roots.Lock()
	defer roots.Unlock()
	for i, known := range roots.pools {
		if known.Equal(pool) {
			return i + 1
		}
	}
	roots.pools = append(roots.pools, pool)
	return len(roots.pools)
}

// errDynamicDial is an upstream whose address depends on the request.
var errDynamicDial = errors.New("the address depends on the request")

// dialInfo is what dial (an upstream's address) means outside of any request.
func dialInfo(dial string) (reverseproxy.DialInfo, error) {
	addr, err := caddy.NewReplacer().ReplaceOrErr(dial, true, true)
	if err != nil {
		return reverseproxy.DialInfo{}, fmt.Errorf("upstream %s: %w: %v", dial, errDynamicDial, err)
	}
	na, err := caddy.ParseNetworkAddress(addr)
	if err != nil {
		return reverseproxy.DialInfo{}, fmt.Errorf("upstream %s: invalid dial address %s: %v", dial, addr, err)
	}
	if n := na.PortRangeSize(); n != 1 {
		return reverseproxy.DialInfo{}, fmt.Errorf("upstream %s: %s is %d sockets, want one", dial, addr, n)
	}
	return reverseproxy.DialInfo{
		Upstream: &reverseproxy.Upstream{Dial: dial},
		Network:  na.Network,
		Address:  na.JoinHostPort(0),
		Host:     na.Host,
		Port:     strconv.Itoa(int(na.StartPort)),
	}, nil
}

// knowsName checks that the name for TLS, if one is configured, means something outside of
// any request.
func (w *way) knowsName(di reverseproxy.DialInfo) error {
	t, ok := w.transport.(*reverseproxy.HTTPTransport)
	if !ok || t.TLS == nil || t.TLS.ServerName == "" {
		return nil
	}
	if _, err := upstreamReplacer(di).ReplaceOrErr(t.TLS.ServerName, false, true); err != nil {
		return fmt.Errorf("tls_server_name %s depends on the request: %w", t.TLS.ServerName, err)
	}
	return nil
}

// url is the endpoint's URL at an upstream, and host the Host header that the
// handler gives to requests for it: "" if it leaves the client's. learnable is
// false if the handler makes the Host out of the request in some other way.
func (w *way) url(di reverseproxy.DialInfo, path string) (u *url.URL, host string, learnable bool, err error) {
	const client = "client.mcphealth.invalid"
	r, err := http.NewRequest(http.MethodPost, "http://"+client+path, nil)
	if err != nil {
		return nil, "", false, fmt.Errorf("path %q: %w", path, err)
	}
	r.RequestURI = r.URL.RequestURI()
	repl := upstreamReplacer(di)
	r = fakeRequest(r, repl)
	if w.handler.Rewrite != nil {
		w.handler.Rewrite.Rewrite(r, repl)
	}
	if t, ok := w.transport.(requestHeaderOps); ok {
		if ops := t.RequestHeaderOps(); ops != nil {
			ops.ApplyToRequest(r)
		}
	}
	if w.handler.Headers != nil && w.handler.Headers.Request != nil {
		w.handler.Headers.Request.ApplyToRequest(r)
	}
	u = &url.URL{Scheme: "http", Host: di.Address, Path: r.URL.Path, RawPath: r.URL.RawPath, RawQuery: r.URL.RawQuery}
	if isLocal(di.Network) {
		u.Host = "localhost" // the path of a socket is no URL host; the dial info leads there
	}
	switch t := w.transport.(type) {
	case schemeOverrider:
		t.OverrideHealthCheckScheme(u, di.Port)
	case reverseproxy.TLSTransport:
		if t.TLSEnabled() {
			u.Scheme = "https"
		}
	}
	if u.Port() == "80" && u.Scheme == "http" || u.Port() == "443" && u.Scheme == "https" {
		u.Host = strings.TrimSuffix(u.Host, ":"+u.Port())
	}
	switch {
	case r.Host == client:
		return u, "", true, nil
	case r.Host == "" || strings.Contains(r.Host, client):
		return u, "", false, nil
	}
	return u, r.Host, false, nil
}

// What transports and upstream sources of Caddy 2.11 can do besides; to 2.10, which this
// module is built for as well, the names in package reverseproxy are unknown.
type (
	requestHeaderOps interface{ RequestHeaderOps() *headers.HeaderOps }
	schemeOverrider  interface {
		OverrideHealthCheckScheme(base *url.URL, port string)
	}
	cachingSource interface{ ResetCache(*http.Request) error }
)

func isLocal(network string) bool {
	return caddy.IsUnixNetwork(network) || caddy.IsFdNetwork(network)
}

// upstreamReplacer knows what placeholders of the proxy mean for one upstream.
func upstreamReplacer(di reverseproxy.DialInfo) *caddy.Replacer {
	repl := caddy.NewReplacer()
	repl.Set("http.reverse_proxy.upstream.address", di.String())
	repl.Set("http.reverse_proxy.upstream.hostport", di.Address)
	repl.Set("http.reverse_proxy.upstream.host", di.Host)
	repl.Set("http.reverse_proxy.upstream.port", di.Port)
	return repl
}

// fakeRequest gives r what Caddy's server gives to each request.
func fakeRequest(r *http.Request, repl *caddy.Replacer) *http.Request {
	r.RemoteAddr = "127.0.0.1:0"
	return caddyhttp.PrepareRequest(r, repl, nowhere{http.Header{}}, &caddyhttp.Server{})
}

// nowhere is the response writer of requests that nobody sent.
type nowhere struct{ header http.Header }

func (n nowhere) Header() http.Header       { return n.header }
func (nowhere) Write(b []byte) (int, error) { return len(b), nil }
func (nowhere) WriteHeader(int)             {}

// dialInfoKey is where reverse_proxy's transports look for where to dial
// (reverseproxy/hosts.go, dialInfoCtxKey; among the variables in Caddy before 2.11.5),
// and proxyInfoVar for whose address the PROXY protocol names: our own.
const (
	dialInfoKey  = caddy.CtxKey("reverse_proxy.dial_info")
	proxyInfoVar = "reverse_proxy.proxy_protocol_info"
)

var ownAddr = reverseproxy.ProxyProtocolInfo{AddrPort: netip.MustParseAddrPort("127.0.0.1:0")}

// line is a fresh line to one upstream over the handler's transport.
func (w *way) line(di reverseproxy.DialInfo) *mcphealth.Line {
	var l *mcphealth.Line
	switch {
	case w.isPlain():
		l = mcphealth.NewPlainLine(w.http.Transport)
	case w.http != nil:
		l = mcphealth.NewLine(w.http.Transport)
	default:
		l = mcphealth.NewForeignLine(careful{w.transport})
	}
	l.Prepare = func(r *http.Request) *http.Request {
		return r.WithContext(&probeContext{Context: r.Context(), di: di, req: r})
	}
	return l
}

// probeContext is what Caddy's server and reverse_proxy give to each request, for the
// probes, and made where somebody asks.
type probeContext struct {
	context.Context
	di  reverseproxy.DialInfo
	req *http.Request

	repl     *caddy.Replacer
	replOnce sync.Once
	vars     map[string]any
	varsOnce sync.Once
}

// probeKey tells the context of a probe from that of a request.
type probeKey struct{}

// Value returns what there is for key.
func (c *probeContext) Value(key any) any {
	switch key {
	case probeKey{}:
		return true
	case dialInfoKey:
		return c.di
	case caddy.ReplacerCtxKey:
		c.replOnce.Do(func() { c.repl = upstreamReplacer(c.di) })
		return c.repl
	case caddyhttp.VarsCtxKey:
		c.varsOnce.Do(func() { c.vars = map[string]any{proxyInfoVar: ownAddr, string(dialInfoKey): c.di} })
		return c.vars
	case caddyhttp.OriginalRequestCtxKey:
		return *c.req
	}
	return c.Context.Value(key)
}

// careful turns a panic of a transport that misses something in a request which
// no server received into an error: a probe runs on a goroutine of its own, where
// a panic would end the process.
type careful struct{ http.RoundTripper }

func (c careful) RoundTrip(r *http.Request) (resp *http.Response, err error) {
	defer func() {
		if p := recover(); p != nil {
			resp, err = nil, fmt.Errorf("transport %T: panic: %v", c.RoundTripper, p)
		}
	}()
	return c.RoundTripper.RoundTrip(r)
}
