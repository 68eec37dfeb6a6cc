// Package certificate stands in for lego's.
package certificate

import (
	"context"

	"github.com/go-acme/lego/v5/acme"
	"github.com/go-acme/lego/v5/certcrypto"
)

type Resource struct {
	ID                      string
	Domains                 []string
	PrivateKey, Certificate []byte
}

type ObtainRequest struct {
	Domains                  []string
	Bundle, EnableCommonName bool
	EmailAddresses           []string
	Profile, PreferredChain  string
	KeyType                  certcrypto.KeyType
}

type RenewOptions struct {
	Bundle, EnableCommonName bool
	EmailAddresses           []string
	Profile, PreferredChain  string
}

type Certifier struct{}

func (*Certifier) Obtain(context.Context, ObtainRequest) (*Resource, error) {
	return nil, acme.ErrOff
}

func (*Certifier) Renew(context.Context, Resource, *RenewOptions) (*Resource, error) {
	return nil, acme.ErrOff
}
