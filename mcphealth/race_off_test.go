//go:build !race

package mcphealth

const raceEnabled = false
