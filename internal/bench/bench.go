package bench

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/google/uuid"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/pause"
	"posthaste/outbox"
)

// step is one measurement of one repetition.
type step struct {
	name string
	// total is how many events or requests are expected; 0 if unknown.
	total int
	run   func(ctx context.Context) error
}

// benchmark runs the steps f.Runs times and prints the report. It returns ErrFound if the result is wrong.
func benchmark(
	ctx context.Context, c app.Config, o cli.IO, f Options, to Sink, r *report, steps func(b *session) []step,
) (err error) {
	if f.Runs < 1 {
		return cli.Usage("--runs must be at least 1")
	}
	if f.Cluster && f.External {
		return cli.Usage("--cluster is for the servers that it starts: with --external name the cluster in --redis-url")
	}
	id := uuid.New()
	b := &session{
		options: f, sink: to, config: c, report: r, name: hex.EncodeToString(id[:4]),
		log: slog.New(slog.NewTextHandler(o.Stderr, &slog.HandlerOptions{Level: max(c.LogLevel, slog.LevelWarn)})),
	}
	defer b.close()
	if err := b.open(ctx, o.Stderr); err != nil {
		return err
	}
	list := steps(b)
	b.progress = &progress{Status: cli.NewStatus(o.Stderr), began: time.Now()}
	for i := range f.Runs * len(list) {
		s := list[i%len(list)]
		if err := b.progress.step(ctx, s, i+1, f.Runs*len(list)); err != nil {
			if ctx.Err() != nil && !errors.Is(err, errLeft) {
				return errors.New("interrupted; everything it created was removed")
			}
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return r.finish(o, f.JSON)
}

// only returns the modes and loads that a flag selects.
func only[T ~string](flag string, all ...T) []T {
	if flag == "both" {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(v T) bool { return string(v) != flag })
}

// modes are the values of --mode.
var modes = []outbox.Mode{outbox.ModeCDC, outbox.ModePoll}

// progress shows a benchmark's progress on standard error: a line for each step and, on a terminal, one that changes.
type progress struct {
	*cli.Status
	began time.Time
	// count is the number of events of the current step.
	count atomic.Int64
}

// add adds events to the current step.
func (p *progress) add(n int) { p.count.Add(int64(n)) }

// step runs step number at, from 1, of so many.
func (p *progress) step(ctx context.Context, s step, at, steps int) error {
	began := time.Now()
	p.count.Store(0)
	line := func() string {
		n, took := p.count.Load(), time.Since(began)
		text := fmt.Sprintf("%*d/%d %-18s %9s", len(fmt.Sprint(steps)), at, steps, s.name, humanize.Comma(n))
		if s.total > 0 {
			text += " of " + humanize.Comma(int64(s.total))
		}
		left := time.Since(p.began) / time.Duration(at) * time.Duration(steps-at) // if the others take as long
		return text + fmt.Sprintf(" in %.1f s, %s/s; about %v left", took.Seconds(),
			humanize.Comma(int64(float64(n)/took.Seconds())), left.Round(time.Second))
	}
	ticking, stop := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		for pause.For(ticking, time.Second) == nil {
			p.Now("%s", line())
		}
	})
	err := s.run(ctx)
	stop()
	done.Wait()
	p.End()
	if err == nil {
		p.Say("%s", line())
	}
	return err
}
