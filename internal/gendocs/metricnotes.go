package gendocs

// metricNote is the text about a metric in docs/metrics.md, in addition to its help.
type metricNote struct {
	// name is the metric's name; a metric without a note, or a note without a metric, fails gen-docs.
	name string
	// rise explains the meaning of a rise, and the remedy.
	rise string
	// query is a PromQL query for the metric. The tests in grafana parse it and check its metrics and labels.
	query string
}

// leading restricts a gauge that only the leader sets to the leader.
const leading = " and on (job, instance) outbox_relay_leader == 1"

// metricNotes are the sections of docs/metrics.md, in order.
var metricNotes = []struct {
	title string
	notes []metricNote
}{
	{"Is anything lost or late?", []metricNote{
		{
			"outbox_backlog_oldest_seconds",
			"events are published not at all, or slower than they arrive. Above a minute, check " +
				"`outbox_publish_errors_total` and `/readyz` of the leading relay.",
			"max(outbox_backlog_oldest_seconds" + leading + ")",
		},
		{
			"outbox_backlog_rows",
			"events arrive faster than they are published: normal for a burst, and while Redis is unavailable. " +
				"Compare it with the rate of `outbox_published_total`.",
			"max(outbox_backlog_rows" + leading + ")",
		},
		{
			"outbox_dead_rows",
			"Redis rejected these events themselves. `posthaste dead list` shows the reason; fix that, then " +
				"`posthaste dead retry`.",
			"max(outbox_dead_rows" + leading + ")",
		},
		{
			"outbox_relay_stalled",
			"rows wait, and for half a minute nothing was published, settled or parked; or one part of the table has " +
				"made no progress for two minutes while others have. `/readyz` and the log name the place.",
			"max(outbox_relay_stalled" + leading + ")",
		},
		{
			"outbox_lost_events",
			"Redis was killed, restored or failed over, and lacks events that had been settled, longer ago than " +
				"`POSTHASTE_RESTORE`. `posthaste status` names the command that restores them, after which this falls.",
			"max(outbox_lost_events" + leading + ")",
		},
		{
			"outbox_lost_events_total",
			"as `outbox_lost_events`, but it does not fall when they are restored. Where they cannot be counted, it " +
				"rises by one.",
			"sum(increase(outbox_lost_events_total[1h]))",
		},
		{
			"outbox_restored_events_total",
			"Redis was killed, restored or failed over, and lacked events that had been settled; they are in their " +
				"streams again. Consumers that had seen them see them again.",
			"sum(increase(outbox_restored_events_total[1h]))",
		},
		{
			"outbox_postgres_failovers_total",
			"Postgres runs on another timeline than before: an asynchronous standby took over, or it was restored. " +
				"Events that it no longer had as settled were found in the streams, and are not published again.",
			"sum(increase(outbox_postgres_failovers_total[1h]))",
		},
		{
			"outbox_phantom_events",
			"After a failover or a restore, events are in streams and not in Postgres: their commits are lost, or " +
				"their rows were deleted. `posthaste phantoms` names them, and with `--ack` ends the alert.",
			"max(outbox_phantom_events)",
		},
		{
			"outbox_parked_total",
			"as `outbox_dead_rows`, but it does not fall when they are retried or dropped.",
			"sum(increase(outbox_parked_total[1h]))",
		},
		{
			"outbox_trim_lost_total",
			"a consumer group has missed events permanently, because the stream was trimmed (`POSTHASTE_TRIM=force`, " +
				"or an XTRIM) before it read them. They are in `outbox_history`: `posthaste replay`.",
			"sum by (stream, group) (increase(outbox_trim_lost_total[1h]))",
		},
		{
			"outbox_commit_to_publish_seconds",
			"events are late: a backlog is drained, Redis is slow, or the relay sweeps, which is slower by design. " +
				"The trace ids lead to single events.",
			"histogram_quantile(0.99, sum by (le, mode) (rate(outbox_commit_to_publish_seconds_bucket[5m])))",
		},
		{
			"outbox_events_written_total",
			"more events. Events that other services insert directly are not counted.",
			"sum by (type) (rate(outbox_events_written_total[5m]))",
		},
		{
			"outbox_published_total",
			"more events. A fall to 0 while events are written is an outage.",
			"sum by (mode) (rate(outbox_published_total[5m]))",
		},
		{
			"outbox_settled_total",
			"more events. If it stays below `outbox_published_total{mode=\"cdc\"}`, Postgres is slow, or a streamed " +
				"commit is not visible, and the window fills.",
			"sum(rate(outbox_settled_total[5m]))",
		},
		{
			"outbox_inflight_events",
			"Postgres is slow to settle. At `POSTHASTE_WINDOW` publishing waits for it.",
			"max(outbox_inflight_events)",
		},
		{
			"outbox_suppressed_total",
			"duplicates were prevented: after a crash, or a hand-over. A steady rise means that two relays fight.",
			"sum by (reason) (increase(outbox_suppressed_total[15m]))",
		},
	}},
	{"Modes and leadership", []metricNote{
		{
			"outbox_relay_mode",
			"a change is a hand-over. `poll` that lasts and is not desired is the fallback: " +
				"`outbox_mode_switches_total` has the reason.",
			"max by (mode) (outbox_relay_mode)",
		},
		{
			"outbox_relay_desired_mode",
			"the mode was set: `posthaste mode`, `PUT /relay/mode`.",
			"max by (mode) (outbox_relay_desired_mode)",
		},
		{
			"outbox_relay_leader",
			"the sum is 1. At 0 for more than a few seconds nothing is relayed; at 2, for more than a scrape, the " +
				"clocks of two scrapes differ: the epoch fences the older one.",
			"sum(outbox_relay_leader)",
		},
		{
			"outbox_relay_info",
			"it does not rise; its labels name the database, where one Prometheus sees the relays of several. Join " +
				"it by `job` and `instance`.",
			"sum by (source) (outbox_relay_leader * on (job, instance) group_left (source) outbox_relay_info)",
		},
		{
			"outbox_relay_epoch",
			"another owner took over: a start, a new leader, a fence. Many in a row mean that relays keep dying.",
			"max(outbox_relay_epoch)",
		},
		{
			"outbox_adoptions_total",
			"as the epoch, by instance.",
			"sum by (instance) (increase(outbox_adoptions_total[15m]))",
		},
		{
			"outbox_mode_switches_total",
			"the stream keeps ending; the label names the reason. More than a few in a quarter of an hour is flapping.",
			"sum by (from, to, reason) (increase(outbox_mode_switches_total[15m])) > 0",
		},
		{
			"outbox_audit_failures_total",
			"the stream lacked rows of the table (`missed`), or made no progress (`stalled`); the sweep has " +
				"published them. Look for a filter on the publication, or another publication.",
			"sum by (reason) (increase(outbox_audit_failures_total[1h]))",
		},
		{
			"outbox_scrape_errors_total",
			"the named gauges show old values: Postgres (`backlog`, `dead`, `slot`) or Redis (`streams`) did not " +
				"answer.",
			"sum by (collector) (rate(outbox_scrape_errors_total[5m]))",
		},
		{
			"tls_certificate_expiry_timestamp_seconds",
			"the certificate was replaced. By what it is used for: the public API (`http`), the admin listener " +
				"(`admin`), as a client of Redis (`redis`), or of webhooks (`receiver`).",
			"min by (job, instance, use) (tls_certificate_expiry_timestamp_seconds)",
		},
		{
			"tls_files_rejected_total",
			"the files of TLS have changed and cannot be used: a key does not fit its certificate, or one is gone. " +
				"The log names it; the previous files stay in use until they expire.",
			"sum by (job, instance, use) (increase(tls_files_rejected_total[10m]))",
		},
		{
			"posthaste_build_info",
			"it does not rise; two series are two versions side by side.",
			"count by (version) (posthaste_build_info)",
		},
	}},
	{"The slot and the stream of changes", []metricNote{
		{
			"outbox_slot_active",
			"1 while the slot is streamed. 0 in `auto` or `cdc` for more than a minute: `posthaste doctor`.",
			"max(outbox_slot_active" + leading + ")",
		},
		{
			"outbox_slot_lost",
			"Postgres has invalidated the slot. No event is lost: the relay sweeps and creates a new one. Find out " +
				"why it lagged.",
			"max(outbox_slot_lost" + leading + ")",
		},
		{
			"outbox_slot_created_total",
			"`missing`: the slot was dropped while the relay was using it. `lost`: Postgres invalidated it. " +
				"`publication`: the publication had lost the table. No event is lost: the relay sweeps before it " +
				"streams again.",
			"sum by (reason) (increase(outbox_slot_created_total[1h]))",
		},
		{
			"outbox_slot_retained_bytes",
			"a disk fills. A transaction is open somewhere, or nothing confirms: the relay acts at " +
				"`POSTHASTE_WAL_BUDGET`, Postgres at `outbox_slot_max_keep_bytes`.",
			"max(outbox_slot_retained_bytes" + leading + ")",
		},
		{
			"outbox_slot_confirmed_lag_bytes",
			"the relay is behind the WAL of the whole database, not only of the outbox: a bulk load elsewhere shows " +
				"here.",
			"max(outbox_slot_confirmed_lag_bytes" + leading + ")",
		},
		{
			"outbox_slot_max_keep_bytes",
			"it is a setting. At -1 an abandoned slot fills the disk: set `max_slot_wal_keep_size`.",
			"max(outbox_slot_max_keep_bytes" + leading + ")",
		},
		{
			"outbox_wire_idle_seconds",
			"Postgres is silent; keepalives come every few seconds. The relay restarts the stream automatically.",
			"max(outbox_wire_idle_seconds)",
		},
		{
			"outbox_cdc_transactions_total",
			"more transactions that write events.",
			"sum(rate(outbox_cdc_transactions_total[5m]))",
		},
		{
			"outbox_cdc_rows_total",
			"more events. Above `outbox_published_total{mode=\"cdc\"}`: a restart repeats what was not confirmed.",
			"sum(rate(outbox_cdc_rows_total[5m]))",
		},
		{
			"outbox_cdc_received_bytes_total",
			"more data over the wire, from large events or a restart.",
			"sum(rate(outbox_cdc_received_bytes_total[5m]))",
		},
		{
			"outbox_cdc_reconnects_total",
			"the stream breaks: Postgres restarts, a network that cuts idle connections, `wal_sender_timeout`.",
			"sum(increase(outbox_cdc_reconnects_total[15m]))",
		},
		{
			"outbox_cdc_decode_errors_total",
			"the outbox table has a shape that posthaste does not know. Events keep flowing by the sweep: undo the " +
				"change of " +
				"the table.",
			"sum(increase(outbox_cdc_decode_errors_total[1h]))",
		},
	}},
	{"The sweep", []metricNote{
		{
			"outbox_sweep_rows_total",
			"events travel by the sweep: poll mode, a start, a fallback.",
			"sum(rate(outbox_sweep_rows_total[5m]))",
		},
		{
			"outbox_sweep_batches_total",
			"with few rows per batch: batches were made small after failures.",
			"sum(rate(outbox_sweep_rows_total[5m])) / sum(rate(outbox_sweep_batches_total[5m]))",
		},
		{
			"outbox_sweep_claims_total",
			"workers take turns; it follows the batches. Far above them: the parts are empty.",
			"sum(rate(outbox_sweep_claims_total[5m]))",
		},
		{
			"outbox_sweep_errors_total",
			"Redis or Postgres refuses; `outbox_publish_errors_total` has the class.",
			"sum(rate(outbox_sweep_errors_total[5m]))",
		},
	}},
	{"Redis and its streams", []metricNote{
		{
			"outbox_publish_seconds",
			"Redis or the network is slow. With `POSTHASTE_REDIS_DURABILITY` it includes the wait for replicas or " +
				"the disk.",
			"histogram_quantile(0.99, sum by (le) (rate(outbox_publish_seconds_bucket[5m])))",
		},
		{
			"outbox_publish_errors_total",
			"publishing fails, and is repeated. The class is the reason: full, read-only, unreachable, and so on. " +
				"`wrongtype` and `too_large` park the event.",
			"sum by (class) (rate(outbox_publish_errors_total[5m]))",
		},
		{
			"outbox_pubsub_failed_total",
			"Redis refuses PUBLISH to the user (ACL), or event types begin with `__`, and such channels are Redis' " +
				"own; the streams have the events anyway.",
			"sum(rate(outbox_pubsub_failed_total[5m]))",
		},
		{
			"outbox_stream_length",
			"above `POSTHASTE_STREAM_MAXLEN` a consumer group holds trimming: `outbox_group_lag`, " +
				"`outbox_group_idle_seconds`.",
			"max by (stream) (outbox_stream_length)",
		},
		{
			"outbox_stream_info",
			"a type has got another stream: it is spread over several, or new. Join other metrics with it to see a " +
				"type as one; a type may be called like a stream of another one, so names alone do not tell.",
			"sum by (base) (max by (stream) (outbox_stream_length) * on (stream) group_left (base) " +
				"max by (stream, base) (outbox_stream_info))",
		},
		{
			"outbox_consumer_stream_length",
			"as `outbox_stream_length`, as the consumer sees it.",
			"max by (stream) (outbox_consumer_stream_length)",
		},
		{
			"redis_memory_ratio",
			"Redis fills; at 1 it refuses writes and events wait in the outbox. Give it memory, or find the group " +
				"that holds " +
				"trimming.",
			"max(redis_memory_ratio)",
		},
		{
			"redis_eviction_unsafe",
			"Redis may delete streams, gates, keys and balances when it is full: `CONFIG SET maxmemory-policy " +
				"noeviction`.",
			"max(redis_eviction_unsafe)",
		},
	}},
	{"Consumer groups", []metricNote{
		{
			"outbox_group_lag",
			"consumers are too slow, or none runs.",
			"max by (stream, group) (outbox_group_lag)",
		},
		{
			"outbox_group_pending",
			"handlers are slow, or fail and are repeated.",
			"max by (stream, group) (outbox_group_pending)",
		},
		{
			"outbox_group_oldest_pending_seconds",
			"an event hangs in its handler, or fails repeatedly.",
			"max by (stream, group) (outbox_group_oldest_pending_seconds)",
		},
		{
			"outbox_group_idle_seconds",
			"no consumer reads for the group, and it keeps entries from being trimmed until Redis is full. Start its " +
				"consumers, or `posthaste groups drop` it.",
			"max by (stream, group) (outbox_group_idle_seconds)",
		},
		{
			"outbox_consumer_read_total",
			"more events.",
			"sum by (group) (rate(outbox_consumer_read_total[5m]))",
		},
		{
			"outbox_consumer_attempts_total",
			"of `failed` or `panic`: the handler, or what it calls. Of `unavailable`: what it calls reported that it " +
				"is unavailable.",
			"sum by (group, outcome) (rate(outbox_consumer_attempts_total[5m]))",
		},
		{
			"outbox_consumer_dead_total",
			"unprocessed events are in the dead stream. Examine them, fix the handler, and retry them.",
			"sum by (group) (increase(outbox_consumer_dead_total[1h]))",
		},
		{
			"outbox_consumer_handle_seconds",
			"the handler, or what it calls, is slow.",
			"histogram_quantile(0.99, sum by (le, group) (rate(outbox_consumer_handle_seconds_bucket[5m])))",
		},
		{
			"outbox_consumer_delay_seconds",
			"events are processed late: compare with `outbox_commit_to_publish_seconds`; the difference is the " +
				"consumers' share.",
			"histogram_quantile(0.99, sum by (le, group) (rate(outbox_consumer_delay_seconds_bucket[5m])))",
		},
		{
			"outbox_consumer_claimed_total",
			"consumers end without a stop, or hang for longer than `--claim-idle`.",
			"sum by (group) (increase(outbox_consumer_claimed_total[15m]))",
		},
		{
			"outbox_consumer_removed_total",
			"dead consumers were removed from the group, one for each lost process.",
			"sum by (group) (increase(outbox_consumer_removed_total[1h]))",
		},
		{
			"outbox_consumer_inflight_events",
			"handlers are slow. The number is bounded; at the bound, reading waits.",
			"sum by (group) (outbox_consumer_inflight_events)",
		},
		{
			"outbox_consumer_parked_events",
			"one subject's event is slow or fails, and those behind it wait.",
			"sum by (group) (outbox_consumer_parked_events)",
		},
		{
			"outbox_consumer_delayed_subjects",
			"handlers fail, and wait for their next attempt.",
			"sum by (group) (outbox_consumer_delayed_subjects)",
		},
		{
			"outbox_consumer_stalled",
			"there is something to do, and nothing has moved for a minute (a quarter of an hour where only handlers " +
				"run). `/readyz` of the consumer and its log say what it waits for.",
			"max by (group, instance) (outbox_consumer_stalled)",
		},
		{
			"outbox_consumer_redis_errors_total",
			"Redis is away or refuses; every call is repeated.",
			"sum by (op) (rate(outbox_consumer_redis_errors_total[5m]))",
		},
		{
			"outbox_deliver_seconds",
			"the receiver of webhooks is slow. Of the count of `busy` or `unreachable`: it does not take events, " +
				"which wait. Of `refused`: it does not accept them, and they will be dead. Of `gone`: it wants " +
				"no more.",
			"sum by (group, outcome) (rate(outbox_deliver_seconds_count[5m]))",
		},
	}},
	{"The API", []metricNote{
		{
			"http_request_duration_seconds",
			"of the duration: Postgres, mostly; see `pg_pool_wait_seconds_total`. Of status 503: Postgres is away. " +
				"Of 409 and 422: clients.",
			"histogram_quantile(0.99, sum by (le, route) (rate(http_request_duration_seconds_bucket[5m])))",
		},
		{
			"http_connections_refused_total",
			"of `total`: raise `--max-connections`, or add an instance. Of `address`: one client holds a quarter of " +
				"them; a proxy in front belongs to `--trusted-proxies`.",
			"sum by (listener, reason) (rate(http_connections_refused_total[5m]))",
		},
		{
			"idem_requests_total",
			"of `degraded`: Redis is unusable, Postgres decides alone. Of `replay_…`: clients repeat. Of `mismatch`: " +
				"clients reuse keys. Of `unknown`: commits with an unknown outcome.",
			"sum by (outcome) (rate(idem_requests_total[5m]))",
		},
		{
			"idem_script_seconds",
			"Redis or the network is slow.",
			"histogram_quantile(0.99, sum by (le, script) (rate(idem_script_seconds_bucket[5m])))",
		},
		{
			"idem_wait_seconds",
			"clients repeat before the first answer is there.",
			"histogram_quantile(0.99, sum by (le) (rate(idem_wait_seconds_bucket[5m])))",
		},
		{
			"idem_lease_lost_total",
			"requests take longer than their lease, and were taken over; the unique index lets only one of them count.",
			"sum(increase(idem_lease_lost_total[15m]))",
		},
		{
			"idem_publish_fail_total",
			"replays come from Postgres instead of Redis, which is slower but correct.",
			"sum(rate(idem_publish_fail_total[5m]))",
		},
		{
			"idem_short_records_total",
			"more than three quarters of Redis' memory are in use; raise `maxmemory`, or set `--guard-redis-url`.",
			"sum(rate(idem_short_records_total[5m]))",
		},
		{
			"pg_pool_connections",
			"of `used` to `pg_pool_max_connections`: requests wait. Give the pool more (`pool_max_conns` in the " +
				"URL), or Postgres less to do.",
			"sum by (job, state) (pg_pool_connections)",
		},
		{
			"pg_pool_max_connections",
			"it is a setting. All processes together must stay below Postgres' `max_connections`.",
			"sum(pg_pool_max_connections)",
		},
		{
			"pg_pool_acquires_total",
			"more work for Postgres.",
			"sum by (job) (rate(pg_pool_acquires_total[5m]))",
		},
		{
			"pg_pool_wait_seconds_total",
			"all connections are in use: the pool is too small, or statements are slow. The query is the mean wait.",
			"sum by (job) (rate(pg_pool_wait_seconds_total[5m])) / sum by (job) (rate(pg_pool_acquires_total[5m]))",
		},
	}},
	{"Credits", []metricNote{
		{
			"credits_ops_total",
			"of `epoch`: Redis has lost data and a bucket is rebuilt. Of `backpressure`: the sync is behind. Of " +
				"`frozen`: accounts wait for an operator. Of `unavailable`: Redis is away, or Postgres, for keys " +
				"that are not UUIDv7.",
			"sum by (code) (rate(credits_ops_total[5m]))",
		},
		{
			"credits_order_payments_total",
			"of `completed` or `refunded`: processes ended between the deduction and the order, and the work was " +
				"ended for them. Of `unpaid`: an order stands without its deduction. Of `unrefunded`: an order was " +
				"refused and its credits could not be given back. An operator must examine it.",
			"sum by (outcome) (rate(credits_order_payments_total[5m]))",
		},
		{
			"credits_sync_lag_seconds",
			"operations are in Redis only: if Redis loses them now, they are gone. The relay or Postgres is slow, or " +
				"gone.",
			"max(credits_sync_lag_seconds)",
		},
		{
			"credits_stream_entries",
			"as the lag, in operations.",
			"max(credits_stream_entries)",
		},
		{
			"credits_sync_entries_total",
			"of `quarantined`: operations contradict the ledger, `posthaste credits reconcile` explains them. Of " +
				"`duplicate`: the sync was interrupted.",
			"sum by (outcome) (rate(credits_sync_entries_total[5m]))",
		},
		{
			"credits_frozen_total",
			"an account is frozen until an operator has examined it: `posthaste credits reconcile`.",
			"sum by (reason) (increase(credits_frozen_total[1h]))",
		},
		{
			"credits_lost_operations_total",
			"acknowledged operations were lost with the memory of Redis. Use a durability that survives such failures.",
			"sum(increase(credits_lost_operations_total[1h]))",
		},
		{
			"credits_durability_wait_seconds",
			"replicas or the disk are slow; every operation waits for them. At half a second answers become " +
				"`outcome_unknown`. Empty with `POSTHASTE_REDIS_DURABILITY=none`.",
			"histogram_quantile(0.99, sum by (le) (rate(credits_durability_wait_seconds_bucket[5m])))",
		},
		{
			"credits_reconcile_drift",
			"the ledger was changed by hand. `posthaste credits reconcile` names the accounts.",
			"max(abs(credits_reconcile_drift))",
		},
		{
			"credits_epoch_bumps_total",
			"Redis had lost operations, and buckets were rebuilt from the ledger.",
			"sum(increase(credits_epoch_bumps_total[1h]))",
		},
		{
			"credits_ledger_reads_total",
			"accounts are loaded into Redis again: after a rebuild, or because many were unused for a long time.",
			"sum(rate(credits_ledger_reads_total[5m]))",
		},
	}},
}
