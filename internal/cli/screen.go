package cli

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/ops"
	"posthaste/sink"
)

// Screen is that of posthaste status.
type Screen struct {
	ops.Report
	// Relay is the relay's name.
	Relay string
	// Trend describes how the backlog changes; "" if it does not change or is not watched.
	Trend string
	// Unknown is what Redis keeps posthaste from knowing.
	Unknown []string
	// Err is why there is no report except its verdict; nil if there is one.
	Err error
}

// paint colours a word of the status, or the severity of a finding.
func paint(word string, coloured bool) string {
	colour, ok := map[string]string{
		ops.OK.Word(): "32", ops.Degraded.Word(): "33", ops.Broken.Word(): "31",
		ops.SeverityWarn: "33", ops.SeverityFail: "31",
	}[word]
	if !coloured || !ok {
		return word
	}
	return "\x1b[1;" + colour + "m" + word + "\x1b[0m"
}

func (s Screen) Print(w io.Writer, coloured bool) error {
	fmt.Fprintf(w, "%s: %s\n", paint(s.Verdict.Word, coloured), s.Verdict.Why)
	if s.Err != nil {
		return nil
	}
	t := Table(w)
	row := func(k, format string, args ...any) { Row(t, k, fmt.Sprintf(format, args...)) }
	fmt.Fprintln(t)
	if s.Verdict.Remedy != "" {
		row("remedy", "%s", s.Verdict.Remedy)
	}
	for _, also := range s.Verdict.Also {
		row("also", "%s", also)
	}
	row("relay", "%s", s.Relay)
	if s.EntrySource != "" {
		row("source", "%s", s.EntrySource)
	}
	row("mode", "%s (desired %s)", s.Mode, s.Desired)
	row("owner", "%s, epoch %d, since %s", cmp.Or(s.Owner, "nobody"), s.Epoch, humanize.Time(s.ChangedAt))
	row("backlog", "%s, oldest %s%s", ops.CountOf(s.Backlog.Rows, "event"),
		ops.Rough(time.Duration(s.Backlog.OldestSeconds*float64(time.Second))), after(s.Trend))
	switch slot := s.Slot; {
	case !slot.Exists:
		row("slot", "none")
	case slot.Lost:
		row("slot", "lost (%s)", slot.Reason)
	default:
		state := map[bool]string{false: "idle", true: "streaming"}[slot.Active]
		row("slot", "%s at %s, %s behind, holds %s of WAL", state, slot.ConfirmedLSN, ops.Size(slot.ConfirmedLagBytes),
			ops.Size(slot.RetainedBytes))
	}
	row("handover", "%s", cmp.Or(strings.TrimPrefix(s.HandoverLSN, "0/0"), "none"))
	row("dead", "%s", humanize.Comma(s.Dead))
	for _, r := range s.Compared {
		if lost := r.Lost(); lost != "" {
			row("lost", "%s (noticed %s); %s", lost, humanize.Time(r.Noticed), r.Remedy)
		}
		switch found := r.Found(); {
		case r.Done == nil:
			row("restoring", "%s, since %s", found, humanize.Time(r.Noticed))
		case found != "":
			row("restored", "%s (%s)", found, humanize.Time(*r.Done))
		}
	}
	for _, u := range s.Unknown {
		row("unknown", "%s", u)
	}
	if s.Phantoms > 0 {
		row("phantoms", "%s; posthaste phantoms", humanize.Comma(s.Phantoms))
	}
	for _, text := range s.Unnoticed {
		row("unnoticed", "%s", text)
	}
	return t.Flush()
}

// after returns a text that follows another one.
func after(s string) string {
	if s == "" {
		return ""
	}
	return ", " + s
}

// Line returns the status as one line, for logs.
func (s Screen) Line(now time.Time) string {
	line := fmt.Sprintf("%s %s: %s%s", now.UTC().Format(time.RFC3339), s.Verdict.Word, s.Verdict.Why, after(s.Trend))
	if s.Err != nil {
		return line
	}
	return line + fmt.Sprintf("; mode=%s desired=%s epoch=%d backlog=%d oldest=%.1fs slot_behind=%d slot_holds=%d "+
		"dead=%d", s.Mode, s.Desired, s.Epoch, s.Backlog.Rows, s.Backlog.OldestSeconds,
		max(s.Slot.ConfirmedLagBytes, 0), max(s.Slot.RetainedBytes, 0), s.Dead)
}

// Trend estimates how fast a large backlog shrinks and how long that will take.
type Trend struct{ seen []reading }

type reading struct {
	at   time.Time
	rows int64
}

// trendReadings is the number of readings in a trend. A single reading varies with the size of a batch.
const trendReadings = 10

// Note adds a reading and returns the trend in words. It returns "" for a backlog that does not change or that lasts
// only a moment.
func (t *Trend) Note(at time.Time, rows int64) string {
	t.seen = append(t.seen, reading{at, rows})
	if len(t.seen) > trendReadings {
		t.seen = t.seen[1:]
	}
	first := t.seen[0]
	took := at.Sub(first.at).Seconds()
	if took <= 0 || min(rows, first.rows) == 0 {
		return ""
	}
	switch perSecond := float64(rows-first.rows) / took; {
	case perSecond <= -1:
		left := time.Duration(float64(rows) / -perSecond * float64(time.Second))
		return fmt.Sprintf("falling by %s/s, about %s left", humanize.Comma(int64(-perSecond)), ops.Rough(left))
	case perSecond >= 1:
		return fmt.Sprintf("growing by %s/s", humanize.Comma(int64(perSecond)))
	}
	return ""
}

// Diagnosis prints the findings of the doctor and its verdict.
func (o IO) Diagnosis(d ops.Diagnosis) error {
	for _, f := range d.Findings {
		word := paint(f.Severity, Colours(o.Stdout)) + strings.Repeat(" ", max(0, 5-len(f.Severity)))
		fmt.Fprintf(o.Stdout, "%s %-22s %s\n", word, f.Check, ops.Printable(f.Detail))
		if f.Remedy != "" {
			fmt.Fprintf(o.Stdout, "      %-22s -> %s\n", "", f.Remedy)
		}
	}
	_, err := fmt.Fprintf(o.Stdout, "\n%s\n", d.Verdict())
	return err
}

// Groups prints consumer groups, and what an operator should know about them.
func (o IO) Groups(groups []sink.Group) error {
	err := List(o, false, groups, "no consumer groups",
		"STREAM\tGROUP\tSTATE\tCONSUMERS\tUNREAD\tPENDING\tOLDEST PENDING\tIDLE\tLOST\tHOLDS BACK\tSTREAMS",
		func(g sink.Group) []any {
			return []any{
				g.Stream, g.Name, ops.StateOf(g), g.Consumers, Count(g.Lag), humanize.Comma(g.Pending),
				ops.Rough(g.OldestPending), ops.Rough(g.Idle), Count(g.Lost), humanize.Comma(g.HoldsBack),
				max(len(g.Streams), 1),
			}
		})
	say := func(format string, args ...any) { fmt.Fprintln(o.Stdout, ops.Printable(fmt.Sprintf(format, args...))) }
	for _, g := range groups {
		if len(g.Streams) > 1 && (ops.StateOf(g) > ops.Behind || g.Lost > 0) {
			worst := g.Streams[0]
			say("group %s is worst on %s: %s unread, %s pending, oldest waiting for %s, %s lost", g.Name, worst.Stream,
				Count(worst.Lag), humanize.Comma(worst.Pending), ops.Rough(worst.Waits), Count(worst.Lost))
		}
	}
	for _, g := range groups {
		if g.HoldsBack > 0 {
			say("group %s holds back about %s entries of %s that would be trimmed without it", g.Name,
				humanize.Comma(g.HoldsBack), g.Stream)
		}
	}
	for _, g := range groups {
		if ops.StateOf(g) == ops.Abandoned {
			say("no consumer has read for group %s of %s in %s; if the group is no longer used, run: %s", g.Name,
				g.Stream, ops.Rough(g.Idle), ops.DropGroupCommand(g.Stream, g.Name))
		}
	}
	return err
}
