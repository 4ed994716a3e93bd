package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/cli"
	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
)

type statusCmd struct {
	JSON  bool `name:"json" help:"Print JSON, as GET /relay answers; with --watch one line each time."`
	Watch bool `help:"Refresh every second until interrupted, even while Postgres is unavailable."`
	Check bool `help:"Exit with 0 if all is well, 1 if it is degraded, and 2 if it is broken or cannot be read."`
}

// Run shows the status.
func (c statusCmd) Run(ctx context.Context, e *env) error {
	if c.Watch {
		return c.watch(ctx, e)
	}
	var v view
	err := e.config.WithPool(ctx, func(ctx context.Context, pool *pgxpool.Pool) (err error) {
		if v, err = e.readStatus(ctx, pool); err != nil {
			return err
		}
		if c.JSON {
			return e.JSON(v.Report)
		}
		return v.print(e.Stdout, e.config.RelayName, cli.Colours(e.Stdout))
	})
	switch {
	case !c.Check:
		return err
	case err != nil:
		return &cli.ExitError{Code: 2, Err: err}
	case v.Verdict.Word == ops.Broken.Word():
		return &cli.ExitError{Code: 2, Err: cli.ErrSaid}
	case v.Verdict.Word != ops.OK.Word():
		return &cli.ExitError{Code: 1, Err: cli.ErrSaid}
	}
	return nil
}

// view is the status and its assessment.
type view struct {
	ops.Report
	// trend describes how the backlog changes; "" if it does not change or is not watched.
	trend string
	// unknown is what Redis keeps posthaste from knowing.
	unknown []string
}

// readStatus reads and assesses the status.
func (e *env) readStatus(ctx context.Context, pool *pgxpool.Pool) (view, error) {
	if err := sql.Register(ctx, pool, e.config.RelayName); err != nil {
		return view{}, err
	}
	slots, err := e.config.Slots(pool, nil)
	if err != nil {
		return view{}, err
	}
	from := ops.Source{
		Pool: pool, RelayName: e.config.RelayName, Slots: slots, WALBudget: e.config.WALBudget,
	}
	var unknown []string
	from.Redis = func(ctx context.Context) (err error) {
		unknown, err = e.redisReady(ctx)
		return err
	}
	snap, err := from.Look(ctx)
	if err != nil {
		return view{}, err
	}
	return view{Report: snap.Report(), unknown: unknown}, nil
}

// redisReady returns why Redis takes no events from this machine, or what it keeps unknown. The check is necessary
// because Postgres has no record of an unreachable Redis until events are late.
func (e *env) redisReady(ctx context.Context) (unknown []string, err error) {
	client, err := e.config.RedisClient(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = client.Close() }()
	s := sink.New(sink.Options{Client: client, Durability: e.config.Durability})
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	unknown, _ = s.Unknown(ctx) // events flow even if this fails
	return unknown, nil
}

// some returns the texts that are not empty.
func some(texts ...string) (out []string) {
	for _, t := range texts {
		if t != "" {
			out = append(out, t)
		}
	}
	return out
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

func (v view) print(w io.Writer, name string, coloured bool) error {
	fmt.Fprintf(w, "%s: %s\n\n", paint(v.Verdict.Word, coloured), v.Verdict.Why)
	t := cli.Table(w)
	row := func(k, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", k, fmt.Sprintf(format, args...)) }
	for _, also := range v.Verdict.Also {
		row("also", "%s", also)
	}
	row("relay", "%s", name)
	if v.EntrySource != "" {
		row("source", "%s", v.EntrySource)
	}
	row("mode", "%s (desired %s)", v.Mode, v.Desired)
	row("owner", "%s, epoch %d, since %s", orNone(v.Owner), v.Epoch, humanize.Time(v.ChangedAt))
	row("backlog", "%s", strings.Join(some(humanize.Comma(v.Backlog.Rows)+" events",
		"oldest "+ops.Rough(time.Duration(v.Backlog.OldestSeconds*float64(time.Second))), v.trend), ", "))
	switch s := v.Slot; {
	case !s.Exists:
		row("slot", "none")
	case s.Lost:
		row("slot", "lost (%s)", s.Reason)
	default:
		state := "idle"
		if s.Active {
			state = "streaming"
		}
		row("slot", "%s at %s, %s behind, holds %s of WAL", state, s.ConfirmedLSN,
			humanize.IBytes(uint64(max(s.ConfirmedLagBytes, 0))), humanize.IBytes(uint64(max(s.RetainedBytes, 0))))
	}
	row("handover", "%s", cmp.Or(strings.TrimPrefix(v.HandoverLSN, "0/0"), "none"))
	row("dead", "%s", humanize.Comma(v.Dead))
	for _, r := range v.Compared {
		if lost := r.Lost(); lost != "" {
			row("lost", "%s (noticed %s); %s", ops.Printable(lost), humanize.Time(r.Noticed), r.Remedy)
		}
		switch found := ops.Printable(r.Found()); {
		case r.Done == nil:
			row("restoring", "%s, since %s", found, humanize.Time(r.Noticed))
		case found != "":
			row("restored", "%s (%s)", found, humanize.Time(*r.Done))
		}
	}
	for _, u := range v.unknown {
		row("unknown", "%s", u)
	}
	if v.Phantoms > 0 {
		row("phantoms", "%s; posthaste phantoms", humanize.Comma(v.Phantoms))
	}
	for _, text := range v.Unnoticed {
		row("unnoticed", "%s", text)
	}
	return t.Flush()
}

// line returns the status as one line, for logs.
func (v view) line(now time.Time) string {
	why := strings.Join(some(v.Verdict.Why, v.trend), ", ")
	return fmt.Sprintf("%s %s: %s; mode=%s desired=%s epoch=%d backlog=%d oldest=%.1fs slot_behind=%d slot_holds=%d "+
		"dead=%d", now.UTC().Format(time.RFC3339),
		v.Verdict.Word, why, v.Mode, v.Desired, v.Epoch, v.Backlog.Rows, v.Backlog.OldestSeconds,
		max(v.Slot.ConfirmedLagBytes, 0), max(v.Slot.RetainedBytes, 0), v.Dead)
}

// trend estimates how fast a large backlog shrinks and how long that will take.
type trend struct{ seen []reading }

type reading struct {
	at   time.Time
	rows int64
}

// trendReadings is the number of readings in a trend. A single reading varies with the size of a batch.
const trendReadings = 10

// note adds a reading and returns the trend in words. It returns "" for a backlog that does not change or that lasts
// only a moment.
func (t *trend) note(at time.Time, rows int64) string {
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

// watchInterval is how often a watched status is read; watchTimeout is the time limit of a reading.
const (
	watchInterval = time.Second
	watchTimeout  = 3 * time.Second
)

// watch shows the status until ctx ends. On a terminal it redraws the status, elsewhere it prints a line for each
// reading. If Postgres is down, it reports that and continues.
func (c statusCmd) watch(ctx context.Context, e *env) error {
	cfg, err := sql.PoolConfig(e.config.PostgresURL, e.config.Schema, "cli")
	if err != nil {
		return cli.Usage(err.Error())
	}
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	terminal := cli.IsTerminal(e.Stdout)
	var backlog trend
	t := time.NewTicker(watchInterval)
	defer t.Stop()
	for {
		actx, cancel := context.WithTimeout(ctx, watchTimeout)
		v, err := view{}, sql.CheckSchema(actx, pool)
		if err == nil {
			v, err = e.readStatus(actx, pool)
		}
		cancel()
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			v.trend = backlog.note(time.Now(), v.Backlog.Rows)
		}
		var second *outbox.SecondNameError
		if errors.As(err, &second) {
			return err // a retry would fail in the same way
		}
		if err := c.show(e, v, cli.OneLine(err), terminal); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// show prints one reading of a watch, or the error if there is no reading.
func (c statusCmd) show(e *env, v view, err error, terminal bool) error {
	now := time.Now()
	if err != nil {
		refused := sql.SQLState(err) != "" || errors.Is(err, sql.ErrSchemaMissing) || errors.Is(err, sql.ErrSchemaNewer)
		gone := ops.Snapshot{
			Now: now, Asked: ops.Asked{Postgres: ops.Answer{Error: err.Error(), Refused: refused}},
		}
		v.Verdict = ops.Assess(&gone).Brief()
	}
	switch {
	case c.JSON:
		var line any = v.Report
		if err != nil {
			line = map[string]string{"error": err.Error()}
		}
		b, err := json.Marshal(line)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(e.Stdout, "%s\n", b)
		return err
	case terminal:
		var screen strings.Builder
		screen.WriteString("\x1b[H\x1b[2J")
		if err != nil {
			fmt.Fprintf(&screen, "%s: %s\n", paint(v.Verdict.Word, cli.Colours(e.Stdout)), v.Verdict.Why)
		} else if err := v.print(&screen, e.config.RelayName, cli.Colours(e.Stdout)); err != nil {
			return err
		}
		fmt.Fprintf(&screen, "\n%s, every second until Ctrl-C\n", now.Format("15:04:05"))
		_, err := io.WriteString(e.Stdout, screen.String())
		return err
	case err != nil:
		_, err := fmt.Fprintf(e.Stdout, "%s %s: %s\n", now.UTC().Format(time.RFC3339), v.Verdict.Word, v.Verdict.Why)
		return err
	}
	_, err = fmt.Fprintln(e.Stdout, v.line(now))
	return err
}

func orNone(s string) string {
	if s == "" {
		return "nobody"
	}
	return s
}
