// Package acme stands in for lego, which cannot be had here: Traefik is built
// without ACME. All of its functions fail.
package acme

import "errors"

var ErrOff = errors.New("built without ACME")

type Account struct{}

type ExtendedAccount struct {
	Account
	Location string
}
