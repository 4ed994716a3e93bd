//go:build !windows

package main

import (
	"context"
	"time"

	"posthaste/internal/bench"
)

type benchCmd struct {
	Drain   benchDrainCmd   `cmd:"" help:"Measure events per second, from the outbox to delivered and settled, and compare it with Postgres and Redis alone."`
	Latency benchLatencyCmd `cmd:"" help:"Measure the time from a commit to the consumer at fixed rates, and processor time per event, and compare them with a commit alone and a stream alone."`
	Orders  benchOrdersCmd  `cmd:"" help:"Measure POST /orders, with and without the guard, and compare it with an empty handler and the transaction alone."`
}

// benchFlags are the flags of every measurement.
type benchFlags struct {
	JSON     bool   `name:"json" help:"Print JSON instead of tables."`
	Runs     int    `help:"Repetitions; in each, limits and results take turns." default:"3"`
	External bool   `help:"Measure the servers of --postgres-url and --redis-url, in separate databases and streams that it removes afterwards, instead of starting servers."`
	Dir      string `help:"Folder for the data of the servers it starts, on the disk to be measured. Default: the system's folder for temporary files."`
	PGBin    string `name:"pg-bin" help:"Folder of the Postgres server's programs." env:"POSTHASTE_PG_BIN"`
	RedisBin string `help:"The redis-server program." env:"POSTHASTE_REDIS_BIN"`
	Cluster  bool   `help:"Start a Redis Cluster, of three masters and three replicas, instead of one Redis."`
}

type benchDrainCmd struct {
	benchFlags
	Events      int    `help:"Events of one measurement." default:"20000"`
	Size        int    `help:"Bytes of an event's payload." default:"300"`
	Transaction int    `help:"Events of one transaction." default:"1"`
	Streams     int    `help:"Streams that the events take turns in." default:"1"`
	Mode        string `help:"cdc, poll or both." enum:"cdc,poll,both" default:"both"`
	Load        string `help:"backlog (the events are there when the relay starts), stream (they are written while it runs) or both." enum:"backlog,stream,both" default:"both"`
}

func (c benchDrainCmd) Run(ctx context.Context, e *env) error {
	return bench.Drain{
		Options: bench.Options(c.benchFlags), Events: c.Events, Size: c.Size, Transaction: c.Transaction,
		Streams: c.Streams, Mode: c.Mode, Load: c.Load,
	}.Run(ctx, e.config, e.IO)
}

type benchLatencyCmd struct {
	benchFlags
	Rate     []float64     `help:"Commits per second; several, separated by commas, are measured one after the other. 0 measures the resources that an idle relay, Postgres and Redis use." default:"200"`
	Duration time.Duration `help:"How long each measurement lasts." default:"5s"`
	Size     int           `help:"Bytes of an event's payload." default:"300"`
	Mode     string        `help:"cdc, poll or both." enum:"cdc,poll,both" default:"both"`
	Hold     time.Duration `help:"Measure beside a transaction that has been open for this long, while events are written at the rate; 0 for none." default:"0"`
}

func (c benchLatencyCmd) Run(ctx context.Context, e *env) error {
	return bench.Latency{
		Options: bench.Options(c.benchFlags), Rates: c.Rate, Duration: c.Duration, Size: c.Size, Mode: c.Mode,
		Hold: c.Hold,
	}.Run(ctx, e.config, e.IO)
}

type benchOrdersCmd struct {
	benchFlags
	Concurrency int           `help:"Clients, each of which posts again as soon as it is answered." default:"16"`
	Rate        float64       `help:"Requests per second at fixed times instead, which shows latency; 0 for as many as the clients can." default:"0"`
	Duration    time.Duration `help:"How long each measurement lasts." default:"5s"`
	Repeat      int           `help:"Requests of a hundred that repeat an earlier key." default:"10"`
}

func (c benchOrdersCmd) Run(ctx context.Context, e *env) error {
	return bench.Orders{
		Options: bench.Options(c.benchFlags), Concurrency: c.Concurrency, Rate: c.Rate, Duration: c.Duration,
		Repeat: c.Repeat,
	}.Run(ctx, e.config, e.IO)
}
