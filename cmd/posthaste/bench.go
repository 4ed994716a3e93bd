package main

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/outbox"
)

type benchCmd struct {
	Drain   benchDrainCmd   `cmd:"" help:"Measure events per second, from the outbox to delivered and settled, beside what Postgres and Redis do alone."`
	Latency benchLatencyCmd `cmd:"" help:"Measure the time from a commit to the consumer at a fixed rate, beside a bare commit and a bare stream."`
	Orders  benchOrdersCmd  `cmd:"" help:"Measure POST /orders, with and without the guard, beside an empty handler and the bare transaction."`
}

// benchFlags are what every measurement takes.
type benchFlags struct {
	JSON     bool   `name:"json" help:"Print JSON instead of tables."`
	Runs     int    `help:"Repetitions; in each, limits and results take turns." default:"3"`
	External bool   `help:"Measure the servers of --postgres-url and --redis-url, in databases and streams of its own that it removes afterwards, instead of starting servers."`
	Dir      string `help:"Folder for the data of the servers it starts, on the disk to be measured. Default: the system's folder for temporary files."`
	PGBin    string `name:"pg-bin" help:"Folder of the Postgres server's programs." env:"POSTHASTE_PG_BIN"`
	RedisBin string `help:"The redis-server program." env:"POSTHASTE_REDIS_BIN"`
}

// bench is one `posthaste bench`. Everything it makes carries its name and is removed before it ends.
type bench struct {
	flags    benchFlags
	config   app.Config
	log      *slog.Logger
	progress *progress
	report   *report

	name   string // 8 hexadecimal digits
	scenes int
	dir    string
	owned  []func() // stop what this process started
	admin  *pgxpool.Pool
	redis  *redis.Client
}

// step is one measurement of one repetition.
type step struct {
	name string
	// total is how many events or requests it will see; 0 when that is not known.
	total int
	run   func(ctx context.Context) error
}

// errFound is what a benchmark fails with whose own result is wrong.
var errFound = errors.New("what was measured is not right: events or orders are missing, repeated or refused; please report this with the relay's log")

// errLeft means that something of a benchmark is still on the servers.
var errLeft = errors.New("left behind, drop it by hand")

// benchmark runs the steps so many times and prints the report. It fails if the result does not hold.
func (e *env) benchmark(ctx context.Context, f benchFlags, r *report, steps func(b *bench) []step) (err error) {
	if f.Runs < 1 {
		return cli.Usage("--runs must be at least 1")
	}
	id := uuid.New()
	b := &bench{
		flags: f, config: e.config, report: r, name: hex.EncodeToString(id[:4]),
		log: slog.New(slog.NewTextHandler(e.Stderr, &slog.HandlerOptions{Level: max(e.config.LogLevel, slog.LevelWarn)})),
	}
	defer b.close()
	if err := b.open(ctx, e.Stderr); err != nil {
		return cli.OneLine(err)
	}
	list := steps(b)
	b.progress = newProgress(e.Stderr, len(list)*f.Runs)
	defer b.progress.close()
	for range f.Runs {
		for _, s := range list {
			b.progress.step(s.name, s.total)
			if err := s.run(ctx); err != nil {
				if ctx.Err() != nil && !errors.Is(err, errLeft) {
					return errors.New("interrupted; what it had made is removed")
				}
				return cli.OneLine(fmt.Errorf("%s: %w", s.name, err))
			}
		}
	}
	b.progress.close()
	return r.finish(e, f.JSON)
}

// only returns the modes and loads that a flag selects.
func only[T ~string](flag string, all ...T) []T {
	if flag == "both" {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(v T) bool { return string(v) != flag })
}

// benchModes are what --mode chooses from.
var benchModes = []outbox.Mode{outbox.ModeCDC, outbox.ModePoll}
