package cli

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode"

	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sink"
)

// Aggregate ids, names of groups and errors of handlers may have any content. They must not break lines or send control
// sequences to the terminal.
func TestTablesTakeNoOrders(t *testing.T) {
	t.Parallel()
	const hostile = "a\x1b[2J\r\nb\tc\u202ed\x9b0m"
	var out strings.Builder
	o := IO{Stdout: &out}
	err := errors.Join(
		List(o, false, []string{hostile}, "", "", func(s string) []any { return []any{s, s} }),
		o.Groups([]sink.Group{{Stream: hostile, Name: hostile, Lag: 1, Idle: 2 * time.Hour, HoldsBack: 1}}))
	must(t, err)
	if n := strings.Count(out.String(), "\n"); n != 5 || strings.ContainsFunc(out.String(),
		func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
		t.Errorf("%d lines: %q", n, out.String())
	}
}

func TestStatusIsAlignedAndColouredOnATerminal(t *testing.T) {
	t.Parallel()
	s := Screen{Relay: "default", Report: ops.Report{
		Status:  ops.Status{Mode: outbox.ModeCDC, Desired: outbox.ModeAuto, Slot: ops.Slot{Exists: true, Active: true}},
		Verdict: ops.Brief{Word: "degraded", Why: "3 events are parked"},
	}}
	var plain, coloured strings.Builder
	must(t, errors.Join(s.Print(&plain, false), s.Print(&coloured, true)))
	lines := strings.Split(plain.String(), "\n")
	if lines[0] != "degraded: 3 events are parked" || strings.Contains(plain.String(), "\x1b") {
		t.Errorf("plain:\n%s", plain.String())
	}
	for _, l := range lines[2 : len(lines)-1] {
		if len(l) < 11 || l[9] != ' ' || l[10] == ' ' {
			t.Errorf("line %q is not aligned with the others", l)
		}
	}
	if got := coloured.String(); !strings.HasPrefix(got, "\x1b[1;33mdegraded\x1b[0m: ") ||
		strings.Count(got, "\x1b") != 2 {
		t.Errorf("coloured: %q", got)
	}
}

// status prints how fast a large backlog shrinks and how long that will take. For a small one that comes and goes, it
// prints nothing.
func TestStatusTellsHowABacklogFalls(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		rows []int64
		want string
	}{
		{"one reading", []int64{1000}, ""},
		{"falls", []int64{100_000, 98_000, 96_000}, "falling by 2,000/s, about 48s left"},
		{"grows", []int64{100, 350}, "growing by 250/s"},
		{"stands", []int64{7, 7, 7}, ""},
		{"is a moment's", []int64{0, 5}, ""},
		{"is gone", []int64{5000, 0}, ""},
		{
			"turned round long ago", append([]int64{0, 1_000_000}, 90, 80, 70, 60, 50, 40, 30, 20, 10, 9),
			"falling by 9/s, about 1s left",
		},
	} {
		var tr Trend
		got := ""
		for i, n := range c.rows {
			got = tr.Note(time.Unix(int64(i), 0), n)
		}
		if got != c.want {
			t.Errorf("a backlog that %s: %q, want %q", c.name, got, c.want)
		}
	}
}
