// Package dns01 stands in for lego's.
package dns01

import (
	"strings"
	"time"
)

type (
	ChallengeOption func()
	Client          struct{}
	Options         struct{ RecursiveNameservers []string }
)

func NewClient(*Options) *Client                                     { return nil }
func SetDefaultClient(*Client)                                       {}
func CondOptions(bool, ...ChallengeOption) ChallengeOption           { return nil }
func DisableAuthoritativeNssPropagationRequirement() ChallengeOption { return nil }
func DisableRecursiveNSsPropagationRequirement() ChallengeOption     { return nil }
func PropagationWait(time.Duration, bool) ChallengeOption            { return nil }
func UnFqdn(name string) string                                      { return strings.TrimSuffix(name, ".") }
