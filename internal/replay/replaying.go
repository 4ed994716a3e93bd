package replay

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/sink"
	"posthaste/sql"
)

// Options are the flags of a replay.
type Options struct {
	Since   string  `placeholder:"T" help:"Events published at or after T: RFC 3339, or how long ago (90m, 24h)."`
	Until   string  `placeholder:"T" help:"Events published at or before T. Default: when the replay was begun."`
	ID      string  `placeholder:"ID" help:"The event with this id."`
	Subject *string `placeholder:"KEY" help:"Events of this aggregate id."`
	Type    string  `help:"Only events of this type."`
	Stream  string  `help:"Only events that were published to this stream, or to one of those of its type."`
	All     bool    `help:"Everything in history."`
	To      string  `placeholder:"STREAM" help:"Publish to this stream instead of the events' own."`
	Rate    string  `default:"1000/s" help:"Events per second at most; 0 for as fast as it goes."`
	DryRun  bool    `help:"Only say what would be published."`
	Restart bool    `help:"Start over instead of continuing where the same command stopped."`
	JSON    bool    `name:"json" help:"Print the result as JSON."`
}

// Run publishes history again, reports the progress on the standard error of o, and prints the result. It resumes a
// replay with the same options. It returns a usage error if the options contradict each other, and cli.ErrSaid if it
// has already reported its failure.
func (options Options) Run(ctx context.Context, c app.Config, o cli.IO) error {
	r := &replaying{options: options, config: c, io: o}
	if err := r.parse(); err != nil {
		return cli.Usage(err.Error())
	}
	defer r.close()
	if err := r.open(ctx); err != nil {
		return err
	}
	if options.DryRun {
		return r.dryRun(ctx)
	}
	return r.run(ctx)
}

// defaultRate is the default in the tag of Options.Rate.
const defaultRate = "1000/s"

// Bounds of a page of history. A page is one call per stream, which blocks Redis.
const (
	replayRows  = 1000
	replayBytes = 4 << 20
)

// countTimeout bounds the count of the selected events; a replay also works without a total.
const countTimeout = 10 * time.Second

// replaying is a running replay.
type replaying struct {
	options Options
	config  app.Config
	io      cli.IO

	sel  sql.Selection
	rate int
	// since and until return the bounds, relative to now.
	since, until func(now time.Time) time.Time

	pool    *pgxpool.Pool
	client  redis.UniversalClient
	replay  *sink.Replay
	streams []string
	now     time.Time
	oldest  time.Time

	progress *cli.Tally
	next     time.Time // when the next page is due by the rate
}

var (
	sideStreamPattern = regexp.MustCompile(`^[a-zA-Z0-9_.:-]+$`)
	ratePattern       = regexp.MustCompile(`^(\d{1,9})(/s)?$`)
)

func (r *replaying) parse() error {
	c := &r.options
	some := c.Since != "" || c.ID != "" || c.Subject != nil
	switch {
	case !some && !c.All:
		return errors.New("say what to replay: --since, --id or --subject, or --all for everything in history")
	case some && c.All:
		return errors.New("--all selects everything: omit it with --since, --id or --subject")
	}
	r.sel = sql.Selection{Subject: c.Subject, Type: c.Type, Stream: c.Stream, Whole: true}
	if c.ID != "" {
		id, err := uuid.Parse(c.ID)
		if err != nil {
			return fmt.Errorf("--id %q is not a UUID", c.ID)
		}
		r.sel.ID = &id
	}
	var err error
	if r.since, err = cli.ParseTime("since", c.Since, time.Time{}); err != nil {
		return err
	}
	if r.until, err = cli.ParseTime("until", c.Until, time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)); err != nil {
		return err
	}
	m := ratePattern.FindStringSubmatch(c.Rate)
	if m == nil {
		return fmt.Errorf("--rate %q: want events per second, as 500 or 500/s, 0 for as fast as it goes", c.Rate)
	}
	r.rate, _ = strconv.Atoi(m[1]) // nine digits
	switch {
	case c.To == "":
	case len(c.To) > 200 || !sideStreamPattern.MatchString(c.To):
		return errors.New("--to: want a stream's name of letters, digits and _ . : -")
	case strings.HasSuffix(c.To, ":gate"), strings.HasPrefix(c.To, "dead."):
		return fmt.Errorf("--to %s: gates and dead streams are posthaste's own; name another stream", c.To)
	}
	return nil
}

// name identifies the replay by its selection, so that the same command resumes it.
func (r *replaying) name(database uuid.UUID) string {
	c := r.options
	b, _ := json.Marshal([]any{database, c.Since, c.Until, r.sel.ID, c.Subject, c.Type, c.Stream, c.All, c.To})
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:12])
}

// open connects, and refuses an impossible replay.
func (r *replaying) open(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, app.OneShotTimeout)
	defer cancel()
	config := r.config
	cfg, err := sql.ReplayConfig(config.PostgresURL, config.Schema)
	if err != nil {
		return cli.Usage(err.Error())
	}
	if r.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return err
	}
	if err := r.config.CheckSchema(ctx, r.pool); err != nil {
		return err
	}
	if err := sql.Register(ctx, r.pool, config.RelayName); err != nil {
		return err
	}
	st, err := sql.ReadState(ctx, r.pool, config.RelayName)
	if err != nil {
		return err
	}
	streams, err := sql.ListStreams(ctx, r.pool)
	if err != nil {
		return err
	}
	for _, s := range streams {
		// A reader that uses a type's old stream name reads that stream, even if the type has further streams now.
		if r.options.To == s.Name || r.options.To == s.Base {
			return fmt.Errorf("--to %s: the relay publishes to it; omit --to to replay events into their own "+
				"streams, or name another stream", r.options.To)
		}
		r.streams = append(r.streams, s.Name)
	}
	if err := r.history(ctx); err != nil {
		return err
	}
	if r.client, err = config.RedisClient(ctx); err != nil {
		return err
	}
	r.replay = sink.NewReplay(sink.ReplayOptions{
		Client: r.client, Name: r.name(st.Owner.Source), Source: config.EntrySource(), Database: st.Owner.Source,
		Side: r.options.To != "",
	})
	return nil
}

// history reads the bounds of the history.
func (r *replaying) history(ctx context.Context) error {
	now, oldest, err := sql.HistoryBounds(ctx, r.pool)
	switch {
	case err != nil:
		return err
	case oldest != nil:
	case r.config.History == 0:
		return errors.New("history is off (POSTHASTE_HISTORY=0), so nothing was kept that could be replayed: set it " +
			"to how long to keep events; the history begins with events published from then on")
	default:
		return errors.New("history is empty: nothing was published within POSTHASTE_HISTORY, or the relay runs with " +
			"POSTHASTE_HISTORY=0")
	}
	r.now, r.oldest = now.UTC(), oldest.UTC()
	r.sel.Since, r.sel.Until = r.since(r.now), r.until(r.now)
	if r.sel.Until.After(r.now) {
		r.sel.Until = r.now // events published while the replay runs are not in history yet
	}
	if r.sel.Until.Before(r.sel.Since) {
		return cli.Usage(fmt.Sprintf("--until (%s) is before --since (%s)", stamp(r.sel.Until), stamp(r.sel.Since)))
	}
	if r.options.Since != "" && r.sel.Since.Before(r.oldest) {
		fmt.Fprintf(r.io.Stderr, "history begins at %s; earlier events are no longer kept\n", stamp(r.oldest))
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
