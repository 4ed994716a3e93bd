package bench

import (
	"context"
	"fmt"
	"io"
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
	steps int
	// count is the number of events of the current step.
	count atomic.Int64

	mu    sync.Mutex
	at    int // the step under way, from 1
	name  string
	total int
	since time.Time

	stop context.CancelFunc
	done sync.WaitGroup
}

func newProgress(w io.Writer, steps int) *progress {
	p := &progress{Status: cli.NewStatus(w), steps: steps, began: time.Now()}
	var ctx context.Context
	ctx, p.stop = context.WithCancel(context.Background())
	p.done.Go(func() {
		for pause.For(ctx, time.Second) == nil {
			p.mu.Lock()
			p.Now("%s", p.line(false))
			p.mu.Unlock()
		}
	})
	return p
}

// step ends the current step and begins another one.
func (p *progress) step(name string, total int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.end()
	p.at, p.name, p.total, p.since = p.at+1, name, total, time.Now()
	p.count.Store(0)
}

// add adds events to the current step.
func (p *progress) add(n int) { p.count.Add(int64(n)) }

func (p *progress) end() {
	if p.at > 0 {
		p.Say("%s", p.line(true))
	}
}

// line describes the current step, its rate, and the remaining time of the benchmark if later steps take as long as the
// earlier ones.
func (p *progress) line(ended bool) string {
	n, took := p.count.Load(), time.Since(p.since)
	text := fmt.Sprintf("%*d/%d %-18s %9s", len(fmt.Sprint(p.steps)), p.at, p.steps, p.name, humanize.Comma(n))
	if p.total > 0 {
		text += " of " + humanize.Comma(int64(p.total))
	}
	behind := float64(p.at - 1)
	switch {
	case ended:
		text += fmt.Sprintf(" in %.1f s", took.Seconds())
		behind++
	case p.total > 0:
		behind += min(1, float64(n)/float64(p.total))
	}
	text += fmt.Sprintf(", %s/s", humanize.Comma(int64(float64(n)/took.Seconds())))
	if behind > 0 {
		left := time.Duration(float64(time.Since(p.began)) / behind * (float64(p.steps) - behind))
		text += fmt.Sprintf("; about %v left", left.Round(time.Second))
	}
	return text
}

// close ends the last step. It may be called again.
func (p *progress) close() {
	p.stop()
	p.done.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.end()
	p.at = 0
}
