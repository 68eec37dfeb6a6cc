module github.com/mcphealth/mcphealth/test/traefik

go 1.26.0

require (
	github.com/mcphealth/mcphealth/test/e2e v0.0.0
	github.com/modelcontextprotocol/go-sdk v1.8.0
	github.com/quic-go/quic-go v0.63.0
	gopkg.in/yaml.v3 v3.0.1
)

require (
	github.com/google/jsonschema-go v0.4.3 // indirect
	github.com/quic-go/qpack v0.6.0 // indirect
	github.com/segmentio/asm v1.1.3 // indirect
	github.com/segmentio/encoding v0.5.4 // indirect
	github.com/yosida95/uritemplate/v3 v3.0.2 // indirect
	golang.org/x/crypto v0.54.0 // indirect
	golang.org/x/net v0.56.0 // indirect
	golang.org/x/oauth2 v0.37.0 // indirect
	golang.org/x/sync v0.24.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/text v0.43.0 // indirect
	golang.org/x/time v0.16.0 // indirect
)

replace (
	github.com/mcphealth/mcphealth => ../..
	github.com/mcphealth/mcphealth/test/e2e => ../e2e
)
