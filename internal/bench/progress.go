package bench

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/cli"
	"posthaste/internal/pause"
)

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
