// Package lego stands in for lego's.
package lego

import (
	"crypto/x509"
	"net/http"
	"time"

	"github.com/go-acme/lego/v5/acme"
	"github.com/go-acme/lego/v5/certificate"
	"github.com/go-acme/lego/v5/challenge/resolver"
	"github.com/go-acme/lego/v5/registration"
)

const DirectoryURLLetsEncrypt = "https://acme-v02.api.letsencrypt.org/directory"

type Config struct {
	CADirURL, UserAgent string
	Certificate         struct{ Timeout time.Duration }
	HTTPClient          *http.Client
}

type Client struct {
	Certificate  *certificate.Certifier
	Challenge    *resolver.SolverManager
	Registration *registration.Registrar
}

func NewConfig(any) *Config { return &Config{} }

func NewClient(*Config) (*Client, error) { return nil, acme.ErrOff }

func CreateCertPool([]string, bool) (*x509.CertPool, error) { return nil, acme.ErrOff }
