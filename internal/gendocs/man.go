package gendocs

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"
)

// Man returns the manual page of the program, posthaste(1), from the help texts in m.
func Man(m *kong.Application, version string) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".TH POSTHASTE 1 \"\" \"posthaste %s\"\n.SH NAME\nposthaste \\- %s\n.SH SYNOPSIS\n.B posthaste\n"+
		".I COMMAND\n[FLAGS]\n.SH COMMANDS\n", version, roff(m.Help))
	for _, n := range m.Leaves(true) {
		path := "posthaste " + n.Path()
		for _, p := range n.Positional {
			path += " [" + strings.ToUpper(p.Name) + "]"
		}
		fmt.Fprintf(&b, ".SS %s\n%s\n", roff(path), roff(n.Help))
		for _, f := range n.Flags {
			if !f.Hidden {
				manFlag(&b, f, "")
			}
		}
	}
	b.WriteString(".SH SETTINGS\nAll commands accept them, as flags or as variables. A flag beats the variable.\n")
	for _, f := range m.Flags {
		if f.Group != nil {
			manFlag(&b, f, " "+strings.Join(f.Envs, " "))
		}
	}
	return b.String()
}

func manFlag(b *strings.Builder, f *kong.Flag, more string) {
	fmt.Fprintf(b, ".TP\n.B %s\n%s\n", roff("--"+f.Name+more), roff(f.Help))
}

// roff escapes a line of text.
func roff(s string) string {
	s = strings.NewReplacer(`\`, `\e`, "-", `\-`, "\n", " ").Replace(s)
	if strings.HasPrefix(s, ".") || strings.HasPrefix(s, "'") {
		return `\&` + s
	}
	return s
}
