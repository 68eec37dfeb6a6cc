package caddymodule

import (
	"encoding/json"
	"fmt"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/caddyserver/caddy/v2/caddyconfig/httpcaddyfile"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
)

func init() {
	caddy.RegisterModule(new(Status))
	httpcaddyfile.RegisterHandlerDirective("mcp_status", parseStatus)
	httpcaddyfile.RegisterDirectiveOrder("mcp_status", httpcaddyfile.After, "metrics")
}

// Status is a handler that shows what is known of all MCP endpoints and upstreams of
// this Caddy: a page for people, which stays up to date by itself; the same as JSON
// for programs that ask with `Accept: application/json`; and a stream of what changes
// for `Accept: text/event-stream`. It shows addresses, but no credentials. Let it
// listen on loopback, put authentication in front, or make it public.
type Status struct {
	// Whether strangers may see it: addresses, hosts, what servers call themselves
	// and what exactly a probe saw are left out, also of the JSON and the stream.
	// Default: false
	Public bool `json:"public,omitempty"`

	hub       *hub
	rendering sync.Mutex // one at a time: visitors cost one core at most
}

// CaddyModule returns the Caddy module information.
func (*Status) CaddyModule() caddy.ModuleInfo {
	return caddy.ModuleInfo{
		ID:  "http.handlers.mcp_status",
		New: func() caddy.Module { return new(Status) },
	}
}

// Provision sets up the handler. Its streams end when the server begins to shut down,
// for a reload and an exit wait for requests.
func (s *Status) Provision(ctx caddy.Context) error {
	app, err := appOf(ctx)
	if err != nil {
		return err
	}
	s.hub = newHub(func() *statusDocument { return app.statusDocument(time.Now(), s.Public) })
	if server, ok := ctx.Value(caddyhttp.ServerCtxKey).(*caddyhttp.Server); ok {
		server.RegisterOnShutdown(s.hub.close)
	}
	return nil
}

// Cleanup ends the streams.
func (s *Status) Cleanup() error {
	if s.hub != nil {
		s.hub.close()
	}
	return nil
}

// ServeHTTP answers GET and HEAD in the form that the client prefers.
func (s *Status) ServeHTTP(w http.ResponseWriter, r *http.Request, _ caddyhttp.Handler) error {
	h := w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("Vary", "Accept")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "GET and HEAD only", http.StatusMethodNotAllowed)
		return nil
	}
	mediaType := preferred(r.Header.Values("Accept"))
	if mediaType == typeStream {
		return s.serveStream(w, r)
	}
	body, err := s.render(mediaType, r.URL.Query())
	if err != nil {
		return caddyhttp.Error(http.StatusInternalServerError, fmt.Errorf("rendering the status as %s: %w", mediaType, err))
	}
	if mediaType == typeHTML {
		mediaType += "; charset=utf-8"
		h.Set("Content-Security-Policy", contentPolicy)
	}
	h.Set("Content-Type", mediaType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(http.StatusOK)
	if r.Method != http.MethodHead {
		_, _ = w.Write(body) // an error says that the client has gone
	}
	return nil
}

// render makes the document: of the page, the part that the query asks for.
func (s *Status) render(mediaType string, query url.Values) ([]byte, error) {
	s.rendering.Lock()
	defer s.rendering.Unlock()
	doc := s.hub.view()
	if mediaType == typeJSON {
		body, err := json.Marshal(doc)
		return append(body, '\n'), err
	}
	if query.Has("row") {
		return []byte(doc.layout().row(query.Get("row"))), nil
	}
	return doc.layout().page(filterOf(query))
}

// The forms that there are.
const (
	typeHTML   = "text/html"
	typeJSON   = "application/json"
	typeStream = "text/event-stream"
)

// preferred is the form that the Accept header rates highest; the page, where it
// rates several the same, or none. Only a stream that is named is a stream.
func preferred(accept []string) string {
	best, rating := typeHTML, 0.0
	for part := range strings.SplitSeq(strings.Join(accept, ","), ",") {
		name, params, err := mime.ParseMediaType(part)
		if err != nil {
			continue
		}
		q := 1.0
		if v, ok := params["q"]; ok {
			if q, err = strconv.ParseFloat(v, 64); err != nil {
				continue
			}
		}
		switch name {
		case typeJSON, "application/*":
			name = typeJSON
		case typeHTML, "text/*", "*/*":
			name = typeHTML
		case typeStream:
		default:
			continue
		}
		if q > rating || q == rating && name == typeHTML {
			best, rating = name, q
		}
	}
	return best
}

// parseStatus reads the directive mcp_status; see UnmarshalCaddyfile.
func parseStatus(h httpcaddyfile.Helper) (caddyhttp.MiddlewareHandler, error) {
	s := new(Status)
	return s, s.UnmarshalCaddyfile(h.Dispenser)
}

// UnmarshalCaddyfile sets up the handler from Caddyfile tokens. Syntax:
//
//	mcp_status [<matcher>] {
//	    public [on|off]
//	}
func (s *Status) UnmarshalCaddyfile(d *caddyfile.Dispenser) error {
	d.Next() // the name
	if d.NextArg() {
		return d.ArgErr()
	}
	seen := false
	for d.NextBlock(0) {
		if d.Val() != "public" {
			return d.Errf("unrecognized option '%s'", d.Val())
		}
		if seen {
			return d.Err("option 'public' is given twice")
		}
		seen = true
		s.Public = true
		if d.NextArg() {
			on, err := parseSwitch(d.Val())
			if err != nil {
				return d.Errf("bad value of 'public': %v", err)
			}
			s.Public = *on
		}
		if d.NextArg() {
			return d.ArgErr()
		}
	}
	return nil
}

// Interface guards
var (
	_ caddy.Provisioner           = (*Status)(nil)
	_ caddy.CleanerUpper          = (*Status)(nil)
	_ caddyhttp.MiddlewareHandler = (*Status)(nil)
	_ caddyfile.Unmarshaler       = (*Status)(nil)
)
