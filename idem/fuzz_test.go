package idem

import (
	"errors"
	"net/http"
	"strings"
	"testing"
)

// FuzzParseKey: an accepted key is short and visible, and its quoted form names the same key.
func FuzzParseKey(f *testing.F) {
	for _, seed := range []string{
		"", `""`, "0123456789abcdef", `"0123456789abcdef"`, `"0123456789\"\\abcdef"`, `"0123456789abcdef`, `"\`,
		`"0123456789abcdef";p=1`, "0123456789abcdef, 0123456789abcdef", "0123456789abcdef\r\nX: y",
	} {
		f.Add(seed)
	}
	quotes := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	f.Fuzz(func(t *testing.T, line string) {
		key, err := ParseKey(http.Header{KeyHeader: {line}})
		if err != nil {
			if key != "" || !errors.Is(err, ErrKeyMissing) && !errors.Is(err, ErrKeyInvalid) {
				t.Fatalf("%q: %q, %v", line, key, err)
			}
			return
		}
		if len(key) < MinKeyLength || len(key) > MaxKeyLength || strings.ContainsFunc(key, func(r rune) bool {
			return r < 0x21 || r > 0x7e
		}) {
			t.Fatalf("%q became %q", line, key)
		}
		again, err := ParseKey(http.Header{KeyHeader: {`"` + quotes.Replace(key) + `"`}})
		if err != nil || again != key {
			t.Fatalf("%q, quoted again: %q, %v", key, again, err)
		}
	})
}
