// examples/servers once more, with an SDK that knows no 2026-07-28:
// go build -C examples/servers -modfile=../../test/e2e/servers/gosdk-v1.2.0.mod
module github.com/mcphealth/mcphealth/examples/servers

go 1.25.0

require github.com/modelcontextprotocol/go-sdk v1.2.0

require (
	github.com/google/jsonschema-go v0.3.0 // indirect
	github.com/yosida95/uritemplate/v3 v3.0.2 // indirect
	golang.org/x/oauth2 v0.30.0 // indirect
)
