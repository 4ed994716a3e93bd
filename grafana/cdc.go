package grafana

var yesNo = map[string]text{"0": {"no", red}, "1": {"yes", green}}

var cdc = board{
	file: "cdc", title: "CDC and slot", question: "Does the stream of changes flow, and does the slot endanger Postgres' disk?",
	rows: []row{
		{"Does it flow, and is the disk safe?", 5, []panel{
			{
				form: number, title: "Slot is streamed", unit: "short", alert: "OutboxSlotInactive", width: 4, texts: yesNo,
				means: "Whether a walsender streams the slot. No is right in poll mode only; otherwise events travel by the sweep: " +
					"posthaste doctor says what is missing.",
				queries: []query{{leading("outbox_slot_active"), ""}}, steps: []step{{0, red}, {1, green}},
			},
			{
				form: number, title: "Slot is lost", unit: "short", alert: "OutboxSlotLost", width: 4,
				texts: map[string]text{"0": {"no", green}, "1": {"yes", red}},
				means: "Whether Postgres has given the slot up. No event is lost: the relay sweeps and makes a new slot. Find out why it " +
					"lagged: no relay for long, or a transaction left open.",
				queries: []query{{leading("outbox_slot_lost"), ""}}, steps: none(),
			},
			{
				form: number, title: "Retained WAL", unit: "bytes", alert: "OutboxSlotRetainedWALHigh", width: 4,
				means: "WAL that Postgres keeps on disk for the slot. The relay acts at POSTHASTE_WAL_BUDGET (1 GiB by default): beyond it " +
					"the slot is advanced and the table takes over.",
				queries: []query{{leading("outbox_slot_retained_bytes"), ""}}, steps: below(512<<20, 1<<30),
			},
			{
				form: number, title: "Share of the limit", unit: "percentunit", alert: "OutboxSlotRetainedWALCritical", width: 4, empty: "no limit",
				means: "Retained WAL as a share of max_slot_wal_keep_size. At 1 Postgres gives the slot up. No limit means that an " +
					"abandoned slot fills the disk: set one.",
				queries: []query{{"max(outbox_slot_retained_bytes{FILTER} / (outbox_slot_max_keep_bytes{FILTER} > 0) and on (job, instance) outbox_relay_leader{FILTER} == 1)", ""}},
				steps:   below(0.5, 0.8),
			},
			{
				form: number, title: "Silence on the wire", unit: "s", alert: "SlotScrapeFailing", width: 4,
				means: "Seconds since Postgres was last heard on the replication connection; keepalives come every few seconds. Above 30 " +
					"the connection hangs, and the relay starts it again.",
				queries: []query{{"max(outbox_wire_idle_seconds{FILTER})", ""}}, steps: below(15, 30),
			},
			{
				form: number, title: "Streamed, p99", unit: "s", alert: "OutboxPublishSLOFastBurn", width: 4, empty: "no events",
				means:   "99 of 100 streamed events are in Redis this long after their commit. Above half a second: Redis, the network, or the decoder is behind.",
				queries: []query{{quantile(0.99, `outbox_commit_to_publish_seconds{mode="cdc"}`), ""}}, steps: below(0.1, 0.5),
			},
		}},
		{"Mode", 6, []panel{modePanel, firing}},
		{"Slot", 7, []panel{
			slotWAL, slotAndWire,
			{
				title: "Settled behind published", unit: "ops", alert: "OutboxOldestPendingTooOld",
				means: "Events streamed, and rows deleted after them. If settling stays behind, Postgres is slow to delete: the window fills, " +
					"and then streaming waits.",
				queries: []query{{rate(`outbox_published_total{mode="cdc"}`), "streamed"}, {rate("outbox_settled_total"), "settled"}, {rate("outbox_settle_missing_total"), "settled before"}},
			},
		}},
		{"Stream of changes", 7, []panel{
			{
				title: "Transactions and rows", unit: "ops", alert: "OutboxRelayNotPublishing",
				means: "What the slot delivers. Rows above what is published are repeats after a restart. Nothing while events are written: " +
					"the publication may be gone; posthaste doctor.",
				queries: []query{{rate("outbox_cdc_transactions_total"), "transactions"}, {rate("outbox_cdc_rows_total"), "rows"}},
			},
			{
				title: "Received", unit: "Bps", alert: "OutboxSlotRetainedWALHigh",
				means:   "Bytes over the replication connection: keepalives always, large payloads mostly. A plateau is the network's limit.",
				queries: []query{{rate("outbox_cdc_received_bytes_total"), "received"}},
			},
			{
				title: "Reconnects and decode errors", unit: "short", alert: "OutboxModeFlapping",
				means: "Reconnects: the stream breaks; see Postgres' log, wal_sender_timeout, and what cuts idle connections. Decode errors: the " +
					"table's shape is not posthaste's; undo what changed it.",
				queries: []query{
					{"sum(increase(outbox_cdc_reconnects_total{FILTER}[$__rate_interval]))", "reconnects"},
					{"sum(increase(outbox_cdc_decode_errors_total{FILTER}[$__rate_interval]))", "decode errors"},
				},
				steps: few(),
			},
			inflight,
			{
				title: "Audit and standstill", unit: "short", alert: "OutboxRelayStalled",
				means: "Times the stream was silent about rows that are in the table (missed), or stood still (stalled): the sweep has published " +
					"them; look for a filter on the publication, or somebody else's hand on the slot. Stands still: rows wait, and nothing moves; see /readyz.",
				queries: []query{
					{"sum by (reason) (increase(outbox_audit_failures_total{FILTER}[$__rate_interval]))", "{{reason}}"},
					{leading("outbox_relay_stalled"), "stands still"},
				},
				steps: few(),
			},
			{
				title: "Mode switches and new slots", unit: "short", alert: "OutboxSlotDropped",
				means: "Why the mode changed, and why a slot was made. missing: somebody drops the slot. lost: Postgres gave it up. silent, " +
					"connection, stalled: the stream does not hold; see the network and Postgres' log.",
				queries: append([]query{{"sum by (reason) (increase(outbox_slot_created_total{FILTER}[$__rate_interval]))", "slot made: {{reason}}"}}, switches.queries...),
				steps:   []step{{0, green}, {4, orange}},
			},
		}},
		{"Sweep", 7, []panel{
			{
				title: "Rows swept", unit: "ops", alert: "OutboxRelayFallbackActive",
				means:   "Events that travel by the sweep: in poll mode, at every start, and while the stream is unusable. Lasting in cdc mode: the fallback.",
				queries: []query{{rate("outbox_sweep_rows_total"), "rows"}},
			},
			{
				title: "Batches and claims", unit: "ops", alert: "OutboxOldestPendingTooOld",
				means: "Transactions of the sweep, and parts claimed. Many batches of few rows: they were made small after failures, and grow " +
					"again by themselves.",
				queries: []query{{rate("outbox_sweep_batches_total"), "batches"}, {rate("outbox_sweep_claims_total"), "claims"}},
			},
			{
				title: "Sweep errors", unit: "ops", alert: "OutboxPublishFailing",
				means:   "Batches that were rolled back; each is repeated. The publish errors have the class: see the overview.",
				queries: []query{{rate("outbox_sweep_errors_total"), "errors"}},
			},
		}},
		{"Watching", 7, []panel{
			{
				title: "Failed reads behind the gauges", unit: "ops", alert: "SlotScrapeFailing", width: 12,
				means: "While one of these rises, the gauges it names are old: backlog, dead and slot come from Postgres, streams from Redis. " +
					"Look at those servers first.",
				queries: []query{{rate("outbox_scrape_errors_total", "collector"), "{{collector}}"}},
			},
			{
				title: "Connections to Postgres", unit: "short", alert: "TargetDown", width: 12,
				means: "Used connections of each process, and what its pool may open. All in use for long: statements hang on locks; see " +
					"pg_stat_activity.",
				queries: []query{{`sum by (job) (pg_pool_connections{state="used", FILTER})`, "used, {{job}}"}, {"sum by (job) (pg_pool_max_connections{FILTER})", "limit, {{job}}"}},
			},
		}},
	},
}
