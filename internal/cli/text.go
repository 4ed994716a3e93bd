package cli

import (
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"posthaste/internal/ops"
)

// Short is [ops.Printable], cut to n characters: one long cell would widen its whole column.
func Short(s string, n int) string {
	r := []rune(ops.Printable(s))
	if len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return string(r)
}

// Table returns a writer that aligns the cells of lines, which are separated by tabs. The caller calls Flush.
func Table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 4, 2, ' ', 0) }

// ParseTime parses the flag --name: a point in time, or a duration before now. An empty value gives none.
func ParseTime(name, value string, none time.Time) (func(now time.Time) time.Time, error) {
	if value == "" {
		return func(time.Time) time.Time { return none }, nil
	}
	if t, err := time.Parse(time.RFC3339Nano, value); err == nil {
		return func(time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }, nil
	}
	d, err := time.ParseDuration(value)
	if err != nil || d <= 0 {
		return nil, fmt.Errorf("--%s %q: want a time as 2026-03-01T12:00:00Z, or how long ago as 90m or 24h", name,
			value)
	}
	return func(now time.Time) time.Time { return now.Add(-d) }, nil
}
