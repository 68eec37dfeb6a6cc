package operations

import (
	"testing"

	bootstrap "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"sigs.k8s.io/yaml"
)

// Debian has no Envoy. Its example is held against Envoy's own types, keys and
// constraints, and is not run.
func TestEnvoyExampleIsValid(t *testing.T) {
	raw, err := yaml.YAMLToJSONStrict([]byte(example(t, "envoy/envoy.yaml")))
	if err != nil {
		t.Fatal(err)
	}
	var b bootstrap.Bootstrap
	if err := protojson.Unmarshal(raw, &b); err != nil { // refuses unknown keys, in typed_config too
		t.Fatal(err)
	}
	if err := b.ValidateAll(); err != nil {
		t.Error(err)
	}
	check := b.StaticResources.Clusters[0].HealthChecks[0].GetHttpHealthCheck()
	if h := check.GetRequestHeadersToAdd()[0].GetHeader(); h.GetKey() != "X-Upstream" || check.GetPath() != "/health" {
		t.Errorf("it asks %v", check)
	}
	for _, e := range b.StaticResources.Clusters[0].LoadAssignment.Endpoints[0].LbEndpoints {
		c := e.GetEndpoint().GetHealthCheckConfig().GetAddress().GetSocketAddress()
		if c.GetPortValue() != 9105 || e.GetMetadata().GetFilterMetadata()["mcphealth"].GetFields()["target"].GetStringValue() == "" {
			t.Errorf("%v", e)
		}
	}
}
