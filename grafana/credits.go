package grafana

var creditsBoard = board{
	file: "credits", title: "credits", question: "Are balances served, and are they in the ledger?",
	rows: []row{
		{title: "Are credits in the ledger?", height: 5, panels: []panel{
			{
				form: number, title: "Not yet in the ledger", unit: "s", width: 6, alert: "PosthasteCreditsSyncLagging",
				means: "Age of the oldest operation that only Redis has. On a rise, the relay or Postgres is slow or " +
					"unreachable. If Redis loses its data now, these operations are lost.",
				queries: []query{{"max(credits_sync_lag_seconds{FILTER})", "lag"}}, steps: below(10, 60),
			},
			{
				form: number, title: "Frozen accounts", unit: "short", width: 6, empty: "0",
				alert: "PosthasteCreditsAccountFrozen",
				means: "Accounts closed because their operations contradict the ledger. Each needs a person: run " +
					"posthaste credits reconcile.",
				queries: []query{{increase("credits_frozen_total", "reason"), "{{reason}}"}}, steps: none(),
			},
			{
				form: number, title: "Ledger drift", unit: "short", width: 6, alert: "PosthasteCreditsLedgerDrift",
				means: "Credits by which the accounts differ from their counter-accounts, checked every 15 minutes. " +
					"Any other value than 0 means that the ledger was changed by hand; posthaste credits reconcile " +
					"names the accounts.",
				queries: []query{{"max(abs(credits_reconcile_drift{FILTER}))", "drift"}}, steps: none(),
			},
			{
				form: number, title: "Operations lost", unit: "short", width: 6, empty: "0",
				alert: "PosthasteCreditsOperationsLost",
				means: "Operations that were acknowledged but lost with Redis' data. Set a durability that " +
					"survives this kind of failure.",
				queries: []query{{increase("credits_lost_operations_total"), "lost"}},
				steps:   none(),
			},
		}},
		{title: "Operations", height: 7, panels: []panel{
			{
				title: "Operations", unit: "ops", alert: "PosthasteCreditsStoreUnavailable",
				means: "By outcome. unavailable: Redis is unreachable, or Postgres, for keys that are not UUIDv7. " +
					"backpressure: the sync is behind. epoch: Redis lost data, a bucket is being rebuilt. frozen: an " +
					"account needs a person.",
				queries: []query{{rate("credits_ops_total", "code"), "{{code}}"}},
			},
			{
				title: "Credit requests, p99", unit: "s", alert: "PosthasteCreditsStoreUnavailable",
				means: "99 of 100 additions, deductions and balances are answered within this time. A rise points to " +
					"Redis, or to the durability that it waits for.",
				queries: []query{{quantile(0.99, `http_request_duration_seconds{route=~"/(add|deduct|balance)/.*"}`,
					"route"), "{{route}}"}},
			},
			{
				title: "Orders paid", unit: "ops", alert: "PosthasteCreditsOrderPaymentStuck",
				means: "Payments of orders by outcome. completed and refunded: a process died midway, and the relay " +
					"finished its work. unpaid: an order stands without its deduction. unrefunded: credits of a " +
					"refused order could not be refunded.",
				queries: []query{{rate("credits_order_payments_total", "outcome"), "{{outcome}}"}},
			},
			{
				title: "Answers 503 and 423", unit: "reqps", alert: "PosthasteCreditsStoreUnavailable",
				means: "503: Redis is unreachable, or cannot provide the configured durability; nothing was done, " +
					"and clients repeat with the same key. 423: a frozen account.",
				queries: []query{{rate(`http_request_duration_seconds_count{route=~"/(add|deduct|balance)/.*", `+
					`status=~"503|423"}`, "route", "status"), "{{route}} {{status}}"}},
			},
			{
				title: "Rebuilt from the ledger", unit: "short", alert: "PosthasteCreditsOperationsLost",
				means: "Buckets rebuilt because Redis had lost operations, and accounts read because Redis did not " +
					"have them. Both rise after Redis came back empty; at other times, find out what deletes keys.",
				queries: []query{
					{jumps("credits_epoch_bumps_total"), "buckets"},
					{jumps("credits_ledger_reads_total"), "accounts"},
				},
			},
		}},
	},
}
