// Package dns stands in for lego's.
package dns

import (
	"github.com/go-acme/lego/v5/acme"
	"github.com/go-acme/lego/v5/challenge"
)

func NewDNSChallengeProviderByName(string) (challenge.Provider, error) { return nil, acme.ErrOff }
