package bench

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/consumer"
	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/pause"
	"posthaste/outbox"
)

// Latency measures the time from a commit to the consumer.
type Latency struct {
	Options

	// Rate is how many commits there are per second, Duration how long each measurement lasts.
	Rate     float64
	Duration time.Duration
	// Size is the bytes of a payload.
	Size int
	// Mode is cdc, poll or both.
	Mode string
}

// Run measures, and prints the report. It refuses options that cannot be measured by a usage error, and fails with
// ErrFound if what was measured is wrong.
func (c Latency) Run(ctx context.Context, config app.Config, o cli.IO) error {
	if c.Rate <= 0 || c.Rate > 1e6 || c.Duration <= 0 || c.Size < 16 || c.Size > 1<<20 {
		return cli.Usage("--rate and --duration must be positive, --size from 16 to 1048576")
	}
	r := &report{
		Bench: "latency", Settings: map[string]any{
			"rate": c.Rate, "duration": c.Duration.String(), "size": c.Size,
			"writers": latencyWriters,
		},
		columns: latencyColumns,
	}
	return benchmark(ctx, config, o, c.Options, r, func(b *session) []step {
		l := &latency{session: b, c: c}
		total := int(c.Rate * (c.Duration + loadWarm).Seconds())
		steps := []step{{"bare commit", total, l.commit}, {"bare stream", total, l.xadd}}
		for _, mode := range only(c.Mode, modes...) {
			steps = append(steps, step{string(mode), total, func(ctx context.Context) error {
				return l.relay(ctx,
					mode)
			}})
		}
		return steps
	})
}

// latencyWriters is how many connections commit, so that one that waits holds up nobody.
const latencyWriters = 2 * writers

var latencyColumns = []column{
	{"per_second", "per second", 0},
	{"p50_ms", "p50 ms", 2},
	{"p90_ms", "p90 ms", 2},
	{"p99_ms", "p99 ms", 2},
	{"max_ms", "max ms", 2},
}

// latency measures from the moment an insert was due to be sent, which commits in the same message.
type latency struct {
	*session
	c Latency
}

const insertOne = insertEvent + ` VALUES ($1, '` + aggregateType + `', $2, '` + eventType + `', $3::text::jsonb)`

// load inserts at the rate.
func (l *latency) load(s *scene, before func(n int, due time.Time)) load {
	payload := payloadOf(l.c.Size)
	return load{
		workers: latencyWriters, rate: l.c.Rate, warm: loadWarm, lasts: l.c.Duration,
		do: func(ctx context.Context, n int, due time.Time) error {
			before(n, due)
			if _, err := s.pool.Exec(ctx, insertOne, eventID(n), fmt.Sprint(n), payload); err != nil {
				return fmt.Errorf("insert: %w", err)
			}
			return nil
		},
	}
}

// commit measures the insert alone.
func (l *latency) commit(ctx context.Context) error {
	return l.in(ctx, func(ctx context.Context, s *scene) error {
		took, _, err := l.load(s, func(int, time.Time) { l.progress.add(1) }).run(ctx)
		l.note(l.report.limit("commit", "the INSERT and its commit alone, until it returns"), took)
		return err
	})
}

func (l *latency) note(w *row, took []time.Duration) {
	w.is("per_second", float64(len(took))/l.c.Duration.Seconds())
	w.spread(took)
}

// arrivals notes when events arrive.
type arrivals struct {
	// took is what each event took, in nanoseconds; 0 while it is on its way.
	due, took []atomic.Int64
	warm      int
	arrived   atomic.Int64
	again     atomic.Int64
}

func newArrivals(c Latency) *arrivals {
	n := int(c.Rate*(c.Duration+loadWarm).Seconds()) + 2
	return &arrivals{
		due: make([]atomic.Int64, n), took: make([]atomic.Int64, n),
		warm: int(c.Rate * loadWarm.Seconds()),
	}
}

func (a *arrivals) sent(n int, due time.Time) { a.due[n].Store(due.UnixNano()) }

// seen takes an event that has arrived.
func (a *arrivals) seen(id string) {
	now := time.Now().UnixNano()
	n, ok := eventNumber(id)
	if !ok || n >= len(a.took) || !a.took[n].CompareAndSwap(0, max(1, now-a.due[n].Load())) {
		a.again.Add(1)
		return
	}
	a.arrived.Add(1)
}

// counted returns what the events after the warming up took.
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

// xadd measures Redis alone: an XADD per event, and a reader that waits for them.
func (l *latency) xadd(ctx context.Context) error {
	key := fmt.Sprintf("posthaste-bench-%s-bare", l.name)
	defer l.redis.Unlink(context.WithoutCancel(ctx), key)
	payload := payloadOf(l.c.Size)
	a := newArrivals(l.c)
	rctx, stop := context.WithCancel(ctx)
	defer stop()
	g, gctx := errgroup.WithContext(rctx)
	g.Go(func() error {
		for last := "0-0"; gctx.Err() == nil; {
			res, err := l.redis.XRead(gctx, &redis.XReadArgs{
				Streams: []string{key, last}, Count: 1000,
				Block: 100 * time.Millisecond,
			}).Result()
			if err != nil && !errors.Is(err, redis.Nil) && gctx.Err() == nil {
				return fmt.Errorf("read entries: %w", err)
			}
			for _, s := range res {
				for _, m := range s.Messages {
					id, _ := m.Values["id"].(string)
					a.seen(id)
					last = m.ID
				}
			}
		}
		return nil
	})
	g.Go(func() error {
		defer stop()
		_, n, err := load{
			workers: latencyWriters, rate: l.c.Rate, warm: loadWarm, lasts: l.c.Duration,
			do: func(ctx context.Context, n int, due time.Time) error {
				a.sent(n, due)
				l.progress.add(1)
				return l.redis.XAdd(ctx, &redis.XAddArgs{Stream: key, Values: bareEntry(n, payload)}).Err()
			},
		}.run(gctx)
		if err != nil {
			return err
		}
		return a.await(gctx, n)
	})
	if err := g.Wait(); err != nil {
		return err
	}
	l.note(l.report.limit("xadd", "one XADD per event, until an XREAD that waits has it"), a.counted())
	return nil
}

// relay measures from the commit to a consumer group's handler.
func (l *latency) relay(ctx context.Context, mode outbox.Mode) error {
	return l.in(ctx, func(ctx context.Context, s *scene) error {
		w := l.report.result(string(mode), "from the INSERT, which commits, to the handler of a consumer group")
		a := newArrivals(l.c)
		cons, err := consumer.New(consumer.Options{
			Client: s.redis, Group: "bench", Streams: []string{s.stream()}, DrainTimeout: time.Second, Logger: s.log,
			Handler: func(_ context.Context, ev consumer.Event) error {
				a.seen(ev.ID)
				l.progress.add(1)
				return nil
			},
		})
		if err != nil {
			return err
		}
		var calls int
		err = s.relayed(ctx, mode, func(ctx context.Context, p *app.Relay) error {
			if err := s.inMode(ctx, p, mode); err != nil {
				return err
			}
			cctx, stop := context.WithCancel(ctx)
			g, gctx := errgroup.WithContext(cctx)
			g.Go(func() error { return cons.Run(gctx) })
			g.Go(func() (err error) {
				defer stop()
				if _, calls, err = l.load(s, a.sent).run(gctx); err != nil {
					return err
				}
				if err := a.await(gctx, calls); err != nil {
					return err
				}
				return s.settled(gctx, p)
			})
			return g.Wait()
		})
		if err != nil {
			return err
		}
		l.note(w, a.counted())
		c, err := s.count(ctx, calls)
		if err != nil {
			return err
		}
		c.Repeated += int(a.again.Load())
		w.checked(c)
		l.verdict(w)
		return nil
	})
}

// verdict compares with what a commit and a stream take alone.
func (l *latency) verdict(w *row) {
	commit, xadd := l.report.find("commit"), l.report.find("xadd")
	for _, q := range []string{"p50", "p99"} {
		floor := commit.median(q+"_ms") + xadd.median(q+"_ms")
		w.Ratios[q+" of commit + xadd"] = w.median(q+"_ms") / floor
	}
	floor := commit.median("p50_ms") + xadd.median("p50_ms")
	w.Bound = "the relay's own share"
	if share := floor / w.median("p50_ms"); share > 0.5 {
		w.Bound = fmt.Sprintf("commit and stream themselves, %.0f %% of the median", 100*share)
	}
}
