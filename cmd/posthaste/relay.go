package main

import (
	"context"
	"errors"

	"posthaste/internal/app"
)

type relayCmd struct {
	Migrate bool ` env:"POSTHASTE_MIGRATE"`
}

// Run relays until a signal.
func (c relayCmd) Run(ctx context.Context, e *env) error {
	defer app.OneProcessor()()
	e.config.MigrateFirst = c.Migrate
	p, err := app.NewRelay(ctx, e.config, e.config.Logger())
	if err != nil {
		return err
	}
	err = p.Run(ctx)
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
