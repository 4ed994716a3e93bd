package cli

import (
	"fmt"
	"io"
	"sync"
)

// Status writes lines and, on a terminal, one more below them, which it overwrites. It is safe for concurrent use.
type Status struct {
	w        io.Writer
	terminal bool

	mu    sync.Mutex
	shown bool
}

// NewStatus returns a Status that writes to w.
func NewStatus(w io.Writer) *Status { return &Status{w: w, terminal: IsTerminal(w)} }

// Say writes a line that stays.
func (s *Status) Say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
	fmt.Fprintf(s.w, format+"\n", args...)
}

// Now replaces the line that is overwritten, as far as it fits. It writes nothing if there is no terminal.
func (s *Status) Now(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.terminal {
		fmt.Fprint(s.w, "\r\x1b[K"+Fit(s.w, fmt.Sprintf(format, args...)))
		s.shown = true
	}
}

// End removes the line that is overwritten. More may follow.
func (s *Status) End() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end()
}

func (s *Status) end() {
	if s.shown {
		fmt.Fprint(s.w, "\r\x1b[K")
		s.shown = false
	}
}
