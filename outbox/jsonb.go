package outbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// The limits of numeric, digits before and after the point.
const maxWhole, maxFraction = 131072, 16383

var (
	errJSON   = errors.New("is not JSON in UTF-8")
	errString = errors.New(`has a string that jsonb cannot hold: \u0000, or half of a surrogate pair`)
	errNumber = errors.New("has a number that jsonb cannot hold")
)

// check reports whether Postgres takes text as jsonb, and prints it with at most limit bytes. Of an object's repeated
// names it counts all, although Postgres keeps the last.
func check(text []byte, limit int) error {
	if !utf8.Valid(text) || !json.Valid(text) {
		return errJSON
	}
	size := 0
	for i := 0; i < len(text); {
		n, printed := 1, 1
		switch c := text[i]; {
		case c == '"':
			if n, printed = stringSize(text[i:]); printed < 0 {
				return errString
			}
		case c == '-' || c >= '0' && c <= '9':
			if n, printed = numberSize(text[i:]); printed < 0 {
				return errNumber
			}
		case c == ',' || c == ':':
			printed = 2
		case c == ' ' || c == '\t' || c == '\n' || c == '\r':
			printed = 0
		}
		i, size = i+n, size+printed
	}
	if size > limit {
		return fmt.Errorf("has %d bytes as Postgres prints it, and at most %d are taken", size, limit)
	}
	return nil
}

// stringSize returns the length of the string at the beginning of text, and as Postgres prints it: -1 if it cannot.
func stringSize(text []byte) (n, printed int) {
	for n = 1; text[n] != '"'; {
		switch {
		case text[n] != '\\':
			n, printed = n+1, printed+1
		case text[n+1] == '/':
			n, printed = n+2, printed+1
		case text[n+1] != 'u':
			n, printed = n+2, printed+2
		default:
			r, long := escaped(text[n:])
			if r == 0 || r == utf8.RuneError && long == 0 {
				return n, -1
			}
			n, printed = n+long, printed+printedRune(r)
		}
	}
	return n + 1, printed + 2
}

// escaped returns the character of an escape \u, and its length: 0 for half of a surrogate pair.
func escaped(text []byte) (r rune, n int) {
	hex := func(from int) rune {
		v, _ := strconv.ParseUint(string(text[from:from+4]), 16, 16)
		return rune(v)
	}
	if r = hex(2); !utf16.IsSurrogate(r) {
		return r, 6
	}
	if len(text) < 12 || text[6] != '\\' || text[7] != 'u' {
		return utf8.RuneError, 0
	}
	if r = utf16.DecodeRune(r, hex(8)); r == utf8.RuneError {
		return r, 0
	}
	return r, 12
}

// printedRune returns how many bytes Postgres prints for a character of a string.
func printedRune(r rune) int {
	switch {
	case strings.ContainsRune("\b\f\n\r\t\"\\", r):
		return 2
	case r < ' ':
		return 6
	}
	return utf8.RuneLen(r)
}

// numberSize returns the length of the number at the beginning of text, and as Postgres prints it, without an exponent:
// -1 if it cannot.
func numberSize(text []byte) (n, printed int) {
	for n < len(text) && strings.IndexByte("+-.0123456789eE", text[n]) >= 0 {
		n++
	}
	mantissa, exponent, _ := strings.Cut(strings.ToLower(string(text[:n])), "e")
	whole, fraction, _ := strings.Cut(strings.TrimPrefix(mantissa, "-"), ".")
	shift := 0
	if exponent != "" {
		var err error
		if shift, err = strconv.Atoi(exponent); err != nil || shift > 1<<20 || shift < -1<<20 {
			return n, -1
		}
	}
	before, after := max(len(whole)+shift, 1), max(len(fraction)-shift, 0)
	if before > maxWhole || after > maxFraction {
		return n, -1
	}
	printed = before + after + strings.Count(mantissa, "-")
	if after > 0 {
		printed++
	}
	return n, printed
}
