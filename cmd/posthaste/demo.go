//go:build !windows

package main

import (
	"context"
	"time"

	"posthaste/internal/demo"
)

type demoCmd struct {
	Once     bool          `help:"Print a summary and exit instead of staying until Ctrl-C."`
	Rate     int           `help:"Orders per second under load." default:"200"`
	Duration time.Duration `help:"How long the load lasts." default:"9s"`
	PGBin    string        `name:"pg-bin" help:"Folder of the Postgres server's programs." env:"POSTHASTE_PG_BIN"`
	RedisBin string        `help:"The redis-server program." env:"POSTHASTE_REDIS_BIN"`
	Cluster  bool          `help:"Start a Redis Cluster, of three masters and three replicas, instead of one Redis."`
}

// Run shows the product at work.
func (c demoCmd) Run(ctx context.Context, e *env) error {
	return demo.Run(ctx, e.config, e.IO, demo.Options(c))
}
