// The same program with an mcp-go that knows no 2026-07-28: go build -modfile=v0.56.0.mod
module github.com/mcphealth/mcphealth/test/e2e/servers/mcpgo

go 1.25.5

require (
	github.com/mark3labs/mcp-go v0.56.0
	github.com/mcphealth/mcphealth/examples/servers v0.0.0
)

require (
	github.com/google/jsonschema-go v0.4.3 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/santhosh-tekuri/jsonschema/v6 v6.0.2 // indirect
	github.com/spf13/cast v1.7.1 // indirect
	github.com/yosida95/uritemplate/v3 v3.0.2 // indirect
	golang.org/x/text v0.14.0 // indirect
)

replace github.com/mcphealth/mcphealth/examples/servers => ../../../../examples/servers
