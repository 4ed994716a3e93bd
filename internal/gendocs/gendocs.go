package gendocs

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/alecthomas/kong"

	"posthaste/internal/app"
)

// Options is the command that writes the pages.
type Options struct {
	Check bool   `help:"Only compare; fail if a file is not what would be written."`
	Man   bool   `help:"Write the manual page, and nothing else."`
	Dir   string `arg:"" default:"docs" help:"The folder."`
}

// Run writes or compares the reference of the settings and commands in m, and that of the metrics of the processes with
// the configuration c.
func (o Options) Run(ctx context.Context, c app.Config, m *kong.Application) error {
	if o.Man {
		return o.write("posthaste.1", Man(m, c.Version))
	}
	metrics, err := metricsReference(ctx, c)
	if err != nil {
		return err
	}
	do := o.write
	if o.Check {
		do = o.compare
	}
	return errors.Join(do("configuration.md", reference(m)), do("metrics.md", metrics))
}

func (o Options) write(name, text string) error {
	return os.WriteFile(filepath.Join(o.Dir, name), []byte(text), 0o644) //nolint:gosec // a public page
}

// compare fails if a page differs from text.
func (o Options) compare(name, text string) error {
	file := filepath.Join(o.Dir, name)
	have, err := os.ReadFile(file)
	if err == nil && string(have) != text {
		err = errors.New(file + " is out of date: run make docs")
	}
	return err
}

// configurationIntro is the beginning of docs/configuration.md.
//
//go:embed configuration.txt
var configurationIntro string

// reference is docs/configuration.md.
func reference(m *kong.Application) string {
	var b strings.Builder
	b.WriteString(configurationIntro)
	group := ""
	for _, f := range m.Flags {
		if f.Group == nil {
			continue
		}
		if f.Group.Title != group {
			group = f.Group.Title
			b.WriteString("| **" + group + "** | | | |\n")
		}
		def := "–"
		if f.HasDefault && f.Default != "" {
			def = "`" + f.Default + "`"
		} else if f.PlaceHolder != "" {
			def = "`" + f.PlaceHolder + "`"
		}
		fmt.Fprintf(&b, "| `%s` | `--%s` | %s | %s |\n", f.Envs[0], f.Name, def, cell(f.Help))
	}
	b.WriteString("\n## Commands\n\n| command | does |\n|---|---|\n")
	for _, n := range m.Leaves(true) {
		text := "posthaste " + n.Path()
		add := func(argument string, required bool) {
			if !required {
				argument = "[" + argument + "]"
			}
			text += " " + argument
		}
		for _, f := range n.Flags {
			flag := "--" + f.Name
			if !f.IsBool() {
				flag += "=" + strings.ToUpper(f.Name)
			}
			add(flag, f.Required)
		}
		for _, p := range n.Positional {
			add(strings.ToUpper(p.Name), p.Required)
		}
		fmt.Fprintf(&b, "| `%s` | %s |\n", text, cell(n.Help))
	}
	return b.String()
}

// cell escapes text for a table's cell.
func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }
