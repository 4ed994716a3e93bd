package grafana

var yesNo = map[string]text{"0": {"no", red}, "1": {"yes", green}}

var cdc = board{
	file: "cdc", title: "CDC and slot",
	question: "Does the stream of changes flow, and does the slot endanger Postgres' disk?",
	rows: []row{
		{title: "Does it flow, and is the disk safe?", height: 5, panels: []panel{
			{
				form: number, title: "Slot is streamed", unit: "short", alert: "OutboxRelayFallbackActive", width: 4,
				texts: yesNo,
				means: "Whether a walsender streams the slot. No is correct only in poll mode; otherwise the relay " +
					"polls the table: posthaste doctor shows what is missing.",
				queries: []query{{leading("outbox_slot_active"), ""}}, steps: []step{{0, red}, {1, green}},
			},
			{
				form: number, title: "Slot is lost", unit: "short", alert: "OutboxRelayFallbackActive", width: 4,
				texts: map[string]text{"0": {"no", green}, "1": {"yes", red}},
				means: "Whether Postgres has invalidated the slot. No event is lost: the relay polls the table and " +
					"creates a new slot. Find out why it lagged: no relay for a long time, or an open transaction.",
				queries: []query{{leading("outbox_slot_lost"), ""}}, steps: none(),
			},
			{
				form: number, title: "Retained WAL", unit: "bytes", alert: "OutboxSlotRetainedWALCritical", width: 4,
				means: "WAL that Postgres keeps on disk for the slot. Above POSTHASTE_WAL_BUDGET (1 GiB by default), " +
					"the relay advances the slot and polls the table.",
				queries: []query{{leading("outbox_slot_retained_bytes"), ""}}, steps: below(512<<20, 1<<30),
			},
			{
				form: number, title: "Share of the limit", unit: "percentunit", alert: "OutboxSlotRetainedWALCritical",
				width: 4, empty: "no limit",
				means: "Retained WAL as a share of max_slot_wal_keep_size. At 1, Postgres invalidates the slot. " +
					"Without a limit, an abandoned slot fills the disk: set one.",
				queries: []query{{"max(outbox_slot_retained_bytes{FILTER} / (outbox_slot_max_keep_bytes{FILTER} > 0) " +
					"and on (job, instance) outbox_relay_leader{FILTER} == 1)", ""}},
				steps: below(0.5, 0.8),
			},
			{
				form: number, title: "Silence on the connection", unit: "s", alert: "OutboxSlotScrapeFailing", width: 4,
				means: "Seconds since the last message from Postgres on the replication connection; keepalives " +
					"arrive every few seconds. Above 30, the connection hangs, and the relay reconnects.",
				queries: []query{{"max(outbox_wire_idle_seconds{FILTER})", ""}}, steps: below(15, 30),
			},
			{
				form: number, title: "Streamed, p99", unit: "s", alert: "OutboxPublishSLOFastBurn", width: 4,
				empty: "no events",
				means: "99 of 100 streamed events are in Redis this long after their commit. Above half a second, " +
					"Redis, the network or the decoder is slow.",
				queries: []query{{quantile(0.99, `outbox_commit_to_publish_seconds{mode="cdc"}`), ""}},
				steps:   below(0.1, 0.5),
			},
		}},
		{title: "Mode", height: 6, panels: []panel{modePanel, firing}},
		{title: "Slot", height: 7, panels: []panel{
			slotWAL, slotAndWire,
			{
				title: "Published and settled", unit: "ops", alert: "OutboxOldestPendingTooOld",
				means: "Events streamed, and events that a mark holds, about a second later. If settling falls " +
					"behind, Postgres is slow or a commit that is streamed is not visible: the window fills, and " +
					"then streaming waits.",
				queries: []query{
					{rate(`outbox_published_total{mode="cdc"}`), "streamed"},
					{rate("outbox_settled_total"), "settled"},
				},
			},
		}},
		{title: "Stream and poll", height: 7, panels: []panel{
			inflight,
			{
				title: "Events polled", unit: "ops", alert: "OutboxRelayFallbackActive",
				means: "Events published from the table: in poll mode, at every start, and while the stream is " +
					"unusable. If it lasts in cdc mode, it is the fallback.",
				queries: []query{{rate(`outbox_published_total{mode="poll"}`), "events"}},
			},
			{
				title: "Audit and stalls", unit: "short", alert: "OutboxRelayNotPublishing",
				means: "How often the stream did not deliver rows of the table (missed) or made no progress " +
					"(stalled). Polling has published them; look for a filter on the publication, or another " +
					"program that changed the slot. Stalled now: rows wait without progress; see /readyz.",
				queries: []query{
					{jumps("outbox_audit_failures_total", "reason"), "{{reason}}"},
					{leading("outbox_relay_stalled"), "stalled now"},
				},
				steps: few(),
			},
			{
				title: "Mode switches and new slots", unit: "short", alert: "OutboxRelayFallbackActive",
				means: "Why the mode changed, and why a slot was created. missing: someone dropped the slot. lost: " +
					"Postgres invalidated it. silent, connection, stalled: the stream is unstable; check the network " +
					"and Postgres' log.",
				queries: append([]query{{jumps("outbox_slot_created_total", "reason"), "slot created: {{reason}}"}},
					switches.queries...),
				steps: []step{{0, green}, {4, orange}},
			},
		}},
		{title: "Monitoring", height: 7, folded: true, panels: []panel{
			{
				title: "Failed reads behind the gauges", unit: "ops", alert: "OutboxSlotScrapeFailing", width: 12,
				means: "While one of these rises, the gauges it names are out of date: backlog, dead and slot come " +
					"from Postgres, streams from Redis. Check those servers first.",
				queries: []query{{rate("outbox_scrape_errors_total", "collector"), "{{collector}}"}},
			},
			{
				title: "Connections to Postgres", unit: "short", alert: "PosthasteTargetDown", width: 12,
				means: "Used connections of each process, and the limit of its pool. If all stay in use, " +
					"statements wait for locks; see pg_stat_activity.",
				queries: []query{
					{`sum by (job) (pg_pool_connections{state="used", FILTER})`, "used, {{job}}"},
					{"sum by (job) (pg_pool_max_connections{FILTER})", "limit, {{job}}"},
				},
			},
		}},
	},
}
