//go:build race

package caddymodule

const raceEnabled = true // the race detector has sync.Pool forget things
