package grafana

var drill = board{
	file: "drill", title: "failover drill",
	question: "Did the failover lose or repeat anything, and how long did it take?",
	rows: []row{
		{title: "Did it lose or repeat anything, and how long did it take?", height: 5, panels: []panel{
			{
				form: number, title: "Lost", unit: "short", alert: "OutboxRedisLostData", width: 4,
				means: "Settled events that Redis lost and the relay could not restore, and events whose commits " +
					"Postgres lost. Any other value than 0: posthaste status names the command that restores them.",
				queries: []query{{leading("outbox_lost_events") + " + " + leading("outbox_phantom_events"), ""}},
				steps:   none(),
			},
			backlog,
			{
				form: number, title: "Longest wait", unit: "s", alert: "OutboxOldestPendingTooOld", width: 4,
				means: "The greatest age of an unpublished event within the chosen time: how long the failover " +
					"delayed events.",
				queries: []query{{"max(max_over_time(outbox_backlog_oldest_seconds{FILTER}[$__range]))", ""}},
				steps:   below(10, 60),
			},
			{
				form: number, title: "Duplicates prevented", unit: "short", alert: "OutboxRelayFallbackActive",
				width: 4,
				means: "Events that the new owner found already published and did not publish again. Some are " +
					"normal after a kill; consumers saw no duplicates.",
				queries: []query{{increase("outbox_suppressed_total"), ""}},
				steps:   []step{{0, blue}},
			},
			{
				form: number, title: "New owners", unit: "short", alert: "OutboxNoLeader", width: 4,
				means: "How often a relay took over within the chosen time: once per kill. If there are more, " +
					"relays do not stay alive.",
				queries: []query{{"max(outbox_relay_epoch{FILTER}) - min(min_over_time(outbox_relay_epoch{FILTER}" +
					"[$__range]) > 0)", ""}},
				steps: []step{{0, blue}, {10, orange}},
			},
			{
				form: number, title: "Time in poll mode", unit: "percentunit", alert: "OutboxRelayFallbackActive",
				width: 4, atMost: 1,
				means: "Share of the chosen time in which the table was swept. After the drill, the relay returns " +
					"to cdc when the backlog is drained.",
				queries: []query{{`max(avg_over_time(outbox_relay_mode{mode="poll", FILTER}[$__range]))`, ""}},
				steps:   []step{{0, blue}},
			},
		}},
		{title: "Roles and modes", height: 6, panels: []panel{
			{
				form: states, title: "Mode by relay", unit: "short", texts: modes, alert: "OutboxRelayFallbackActive",
				width: 12,
				means: "Kill the leader: its lane ends, a standby goes through poll to cdc within seconds. Drop " +
					"the slot: cdc, poll, cdc on the same lane.",
				queries: []query{{modeOf, "{{instance}}"}},
			},
			{
				form: states, title: "Processes", unit: "short", alert: "PosthasteTargetDown", width: 12,
				texts: map[string]text{"0": {"down", red}, "1": {"up", green}},
				means: "Which processes Prometheus can scrape. If a process is down that was not killed, check its " +
					"log, then start it.",
				queries: []query{{"max by (job, instance) (up{FILTER})", "{{job}} {{instance}}"}},
			},
			{
				form: states, title: "Leader", unit: "short", alert: "OutboxNoLeader", width: 12,
				texts: map[string]text{"0": {"–", grey}, "1": {"leads", green}},
				means: "Exactly one lane leads at any time. A gap is the time without a leader: the lock of a killed " +
					"process is released when Postgres sees its connection close.",
				queries: []query{{"max by (instance) (outbox_relay_leader{FILTER})", "{{instance}}"}},
			},
			firing,
			{
				form: states, title: "Desired mode", unit: "short", alert: "OutboxRelayFallbackActive", width: 24,
				texts: map[string]text{"0": {"–", grey}, "1": {"wanted", blue}},
				means: "The mode that posthaste mode or the console set; relays follow within a second. If the " +
					"change is unexpected, posthaste audit shows its author.",
				queries: []query{{"max by (mode) (outbox_relay_desired_mode{FILTER})", "{{mode}}"}},
			},
		}},
		{title: "Effect on events", height: 7, panels: []panel{
			writtenAndPublished, commitToPublish,
			{
				title: "Backlog", unit: "short", alert: "OutboxOldestPendingTooOld",
				means: "Rows that wait. It rises while nothing publishes, and must then fall to its previous " +
					"level: the slope is the speed of the drain.",
				queries: []query{{leading("outbox_backlog_rows"), "rows"}},
			},
			{
				title: "Oldest unpublished event", unit: "s", alert: "OutboxOldestPendingTooOld",
				means: "It rises and falls like a triangle: the height is how long the failover took. If it does " +
					"not fall, check the publish errors.",
				queries: []query{{leading("outbox_backlog_oldest_seconds"), "age"}}, steps: below(10, 60),
			},
			suppressedAndParked, publishErrors,
		}},
		{title: "Effect on servers", height: 7, folded: true, panels: []panel{
			slotWAL,
			{
				title: "Epoch", unit: "short", alert: "OutboxRelayFallbackActive",
				means: "The fencing epoch of each relay: every new owner raises it, and Redis refuses calls with an " +
					"older one. Expect one step per kill; a ramp means that relays compete for the lead.",
				queries: []query{{"max by (instance) (outbox_relay_epoch{FILTER})", "{{instance}}"}},
			},
			groupLag,
			{
				title: "Failed reads behind the gauges", unit: "ops", alert: "OutboxSlotScrapeFailing",
				means: "Which server did not answer: backlog, dead and slot are Postgres, streams is Redis. While " +
					"it rises, the gauges are out of date.",
				queries: []query{{rate("outbox_scrape_errors_total", "collector"), "{{collector}}"}},
			},
		}},
	},
}
