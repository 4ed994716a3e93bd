package cli

import (
	"io"
	"os"

	"golang.org/x/term"
)

// IsTerminal reports whether w, a reader or writer, is a terminal.
func IsTerminal(w any) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// Fit cuts a line to less than the columns of the terminal w: a wrapped line cannot be overwritten.
func Fit(w any, line string) string { return clip(line, width(w)) }

// width is the number of a terminal's columns; 0 if unknown.
func width(w any) int {
	if f, ok := w.(*os.File); ok {
		if n, _, err := term.GetSize(int(f.Fd())); err == nil {
			return n
		}
	}
	return 0
}

func clip(line string, columns int) string {
	if r := []rune(line); columns > 1 && len(r) >= columns {
		return string(r[:columns-1])
	}
	return line
}

// Colours reports whether to write colours to w: to a terminal, unless NO_COLOR is set (see no-color.org).
func Colours(w io.Writer) bool {
	return IsTerminal(w) && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}
