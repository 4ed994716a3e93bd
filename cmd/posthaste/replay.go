package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/sink"
	"posthaste/sql"
)

type replayCmd struct {
	Since   string  `placeholder:"T" help:"Events published at or after T: RFC 3339, or how long ago (90m, 24h)."`
	Until   string  `placeholder:"T" help:"Events published at or before T. Default: when the replay was begun."`
	ID      string  `placeholder:"ID" help:"The event with this id."`
	Subject *string `placeholder:"KEY" help:"Events of this aggregate id."`
	Type    string  `help:"Only events of this type."`
	Stream  string  `help:"Only events that were published to this stream."`
	All     bool    `help:"Everything in history."`
	To      string  `placeholder:"STREAM" help:"Publish to this stream instead of the events' own."`
	Rate    string  `default:"1000/s" help:"Events per second at most; 0 for as fast as it goes."`
	DryRun  bool    `help:"Only say what would be published."`
	Restart bool    `help:"Begin again instead of going on where the same command stopped."`
	JSON    bool    `name:"json" help:"Print the result as JSON."`
}

// Run publishes history again.
func (c replayCmd) Run(ctx context.Context, e *env) error {
	r := &replaying{cmd: c, env: e}
	if err := r.parse(); err != nil {
		return cli.Usage(err.Error())
	}
	defer r.close()
	if err := r.open(ctx); err != nil {
		return cli.OneLine(err)
	}
	if c.DryRun {
		return cli.OneLine(r.dryRun(ctx))
	}
	return cli.OneLine(r.run(ctx))
}

// Bounds of a page of history. It is one call per stream, in which Redis does nothing else.
const (
	replayRows  = 1000
	replayBytes = 4 << 20
)

// countTimeout bounds the counting of what there is to do: without a total the replay works as well.
const countTimeout = 10 * time.Second

// replaying is a replay under way.
type replaying struct {
	cmd replayCmd
	env *env

	sel  sql.Selection
	rate int
	// since and until read a time as a point or as how long before now.
	since, until func(now time.Time) time.Time

	pool   *pgxpool.Pool
	client *redis.Client
	replay *sink.Replay
	// streams are those the relay publishes to.
	streams []string
	now     time.Time
	oldest  time.Time

	progress *cli.Tally
	next     time.Time // when the next page is due by the rate
}

var (
	sideStreamPattern = regexp.MustCompile(`^[a-zA-Z0-9_.:-]{1,200}$`)
	ratePattern       = regexp.MustCompile(`^(\d{1,9})(/s)?$`)
)

// parse checks the command line.
func (r *replaying) parse() error {
	c := &r.cmd
	some := c.Since != "" || c.ID != "" || c.Subject != nil
	switch {
	case !some && !c.All:
		return errors.New("say what to replay: --since, --id or --subject, or --all for everything in history")
	case some && c.All:
		return errors.New("--all is everything: leave it away with --since, --id or --subject")
	}
	r.sel = sql.Selection{Subject: c.Subject, Type: c.Type, Stream: c.Stream}
	if c.ID != "" {
		id, err := uuid.Parse(c.ID)
		if err != nil {
			return fmt.Errorf("--id %q is not a UUID", c.ID)
		}
		r.sel.ID = &id
	}
	var err error
	if r.since, err = parseTime("since", c.Since, time.Time{}); err != nil {
		return err
	}
	if r.until, err = parseTime("until", c.Until, time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)); err != nil {
		return err
	}
	m := ratePattern.FindStringSubmatch(c.Rate)
	if m == nil {
		return fmt.Errorf("--rate %q: want events per second, as 500 or 500/s, 0 for as fast as it goes", c.Rate)
	}
	r.rate, _ = strconv.Atoi(m[1]) // nine digits
	switch {
	case c.To == "":
	case !sideStreamPattern.MatchString(c.To):
		return errors.New("--to: want a stream's name of letters, digits and _ . : -")
	case strings.HasSuffix(c.To, ":gate"), strings.HasPrefix(c.To, "dead."):
		return fmt.Errorf("--to %s: gates and dead streams are posthaste's own; name another stream", c.To)
	}
	return nil
}

// parseTime reads a time, or how long ago it was.
func parseTime(name, value string, none time.Time) (func(now time.Time) time.Time, error) {
	if value == "" {
		return func(time.Time) time.Time { return none }, nil
	}
	if t, err := time.Parse(time.RFC3339Nano, value); err == nil {
		return func(time.Time) time.Time { return t.UTC().Truncate(time.Microsecond) }, nil
	}
	d, err := time.ParseDuration(value)
	if err != nil || d <= 0 {
		return nil, fmt.Errorf("--%s %q: want a time as 2026-03-01T12:00:00Z, or how long ago as 90m or 24h", name, value)
	}
	return func(now time.Time) time.Time { return now.Add(-d) }, nil
}

// name identifies the replay by what was asked for, so that the same command goes on with it.
func (r *replaying) name(database uuid.UUID) string {
	c := r.cmd
	b, _ := json.Marshal([]any{database, c.Since, c.Until, r.sel.ID, c.Subject, c.Type, c.Stream, c.All, c.To})
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:12])
}

// open connects, and refuses what cannot be replayed.
func (r *replaying) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, app.OneShotTimeout)
	defer cancel()
	config := r.env.config
	cfg, err := sql.ReplayConfig(config.PostgresURL, config.Schema)
	if err != nil {
		return cli.Usage(err.Error())
	}
	if r.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return err
	}
	if err := r.env.config.CheckSchema(ctx, r.pool); err != nil {
		return err
	}
	if err := sql.Register(ctx, r.pool, config.RelayName); err != nil {
		return err
	}
	st, err := sql.ReadState(ctx, r.pool, config.RelayName)
	if err != nil {
		return err
	}
	if r.streams, err = sql.Streams(ctx, r.pool); err != nil {
		return err
	}
	if slices.Contains(r.streams, r.cmd.To) {
		return fmt.Errorf("--to %s: the relay publishes to it; leave --to away to replay events into their own streams, or name another stream", r.cmd.To)
	}
	if err := r.history(ctx); err != nil {
		return err
	}
	if r.client, err = sink.NewClient(config.RedisURL); err != nil {
		return cli.Usage(err.Error())
	}
	r.replay = sink.NewReplay(sink.ReplayOptions{
		Client: r.client, Name: r.name(st.Owner.Source), Source: "/posthaste/" + config.RelayName, Database: st.Owner.Source, Side: r.cmd.To != "",
	})
	return nil
}

// history looks what there is.
func (r *replaying) history(ctx context.Context) error {
	now, oldest, err := sql.HistoryBounds(ctx, r.pool)
	switch {
	case err != nil:
		return err
	case oldest != nil:
	case r.env.config.History == 0:
		return errors.New("history is off (POSTHASTE_HISTORY=0), so nothing was kept that could be replayed: set it to how long events are to be kept; it begins with what is published from then on")
	default:
		return errors.New("history is empty: nothing was published within POSTHASTE_HISTORY, or the relay runs with POSTHASTE_HISTORY=0")
	}
	r.now, r.oldest = now.UTC(), oldest.UTC()
	r.sel.Since, r.sel.Until = r.since(r.now), r.until(r.now)
	if r.sel.Until.After(r.now) {
		r.sel.Until = r.now // what is published while the replay runs is not history yet
	}
	if r.sel.Until.Before(r.sel.Since) {
		return cli.Usage(fmt.Sprintf("--until (%s) is before --since (%s)", stamp(r.sel.Until), stamp(r.sel.Since)))
	}
	if r.cmd.Since != "" && r.sel.Since.Before(r.oldest) {
		fmt.Fprintf(r.env.Stderr, "history begins at %s; what was published before is not kept any more\n", stamp(r.oldest))
	}
	return nil
}

func (r *replaying) close() {
	if r.client != nil {
		_ = r.client.Close()
	}
	if r.pool != nil {
		r.pool.Close()
	}
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02T15:04:05.000Z") }

// run replays, from where the same command stopped.
func (r *replaying) run(ctx context.Context) error {
	began := time.Now()
	note, err := r.find(ctx)
	if err != nil {
		return err
	}
	resumed := note != nil
	if resumed && !note.Done.IsZero() {
		return r.result(replayResult{ReplayNote: *note, Finished: true, Resumed: true}, fmt.Sprintf(
			"this replay was finished at %s (%s events, published until %s); with --restart it is done again, up to now", stamp(note.Done),
			humanize.Comma(note.Count), stamp(note.Until)))
	}
	if !resumed {
		if note, err = r.begin(ctx); err != nil {
			return err
		}
		if note == nil {
			return r.nothing()
		}
	}
	r.progress = cli.NewTally(r.env.Stderr, note.Total, note.Count)
	if resumed {
		r.progress.Say("going on with the replay begun at %s: %s events are out already (--restart would begin again)", stamp(note.Begun), humanize.Comma(note.Count))
	}
	before := note.Count
	note, err = r.untilDone(ctx, note)
	r.progress.End()
	res := replayResult{ReplayNote: *note, Finished: err == nil, Resumed: resumed, Replayed: note.Count - before, Took: time.Since(began)}
	if err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
		fmt.Fprintf(r.env.Stderr, "posthaste: %v\n", cli.OneLine(err))
		how := "the same command goes on from there; with --restart it begins again"
		if errors.Is(err, sink.ErrReplayGone) {
			how = "the same command goes on from what Redis still knows of it, and begins again if that is nothing"
		}
		_ = r.result(res, fmt.Sprintf("stopped: %s are out; %s", r.progress.Done(), how))
		return cli.ErrSaid
	}
	if note.Total > note.Count {
		_ = r.result(res, "")
		return fmt.Errorf("%s of %s events left history before they were replayed: POSTHASTE_HISTORY is too short for this rate",
			humanize.Comma(note.Total-note.Count), humanize.Comma(note.Total))
	}
	return r.result(res, fmt.Sprintf("replayed %s events in %s", humanize.Comma(res.Replayed), cli.Rough(res.Took)))
}

// replayResult is what a replay prints in the end.
type replayResult struct {
	sink.ReplayNote
	// Finished says that everything is out, Resumed that an earlier run had begun, Replayed what this one did.
	Finished, Resumed bool
	Replayed          int64
	Took              time.Duration
}

func (r *replaying) result(res replayResult, words string) error {
	if !r.cmd.JSON {
		if words != "" {
			fmt.Fprintln(r.env.Stdout, words)
		}
		return nil
	}
	var total *int64
	if res.Total >= 0 {
		total = &res.Total
	}
	return r.env.JSON(struct {
		Finished bool      `json:"finished"`
		Resumed  bool      `json:"resumed"`
		Replayed int64     `json:"replayed"`
		Count    int64     `json:"replayed_in_all"`
		Total    *int64    `json:"total"`
		Since    time.Time `json:"since"`
		Until    time.Time `json:"until"`
		To       string    `json:"to,omitempty"`
		Seconds  float64   `json:"seconds"`
	}{res.Finished, res.Resumed, res.Replayed, res.Count, total, res.Since, res.Until, r.cmd.To, res.Took.Seconds()})
}

// nothing says that the selection is empty; for an event asked for by its id that is a failure.
func (r *replaying) nothing() error {
	if r.sel.ID != nil {
		return fmt.Errorf("event %s is not in history: still in the outbox, parked, older than POSTHASTE_HISTORY, or none of this database (posthaste trace %s)", r.sel.ID, r.sel.ID)
	}
	zero := int64(0)
	return r.result(replayResult{ReplayNote: sink.ReplayNote{Since: r.sel.Since, Until: r.sel.Until, Total: zero}, Finished: true}, "nothing in history matches")
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
	if r.cmd.JSON {
		return r.env.JSON(struct {
			DryRun  bool           `json:"dry_run"`
			Events  int64          `json:"events"`
			Already int64          `json:"already_replayed"`
			To      string         `json:"to,omitempty"`
			Since   time.Time      `json:"since"`
			Until   time.Time      `json:"until"`
			Streams []sql.Selected `json:"streams"`
		}{true, total, out, r.cmd.To, r.sel.Since, r.sel.Until, list})
	}
	t := cli.Table(r.env.Stdout)
	fmt.Fprintln(t, "STREAM\tEVENTS\tFIRST\tLAST\tTO")
	for _, s := range list {
		to := s.Stream
		if r.cmd.To != "" {
			to = r.cmd.To
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", s.Stream, humanize.Comma(s.Events), stamp(s.First), stamp(s.Last), to)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(r.env.Stdout, "%s events would be replayed%s; nothing was done\n", humanize.Comma(total-out), r.alreadyOut(note))
	return err
}

func (r *replaying) alreadyOut(note *sink.ReplayNote) string {
	if note == nil {
		return ""
	}
	return fmt.Sprintf(", %s of the same command are out already", humanize.Comma(note.Count))
}
