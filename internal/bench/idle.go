package bench

import (
	"context"
	"runtime/debug"
	"time"

	"github.com/prometheus/procfs"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/pause"
	"posthaste/outbox"
)

// Idle measures what a relay costs while nothing happens.
type Idle struct {
	Options

	// Duration is how long each measurement lasts.
	Duration time.Duration
	// Mode is cdc, poll or both.
	Mode string
}

// Run measures and prints the report. It returns a usage error for options that cannot be measured, and ErrFound if
// the result is wrong.
func (c Idle) Run(ctx context.Context, config app.Config, o cli.IO) error {
	if c.Duration <= 0 {
		return cli.Usage("--duration must be positive")
	}
	r := &report{
		Bench: "idle", Settings: map[string]any{
			"duration": c.Duration.String(), "sweep_workers": config.SweepWorkers,
		},
		columns: []column{
			{"relay_core_percent", "relay %", 2},
			{"postgres_core_percent", "postgres %", 2},
			{"redis_core_percent", "redis %", 2},
			{"wal_bytes_per_second", "WAL bytes/s", 0},
			{"relay_rss_mib", "relay RSS MiB", 0},
		},
		legend: "% is processor time of one core",
	}
	return benchmark(ctx, config, o, c.Options, r, func(b *session) []step {
		i := &idle{session: b, c: c}
		total := int(c.Duration.Seconds())
		steps := []step{{"servers alone", total, i.servers}}
		for _, mode := range only(c.Mode, modes...) {
			steps = append(steps, step{string(mode), total, func(ctx context.Context) error {
				return i.relay(ctx, mode)
			}})
		}
		return steps
	})
}

type idle struct {
	*session
	c Idle
}

const (
	// idleEvents are relayed first, so that connections are open, statements prepared and tables not empty.
	idleEvents = 1000
	// idleWarm is the least time for their effects to end. Another wait, as long as a measurement, is for sessions:
	// each prepares a statement at its first use, and plans it at each of its first five.
	idleWarm = 2 * time.Second
)

// servers measures Postgres and Redis with the same database, without a relay.
func (i *idle) servers(ctx context.Context) error {
	return i.in(ctx, func(ctx context.Context, s *scene) error {
		if err := s.write(ctx, idleEvents, 300, 1); err != nil {
			return err
		}
		w := i.report.limit("servers", "Postgres and Redis with the events in the outbox, and no relay")
		return i.quiet(ctx, w, func(usage, usage, float64) {})
	})
}

// relay measures the same with an idle relay.
func (i *idle) relay(ctx context.Context, mode outbox.Mode) error {
	return i.in(ctx, func(ctx context.Context, s *scene) error {
		w := i.report.result(string(mode), "a relay that has nothing to do, and its sessions of Postgres and Redis")
		err := s.relayed(ctx, mode, func(ctx context.Context, p *app.Relay) error {
			if err := s.inMode(ctx, p, mode); err != nil {
				return err
			}
			if err := s.write(ctx, idleEvents, 300, 1); err != nil {
				return err
			}
			if err := s.published(ctx, p, idleEvents); err != nil {
				return err
			}
			if err := s.settled(ctx, p); err != nil {
				return err
			}
			return i.quiet(ctx, w, func(used, now usage, seconds float64) {
				w.is("relay_core_percent", 100*(now.own-used.own)/seconds)
				if rss := residentMemory(); rss > 0 {
					w.is("relay_rss_mib", rss/(1<<20))
				}
			})
		})
		if err != nil {
			return err
		}
		c, err := s.count(ctx, idleEvents)
		if err != nil {
			return err
		}
		w.checked(c)
		return nil
	})
}

// quiet waits until earlier work has ended, then for the duration, and records what was used in that time.
func (i *idle) quiet(ctx context.Context, w *row, more func(used, now usage, seconds float64)) error {
	i.progress.count.Store(0)
	debug.FreeOSMemory() // frees the memory of earlier measurements
	if err := pause.For(ctx, max(idleWarm, i.c.Duration)); err != nil {
		return err
	}
	used, began := i.usage(ctx), time.Now()
	used.own = ownCPU() // after the reads, which take time themselves
	for left := i.c.Duration; left > 0; left = i.c.Duration - time.Since(began) {
		if err := pause.For(ctx, min(left, time.Second)); err != nil {
			return err
		}
		i.progress.add(1)
	}
	own, seconds := ownCPU(), time.Since(began).Seconds()
	now := i.usage(ctx)
	now.own = own
	for name, d := range map[string]float64{
		"postgres_core_percent": now.postgres - used.postgres,
		"redis_core_percent":    now.redis - used.redis,
	} {
		if d > 0 { // it is unknown for a remote server
			w.is(name, 100*d/seconds)
		}
	}
	w.is("wal_bytes_per_second", (now.wal-used.wal)/seconds)
	more(used, now, seconds)
	return nil
}

// residentMemory is this process' memory, in bytes; 0 if unknown.
func residentMemory() float64 {
	self, err := procfs.Self()
	if err != nil {
		return 0 // not Linux
	}
	s, err := self.Stat()
	if err != nil {
		return 0
	}
	return float64(s.ResidentMemory())
}
