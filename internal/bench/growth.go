package bench

import (
	"context"
	"fmt"
	"os"
	"runtime/debug"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/prometheus/procfs"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/outbox"
)

// Growth measures whether a relay gets slower, or larger, with its backlog, its payloads, or its streams.
type Growth struct {
	Options

	// Max is the largest backlog. The smallest has 10,000 events, or Max if that is less; each next is ten times as
	// large.
	Max int
	// Events is how many events a measurement of payloads and of streams has.
	Events int
}

// Run measures and prints the report. It returns a usage error for options that cannot be measured, and ErrFound if
// the result is wrong.
func (c Growth) Run(ctx context.Context, config app.Config, o cli.IO) error {
	if c.Max < 1 || c.Max > 1e8 || c.Events < 1 {
		return cli.Usage("--events must be at least 1, --max from 1 to 100000000")
	}
	r := &report{
		Bench: "growth", Settings: map[string]any{
			"max": c.Max, "events": c.Events, "size": growthSize, "window": config.Window,
			"sweep_workers": config.SweepWorkers,
		},
		columns: []column{
			{"published_per_second", "published/s", 0},
			{"settled_per_second", "settled/s", 0},
			{"payload_mib_per_second", "MiB/s", 1},
			{"relay_cpu_us", "relay µs", 1},
			{"postgres_cpu_us", "postgres µs", 1},
			{"redis_cpu_us", "redis µs", 1},
			{"relay_peak_rss_mib", "peak RSS MiB", 0},
		},
	}
	return benchmark(ctx, config, o, c.Options, r, func(b *session) (steps []step) {
		for _, group := range c.groups() {
			for _, of := range group {
				g := &growth{session: b, of: of, first: group[0].name}
				steps = append(steps, step{of.name, of.events, g.measure})
			}
		}
		return steps
	})
}

type backlog struct {
	name                  string
	events, size, streams int
}

const (
	// growthSize is the bytes of a payload where payloads do not grow, growthBytes the bytes of all payloads of a
	// backlog where they do.
	growthSize  = 300
	growthBytes = 256 << 20
)

// groups returns the measurements. Those of a group differ in one respect.
func (c Growth) groups() [3][]backlog {
	var all [3][]backlog
	for n := min(c.Max, 10_000); n <= c.Max; n *= 10 {
		all[0] = append(all[0], backlog{humanize.Comma(int64(n)) + " events", n, growthSize, 1})
	}
	for size := 100; size <= 100_000; size *= 10 {
		name := humanize.Comma(int64(size)) + " bytes"
		all[1] = append(all[1], backlog{name, min(c.Events, growthBytes/size), size, 1})
	}
	for streams := 1; streams <= 64; streams *= 8 {
		name := fmt.Sprintf("%d streams", streams)
		if streams == 1 {
			name = "1 stream"
		}
		all[2] = append(all[2], backlog{name, c.Events, growthSize, streams})
	}
	return all
}

// growth compares one backlog with the first of its group.
type growth struct {
	*session
	of    backlog
	first string
}

// measure lets a relay drain the backlog.
func (g *growth) measure(ctx context.Context) error {
	return g.in(ctx, func(ctx context.Context, s *scene) error {
		s.streams = g.of.streams
		const bytes = 1 << 20 // of a transaction
		if err := s.write(ctx, g.of.events, g.of.size, min(500, max(1, bytes/g.of.size))); err != nil {
			return err
		}
		w := g.report.result(g.of.name, "from the relay's start until all is settled; memory is the most that this "+
			"process had meanwhile")
		peaks := resetPeak()
		d := &drain{session: g.session, c: Drain{Events: g.of.events}}
		used, began := g.usage(ctx), time.Now()
		err := s.relayed(ctx, outbox.ModeCDC, func(ctx context.Context, p *app.Relay) error {
			_, err := d.empties(ctx, s, p, w, used, began)
			return err
		})
		if err != nil {
			return err
		}
		w.is("payload_mib_per_second", w.last("published_per_second")*float64(g.of.size)/(1<<20))
		if rss := peakMemory(); peaks && rss > 0 {
			w.is("relay_peak_rss_mib", rss/(1<<20))
		}
		c, err := s.count(ctx, g.of.events)
		if err != nil {
			return err
		}
		w.checked(c)
		g.compare(w)
		return nil
	})
}

// compare records ratios to the first of the group.
func (g *growth) compare(w *row) {
	first := g.report.result(g.first, "")
	if w == first {
		return
	}
	for name, what := range map[string]string{
		"settled_per_second": "events/s", "relay_cpu_us": "relay µs", "relay_peak_rss_mib": "peak RSS",
	} {
		if base, v := first.median(name), w.median(name); base > 0 && v > 0 {
			w.Ratios[what+" of "+g.first] = v / base
		}
	}
}

// resetPeak resets the kernel's record of this process' peak memory. It reports whether it succeeded.
func resetPeak() bool {
	debug.FreeOSMemory() // frees the memory of earlier measurements
	return os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) == nil
}

// peakMemory is this process' peak memory since the reset, in bytes; 0 if unknown.
func peakMemory() float64 {
	self, err := procfs.Self()
	if err != nil {
		return 0 // not Linux
	}
	s, err := self.NewStatus()
	if err != nil {
		return 0
	}
	return float64(s.VmHWM)
}
