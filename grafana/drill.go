package grafana

var drill = board{
	file: "drill", title: "failover drill", question: "Did the failover lose or repeat anything, and how long did it take?",
	rows: []row{
		{"Did it lose or repeat anything, and how long did it take?", 5, []panel{
			{
				form: number, title: "Written, not published", unit: "short", alert: "OutboxRelayNotPublishing", width: 4,
				means: "Events written less events published, within the chosen time. After the drill it must be 0, give or take what " +
					"Prometheus extrapolates at the edges; what is missing shows as the backlog. Other services' events make it negative.",
				// The histogram counts what is published from zero on; outbox_published_total begins with its stream's first event.
				queries: []query{{increase("outbox_events_written_total") + " - " + increase("outbox_commit_to_publish_seconds_count"), ""}},
				steps:   []step{{0, green}, {100, orange}},
			},
			backlog,
			{
				form: number, title: "Longest wait", unit: "s", alert: "OutboxOldestPendingTooOld", width: 4,
				means:   "The greatest age an unpublished event reached within the chosen time: how long the failover took, as events felt it.",
				queries: []query{{"max(max_over_time(outbox_backlog_oldest_seconds{FILTER}[$__range]))", ""}}, steps: below(10, 60),
			},
			{
				form: number, title: "Duplicates prevented", unit: "short", alert: "OutboxModeFlapping", width: 4,
				means: "Events that the new owner found published already and did not publish again. Some are right after a kill; consumers " +
					"saw none of them.",
				queries: []query{{increase("outbox_suppressed_total"), ""}},
				steps:   []step{{0, blue}},
			},
			{
				form: number, title: "New owners", unit: "short", alert: "OutboxNoLeader", width: 4,
				means:   "How often a relay took over within the chosen time: once per kill. More: relays do not stay alive.",
				queries: []query{{increase("outbox_adoptions_total"), ""}}, steps: []step{{0, blue}, {10, orange}},
			},
			{
				form: number, title: "Time in poll mode", unit: "percentunit", alert: "OutboxRelayFallbackActive", width: 4, atMost: 1,
				means:   "Share of the chosen time in which the table was swept. After the drill the relay returns to cdc by itself when the backlog is drained.",
				queries: []query{{`max(avg_over_time(outbox_relay_mode{mode="poll", FILTER}[$__range]))`, ""}}, steps: []step{{0, blue}},
			},
		}},
		{"Who does what", 6, []panel{
			{
				form: states, title: "Mode by relay", unit: "short", texts: modes, alert: "OutboxRelayFallbackActive", width: 12,
				means:   "Kill the leader: its lane ends, a standby goes through poll to cdc within seconds. Drop the slot: cdc, poll, cdc on the same lane.",
				queries: []query{{modeOf, "{{instance}}"}},
			},
			{
				form: states, title: "Processes", unit: "short", alert: "TargetDown", width: 12, texts: map[string]text{"0": {"down", red}, "1": {"up", green}},
				means:   "What Prometheus reaches. A process that is down here and was not killed: see its log, then start it.",
				queries: []query{{"max by (job, instance) (up{FILTER})", "{{job}} {{instance}}"}},
			},
			{
				form: states, title: "Leader", unit: "short", alert: "OutboxNoLeader", width: 12, texts: map[string]text{"0": {"–", grey}, "1": {"leads", green}},
				means:   "Exactly one lane leads at any time. A gap is the time without a leader: the lock of a killed process is free when Postgres sees its connection end.",
				queries: []query{{"max by (instance) (outbox_relay_leader{FILTER})", "{{instance}}"}},
			},
			firing,
			{
				form: states, title: "Desired mode", unit: "short", alert: "OutboxModeFlapping", width: 24, texts: map[string]text{"0": {"–", grey}, "1": {"wanted", blue}},
				means:   "What posthaste mode or the console asked for; relays follow within a second. Nobody asked: look who did.",
				queries: []query{{"max by (mode) (outbox_relay_desired_mode{FILTER})", "{{mode}}"}},
			},
		}},
		{"What events felt", 7, []panel{
			writtenAndPublished, commitToPublish,
			{
				title: "Backlog", unit: "short", alert: "OutboxOldestPendingTooOld",
				means:   "Rows that wait. It climbs while nothing publishes, and must fall to its level from before: the slope is the speed of the drain.",
				queries: []query{{leading("outbox_backlog_rows"), "rows"}},
			},
			{
				title: "Oldest unpublished event", unit: "s", alert: "OutboxOldestPendingTooOld",
				means:   "A triangle: its height is how long the failover took. If it does not come down, look at the publish errors.",
				queries: []query{{leading("outbox_backlog_oldest_seconds"), "age"}}, steps: below(10, 60),
			},
			suppressedAndParked, publishErrors,
		}},
		{"What the servers felt", 7, []panel{
			slotWAL,
			{
				title: "Epoch", unit: "short", alert: "OutboxModeFlapping",
				means:   "The fencing epoch of each relay: every new owner raises it, and Redis refuses what comes with an older one. A stair per kill; a ramp is a fight.",
				queries: []query{{"max by (instance) (outbox_relay_epoch{FILTER})", "{{instance}}"}},
			},
			{
				title: "Requests that failed", unit: "reqps", alert: "ApiErrors",
				means: "Answers of 500 and above, and requests decided without Redis. Killing Redis or a relay must fail no order; stopping Postgres " +
					"fails all until it is back.",
				queries: []query{
					{`sum by (status) (rate(http_request_duration_seconds_count{status=~"5..", FILTER}[$__rate_interval]))`, "{{status}}"},
					{rate(`idem_requests_total{outcome="degraded"}`), "without Redis"},
				},
			},
			groupLag,
			{
				title: "Failed reads behind the gauges", unit: "ops", alert: "SlotScrapeFailing",
				means:   "Which server did not answer: backlog, dead and slot are Postgres, streams is Redis. While it rises, the gauges are old.",
				queries: []query{{rate("outbox_scrape_errors_total", "collector"), "{{collector}}"}},
			},
			{
				title: "Credits not yet in the ledger", unit: "s", alert: "CreditsSyncLagging",
				means:   "While Postgres is away operations go on and wait in Redis. Afterwards it must fall to 0.",
				queries: []query{{"max(credits_sync_lag_seconds{FILTER})", "lag"}}, steps: below(10, 60),
			},
		}},
	},
}
