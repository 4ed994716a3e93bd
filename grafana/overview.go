package grafana

// modes are the values of modeOf.
var modes = map[string]text{"0": {"standby", grey}, "1": {"poll", orange}, "2": {"cdc", green}}

// modeOf is the mode of every relay as a number.
const modeOf = `2 * max by (instance) (outbox_relay_mode{mode="cdc", FILTER}) + max by (instance) ` +
	`(outbox_relay_mode{mode="poll", FILTER})`

var modePanel = panel{
	form: states, title: "Mode", unit: "short", texts: modes, alert: "OutboxRelayFallbackActive",
	means: "cdc: the slot is streamed. poll: the table is read, also at every start. standby: another relay leads. " +
		"Lasting poll although auto or cdc is desired is the fallback: the annotations show the reason, posthaste " +
		"doctor the remedy.",
	queries: []query{{modeOf, "{{instance}}"}}, width: 12,
}

// ourAlerts match the alerts of grafana/prometheus/rules: a shared Prometheus has others too.
const ourAlerts = "(Outbox|Posthaste).+"

// firing shows our alerts, for every job and instance.
var firing = panel{
	form: states, title: "Firing alerts", unit: "short", width: 12,
	texts: map[string]text{"0": {"nothing fires", green}, "1": {"firing", red}},
	means: "One lane per alert of grafana/prometheus/rules while it fires. The runbook has a section for each: the " +
		"symptom, what to check, how to fix it, how to verify that it is over.",
	queries: []query{{`max by (alertname) (ALERTS{alertstate="firing", alertname=~"` + ourAlerts +
		`"}) or on () label_replace(vector(0), "alertname", "alerts", "", "")`, "{{alertname}}"}},
}

var withinHalfASecond = panel{
	form: number, title: "Published within 0.5 s", unit: "percentunit", alert: "OutboxPublishSLOFastBurn", width: 4,
	empty: "no events",
	means: "Share of events that reached their stream within half a second of their commit; the objective is 99.9 %. " +
		"It falls while a backlog is drained. If it stays low, check the duration of the publish call, then the " +
		"backlog.",
	queries: []query{{`sum(rate(outbox_commit_to_publish_seconds_bucket{le="0.5", FILTER}[$__rate_interval])) / ` +
		rate("outbox_commit_to_publish_seconds_count"), ""}},
	steps: []step{{0, red}, {0.95, orange}, {0.999, green}}, atMost: 1,
}

var oldest = panel{
	form: number, title: "Oldest unpublished event", unit: "s", alert: "OutboxOldestPendingTooOld", width: 4,
	means: "Age of the oldest row that waits in the outbox. If it grows steadily, nothing is published: check the " +
		"publish errors and /readyz of the leading relay.",
	queries: []query{{leading("outbox_backlog_oldest_seconds"), ""}}, steps: below(10, 60),
}

var backlog = panel{
	form: number, title: "Backlog", unit: "short", alert: "OutboxOldestPendingTooOld", width: 4,
	means: "Rows in the outbox: events not yet known to be delivered. A burst may raise it. If it does not fall " +
		"again, compare the rates of written and published events.",
	queries: []query{{leading("outbox_backlog_rows"), ""}}, steps: below(10_000, 100_000),
}

var parked = panel{
	form: number, title: "Dead events", unit: "short", alert: "OutboxDeadEvents", width: 4,
	means: "Events that Redis rejected because of the events themselves. posthaste dead list shows why; fix the " +
		"cause, then run posthaste dead retry.",
	queries: []query{{leading("outbox_dead_rows"), ""}}, steps: none(),
}

var trimLoss = panel{
	form: number, title: "Missed by groups", unit: "short", alert: "OutboxStreamTrimLoss", width: 4, empty: "0",
	means: "Entries that left a stream before a consumer group had read them, within the chosen time. They are in " +
		"outbox_history: run posthaste replay, and find out what trims.",
	queries: []query{{increase("outbox_trim_lost_total"), ""}}, steps: none(),
}

var leaders = panel{
	form: number, title: "Leaders", unit: "short", alert: "OutboxNoLeader", width: 4,
	means: "Relays that hold the leader lock of a database, which the source field of its entries names. One is " +
		"correct. None for more than a few seconds: no relay runs, or none can reach Postgres; /readyz shows which.",
	queries: []query{{"sum by (source) (outbox_relay_leader{FILTER} * on (job, instance) group_left (source) " +
		"outbox_relay_info{FILTER}) or on () vector(0)", "{{source}}"}},
	steps: []step{{0, red}, {1, green}, {2, red}},
}

// written are the events inserted per second by all services, of which the relay sees those that it publishes, those
// that it gives up, and those that wait.
var written = "clamp_min(" + rate("outbox_commit_to_publish_seconds_count") + " + " + rate("outbox_parked_total") +
	" + (deriv((" + leading("outbox_backlog_rows") + ")[$__rate_interval:15s]) or vector(0)), 0)"

var writtenAndPublished = panel{
	title: "Written and published", unit: "ops", alert: "OutboxRelayNotPublishing",
	means: "Events that all services insert, and events published, by mode. A lasting gap is a growing backlog. The " +
		"first line is the sum of what is published or given up and the growth of the backlog.",
	queries: []query{
		{written, "written"},
		{rate("outbox_published_total", "mode"), "published, {{mode}}"},
	},
}

var commitToPublish = panel{
	title: "Commit to publish", unit: "s", alert: "OutboxPublishSLOFastBurn",
	means: "Time from an event's commit to its stream entry: p50, p95 and p99. It rises with a backlog, with a slow " +
		"Redis, and in poll mode. The dots are traces.",
	queries: []query{
		{quantile(0.5, "outbox_commit_to_publish_seconds"), "p50"},
		{quantile(0.95, "outbox_commit_to_publish_seconds"), "p95"},
		{quantile(0.99, "outbox_commit_to_publish_seconds"), "p99"},
	},
	steps: []step{{0, green}, {0.5, red}},
}

var publishCall = panel{
	title: "Publish call", unit: "s", alert: "OutboxPublishFailing",
	means: "Duration of one call to Redis, which publishes a whole batch: p50 and p99. A rise points to Redis or the " +
		"network. If a durability is set, it includes the wait for replicas or the disk.",
	queries: []query{
		{quantile(0.5, "outbox_publish_seconds"), "p50"},
		{quantile(0.99, "outbox_publish_seconds"), "p99"},
	},
	steps: []step{{0, green}, {0.5, red}},
}

var publishErrors = panel{
	title: "Publish errors by class", unit: "ops", alert: "OutboxPublishFailing",
	means: "Failed attempts; all are retried except those that make an event dead. oom: give Redis memory. readonly, " +
		"connection, timeout: Redis is failing over or unreachable. noperm, noauth: its ACL. fenced and gap resolve " +
		"with a new owner.",
	queries: []query{{rate("outbox_publish_errors_total", "class"), "{{class}}"}},
}

var suppressedAndParked = panel{
	title: "Suppressed and dead", unit: "ops", alert: "OutboxDeadEvents",
	means: "Suppressed: events that an earlier owner had already published, so they were not published twice; a rise " +
		"after a crash or a switch is normal. Dead: rejected because of the event itself; see posthaste dead list.",
	queries: []query{
		{rate("outbox_suppressed_total", "reason"), "suppressed, {{reason}}"},
		{rate("outbox_parked_total"), "dead"},
	},
}

var slotWAL = panel{
	title: "WAL held by the slot", unit: "bytes", alert: "OutboxSlotRetainedWALCritical",
	means: "Retained: WAL that Postgres must keep on disk. Confirmed lag: WAL that is not yet settled. Limit: " +
		"max_slot_wal_keep_size, where Postgres invalidates the slot; below 0 it is unlimited, and an abandoned slot " +
		"fills the disk. On a rise, look for an open transaction.",
	queries: []query{
		{leading("outbox_slot_retained_bytes"), "retained"},
		{leading("outbox_slot_confirmed_lag_bytes"), "confirmed lag"},
		{leading("outbox_slot_max_keep_bytes"), "limit"},
	},
}

var slotAndWire = panel{
	title: "Slot and wire", unit: "short", alert: "OutboxRelayFallbackActive",
	means: "Active: a walsender streams the slot. Lost: Postgres has invalidated it; the relay polls the table and " +
		"creates a new one. Idle: seconds without a byte from Postgres; above 30, the connection hangs, and the " +
		"relay reconnects.",
	queries: []query{
		{leading("outbox_slot_active"), "active"},
		{leading("outbox_slot_lost"), "lost"},
		{"max(outbox_wire_idle_seconds{FILTER})", "idle seconds"},
	},
}

var switches = panel{
	title: "Mode switches", unit: "short", alert: "OutboxRelayFallbackActive",
	means: "Changes of the mode, by reason. toggle is a requested change; silent, connection, stalled and missed " +
		"mean that the stream is unstable: check the network and Postgres' log.",
	queries: []query{{jumps("outbox_mode_switches_total", "from", "to", "reason") +
		" > 0", "{{from}} to {{to}}: {{reason}}"}},
	steps: []step{{0, green}, {4, orange}}, empty: "no switch",
}

var inflight = panel{
	title: "In flight", unit: "short", alert: "OutboxOldestPendingTooOld",
	means: "Events routed to their streams and not yet settled. At POSTHASTE_WINDOW (10,000 by default), the stream " +
		"waits for Redis, which publishes slowly, or for Postgres, which settles slowly: check its I/O and locks.",
	queries: []query{{"max(outbox_inflight_events{FILTER})", "in flight"}}, steps: []step{{0, green}, {10_000, red}},
}

var streamLength = panel{
	title: "Stream length", unit: "short", alert: "OutboxConsumerStuck",
	means: "Entries of each type, in all of its streams. Trimming keeps each stream near POSTHASTE_STREAM_MAXLEN, " +
		"unless a consumer group does not acknowledge: find it among the idle groups.",
	queries: []query{{ofTypes("sum", "max by (stream) (outbox_stream_length{FILTER})"), "{{base}}"}},
}

var groupLag = panel{
	title: "Group lag and pending", unit: "short", alert: "OutboxConsumerStuck",
	means: "Lag: entries not yet delivered to the group; too few or too slow consumers. Pending: delivered and not " +
		"acknowledged; handlers that hang or fail.",
	queries: []query{
		{byGroup("sum", "outbox_group_lag"), "lag {{base}} {{group}}"},
		{byGroup("sum", "outbox_group_pending"), "pending {{base}} {{group}}"},
	},
}

var redisMemory = panel{
	title: "Redis memory", unit: "percentunit", alert: "PosthasteRedisMemoryHigh", atMost: 1,
	means: "Used memory as a share of maxmemory, 0 without a limit. At 1, Redis refuses writes: events wait in the " +
		"outbox, nothing is lost. Add memory, or find the group that holds back trimming.",
	queries: []query{{"max(redis_memory_ratio{FILTER})", "used"}}, steps: below(0.85, 0.95),
}

var overview = board{
	file: "overview", title: "overview", question: "Is anything lost or late, in which mode, and what holds it back?",
	rows: []row{
		{title: "Is anything lost or late?", height: 5, panels: []panel{
			withinHalfASecond, oldest, backlog, parked, trimLoss, leaders,
		}},
		{title: "In which mode, and what fires?", height: 6, panels: []panel{modePanel, firing}},
		{title: "Flow", height: 7, panels: []panel{
			writtenAndPublished, commitToPublish,
			{
				form: heat, title: "Commit to publish, distribution", unit: "s", alert: "OutboxPublishSLOFastBurn",
				means: "Every event's time from commit to stream entry. Two bands are two populations: streamed and " +
					"swept, or first attempts and retries. A rising band is a backlog.",
				queries: []query{{rate("outbox_commit_to_publish_seconds_bucket", "le"), "{{le}}"}},
			},
			publishCall, publishErrors, suppressedAndParked,
		}},
		{title: "Slot", height: 7, folded: true, panels: []panel{slotWAL, slotAndWire, switches}},
		{title: "Redis and consumers", height: 7, folded: true, panels: []panel{streamLength, groupLag, redisMemory}},
	},
}
