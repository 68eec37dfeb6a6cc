package caddymodule

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"time"

	"github.com/caddyserver/caddy/v2"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// keyPath is where Caddy's storage has the key that no configuration names, and
	// keyLock is what edges that share the storage agree by.
	keyPath = "mcp_health/session_key"
	keyLock = "mcp_health_session_key"

	// minSecret is the shortest secret: 16 bytes, which nobody finds by trying if
	// they are random.
	minSecret = 16

	// keyTimeout bounds the wait for the storage: 30 s, for the lock of an edge that
	// died while it held it goes stale after 10.
	keyTimeout = 30 * time.Second
)

// keys are those in use, so that guards with the same secret share one. There are as
// many as configurations ever named.
var keys sync.Map // secret → *mcphealth.SessionKey

func keyOf(secret string) *mcphealth.SessionKey {
	k, _ := keys.LoadOrStore(secret, mcphealth.NewSessionKey([]byte(secret)))
	return k.(*mcphealth.SessionKey)
}

// sessionKeys are the key, with which tags are made, and those of before.
func sessionKeys(ctx caddy.Context, configured string, old []string) ([]*mcphealth.SessionKey, error) {
	key, err := sessionKey(ctx, configured)
	if err != nil {
		return nil, err
	}
	all := []*mcphealth.SessionKey{key}
	for _, configured := range old {
		if key, err = configuredKey("old_session_keys", configured); err != nil {
			return nil, err
		}
		all = append(all, key)
	}
	return all, nil
}

// configuredKey is the key that an option names.
func configuredKey(option, configured string) (*mcphealth.SessionKey, error) {
	secret, err := caddy.NewReplacer().ReplaceOrErr(configured, true, true)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", option, err)
	}
	if secret = strings.TrimSpace(secret); len(secret) < minSecret {
		return nil, fmt.Errorf("%s: %d bytes, want at least %d", option, len(secret), minSecret)
	}
	return keyOf(secret), nil
}

// sessionKey is the configured key, or the one in the storage.
func sessionKey(ctx caddy.Context, configured string) (*mcphealth.SessionKey, error) {
	if configured != "" {
		return configuredKey("session_key", configured)
	}
	c, cancel := context.WithTimeout(ctx, keyTimeout)
	defer cancel()
	secret, err := storedSecret(c, ctx.Storage())
	if err != nil {
		return nil, fmt.Errorf("session key in Caddy's storage: %w; give one with session_key", err)
	}
	return keyOf(secret), nil
}

// storage is what of Caddy's storage the key needs.
type storage interface {
	Lock(ctx context.Context, name string) error
	Unlock(ctx context.Context, name string) error
	Load(ctx context.Context, key string) ([]byte, error)
	Store(ctx context.Context, key string, value []byte) error
}

// storedSecret loads the secret, or makes one. Of several edges that do so at once,
// one does, and the others wait for it.
func storedSecret(ctx context.Context, s storage) (string, error) {
	if secret, err := loadSecret(ctx, s); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return secret, err
	}
	if err := s.Lock(ctx, keyLock); err != nil {
		return "", fmt.Errorf("locking: %w", err)
	}
	defer func() { _ = s.Unlock(context.WithoutCancel(ctx), keyLock) }()
	if secret, err := loadSecret(ctx, s); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return secret, err
	}
	secret := rand.Text() // 128 bits or more
	if err := s.Store(ctx, keyPath, []byte(secret)); err != nil {
		return "", fmt.Errorf("storing: %w", err)
	}
	return secret, nil
}

func loadSecret(ctx context.Context, s storage) (string, error) {
	b, err := s.Load(ctx, keyPath)
	if err != nil {
		return "", fmt.Errorf("loading %s: %w", keyPath, err)
	}
	secret := strings.TrimSpace(string(b))
	if len(secret) < minSecret {
		return "", fmt.Errorf("%s holds %d bytes, want at least %d", keyPath, len(secret), minSecret)
	}
	return secret, nil
}
