package main

import (
	"context"

	"posthaste/internal/app"
)

type serveCmd struct{}

// Run serves until a signal.
func (serveCmd) Run(ctx context.Context, e *env) error {
	p, err := app.NewServe(ctx, e.config, e.config.Logger())
	if err != nil {
		return err
	}
	return p.Run(ctx)
}
