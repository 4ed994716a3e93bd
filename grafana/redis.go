package grafana

var redis = board{
	file: "redis", title: "Redis and consumers", question: "Does Redis have room, does every group read, and are credits in the ledger?",
	rows: []row{
		{"Is there room, and does everybody read?", 5, []panel{
			{
				form: number, title: "Redis memory", unit: "percentunit", alert: "RedisMemoryHigh", width: 4, atMost: 1,
				means:   "Used memory as a share of maxmemory, 0 without a limit. At 1 Redis refuses writes and events wait. Give it memory, or find the idle group.",
				queries: []query{{"max(redis_memory_ratio{FILTER})", ""}}, steps: below(0.85, 0.95),
			},
			{
				form: number, title: "Eviction", unit: "short", alert: "RedisEvictionPolicyUnsafe", width: 4,
				texts:   map[string]text{"0": {"off", green}, "1": {"unsafe", red}},
				means:   "Whether Redis may delete streams, gates, keys and balances when it is full. Unsafe: CONFIG SET maxmemory-policy noeviction.",
				queries: []query{{"max(redis_eviction_unsafe{FILTER})", ""}}, steps: none(),
			},
			{
				form: number, title: "Worst lag", unit: "short", alert: "OutboxConsumerStuck", width: 4, empty: "no group",
				means:   "Entries that the slowest group has not been given yet. It must fall between bursts; if not, add consumers.",
				queries: []query{{"max(outbox_group_lag{FILTER})", ""}}, steps: below(10_000, 100_000),
			},
			{
				form: number, title: "Oldest unacknowledged", unit: "s", alert: "OutboxConsumerStuck", width: 4, empty: "no group",
				means:   "Age of the oldest entry that was delivered and not acknowledged: a handler hangs, or fails again and again. See the consumer's log.",
				queries: []query{{"max(outbox_group_oldest_pending_seconds{FILTER})", ""}}, steps: below(60, 300),
			},
			{
				form: number, title: "Abandoned group", unit: "s", alert: "OutboxGroupAbandoned", width: 4, empty: "no group",
				means: "How long entries have waited for the group that is idle longest. Nobody reads for it, and it keeps streams from being " +
					"trimmed: start its consumers, or posthaste groups drop.",
				queries: []query{{"max(outbox_group_idle_seconds{FILTER})", ""}}, steps: below(600, 3600),
			},
			trimLoss,
		}},
		{"Streams", 7, []panel{
			streamLength, redisMemory,
			{
				title: "Published by stream", unit: "ops", alert: "OutboxRelayNotPublishing",
				means:   "Events by stream. One that stops while others go on: its events are parked, or nobody writes any.",
				queries: []query{{rate("outbox_published_total", "stream"), "{{stream}}"}},
			},
			publishCall, publishErrors,
			{
				title: "Lost after it was settled", unit: "short", alert: "OutboxRedisLostData",
				means: "Events that Redis had acknowledged and lacks: not brought back yet, and found within the chosen time; and failovers of Postgres, " +
					"after which events may come twice. posthaste status names the command that brings them back.",
				queries: []query{
					{leading("outbox_lost_events"), "not brought back"},
					{increase("outbox_lost_events_total"), "found"},
					{increase("outbox_postgres_failovers_total"), "failovers of Postgres"},
				},
				steps: none(),
			},
			{
				title: "Pub/Sub refused", unit: "ops", alert: "OutboxPublishFailing",
				means:   "Events that are in their stream, but whose PUBLISH Redis refused: the ACL does not permit the channel.",
				queries: []query{{rate("outbox_pubsub_failed_total"), "refused"}},
			},
		}},
		{"Consumer groups", 7, []panel{
			{
				title: "Lag", unit: "short", alert: "OutboxConsumerStuck",
				means:   "Entries not yet delivered to the group: too few consumers, or too slow ones.",
				queries: []query{{byGroup("outbox_group_lag"), "{{stream}} {{group}}"}},
			},
			{
				title: "Pending", unit: "short", alert: "OutboxConsumerStuck",
				means:   "Entries delivered and not acknowledged: handlers that work, hang or fail. It is bounded by what consumers take at once.",
				queries: []query{{byGroup("outbox_group_pending"), "{{stream}} {{group}}"}},
			},
			{
				title: "Oldest pending", unit: "s", alert: "OutboxConsumerStuck",
				means:   "Age of the oldest entry not acknowledged. A line that climbs second by second is one event that hangs.",
				queries: []query{{byGroup("outbox_group_oldest_pending_seconds"), "{{stream}} {{group}}"}}, steps: []step{{0, green}, {300, red}},
			},
			{
				title: "Idle", unit: "s", alert: "OutboxGroupAbandoned",
				means:   "How long entries have waited while none of the group's consumers did anything. A group that nobody reads holds trimming: drop it, or read.",
				queries: []query{{byGroup("outbox_group_idle_seconds"), "{{stream}} {{group}}"}}, steps: []step{{0, green}, {3600, red}},
			},
			{
				title: "Missed", unit: "short", alert: "OutboxStreamTrimLoss",
				means:   "Entries trimmed before the group had read them: lost to it. They are in outbox_history: posthaste replay.",
				queries: []query{{"sum by (stream, group) (increase(outbox_trim_lost_total{FILTER}[$__rate_interval]))", "{{stream}} {{group}}"}}, steps: none(),
			},
			{
				title: "Dead-lettered", unit: "short", alert: "OutboxConsumerDead",
				means:   "Events moved to a dead stream after their last attempt: nobody has processed them. Mend the handler, then put them back.",
				queries: []query{{"sum by (group) (increase(outbox_consumer_dead_total{FILTER}[$__rate_interval]))", "{{group}}"}}, steps: none(),
			},
		}},
		{"Consumers", 7, []panel{
			{
				title: "Attempts", unit: "ops", alert: "OutboxConsumerDead",
				means:   "Attempts by how they ended. failed and panic: the handler. unavailable: what it calls said that it is away, which counts against no event.",
				queries: []query{{rate("outbox_consumer_attempts_total", "group", "outcome"), "{{group}} {{outcome}}"}},
			},
			{
				title: "Handler, p99", unit: "s", alert: "OutboxConsumerStuck",
				means:   "99 of 100 attempts are shorter than this. A rise is the handler, or what it calls. The dots are traces.",
				queries: []query{{quantile(0.99, "outbox_consumer_handle_seconds", "group"), "{{group}}"}},
			},
			{
				title: "Commit to processed, p99", unit: "s", alert: "OutboxConsumerStuck",
				means:   "From an event's commit to the end of its handler. What is above commit to publish (overview) is the consumers' share.",
				queries: []query{{quantile(0.99, "outbox_consumer_delay_seconds", "group"), "{{group}}"}},
			},
			{
				title: "Read and taken over", unit: "ops", alert: "OutboxConsumerStuck",
				means: "Entries read for the first time, and entries taken over from consumers without a sign of life. Takeovers outside of " +
					"deployments: consumers die or hang for longer than --claim-idle.",
				queries: []query{
					{rate("outbox_consumer_read_total", "group"), "read, {{group}}"},
					{rate("outbox_consumer_claimed_total", "group"), "taken over, {{group}}"},
					{rate("outbox_consumer_removed_total", "group"), "consumers removed, {{group}}"},
				},
			},
			{
				title: "Held in processes", unit: "short", alert: "OutboxConsumerStuck",
				means: "Entries in work, entries parked behind a slow event of their subject, subjects that wait for a retry, and processes in " +
					"which nothing moves. Many parked: one subject fails; the log names the event.",
				queries: []query{
					{"sum by (group) (outbox_consumer_inflight_events{FILTER})", "in work, {{group}}"},
					{"sum by (group) (outbox_consumer_parked_events{FILTER})", "parked, {{group}}"},
					{"sum by (group) (outbox_consumer_delayed_subjects{FILTER})", "subjects waiting, {{group}}"},
					{"sum by (group) (outbox_consumer_stalled{FILTER})", "processes that stand still, {{group}}"},
				},
			},
			{
				title: "Failed calls to Redis", unit: "ops", alert: "OutboxConsumerStuck",
				means:   "By operation; each is repeated. All of them: Redis is away. One of them: its ACL.",
				queries: []query{{rate("outbox_consumer_redis_errors_total", "op"), "{{op}}"}},
			},
		}},
		{"Credits", 7, []panel{
			{
				title: "Operations", unit: "ops", alert: "CreditsStoreUnavailable",
				means: "By what became of them. unavailable: Redis is away, or Postgres, for keys that are not UUIDv7. backpressure: the sync is behind. epoch: Redis lost data, a bucket is " +
					"rebuilt. frozen: an account waits for a human.",
				queries: []query{{rate("credits_ops_total", "code"), "{{code}}"}},
			},
			{
				title: "Requests of credits, p99", unit: "s", alert: "CreditsStoreUnavailable",
				means:   "99 of 100 additions, deductions and balances are answered within this time. A rise is Redis, or the durability that it waits for.",
				queries: []query{{quantile(0.99, `http_request_duration_seconds{route=~"/(add|deduct|balance)/.*"}`, "route"), "{{route}}"}},
			},
			{
				title: "Orders paid", unit: "ops", alert: "CreditsOrderPaymentStuck",
				means: "Payments of orders by what became of them. completed and refunded: a process died in between, and the work was ended for " +
					"it. unpaid: an order stands without its deduction. unrefunded: credits of a refused order could not be given back.",
				queries: []query{{rate("credits_order_payments_total", "outcome"), "{{outcome}}"}},
			},
			{
				title: "Not yet in the ledger", unit: "s", alert: "CreditsSyncLagging",
				means:   "Age of the oldest operation that only Redis has. A rise: the relay or Postgres is slow, or gone. If Redis loses its memory now, they are lost.",
				queries: []query{{"max(credits_sync_lag_seconds{FILTER})", "lag"}}, steps: below(10, 60),
			},
			{
				title: "Operations waiting", unit: "short", alert: "CreditsSyncLagging",
				means:   "Operations in the buckets' streams. It must fall between bursts; at its bound new ones are refused (backpressure).",
				queries: []query{{"max(credits_stream_entries{FILTER})", "waiting"}},
			},
			{
				title: "Answers 503 and 423", unit: "reqps", alert: "CreditsStoreUnavailable",
				means: "503: Redis is away, or cannot do the durability asked for; nothing was done. 423: a frozen account. Clients repeat the " +
					"former with the same key.",
				queries: []query{{`sum by (route, status) (rate(http_request_duration_seconds_count{route=~"/(add|deduct|balance)/.*", status=~"503|423", FILTER}[$__rate_interval]))`, "{{route}} {{status}}"}},
			},
			{
				title: "Sync", unit: "ops", alert: "CreditsAccountFrozen",
				means:   "Operations taken into the ledger. quarantined: they contradict it; posthaste credits reconcile explains. duplicate: the sync was interrupted, harmless.",
				queries: []query{{rate("credits_sync_entries_total", "outcome"), "{{outcome}}"}},
			},
			{
				title: "Frozen accounts", unit: "short", alert: "CreditsAccountFrozen",
				means:   "Accounts closed because their operations contradict the ledger. Each needs a human: posthaste credits reconcile.",
				queries: []query{{"sum by (reason) (increase(credits_frozen_total{FILTER}[$__rate_interval]))", "{{reason}}"}}, steps: none(),
			},
			{
				title: "Wait for durability, p99", unit: "s", alert: "CreditsStoreUnavailable", empty: "nothing to wait for",
				means: "How long operations wait for replicas or the disk. At half a second their outcome becomes unknown to the client: mend the " +
					"replica, or the disk. Empty when no durability is asked for.",
				queries: []query{{quantile(0.99, "credits_durability_wait_seconds"), "p99"}}, steps: []step{{0, green}, {0.1, orange}, {0.5, red}},
			},
			{
				title: "Drift of the ledger", unit: "short", alert: "CreditsLedgerDrift",
				means: "Credits by which the accounts differ from their counter-accounts, looked at every 15 minutes. Anything but 0: the ledger was " +
					"changed by hand; posthaste credits reconcile names the accounts.",
				queries: []query{{"max(abs(credits_reconcile_drift{FILTER}))", "drift"}}, steps: none(),
			},
			{
				title: "Operations lost", unit: "short", alert: "CreditsOperationsLost",
				means:   "Operations that were acknowledged and are gone with Redis' memory. Ask for a durability that survives what happened.",
				queries: []query{{"sum(increase(credits_lost_operations_total{FILTER}[$__rate_interval]))", "lost"}}, steps: none(),
			},
			{
				title: "Rebuilt from the ledger", unit: "short", alert: "CreditsEpochBumped",
				means: "Buckets rebuilt because Redis had lost operations, and accounts read because Redis did not have them. Both after a Redis " +
					"that came back empty; at other times find out who deletes.",
				queries: []query{
					{"sum(increase(credits_epoch_bumps_total{FILTER}[$__rate_interval]))", "buckets"},
					{"sum(increase(credits_ledger_reads_total{FILTER}[$__rate_interval]))", "accounts"},
				},
			},
		}},
	},
}
