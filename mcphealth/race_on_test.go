//go:build race

package mcphealth

const raceEnabled = true // the race detector has sync.Pool forget things
