package ops

import (
	"strconv"
	"time"

	"posthaste/outbox"
	"posthaste/relay"
	"posthaste/sink"
)

// situation is a possible problem, with the text that an operator reads first about it.
type situation struct {
	change func(s *Snapshot)
	level  Level
	// title and part are of the page, line is of the terminal.
	title, part, line string
}

// well is a healthy snapshot.
func well() *Snapshot {
	now := time.Unix(1_700_000_000, 0)
	s := &Snapshot{Now: now, WALBudget: 1000, Fresh: 15 * time.Second, Looked: 256}
	s.Asked.Postgres, s.Asked.Redis = Answer{AsOf: &now}, Answer{AsOf: &now}
	s.Postgres = Postgres{
		Status: Status{
			Mode: outbox.ModeCDC, Desired: outbox.ModeAuto, Owner: "host:1", Slot: Slot{Exists: true, Active: true},
		},
		Led: true, Relays: 1,
	}
	s.Redis = Memory{Policy: "noeviction"}
	return s
}

// fail makes an answer an error since a minute ago.
func fail(s *Snapshot, a *Answer) {
	since := s.Now.Add(-time.Minute)
	a.Error, a.Since = "dial tcp: refused", &since
}

// late makes events wait.
func late(rows int64, oldest time.Duration) func(s *Snapshot) {
	return func(s *Snapshot) { s.Postgres.Backlog = Backlog{Rows: rows, OldestSeconds: oldest.Seconds()} }
}

// group makes g the only group.
func group(g sink.Group) func(s *Snapshot) {
	g.Stream = "outbox.order"
	return func(s *Snapshot) { s.Groups = []sink.Group{g} }
}

// situations are all possible problems.
func situations() map[string]situation {
	const fine, streamed = "Nothing is lost, nothing is late", "events flow in mode cdc"
	return map[string]situation{
		"all well": {func(*Snapshot) {}, OK, fine, "", streamed},
		"streams change": {
			func(s *Snapshot) {
				s.Postgres.Mode = outbox.ModeStandby
				s.Postgres.Degraded = `layout: they change from 1 to 4: group "g" has 3 entries before it`
				s.Relay = &relay.Health{Role: "leader", Reasons: []string{s.Postgres.Degraded}}
				late(120, 40*time.Second)(s)
			},
			Broken, "The number of streams per type is being changed", partPath, `group "g" has 3 entries`,
		},
		"another database's stream": {
			func(s *Snapshot) {
				s.Postgres.Mode = outbox.ModeStandby
				s.Postgres.Degraded = `foreign_stream: stream "outbox.order" is another's; remedy: posthaste adopt`
				s.Postgres.Compared = compared(outbox.Report{Stream: "outbox.order", Noticed: s.Now})
				late(120, 40*time.Second)(s)
			},
			Broken, "A stream belongs to another database", partRedis,
			`is another's; remedy: posthaste adopt; 120 events wait`,
		},
		"a copy": {
			func(s *Snapshot) {
				s.Postgres.Mode = outbox.ModeStandby
				s.Postgres.Degraded = `copy: host-2 leads elsewhere; remedy: posthaste adopt`
				late(120, 40*time.Second)(s)
			},
			Broken, "A copy of this database is at work, or its original", partRedis,
			`host-2 leads elsewhere; remedy: posthaste adopt; 120 events wait`,
		},
		"nothing known": {func(s *Snapshot) { *s = Snapshot{} }, Unknown, "Looking…", "", "not everything"},
		"redis was not asked": {
			func(s *Snapshot) { s.Asked.Redis = Answer{} }, Unknown, "Looking…", "", "not everything",
		},
		"no relay, redis was not asked": {func(s *Snapshot) {
			s.Asked.Redis = Answer{}
			s.Postgres.Led, s.Postgres.Relays = false, 0
		}, Broken, "No relay publishes", partPath, "no relay runs"},
		"a moment of backlog": {late(7, time.Second), OK, fine, "", streamed},

		"postgres gone": {
			func(s *Snapshot) { fail(s, &s.Asked.Postgres) },
			Broken, "Postgres does not answer", partOutbox, "Postgres does not answer: dial tcp: refused",
		},
		"no schema": {
			func(s *Snapshot) { s.Asked.Postgres = Answer{Error: "the schema is missing", Refused: true} },
			Broken, "Postgres refuses", partOutbox, "Postgres refuses: the schema is missing",
		},
		"postgres slow": {
			func(s *Snapshot) { s.Asked.Postgres.Error, s.Asked.Postgres.Slow = "too slow", true },
			Broken, "Postgres is too slow to answer", partOutbox, "Postgres is too slow to answer: too slow",
		},
		"redis gone": {
			func(s *Snapshot) { fail(s, &s.Asked.Redis) },
			Failing, "Redis does not take events", partRedis, "dial tcp: refused",
		},
		"redis gone, events wait": {func(s *Snapshot) {
			fail(s, &s.Asked.Redis)
			late(2, time.Second)(s)
		}, Broken, "Redis does not take events", partRedis, "refused; 2 events wait, the oldest for 1s"},
		"redis gone, and a group was abandoned": {func(s *Snapshot) {
			fail(s, &s.Asked.Redis)
			s.Redis = Memory{UsedBytes: 95, MaxBytes: 100}
			group(sink.Group{Name: "old", Lag: 5, Idle: 3 * time.Hour})(s)
		}, Failing, "Redis does not take events", partRedis, "refused"},
		"redis never came": {
			func(s *Snapshot) { s.Asked.Redis = Answer{Error: "refused"} },
			Failing, "Redis does not take events", partRedis, "refused",
		},

		"commits hang": {
			func(s *Snapshot) { s.Postgres.Hung = true }, Broken, "Commits wait for a synchronous standby", partOutbox,
			"commits wait for a synchronous standby: bring it back, or change synchronous_standby_names",
		},
		"no relay": {
			func(s *Snapshot) { s.Postgres.Led, s.Postgres.Relays = false, 0 },
			Broken, "No relay publishes", partPath, "no relay runs",
		},
		"relay takes over": {
			func(s *Snapshot) { s.Postgres.Led = false },
			Degraded, "No relay publishes", partPath, "no relay leads, 1 connected",
		},
		"nobody takes over": {func(s *Snapshot) {
			s.Postgres.Led = false
			late(7, 300*time.Second)(s)
		}, Broken, "No relay publishes", partPath, "no relay leads, 1 connected; 7 events wait, the oldest for 5m00s"},
		"one event waits": {
			late(1, time.Minute),
			Broken, "Events are late: the oldest waits 60 s", partOutbox, "1 event waits, the oldest for 1m00s",
		},
		"not late yet": {late(7, lateAfter-1), OK, fine, "", streamed},
		"late": {
			late(7, 6*time.Second),
			Degraded, "Events are late: the oldest waits 6 s", partOutbox, "7 events wait, the oldest for 6s",
		},
		"very late": {
			late(7, 300*time.Second),
			Broken, "Events are late: the oldest waits 5 min", partOutbox, "7 events wait, the oldest for 5m00s",
		},
		"late, and why": {func(s *Snapshot) {
			s.Postgres.Mode, s.Postgres.Degraded = outbox.ModePoll, "wal_level: not logical"
			late(7, time.Minute)(s)
		}, Broken, "Events are late: the oldest waits 60 s", partOutbox, "for 1m00s; wal_level: not logical"},

		"not ready": {
			func(s *Snapshot) { s.Relay = &relay.Health{Reasons: []string{"gap: redis lost data"}} },
			Failing, "This relay is not ready", partPath, "this relay: gap: redis lost data",
		},
		"not ready, events wait": {func(s *Snapshot) {
			s.Relay = &relay.Health{Reasons: []string{"gap: redis lost data"}}
			late(7, time.Second)(s)
		}, Broken, "This relay is not ready", partPath, "this relay: gap: redis lost data"},
		"ready, but": {
			func(s *Snapshot) { s.Relay = &relay.Health{Degraded: []string{"stalled: part 3"}} },
			Degraded, "This relay is degraded", partPath, "this relay: stalled: part 3",
		},
		"degraded": {
			func(s *Snapshot) { s.Postgres.Mode, s.Postgres.Degraded = outbox.ModePoll, "wal_level: not logical" },
			Degraded, "Events flow in mode poll, not cdc", partPath,
			"events flow in mode poll although cdc is desired: wal_level: not logical",
		},
		"degraded, and the stream is a must": {func(s *Snapshot) {
			s.Postgres.Mode, s.Postgres.Desired = outbox.ModePoll, outbox.ModeCDC
			s.Postgres.Degraded = "wal_level: not logical"
		}, Failing, "Events flow in mode poll, not cdc", partPath, "wal_level: not logical"},
		"just back": {
			func(s *Snapshot) { s.Postgres.Degraded = "slot_lost: wal_removed" },
			Degraded, "Events flow in mode cdc again, since a moment ago", partPath,
			"events flow in mode cdc again, but only since a moment ago; before: slot_lost: wal_removed",
		},
		"poll by choice": {
			func(s *Snapshot) { s.Postgres.Mode, s.Postgres.Desired = outbox.ModePoll, outbox.ModePoll },
			OK, fine, "", "events flow in mode poll, as desired",
		},
		"draining": {
			func(s *Snapshot) { s.Postgres.Mode = outbox.ModePoll },
			OK, fine, "", "events flow in mode poll; cdc follows when the backlog is drained",
		},
		"starting": {func(s *Snapshot) { s.Postgres.Mode = outbox.ModeStandby }, OK, fine, "", "a relay is starting"},
		"slot lost": {
			func(s *Snapshot) { s.Postgres.Slot.Lost, s.Postgres.Slot.Reason = true, "wal_removed" },
			Degraded, "The replication slot is lost", partPath, "the slot is lost (wal_removed)",
		},
		"slot lost, and nobody needs it": {func(s *Snapshot) {
			s.Postgres.Slot.Lost, s.Postgres.Mode, s.Postgres.Desired = true, outbox.ModePoll, outbox.ModePoll
		}, OK, fine, "", "as desired"},
		"within the budget": {func(s *Snapshot) { s.Postgres.Slot.RetainedBytes = 800 }, OK, fine, "", streamed},
		"much WAL": {
			func(s *Snapshot) { s.Postgres.Slot.RetainedBytes = 900 },
			Degraded, "The slot holds back much WAL", partPath, "the slot holds 900 B of WAL; the budget is 1000 B",
		},
		"budget not known": {func(s *Snapshot) {
			s.Postgres.Slot.RetainedBytes, s.WALBudget = 1<<40, 0
		}, OK, fine, "", streamed},

		"poison": {
			func(s *Snapshot) { s.Dead = DeadCount{Relay: 2, First: "WRONGTYPE"} },
			Failing, "2 events are dead: Redis refuses them", partPath,
			"2 events are dead (posthaste dead list): WRONGTYPE",
		},
		"given up": {
			func(s *Snapshot) { s.Dead = DeadCount{Groups: 1} },
			Degraded, "1 event is dead: a consumer group gave it up", partGroups,
			"1 event is dead: a consumer group gave it up: Its",
		},
		"on its way again": {func(s *Snapshot) { s.Dead = DeadCount{Retrying: 1} }, OK, fine, "", streamed},
		"abandoned": {
			group(sink.Group{Name: "old", Lag: 5, Idle: 3 * time.Hour}),
			Degraded, "No consumer reads for group old on outbox.order", partGroups, "No consumer reads for group old",
		},
		"behind": {
			group(sink.Group{Name: "g", Pending: 5, Idle: 2 * time.Minute}),
			Degraded, "Group g on outbox.order does not keep up", partGroups,
			"Group g on outbox.order does not keep up: 0 unread",
		},
		"read too slowly": {
			group(sink.Group{Name: "g", Lag: 5000, Pending: 1, Waits: time.Hour}),
			Degraded, "Group g on outbox.order does not keep up", partGroups, "5,000 unread",
		},
		"read by an unknown number": { // after an XDEL in the middle of a stream
			group(sink.Group{Name: "g", Lag: -1, Idle: 2 * time.Minute}),
			Degraded, "Group g on outbox.order does not keep up", partGroups,
			"An unknown number unread, 0 not acknowledged, waiting for 2 min",
		},
		"reading":         {group(sink.Group{Name: "g", Lag: 5000, Waits: time.Minute}), OK, fine, "", streamed},
		"read everything": {group(sink.Group{Name: "g"}), OK, fine, "", streamed},
		"lost to one": {
			group(sink.Group{Name: "g", Lost: 12}),
			Broken, "Lost to group g on outbox.order: 12 events", partGroups,
			"Lost to group g on outbox.order: 12 events: They",
		},

		"dead not known": {
			func(s *Snapshot) { fail(s, &s.Asked.Dead) }, Degraded, "Dead events are not known", partPath, "not known",
		},
		"groups not known": {
			func(s *Snapshot) { fail(s, &s.Asked.Groups) },
			Degraded, "Consumer groups are not known", partGroups, "not known",
		},
		"feed not known": {
			func(s *Snapshot) { fail(s, &s.Asked.Streams) },
			Degraded, "The streams cannot be read", partRedis, "cannot be read",
		},
		"not known for a moment": {
			func(s *Snapshot) {
				s.Asked.Dead.Error, s.Asked.Dead.Since = "no answer in time",
					&s.Now
			}, OK, fine, "", streamed,
		},
		"not known since its server was away": {func(s *Snapshot) {
			fail(s, &s.Asked.Dead)
			s.Asked.Redis.Well = s.Now.Add(-time.Second)
		}, OK, fine, "", streamed},
		"old": {func(s *Snapshot) {
			then := s.Now.Add(-20 * time.Second)
			s.Asked.Postgres.AsOf = &then
		}, Degraded, "The figures of Postgres are 20 s old", partOutbox, "20 s old"},
		"not too many streams": {func(s *Snapshot) { s.Streams = 256 }, OK, fine, "", streamed},
		"too many streams": {
			func(s *Snapshot) { s.Streams = 257 },
			Degraded, "256 of 257 streams are checked", partRedis, "256 of 257 streams",
		},

		"a group on several streams": {
			func(s *Snapshot) {
				for i := range 7 {
					s.Groups = append(s.Groups, sink.Group{
						Stream: "outbox.type" + strconv.Itoa(i), Name: "old", Lag: 5, Idle: 3 * time.Hour,
					})
				}
			},
			Degraded, "No consumer reads for group old on 7 streams", partGroups,
			"35 unread, 0 not acknowledged, waiting for 3 h. The stream is not trimmed beyond them and fills Redis. " +
				"Streams: outbox.type0, outbox.type1, outbox.type2, outbox.type3, outbox.type4, 2 more",
		},
		"lost of several streams": {
			func(s *Snapshot) {
				s.Postgres.Compared = []Compared{
					{outbox.Report{Stream: "outbox.a", Missing: 1, Noticed: s.Now, Done: &s.Now}, "posthaste replay"},
					{outbox.Report{Stream: "outbox.b", Missing: 2, Noticed: s.Now, Done: &s.Now}, "posthaste replay"},
				}
			},
			Broken, "Redis lost settled events of 2 streams", partRedis, "(posthaste status has the commands",
		},

		"flushed": {func(s *Snapshot) {
			lost := s.Now.Add(-4 * time.Minute)
			s.Lost = &lost
		}, Broken, "Redis has lost data", partRedis, "Redis has lost data"},
		"lost to a restart": {
			func(s *Snapshot) {
				s.Lost = &s.Now // reported once
				s.Postgres.Compared = []Compared{{
					outbox.Report{Stream: "outbox.order", Missing: 1266, Noticed: s.Now, Done: &s.Now},
					"posthaste replay",
				}}
			}, Broken, "Redis lost 1,266 settled events of outbox.order", partRedis,
			"of outbox.order; to restore them: posthaste replay",
		},
		"failed over": {
			func(s *Snapshot) {
				s.Postgres.Compared = []Compared{{
					outbox.Report{Missing: -1, Noticed: s.Now, Done: &s.Now}, "see the page",
				}}
			}, Degraded, "Postgres has gone back in time, by a failover or a restore",
			partOutbox, "by a failover or a restore; see the page",
		},
		"flushed, and put right": {func(s *Snapshot) {
			lost, done := s.Now.Add(-4*time.Minute), s.Now.Add(-4*time.Minute-5*time.Second)
			s.Lost, s.Postgres.Repaired = &lost, &done // noticed in Redis after the repair
		}, Degraded, "Redis had lost data, and has it again", partRedis, "Redis had lost data, and has it again"},
		"flushed again": {func(s *Snapshot) {
			lost, done := s.Now.Add(-4*time.Minute), s.Now.Add(-5*time.Minute)
			s.Lost, s.Postgres.Repaired = &lost, &done
		}, Broken, "Redis has lost data", partRedis, "Redis has lost data"},
		"restoring": {
			func(s *Snapshot) {
				s.Postgres.Mode = outbox.ModeStandby
				s.Postgres.Compared = compared(
					outbox.Report{
						Stream: "outbox.order", Noticed: s.Now.Add(-time.Minute), Expected: 9000, Restored: 1200,
					},
					outbox.Report{Stream: "outbox.order", Noticed: s.Now, Done: &s.Now, Restored: 7})
			}, Failing, "outbox.order is compared with what is settled", partRedis,
			"settled, for 1m00s; 1,200 restored so far, about 9,000 to compare",
		},
		"restoring, and events wait": {func(s *Snapshot) {
			s.Postgres.Compared = compared(outbox.Report{Stream: "outbox.order", Noticed: s.Now},
				outbox.Report{Stream: "b", Noticed: s.Now})
			late(7, time.Second)(s)
		}, Broken, "2 streams are compared with what is settled", partRedis, "7 events wait, the oldest for 1s"},
		"restored": {func(s *Snapshot) {
			s.Postgres.Compared = compared(outbox.Report{
				Stream: "outbox.order", Noticed: s.Now, Done: &s.Now, Restored: 7,
			})
		}, OK, fine, "", streamed},
		"phantoms": {
			func(s *Snapshot) { s.Postgres.Phantoms = 2 },
			Failing, "2 events are in their streams and not in Postgres", partOutbox,
			"and not in Postgres (posthaste phantoms)",
		},
		"eviction": {
			func(s *Snapshot) { s.Redis.Policy = "allkeys-lru" },
			Degraded, "Redis may delete events", partRedis,
			"Redis may delete events: Its maxmemory-policy is allkeys-lru",
		},
		"full": {
			func(s *Snapshot) { s.Redis = Memory{UsedBytes: 95, MaxBytes: 100, Policy: "noeviction"} },
			Degraded, "Redis is nearly full", partRedis, "Redis is nearly full: 95 B of 100 B.",
		},
	}
}
