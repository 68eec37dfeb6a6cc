// Package registration stands in for lego's.
package registration

import (
	"context"

	"github.com/go-acme/lego/v5/acme"
)

type RegisterOptions struct{ TermsOfServiceAgreed bool }

type RegisterEABOptions struct {
	TermsOfServiceAgreed bool
	Kid, HmacEncoded     string
}

type Registrar struct{}

func (*Registrar) Register(context.Context, RegisterOptions) (*acme.ExtendedAccount, error) {
	return nil, acme.ErrOff
}

func (*Registrar) RegisterWithExternalAccountBinding(context.Context, RegisterEABOptions) (*acme.ExtendedAccount, error) {
	return nil, acme.ErrOff
}
