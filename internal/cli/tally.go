package cli

import (
	"fmt"
	"io"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/internal/ops"
)

// Tally reports the progress of long work: on a terminal in one line that it overwrites, elsewhere in a line from
// time to time. It is not safe for concurrent use.
type Tally struct {
	*Status
	// total is the amount of work, -1 if unknown.
	total int64
	// n is how much is done; first is how much of it was done before this process began.
	n, first int64
	began    time.Time
	written  time.Time
}

// NewTally begins to report on w, with done of total already done; total is -1 if unknown.
func NewTally(w io.Writer, total, done int64) *Tally {
	now := time.Now()
	return &Tally{Status: NewStatus(w), total: total, n: done, first: done, began: now, written: now}
}

// At sets the work that is done, and shows it if it is time.
func (p *Tally) At(n int64) {
	p.n = n
	every := 10 * time.Second
	if p.terminal {
		every = 200 * time.Millisecond
	}
	if time.Since(p.written) < every {
		return
	}
	p.written = time.Now()
	if p.terminal {
		p.Now("%s", p.line())
		return
	}
	p.Say("%s", p.line())
}

// Done returns how much is done, in words.
func (p *Tally) Done() string {
	if p.total < 0 {
		return ops.CountOf(p.n, "event")
	}
	return fmt.Sprintf("%s of %s events", humanize.Comma(p.n), humanize.Comma(p.total))
}

// line formats the progress, the rate since the start, and the remaining time at that rate.
func (p *Tally) line() string {
	took := time.Since(p.began)
	rate := float64(p.n-p.first) / max(took.Seconds(), 0.001)
	s := humanize.Comma(p.n)
	if p.total >= 0 {
		s += fmt.Sprintf(" of %s (%d %%)", humanize.Comma(p.total), 100*p.n/max(p.total, 1))
	}
	s += fmt.Sprintf(", %s/s", humanize.Comma(int64(rate)))
	if p.total > p.n && rate > 0 {
		left := time.Duration(float64(p.total-p.n) / rate * float64(time.Second))
		s += ", " + ops.Rough(left) + " left"
	}
	return s
}
