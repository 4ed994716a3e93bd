package main

import (
	"context"

	"posthaste/internal/gendocs"
)

type genDocsCmd struct {
	Check bool   `help:"Only compare; fail if a file is not what would be written."`
	Dir   string `arg:"" default:"docs" help:"The folder."`
}

// Run writes or compares.
func (c genDocsCmd) Run(ctx context.Context, e *env) error {
	if c.Check {
		return gendocs.Check(ctx, c.Dir, e.model, e.config)
	}
	return gendocs.Write(ctx, c.Dir, e.model, e.config)
}
