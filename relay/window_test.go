package relay

import (
	"testing"

	"pgregory.net/rapid"
)

// The window against a model: a list of what was let in.
func TestWindowModel(t *testing.T) {
	t.Parallel()
	type held struct{ events, bytes int }
	rapid.Check(t, func(t *rapid.T) {
		maxEvents, maxBytes := rapid.IntRange(1, 50).Draw(t, "events"), rapid.IntRange(1, 500).Draw(t, "bytes")
		w := newWindow(maxEvents, maxBytes)
		var in []held
		sum := func() (e, b int) {
			for _, h := range in {
				e, b = e+h.events, b+h.bytes
			}
			return e, b
		}
		for range 100 {
			if len(in) > 0 && rapid.Bool().Draw(t, "release") {
				i := rapid.IntRange(0, len(in)-1).Draw(t, "which")
				w.release(in[i].events, in[i].bytes)
				in = append(in[:i], in[i+1:]...)
			} else {
				h := held{rapid.IntRange(1, 60).Draw(t, "n"), rapid.IntRange(1, 600).Draw(t, "size")}
				e, b := sum()
				want := e == 0 || e+h.events <= maxEvents && b+h.bytes <= maxBytes
				if got := w.try(h.events, h.bytes, false); got != want {
					t.Fatalf("try(%v) with %d/%d held of %d/%d = %v", h, e, b, maxEvents, maxBytes, got)
				}
				if want {
					in = append(in, h)
				}
			}
			e, b := sum()
			if ge, gb := w.inflight(); ge != e || gb != b {
				t.Fatalf("held %d/%d, want %d/%d", ge, gb, e, b)
			}
			if len(in) > 1 && (e > maxEvents || b > maxBytes) {
				t.Fatalf("window holds %d/%d of %d/%d", e, b, maxEvents, maxBytes)
			}
		}
	})
}
