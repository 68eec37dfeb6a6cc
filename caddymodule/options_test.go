package caddymodule

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"
	"github.com/stretchr/testify/require"
)

// Every field of every module of ours has a golden Caddyfile that sets it and one
// that gets it wrong: a new option is not done before both are there. The fields
// are read from the modules as Caddy knows them.
func TestEveryOptionHasGoldenFiles(t *testing.T) {
	set, refused := goldenOptions(t)
	modules := ours(t)
	for id, fields := range modules {
		for _, f := range fields {
			if !set[id][f] {
				t.Errorf("no file in testdata/adapt sets %q of %s", f, id)
			}
			if !slices.ContainsFunc(refused, func(message string) bool { return names(message, f) }) {
				t.Errorf("no err_….caddyfiletest in testdata/adapt gets %q of %s wrong", f, id)
			}
		}
	}
	require.GreaterOrEqual(t, len(modules), 4)
}

// ours are the JSON fields of our modules, by module.
func ours(t *testing.T) map[string][]string {
	all := map[string][]string{}
	for _, id := range caddy.Modules() {
		if !strings.Contains(id, "mcp_") {
			continue
		}
		info, err := caddy.GetModule(id)
		require.NoError(t, err)
		module := reflect.TypeOf(info.New())
		if module.Kind() == reflect.Pointer {
			module = module.Elem()
		}
		if strings.HasSuffix(module.PkgPath(), "/mcphealth/caddymodule") {
			if fields := jsonFields(module); len(fields) > 0 {
				all[id] = fields
			}
		}
	}
	return all
}

func jsonFields(module reflect.Type) (all []string) {
	for i := range module.NumField() {
		f := module.Field(i)
		if f.Anonymous {
			all = append(all, jsonFields(f.Type)...)
			continue
		}
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
			all = append(all, name)
		}
	}
	return all
}

// goldenOptions are the fields that golden files set, by module, and the errors
// that the others expect.
func goldenOptions(t *testing.T) (set map[string]map[string]bool, refused []string) {
	set = map[string]map[string]bool{}
	files, err := filepath.Glob("testdata/adapt/*.caddyfiletest")
	require.NoError(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		_, want, _ := strings.Cut(string(text), "----------\n")
		if strings.HasPrefix(filepath.Base(file), "err_") {
			refused = append(refused, want)
			continue
		}
		var doc any
		require.NoError(t, json.Unmarshal([]byte(want), &doc), file)
		collect(doc, "", set)
	}
	return set, refused
}

// collect notes the keys of each object that is a module of ours: told by the key
// that names the module, or by the place among the apps.
func collect(v any, under string, set map[string]map[string]bool) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			collect(e, "", set)
		}
	case map[string]any:
		for key, space := range map[string]string{"handler": "http.handlers.", "policy": "http.reverse_proxy.selection_policies.", "source": "http.reverse_proxy.upstreams."} {
			if name, ok := v[key].(string); ok {
				note(set, space+name, v)
			}
		}
		if under == "apps" {
			for name, app := range v {
				if fields, ok := app.(map[string]any); ok {
					note(set, name, fields)
				}
			}
		}
		for key, e := range v {
			collect(e, key, set)
		}
	}
}

func note(set map[string]map[string]bool, id string, fields map[string]any) {
	if set[id] == nil {
		set[id] = map[string]bool{}
	}
	for f := range fields {
		set[id][f] = true
	}
}

// Placeholders that stay what they are, for they are unknown or mean a request, would be
// asked for by their names: a server refuses such a Host, and is taken for dead.
func TestPlaceholdersMustMeanSomething(t *testing.T) {
	t.Setenv("MCP_HOST", "mcp.example.com")
	t.Setenv("MCP_PATH", "/mcp")
	t.Setenv("NO_PATH", "mcp")
	site := func(option string) string { return "reverse_proxy a:1 {\nlb_policy mcp_health {\n" + option + "\n}\n}" }
	for _, good := range []string{
		"host {env.MCP_HOST}", "host {env.MCP_HOST}:8443", "path {env.MCP_PATH}", "path /v1{env.MCP_PATH}?x={env.NO_PATH}",
		"host {env.UNSET_HOST}", "path {env.UNSET_PATH}", // what is not set is the default
		`header X-Filter {"a":1}`,
	} {
		require.NoError(t, validate(t, "", site(good)), good)
	}
	for bad, want := range map[string]string{
		"host {env.MCP_HOST}{env.MCP_PATH}": "host",
		"host {evn.MCP_HOST}":               "host '{evn.MCP_HOST}': there is no such placeholder",
		"path {evn.MCP_PATH}":               "path '{evn.MCP_PATH}': there is no such placeholder",
		"path {env.NO_PATH}":                "path 'mcp'",
	} {
		require.ErrorContains(t, validate(t, "", site(bad)), want, bad)
	}
	require.ErrorContains(t, validate(t, "mcp_health {\nhost {host}\n}", site("path /mcp")), "host '{host}': there is no such placeholder")
}

// A module that is no JSON, as with a number that is none, is not left out of the
// configuration without a word.
func TestModulesThatAreNoJSON(t *testing.T) {
	rate := math.NaN()
	_, err := moduleJSON(&Policy{Check: Check{ErrorRate: &rate}}, "policy", "mcp_health")
	require.ErrorContains(t, err, "policy mcp_health cannot be written as JSON")
	raw, err := moduleJSON(new(Policy), "policy", "mcp_health")
	require.NoError(t, err)
	require.JSONEq(t, `{"policy":"mcp_health"}`, string(raw))
}

// names reports whether an error speaks of the option: by its name in quotes, with
// the prefix of mcp_proxy or without, or by the module that it would load.
func names(message, option string) bool {
	inner := map[string]string{"fallback": "selection_policies.", "upstreams": "http.reverse_proxy.upstreams."}
	return strings.Contains(message, "'"+option+"'") || strings.Contains(message, "'check_"+option+"'") ||
		inner[option] != "" && strings.Contains(message, "module not registered: ") && strings.Contains(message, inner[option])
}

// Reading and validating a configuration asks nobody: no upstream, no resolver.
func TestValidateAsksNobody(t *testing.T) {
	var met atomic.Int64
	listen := func() string {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { ln.Close() })
		go func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				met.Add(1)
				c.Close()
			}
		}()
		return ln.Addr().String()
	}
	resolver, err := net.ListenPacket("udp", "127.0.0.1:0")
	require.NoError(t, err)
	defer resolver.Close()
	go func() {
		buf := make([]byte, 512)
		for {
			if _, _, err := resolver.ReadFrom(buf); err != nil {
				return
			}
			met.Add(1)
		}
	}()
	site := fmt.Sprintf(`
		mcp_proxy /a* %s {
			sticky
			check_health_path /health
			check_era sse
		}
		mcp_guard /b*
		reverse_proxy /b* %s {
			lb_policy mcp_health {
				call echo
			}
		}
		reverse_proxy /c* {
			dynamic mcp_health {
				source a mcp.test 80 {
					resolvers %s
				}
			}
		}
		mcp_proxy /d* {
			dynamic srv _mcp._tcp.mcp.test {
				resolvers %[3]s
			}
		}`, listen(), listen(), resolver.LocalAddr())
	adapted, _, err := caddyconfig.GetAdapter("caddyfile").Adapt(
		[]byte(fmt.Sprintf(globals, t.TempDir(), "mcp_health {\n\t\tinterval 10ms\n\t\tfast 10ms\n\t}")+"http://127.0.0.1:1 {\n"+site+"\n}\n"), nil)
	require.NoError(t, err)
	var cfg caddy.Config
	require.NoError(t, caddy.StrictUnmarshalJSON(adapted, &cfg))
	require.NoError(t, caddy.Validate(&cfg))
	time.Sleep(50 * time.Millisecond) // five intervals of what must not run
	require.Zero(t, met.Load(), "somebody was asked")
	require.Empty(t, checkers.list())
}

// What a tired person might write: blocks of our options, with words that belong to
// others, twice, without a value. The same promises as FuzzCaddyfile's, for
// every run of the tests.
func TestRandomCaddyfiles(t *testing.T) {
	names := append(slices.Sorted(maps.Keys(options)), guardOptions...)
	words := []string{"", "0", "1", "-1", "10s", "1ms", "2", "5s", "forever", "on", "off", "yes", "wait", "mcp", "any_response", "auto", "legacy", "sse", "unknown",
		"/mcp", "mcp", "//evil.example/x", "http://a/b", "{env.X}", "{", "}", `"a b"`, "`{\"a\":1}`", "`[1]`", "`{`", "50%", "100%", "NaN%", "Inf%", "NaN/s", "404", "99999999999999999999", "1e309s", "\xff", "X-A", "Host"}
	rnd := rand.New(rand.NewPCG(9, 9))
	for range 4000 {
		var b strings.Builder
		b.WriteString("{\n")
		for range rnd.IntN(5) {
			b.WriteString("\t" + []string{"", "", "check_"}[rnd.IntN(3)] + names[rnd.IntN(len(names))])
			for range rnd.IntN(3) {
				b.WriteString(" " + words[rnd.IntN(len(words))])
			}
			b.WriteString("\n")
		}
		fuzzDirectives(t, b.String()+"}\n")
	}
}

// FuzzCaddyfile: reading our directives never panics; a refusal names the place; what
// is accepted is JSON that the modules take, and whose settings they find good.
func FuzzCaddyfile(f *testing.F) {
	files, err := filepath.Glob("testdata/adapt/*.caddyfiletest")
	require.NoError(f, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(f, err)
		in, _, _ := strings.Cut(string(text), "----------\n")
		if at := strings.LastIndex(in, "{"); at >= 0 {
			f.Add(in[at:])
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Contains(text, "import") || strings.Contains(text, "{$") {
			return // Caddy's own reading of files and environment
		}
		if len(text) > 4096 {
			return
		}
		fuzzDirectives(t, text)
	})
}

// fuzzDirectives reads text as each of our blocks, at the place of its name.
func fuzzDirectives(t *testing.T, text string) {
	for name, read := range map[string]func(*caddyfile.Dispenser) (any, error){
		"mcp_health": func(d *caddyfile.Dispenser) (any, error) {
			a := new(App)
			return a, a.UnmarshalCaddyfile(d)
		},
		"mcp_guard": func(d *caddyfile.Dispenser) (any, error) {
			g := new(Guard)
			return g, g.UnmarshalCaddyfile(d)
		},
		"lb_policy": func(d *caddyfile.Dispenser) (any, error) {
			p := new(Policy)
			return p, p.UnmarshalCaddyfile(d)
		},
		"dynamic": func(d *caddyfile.Dispenser) (any, error) {
			s := new(Source)
			return s, s.UnmarshalCaddyfile(d)
		},
		"mcp_proxy": func(d *caddyfile.Dispenser) (any, error) {
			p := new(proxyParser)
			_, err := p.split(d)
			if err == nil {
				_, err = p.policyJSON()
			}
			return &p.policy, err
		},
	} {
		tokens, err := caddyfile.Tokenize([]byte(name+" "+text), "Caddyfile")
		if err != nil {
			return
		}
		module, err := read(caddyfile.NewDispenser(tokens))
		if err != nil {
			if !strings.Contains(err.Error(), "Caddyfile:") {
				t.Errorf("%s: %q is refused without a place: %v", name, text, err)
			}
			continue
		}
		checkRead(t, name, text, module)
	}
}

// checkRead: what was read from text survives the way through JSON and is valid.
func checkRead(t *testing.T, name, text string, module any) {
	raw, err := json.Marshal(module)
	if err != nil {
		t.Errorf("%s: %q becomes no JSON: %v", name, text, err)
		return
	}
	again := reflect.New(reflect.TypeOf(module).Elem()).Interface()
	if err := caddy.StrictUnmarshalJSON(raw, again); err != nil {
		t.Errorf("%s: %q becomes %s, which the module refuses: %v", name, text, raw, err)
		return
	}
	switch m := again.(type) {
	case *App:
		err = m.Validate()
	case *Policy:
		err = m.validate()
	case *Source:
		err = m.validate()
	case *Guard:
		err = m.contradictions()
		if err == nil {
			err = m.Validate()
		}
	}
	if err != nil {
		t.Errorf("%s: %q is read, then refused: %v", name, text, err)
	}
}
