package replay

import (
	"fmt"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/ops"
	"posthaste/sink"
)

// replayResult is the printed result of a replay.
type replayResult struct {
	// Finished reports that all events are published, Resumed that an earlier run began. Replayed and Seconds are of
	// this run, the others of the whole replay.
	Finished bool      `json:"finished"`
	Resumed  bool      `json:"resumed"`
	Replayed int64     `json:"replayed"`
	Count    int64     `json:"replayed_in_all"`
	Total    *int64    `json:"total"`
	Since    time.Time `json:"since"`
	Until    time.Time `json:"until"`
	To       string    `json:"to,omitempty"`
	Seconds  float64   `json:"seconds"`
}

// result prints res, which it completes from the note, or words.
func (r *replaying) result(res replayResult, note sink.ReplayNote, words string) error {
	if !r.options.JSON {
		if words != "" {
			fmt.Fprintln(r.io.Stdout, words)
		}
		return nil
	}
	res.Count, res.Since, res.Until, res.To = note.Count, note.Since, note.Until, r.options.To
	if note.Total >= 0 {
		res.Total = &note.Total
	}
	return r.io.JSON(res)
}

// finished reports that the same command has published all events before, and the command that does it again.
func (r *replaying) finished(note sink.ReplayNote) error {
	again := "to run it again"
	if r.options.Until == "" {
		again += ", up to now"
	}
	words := fmt.Sprintf("this replay finished at %s (%s events, published until %s); %s: %s", stamp(note.Done),
		humanize.Comma(note.Count), stamp(note.Until), again, r.options.restart())
	if r.options.JSON {
		fmt.Fprintln(r.io.Stderr, "posthaste: "+words)
	}
	return r.result(replayResult{Finished: true, Resumed: true}, note, words)
}

// restart is the command that begins the same replay again.
func (options Options) restart() string {
	command := "posthaste replay"
	flag := func(name, value string) {
		if value != "" {
			command += " --" + name + "=" + ops.Quoted(value)
		}
	}
	flag("since", options.Since)
	flag("until", options.Until)
	flag("id", options.ID)
	if options.Subject != nil {
		command += " --subject=" + ops.Quoted(*options.Subject)
	}
	flag("type", options.Type)
	flag("stream", options.Stream)
	flag("to", options.To)
	if options.All {
		command += " --all"
	}
	if options.Rate != defaultRate {
		flag("rate", options.Rate)
	}
	if options.JSON {
		command += " --json"
	}
	return command + " --restart"
}

// nothing reports an empty selection. If it was selected by event id, that is a failure.
func (r *replaying) nothing() error {
	if r.sel.ID != nil {
		return fmt.Errorf("event %s is not in history: still in the outbox, dead, older than POSTHASTE_HISTORY, or "+
			"none of this database (posthaste trace %s)", r.sel.ID, r.sel.ID)
	}
	note := sink.ReplayNote{Since: r.sel.Since, Until: r.sel.Until}
	return r.result(replayResult{Finished: true}, note, "nothing in history matches")
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }
