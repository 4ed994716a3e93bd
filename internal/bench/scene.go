package bench

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"posthaste/cdc"
	"posthaste/internal/app"
	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

// errLeft means that something of a benchmark is still on the servers.
var errLeft = errors.New("left behind, drop it by hand")

// scene is one measurement's own database, slot and stream. They are gone when it ends.
type scene struct {
	*session
	name   string
	config app.Config
	pool   *pgxpool.Pool
	slots  *cdc.Slots
}

// in runs do in a new scene and removes it, whatever do says.
func (b *session) in(ctx context.Context, do func(ctx context.Context, s *scene) error) (err error) {
	b.scenes++
	s := &scene{session: b, name: fmt.Sprintf("posthaste_bench_%s_%d", b.name, b.scenes), config: b.config}
	s.config.RelayName = strings.TrimPrefix(s.name, "posthaste_")
	s.config.Slot = s.name
	s.config.StreamPrefix = strings.ReplaceAll(s.name, "_", "-") + "."
	s.config.PostgresURL = inDatabase(b.config.PostgresURL, s.name)
	defer func() { err = errors.Join(err, s.remove(ctx)) }()
	if _, err := b.admin.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{s.name}.Sanitize()); err != nil {
		return fmt.Errorf("create database %s: %w", s.name, err)
	}
	if _, err := sql.Migrate(ctx, s.config.PostgresURL, s.config.Schema, s.log); err != nil {
		return err
	}
	if s.pool, err = openPool(ctx, s.config.PostgresURL, 2*writers); err != nil {
		return err
	}
	if s.slots, err = cdc.NewSlots(cdc.SlotsOptions{Pool: s.pool, Slot: s.config.Slot, Logger: s.log}); err != nil {
		return err
	}
	return do(ctx, s)
}

// inDatabase is the connection string with another database in it.
func inDatabase(dsn, name string) string {
	if !strings.Contains(dsn, "://") {
		return dsn + " dbname=" + name // the last one counts
	}
	u, err := url.Parse(dsn)
	if err != nil {
		return dsn // parsed before, by the settings
	}
	u.Path = "/" + name
	q := u.Query()
	q.Del("dbname")
	u.RawQuery = q.Encode()
	return u.String()
}

// remove drops the slot, the database and the keys. It also does after an interruption.
func (s *scene) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var errs []error
	if s.slots != nil {
		errs = append(errs, s.slots.Drop(ctx))
	}
	if s.pool != nil {
		s.pool.Close()
	}
	_, err := s.admin.Exec(ctx, "DROP DATABASE IF EXISTS "+pgx.Identifier{s.name}.Sanitize()+" WITH (FORCE)")
	errs = append(errs, err, s.removeKeys(ctx))
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: %w: %w", s.name, errLeft, err)
	}
	return nil
}

// removeKeys removes the stream, its gate, and whatever else relay and consumer keep under its name.
func (s *scene) removeKeys(ctx context.Context) error {
	var keys []string
	all := s.redis.Scan(ctx, 0, "*"+s.config.StreamPrefix+"*", 10_000).Iterator()
	for all.Next(ctx) {
		keys = append(keys, all.Val())
	}
	if err := all.Err(); err != nil || len(keys) == 0 {
		return err
	}
	return s.redis.Unlink(ctx, keys...).Err()
}

// stream is where the scene's events go.
func (s *scene) stream() string { return outbox.StreamName(s.config.StreamPrefix, aggregateType) }

// relayed runs do beside a relay in the mode. The relay is the one that `posthaste relay` runs, in this process,
// without the sync of credits.
func (s *scene) relayed(ctx context.Context, mode outbox.Mode, do func(ctx context.Context, p *app.Relay) error) error {
	if err := sql.Register(ctx, s.pool, s.config.RelayName); err != nil {
		return err
	}
	if err := sql.SetDesired(ctx, s.pool, s.config.RelayName, mode); err != nil {
		return err
	}
	p, err := app.NewRelay(ctx, s.config, s.log)
	if err != nil {
		return err
	}
	defer p.Close()
	rctx, stop := context.WithCancel(ctx)
	g, gctx := errgroup.WithContext(rctx)
	g.Go(func() error { return p.RunWithoutCredits(gctx) })
	err = do(gctx, p)
	stop()
	// What the relay ended with says more than that the rest was cancelled for it.
	if werr := g.Wait(); werr != nil && !errors.Is(werr, context.Canceled) {
		return werr
	}
	return err
}

// until waits until cond holds, and gives up when nothing changes for a minute. cond also returns how far it is.
func (s *scene) until(ctx context.Context, p *app.Relay, what string,
	cond func() (holds bool, far int64, err error),
) error {
	last, changed := int64(-1), time.Now()
	for {
		holds, far, err := cond()
		if holds || err != nil {
			return err
		}
		if far != last {
			last, changed = far, time.Now()
		}
		if time.Since(changed) > time.Minute {
			h := p.Health()
			return fmt.Errorf("nothing has changed for a minute while waiting for %s; the relay says: %v %v", what,
				h.Reasons, h.Degraded)
		}
		if err := pause.For(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
}

// inMode waits until the relay is in the mode.
func (s *scene) inMode(ctx context.Context, p *app.Relay, mode outbox.Mode) error {
	return s.until(ctx, p, "mode "+string(mode), func() (bool, int64, error) {
		return p.Status().Mode == mode, 0, nil
	})
}

// published waits until the stream has n entries.
func (s *scene) published(ctx context.Context, p *app.Relay, n int) error {
	return s.until(ctx, p, "every event in the stream", func() (bool, int64, error) {
		have, err := s.redis.XLen(ctx, s.stream()).Result()
		s.progress.count.Store(have)
		return have >= int64(n), have, err
	})
}

// settled waits until nothing in the outbox is owed.
func (s *scene) settled(ctx context.Context, p *app.Relay) error {
	return s.until(ctx, p, "the outbox to be settled", func() (bool, int64, error) {
		held := int64(p.Status().Inflight)
		if held > 0 {
			return false, held, nil
		}
		var left bool
		err := s.pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM outbox_backlog)").Scan(&left)
		return !left, -1, err
	})
}

// count holds the stream and the history against the n events that were written.
func (s *scene) count(ctx context.Context, n int) (check, error) {
	c := check{Committed: n}
	seen := make([]bool, n)
	for from := "-"; ; {
		page, err := s.redis.XRangeN(ctx, s.stream(), from, "+", 1000).Result()
		if err != nil {
			return c, err
		}
		if len(page) == 0 {
			break
		}
		for _, m := range page {
			id, _ := m.Values["id"].(string)
			switch i, ok := eventNumber(id); {
			case !ok || i >= n:
				c.Unknown++
			case seen[i]:
				c.Repeated++
			default:
				seen[i] = true
				c.Found++
			}
		}
		from = "(" + page[len(page)-1].ID
	}
	c.Lost = n - c.Found
	err := s.pool.QueryRow(ctx, "SELECT (SELECT count(*) FROM outbox) - (SELECT count(*) FROM outbox_backlog)").
		Scan(&c.Recorded)
	if s.config.History == 0 {
		c.Recorded = n // there is none
	}
	return c, err
}

// olderTransactions is how long a benchmark waits for what else is under way on the server.
const olderTransactions = 30 * time.Second

// makeSlot makes the slot, for which every older transaction of the server has to end, whichever database it is in.
func (s *scene) makeSlot(ctx context.Context) error {
	for end := time.Now().Add(olderTransactions); ; {
		_, err := s.slots.Ensure(ctx, nil) // bounded; a relay asks again, too
		var slot *outbox.SlotError
		if !errors.As(err, &slot) || slot.Reason != outbox.ReasonTransactionHeld || time.Now().After(end) {
			return err
		}
	}
}

// write has the server write events 0 … n-1 in transactions of so many, over several connections. Clients of its own
// would take processors from what is measured.
func (s *scene) write(ctx context.Context, n, size, transaction int) error {
	chunk := max(500, transaction)
	payload := payloadOf(size)
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range writers {
		g.Go(func() error {
			for {
				from := int(next.Add(int64(chunk))) - chunk
				if from >= n {
					return nil
				}
				to := min(from+chunk, n)
				if _, err := s.pool.Exec(ctx, fmt.Sprintf(insertMany, from, to-1, payload, transaction)); err != nil {
					return fmt.Errorf("write events: %w", err)
				}
			}
		})
	}
	return g.Wait()
}

// writePaced has the server write events from … from+n-1 at a rate, one per transaction, over several connections.
func (s *scene) writePaced(ctx context.Context, from, n, size int, rate float64) error {
	payload := payloadOf(size)
	g, ctx := errgroup.WithContext(ctx)
	for w := range writers {
		g.Go(func() error {
			_, err := s.pool.Exec(ctx, fmt.Sprintf(insertPaced, from+w, from+n-1, payload, writers, rate, from))
			if err != nil {
				return fmt.Errorf("write events: %w", err)
			}
			return nil
		})
	}
	return g.Wait()
}

// asAPI runs do with a pool like that of `posthaste serve`.
func (s *scene) asAPI(ctx context.Context, do func(pool *pgxpool.Pool) error) error {
	cfg, err := sql.OrderPoolConfig(s.config.PostgresURL, s.config.Schema)
	if err != nil {
		return err
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	return do(pool)
}
