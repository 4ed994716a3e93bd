package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/bench"
)

// The tables that loads write into: the outbox, and that of watermill's forwarder publisher.
var (
	outboxTable = &bench.Table{
		Insert: bench.InsertOutbox,
		Prepare: func(ctx context.Context, pool *pgxpool.Pool) error {
			_, err := pool.Exec(ctx, "CREATE PUBLICATION "+publication+" FOR TABLE outbox WITH (publish = 'insert')")
			return err
		},
	}
	watermillTable = &bench.Table{
		Insert: `INSERT INTO watermill_` + topic + ` (uuid, payload, metadata, transaction_id)
SELECT gen_random_uuid()::text, ('{"destination_topic": "` + stream + `", "uuid": "' || gen_random_uuid() ||
	'", "payload": "' || replace(encode(convert_to(%s, 'UTF8'), 'base64'), E'\n', '') || '", "metadata": {}}')::json,
	'{}', pg_current_xact_id()`,
		Prepare: func(_ context.Context, pool *pgxpool.Pool) error {
			sub, err := subscriber(pool)
			if err != nil {
				return err
			}
			return errors.Join(sub.SubscribeInitialize(topic), sub.Close())
		},
	}
)

// programs are posthaste, the folder of Postgres' programs, and this program.
type programs struct{ posthaste, postgres, self string }

// peers returns all peers. go-pq-cdc is not among them: its module could not be had. With a handler that writes to
// Redis it does what batch and each do.
func (p *programs) peers() []bench.Peer {
	self := func(name string) func(at bench.Place) []string {
		return func(at bench.Place) []string { return []string{p.self, "peer", name, at.Postgres, at.Redis, at.Name} }
	}
	return []bench.Peer{
		{Name: "none", What: "the load alone", Table: outboxTable},
		{
			Name: "posthaste", What: "posthaste relay, mode cdc, default settings", Table: outboxTable,
			Command: func(at bench.Place) []string {
				return []string{
					p.posthaste, "relay", "--postgres-url=" + at.Postgres, "--redis-url=" + at.Redis,
					"--relay-name=" + at.Name, "--admin-addr=127.0.0.1:0", "--log-level=error",
				}
			},
		},
		{
			Name: "batch", What: "pglogrepl, and a pipeline of XADD for what has come meanwhile; nothing is settled",
			Table: outboxTable, Command: self("batch"), Slot: true,
		},
		{
			Name: "each", What: "the same, and an XADD for each event", Table: outboxTable, Command: self("each"),
			Slot: true,
		},
		{
			Name: "pg_recvlogical", What: "decoding alone, into /dev/null; nothing is published", Table: outboxTable,
			Command: func(at bench.Place) []string {
				return []string{
					filepath.Join(p.postgres, "pg_recvlogical"), "--dbname=" + at.Postgres, "--slot=" + at.Name,
					"--start", "--file=/dev/null", "--option=proto_version=1",
					"--option=publication_names=" + publication,
				}
			},
			Slot: true, Bare: true,
		},
		{Name: "none (watermill)", What: "the load alone, into watermill's table", Table: watermillTable},
		{
			Name: "watermill", What: "watermill-sql, its forwarder, watermill-redisstream, default settings",
			Table: watermillTable, Command: self("watermill"),
		},
	}
}

// child runs a library as a peer until it is stopped.
func child(ctx context.Context, args []string) error {
	if len(args) != 4 {
		return errors.New("peer takes a name, the URLs of Postgres and Redis, and the name of the slot")
	}
	name, postgres, redis, slot := args[0], args[1], args[2], args[3]
	var err error
	switch name {
	case "watermill":
		err = forward(ctx, postgres, redis)
	case "batch":
		err = loop(ctx, postgres, redis, slot, batchSize)
	case "each":
		err = loop(ctx, postgres, redis, slot, 1)
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// namesOf returns the names of those that may be chosen.
func namesOf(all []bench.Peer) (names []string) {
	for _, p := range all {
		if p.Command != nil {
			names = append(names, p.Name)
		}
	}
	return names
}

// choose returns the peers of those names, and before them the loads alone that they need.
func choose(all []bench.Peer, names []string) (list []bench.Peer) {
	for _, p := range all {
		if slices.ContainsFunc(all, func(c bench.Peer) bool {
			return c.Command != nil && slices.Contains(names, c.Name) &&
				(c.Name == p.Name || p.Command == nil && c.Table == p.Table)
		}) {
			list = append(list, p)
		}
	}
	return list
}
