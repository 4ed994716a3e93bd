package cli

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/dustin/go-humanize"

	"posthaste/internal/ops"
)

// Table returns a writer that aligns the cells of lines, which are separated by tabs. The caller calls Flush.
func Table(w io.Writer) *tabwriter.Writer { return tabwriter.NewWriter(w, 0, 4, 2, ' ', 0) }

// Row writes a line of a table. The texts of others in its cells cannot control the terminal.
func Row(w io.Writer, cells ...any) {
	texts := make([]string, len(cells))
	for i, c := range cells {
		texts[i] = ops.Printable(fmt.Sprint(c))
	}
	fmt.Fprintln(w, strings.Join(texts, "\t"))
}

// List prints list: as JSON, or as a table with the titles of header, which are separated by tabs, and a row of cells
// for each element. Instead of a table without rows it prints none, unless that is "".
func List[T any](o IO, asJSON bool, list []T, none, header string, row func(T) []any) error {
	switch {
	case asJSON:
		return o.JSON(append([]T{}, list...))
	case len(list) == 0 && none != "":
		fmt.Fprintln(o.Stdout, none)
		return nil
	}
	t := Table(o.Stdout)
	if header != "" {
		fmt.Fprintln(t, header)
	}
	for _, v := range list {
		Row(t, row(v)...)
	}
	return t.Flush()
}

// Result prints the result of a command: v as JSON, or the lines.
func (o IO) Result(asJSON bool, v any, lines ...string) error {
	if asJSON {
		return o.JSON(v)
	}
	_, err := fmt.Fprintln(o.Stdout, strings.Join(lines, "\n"))
	return err
}

// Count formats a count; one below zero is unknown.
func Count(n int64) string {
	if n < 0 {
		return "unknown"
	}
	return humanize.Comma(n)
}
