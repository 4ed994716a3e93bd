package prove

import (
	"fmt"
	"io"
	"sync"
	"time"

	"posthaste/internal/cli"
)

// progress reports the campaign's progress on standard error; a terminal also gets a status line.
type progress struct {
	w     io.Writer
	tty   bool
	total time.Duration

	mu    sync.Mutex
	until time.Time
	shown bool
}

func newProgress(w io.Writer, total time.Duration) *progress {
	return &progress{w: w, tty: cli.IsTerminal(w), total: total}
}

// begin starts the clock.
func (p *progress) begin(end time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.until = end
}

// left returns the remaining time.
func (p *progress) left() string {
	if p.until.IsZero() {
		return p.total.String() + " to come"
	}
	if d := time.Until(p.until); d > 0 {
		return d.Round(time.Second).String() + " left"
	}
	return "ending"
}

// round reports a finished round.
func (p *progress) round(r *played) {
	p.say("%4d %-9s %-44s recovered in %6.1f s; %s", r.Round, r.Mode, r.names(),
		r.Recovered.Sub(r.Healed).Seconds(), p.left())
}

// say prints a message on its own line.
func (p *progress) say(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
	fmt.Fprintf(p.w, format+"\n", args...)
}

// now updates the status line.
func (p *progress) now(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.tty {
		return
	}
	fmt.Fprint(p.w, "\r\x1b[K"+cli.Fit(p.w, fmt.Sprintf(format, args...)+"; "+p.left()))
	p.shown = true
}

func (p *progress) clear() {
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.shown = false
	}
}

// end removes the status line.
func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clear()
}
