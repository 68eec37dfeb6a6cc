package yaegi_test

import (
	"context"
	"flag"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"gopkg.in/yaml.v3"

	"github.com/mcphealth/mcphealth/traefikplugin"
)

var update = flag.Bool("update", false, "write the errors into testdata/config")

// Each file is what a user writes below the plugin's name. Those that begin with
// err_ end in a comment with the error that New gives, decoded and interpreted as in
// Traefik. `go test -run ConfigFiles -update` writes it. Every key has both kinds.
func TestConfigFiles(t *testing.T) {
	b := loadPlugin(t)
	files, err := filepath.Glob("testdata/config/*.yml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	set, refused := map[string]bool{}, map[string]bool{}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yml")
		t.Run(name, func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var values map[string]interface{}
			if err := yaml.Unmarshal(text, &values); err != nil {
				t.Fatal(err)
			}
			got := refusal(t, b, values)
			config, want, _ := strings.Cut(string(text), "# ")
			if key, bad := strings.CutPrefix(name, "err_"); bad {
				key, _, _ = strings.Cut(key, "_")
				refused[key] = strings.Contains(strings.ToLower(got), strings.ToLower(key))
				if *update {
					os.WriteFile(file, []byte(config+"# "+got+"\n"), 0o644)
					return
				}
			} else {
				for key := range values {
					set[key] = true
				}
			}
			if got != strings.TrimSpace(want) {
				t.Errorf("New: %s\nwant %s", got, want)
			}
			if strings.Contains(got, "secret") || strings.Contains(got, "password@") {
				t.Errorf("%s shows a secret", got)
			}
		})
	}
	config := reflect.TypeFor[traefikplugin.Config]()
	for i := range config.NumField() {
		key, _, _ := strings.Cut(config.Field(i).Tag.Get("json"), ",")
		if key == "-" {
			continue
		}
		if !set[key] {
			t.Errorf("no file in testdata/config sets %s", key)
		}
		if !refused[key] {
			t.Errorf("no file err_%s….yml in testdata/config is refused by a message that names %[1]s", key)
		}
	}
}

// refusal is what Traefik logs for this configuration; "" if it is accepted.
func refusal(t *testing.T, b builder, values map[string]interface{}) string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if _, err := b.middleware(ctx, http.NotFoundHandler(), values); err != nil {
		return strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", " ")
	}
	return ""
}
