package demo

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"posthaste/internal/app"
	"posthaste/internal/cli"
	"posthaste/internal/pause"
	"posthaste/outbox"
)

// Options of a demo.
type Options struct {
	Once     bool          `help:"Print a summary and exit instead of staying until Ctrl-C."`
	Rate     int           `help:"Orders per second under load." default:"200"`
	Duration time.Duration `help:"How long the load lasts." default:"9s"`
	PGBin    string        `name:"pg-bin" help:"Folder of the Postgres server's programs." env:"POSTHASTE_PG_BIN"`
	RedisBin string        `help:"The redis-server program." env:"POSTHASTE_REDIS_BIN"`
	Cluster  bool          `help:"Start a Redis Cluster, of three masters and three replicas, instead of one Redis."`
}

// Run starts servers, the API, the relay and a consumer, and shows events arriving. It stops and removes all of them
// before it returns. It fails if events were lost or duplicated.
func (options Options) Run(ctx context.Context, config app.Config, o cli.IO) (err error) {
	if options.Rate < 1 || options.Rate > 5000 || options.Duration < 3*time.Second {
		return cli.Usage("--rate must be 1 to 5000, --duration at least 3s")
	}
	d := &demo{
		out: o.Stdout, config: config, user: uuid.New(), sent: map[string]time.Time{}, seen: map[string]time.Time{},
		modes: map[outbox.Mode][]time.Duration{},
		log: slog.New(slog.NewTextHandler(o.Stderr, &slog.HandlerOptions{Level: max(config.LogLevel,
			slog.LevelWarn)})),
	}
	d.mode.Store(outbox.ModeStandby)
	defer d.cleanup()
	if err := d.start(ctx, options); err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	gctx, stop := context.WithCancel(gctx)
	defer func() {
		stop()
		// The process' error explains more than the cancellation that it caused.
		if werr := g.Wait(); werr != nil && (err == nil || errors.Is(err, context.Canceled)) &&
			!errors.Is(werr, context.Canceled) {
			err = werr
		}
	}()
	if err := d.processes(gctx, g); err != nil {
		return err
	}
	if err := d.story(gctx, options); err != nil {
		return err
	}
	if options.Once {
		return nil
	}
	fmt.Fprintf(d.out, "\nRunning until Ctrl-C. Try:\n  curl -s %s/relay\n  curl -s -X PUT %s/relay/mode -d "+
		"'{\"mode\":\"poll\"}'\n  curl -s %s/metrics | grep ^outbox_\n",
		d.adminURL(), d.adminURL(), d.adminURL())
	fmt.Fprintf(d.out,
		"  curl -s -X POST http://%s/orders -H 'Content-Type: application/json' -H 'Idempotency-Key: %s' "+
			"-d '{\"user_id\":\"%s\",\"amount\":1999,\"currency\":\"USD\"}'\n",
		d.serve.PublicAddr(), uuid.New(), d.user)
	fmt.Fprintf(d.out, "For posthaste status, doctor, trace and the others:\n  export POSTHASTE_POSTGRES_URL='%s'\n"+
		"  export POSTHASTE_REDIS_URL='%s'\n", d.config.PostgresURL, d.config.RedisURL)
	return d.keepRedis(gctx)
}

// keepRedis starts Redis again whenever it was killed, until ctx ends.
func (d *demo) keepRedis(ctx context.Context) error {
	redis := d.servers.Redis
	if redis != nil {
		fmt.Fprintf(d.out, "Now kill something, and watch the console:\n  kill -9 %d   # Redis\n", redis.PID())
	}
	for ; ctx.Err() == nil; pause.For(ctx, time.Second) {
		if redis == nil || redis.Running() {
			continue
		}
		fmt.Fprintln(d.out, "Redis was killed. It starts again in 5 s; until then, events wait in Postgres.")
		pause.For(ctx, 5*time.Second)
		if err := redis.Start(ctx); err != nil {
			return err
		}
		fmt.Fprintf(d.out, "Redis runs again: kill -9 %d\n", redis.PID())
	}
	return nil
}
