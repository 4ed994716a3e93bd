package outage

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// lines makes an operation fail twice a second for d, and returns the log lines with their times.
func lines(r *Run, d time.Duration, fail func(n int) error) (said []string) {
	began := time.Now()
	for n := 0; time.Since(began) < d; n++ {
		if attrs, say := r.Failed(fail(n)); say {
			said = append(said, strings.TrimSpace(fmt.Sprintln(append([]any{time.Since(began)}, attrs...)...)))
		}
		time.Sleep(500 * time.Millisecond)
	}
	return said
}

func want(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("said %q, want %q", got, want)
	}
}

func TestARunIsSaidAtItsBeginningEveryHalfMinuteAndAtItsEnd(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r Run
		if attrs, say := r.Over(); say {
			t.Errorf("the end of nothing: %v", attrs)
		}
		for range 2 { // the second run like the first
			want(t, lines(&r, 70*time.Second, func(n int) error { return fmt.Errorf("port %d: refused", n) }),
				"0s err port 0: refused",
				"30s failures 61 seconds 30 err port 60: refused",
				"1m0s failures 121 seconds 60 err port 120: refused")
			attrs, say := r.Over()
			if !say {
				t.Error("its end is not said")
			}
			want(t, []string{fmt.Sprint(attrs)}, "[failures 140 seconds 70]")
		}
	})
}

// Another error is logged at its first occurrence, and not each time that it alternates with others.
func TestOtherErrorsAreSaid(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var r Run
		want(t, lines(&r, 20*time.Second, func(n int) error {
			if n > 9 && n%2 == 0 {
				return errors.New("starting up")
			}
			return errors.New("refused")
		}), "0s err refused", "5s failures 11 seconds 5 err starting up")
		r.Over()
		// A text that differs each time gives only a few lines.
		got := lines(&r, 25*time.Second, func(n int) error { return errors.New(strings.Repeat("x", n)) })
		if len(got) != kindsMost {
			t.Errorf("%d lines: %q", len(got), got)
		}
	})
}
