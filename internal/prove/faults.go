package prove

import (
	"github.com/nats-io/nats.go"

	"posthaste/internal/lab/link"
	"posthaste/internal/lab/local"
)

// faults are all faults, in the order in which they are listed: the name, what is done, the class, the part that the
// fault touches, and the least and the greatest duration in seconds.
var faults = []*fault{
	kind("relay-kill", "SIGKILL to a relay", anywhere, touchesRelays, 0, 3, killed(aRelay)),
	kind("relay-kill-all", "SIGKILL to all relays at once", anywhere, touchesRelays, 0, 3, killed(allRelays)),
	kind("relay-freeze", "SIGSTOP and SIGCONT to a relay", anywhere, touchesRelays, 1, 15, frozen(aRelay)),
	kind("relay-stop", "an orderly stop of a relay, which has to end with exit code 0", anywhere, touchesRelays, 0, 2,
		stopped(aRelay)),
	kind("serve-kill", "SIGKILL to an API", anywhere, touchesServe, 0, 2, killed(aServe)),
	kind("serve-freeze", "SIGSTOP and SIGCONT to an API", anywhere, touchesServe, 1, 10, frozen(aServe)),
	kind("serve-stop", "an orderly stop of an API", anywhere, touchesServe, 0, 2, stopped(aServe)),
	kind("consumer-kill", "SIGKILL to a consumer", anywhere, touchesConsumers, 0, 2, killed(aConsumer)),
	kind("consumer-freeze", "SIGSTOP and SIGCONT to a consumer", anywhere, touchesConsumers, 1, 10, frozen(aConsumer)),
	kind("mode-flap", "the desired mode changes every 300 ms", anywhere, touchesMode, 2, 6, flap),

	// The network between one process and one server.
	kind("link-cut", "connections are cut, and new ones refused", anywhere, touchesLinks, 0.2, 8,
		troubled(link.Trouble{Refuse: true})),
	kind("link-hang", "nothing passes; data sent meanwhile is delivered afterwards", anywhere, touchesLinks, 1, 15,
		troubled(link.Trouble{Stall: true})),
	kind("link-slow", "everything arrives 5 to 250 ms later", anywhere, touchesLinks, 3, 10, slowed),
	kind("link-limited", "each connection carries 64 kB/s", anywhere, touchesLinks, 3, 10,
		troubled(link.Trouble{BytesPerSecond: 64 << 10})),
	kind("link-lose-replies", "requests arrive, the answers do not", anywhere, touchesLinks, 0.5, 6,
		troubled(link.Trouble{LoseReplies: true})),

	// The sessions, the slot, the publication and the transactions of one database.
	kind("backends-terminated", "every session of posthaste and of the writers is ended", anywhere, touchesSessions, 0,
		0, statement("SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "+
			"current_database() AND (application_name LIKE 'posthaste%' OR application_name = 'prove writer')")),
	kind("lock-lost", "the session with the leader's lock is ended, its stream lives", anywhere, touchesSessions, 0, 0,
		statement("SELECT pg_catalog.pg_terminate_backend(l.pid) FROM pg_locks l JOIN "+
			"pg_stat_activity a USING (pid) WHERE l.locktype = 'advisory' AND l.granted AND "+
			"a.datname = current_database() AND a.application_name LIKE 'posthaste%'")),
	kind("slot-dropped", "the slot is dropped under the relay", anywhere, touchesSlot, 0, 0,
		onSlot("SELECT pg_catalog.pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1")),
	kind("slot-advanced", "the slot is advanced by hand, past unread changes", anywhere, touchesSlot, 0, 0,
		onSlot("SELECT pg_catalog.pg_replication_slot_advance(slot_name, pg_current_wal_flush_lsn()) "+
			"FROM pg_replication_slots WHERE slot_name = $1 AND confirmed_flush_lsn IS NOT NULL")),
	kind("publication-dropped", "the publication is dropped", anywhere, touchesSlot, 0, 0,
		statement("DROP PUBLICATION IF EXISTS posthaste")),
	kind("publication-altered", "the table is taken out of the publication", anywhere, touchesSlot, 0, 0,
		statement("ALTER PUBLICATION posthaste DROP TABLE outbox")),
	kind("transaction-open", "a transaction with an id stays open", anywhere, touchesLoad, 5, 30, transactionOpen),
	kind("transaction-prepared", "a prepared transaction with events waits, and is committed or not", anywhere,
		touchesLoad, 3, 15, transactionPrepared),

	// Loads that writers may cause at any time, but rarely do.
	kind("large-transaction", "one transaction with 2,000 to 50,000 events", anywhere, touchesLoad, 0, 0,
		largeTransaction),
	kind("large-events", "ten events of 1 MB in one transaction", anywhere, touchesLoad, 0, 0, largeEvents),

	// The whole Postgres server.
	kind("postgres-immediate", "Postgres stopped without a checkpoint, and started again", own, touchesPostgres, 0, 3,
		postgresStopped("immediate")),
	kind("postgres-fast", "Postgres stopped in order, and started again", own, touchesPostgres, 0, 3,
		postgresStopped("fast")),
	kind("slot-invalidated", "the slot is invalidated, because it holds back too much WAL", own, touchesSlot, 1, 2,
		slotInvalidated),
	kind("commits-held", "synchronous replication holds back every commit", own, touchesPostgres, 2, 10,
		setting("synchronous_standby_names", "nobody")),
	kind("postgres-read-only", "new transactions may not write", own, touchesPostgres, 1, 8,
		setting("default_transaction_read_only", "on")),

	// A second relay uses a copy of the database, or the copy replaces the original.
	kind("database-copied", "a relay of a copy of the database uses the same Redis", own, touchesAll, 4, 8,
		databaseCopied),
	kind("database-moved", "a clone of the server takes over, after logical replication", own, touchesAll, 3, 10,
		databaseMoved),

	// Redis.
	kind("redis-kill", "SIGKILL to Redis, which restarts with its append-only file", forgets, touchesRedis, 0, 3,
		redisKilled),
	kind("redis-freeze", "SIGSTOP and SIGCONT to Redis", own, touchesRedis, 1, 10,
		serverFrozen(func(s *stage) *local.Process { return s.leading().Process })),
	kind("redis-script-flush", "SCRIPT FLUSH", own, touchesRedis, 0, 0, command("SCRIPT", "FLUSH")),
	kind("redis-full", "Redis is out of memory", own, touchesRedis, 1, 8, redisSetting("maxmemory", "1", "0")),
	kind("redis-refuses", "Redis refuses writes, because it wants more replicas than it has", own, touchesRedis, 1, 8,
		redisSetting("min-replicas-to-write", "9", "0")),
	kind("redis-read-only", "Redis is made a replica of a server that is not there, and back", forgets, touchesRedis, 1,
		8, redisReadOnly),
	kind("redis-flushall", "FLUSHALL", forgets, touchesRedis, 0, 0, command("FLUSHALL")),
	kind("redis-flushall-away", "FLUSHALL while no consumer reads for a group", forgets, touchesRedis, 0, 0,
		onStream(flushAway)),
	kind("redis-stream-retried", "a stream is deleted, its group created again, and a dead event retried", forgets,
		touchesRedis, 0, 0, onStream(retryDead)),
	kind("redis-stream-replaced", "a stream is deleted, and another client creates it again", forgets, touchesRedis, 0,
		0, onStream(replace)),
	kind("redis-stream-put-back", "a stream is put back to a copy of some seconds before", forgets, touchesRedis, 0, 0,
		onStream(putBack)),
	kind("redis-failover", "Redis is killed, and its replica, which is up to a second behind, leads", forgets,
		touchesRedis, 1, 4, redisFailover),
	kind("redis-strange", "a proxy refuses commands or changes identities, and limits scripts", own, touchesRedis, 3,
		10, redisStrange),

	// NATS, which writes to disk before it answers.
	kind("nats-kill", "SIGKILL to nats-server, which restarts with its data", own, touchesNats, 0, 3, natsKilled),
	kind("nats-freeze", "SIGSTOP and SIGCONT to nats-server", own, touchesNats, 1, 10,
		serverFrozen(func(s *stage) *local.Process { return s.servers.Nats.Process })),
	kind("nats-stream-deleted", "a stream of JetStream is deleted", forgets, touchesNats, 0, 0,
		onNats(func(js nats.JetStreamManager, name string, o nats.JSOpt) error { return js.DeleteStream(name, o) })),
	kind("nats-stream-purged", "all messages of a stream of JetStream are removed", forgets, touchesNats, 0, 0,
		onNats(func(js nats.JetStreamManager, name string, o nats.JSOpt) error { return js.PurgeStream(name, o) })),
	kind("nats-consumer-deleted", "the durable consumer of a group is deleted", own, touchesNats, 0, 0,
		natsConsumerDeleted),
	kind("nats-refuses", "a stream of JetStream is full, and refuses messages", own, touchesNats, 1, 8, natsRefuses),

	kind("sabotage-lose", "an entry is deleted from a stream", sabotage, touchesRedis, 0, 0, spoiled(loseEntry)),
	kind("sabotage-duplicate", "an entry is added to a stream again", sabotage, touchesRedis, 0, 0,
		spoiled(repeatEntry)),
	kind("sabotage-phantom", "an event that no writer wrote is added to a stream", sabotage, touchesRedis, 0, 0,
		spoiled(inventEntry)),
	kind("sabotage-group", "a group that never reads is moved to the end of its stream", sabotage, touchesRedis, 0, 0,
		onStream(moveGroup)),
	kind("sabotage-history", "a settled event is deleted from Postgres", sabotage, touchesPostgres, 0, 0,
		statement("DELETE FROM outbox WHERE id IN (SELECT id FROM outbox o WHERE aggregate_type = 'cart' "+
			"AND NOT EXISTS (SELECT FROM outbox_backlog b WHERE b.id = o.id) LIMIT 1)")),
	kind("sabotage-effect", "an effect happens twice", sabotage, touchesPostgres, 0, 0,
		statement("INSERT INTO prove_effect SELECT event FROM prove_effect LIMIT 1")),
	kind("sabotage-balance", "a balance in Postgres is changed by hand", sabotage, touchesPostgres, 0, 0,
		changeBalance),
}
