package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/mcphealth/mcphealth/internal/serve"
	"github.com/mcphealth/mcphealth/mcphealth"
)

// maxConfig is how long a configuration may be: 1 MiB, a thousand targets with a
// thousand characters each.
const maxConfig = 1 << 20

// serveConfig is the file of `mcphealth serve`: YAML, or JSON, which is YAML too.
// docs/command.md explains the keys.
type serveConfig struct {
	Listen  string         `yaml:"listen"`
	Cache   duration       `yaml:"cache"`
	Targets []targetConfig `yaml:"targets"`
}

// targetConfig is one target; what belongs to HTTP stands after url, what belongs to
// a command after stdio, the rest to both.
type targetConfig struct {
	Name        string      `yaml:"name"`
	Timeout     duration    `yaml:"timeout"`
	Era         string      `yaml:"era"`
	ExpectTools []string    `yaml:"expect_tools"`
	Call        *callConfig `yaml:"call"`
	SlowAfter   duration    `yaml:"slow_after"`

	URL         string            `yaml:"url"`
	Host        string            `yaml:"host"`
	AliveIf     string            `yaml:"alive_if"`
	Deep        *bool             `yaml:"deep"`
	Fresh       bool              `yaml:"fresh"`
	RequireAuth bool              `yaml:"require_auth"`
	HealthPath  string            `yaml:"health_path"`
	Header      map[string]string `yaml:"header"`
	HeaderEnv   map[string]string `yaml:"header_env"`
	HeaderFile  map[string]string `yaml:"header_file"`
	BearerFile  string            `yaml:"bearer_file"`
	CACert      string            `yaml:"cacert"`
	Cert        string            `yaml:"cert"`
	Key         string            `yaml:"key"`

	Stdio     []string `yaml:"stdio"`
	Heartbeat duration `yaml:"heartbeat"`
}

type callConfig struct {
	Tool string         `yaml:"tool"`
	Args map[string]any `yaml:"args"`
}

// duration is written as 5s, and never as a bare number.
type duration time.Duration

func (d *duration) UnmarshalYAML(n *yaml.Node) error {
	v, err := time.ParseDuration(n.Value)
	if err != nil || v <= 0 {
		return &yaml.TypeError{Errors: []string{fmt.Sprintf("line %d: %q: want a duration above 0, such as 5s", n.Line, n.Value)}}
	}
	*d = duration(v)
	return nil
}

// read takes everything from the file. Its errors begin with the file and the line.
func (s *serving) read(path string) error {
	text, err := readConfig(path)
	if err != nil {
		return err
	}
	c := serveConfig{Listen: defaultListen, Cache: duration(serve.DefaultCache)}
	var tree yaml.Node
	for _, to := range []any{&tree, &c} {
		dec := yaml.NewDecoder(strings.NewReader(text))
		dec.KnownFields(true)
		err := dec.Decode(to)
		if err == nil && dec.Decode(new(yaml.Node)) != io.EOF {
			err = errors.New("a second document: want one")
		}
		if err != nil && err != io.EOF {
			return inFile(path, err)
		}
	}
	if len(c.Targets) == 0 {
		return fmt.Errorf("%s: want targets", path)
	}
	root := tree.Content[0]
	if n := null(root); n != nil {
		return fmt.Errorf("%s:%d: want a value, or nothing at all, not null", path, n.Line)
	}
	if len(c.Targets) > serve.MaxTargets {
		return fmt.Errorf("%s:%d: %d targets: want %d at most", path, lineOf(root, "targets"), len(c.Targets), serve.MaxTargets)
	}
	if err := checkListen(c.Listen); err != nil {
		return fmt.Errorf("%s:%d: listen %w", path, lineOf(root, "listen"), err)
	}
	s.listen, s.cache = c.Listen, time.Duration(c.Cache)
	first := map[string]int{}
	for i, tc := range c.Targets {
		t, key, err := tc.target()
		line := lineOfTarget(root, i, key)
		if err == nil && first[t.Name] != 0 {
			err = fmt.Errorf("name: there is a target %s already, in line %d", t.Name, first[t.Name])
			line = lineOfTarget(root, i, "name")
		}
		if err != nil {
			return fmt.Errorf("%s:%d: %w", path, line, err)
		}
		first[t.Name] = line
		s.targets = append(s.targets, t)
	}
	return nil
}

func readConfig(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("--config: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err != nil {
		return "", fmt.Errorf("--config: %w", err)
	}
	if len(b) > maxConfig {
		return "", fmt.Errorf("%s: more than %d bytes", path, maxConfig)
	}
	return string(b), nil
}

var (
	atLine   = regexp.MustCompile(`^(?:yaml: )?line (\d+): `)
	unknown  = regexp.MustCompile(`field (.+) not found in type main\.(\w+)`)
	theValue = regexp.MustCompile("(cannot unmarshal !!\\w+) `[^`]*`") // it may be a secret
	goTypes  = strings.NewReplacer("main.serveConfig", "a configuration", "main.targetConfig", "a target", "main.callConfig", "a call",
		"map[string]string", "names with values", "map[string]interface {}", "names with values", "[]string", "a list of words", "[]a target", "a list of targets")
)

// inFile words the decoder's errors as this command does, and puts file and line
// before each.
func inFile(path string, err error) error {
	lines := []string{err.Error()}
	var many *yaml.TypeError
	if errors.As(err, &many) {
		lines = many.Errors
	}
	for i, l := range lines {
		l = theValue.ReplaceAllString(l, "$1")
		if m := unknown.FindStringSubmatch(l); m != nil {
			l = strings.Replace(l, m[0], fmt.Sprintf("unknown key %s: want one of %s", m[1], strings.Join(keysOf(m[2]), ", ")), 1)
		}
		if m := atLine.FindStringSubmatch(l); m != nil {
			l = fmt.Sprintf("%s:%s: %s", path, m[1], l[len(m[0]):])
		} else {
			l = path + ": " + strings.TrimPrefix(l, "yaml: ")
		}
		lines[i] = goTypes.Replace(l)
	}
	return errors.New(strings.Join(lines, "\n"))
}

// keysOf are the keys of one of the types above.
func keysOf(name string) (keys []string) {
	for _, t := range []reflect.Type{reflect.TypeFor[serveConfig](), reflect.TypeFor[targetConfig](), reflect.TypeFor[callConfig]()} {
		for i := 0; t.Name() == name && i < t.NumField(); i++ {
			keys = append(keys, t.Field(i).Tag.Get("yaml"))
		}
	}
	return keys
}

// lineOfTarget is where target i has key, or begins.
func lineOfTarget(root *yaml.Node, i int, key string) int {
	targets := child(root, "targets")
	if targets == nil || i >= len(targets.Content) {
		return 1
	}
	return lineOf(targets.Content[i], key)
}

// lineOf is where n has key, or begins.
func lineOf(n *yaml.Node, key string) int {
	if c := child(n, key); c != nil {
		return c.Line
	}
	return n.Line
}

// null finds what has no value, such as a key whose variable was empty when a
// template was filled in: the decoder would take it for a key that is not there. The
// arguments of a call may hold null.
func null(n *yaml.Node) *yaml.Node {
	if n.ShortTag() == "!!null" {
		return n
	}
	for i, c := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 1 && n.Content[i-1].Value == "args" {
			continue
		}
		if found := null(c); found != nil {
			return found
		}
	}
	return nil
}

func child(n *yaml.Node, key string) *yaml.Node {
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

// target is what the configuration means. key is where err, if any, is.
func (c targetConfig) target() (t serve.Target, key string, err error) {
	t = serve.Target{Name: c.Name, Command: c.Stdio, Heartbeat: time.Duration(c.Heartbeat), Target: mcphealth.Target{
		URL: c.URL, Host: c.Host, Timeout: time.Duration(c.Timeout), Era: mcphealth.Era(c.Era), AliveIf: mcphealth.AliveIf(c.AliveIf),
		Shallow: c.Deep != nil && !*c.Deep, ExpectTools: c.ExpectTools, SlowAfter: time.Duration(c.SlowAfter),
		HealthPath: c.HealthPath, Fresh: c.Fresh, RequireAuth: c.RequireAuth}}
	switch c.Era {
	case "auto":
		t.Era = ""
	case string(mcphealth.EraUnknown):
		return t, "era", errors.New("era \"unknown\": want auto, modern, legacy or sse")
	}
	if c.Call != nil {
		t.CallTool = c.Call.Tool
		args, err := json.Marshal(c.Call.Args)
		if err != nil || t.CallTool == "" {
			return t, "call", errors.New("call: want tool, and args that JSON can hold")
		}
		if c.Call.Args != nil {
			t.CallArgs = string(args)
		}
	}
	if (c.URL == "") == (len(c.Stdio) == 0) {
		return t, "name", errors.New("want url, or stdio with a command, and not both")
	}
	if len(c.Stdio) > 0 {
		if key, err := c.onlyHTTP(); err != nil {
			return t, key, err
		}
	} else if key, err := c.way(&t); err != nil {
		return t, key, err
	}
	if most := t.Target.WithDefaults().Timeout; t.SlowAfter >= most {
		return t, "slow_after", fmt.Errorf("slow_after %v %s, %v", t.SlowAfter, neverSlow, most)
	}
	if err := t.Validate(); err != nil {
		text := strings.ReplaceAll(err.Error(), "bad target: ", "")
		key, _, _ := strings.Cut(text, " ")
		return t, strings.TrimSuffix(key, ":"), errors.New(text)
	}
	return t, "name", nil
}

// onlyHTTP finds what says nothing to a command.
func (c targetConfig) onlyHTTP() (key string, err error) {
	v := reflect.ValueOf(c)
	http := false
	for i := range v.NumField() {
		key := v.Type().Field(i).Tag.Get("yaml")
		http = http && key != "stdio" || key == "url"
		if http && !v.Field(i).IsZero() {
			return key, fmt.Errorf("%s: it belongs to HTTP and says nothing to stdio", key)
		}
	}
	return "", nil
}

// way sets how t is reached, and reads all files and variables once, to see them.
func (c targetConfig) way(t *serve.Target) (key string, err error) {
	tls := tlsFlags{cacert: c.CACert, cert: c.Cert, key: c.Key}
	if _, err := tls.transport(); err != nil {
		key, _, _ := strings.Cut(strings.TrimPrefix(err.Error(), "--"), ":")
		key, _, _ = strings.Cut(key, " ")
		return strings.TrimSuffix(key, ","), errors.New(strings.ReplaceAll(err.Error(), "--", ""))
	}
	t.Transport = tls.renewed()
	h := headerFlags{bearer: c.BearerFile}
	for _, from := range []struct {
		key, sep string
		values   map[string]string
		to       *[]string
	}{{"header", ":", c.Header, &h.plain}, {"header_env", "=", c.HeaderEnv, &h.env}, {"header_file", "=", c.HeaderFile, &h.file}} {
		for _, name := range slices.Sorted(maps.Keys(from.values)) {
			*from.to = append(*from.to, name+from.sep+from.values[name])
		}
		header, err := (headerFlags{plain: h.plain, env: h.env, file: h.file}).header()
		if err != nil {
			return from.key, fmt.Errorf("%s: %w", from.key, withoutFlag(err))
		}
		if err := (mcphealth.Target{URL: "http://localhost/", Header: header}).Validate(); err != nil {
			return from.key, fmt.Errorf("%s: %s", from.key, strings.TrimPrefix(err.Error(), "bad target: "))
		}
	}
	if _, err := h.header(); err != nil {
		return "bearer_file", fmt.Errorf("bearer_file: %w", withoutFlag(err))
	}
	t.Header = h.header
	return "", nil
}

// withoutFlag is err of headerFlags without the flag's name before it.
func withoutFlag(err error) error {
	if cause := errors.Unwrap(err); cause != nil {
		return cause
	}
	_, text, _ := strings.Cut(err.Error(), ": ")
	return errors.New(text)
}
