package app

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"posthaste/internal/cli"
)

// Dev is the command that runs all that a developer needs.
type Dev struct {
	Group string `help:"Consumer group that the printed events are read with." default:"dev"`
}

// Run migrates, relays and prints events until a signal.
func (d Dev) Run(ctx context.Context, config Config, o cli.IO) error {
	log := config.Logger()
	config.MigrateFirst = true
	p, err := NewRelay(ctx, config, log)
	if err != nil {
		return err
	}
	_, _ = fmt.Fprintf(o.Stderr, "Console: http://%s/console/\nEvents of every stream %s* follow. To insert one:\n"+
		"  INSERT INTO %s.outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', "+
		"'order.tried', '{}');\n", p.AdminAddr(), config.StreamPrefix, config.Schema)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.Run(ctx) })
	config.AdminAddr = "" // the relay serves it
	g.Go(func() error {
		return Consume{Group: d.Group, ClaimIdle: 15 * time.Second}.Run(ctx, config, o)
	})
	if err := g.Wait(); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
