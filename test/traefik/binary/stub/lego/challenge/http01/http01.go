// Package http01 stands in for lego's.
package http01

import "time"

type ChallengeOption func()

const PathPrefix = "/.well-known/acme-challenge/"

func SetDelay(time.Duration) ChallengeOption { return nil }
