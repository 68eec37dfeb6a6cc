package kit

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"
)

// stopWithin is how long calls that run at a SIGTERM may take to end.
const stopWithin = 10 * time.Second

// Options are the flags that every server here has.
type Options struct {
	Listen string
	Name   string
	H2C    bool
	Log    string
}

// Flags declares them on the command line.
func (o *Options) Flags() {
	flag.StringVar(&o.Listen, "listen", "127.0.0.1:9001", "address to listen on")
	flag.StringVar(&o.Name, "name", "demo", "server name, which the tool whoami tells")
	flag.BoolVar(&o.H2C, "h2c", false, "accept HTTP/2 without TLS as well as HTTP/1.1")
	flag.StringVar(&o.Log, "log", "", "append a line per executed tool call to this file")
}

// Serve serves the MCP endpoint h at /mcp and the counters at /debug/stats
// until SIGTERM or SIGINT; then it ends the idle streams, lets running calls
// finish and returns nil. A second signal kills as usual.
func Serve(o Options, s *Stats, h http.Handler) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	ln, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.Handle("/mcp", endStreams(ctx, h))
	mux.Handle("GET /debug/stats", s)
	srv := &http.Server{Handler: mux, Protocols: new(http.Protocols)}
	srv.Protocols.SetHTTP1(true)
	srv.Protocols.SetUnencryptedHTTP2(o.H2C)
	fmt.Printf("%s: http://%s/mcp\n", o.Name, ln.Addr())

	served := make(chan error, 1)
	go func() { served <- srv.Serve(ln) }()
	select {
	case err = <-served: // the listener broke
		return err
	case <-ctx.Done():
	}
	stop()
	grace, cancel := context.WithTimeout(context.Background(), stopWithin)
	defer cancel()
	err = srv.Shutdown(grace)
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("calls still running %s after the signal: %w", stopWithin, srv.Close())
	}
	return err
}

// endStreams makes GET streams end with ctx: they last as long as their client
// wants, so a shutdown that waits for them would never end.
func endStreams(ctx context.Context, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			c, cancel := context.WithCancel(r.Context())
			defer cancel()
			defer context.AfterFunc(ctx, cancel)()
			r = r.WithContext(c)
		}
		h.ServeHTTP(w, r)
	})
}

// Version is the version of a module in this binary, so that a server says
// which release of its library answers.
func Version(module string) string {
	info, _ := debug.ReadBuildInfo()
	for _, m := range info.Deps {
		if m.Path == module {
			return m.Version
		}
	}
	return "unknown"
}
