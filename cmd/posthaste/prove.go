//go:build !windows

package main

import (
	"context"
	"time"

	"posthaste/internal/prove"
)

type proveCmd struct {
	Seed     uint64        `help:"Repeats the plan of a campaign; 0 chooses one." default:"0"`
	Duration time.Duration `help:"How long faults are injected; start and verification come on top." default:"10m"`
	Faults   string        `help:"Names of faults, separated by commas, with * for a family (redis-*); all for all of them." default:"all"`
	Relays   int           `help:"How many relays run." default:"2"`
	Rate     int           `help:"Events per second." default:"300"`
	JSON     bool          `name:"json" help:"Print JSON instead of tables."`
	Report   string        `help:"Folder for the report as JSON and Markdown, its chart, and the logs of the processes."`
	External bool          `help:"Play on the servers of --postgres-url and --redis-url: in a database of Postgres that it makes and removes, and in a database of Redis that has to be empty, and is emptied; with the faults that need no hand on the servers."`
	Yes      bool          `help:"Do not ask before playing on these servers."`
	Dir      string        `help:"Folder for the data of the servers it starts. Default: the system's folder for temporary files."`
	PGBin    string        `name:"pg-bin" help:"Folder of the Postgres server's programs." env:"POSTHASTE_PG_BIN"`
	RedisBin string        `help:"The redis-server program." env:"POSTHASTE_REDIS_BIN"`
}

// Run injects faults and verifies.
func (c proveCmd) Run(ctx context.Context, e *env) error {
	return prove.Run(ctx, e.config, e.IO, prove.Options(c))
}

// proveConsumerCmd is the command of the consumer processes of a campaign.
type proveConsumerCmd struct{}

// Run consumes until a signal.
func (proveConsumerCmd) Run(ctx context.Context, e *env) error {
	return prove.Consume(ctx, e.config)
}
