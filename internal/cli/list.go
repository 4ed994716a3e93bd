package cli

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

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

// Streams prints streams, with how many entries each group has not read.
func (o IO) Streams(asJSON bool, list []ops.StreamState) error {
	return List(o, asJSON, list, "no streams: none has been published to",
		"STREAM\tENTRIES\tLAST ENTRY\tMEMORY\tGROUPS",
		func(s ops.StreamState) []any {
			last, memory, groups := "-", "unknown", make([]string, len(s.Groups))
			if !s.Last.IsZero() {
				last = humanize.Time(s.Last)
			}
			if s.Bytes >= 0 {
				memory = ops.Size(s.Bytes)
			}
			for i, g := range s.Groups {
				groups[i] = fmt.Sprintf("%s (%s unread, %s pending)", g.Name, Count(g.Lag), Count(g.Pending))
			}
			return []any{s.Stream, Count(s.Entries), last, memory, Short(strings.Join(groups, ", "), 200)}
		})
}

// DeadEvent prints one dead event in lines of names and values.
func (o IO) DeadEvent(d ops.DeadDetail) error {
	t := Table(o.Stdout)
	payload := "could not be read"
	if d.PayloadBytes >= 0 {
		payload = ops.Size(int64(d.PayloadBytes))
	}
	if d.Payload != nil {
		payload += " " + string(d.Payload)
	}
	state := map[bool]string{false: "dead", true: "retrying"}[d.Retrying]
	for _, row := range [][]any{
		{"id", d.ID},
		{"source", d.Source},
		{"stream", strings.TrimSpace(d.Stream + " " + d.Entry)},
		{"type", d.Type},
		{"aggregate", d.AggregateType + "/" + d.AggregateID},
		{"state", state + " after " + ops.CountOf(int64(d.Attempts), "attempt")},
		{"error", d.Class + ": " + d.Error},
		{"created", d.CreatedAt.UTC().Format(time.RFC3339Nano)},
		{"dead since", d.DeadAt.UTC().Format(time.RFC3339Nano)},
		{"headers", strings.Join(d.Headers, ", ")},
		{"payload", payload},
		{"to do", strings.Join(d.Remedy, ", or ")},
	} {
		Row(t, row...)
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
