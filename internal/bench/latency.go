package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/pause"
	"posthaste/outbox"
)

// Latency measures the time from a commit to the consumer, and what an event costs, at one rate or several.
type Latency struct {
	Options
	Sink

	Rate     []float64     `default:"200"`
	Duration time.Duration `help:"How long each measurement lasts." default:"5s"`
	Size     int           `help:"Bytes of an event's payload." default:"300"`
	Mode     string        `help:"cdc, poll or both." enum:"cdc,poll,both" default:"both"`
	Hold     time.Duration `default:"0"`
}

// Run measures and prints the report. It returns a usage error for options that cannot be measured, and ErrFound if
// the result is wrong.
func (c Latency) Run(ctx context.Context, config app.Config, o cli.IO) error {
	if len(c.Rate) == 0 || slices.ContainsFunc(c.Rate, func(r float64) bool { return !(r >= 0 && r <= 1e6) }) ||
		c.Duration <= 0 || c.Hold < 0 || c.Size < 16 || c.Size > 1<<20 {
		return cli.Usage("--rate must be from 0 to 1000000, --duration positive, --hold not " +
			"negative, --size from 16 to 1048576")
	}
	r := &report{
		Bench: "latency", Settings: map[string]any{
			"rate": c.Rate, "duration": c.Duration.String(), "size": c.Size, "writers": latencyWriters,
		},
	}
	if len(c.Rate) == 1 {
		r.Settings["rate"] = c.Rate[0]
	}
	return benchmark(ctx, config, o, c.Options, c.Sink, r, func(b *session) (steps []step) {
		for _, rate := range c.Rate {
			steps = append(steps, (&latency{session: b, c: c, rate: rate}).steps()...)
		}
		return steps
	})
}

// latencyWriters is the number of connections that commit. There are enough that a slow commit delays no other.
const latencyWriters = 2 * writers

// latency measures at one rate, from the time when an insert was due. The insert commits in the same message.
type latency struct {
	*session
	c    Latency
	rate float64
}

func (l *latency) steps() []step {
	if l.rate == 0 {
		return l.idleSteps()
	}
	total := l.total()
	bare := l.xadd
	if l.sink.nats() {
		bare = l.publish
	}
	steps := []step{{l.named("bare commit"), total, l.commit}, {l.named("bare stream"), total, bare}}
	for _, mode := range only(l.c.Mode, modes...) {
		estimate := l.held() + total + l.paced()
		steps = append(steps, step{l.named(string(mode)), estimate, func(ctx context.Context) error {
			return l.relay(ctx, mode)
		}})
	}
	return steps
}

// named adds the rate to a name if there are several rates.
func (l *latency) named(of string) string {
	if len(l.c.Rate) > 1 {
		of += fmt.Sprintf(" %g/s", l.rate)
	}
	return of
}

// held is how many events the server writes first, while a transaction is open; total is how many are sent then,
// including warm-up; paced is how many the server writes after them.
func (l *latency) held() int  { return int(l.rate * l.c.Hold.Seconds()) }
func (l *latency) total() int { return int(l.rate * (l.c.Duration + loadWarm).Seconds()) }
func (l *latency) paced() int { return max(1, int(l.rate*l.c.Duration.Seconds())) }

const insertOne = insertEvent + ` VALUES ($1, '` + aggregateType + `', $2, '` + eventType + `', $3::text::jsonb)`

// load calls do for each event.
func (l *latency) load(do func(ctx context.Context, n int, due time.Time) error) load {
	return load{workers: latencyWriters, rate: l.rate, warm: loadWarm, lasts: l.c.Duration, do: do}
}

// inserts sends events from number from on.
func (l *latency) inserts(s *scene, from int, before func(n int, due time.Time)) load {
	payload := payloadOf(l.c.Size)
	return l.load(func(ctx context.Context, n int, due time.Time) error {
		before(n, due)
		if _, err := s.pool.Exec(ctx, insertOne, eventID(from+n), fmt.Sprint(from+n), payload); err != nil {
			return fmt.Errorf("insert: %w", err)
		}
		return nil
	})
}

func (l *latency) commit(ctx context.Context) error {
	return l.in(ctx, func(ctx context.Context, s *scene) error {
		began := time.Now()
		took, calls, err := l.inserts(s, 0, func(int, time.Time) { l.progress.add(1) }).run(ctx)
		if err != nil {
			return err
		}
		arrived := perSecond(calls, began)
		l.note(l.report.limit(l.named("commit"), "the INSERT and its commit alone, until it returns"), took, arrived)
		return nil
	})
}

// note adds a repetition. arrived is how many events arrived per second, which shows a server too slow for the rate.
func (l *latency) note(w *row, took []time.Duration, arrived float64) {
	w.is("per_second", float64(len(took))/l.c.Duration.Seconds())
	w.is("arrived_per_second", arrived)
	w.spread(took)
}

// arrivals records when events arrive.
type arrivals struct {
	// took is the time of each event, in nanoseconds; 0 until it arrives.
	due, took []atomic.Int64
	// from is the number of the first event; earlier ones are not recorded.
	from, warm int
	arrived    atomic.Int64
	again      atomic.Int64
}

func newArrivals(l *latency, from int) *arrivals {
	n := l.total() + 2
	return &arrivals{
		due: make([]atomic.Int64, n), took: make([]atomic.Int64, n), from: from, warm: int(l.rate * loadWarm.Seconds()),
	}
}

func (a *arrivals) sent(n int, due time.Time) { a.due[n].Store(due.UnixNano()) }

// seen records an event's arrival.
func (a *arrivals) seen(id string) {
	now := time.Now().UnixNano()
	n, ok := eventNumber(id)
	if n -= a.from; ok && n < 0 {
		return
	}
	if !ok || n >= len(a.took) || !a.took[n].CompareAndSwap(0, max(1, now-a.due[n].Load())) {
		a.again.Add(1)
		return
	}
	a.arrived.Add(1)
}

// counted returns the times of the events after the warm-up.
func (a *arrivals) counted() []time.Duration {
	var list []time.Duration
	for n := range a.took {
		if t := a.took[n].Load(); n >= a.warm && t > 0 {
			list = append(list, time.Duration(t))
		}
	}
	return list
}

// await waits until n events have arrived.
func (a *arrivals) await(ctx context.Context, n int) error {
	for until := time.Now().Add(30 * time.Second); int(a.arrived.Load()) < n; {
		if time.Now().After(until) {
			return fmt.Errorf("%d of %d events have not arrived after 30 s", n-int(a.arrived.Load()), n)
		}
		if err := pause.For(ctx, 5*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// xadd measures Redis alone: an XADD per event, and a reader that blocks for them.
func (l *latency) xadd(ctx context.Context) error {
	key := fmt.Sprintf("posthaste-bench-%s-bare", l.name)
	defer l.redis.Unlink(context.WithoutCancel(ctx), key)
	payload := payloadOf(l.c.Size)
	a := newArrivals(l, 0)
	read := func(ctx context.Context) error {
		return l.reading(ctx, key, func(m redis.XMessage) {
			id, _ := m.Values["id"].(string)
			a.seen(id)
		})
	}
	return l.bare(ctx, a, "one XADD per event, until an XREAD that waits has it", read,
		func(ctx context.Context, n int) error {
			return l.redis.XAdd(ctx, &redis.XAddArgs{Stream: key, Values: bareEntry(n, payload)}).Err()
		})
}

// reading calls do with each new entry of a stream of Redis until ctx ends.
func (b *session) reading(ctx context.Context, key string, do func(m redis.XMessage)) error {
	for last := "0-0"; ctx.Err() == nil; {
		res, err := b.redis.XRead(ctx, &redis.XReadArgs{
			Streams: []string{key, last}, Count: 1000, Block: 100 * time.Millisecond,
		}).Result()
		if err != nil && !errors.Is(err, redis.Nil) && ctx.Err() == nil {
			return fmt.Errorf("read entries: %w", err)
		}
		for _, s := range res {
			for _, m := range s.Messages {
				do(m)
				last = m.ID
			}
		}
	}
	return nil
}

// bare measures the server alone: write sends event n, and read records what arrives in a until its context ends.
func (l *latency) bare(ctx context.Context, a *arrivals, what string, read func(ctx context.Context) error,
	write func(ctx context.Context, n int) error,
) error {
	var arrived float64
	began := time.Now()
	err := during(ctx, read, func(ctx context.Context) error {
		_, n, err := l.load(func(ctx context.Context, n int, due time.Time) error {
			a.sent(n, due)
			l.progress.add(1)
			return write(ctx, n)
		}).run(ctx)
		if err == nil {
			err = a.await(ctx, n)
		}
		arrived = perSecond(n, began)
		return err
	})
	if err != nil {
		return err
	}
	l.note(l.report.limit(l.named(l.sink.bare()), what), a.counted(), arrived)
	return nil
}

// relay measures from the commit to a consumer group's handler, and then the cost of an event.
func (l *latency) relay(ctx context.Context, mode outbox.Mode) error {
	return l.in(ctx, func(ctx context.Context, s *scene) error {
		w := l.report.result(l.named(string(mode)), "from the INSERT, which commits, to the handler of a consumer "+
			"group; µs and WAL of as many events again, written by the server itself, without a consumer")
		a := newArrivals(l, l.held())
		var calls int
		err := s.relayed(ctx, mode, func(ctx context.Context, p *app.Relay) error {
			if err := s.inMode(ctx, p, mode); err != nil {
				return err
			}
			release, err := l.hold(ctx, s, w)
			if err != nil {
				return err
			}
			defer release()
			began := time.Now()
			var arrived float64
			err = l.consumed(ctx, s, a, func(ctx context.Context) (err error) {
				if _, calls, err = l.inserts(s, l.held(), a.sent).run(ctx); err != nil {
					return err
				}
				err = a.await(ctx, calls)
				arrived = perSecond(calls, began)
				return err
			})
			if err != nil {
				return err
			}
			l.note(w, a.counted(), arrived)
			if err := s.settled(ctx, p); err != nil {
				return err
			}
			return l.cost(ctx, s, p, w, l.held()+calls)
		})
		if err != nil {
			return err
		}
		c, err := s.count(ctx, l.held()+calls+l.paced())
		if err != nil {
			return err
		}
		c.Repeated += int(a.again.Load())
		w.checked(c)
		s.noteSize(ctx, w, c.Committed)
		l.verdict(w)
		return nil
	})
}

// hold opens a transaction, writes events until it is as old as it is to be, and notes what the relay is
// behind by. release ends the transaction.
func (l *latency) hold(ctx context.Context, s *scene, w *row) (release func(), err error) {
	if l.c.Hold == 0 {
		return func() {}, nil
	}
	tx, err := s.pool.Begin(ctx)
	if err != nil {
		return nil, err
	}
	release = func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }
	defer func() {
		if err != nil {
			release()
		}
	}()
	// It writes something: a slot keeps the WAL since then.
	_, err = tx.Exec(ctx, "SELECT pg_catalog.pg_logical_emit_message(true, 'posthaste bench', '')")
	if err != nil {
		return nil, err
	}
	if err := s.writePaced(ctx, 0, l.held(), l.c.Size, l.rate); err != nil {
		return nil, err
	}
	var backlog float64
	var kept *float64
	err = s.pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM outbox_backlog), (SELECT
		pg_wal_lsn_diff(pg_current_wal_insert_lsn(), restart_lsn)::float8 / 1048576 FROM pg_replication_slots
		WHERE slot_name = $1)`, s.config.Slot).Scan(&backlog, &kept)
	if err != nil {
		return nil, err
	}
	w.is("backlog_rows", backlog)
	if kept != nil {
		w.is("kept_wal_mib", *kept)
	}
	if l.nats != nil {
		return release, nil
	}
	// The consumer would have to handle all events of the stream first.
	return release, s.redis.XGroupCreateMkStream(ctx, s.stream(), group, "$").Err()
}

// group is the consumer group that records arrivals.
const group = "bench"

// consumed runs do while a consumer group records arrivals.
func (l *latency) consumed(ctx context.Context, s *scene, a *arrivals, do func(ctx context.Context) error) error {
	if l.nats != nil {
		return during(ctx, func(ctx context.Context) error { return l.arrive(ctx, s.stream(), a) }, do)
	}
	cons, err := consumer.New(consumer.Options{
		Client: s.redis, Group: group, Streams: []string{s.stream()}, DrainTimeout: time.Second, Logger: s.log,
		Handler: func(_ context.Context, ev consumer.Event) error {
			a.seen(ev.ID)
			l.progress.add(1)
			return nil
		},
	})
	if err != nil {
		return err
	}
	return during(ctx, cons.Run, do)
}

// cost measures the cost of an event at the rate, as drain does: the server itself writes and no consumer runs, so
// that this process is the relay alone. Events from number from are written. The relay's progress is not polled: at a
// low rate that would cost more than the events.
func (l *latency) cost(ctx context.Context, s *scene, p *app.Relay, w *row, from int) error {
	n := l.paced()
	used := l.usage(ctx)
	if err := s.writePaced(ctx, from, n, l.c.Size, l.rate); err != nil {
		return err
	}
	if err := s.published(ctx, p, from+n); err != nil {
		return err
	}
	now := l.usage(ctx)
	used.note(w, now, n)
	w.is("relay_cpu_us", (now.own-used.own)*1e6/float64(n))
	return s.settled(ctx, p)
}

// verdict compares the result with the times of a commit and of a stream alone.
func (l *latency) verdict(w *row) {
	bare := l.sink.bare()
	commit, xadd := l.report.find(l.named("commit")), l.report.find(l.named(bare))
	for _, q := range []string{"p50", "p99"} {
		floor := commit.median(q+"_ms") + xadd.median(q+"_ms")
		w.Ratios[q+" of commit + "+bare] = w.median(q+"_ms") / floor
	}
	floor := commit.median("p50_ms") + xadd.median("p50_ms")
	w.Bound = "the relay's own share"
	if share := floor / w.median("p50_ms"); share > 0.5 {
		w.Bound = fmt.Sprintf("commit and stream themselves, %.0f %% of the median", 100*share)
	}
	if arrived := w.median("arrived_per_second"); arrived < saturated*l.rate {
		w.Bound = fmt.Sprintf("saturation: %.0f events/s arrived of %g/s, and the rest waited", arrived, l.rate)
	}
}

// saturated is the share of a rate below which events pile up, so that their latency depends on the duration.
const saturated = 0.95
