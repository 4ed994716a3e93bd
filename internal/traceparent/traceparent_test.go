package traceparent

import (
	"strings"
	"testing"
)

func TestValidAndSampled(t *testing.T) {
	t.Parallel()
	const id, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	zeros := strings.Repeat("0", 32)
	for s, want := range map[string]struct {
		valid   bool
		sampled string
	}{
		"00-" + id + "-" + parent + "-01":                  {true, id},
		"00-" + id + "-" + parent + "-03":                  {true, id},
		"00-" + id + "-" + parent + "-00":                  {true, ""},
		"00-" + id + "-" + parent + "-fe":                  {true, ""},
		"cc-" + id + "-" + parent + "-01-more":             {true, id}, // a later version may say more
		"00-" + id + "-" + parent + "-01more":              {},
		"ff-" + id + "-" + parent + "-01":                  {},
		"00-" + zeros + "-" + parent + "-01":               {},
		"00-" + id + "-" + zeros[:16] + "-01":              {},
		"00-" + strings.ToUpper(id) + "-" + parent + "-01": {},
		"00-" + id[:30] + "é-" + parent + "-01":            {},
		"00_" + id + "-" + parent + "-01":                  {},
		"00-" + id + "-" + parent + "-0":                   {},
		"":                                                 {},
	} {
		if got := Valid(s); got != want.valid {
			t.Errorf("Valid(%q) = %t", s, got)
		}
		if got := Sampled(s); got != want.sampled {
			t.Errorf("Sampled(%q) = %q, want %q", s, got, want.sampled)
		}
	}
}
