package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"strings"
)

// maxSecret is how long a header value from a file may be: 16 KiB, twice what
// servers accept as a whole header.
const maxSecret = 16 << 10

// headerFlags are the flags that set request headers. They are kept as written and
// read after all flags are: package flag would print the value of a bad one.
type headerFlags struct {
	plain  []string // 'Name: value'
	env    []string // 'Name=VARIABLE'
	file   []string // 'Name=path'
	bearer string   // path of a bare token
}

// header reads the values from where they are kept. Its errors name the flag and
// the header, and never a value, not even one that was taken for a name.
func (f headerFlags) header() (http.Header, error) {
	h := http.Header{}
	for i, s := range f.plain {
		name, value, ok := strings.Cut(s, ":")
		if !ok {
			return nil, fmt.Errorf("--header, number %d: want 'Name: value'", i+1)
		}
		if err := add(h, name, strings.TrimSpace(value)); err != nil {
			return nil, fmt.Errorf("--header, number %d: %w", i+1, err)
		}
	}
	for i, s := range f.env {
		if err := addFrom(h, s, readEnv); err != nil {
			return nil, fmt.Errorf("--header-env, number %d: %w", i+1, err)
		}
	}
	for i, s := range f.file {
		if err := addFrom(h, s, readSecret); err != nil {
			return nil, fmt.Errorf("--header-file, number %d: %w", i+1, err)
		}
	}
	if f.bearer != "" {
		token, err := readSecret(f.bearer)
		if err == nil {
			err = add(h, "Authorization", "Bearer "+token)
		}
		if err != nil {
			return nil, fmt.Errorf("--bearer-file: %w", err)
		}
	}
	return h, nil
}

// addFrom adds a header whose value read finds under the word after the "=".
func addFrom(h http.Header, s string, read func(string) (string, error)) error {
	name, from, ok := strings.Cut(s, "=")
	if !ok || from == "" {
		return errors.New("want 'Name=…'")
	}
	value, err := read(from)
	if err != nil {
		return err
	}
	return add(h, name, value)
}

func readEnv(name string) (string, error) {
	v := os.Getenv(name)
	if v == "" {
		return "", errors.New("the environment variable is not set, or empty")
	}
	return v, nil
}

// readSecret reads a value from a file; the line end that editors leave is not its.
func readSecret(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", cause(err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSecret+1))
	if err != nil {
		return "", cause(err)
	}
	v := strings.TrimRight(string(b), "\r\n")
	switch {
	case v == "":
		return "", errors.New("the file is empty")
	case len(b) > maxSecret:
		return "", fmt.Errorf("the file holds more than %d bytes", maxSecret)
	}
	return v, nil
}

// cause is err without the path, which may be a secret on the wrong flag.
func cause(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// add refuses what cannot be sent, so that net/http need not, with the value in
// its words.
func add(h http.Header, name, value string) error {
	name = strings.TrimSpace(name)
	if name == "" || strings.Trim(strings.ToLower(name), "abcdefghijklmnopqrstuvwxyz0123456789-_.!#$%&'*+^`|~") != "" {
		return errors.New("want a header name before the value")
	}
	if http.CanonicalHeaderKey(name) == "Host" {
		return errors.New("the Host is set by --host")
	}
	for _, c := range []byte(value) {
		if c < ' ' && c != '\t' || c == 0x7f {
			return errors.New("the value holds a control character")
		}
	}
	h.Add(name, value)
	return nil
}
