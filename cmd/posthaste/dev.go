package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"posthaste/internal/app"
)

type devCmd struct {
	Group string `help:"Consumer group that the printed events are read with." default:"dev"`
}

// Run migrates, relays and prints events until a signal.
func (c devCmd) Run(ctx context.Context, e *env) error {
	config, log := e.config, e.config.Logger()
	config.MigrateFirst = true
	p, err := app.NewRelay(ctx, config, log)
	if err != nil {
		return err
	}
	fmt.Fprintf(e.Stderr, "Console: http://%s/console/\nEvents of every stream %s* follow. To insert one:\n"+
		"  INSERT INTO %s.outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', "+
		"'order.tried', '{}');\n", p.AdminAddr(), config.StreamPrefix, config.Schema)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.Run(ctx) })
	config.AdminAddr = "" // the relay serves it
	g.Go(func() error {
		return app.Consume(ctx, config, app.ConsumeOptions{
			Group: c.Group, ClaimIdle: 15 * time.Second,
		}, e.Stdout, log)
	})
	if err := g.Wait(); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
