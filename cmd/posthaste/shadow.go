package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/internal/shadow"
)

type shadowCmd struct {
	Table       string        `required:"" placeholder:"SCHEMA.NAME" help:"The outbox table, as in the catalog."`
	Stream      []string      `required:"" sep:"none" help:"A stream of the other relay; may be repeated."`
	ID          string        `name:"id" default:"id" placeholder:"COL" help:"Column of the event's id."`
	AggregateID string        `placeholder:"COL" help:"Column whose events keep their order; or none."`
	EntryID     string        `default:"id" placeholder:"FIELD" help:"An entry's field with the id; FIELD.MEMBER in JSON."`
	Poll        bool          `help:"Read the table again and again instead of the WAL."`
	OrderBy     string        `placeholder:"COL" help:"With --poll: a column that grows with each row."`
	For         time.Duration `default:"0" help:"How long; 0 until it is interrupted."`
	Grace       time.Duration `default:"30s" help:"An event in no stream for so long is lost."`
	JSON        bool          `name:"json" help:"Print JSON."`
}

// Run compares until it is interrupted, and fails if the other relay has broken a promise.
func (c shadowCmd) Run(ctx context.Context, e *env) error {
	o := shadow.Options{
		URL: e.config.PostgresURL, Schema: e.config.Schema, Table: c.Table, ID: c.ID, Key: c.AggregateID,
		OrderBy: c.OrderBy, Streams: c.Stream, Field: c.EntryID, Poll: c.Poll, For: c.For, Grace: c.Grace,
		Progress: func(r shadow.Report) { fmt.Fprintln(e.Stderr, summary(r)) },
		Say:      func(format string, args ...any) { fmt.Fprintf(e.Stderr, "posthaste: "+format+"\n", args...) },
	}
	if err := o.Check(); err != nil {
		return cli.Usage(err.Error())
	}
	client, err := e.config.RedisClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	o.Redis = client
	report, err := shadow.Run(ctx, o)
	if report.Table == "" {
		return cli.OneLine(err)
	}
	if c.JSON {
		if jerr := e.JSON(report); jerr != nil {
			return jerr
		}
	} else {
		fmt.Fprint(e.Stdout, page(report))
	}
	if err == nil && report.Broken() {
		err = cli.ErrSaid
	}
	return cli.OneLine(err)
}

// summary is a report in one line.
func summary(r shadow.Report) string {
	s := fmt.Sprintf("%v: %s committed, %s published, %d waiting, %d lost, %d repeated, %d reordered",
		r.Lasted.Round(time.Second), humanize.Comma(int64(r.Committed)), humanize.Comma(int64(r.Published)), r.Waiting,
		r.Lost, r.Repeated, r.Reordered)
	if r.P99 > 0 {
		s += fmt.Sprintf(", p99 %.4g ms", r.P99)
	}
	return s
}

// page is a report on a page.
func page(r shadow.Report) string {
	var b strings.Builder
	t := cli.Table(&b)
	fmt.Fprintf(t, "table\t%s\nstreams\t%s\nbegan\t%s, for %v\n", r.Table, strings.Join(r.Streams, ", "),
		r.Began.Format(time.RFC3339), r.Lasted.Round(time.Second))
	for _, row := range []struct {
		name string
		n    int
		note string
	}{
		{"committed", r.Committed, ""},
		{"published", r.Published, ""},
		{"lost", r.Lost, ""},
		{"repeated", r.Repeated, ""},
		{"reordered", r.Reordered, ""},
		{"unknown", r.Unknown, "entries whose row was written before the start, or never committed"},
		{"unreadable", r.Unreadable, "entries without an id: see --entry-id"},
	} {
		if row.note != "" && row.n == 0 {
			continue
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", row.name, humanize.Comma(int64(row.n)), row.note)
	}
	if r.P99 > 0 {
		fmt.Fprintf(t, "commit to entry\tp50 %.4g ms, p99 %.4g ms, longest %.4g ms\n", r.P50, r.P99, r.Longest)
	}
	if r.Gone {
		fmt.Fprintln(t, "note\tentries left a stream while it was read; lost events may be among them")
	}
	if r.Poll {
		fmt.Fprintln(t, "note\tpolling does not see rows that are deleted within a quarter of a second")
	}
	_ = t.Flush()
	for _, f := range r.Findings {
		fmt.Fprintf(&b, "%s: event %s", f.What, ops.Printable(f.Event))
		if f.Key != "" {
			fmt.Fprintf(&b, " of %s", ops.Printable(f.Key))
		}
		if f.Entry != "" {
			fmt.Fprintf(&b, " at %s in %s", f.Entry, ops.Printable(f.Stream))
		}
		fmt.Fprintf(&b, ", %s\n", f.At.UTC().Format(time.RFC3339Nano))
	}
	return b.String()
}
