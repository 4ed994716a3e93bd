package ops

import (
	"fmt"
	"regexp"
	"strings"
	"time"
	"unicode"

	"github.com/dustin/go-humanize"
)

// Rough formats a duration for a table or a line: its two largest units.
func Rough(d time.Duration) string {
	switch {
	case d <= 0:
		return "-"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 24*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%02dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}

// span formats a duration for a sentence.
func span(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.0f h", d.Hours())
	default:
		return fmt.Sprintf("%.0f days", d.Hours()/24)
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// Size formats a number of bytes.
func Size(n int64) string { return humanize.IBytes(uint64(max(n, 0))) }

// CountOf formats a number of things: "1 event", "2 events".
func CountOf(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	if stem, ok := strings.CutSuffix(what, "ry"); ok {
		return humanize.Comma(n) + " " + stem + "ries"
	}
	return humanize.Comma(n) + " " + what + "s"
}

// OneLine folds an error's text into one line: the connection library lists its attempts on several.
func OneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }

// plainStart matches a text whose first word is no name of a setting, a key, a host or a command.
var plainStart = regexp.MustCompile(`^[a-z]+(?:[ ,;]|$)`)

func sentence(s string) string {
	s = strings.TrimSpace(s)
	if s == "" {
		return ""
	}
	if plainStart.MatchString(s) && !strings.HasPrefix(s, "posthaste ") {
		s = strings.ToUpper(s[:1]) + s[1:]
	}
	if !strings.HasSuffix(s, ".") {
		s += "."
	}
	return s
}

// Printable makes external text (an aggregate id, the name of a group, the error of a handler) safe for a line of
// output: the result can neither break the line nor control the terminal.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, s)
}
