//go:build !windows

package main

import (
	"context"

	"posthaste/internal/app"
	"posthaste/internal/bench"
	"posthaste/internal/demo"
	"posthaste/internal/prove"
)

type benchCmd struct {
	Drain   bench.Drain   `cmd:""`
	Latency bench.Latency `cmd:""`
	Orders  bench.Orders  `cmd:""`
}

type (
	demoCmd  struct{ demo.Options }
	proveCmd struct{ prove.Options }
)

// proveConsumerCmd is the command of the consumer processes of a campaign.
type proveConsumerCmd struct{}

// Run consumes until a signal.
func (proveConsumerCmd) Run(ctx context.Context, config app.Config) error {
	return prove.Consume(ctx, config)
}
