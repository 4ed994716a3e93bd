package replay

import (
	"context"
	"fmt"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/cli"
	"posthaste/sink"
	"posthaste/sql"
)

// replayResult is what a replay prints in the end.
type replayResult struct {
	sink.ReplayNote
	// Finished says that everything is out, Resumed that an earlier run had begun, Replayed what this one did.
	Finished, Resumed bool
	Replayed          int64
	Took              time.Duration
}

func (r *replaying) result(res replayResult, words string) error {
	if !r.options.JSON {
		if words != "" {
			fmt.Fprintln(r.io.Stdout, words)
		}
		return nil
	}
	var total *int64
	if res.Total >= 0 {
		total = &res.Total
	}
	return r.io.JSON(struct {
		Finished bool      `json:"finished"`
		Resumed  bool      `json:"resumed"`
		Replayed int64     `json:"replayed"`
		Count    int64     `json:"replayed_in_all"`
		Total    *int64    `json:"total"`
		Since    time.Time `json:"since"`
		Until    time.Time `json:"until"`
		To       string    `json:"to,omitempty"`
		Seconds  float64   `json:"seconds"`
	}{res.Finished, res.Resumed, res.Replayed, res.Count, total, res.Since, res.Until, r.options.To, res.Took.Seconds()})
}

// nothing says that the selection is empty; for an event asked for by its id that is a failure.
func (r *replaying) nothing() error {
	if r.sel.ID != nil {
		return fmt.Errorf("event %s is not in history: still in the outbox, parked, older than POSTHASTE_HISTORY, or none "+
			"of this database (posthaste trace %s)", r.sel.ID, r.sel.ID)
	}
	zero := int64(0)
	return r.result(replayResult{
		ReplayNote: sink.ReplayNote{Since: r.sel.Since, Until: r.sel.Until, Total: zero},
		Finished:   true,
	}, "nothing in history matches")
}

// dryRun says what would be published.
func (r *replaying) dryRun(ctx context.Context) error {
	note, err := r.find(ctx)
	if err != nil {
		return err
	}
	list, err := sql.CountHistory(ctx, r.pool, r.sel)
	if err != nil {
		return err
	}
	total := int64(0)
	for i := range list {
		total += list[i].Events
	}
	if total == 0 {
		return r.nothing()
	}
	out := int64(0)
	if note != nil {
		out = note.Count
	}
	if r.options.JSON {
		return r.io.JSON(struct {
			DryRun  bool           `json:"dry_run"`
			Events  int64          `json:"events"`
			Already int64          `json:"already_replayed"`
			To      string         `json:"to,omitempty"`
			Since   time.Time      `json:"since"`
			Until   time.Time      `json:"until"`
			Streams []sql.Selected `json:"streams"`
		}{true, total, out, r.options.To, r.sel.Since, r.sel.Until, list})
	}
	t := cli.Table(r.io.Stdout)
	fmt.Fprintln(t, "STREAM\tEVENTS\tFIRST\tLAST\tTO")
	for _, s := range list {
		to := s.Stream
		if r.options.To != "" {
			to = r.options.To
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", s.Stream, humanize.Comma(s.Events), stamp(s.First), stamp(s.Last), to)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(r.io.Stdout, "%s events would be replayed%s; nothing was done\n", humanize.Comma(total-out),
		r.alreadyOut(note))
	return err
}

func (r *replaying) alreadyOut(note *sink.ReplayNote) string {
	if note == nil {
		return ""
	}
	return fmt.Sprintf(", %s of the same command are out already", humanize.Comma(note.Count))
}

// stamp writes a time for people.
func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }
