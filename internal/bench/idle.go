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

// Run measures, and prints the report. It refuses options that cannot be measured by a usage error, and fails with
// ErrFound if what was measured is wrong.
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

// idle measures what is used while nothing happens.
type idle struct {
	*session
	c Idle
}

const (
	// idleEvents have been relayed before: connections are open, statements prepared, tables not empty.
	idleEvents = 1000
	// idleWarm is how long what they caused may take, at least. The rest of what is as long as a measurement is for
	// sessions: each prepares a statement when it is first asked, and plans it anew the first five times.
	idleWarm = 2 * time.Second
)

// servers measures Postgres and Redis with the same database, and no relay.
func (i *idle) servers(ctx context.Context) error {
	return i.in(ctx, func(ctx context.Context, s *scene) error {
		if err := s.write(ctx, idleEvents, 300, 1); err != nil {
			return err
		}
		w := i.report.limit("servers", "Postgres and Redis with the events in the outbox, and no relay")
		return i.quiet(ctx, w, func(usage, usage, float64) {})
	})
}

// relay measures the same with a relay that has nothing to do.
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

// quiet waits until what went before has ended, then for the duration, and notes what was used meanwhile.
func (i *idle) quiet(ctx context.Context, w *row, more func(used, now usage, seconds float64)) error {
	i.progress.count.Store(0)
	debug.FreeOSMemory() // what earlier measurements have left is none of this one's memory
	if err := pause.For(ctx, max(idleWarm, i.c.Duration)); err != nil {
		return err
	}
	used, began := i.usage(ctx), time.Now()
	used.own = ownCPU() // looking costs something, too
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
		if d > 0 { // what Postgres uses is not known of a server elsewhere
			w.is(name, 100*d/seconds)
		}
	}
	w.is("wal_bytes_per_second", (now.wal-used.wal)/seconds)
	more(used, now, seconds)
	return nil
}

// residentMemory is how much memory this process has, in bytes; 0 where that is not known.
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
