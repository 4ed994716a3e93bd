package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/cdc"
	"posthaste/internal/app"
	"posthaste/internal/lab/local"
	"posthaste/internal/pause"
	"posthaste/internal/redisurl"
	"posthaste/outbox"
	"posthaste/sql"
)

// errLeft means that objects of a benchmark are still on the servers.
var errLeft = errors.New("left behind, drop it by hand")

// scene is the database, slot and streams of one measurement. They are removed when it ends.
type scene struct {
	*session
	name   string
	config app.Config
	pool   *pgxpool.Pool
	slots  *cdc.Slots
	// streams is the number of streams of its events, which take turns.
	streams int
}

// in runs do in a new scene and always removes the scene.
func (b *session) in(ctx context.Context, do func(ctx context.Context, s *scene) error) (err error) {
	b.scenes++
	s := &scene{session: b, name: fmt.Sprintf("posthaste_bench_%s_%d", b.name, b.scenes), config: b.config, streams: 1}
	s.config.RelayName = strings.TrimPrefix(s.name, "posthaste_")
	s.config.Slot = s.name
	s.config.StreamPrefix = strings.ReplaceAll(s.name, "_", "-") + "."
	s.config.SinkURL = b.sinkURL
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
	if s.slots, err = cdc.NewSlots(cdc.Options{Pool: s.pool, Slot: s.config.Slot, Logger: s.log}); err != nil {
		return err
	}
	return do(ctx, s)
}

// inDatabase returns the connection string with another database.
func inDatabase(dsn, name string) string {
	if !strings.Contains(dsn, "://") {
		return dsn + " dbname=" + name // the last one wins
	}
	u, err := url.Parse(dsn)
	if err != nil {
		return dsn // cannot happen: the settings have parsed it
	}
	u.Path = "/" + name
	q := u.Query()
	q.Del("dbname")
	u.RawQuery = q.Encode()
	return u.String()
}

// remove drops the slot, the database and the keys, also after an interruption.
func (s *scene) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if s.pool != nil {
		s.pool.Close()
	}
	errs := []error{local.DropDatabase(ctx, s.admin, s.name), s.removeKeys(ctx)}
	for i := range s.streams {
		errs = append(errs, s.removeNats(ctx, s.streamOf(i)))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%s: %w: %w", s.name, errLeft, err)
	}
	return nil
}

// removeKeys removes the stream, its gate, and all other keys of relay and consumer under its name.
func (s *scene) removeKeys(ctx context.Context) error {
	nodes, err := redisurl.Primaries(ctx, s.redis)
	if err != nil {
		return err
	}
	return redisurl.Each(ctx, nodes, func(ctx context.Context, n redisurl.Node) error {
		var keys []string
		all := n.Client.Scan(ctx, 0, "*"+s.config.StreamPrefix+"*", 10_000).Iterator()
		for all.Next(ctx) {
			keys = append(keys, all.Val())
		}
		if err := all.Err(); err != nil {
			return err
		}
		return unlink(ctx, s.redis, keys)
	})
}

// unlink removes keys of any hash slots.
func unlink(ctx context.Context, client redis.UniversalClient, keys []string) error {
	if len(keys) == 0 {
		return nil
	}
	_, err := client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, key := range keys {
			p.Unlink(ctx, key)
		}
		return nil
	})
	return err
}

// stream is the scene's stream if it has only one.
func (s *scene) stream() string { return s.config.StreamPrefix + aggregateType }

// streamOf is the stream of the events whose number is i modulo the number of streams.
func (s *scene) streamOf(i int) string {
	if s.streams == 1 {
		return s.stream()
	}
	return s.stream() + strconv.Itoa(i)
}

// relayed runs do while a relay runs in the mode: that of `posthaste relay`, in this process, without the sync of
// credits, and on one processor as well.
func (s *scene) relayed(ctx context.Context, mode outbox.Mode, do func(ctx context.Context, p *app.Relay) error) error {
	if err := sql.Register(ctx, s.pool, s.config.RelayName); err != nil {
		return err
	}
	if err := sql.SetDesired(ctx, s.pool, s.config.RelayName, mode); err != nil {
		return err
	}
	defer app.OneProcessor()()
	p, err := app.NewRelay(ctx, s.config, s.log)
	if err != nil {
		return err
	}
	defer p.Close()
	return during(ctx, func(ctx context.Context) error {
		if err := p.RunWithoutCredits(ctx); !errors.Is(err, context.Canceled) {
			return err
		}
		return nil
	}, func(ctx context.Context) error { return do(ctx, p) })
}

// during calls do while background runs, and then ends background. It returns the first error.
func during(ctx context.Context, background, do func(ctx context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return background(ctx) })
	g.Go(func() error {
		defer stop()
		return do(ctx)
	})
	return g.Wait()
}

// until waits until cond holds. It fails if nothing changes for a minute. cond also returns its progress.
func (s *scene) until(ctx context.Context, p *app.Relay, what string,
	cond func() (holds bool, far int64, err error),
) error {
	wait := 5 * time.Millisecond
	if s.nats != nil { // whose answer costs as much as some events
		wait *= 4
	}
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
		if err := pause.For(ctx, wait); err != nil {
			return err
		}
	}
}

func (s *scene) inMode(ctx context.Context, p *app.Relay, mode outbox.Mode) error {
	return s.until(ctx, p, "mode "+string(mode), func() (bool, int64, error) {
		return p.Status().Mode == mode, 0, nil
	})
}

// published waits until the streams have n entries. It reads one stream at a time: reading all of them each time
// would cost as much as the measured work.
func (s *scene) published(ctx context.Context, p *app.Relay, n int) error {
	at, full := 0, 0 // the streams before at have all their entries
	return s.until(ctx, p, "every event in the stream", func() (bool, int64, error) {
		for ; ; at++ {
			theirs := (n - at + s.streams - 1) / s.streams
			have, err := s.length(ctx, s.streamOf(at))
			far := int64(full) + have
			s.progress.count.Store(far)
			if err != nil || have < int64(theirs) {
				return false, far, err
			}
			if full += theirs; at == s.streams-1 {
				return true, far, nil
			}
		}
	})
}

// settled waits until all events in the outbox are settled.
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

// count compares the streams and the history with the n events that were written.
func (s *scene) count(ctx context.Context, n int) (check, error) {
	c := check{Committed: n}
	seen := make([]bool, n)
	for i := range s.streams {
		for from := "-"; ; {
			page, err := s.page(ctx, s.streamOf(i), from)
			if err != nil {
				return c, err
			}
			if len(page) == 0 {
				break
			}
			for _, m := range page {
				id, _ := m.Values["id"].(string)
				switch at, ok := eventNumber(id); {
				case !ok || at >= n || at%s.streams != i:
					c.Unknown++
				case seen[at]:
					c.Repeated++
				default:
					seen[at] = true
					c.Found++
				}
			}
			from = "(" + page[len(page)-1].ID
		}
	}
	c.Lost = n - c.Found
	err := s.pool.QueryRow(ctx, "SELECT (SELECT count(*) FROM outbox) - (SELECT count(*) FROM outbox_backlog)").
		Scan(&c.Recorded)
	if s.config.History == 0 {
		c.Recorded = n // without history there are no counts
	}
	return c, err
}

// noteSize adds the bytes that the streams use for each of n events. A Redis that refuses MEMORY adds none.
func (s *scene) noteSize(ctx context.Context, w *row, n int) {
	sum := int64(0)
	for i := range s.streams {
		bytes, err := s.size(ctx, s.streamOf(i))
		if err != nil {
			return
		}
		sum += bytes
	}
	w.is(cmp.Or(s.sink.Sink, "redis")+"_bytes", float64(sum)/float64(n))
}

// olderTransactions bounds the wait for other transactions on the server.
const olderTransactions = 30 * time.Second

// makeSlot makes the slot. That waits for every older transaction of the server, in any database.
func (s *scene) makeSlot(ctx context.Context) error {
	for end := time.Now().Add(olderTransactions); ; {
		_, err := s.slots.Ensure(ctx, nil) // bounded; a relay retries, too
		var slot *outbox.SlotError
		if !errors.As(err, &slot) || slot.Reason != outbox.ReasonTransactionHeld || time.Now().After(end) {
			return err
		}
	}
}

// write makes the server write events 0 … n-1 in transactions of so many, over several connections. Separate clients
// would use processor time that is measured.
func (s *scene) write(ctx context.Context, n, size, transaction int) error {
	chunk := max(500, transaction)
	payload := payloadOf(size)
	aggregate := "'" + aggregateType + "'"
	if s.streams > 1 {
		aggregate = fmt.Sprintf("'%s' || n %% %d", aggregateType, s.streams)
	}
	return inChunks(ctx, writers, n, chunk, func(ctx context.Context, _, from, to int) error {
		_, err := s.pool.Exec(ctx, fmt.Sprintf(insertMany, from, to-1, payload, transaction, aggregate))
		if err != nil {
			return fmt.Errorf("write events: %w", err)
		}
		return nil
	})
}

// inChunks calls do with ranges of the numbers below n, from so many goroutines, which have numbers.
func inChunks(
	ctx context.Context, workers, n, chunk int, do func(ctx context.Context, worker, from, to int) error,
) error {
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for w := range workers {
		g.Go(func() error {
			for {
				from := int(next.Add(int64(chunk))) - chunk
				if from >= n {
					return nil
				}
				if err := do(ctx, w, from, min(from+chunk, n)); err != nil {
					return err
				}
			}
		})
	}
	return g.Wait()
}

// writePaced makes the server write events from … from+n-1 at a rate, one per transaction, over several connections.
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

// asAPI runs do with a pool configured as in `posthaste serve`.
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
