package cli

import (
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"posthaste/internal/lab/testenv"
)

var must = testenv.Must

// The line that is overwritten fits into a terminal of any width.
func TestTallyFitsTheTerminal(t *testing.T) {
	t.Parallel()
	_, tty := testenv.Terminal(t, 30)
	if n := width(tty); n != 30 {
		t.Errorf("width %d, want 30", n)
	}
	line := (&Tally{total: 10_000_000, n: 1_234_567, began: time.Now().Add(-time.Hour)}).line()
	if short := clip(line, 30); utf8.RuneCountInString(short) != 29 || !strings.HasPrefix(line, short) {
		t.Errorf("%q is clipped to %q", line, short)
	}
	if clip(line, 0) != line || clip("short", 30) != "short" {
		t.Error("what needs no clipping is clipped")
	}
}
