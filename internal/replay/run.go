package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/app"
	"posthaste/internal/audit"
	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/internal/pause"
	"posthaste/sink"
	"posthaste/sql"
)

// run replays with audit entries, and resumes an earlier run of the same command.
func (r *replaying) run(ctx context.Context) error {
	began := time.Now()
	note, err := r.find(ctx)
	if err != nil {
		return err
	}
	resumed := note != nil
	if resumed && !note.Done.IsZero() {
		return r.finished(*note)
	}
	if !resumed {
		if note, err = r.begin(ctx); err != nil {
			return err
		}
		if note == nil {
			return r.nothing()
		}
	}
	args := audit.Detail{"since": stamp(note.Since), "until": stamp(note.Until), "resumed": resumed}
	c := r.options
	for name, value := range map[string]string{"id": c.ID, "type": c.Type, "stream": c.Stream, "to": c.To} {
		if value != "" {
			args[name] = value
		}
	}
	if c.Subject != nil {
		args["subject"] = *c.Subject
	}
	trail := audit.New(r.pool, r.config.LoggerTo(r.io.Stderr))
	noted := trail.Do(ctx, audit.Terminal(), audit.Replay, args, func(ctx context.Context) (audit.Detail, error) {
		before := note.Count
		var cause error
		note, cause, err = r.rest(ctx, note, resumed, began)
		return audit.Detail{"replayed": note.Count - before}, cause
	})
	if errors.Is(noted, audit.ErrNoEntry) {
		return noted
	}
	return err
}

// rest replays, and reports the progress. cause is the reason of an early end, err the error of the command.
func (r *replaying) rest(
	ctx context.Context, note *sink.ReplayNote, resumed bool, began time.Time,
) (_ *sink.ReplayNote, cause, err error) {
	r.progress = cli.NewTally(r.io.Stderr, note.Total, note.Count)
	if resumed {
		r.progress.Say("continuing the replay begun at %s: %s events are already published (--restart starts over)",
			stamp(note.Begun), humanize.Comma(note.Count))
	}
	before := note.Count
	note, cause = r.untilDone(ctx, note)
	r.progress.End()
	took := time.Since(began)
	res := replayResult{
		Finished: cause == nil, Resumed: resumed, Replayed: note.Count - before, Seconds: took.Seconds(),
	}
	if cause != nil {
		why := cause
		if ctx.Err() != nil {
			cause, why = ctx.Err(), errors.New("interrupted")
		}
		fmt.Fprintf(r.io.Stderr, "posthaste: %s\n", ops.Printable(why.Error()))
		how := "the same command continues from there; with --restart it starts over"
		if errors.Is(why, sink.ErrReplayGone) {
			how = "the same command continues from what Redis still knows of it, or starts over if that is nothing"
		}
		_ = r.result(res, *note, fmt.Sprintf("stopped: %s are published; %s", r.progress.Done(), how))
		return note, cause, cli.ErrSaid
	}
	if note.Total > note.Count {
		_ = r.result(res, *note, "")
		err = fmt.Errorf("%s of %s events left history before they were replayed: POSTHASTE_HISTORY is too short "+
			"for this rate", humanize.Comma(note.Total-note.Count), humanize.Comma(note.Total))
		return note, err, err
	}
	said := fmt.Sprintf("replayed %s in %s", ops.CountOf(res.Replayed, "event"), ops.Rough(took))
	return note, nil, r.result(res, *note, said)
}

// find reads the state of the replay that the same command has begun. It is the first call to Redis.
func (r *replaying) find(ctx context.Context) (*sink.ReplayNote, error) {
	ctx, cancel := context.WithTimeout(ctx, app.OneShotTimeout)
	defer cancel()
	note, err := r.replay.Find(ctx)
	if err != nil || note == nil || r.options.Restart {
		return nil, cli.WithRedisRemedy(err)
	}
	r.sel.Since, r.sel.Until = note.Since, note.Until
	if !note.Done.IsZero() || r.options.DryRun {
		return note, nil
	}
	return r.replay.Begin(ctx, *note, false, nil)
}

// begin fixes the selection; nil if it is empty.
func (r *replaying) begin(ctx context.Context) (*sink.ReplayNote, error) {
	r.progress = cli.NewTally(r.io.Stderr, -1, 0)
	if err := r.settled(ctx); err != nil {
		return nil, err
	}
	if !r.sel.Until.Before(r.now) { // not set by an option: include the events that were waited for
		now, _, err := sql.HistoryBounds(ctx, r.pool)
		if err != nil {
			return nil, err
		}
		r.sel.Until = now.UTC()
	}
	list, total, err := r.count(ctx)
	if err != nil {
		return nil, err
	}
	if total == 0 {
		return nil, nil //nolint:nilnil // nothing to replay is no error
	}
	targets := slices.Concat(r.streams, []string{r.options.To})
	for _, s := range list {
		targets = append(targets, s.Stream)
	}
	if r.options.To != "" && strings.HasPrefix(r.options.To, r.config.StreamPrefix) {
		fmt.Fprintf(r.io.Stderr, "%s begins with the prefix: consumers that read every such stream will read it too\n",
			r.options.To)
	}
	var note *sink.ReplayNote
	err = r.patiently(ctx, redisRemedy, func(ctx context.Context) (err error) {
		n := sink.ReplayNote{Since: r.sel.Since, Until: r.sel.Until, Total: total, Begun: r.now}
		note, err = r.replay.Begin(ctx, n, r.options.Restart, slices.DeleteFunc(targets,
			func(s string) bool { return s == "" }))
		return err
	})
	if note != nil {
		r.sel.Since, r.sel.Until = note.Since, note.Until // another process may have begun it first
	}
	return note, err
}

// settled waits until everything published up to now is in history, so that the replay does not miss it.
func (r *replaying) settled(ctx context.Context) error {
	began, said := time.Now(), false
	return sql.AwaitHistory(ctx, r.pool, func(n int) {
		if !said && time.Since(began) > 2*time.Second {
			said = true
			r.progress.Say("waiting for %d transactions that write history to end", n)
		}
	})
}

// count counts the selected events; -1 if that takes too long.
func (r *replaying) count(ctx context.Context) ([]sql.Selected, int64, error) {
	actx, cancel := context.WithTimeout(ctx, countTimeout)
	defer cancel()
	list, total, err := r.selected(actx)
	if err != nil && actx.Err() != nil && ctx.Err() == nil {
		return nil, -1, nil
	}
	return list, total, err
}

// selected counts the selected events, by stream and in all.
func (r *replaying) selected(ctx context.Context) (list []sql.Selected, total int64, err error) {
	list, err = sql.CountHistory(ctx, r.pool, r.sel)
	for _, s := range list {
		total += s.Events
	}
	return list, total, err
}

// untilDone replays page by page until everything is published, and returns the progress.
func (r *replaying) untilDone(ctx context.Context, note *sink.ReplayNote) (*sink.ReplayNote, error) {
	for {
		err := r.pages(ctx, note)
		if !errors.Is(err, sink.ErrReplayMoved) {
			return note, err
		}
		r.progress.Say("%v: going on from what it has", err)
		err = r.patiently(ctx, redisRemedy, func(ctx context.Context) error {
			n, err := r.replay.Find(ctx)
			switch {
			case err != nil:
				return err
			case n == nil || n.Run != note.Run:
				return sink.ErrReplayGone
			}
			note, err = r.replay.Begin(ctx, *n, false, nil)
			return err
		})
		if err != nil {
			return note, err
		}
	}
}

// pages replays from the recorded place. Each page is a statement of its own: an open one would hold back vacuum and
// slow the queue down.
func (r *replaying) pages(ctx context.Context, note *sink.ReplayNote) error {
	var after sql.Place
	if note.At != "" {
		var err error
		if after, err = parsePlace(note.At); err != nil {
			return err
		}
	}
	limit := replayRows
	if r.rate > 0 {
		limit = min(max(r.rate/4, 1), replayRows)
	}
	history := sql.NewHistory(r.pool, r.sel)
	for {
		var page []sql.Replayed
		var end sql.Place
		var all bool
		err := r.patiently(ctx, postgresRemedy, func(ctx context.Context) (err error) {
			page, end, all, err = history.Read(ctx, after, limit, replayBytes)
			return err
		})
		if err != nil {
			return err
		}
		if all {
			break
		}
		if err := r.publish(ctx, page); err != nil {
			return err
		}
		if end == after {
			continue // the search of a part of the log is complete
		}
		after = end
		note.At, note.Count = place(after), note.Count+int64(len(page))
		if err := r.note(ctx, note); err != nil {
			return err
		}
		r.progress.At(note.Count)
		if err := r.pace(ctx, len(page)); err != nil {
			return err
		}
	}
	if all := note.Total <= note.Count; all && r.options.To == "" && r.sel.ID == nil && r.sel.Subject == nil &&
		r.sel.Type == "" {
		err := r.patiently(ctx, postgresRemedy, func(ctx context.Context) error {
			return sql.BroughtBack(ctx, r.pool, r.sel.Since, r.sel.Until, r.sel.Stream)
		})
		if err != nil {
			return err
		}
	}
	note.Done = time.Now().UTC() // last: who finds it does nothing more
	return r.note(ctx, note)
}

func (r *replaying) note(ctx context.Context, n *sink.ReplayNote) error {
	return r.patiently(ctx, redisRemedy, func(ctx context.Context) error {
		return r.replay.Note(ctx, n.At, n.Count, n.Done)
	})
}

// publish sends a page to its streams.
func (r *replaying) publish(ctx context.Context, page []sql.Replayed) error {
	var names []string
	entries := map[string][]sink.ReplayEntry{}
	for i := range page {
		name := cmp.Or(r.options.To, page[i].Stream)
		if _, ok := entries[name]; !ok {
			names = append(names, name)
		}
		entries[name] = append(entries[name], sink.ReplayEntry{Place: place(page[i].Place), Event: &page[i].Record})
	}
	for _, name := range names {
		var done string
		err := r.patiently(ctx, redisRemedy, func(ctx context.Context) (err error) {
			done, err = r.replay.Take(ctx, name)
			return err
		})
		if err != nil {
			return err
		}
		rest, err := behind(entries[name], done)
		if err != nil {
			return err
		}
		err = r.patiently(ctx, redisRemedy, func(ctx context.Context) error {
			return r.replay.Publish(ctx, name, rest)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// behind returns the entries after a place. Those before it were published by a run that ended before it recorded
// that.
func behind(entries []sink.ReplayEntry, done string) ([]sink.ReplayEntry, error) {
	if done == "" {
		return entries, nil
	}
	p, err := parsePlace(done)
	if err != nil {
		return nil, err
	}
	for len(entries) > 0 {
		q, err := parsePlace(entries[0].Place)
		if err != nil {
			return nil, err
		}
		if q.Compare(p) > 0 {
			break
		}
		entries = entries[1:]
	}
	return entries, nil
}

// place formats a place in history: mark, part and number.
func place(p sql.Place) string { return fmt.Sprintf("%d.%d.%d", p.Mark, p.Part, p.Seq) }

func parsePlace(s string) (p sql.Place, err error) {
	parts := strings.Split(s, ".")
	n := make([]int64, len(parts))
	for i, digits := range parts {
		if err == nil {
			n[i], err = strconv.ParseInt(digits, 10, 64)
		}
	}
	if err == nil && len(n) == 3 && n[0] > 0 && n[1] >= 0 && n[1] <= math.MaxInt16 {
		return sql.Place{Mark: n[0], Part: int16(n[1]), Seq: n[2]}, nil //nolint:gosec // compared above
	}
	return p, fmt.Errorf("the note of this replay holds no place in history but %q; --restart begins again", s)
}

// pace waits until n more events are due. It does not catch up after an outage.
func (r *replaying) pace(ctx context.Context, n int) error {
	if r.rate == 0 {
		return ctx.Err()
	}
	if now := time.Now(); r.next.Before(now) {
		r.next = now
	}
	r.next = r.next.Add(time.Duration(float64(n) / float64(r.rate) * float64(time.Second)))
	return pause.For(ctx, time.Until(r.next))
}

// callTimeout bounds one call of a replay. An interrupt does not cancel a call, so that the stop is orderly.
const callTimeout = 10 * time.Second

func redisRemedy(err error) string { return sink.Remedy(sink.Class(err)) }

func postgresRemedy(error) string { return "check that Postgres runs" }

// patiently repeats a step until it succeeds, and reports once when it has to wait and when it continues.
func (r *replaying) patiently(ctx context.Context, remedy func(err error) string,
	call func(ctx context.Context) error,
) error {
	backoff := pause.Backoff{First: 100 * time.Millisecond, Most: 5 * time.Second}
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		actx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
		err := call(actx)
		cancel()
		switch {
		case err == nil:
			if backoff.Waited() {
				r.progress.Say("going on")
			}
			return nil
		case final(err):
			return err
		case !backoff.Waited():
			r.progress.Say("%s (%s); waiting", ops.Printable(err.Error()), remedy(err))
		}
		backoff.Wait(ctx)
	}
}

// final reports whether an error is permanent, so that retries are useless.
func final(err error) bool {
	var p interface{ Permanent() bool }
	if errors.As(err, &p) && p.Permanent() {
		return true
	}
	for _, e := range []error{sink.ErrReplayGone, sink.ErrReplayMoved, sink.ErrReplayTaken, sql.ErrSchemaMissing} {
		if errors.Is(err, e) {
			return true
		}
	}
	return strings.HasPrefix(sql.SQLState(err), "42") // a missing right or table
}

// dryRun reports what would be published.
func (r *replaying) dryRun(ctx context.Context) error {
	note, err := r.find(ctx)
	if err != nil {
		return err
	}
	list, total, err := r.selected(ctx)
	if err != nil {
		return err
	}
	if total == 0 {
		return r.nothing()
	}
	out, already := int64(0), ""
	if note != nil {
		out = note.Count
		already = fmt.Sprintf(", %s of the same command are already published", humanize.Comma(out))
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
	err = cli.List(r.io, false, list, "", "STREAM\tEVENTS\tFIRST\tLAST\tTO", func(s sql.Selected) []any {
		return []any{
			s.Stream, humanize.Comma(s.Events), stamp(s.First), stamp(s.Last), cmp.Or(r.options.To, s.Stream),
		}
	})
	fmt.Fprintf(r.io.Stdout, "%s would be replayed%s; nothing was done\n", ops.CountOf(total-out, "event"), already)
	return err
}
