package cli

import (
	"fmt"
	"regexp"
	"strconv"
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

// daysPattern finds the days and weeks of a duration.
var daysPattern = regexp.MustCompile(`([0-9.]+)([dw])`)

// ParseDuration parses Go's form of a duration, and days and weeks: 500ms, 36h, 3d, 1w2d.
func ParseDuration(value string) (time.Duration, error) {
	return time.ParseDuration(daysPattern.ReplaceAllStringFunc(value, func(part string) string {
		hours := map[byte]float64{'d': 24, 'w': 7 * 24}[part[len(part)-1]]
		n, err := strconv.ParseFloat(part[:len(part)-1], 64)
		if err != nil {
			return part // which time.ParseDuration refuses
		}
		return strconv.FormatFloat(n*hours, 'f', -1, 64) + "h"
	}))
}

// ParseTime parses the flag --name: a point in time, or a duration before now. An empty value gives none.
func ParseTime(name, value string, none time.Time) (func(now time.Time) time.Time, error) {
	if value == "" {
		return func(time.Time) time.Time { return none }, nil
	}
	if t, err := time.Parse(time.RFC3339Nano, value); err == nil {
		return func(time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }, nil
	}
	d, err := ParseDuration(value)
	if err != nil || d <= 0 {
		return nil, fmt.Errorf("--%s %q: want a time as 2026-03-01T12:00:00Z, or how long ago as 90m or 2d", name,
			value)
	}
	return func(now time.Time) time.Time { return now.Add(-d) }, nil
}
