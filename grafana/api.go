package grafana

const errorShare = `(sum(rate(http_request_duration_seconds_count{status=~"5..", FILTER}[$__rate_interval])) / ` +
	`sum(rate(http_request_duration_seconds_count{FILTER}[$__rate_interval])))`

var requests = panel{
	title: "Requests", unit: "reqps", alert: "PosthasteApiErrors",
	means: "Requests by route and status. 503: Postgres is unreachable, or Redis for credits. 409, 422: clients " +
		"and their keys. 429: the rate limit.",
	queries: []query{{rate("http_request_duration_seconds_count", "route", "status") + " > 0", "{{route}} {{status}}"}},
	empty:   "no requests",
}

var requestDuration = panel{
	title: "Request duration", unit: "s", alert: "PosthasteApiErrors",
	means: "99 of 100 requests are faster than this, by route. On a rise, Postgres is usually slow: check the wait " +
		"for a connection. The dots are traces.",
	queries: []query{{quantile(0.99, "http_request_duration_seconds", "route"), "{{route}}"}},
	steps:   []step{{0, green}, {0.5, red}},
}

var guardOutcomes = panel{
	title: "Idempotency guard", unit: "reqps", alert: "PosthasteApiErrors",
	means: "The guard's decisions. degraded: Redis is unusable and Postgres decides alone, which is slower but " +
		"correct. replay_…: clients repeat. mismatch: clients reuse keys. unknown: it is not known whether the " +
		"commit succeeded.",
	queries: []query{{rate("idem_requests_total", "outcome"), "{{outcome}}"}},
}

var api = board{
	file: "api", title: "API and idempotency", question: "Do clients get their answers, once each, and fast?",
	rows: []row{
		{title: "Do clients get their answers?", height: 5, panels: []panel{
			{
				form: number, title: "Error answers", unit: "percentunit", alert: "PosthasteApiErrors", width: 4,
				empty: "no requests",
				means: "Share of answers with a status of 500 and above. 503 means that Postgres (or Redis, for " +
					"credits) is unreachable: clients may repeat with the same key.",
				queries: []query{{errorShare, ""}}, steps: below(0.001, 0.01),
			},
			{
				form: number, title: "POST /orders, p99", unit: "s", alert: "PosthasteApiErrors",
				width: 4, empty: "no orders",
				means: "99 of 100 orders are answered within this time. On a rise, check the wait for a " +
					"connection, then Postgres.",
				queries: []query{{quantile(0.99, `http_request_duration_seconds{method="POST", route="/orders"}`), ""}},
				steps:   below(0.25, 0.5),
			},
			{
				form: number, title: "Requests", unit: "reqps", alert: "PosthasteTargetDown", width: 4,
				means:   "Requests of every route. If it is 0 during the day, clients cannot reach the API.",
				queries: []query{{rate("http_request_duration_seconds_count"), ""}},
			},
			{
				form: number, title: "Decided without Redis", unit: "percentunit",
				alert: "PosthasteApiErrors", width: 4, empty: "no requests",
				means: "Share of guarded requests for which Redis was unusable. Postgres' unique index then " +
					"decides: correct, but slower. Fix Redis.",
				queries: []query{{rate(`idem_requests_total{outcome="degraded"}`) + " / " +
					rate("idem_requests_total"), ""}},
				steps: below(0.001, 0.01),
			},
			{
				form: number, title: "Outcome unknown", unit: "short", alert: "PosthasteApiErrors",
				width: 4, empty: "0",
				means: "Requests within the chosen time whose commit could not be confirmed, because the connection " +
					"broke at that moment. A repeat by the client with the same key returns the outcome.",
				queries: []query{{increase(`idem_requests_total{outcome="unknown"}`), ""}}, steps: few(),
			},
			{
				form: number, title: "Connections in use", unit: "percentunit", alert: "PosthasteTargetDown", width: 4,
				means: "Used connections to Postgres as a share of the fullest pool. At 1, requests wait: raise " +
					"pool_max_conns in the URL, or find what is slow.",
				queries: []query{{`max(sum by (job, instance) (pg_pool_connections{state="used", FILTER}) / on (job, ` +
					`instance) pg_pool_max_connections{FILTER})`, ""}},
				steps: below(0.8, 0.95),
			},
		}},
		{title: "Requests", height: 7, panels: []panel{
			requests, requestDuration,
			{
				form: heat, title: "Duration, distribution", unit: "s", alert: "PosthasteApiErrors",
				means: "Every request's time. A second band above the first shows requests that wait: for a " +
					"connection, a lock, or another attempt with their key.",
				queries: []query{{rate("http_request_duration_seconds_bucket", "le"), "{{le}}"}},
			},
			{
				title: "Orders: p50, p95, p99", unit: "s", alert: "PosthasteApiErrors",
				means: "Duration of POST /orders. If only p99 rises, single commits are slow; if all three rise, " +
					"Postgres or the network to it is slow. The dots are traces.",
				queries: []query{
					{quantile(0.5, `http_request_duration_seconds{method="POST", route="/orders"}`), "p50"},
					{quantile(0.95, `http_request_duration_seconds{method="POST", route="/orders"}`), "p95"},
					{quantile(0.99, `http_request_duration_seconds{method="POST", route="/orders"}`), "p99"},
				},
				steps: []step{{0, green}, {0.5, red}},
			},
			{
				title: "Events written", unit: "ops", alert: "OutboxRelayNotPublishing",
				means: "Events committed to the outbox, by type. Compare with what is published: the overview has " +
					"both.",
				queries: []query{{rate("outbox_events_written_total", "type"), "{{type}}"}},
			},
			{
				title: "Errors by status", unit: "reqps", alert: "PosthasteApiErrors",
				means: "Answers of 400 and above. 409 and 422 are keys reused or in flight, 429 the rate limit, " +
					"402 a refused payment, 503 an unreachable server. Refused are connections that were too many.",
				queries: []query{
					{rate(`http_request_duration_seconds_count{status=~"[45].."}`, "status"), "{{status}}"},
					{rate("http_connections_refused_total", "listener", "reason"), "{{listener}}: refused, {{reason}}"},
				},
			},
		}},
		{title: "Idempotency", height: 7, folded: true, panels: []panel{
			guardOutcomes,
			{
				title: "Guard scripts, p99", unit: "s", alert: "PosthasteApiErrors",
				means: "99 of 100 calls to Redis are faster than this. A rise points to Redis or the network; after " +
					"its timeout, the guard continues without Redis.",
				queries: []query{{quantile(0.99, "idem_script_seconds", "script"), "{{script}}"}},
				steps:   []step{{0, green}, {0.05, orange}},
			},
			{
				title: "Replays", unit: "reqps", alert: "PosthasteApiErrors",
				means: "Requests answered from an earlier attempt. If there are many, clients repeat too early, or " +
					"answers do not reach them.",
				queries: []query{{rate(`idem_requests_total{outcome=~"replay_redis|replay_pg|waited"}`,
					"outcome"), "{{outcome}}"}},
			},
			{
				title: "Leases lost, results unwritten", unit: "short", alert: "PosthasteApiErrors",
				means: "Leases lost: work took longer than its lease, and another attempt took over; the unique " +
					"index accepted only one of them. Results unwritten: Redis did not store the answer; replays " +
					"come from Postgres.",
				queries: []query{
					{jumps("idem_lease_lost_total"), "leases lost"},
					{jumps("idem_publish_fail_total"), "results unwritten"},
				},
				steps: few(),
			},
			{
				title: "Conflicts", unit: "reqps", alert: "PosthasteApiErrors",
				means: "mismatch: a key was reused for another command, a client error. busy: another attempt was in " +
					"progress. takeover: the first attempt had died.",
				queries: []query{{rate(`idem_requests_total{outcome=~"mismatch|busy|takeover|rejected"}`,
					"outcome"), "{{outcome}}"}},
			},
		}},
		{title: "Postgres", height: 7, folded: true, panels: []panel{
			{
				title: "Connections", unit: "short", alert: "PosthasteTargetDown", width: 12,
				means: "Connections of the pools by state. If all are used and none is idle, requests wait. If " +
					"some stay in opening, Postgres does not answer.",
				queries: []query{
					{"sum by (job, state) (pg_pool_connections{FILTER})", "{{job}} {{state}}"},
					{"sum by (job) (pg_pool_max_connections{FILTER})", "{{job}} limit"},
				},
			},
			{
				title: "Wait for a connection", unit: "s", alert: "PosthasteTargetDown", width: 12, empty: "no work",
				means: "Mean wait for a connection. On a rise, the pool is too small for the load, or statements " +
					"are slow.",
				queries: []query{{rate("pg_pool_wait_seconds_total", "job") + " / " +
					rate("pg_pool_acquires_total", "job"), "{{job}}"}},
				steps: []step{{0, green}, {0.1, red}},
			},
		}},
	},
}
