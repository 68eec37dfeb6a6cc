module github.com/mcphealth/mcphealth/test/yaegi

go 1.26.0

require (
	github.com/mcphealth/mcphealth v0.0.0
	github.com/mitchellh/mapstructure v1.5.0
	github.com/traefik/yaegi v0.16.1
	gopkg.in/yaml.v3 v3.0.1
)

replace github.com/mcphealth/mcphealth => ../..
