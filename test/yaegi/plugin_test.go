package yaegi_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/mitchellh/mapstructure"
	"github.com/traefik/yaegi/interp"
	"gopkg.in/yaml.v3"
)

const plugin = module + "/traefikplugin"

// manifest is .traefik.yml.
type manifest struct {
	DisplayName string                 `yaml:"displayName"`
	Type        string                 `yaml:"type"`
	Import      string                 `yaml:"import"`
	Summary     string                 `yaml:"summary"`
	TestData    map[string]interface{} `yaml:"testData"`
}

func readManifest(t *testing.T) manifest {
	t.Helper()
	b, err := os.ReadFile("../../.traefik.yml")
	if err != nil {
		t.Fatal(err)
	}
	var m manifest
	if err := yaml.Unmarshal(b, &m); err != nil {
		t.Fatal(err)
	}
	return m
}

// builder is the plugin in an interpreter, as Traefik holds it (pkg/plugins,
// middlewareyaegi.go).
type builder struct{ fnNew, fnConfig reflect.Value }

func loadPlugin(t testing.TB) builder {
	t.Helper()
	gopath := t.TempDir()
	if err := copyPackages(gopath, tests, core, plugin); err != nil {
		t.Fatal(err)
	}
	i, err := bare(gopath)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), loadLimit)
	defer cancel()
	start := time.Now()
	if _, err := i.EvalWithContext(ctx, `import "`+plugin+`"`); err != nil {
		t.Fatalf("import %q: %v", plugin, err)
	}
	t.Logf("loaded in %v", time.Since(start).Round(time.Millisecond))
	return builder{fnNew: eval(t, i, "traefikplugin.New"), fnConfig: eval(t, i, "traefikplugin.CreateConfig")}
}

func eval(t testing.TB, i *interp.Interpreter, what string) reflect.Value {
	t.Helper()
	v, err := i.Eval(what)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	return v
}

// config decodes as Traefik does: weak types, a string with commas is a list.
func (b builder) config(values map[string]interface{}) (reflect.Value, error) {
	v := b.fnConfig.Call(nil)[0]
	d, err := mapstructure.NewDecoder(&mapstructure.DecoderConfig{
		DecodeHook: mapstructure.StringToSliceHookFunc(","), WeaklyTypedInput: true, Result: v.Interface()})
	if err != nil {
		return v, err
	}
	return v, d.Decode(values)
}

func (b builder) middleware(ctx context.Context, next http.Handler, values map[string]interface{}) (http.Handler, error) {
	cfg, err := b.config(values)
	if err != nil {
		return nil, err
	}
	out := b.fnNew.Call([]reflect.Value{reflect.ValueOf(ctx), reflect.ValueOf(next), cfg, reflect.ValueOf("test")})
	if err, _ := out[1].Interface().(error); err != nil {
		return nil, err
	}
	h, ok := out[0].Interface().(http.Handler)
	if !ok {
		return nil, fmt.Errorf("New returned %T, no http.Handler", out[0].Interface())
	}
	return h, nil
}

// What the plugin catalogue's checker does, and refuses.
func TestCatalogue(t *testing.T) {
	m := readManifest(t)
	if m.Type != "middleware" || m.Import != plugin || m.DisplayName == "" || m.Summary == "" || len(m.TestData) == 0 {
		t.Fatalf(".traefik.yml: %+v", m)
	}
	b := loadPlugin(t)
	if n, c := b.fnNew.Type(), b.fnConfig.Type(); n.NumIn() != 4 || n.NumOut() != 2 || n.In(2) != c.Out(0) ||
		n.In(1) != reflect.TypeFor[http.Handler]() || n.Out(0) != reflect.TypeFor[http.Handler]() {
		t.Errorf("New has the signature %v", n)
	}
	called := false
	next := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { called = true })
	h, err := b.middleware(context.Background(), next, m.TestData)
	if err != nil {
		t.Fatalf("New with testData: %v", err)
	}
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest("POST", "/mcp", nil))
	if !called {
		t.Error("the handler does not reach next")
	}
}

// The catalogue refuses a module that requires Traefik or Yaegi.
func TestRootModuleRequiresNeitherTraefikNorYaegi(t *testing.T) {
	b, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if bad := regexp.MustCompile(`github.com/traefik/(traefik|yaegi)\S*`).Find(b); bad != nil {
		t.Errorf("go.mod names %s: keep it in a module of its own", bad)
	}
}

// Bad configurations fail New, by name; weak types do not.
func TestPluginConfig(t *testing.T) {
	b := loadPlugin(t)
	next := http.NotFoundHandler()
	tests := []struct {
		key   string
		value interface{}
		bad   string // "" = accepted
	}{
		{"hold", 3, ""},
		{"hold", "1m30s", ""},
		{"hold", 0.5, ""},
		{"fall", "3", ""},
		{"paths", "/mcp, /other/*", ""},
		{"HOLDMAX", 5, ""},
		{"headers", map[string]interface{}{"Authorization": "Bearer x"}, ""},
		{"holdmaximum", 5, "holdmaximum"},
		{"interval", "10 parsecs", "interval"},
		{"timeout", -1, "timeout"},
		{"fall", 0, "fall"},
		{"mode", "magic", "mode"},
		{"aliveIf", "maybe", "aliveIf"},
		{"paths", "mcp", "paths"},
		{"upstreams", "ftp://x/mcp", "upstreams"},
		{"sticky", "false", ""},
		{"sticky", 0, ""},
		{"sticky", "perhaps", "Sticky"},
		{"sticky", true, "sticky"}, // next is no balancer
		{"sessionKey", 5, "sessionKey"},
		{"sessionGrace", []string{"a", "b"}, "SessionGrace"},
		{"paths", map[string]interface{}{"a": "b"}, "Paths"},
		{"headers", "Authorization", "Headers"},
		{"hold", map[string]interface{}{"s": 1}, "Hold"},
	}
	for _, tt := range tests {
		_, err := b.middleware(context.Background(), next, map[string]interface{}{tt.key: tt.value})
		if (err == nil) != (tt.bad == "") || err != nil && !strings.Contains(err.Error(), tt.bad) {
			t.Errorf("%s: %v: error %v, want one that names %q", tt.key, tt.value, err, tt.bad)
		}
	}
}

// sums answers probes, and calls with the sum of their body.
func sums(rw http.ResponseWriter, req *http.Request) {
	body, _ := io.ReadAll(req.Body)
	if bytes.Contains(body, []byte("tools/call")) {
		fmt.Fprintf(rw, "%x of %d", sha256.Sum256(body), len(body))
		return
	}
	var q struct {
		ID json.RawMessage `json:"id"`
	}
	_ = json.Unmarshal(body, &q)
	rw.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(rw, `{"jsonrpc":"2.0","id":%s,"result":{"supportedVersions":["2026-07-28"],"capabilities":{},"serverInfo":{"name":"a","version":"1"}}}`, q.ID)
}

// Interpreted, a fallback with upstreams forwards bodies as they came, holds what it
// cannot send, and refuses what no handshake let through.
func TestPluginForwards(t *testing.T) {
	b := loadPlugin(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	srv, tls := httptest.NewServer(http.HandlerFunc(sums)), httptest.NewTLSServer(http.HandlerFunc(sums))
	t.Cleanup(func() { // not Close, which waits for the probes' connections
		_ = srv.Listener.Close()
		_ = tls.Listener.Close()
	})
	tests := []struct {
		upstream string
		size     int
		status   int
	}{
		{srv.URL, 100, 200}, {srv.URL, 1<<20 - 1, 200}, {srv.URL, 1<<20 + 1, 200}, {srv.URL, 3 << 20, 200}, {tls.URL, 100, 503}, {"http://127.0.0.1:1", 100, 503},
	}
	for _, tt := range tests {
		h, err := b.middleware(ctx, http.NotFoundHandler(), map[string]interface{}{"mode": "fallback", "hold": "1s", "upstreams": tt.upstream + "/mcp"})
		if err != nil {
			t.Fatal(err)
		}
		edge := httptest.NewServer(h)
		head := `{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"x":"`
		body := head + strings.Repeat("x", tt.size-len(head)-3) + `"}}`
		want := fmt.Sprintf("%x of %d", sha256.Sum256([]byte(body)), len(body))
		if tt.status == 503 {
			want = `"id":7`
		}
		req, _ := http.NewRequest(http.MethodPost, edge.URL+"/mcp", io.NopCloser(strings.NewReader(body))) // chunked
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		t.Logf("%d bytes to %s: %d", tt.size, tt.upstream, resp.StatusCode)
		edge.Close()
		if resp.StatusCode != tt.status || !strings.Contains(string(got), want) {
			t.Errorf("%d bytes to %s: %d %.200s, want %d %s", tt.size, tt.upstream, resp.StatusCode, got, tt.status, want)
		}
	}
}
