package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/term"
)

// tally says how far long work is: on a terminal in one line that is written over, elsewhere in a line now and then.
type tally struct {
	w        io.Writer
	terminal bool
	// total is how much there is to do, -1 if that is not known.
	total int64
	// n is how much is done, and first how much of that was done before this process began.
	n, first int64
	began    time.Time
	written  time.Time
	shown    bool
}

func newTally(w io.Writer, total, done int64) *tally {
	now := time.Now()
	return &tally{w: w, terminal: isTerminal(w), total: total, n: done, first: done, began: now, written: now}
}

func isTerminal(w any) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// width is how many columns a terminal has; 0 if it is none, or does not say.
func width(w any) int {
	if f, ok := w.(*os.File); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil {
			return n
		}
	}
	return 0
}

// clip cuts a line to less than so many columns: what wraps cannot be written over.
func clip(line string, columns int) string {
	if r := []rune(line); columns > 1 && len(r) >= columns {
		return string(r[:columns-1])
	}
	return line
}

// at notes that n is done now.
func (p *tally) at(n int64) {
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
		fmt.Fprint(p.w, "\r\x1b[K"+clip(p.line(), width(p.w)))
		p.shown = true
		return
	}
	fmt.Fprintln(p.w, p.line())
}

// done is how much is done.
func (p *tally) done() string {
	if p.total < 0 {
		return humanize.Comma(p.n) + " events"
	}
	return fmt.Sprintf("%s of %s events", humanize.Comma(p.n), humanize.Comma(p.total))
}

// line is how far the work is, how quick it was since it began, and how long the rest takes at that.
func (p *tally) line() string {
	took := time.Since(p.began)
	rate := float64(p.n-p.first) / max(took.Seconds(), 0.001)
	s := humanize.Comma(p.n)
	if p.total >= 0 {
		s += fmt.Sprintf(" of %s (%d %%)", humanize.Comma(p.total), 100*p.n/max(p.total, 1))
	}
	s += fmt.Sprintf(", %s/s", humanize.Comma(int64(rate)))
	if p.total > p.n && rate > 0 {
		left := time.Duration(float64(p.total-p.n) / rate * float64(time.Second))
		s += ", " + rough(left) + " left"
	}
	return s
}

// say writes a line beside the progress.
func (p *tally) say(format string, args ...any) {
	p.end()
	fmt.Fprintf(p.w, format+"\n", args...)
}

// end leaves the line that is written over.
func (p *tally) end() {
	if p.shown {
		fmt.Fprint(p.w, "\r\x1b[K")
		p.shown = false
	}
}
