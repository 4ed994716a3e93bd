package main

import (
	"fmt"

	"posthaste/internal/cli"
)

type settingsCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Run prints the settings, without secrets.
func (c settingsCmd) Run(e *env) error {
	list := e.settings.Effective(e.model, e.config)
	if c.JSON {
		return e.JSON(list)
	}
	t := cli.Table(e.Stdout)
	group := ""
	for _, s := range list {
		if s.Group != group {
			group = s.Group
			fmt.Fprintf(t, "\n%s\n", group)
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\n", s.Variable, cli.Short(s.Value, 80), s.From)
	}
	return t.Flush()
}
