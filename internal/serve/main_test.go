package serve

import (
	"testing"

	"github.com/mcphealth/mcphealth/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }
