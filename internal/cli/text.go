package cli

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"
)

// Printable makes text from outside (an aggregate id, the name of a group, the error of a handler) safe for a line of
// output: the result can neither break the line nor steer the terminal.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, s)
}

// Short is Printable, cut to n characters: one long cell would make every line of its table as long.
func Short(s string, n int) string {
	r := []rune(Printable(s))
	if len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return string(r)
}

// Rough writes a duration for people: its two largest units.
func Rough(d time.Duration) string {
	switch {
	case d <= 0:
		return "-"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%02dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

// Table returns a writer that aligns the cells of lines, which are separated by tabs. The caller calls Flush.
func Table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 4, 2, ' ', 0) }
