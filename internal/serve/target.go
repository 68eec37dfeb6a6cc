package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/mcphealth/mcphealth/internal/stdio"
	"github.com/mcphealth/mcphealth/mcphealth"
)

// A Target is one server that is asked: over HTTP, or a command over stdio.
type Target struct {
	// Name stands in paths, labels and other programs' configurations: letters,
	// digits, "-", "_" and ".", 64 at most.
	Name string
	// Target is what is asked. Its URL is not used with Command.
	mcphealth.Target
	// Transport, if set, is the way there. It is asked for before each probe, and
	// the way changes when it returns another one.
	Transport func() (*http.Transport, error)
	// Header, if set, is asked for before each probe, for credentials that are
	// renewed.
	Header func() (http.Header, error)
	// Command is kept running, and asked over stdio at each Heartbeat (default
	// stdio.DefaultHeartbeat).
	Command   []string
	Heartbeat time.Duration
}

// minHeartbeat keeps a typing mistake from becoming a flood of questions.
const minHeartbeat = 10 * time.Millisecond

// nameRule: a name must need no escape anywhere it stands.
var nameRule = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// Validate says what is wrong with the target.
func (t Target) Validate() error {
	if !nameRule.MatchString(t.Name) {
		return fmt.Errorf("name %q: want letters, digits, -, _ and ., beginning with a letter or digit, 64 at most", t.Name)
	}
	if t.Heartbeat != 0 && (t.Heartbeat < minHeartbeat || len(t.Command) == 0) {
		return fmt.Errorf("heartbeat %v: want at least %v, and a command over stdio", t.Heartbeat, minHeartbeat)
	}
	if len(t.Command) > 0 {
		if t.Command[0] == "" || strings.Contains(strings.Join(t.Command, ""), "\x00") {
			return errors.New("stdio: want a program and its arguments, without zero bytes")
		}
		_, err := mcphealth.NewCarrierProber(t.Target, &mcphealth.Carrier{})
		return err
	}
	return t.Target.Validate()
}

// addresses are what a proxy may call this target by, besides its name: host:port,
// and host:port/path where one server has several endpoints.
func (t Target) addresses() []string {
	u, err := url.Parse(t.URL)
	if err != nil || len(t.Command) > 0 {
		return nil
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	addr := oneForm(net.JoinHostPort(u.Hostname(), port))
	if u.EscapedPath() == "" || u.EscapedPath() == "/" {
		return []string{addr}
	}
	return []string{addr, addr + u.EscapedPath()}
}

// oneForm writes host:port as everybody else's: names in lower case, IPv6 addresses
// as RFC 5952 has them.
func oneForm(addr string) string {
	if ip, err := netip.ParseAddrPort(addr); err == nil {
		return ip.String()
	}
	return strings.ToLower(addr)
}

// status is what is known of one target.
type status struct {
	last  mcphealth.Result
	child *stdio.Status // of a command
}

// A source has the status of one target: a cell, or a command over stdio.
type source interface {
	begin() (wait <-chan struct{}, tellable bool)
	status() status
	close()
}

// overHTTP makes the source of a server that is asked when somebody wants to know.
func overHTTP(ctx context.Context, t Target, o Options, heard func(mcphealth.Result)) (source, error) {
	if t.Transport == nil {
		plain := &http.Transport{}
		t.Transport = func() (*http.Transport, error) { return plain, nil }
	}
	way, err := t.Transport()
	if err != nil {
		return nil, err
	}
	if t.Header != nil {
		if t.Target.Header, err = t.Header(); err != nil {
			return nil, err
		}
	}
	line := mcphealth.NewLine(way.Clone())
	p, err := mcphealth.NewProber(t.Target, line)
	if err != nil {
		return nil, err
	}
	renew := func() {
		if w, err := t.Transport(); err != nil {
			o.Logger.Warn("files of the connection cannot be read; the old ones are used", "target", t.Name, "error", err)
		} else if w != way {
			way, line = w, mcphealth.NewLine(w.Clone())
			p.SetLine(line)
		}
		if t.Header == nil {
			return
		}
		if h, err := t.Header(); err != nil {
			o.Logger.Warn("credentials cannot be read; the old ones are used", "target", t.Name, "error", err)
		} else {
			p.SetHeader(h)
		}
	}
	c := newCell(ctx, o.Cache, o.Cache+p.Target().Timeout, p.Target().URL)
	c.ask = func(ctx context.Context) mcphealth.Result {
		renew()
		r := p.Probe(ctx)
		line.Close() // nobody watches it until the next probe, which dials afresh
		heard(r)
		return r
	}
	c.end = func() {
		ctx, cancel := context.WithTimeout(context.Background(), endWithin)
		defer cancel()
		p.Close(ctx)
	}
	return c, nil
}

// from puts the target's name before each line of a command; package stdio writes
// line by line. Nil stays nil.
func from(name string, w io.Writer) io.Writer {
	if w == nil {
		return nil
	}
	return prefixed{name + " ", w}
}

type prefixed struct {
	prefix string
	w      io.Writer
}

func (p prefixed) Write(line []byte) (int, error) {
	_, err := p.w.Write(append([]byte(p.prefix), line...))
	return len(line), err
}

// overStdio makes the source of a command, whose heartbeats are its probes.
type overStdio struct{ server *stdio.Server }

func (s overStdio) begin() (<-chan struct{}, bool) { return nil, true }

func (s overStdio) status() status {
	st := s.server.Status()
	return status{last: st.Last, child: &st}
}

func (s overStdio) close() { s.server.Close() }
