package grafana

var redis = board{
	file: "redis", title: "Redis and consumers",
	question: "Does Redis have room, and does every group read?",
	rows: []row{
		{title: "Is there room, and does every group read?", height: 5, panels: []panel{
			{
				form: number, title: "Redis memory", unit: "percentunit", alert: "PosthasteRedisMemoryHigh",
				width: 4, atMost: 1,
				means: "Used memory as a share of maxmemory, 0 without a limit. At 1, Redis refuses writes and " +
					"events wait. Add memory, or find the idle group.",
				queries: []query{{"max(redis_memory_ratio{FILTER})", ""}}, steps: below(0.85, 0.95),
			},
			{
				form: number, title: "Eviction", unit: "short", alert: "PosthasteRedisMemoryHigh", width: 4,
				texts: map[string]text{"0": {"off", green}, "1": {"unsafe", red}},
				means: "Whether Redis may delete streams, gates, keys and balances when it is full. If it is " +
					"unsafe, run CONFIG SET maxmemory-policy noeviction.",
				queries: []query{{"max(redis_eviction_unsafe{FILTER})", ""}}, steps: none(),
			},
			{
				form: number, title: "Worst lag", unit: "short", alert: "OutboxConsumerStuck", width: 4,
				empty: "none known",
				means: "Entries not yet delivered to the slowest group, of a type. It must fall between bursts; " +
					"if not, add consumers.",
				queries: []query{{"max(" + byGroup("sum", "outbox_group_lag") + ")", ""}},
				steps:   below(10_000, 100_000),
			},
			{
				form: number, title: "Oldest unacknowledged", unit: "s", alert: "OutboxConsumerStuck", width: 4,
				empty: "no group",
				means: "Age of the oldest entry delivered but not acknowledged: a handler hangs or fails " +
					"repeatedly. See the consumer's log.",
				queries: []query{{"max(outbox_group_oldest_pending_seconds{FILTER})", ""}}, steps: below(60, 300),
			},
			{
				form: number, title: "Abandoned group", unit: "s", alert: "OutboxConsumerStuck", width: 4,
				empty: "no group",
				means: "How long entries have waited for the group that is idle longest. No consumer reads for it, " +
					"and it holds back trimming: start its consumers, or run posthaste groups drop.",
				queries: []query{{"max(outbox_group_idle_seconds{FILTER})", ""}}, steps: below(600, 3600),
			},
			trimLoss,
		}},
		{title: "Streams", height: 7, panels: []panel{
			streamLength, redisMemory,
			{
				title: "Published by type", unit: "ops", alert: "OutboxRelayNotPublishing",
				means: "Events by type, which may have several streams. If one stops while others continue, its " +
					"events are dead, or no events are written for it.",
				queries: []query{{rate("outbox_published_total", "stream"), "{{stream}}"}},
			},
			publishCall, publishErrors,
			{
				title: "Lost after settling", unit: "short", alert: "OutboxRedisLostData",
				means: "Events that Redis had acknowledged but has lost: restored by the relay, or not, within the " +
					"chosen time; and events whose commits Postgres has lost, by a failover. posthaste status and " +
					"posthaste phantoms name what is left to do.",
				queries: []query{
					{leading("outbox_lost_events"), "not brought back"},
					{increase("outbox_restored_events_total"), "restored by the relay"},
					{increase("outbox_lost_events_total"), "found, and not restored"},
					{increase("outbox_postgres_failovers_total"), "failovers of Postgres"},
					{leading("outbox_phantom_events"), "commits that Postgres lost"},
				},
				steps: none(),
			},
			{
				title: "Pub/Sub refused", unit: "ops", alert: "OutboxPublishFailing",
				means: "Events that are in their stream but whose PUBLISH Redis rejected it: the ACL does not " +
					"permit the channel.",
				queries: []query{{rate("outbox_pubsub_failed_total"), "refused"}},
			},
		}},
		{title: "Consumer groups", height: 7, panels: []panel{
			{
				title: "Lag", unit: "short", alert: "OutboxConsumerStuck",
				means:   "Entries not yet delivered to the group: too few consumers, or too slow ones.",
				queries: []query{{byGroup("sum", "outbox_group_lag"), "{{base}} {{group}}"}},
			},
			{
				title: "Pending", unit: "short", alert: "OutboxConsumerStuck",
				means: "Entries delivered but not acknowledged: handlers that run, hang or fail. It is bounded by " +
					"how many entries consumers take at once.",
				queries: []query{{byGroup("sum", "outbox_group_pending"), "{{base}} {{group}}"}},
			},
			{
				title: "Oldest pending", unit: "s", alert: "OutboxConsumerStuck",
				means: "Age of the oldest entry not acknowledged. A line that rises steadily is one event that " +
					"hangs.",
				queries: []query{{byGroup("max", "outbox_group_oldest_pending_seconds"), "{{base}} {{group}}"}},
				steps:   []step{{0, green}, {300, red}},
			},
			{
				title: "Idle", unit: "s", alert: "OutboxConsumerStuck",
				means: "How long entries have waited while none of the group's consumers was active. An abandoned " +
					"group holds back trimming: drop it, or start its consumers.",
				queries: []query{{byGroup("max", "outbox_group_idle_seconds"), "{{base}} {{group}}"}},
				steps:   []step{{0, green}, {3600, red}},
			},
			{
				title: "Missed", unit: "short", alert: "OutboxStreamTrimLoss",
				means: "Entries trimmed before the group had read them: lost to it. They are in outbox_history: " +
					"run posthaste replay.",
				queries: []query{{
					ofTypes("sum",
						jumps("outbox_trim_lost_total", "stream", "group"), "group"),
					"{{base}} {{group}}",
				}}, steps: none(),
			},
			{
				title: "Dead-lettered", unit: "short", alert: "OutboxConsumerDead",
				means: "Events moved to a dead stream after their last attempt: they are not processed. Fix the " +
					"handler, then retry them.",
				queries: []query{{jumps("outbox_consumer_dead_total", "group"), "{{group}}"}}, steps: none(),
			},
		}},
		{title: "Consumers", height: 7, folded: true, panels: []panel{
			{
				title: "Handler, p99", unit: "s", alert: "OutboxConsumerStuck",
				means: "99 of 100 attempts are shorter than this. A rise points to the handler, or what it calls. " +
					"The dots are traces.",
				queries: []query{{quantile(0.99, "outbox_consumer_handle_seconds", "group"), "{{group}}"}},
			},
			{
				title: "Commit to processed, p99", unit: "s", alert: "OutboxConsumerStuck",
				means: "From an event's commit to the end of its handler. The excess over commit to publish " +
					"(overview) is the consumers' share.",
				queries: []query{{quantile(0.99, "outbox_consumer_delay_seconds", "group"), "{{group}}"}},
			},
			{
				title: "Taken over", unit: "ops", alert: "OutboxConsumerStuck",
				means: "Entries taken over from silent consumers. Takeovers " +
					"outside deployments mean that consumers die or hang for longer than --claim-idle.",
				queries: []query{{rate("outbox_consumer_claimed_total", "group"), "taken over, {{group}}"}},
			},
			{
				title: "Held in processes", unit: "short", alert: "OutboxConsumerStuck",
				means: "Entries that are not acknowledged, and stalled processes. If many are held and few are " +
					"handled, one subject fails; the log names the event.",
				queries: []query{
					{"sum by (group) (outbox_consumer_inflight_events{FILTER})", "held, {{group}}"},
					{"sum by (group) (outbox_consumer_stalled{FILTER})", "stalled processes, {{group}}"},
				},
			},
			{
				title: "Failed calls to Redis", unit: "ops", alert: "OutboxConsumerStuck",
				means: "By operation; each is retried. If all operations fail, Redis is unreachable; if one fails, " +
					"check the ACL.",
				queries: []query{{rate("outbox_consumer_redis_errors_total", "op"), "{{op}}"}},
			},
			{
				title: "Webhooks", unit: "reqps", alert: "OutboxConsumerStuck", empty: "no posthaste deliver",
				means: "Requests of posthaste deliver by outcome. busy and unreachable: the receiver does not take " +
					"events, which wait; the log shows its answer. refused: they will be dead.",
				queries: []query{{rate("outbox_deliver_seconds_count", "group", "outcome"), "{{group}} {{outcome}}"}},
			},
			{
				title: "Webhooks, p99", unit: "s", alert: "OutboxConsumerStuck", empty: "no posthaste deliver",
				means: "99 of 100 requests are answered within this time. At --timeout, the receiver does not " +
					"answer.",
				queries: []query{{quantile(0.99, "outbox_deliver_seconds", "group"), "{{group}}"}},
			},
		}},
	},
}
