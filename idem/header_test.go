package idem

import (
	"errors"
	"net/http"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestKeySyntax(t *testing.T) {
	t.Parallel()
	k := func(n int) string { return strings.Repeat("k", n) }
	for _, c := range []struct {
		lines []string
		key   string
		err   error
	}{
		{nil, "", ErrKeyMissing},
		{[]string{""}, "", ErrKeyMissing},
		{[]string{`""`}, "", ErrKeyInvalid},
		{[]string{k(15)}, "", ErrKeyInvalid},
		{[]string{k(16)}, k(16), nil},
		{[]string{k(255)}, k(255), nil},
		{[]string{k(256)}, "", ErrKeyInvalid},
		{[]string{`"` + k(255) + `"`}, k(255), nil},
		{[]string{`"` + k(15) + `"`}, "", ErrKeyInvalid},
		{[]string{`"a\"b\\c` + k(16) + `"`}, `a"b\c` + k(16), nil},
		{[]string{`"` + k(16) + `\x"`}, "", ErrKeyInvalid},
		{[]string{`"` + k(16)}, "", ErrKeyInvalid},
		{[]string{`"` + k(16) + `\`}, "", ErrKeyInvalid},
		{[]string{`"` + k(16) + `";p=1`}, "", ErrKeyInvalid},
		{[]string{k(16), k(16)}, "", ErrKeyInvalid},
		{[]string{k(16) + "," + k(16)}, "", ErrKeyInvalid},
		{[]string{k(16) + ", " + k(16)}, "", ErrKeyInvalid},
		{[]string{`"` + k(16) + `","` + k(16) + `"`}, "", ErrKeyInvalid},
		{[]string{k(16) + `"`}, "", ErrKeyInvalid},
		{[]string{k(16) + " " + k(16)}, "", ErrKeyInvalid},
		{[]string{k(16) + "\x00"}, "", ErrKeyInvalid},
		{[]string{k(16) + "\r\nX: y"}, "", ErrKeyInvalid},
		{[]string{k(16) + "ü"}, "", ErrKeyInvalid},
		{[]string{k(16) + "😀"}, "", ErrKeyInvalid},
		{[]string{"session:admin:0000"}, "session:admin:0000", nil},
		{[]string{"{x}{x}{x}{x}{x}{x}"}, "{x}{x}{x}{x}{x}{x}", nil},
	} {
		h := http.Header{}
		for _, l := range c.lines {
			h.Add(KeyHeader, l)
		}
		key, err := ParseKey(h)
		if key != c.key || !errors.Is(err, c.err) {
			t.Errorf("%q: %q, %v, want %q, %v", c.lines, key, err, c.key, c.err)
		}
	}
}

func TestPreferWait(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]struct {
		wait    time.Duration
		applied bool
	}{
		"":                                {2 * time.Second, false},
		"wait=0":                          {0, true},
		"wait=7":                          {7 * time.Second, true},
		"WAIT = 7":                        {7 * time.Second, true},
		`respond-async, wait="3";foo`:     {3 * time.Second, true},
		"wait=11":                         {10 * time.Second, true},
		"wait=999999999":                  {10 * time.Second, true},
		"wait=-1":                         {2 * time.Second, false},
		"wait=x":                          {2 * time.Second, false},
		"wait=99999999999999999999999999": {2 * time.Second, false},
	} {
		h := http.Header{}
		if value != "" {
			h.Set("Prefer", value)
		}
		if wait, applied := ParseWait(h); wait != want.wait || applied != want.applied {
			t.Errorf("%q: %v %v, want %v", value, wait, applied, want)
		}
	}
}

func TestKeysAreUnambiguous(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		a := rapid.SliceOfN(rapid.String(), 0, 5).Draw(t, "a")
		b := rapid.SliceOfN(rapid.String(), 0, 5).Draw(t, "b")
		same := len(a) == len(b)
		for i := 0; same && i < len(a); i++ {
			same = a[i] == b[i]
		}
		if (NewKey(a...) == NewKey(b...)) != same {
			t.Fatalf("%q and %q", a, b)
		}
	})
	if NewKey("ab", "c") == NewKey("a", "bc") || NewKey("a") == NewKey("a", "") {
		t.Error("the parts' borders are lost")
	}
	if len(NewKey("x").String()) != 24 {
		t.Errorf("record name %q", NewKey("x"))
	}
	if NewFingerprint(1, "a") == NewFingerprint(2, "a") {
		t.Error("the version is lost")
	}
}

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
