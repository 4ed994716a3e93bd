package shadow

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
)

// Run compares until it is interrupted, and prints the report. It fails if the other relay has broken a promise.
func (o Options) Run(ctx context.Context, c app.Config, out cli.IO) error {
	if err := o.Check(); err != nil {
		return cli.Usage(err.Error())
	}
	client, err := c.RedisClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	o.URL, o.Schema, o.Redis = c.PostgresURL, c.Schema, client
	o.Progress = func(r Report) { fmt.Fprintln(out.Stderr, r.summary()) }
	o.Say = func(format string, args ...any) { fmt.Fprintf(out.Stderr, "posthaste: "+format+"\n", args...) }
	report, err := Run(ctx, o)
	if report.Table == "" {
		return err
	}
	if o.JSON {
		if jerr := out.JSON(report); jerr != nil {
			return jerr
		}
	} else {
		fmt.Fprint(out.Stdout, report.page())
	}
	if err == nil && report.Broken() {
		err = cli.ErrSaid
	}
	return err
}

func (r Report) summary() string {
	s := fmt.Sprintf("%v: %s committed, %s published, %d waiting, %d lost, %d repeated, %d reordered",
		r.Lasted.Round(time.Second), humanize.Comma(int64(r.Committed)), humanize.Comma(int64(r.Published)), r.Waiting,
		r.Lost, r.Repeated, r.Reordered)
	if r.Measured() {
		s += fmt.Sprintf(", p99 %.4g ms", r.P99)
	}
	return s
}

func (r Report) page() string {
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
		{"waiting", r.Waiting, "in no stream yet, or the streams could not be read"},
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
	if r.Measured() {
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
