package yaegi_test

import (
	"context"
	"fmt"
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

func loadPlugin(t *testing.T) builder {
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

func eval(t *testing.T, i *interp.Interpreter, what string) reflect.Value {
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
	}
	for _, tt := range tests {
		_, err := b.middleware(context.Background(), next, map[string]interface{}{tt.key: tt.value})
		if (err == nil) != (tt.bad == "") || err != nil && !strings.Contains(err.Error(), tt.bad) {
			t.Errorf("%s: %v: error %v, want one that names %q", tt.key, tt.value, err, tt.bad)
		}
	}
}
