package main

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
)

// peer is one way to get events out of Postgres.
type peer struct {
	name, what string
	// table is what the load writes into.
	table *table
	// command starts it; nil is the load alone, which the others with the same table are measured against.
	command func(s *scene) []string
	// slot says that it reads a slot, which it does not make itself; bare that it publishes nothing.
	slot, bare bool
}

// peers are all there are. go-pq-cdc is not among them: its module could not be had. With a handler that writes to
// Redis it does what batch and each do.
var peers = []peer{
	{name: "none", what: "the load alone", table: &outboxTable},
	{
		name: "posthaste", what: "posthaste relay, mode cdc, default settings", table: &outboxTable,
		command: func(s *scene) []string {
			return []string{
				s.posthaste, "relay", "--postgres-url=" + s.url, "--redis-url=" + s.servers.RedisURL(),
				"--relay-name=" + s.name, "--admin-addr=127.0.0.1:0", "--log-level=error",
			}
		},
	},
	{
		name: "batch", what: "pglogrepl, and a pipeline of XADD for what has come meanwhile; nothing is settled",
		table: &outboxTable, command: self("batch"), slot: true,
	},
	{
		name: "each", what: "the same, and an XADD for each event", table: &outboxTable, command: self("each"),
		slot: true,
	},
	{
		name: "pg_recvlogical", what: "decoding alone, into /dev/null; nothing is published", table: &outboxTable,
		command: func(s *scene) []string {
			return []string{
				filepath.Join(s.bin, "pg_recvlogical"), "--dbname=" + s.url, "--slot=" + s.name, "--start",
				"--file=/dev/null", "--option=proto_version=1", "--option=publication_names=" + publication,
			}
		},
		slot: true, bare: true,
	},
	{name: "none (watermill)", what: "the load alone, into watermill's table", table: &watermillTable},
	{
		name: "watermill", what: "watermill-sql, its forwarder, watermill-redisstream, default settings",
		table: &watermillTable, command: self("watermill"),
	},
}

// self is this program as a peer.
func self(name string) func(s *scene) []string {
	return func(s *scene) []string {
		return []string{s.self, "peer", name, s.url, s.servers.RedisURL(), s.name}
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

// peerNames are those that may be chosen.
func peerNames() (names []string) {
	for _, p := range peers {
		if p.command != nil {
			names = append(names, p.name)
		}
	}
	return names
}

// choose returns the peers of those names, and before them the loads alone that they need.
func choose(names []string) (list []peer) {
	for _, p := range peers {
		if slices.ContainsFunc(peers, func(c peer) bool {
			return c.command != nil && slices.Contains(names, c.name) &&
				(c.name == p.name || p.command == nil && c.table == p.table)
		}) {
			list = append(list, p)
		}
	}
	return list
}
