// Package auth stands in for Traefik's fork of go-http-auth: basic and digest
// authentication refuse everybody.
package auth

import "net/http"

type BasicAuth struct {
	Realm   string
	Secrets func(user, realm string) string
}

type DigestAuth struct{}

func CheckSecret(_, _ string) bool { return false }

func NewDigestAuthenticator(string, func(user, realm string) string) *DigestAuth {
	return &DigestAuth{}
}

func (*BasicAuth) RequireAuth(w http.ResponseWriter, _ *http.Request)       { w.WriteHeader(401) }
func (*DigestAuth) RequireAuth(w http.ResponseWriter, _ *http.Request)      { w.WriteHeader(401) }
func (*DigestAuth) RequireAuthStale(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(401) }
func (*DigestAuth) CheckAuth(*http.Request) (string, *string)               { return "", nil }
func DigestAuthParams(string) map[string]string                             { return nil }
