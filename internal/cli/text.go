package cli

import (
	"io"
	"text/tabwriter"

	"posthaste/internal/ops"
)

// Short is [ops.Printable], cut to n characters: one long cell would make every line of its table as long.
func Short(s string, n int) string {
	r := []rune(ops.Printable(s))
	if len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return string(r)
}

// Table returns a writer that aligns the cells of lines, which are separated by tabs. The caller calls Flush.
func Table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 4, 2, ' ', 0) }
