package bench

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/cli"
)

// progress shows a benchmark's progress on standard error: on a terminal in one line that changes, elsewhere in one
// line per step.
type progress struct {
	w     io.Writer
	tty   bool
	began time.Time
	steps int
	// count is the number of events of the current step.
	count atomic.Int64

	mu    sync.Mutex
	at    int // the step under way, from 1
	name  string
	total int
	since time.Time

	stop chan struct{}
	once sync.Once
	done sync.WaitGroup
}

func newProgress(w io.Writer, steps int) *progress {
	p := &progress{w: w, tty: cli.IsTerminal(w), steps: steps, began: time.Now(), stop: make(chan struct{})}
	p.done.Go(func() {
		t := time.NewTicker(time.Second)
		defer t.Stop()
		for {
			select {
			case <-p.stop:
				return
			case <-t.C:
				p.mu.Lock()
				if p.tty {
					p.line("\r\x1b[K", "")
				}
				p.mu.Unlock()
			}
		}
	})
	return p
}

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
	switch {
	case p.at == 0:
	case p.tty:
		p.line("\r\x1b[K", "\n")
	default:
		p.line("", "\n")
	}
}

// line prints the current step, its rate, and the remaining time of the benchmark if later steps take as long as the
// earlier ones.
func (p *progress) line(before, after string) {
	if p.at == 0 {
		return
	}
	n, took := p.count.Load(), time.Since(p.since)
	text := fmt.Sprintf("%*d/%d %-18s %9s", len(fmt.Sprint(p.steps)), p.at, p.steps, p.name, humanize.Comma(n))
	if p.total > 0 {
		text += " of " + humanize.Comma(int64(p.total))
	}
	if after != "" {
		text += fmt.Sprintf(" in %.1f s", took.Seconds())
	}
	text += fmt.Sprintf(", %s/s", humanize.Comma(int64(float64(n)/took.Seconds())))
	behind := float64(p.at - 1)
	switch {
	case after != "":
		behind++
	case p.total > 0:
		behind += min(1, float64(n)/float64(p.total))
	}
	if behind > 0 {
		left := time.Duration(float64(time.Since(p.began)) / behind * (float64(p.steps) - behind))
		text += fmt.Sprintf("; about %v left", left.Round(time.Second))
	}
	if after == "" {
		text = cli.Fit(p.w, text)
	}
	fmt.Fprint(p.w, before+text+after)
}

// close ends the last step. It may be called again.
func (p *progress) close() {
	p.once.Do(func() {
		close(p.stop)
		p.done.Wait()
		p.mu.Lock()
		defer p.mu.Unlock()
		p.end()
	})
}
