package idem

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// KeyHeader is the request header that carries a client's key.
const KeyHeader = "Idempotency-Key"

// Lengths of a client's key, in bytes after unquoting.
const (
	MinKeyLength = 16
	MaxKeyLength = 255
)

var (
	// ErrKeyMissing means that the request has no key, or an empty one.
	ErrKeyMissing = errors.New("the Idempotency-Key header is missing")
	// ErrKeyInvalid means that the header is malformed. Errors that wrap it say how, and never quote it.
	ErrKeyInvalid = errors.New("the Idempotency-Key header is malformed")
)

// ParseKey reads the Idempotency-Key header: a structured-field string, or the bare text. Both name the same key.
// Errors: ErrKeyMissing, ErrKeyInvalid.
func ParseKey(h http.Header) (string, error) {
	lines := h.Values(KeyHeader)
	if len(lines) == 0 || (len(lines) == 1 && lines[0] == "") {
		return "", ErrKeyMissing
	}
	if len(lines) > 1 {
		return "", fmt.Errorf("%w: it is repeated", ErrKeyInvalid)
	}
	key, quoted := strings.CutPrefix(lines[0], `"`)
	if quoted {
		var ok bool
		if key, ok = unquote(key); !ok {
			return "", fmt.Errorf("%w: the quotes do not match", ErrKeyInvalid)
		}
	} else if strings.ContainsAny(key, `",;\`) {
		// A comma is what a proxy joins two lines with, a semicolon starts a parameter.
		return "", fmt.Errorf(`%w: a bare key has none of ", \, comma and semicolon`, ErrKeyInvalid)
	}
	if len(key) < MinKeyLength || len(key) > MaxKeyLength {
		return "", fmt.Errorf("%w: a key has %d to %d characters", ErrKeyInvalid, MinKeyLength, MaxKeyLength)
	}
	for i := range len(key) {
		if key[i] < 0x21 || key[i] > 0x7e {
			return "", fmt.Errorf("%w: a key has visible ASCII characters only", ErrKeyInvalid)
		}
	}
	return key, nil
}

// unquote reads a structured-field string behind its opening quote, to the end of s.
func unquote(s string) (string, bool) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '"':
			return b.String(), i == len(s)-1
		case '\\':
			i++
			if i == len(s) || (s[i] != '"' && s[i] != '\\') {
				return "", false
			}
		}
		b.WriteByte(s[i])
	}
	return "", false
}

// Bounds of the wait for another attempt on the same key.
const (
	DefaultWait = 2 * time.Second
	MaxWait     = 10 * time.Second
)

// ParseWait reads how long the client wants to wait for another attempt: Prefer: wait=seconds (RFC 7240), DefaultWait
// if it does not say. applied says that it named a number; what is above MaxWait is cut down to it.
func ParseWait(h http.Header) (wait time.Duration, applied bool) {
	for pref := range strings.SplitSeq(strings.Join(h.Values("Prefer"), ","), ",") {
		pref, _, _ = strings.Cut(pref, ";")
		name, value, _ := strings.Cut(pref, "=")
		n, err := strconv.ParseUint(strings.Trim(strings.TrimSpace(value), `"`), 10, 31)
		if err == nil && strings.EqualFold(strings.TrimSpace(name), "wait") {
			return min(time.Duration(n)*time.Second, MaxWait), true
		}
	}
	return DefaultWait, false
}
