package operations

import (
	"os"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

// The dashboard is one by Grafana's own schema: no field that it does not know, none
// of the wrong type, no value that it refuses. Grafana itself cannot be had here.
func TestGrafanaDashboard(t *testing.T) {
	text, err := os.ReadFile("../../examples/grafana/mcphealth.json")
	if err != nil {
		t.Fatal(err)
	}
	//lint:ignore SA1019 the schema of Grafana 10, which the file is for
	var d dashboard.Dashboard
	if err := d.UnmarshalJSONStrict(text); err != nil && err.Error() != "" { // a list, not nil when empty
		t.Errorf("decoding: %v", err)
	}
	if err := d.Validate(); err != nil {
		t.Errorf("validating: %v", err)
	}
	if len(d.Panels) == 0 || d.Title == nil || d.Uid == nil {
		t.Errorf("%d panels, title %v, uid %v", len(d.Panels), d.Title, d.Uid)
	}
}
