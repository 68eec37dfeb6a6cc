package traefikplugin

import (
	"errors"
	"reflect"
	"strings"
	"testing"
)

// FuzzConfig: whatever Traefik's decoder puts into the configuration, reading it
// never panics; a refusal names the key and shows no header value; what is accepted
// is within bounds.
func FuzzConfig(f *testing.F) {
	for _, v := range []string{"", "0", "10s", "-1", "1e308", "NaN", "/mcp", "/a*,/b", "http://127.0.0.1:1/mcp", "gate", "any_response", "a\nb", "\xff"} {
		for key := 0; key < reflect.TypeOf(Config{}).NumField(); key++ {
			f.Add(key, v, key+1, v)
		}
	}
	f.Fuzz(func(t *testing.T, key1 int, value1 string, key2 int, value2 string) {
		c := CreateConfig()
		name1, name2 := put(c, key1, value1), put(c, key2, value2)
		s, err := c.parse()
		if err != nil {
			if !errors.Is(err, errConfig) || !strings.Contains(err.Error(), name1) && !strings.Contains(err.Error(), name2) {
				t.Errorf("%s %q, %s %q: %v names no key", name1, value1, name2, value2, err)
			}
			return
		}
		if len(s.paths) == 0 || s.hold < 0 || s.holdMax < 1 || s.schedule.Validate() != nil || s.schedule.Interval <= 0 || s.target.Timeout <= 0 {
			t.Errorf("%s %q, %s %q: accepted as %+v", name1, value1, name2, value2, s)
		}
		s.isMCP(value1)
	})
}

// put sets one key, as a list or a map of one where it is one, and returns its name.
func put(c *Config, key int, value string) string {
	v := reflect.ValueOf(c).Elem()
	i := int(uint(key) % uint(v.NumField()))
	switch f := v.Field(i).Addr().Interface().(type) {
	case *string:
		*f = value
	case *[]string:
		*f = strings.Split(value, ",")
	case *map[string]string:
		*f = map[string]string{"X-A": value}
	case *map[string]interface{}:
		*f = map[string]interface{}{value: 1}
		return "unknown key"
	}
	name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
	return name
}
