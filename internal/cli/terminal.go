package cli

import (
	"io"
	"os"

	"golang.org/x/term"
)

// IsTerminal reports whether a file that is read or written is a terminal.
func IsTerminal(w any) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// Fit cuts a line to less than the columns of the terminal w: a line that wraps cannot be overwritten.
func Fit(w any, line string) string { return clip(line, width(w)) }

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

// Colours reports whether w wants them: a terminal, unless its user says otherwise (see no-color.org).
func Colours(w io.Writer) bool {
	return IsTerminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}
