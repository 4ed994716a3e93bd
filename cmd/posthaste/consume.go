package main

import (
	"context"
	"time"

	"posthaste/internal/app"
	"posthaste/internal/cli"
)

type consumeCmd struct {
	Group     string        `help:"Consumer group; a new one starts at the first entry." required:""`
	Stream    []string      `help:"Full stream name; may be repeated. Default: all streams with the prefix." sep:"none"`
	Consumer  string        `help:"Name of this consumer within the group. Default: a unique name."`
	Ordered   bool          `help:"Keep the order per subject over all consumers: one at a time reads a stream."`
	ClaimIdle time.Duration `help:"Silence after which another consumer's entries are taken over." default:"15s"`
}

// Run prints events until a signal.
func (c consumeCmd) Run(ctx context.Context, e *env) error {
	if c.ClaimIdle <= 0 {
		return cli.Usage("--claim-idle must be positive")
	}
	o := app.ConsumeOptions{
		Group: c.Group, Consumer: c.Consumer, Streams: c.Stream, Ordered: c.Ordered, ClaimIdle: c.ClaimIdle,
	}
	return app.Consume(ctx, e.config, o, e.Stdout, e.config.Logger())
}
