package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/cli"
	"posthaste/internal/local"
	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

// bench is the servers, and what every measurement needs.
type bench struct {
	options
	servers   *local.Servers
	admin     *pgxpool.Pool
	redis     *redis.Client
	bin, self string
	scenes    int
}

// measure starts the servers, measures every load with every peer, and prints the report.
func measure(ctx context.Context, c options, o cli.IO) error {
	b := &bench{options: c}
	defer b.close()
	if err := b.open(ctx); err != nil {
		return err
	}
	r, err := b.describe(ctx)
	if err != nil {
		return err
	}
	loads := loadsOf(c)
	began, done, total := time.Now(), 0, c.rounds*len(loads)*len(c.peers)
	for round := range c.rounds {
		for _, l := range loads {
			found := map[string]figures{}
			for n := range c.peers {
				p := c.peers[(n+round)%len(c.peers)]
				done++
				if l.backlog && p.command == nil {
					continue // nothing to measure
				}
				at := time.Now()
				if found[p.name], err = b.once(ctx, p, l); err != nil {
					return fmt.Errorf("%s, %s: %w", l.name, p.name, err)
				}
				left := time.Since(began) / time.Duration(done) * time.Duration(total-done)
				fmt.Fprintf(o.Stderr, "%d/%d round %d, %s, %s: %.1f s; about %v left\n", done, total, round+1, l.name,
					p.name, time.Since(at).Seconds(), left.Round(time.Second))
			}
			r.add(l, c.peers, found)
		}
	}
	if c.json {
		return o.JSON(r)
	}
	return r.print(o.Stdout)
}

// open starts the servers, which keep their data as in production.
func (b *bench) open(ctx context.Context) (err error) {
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	if _, err := os.Stat(b.posthaste); err != nil {
		return fmt.Errorf("no program posthaste: run make build, or name it in --posthaste: %w", err)
	}
	if b.bin, err = local.PostgresBin(ctx, os.Getenv("POSTHASTE_PG_BIN")); err != nil {
		return err
	}
	// The file of Redis is rewritten between measurements instead, see empty.
	b.servers, err = local.Open(ctx, local.ServersOptions{
		Name: "peers", Dir: b.dir, PGBin: b.bin, RedisBin: os.Getenv("POSTHASTE_REDIS_BIN"), Settings: local.Durable,
		Config: []string{"auto-aof-rewrite-percentage 0"},
	})
	if err != nil {
		return err
	}
	if err := os.Setenv("PGPASSWORD", b.servers.Postgres.Password); err != nil { // for the peers
		return err
	}
	b.redis = redis.NewClient(&redis.Options{Addr: b.servers.Redis.Addr(), MaxRetries: -1})
	b.admin, err = pgxpool.New(ctx, b.servers.Postgres.URL("postgres"))
	return err
}

// close undoes open.
func (b *bench) close() {
	if b.admin != nil {
		b.admin.Close()
	}
	if b.redis != nil {
		_ = b.redis.Close()
	}
	b.servers.Close()
}

// scene is one measurement's own database.
type scene struct {
	*bench
	peer peer
	// name is that of the database, of the slot, and of the relay.
	name, url string
	pool      *pgxpool.Pool
}

// once measures a load with a peer.
func (b *bench) once(ctx context.Context, p peer, l load) (f figures, err error) {
	b.scenes++
	s := &scene{bench: b, peer: p, name: fmt.Sprintf("peers_%d", b.scenes)}
	// No password: every user of the machine can read the command lines that contain the URL.
	s.url = fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", b.servers.Postgres.Port, s.name)
	if err := b.empty(ctx); err != nil {
		return nil, err
	}
	if _, err := b.admin.Exec(ctx, "CREATE DATABASE "+s.name); err != nil {
		return nil, err
	}
	defer func() { // also after an interruption
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		defer cancel()
		err = errors.Join(err, local.DropDatabase(ctx, b.admin, s.name))
	}()
	cfg, err := pgxpool.ParseConfig(s.url)
	if err != nil {
		return nil, err
	}
	cfg.MaxConns = writers + 2
	if s.pool, err = pgxpool.NewWithConfig(ctx, cfg); err != nil {
		return nil, err
	}
	defer s.pool.Close()
	if err := p.table.prepare(ctx, s); err != nil {
		return nil, err
	}
	if p.slot {
		_, err := s.pool.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", s.name)
		if err != nil {
			return nil, err
		}
	}
	if l.backlog {
		return s.drain(ctx)
	}
	return s.follow(ctx, l.rate)
}

// empty empties Redis and its file, and has Postgres write what it holds, so that no measurement pays for the one
// before.
func (b *bench) empty(ctx context.Context) error {
	if err := errors.Join(b.redis.FlushAll(ctx).Err(), b.redis.BgRewriteAOF(ctx).Err()); err != nil {
		return err
	}
	for {
		info, err := b.redis.InfoMap(ctx, "persistence").Result()
		if err != nil {
			return err
		}
		p := info["Persistence"]
		if p["aof_rewrite_in_progress"] == "0" && p["aof_rewrite_scheduled"] == "0" {
			break
		}
		if err := pause.For(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	_, err := b.admin.Exec(ctx, "CHECKPOINT")
	return err
}

// table is what a load writes into.
type table struct {
	// insert is the statement, with the text of the payload to be filled in; n numbers the events.
	insert  string
	prepare func(ctx context.Context, s *scene) error
}

var outboxTable = table{
	insert: `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
SELECT ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'bench', n::text, 'bench.event', (%s)::jsonb`,
	prepare: func(ctx context.Context, s *scene) error {
		if _, err := sql.Migrate(ctx, s.url, "public", slog.New(slog.DiscardHandler)); err != nil {
			return err
		}
		if !s.peer.slot {
			if err := sql.Register(ctx, s.pool, s.name); err != nil {
				return err
			}
			return sql.SetDesired(ctx, s.pool, s.name, outbox.ModeCDC)
		}
		_, err := s.pool.Exec(ctx, "CREATE PUBLICATION "+publication+" FOR TABLE outbox WITH (publish = 'insert')")
		return err
	},
}

// watermillTable gets what watermill's forwarder publisher writes.
var watermillTable = table{
	insert: `INSERT INTO watermill_` + topic + ` (uuid, payload, metadata, transaction_id)
SELECT gen_random_uuid()::text, ('{"destination_topic": "` + stream + `", "uuid": "' || gen_random_uuid() ||
	'", "payload": "' || replace(encode(convert_to(%s, 'UTF8'), 'base64'), E'\n', '') || '", "metadata": {}}')::json,
	'{}', pg_current_xact_id()`,
	prepare: func(_ context.Context, s *scene) error {
		sub, err := subscriber(s.pool)
		if err != nil {
			return err
		}
		return errors.Join(sub.SubscribeInitialize(topic), sub.Close())
	},
}

// usage is processor time in seconds, up to a moment.
type usage struct{ relay, postgres, redis float64 }

func (s *scene) usage(ctx context.Context, p *local.Process) usage {
	u := usage{postgres: s.servers.Postgres.CPU(), redis: local.RedisCPU(ctx, s.redis)}
	if p != nil {
		u.relay = p.CPU()
	}
	return u
}
