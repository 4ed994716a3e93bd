package main

import (
	"context"
	"os"
	"path/filepath"

	"posthaste/internal/gendocs"
)

type genDocsCmd struct {
	Check bool   `help:"Only compare; fail if a file is not what would be written."`
	Man   bool   `help:"Write the manual page, and nothing else."`
	Dir   string `arg:"" default:"docs" help:"The folder."`
}

// Run writes or compares.
func (c genDocsCmd) Run(ctx context.Context, e *env) error {
	if c.Man {
		page := gendocs.Man(e.model, e.config.Version)
		//nolint:gosec // a public page
		return os.WriteFile(filepath.Join(c.Dir, "posthaste.1"), []byte(page), 0o644)
	}
	if c.Check {
		return gendocs.Check(ctx, c.Dir, e.model, e.config)
	}
	return gendocs.Write(ctx, c.Dir, e.model, e.config)
}

type completionCmd struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"The shell: bash, zsh or fish."`
}

// Run prints a script for the shell.
func (c completionCmd) Run(e *env) error { return gendocs.Completion(e.Stdout, c.Shell, e.model) }
