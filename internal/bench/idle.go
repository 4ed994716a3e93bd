package bench

import (
	"context"
	"runtime/debug"
	"time"

	"posthaste/internal/app"
	"posthaste/internal/pause"
	"posthaste/outbox"
)

const (
	// idleEvents are relayed first, so that connections are open, statements prepared and tables not empty.
	idleEvents = 1000
	// idleWarm is the least time for their effects to end. Another wait, as long as a measurement, is for sessions:
	// each prepares a statement at its first use, and plans it at each of its first five.
	idleWarm = 2 * time.Second
)

// idleSteps measure what is used while nothing happens: by the servers alone, and with a relay.
func (l *latency) idleSteps() []step {
	total := int(l.c.Duration.Seconds())
	steps := []step{{l.named("servers alone"), total, func(ctx context.Context) error {
		return l.in(ctx, func(ctx context.Context, s *scene) error {
			if err := s.write(ctx, idleEvents, l.c.Size, 1); err != nil {
				return err
			}
			what := "Postgres and Redis with the events in the outbox, and no relay"
			return l.quiet(ctx, l.report.limit(l.named("servers"), what), false)
		})
	}}}
	for _, mode := range only(l.c.Mode, modes...) {
		steps = append(steps, step{l.named("idle " + string(mode)), total, func(ctx context.Context) error {
			return l.idle(ctx, mode)
		}})
	}
	return steps
}

func (l *latency) idle(ctx context.Context, mode outbox.Mode) error {
	return l.in(ctx, func(ctx context.Context, s *scene) error {
		w := l.report.result(l.named("idle "+string(mode)),
			"a relay that has nothing to do, and its sessions of Postgres and Redis")
		err := s.relayed(ctx, mode, func(ctx context.Context, p *app.Relay) error {
			if err := s.inMode(ctx, p, mode); err != nil {
				return err
			}
			if err := s.write(ctx, idleEvents, l.c.Size, 1); err != nil {
				return err
			}
			if err := s.published(ctx, p, idleEvents); err != nil {
				return err
			}
			if err := s.settled(ctx, p); err != nil {
				return err
			}
			return l.quiet(ctx, w, true)
		})
		if err != nil {
			return err
		}
		c, err := s.count(ctx, idleEvents)
		w.checked(c)
		return err
	})
}

// quiet waits until earlier work has ended, then for the duration, and records what was used in that time; if relay is
// set, also by this process.
func (l *latency) quiet(ctx context.Context, w *row, relay bool) error {
	l.progress.count.Store(0)
	debug.FreeOSMemory() // frees the memory of earlier measurements
	if err := pause.For(ctx, max(idleWarm, l.c.Duration)); err != nil {
		return err
	}
	used, began := l.usage(ctx), time.Now()
	own := ownCPU() // after the reads, which take time themselves
	for left := l.c.Duration; left > 0; left = l.c.Duration - time.Since(began) {
		if err := pause.For(ctx, min(left, time.Second)); err != nil {
			return err
		}
		l.progress.add(1)
	}
	own, seconds := ownCPU()-own, time.Since(began).Seconds()
	now := l.usage(ctx)
	for name, d := range map[string]float64{
		"postgres_core_percent": now.postgres - used.postgres,
		"redis_core_percent":    now.redis - used.redis,
	} {
		if d > 0 { // it is unknown for a remote server
			w.is(name, 100*d/seconds)
		}
	}
	w.is("wal_bytes_per_second", (now.wal-used.wal)/seconds)
	if relay {
		w.is("relay_core_percent", 100*own/seconds)
		if rss, _ := memory(); rss > 0 {
			w.is("relay_rss_mib", rss/(1<<20))
		}
	}
	return nil
}
