package api

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
)

// Lengths of an idempotency key after unquoting.
const (
	minKey = 16
	maxKey = 255
)

const keyHeader = "Idempotency-Key"

// parseKey reads the Idempotency-Key header: a structured-field string, or the bare text. Both name the same key.
func parseKey(h http.Header) (string, *problem) {
	lines := h.Values(keyHeader)
	if len(lines) == 0 || (len(lines) == 1 && lines[0] == "") {
		return "", &problem{kind: kindKeyMissing}
	}
	if len(lines) > 1 {
		return "", invalidKey("the header is repeated")
	}
	key, ok := strings.CutPrefix(lines[0], `"`)
	if ok {
		if key, ok = unquote(key); !ok {
			return "", invalidKey("the quoted form is malformed")
		}
	} else if strings.ContainsAny(key, `",;\`) {
		// A comma is what a proxy joins two lines with, a semicolon starts a parameter.
		return "", invalidKey(`a bare key has none of ", \, comma and semicolon`)
	}
	if len(key) < minKey || len(key) > maxKey {
		return "", invalidKey("a key has 16 to 255 characters")
	}
	for i := range len(key) {
		if key[i] < 0x21 || key[i] > 0x7e {
			return "", invalidKey("a key has visible ASCII characters only")
		}
	}
	return key, nil
}

func invalidKey(detail string) *problem { return &problem{kind: kindKeyInvalid, detail: detail} }

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

// parseWait reads how long the client wants to wait for another attempt: Prefer: wait=seconds (RFC 7240). applied says
// that it named a number; what is above the maximum is cut down to it.
func parseWait(h http.Header) (wait time.Duration, applied bool) {
	for _, line := range h.Values("Prefer") {
		for pref := range strings.SplitSeq(line, ",") {
			pref, _, _ = strings.Cut(pref, ";")
			name, value, _ := strings.Cut(pref, "=")
			if !strings.EqualFold(strings.TrimSpace(name), "wait") {
				continue
			}
			n, err := strconv.ParseUint(strings.Trim(strings.TrimSpace(value), `"`), 10, 31)
			if err != nil {
				continue
			}
			return min(time.Duration(n)*time.Second, maxWait), true
		}
	}
	return defaultWait, false
}

// mintedAt returns the time in a key that is a UUIDv7.
func mintedAt(key string) (time.Time, bool) {
	if len(key) != 36 {
		return time.Time{}, false
	}
	id, err := uuid.Parse(key)
	if err != nil || id.Version() != 7 {
		return time.Time{}, false
	}
	sec, nsec := id.Time().UnixTime()
	return time.Unix(sec, nsec), true
}
