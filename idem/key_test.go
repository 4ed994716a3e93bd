package idem

import (
	"testing"

	"pgregory.net/rapid"
)

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
