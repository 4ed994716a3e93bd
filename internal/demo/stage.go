package demo

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/consumer"
	"posthaste/internal/app"
	"posthaste/internal/lab/local"
	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

// demo is everything a demo runs.
type demo struct {
	out     io.Writer
	log     *slog.Logger
	config  app.Config
	servers *local.Servers
	pool    *pgxpool.Pool
	client  redis.UniversalClient
	serve   *app.Serve
	relay   *app.Relay
	user    uuid.UUID

	posted atomic.Int64
	mu     sync.Mutex
	sent   map[string]time.Time // order id -> when its POST was sent; only orders answered with 201
	seen   map[string]time.Time // order id -> when the consumer received it
	modes  map[outbox.Mode][]time.Duration
	mode   atomic.Value // outbox.Mode, as last read
}

func (d *demo) adminURL() string { return "http://" + d.relay.AdminAddr().String() }

// start starts Postgres and Redis on free ports, and migrates.
func (d *demo) start(ctx context.Context, o Options) (err error) {
	began := time.Now()
	d.servers, err = local.Open(ctx, local.ServersOptions{
		Name: "demo", PGBin: o.PGBin, RedisBin: o.RedisBin, Cluster: o.Cluster,
		Settings: []string{"max_slot_wal_keep_size=4GB"},
	})
	if err != nil {
		return err
	}
	d.config.PostgresURL, d.config.RedisURL = d.servers.Postgres.URL("postgres"), d.servers.RedisURL()
	d.config.HTTPAddr, d.config.AdminAddr = "127.0.0.1:0", "127.0.0.1:0"
	fmt.Fprintf(d.out, "Postgres on port %d and Redis on %s, started in %v\n  %s\n", d.servers.Postgres.Port,
		d.redisPorts(), time.Since(began).Round(10*time.Millisecond), d.config.PostgresURL)
	if _, err := sql.Migrate(ctx, d.config.PostgresURL, d.config.Schema, d.log); err != nil {
		return err
	}
	poolConfig, err := sql.PoolConfig(d.config.PostgresURL, d.config.Schema, "demo")
	if err != nil {
		return err
	}
	if d.pool, err = pgxpool.NewWithConfig(ctx, poolConfig); err != nil {
		return err
	}
	d.client, err = d.config.ReaderClient(ctx)
	return err
}

// redisPorts describes the ports of Redis.
func (d *demo) redisPorts() string {
	if d.servers.Cluster == nil {
		return fmt.Sprintf("port %d", d.servers.Redis.Port)
	}
	ports := make([]string, len(d.servers.Cluster.Nodes))
	for i, n := range d.servers.Cluster.Nodes {
		ports[i] = strconv.Itoa(n.Port)
	}
	return "ports " + strings.Join(ports[:3], ", ") + " (replicas: " + strings.Join(ports[3:], ", ") + ")"
}

// processes starts the API, the relay and a consumer.
func (d *demo) processes(ctx context.Context, g *errgroup.Group) (err error) {
	if d.serve, err = app.NewServe(ctx, d.config, d.log); err != nil {
		return err
	}
	if d.relay, err = app.NewRelay(ctx, d.config, d.log); err != nil {
		return err
	}
	g.Go(func() error { return d.serve.Run(ctx) })
	g.Go(func() error { return d.relay.Run(ctx) })
	g.Go(func() error { return d.watchMode(ctx) })
	c, err := consumer.New(consumer.Options{
		Client: d.client, Group: "demo", Streams: []string{d.config.StreamPrefix + "order"}, Handler: d.arrived,
		DrainTimeout: time.Second, Logger: d.log,
	})
	if err != nil {
		return err
	}
	g.Go(func() error { return c.Run(ctx) })
	fmt.Fprintf(d.out, "API on http://%s, relay and its metrics on %s\nConsole: %s/console/\n\n", d.serve.PublicAddr(),
		d.adminURL(), d.adminURL())
	return nil
}

// arrived is the consumer's handler.
func (d *demo) arrived(_ context.Context, ev consumer.Event) error {
	now := time.Now()
	mode, _ := d.mode.Load().(outbox.Mode)
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, again := d.seen[ev.Subject]; again {
		return nil // the streams are counted at the end; this only measures times
	}
	d.seen[ev.Subject] = now
	if at, ok := d.sent[ev.Subject]; ok {
		d.modes[mode] = append(d.modes[mode], now.Sub(at))
	}
	return nil
}

func (d *demo) watchMode(ctx context.Context) error {
	for ctx.Err() == nil {
		d.mode.Store(d.relay.Status().Mode)
		pause.For(ctx, 20*time.Millisecond)
	}
	return nil
}

// cleanup stops the servers and removes their folder.
func (d *demo) cleanup() {
	if d.client != nil {
		_ = d.client.Close()
	}
	if d.pool != nil {
		d.pool.Close()
	}
	d.servers.Close()
}
