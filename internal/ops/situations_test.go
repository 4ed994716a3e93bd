package ops

import (
	"strconv"
	"time"

	"posthaste/outbox"
	"posthaste/relay"
	"posthaste/sink"
)

// situation is a possible problem, with the title that an operator reads first, and the part of the pipeline.
type situation struct {
	change      func(s *Snapshot)
	level       Level
	title, part string
	// detail is in the line in the terminal, or in its remedy.
	detail string
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
	const fine = "Nothing is lost, nothing is late"
	return map[string]situation{
		"all well": {func(*Snapshot) {}, OK, fine, "", "events flow in mode cdc"},
		"streams change": {func(s *Snapshot) {
			s.Postgres.Mode = outbox.ModeStandby
			s.Postgres.Degraded = `layout: they change from 1 to 4: group "g" has 3 entries before it`
			s.Relay = &relay.Health{Role: "leader", Reasons: []string{s.Postgres.Degraded}}
			late(120, 40*time.Second)(s)
		}, Broken, "The number of streams per type is being changed", partPath, `group "g" has 3 entries`},
		"another database's stream": {func(s *Snapshot) {
			s.Postgres.Mode = outbox.ModeStandby
			s.Postgres.Degraded = `foreign_stream: stream "outbox.order" is another's; remedy: posthaste adopt`
			s.Postgres.Compared = compared(outbox.Report{Stream: "outbox.order", Noticed: s.Now})
			late(120, 40*time.Second)(s)
		}, Broken, "A stream belongs to another database", partRedis, `is another's. posthaste adopt`},
		"a copy": {
			func(s *Snapshot) {
				s.Postgres.Mode = outbox.ModeStandby
				s.Postgres.Degraded = `copy: host-2 leads elsewhere; remedy: posthaste adopt`
				late(120, 40*time.Second)(s)
			},
			Broken, "A copy of this database is at work, or its original", partRedis,
			`host-2 leads elsewhere. posthaste adopt`,
		},
		"nothing known":       {func(s *Snapshot) { *s = Snapshot{} }, Unknown, "Looking…", "", "not everything"},
		"redis was not asked": {func(s *Snapshot) { s.Asked.Redis = Answer{} }, Unknown, "Looking…", "", ""},
		"no relay, redis was not asked": {func(s *Snapshot) {
			s.Asked.Redis = Answer{}
			s.Postgres.Led, s.Postgres.Relays = false, 0
		}, Broken, "No relay publishes", partPath, ""},
		"a moment of backlog": {late(7, time.Second), OK, fine, "", ""},

		"postgres gone": {
			func(s *Snapshot) { fail(s, &s.Asked.Postgres) },
			Broken, "Postgres does not answer", partOutbox, "Dial tcp: refused",
		},
		"no schema": {
			func(s *Snapshot) { s.Asked.Postgres = Answer{Error: "the schema is missing", Refused: true} },
			Broken, "Postgres refuses", partOutbox, "The schema is missing",
		},
		"postgres slow": {
			func(s *Snapshot) { s.Asked.Postgres.Error, s.Asked.Postgres.Slow = "too slow", true },
			Broken, "Postgres is too slow to answer", partOutbox, "",
		},
		"redis gone": {
			func(s *Snapshot) { fail(s, &s.Asked.Redis) },
			Failing, "Redis does not take events", partRedis, "Dial tcp: refused",
		},
		"redis gone, events wait": {
			func(s *Snapshot) {
				fail(s, &s.Asked.Redis)
				late(2, time.Second)(s)
			},
			Broken, "Redis does not take events", partRedis,
			"Dial tcp: refused. Events are late, none is lost: they wait in Postgres (2 now)",
		},
		"redis gone, and a group was abandoned": {func(s *Snapshot) {
			fail(s, &s.Asked.Redis)
			s.Redis = Memory{UsedBytes: 95, MaxBytes: 100}
			group(sink.Group{Name: "old", Lag: 5, Idle: 3 * time.Hour})(s)
		}, Failing, "Redis does not take events", partRedis, ""},
		"nats gone": {func(s *Snapshot) {
			s.NATS = true
			fail(s, &s.Asked.Redis)
		}, Failing, "NATS does not take events", partRedis, ""},
		"redis never came": {
			func(s *Snapshot) { s.Asked.Redis = Answer{Error: "refused"} },
			Failing, "Redis does not take events", partRedis, "",
		},

		"commits hang": {
			func(s *Snapshot) { s.Postgres.Hung = true },
			Broken, "Commits wait for a synchronous standby", partOutbox, "",
		},
		"no relay": {
			func(s *Snapshot) { s.Postgres.Led, s.Postgres.Relays = false, 0 },
			Broken, "No relay publishes", partPath, "Events wait in Postgres and none is lost; host:1 led last",
		},
		"relay takes over": {
			func(s *Snapshot) { s.Postgres.Led = false }, Degraded, "No relay publishes", partPath,
			"a relay is connected and takes over",
		},
		"nobody takes over": {func(s *Snapshot) {
			s.Postgres.Led = false
			late(7, 300*time.Second)(s)
		}, Broken, "No relay publishes", partPath, "7 events wait in Postgres"},
		"one event waits": {
			late(1, time.Minute), Broken, "Events are late: the oldest waits 60 s", partOutbox,
			"1 event waits in the outbox",
		},
		"not late yet": {late(7, lateAfter-1), OK, fine, "", ""},
		"late": {
			late(7, 6*time.Second), Degraded, "Events are late: the oldest waits 6 s", partOutbox,
			"7 events wait in the outbox",
		},
		"very late": {
			late(7, 300*time.Second), Broken, "Events are late: the oldest waits 5 min", partOutbox,
			"",
		},
		"late, a right is missing": {
			func(s *Snapshot) {
				s.Refused = "NOPERM no permissions to run the 'xadd' command"
				late(7, 6*time.Second)(s)
			},
			Degraded, "Events are late: the oldest waits 6 s", partOutbox,
			"the 'xadd' command. If the relay has the same user, give the user the commands",
		},
		"late, and why": {func(s *Snapshot) {
			s.Postgres.Mode, s.Postgres.Degraded = outbox.ModePoll, "wal_level: not logical"
			late(7, time.Minute)(s)
		}, Broken, "Events are late: the oldest waits 60 s", partOutbox, ""},

		"not ready": {
			func(s *Snapshot) { s.Relay = &relay.Health{Reasons: []string{"gap: redis lost data"}} },
			Failing, "This relay is not ready", partPath, "gap: redis lost data",
		},
		"not ready, events wait": {func(s *Snapshot) {
			s.Relay = &relay.Health{Reasons: []string{"gap: redis lost data"}}
			late(7, time.Second)(s)
		}, Broken, "This relay is not ready", partPath, ""},
		"ready, but": {
			func(s *Snapshot) { s.Relay = &relay.Health{Degraded: []string{"stalled: part 3"}} },
			Degraded, "This relay is degraded", partPath, "",
		},
		"degraded": {
			func(s *Snapshot) { s.Postgres.Mode, s.Postgres.Degraded = outbox.ModePoll, "wal_level: not logical" },
			Degraded, "Events flow in mode poll, not cdc", partPath, "wal_level: not logical",
		},
		"degraded, and the stream is a must": {func(s *Snapshot) {
			s.Postgres.Mode, s.Postgres.Desired = outbox.ModePoll, outbox.ModeCDC
			s.Postgres.Degraded = "wal_level: not logical"
		}, Failing, "Events flow in mode poll, not cdc", partPath, ""},
		"just back": {
			func(s *Snapshot) { s.Postgres.Degraded = "slot_lost: wal_removed" },
			Degraded, "Events flow in mode cdc again, since a moment ago", partPath, "Before: slot_lost: wal_removed",
		},
		"poll by choice": {
			func(s *Snapshot) { s.Postgres.Mode, s.Postgres.Desired = outbox.ModePoll, outbox.ModePoll },
			OK, fine, "", "events flow in mode poll, as desired",
		},
		"draining": {
			func(s *Snapshot) { s.Postgres.Mode = outbox.ModePoll }, OK, fine, "",
			"events flow in mode poll; cdc follows when the backlog is drained",
		},
		"starting": {func(s *Snapshot) { s.Postgres.Mode = outbox.ModeStandby }, OK, fine, "", "a relay is starting"},
		"slot lost": {
			func(s *Snapshot) { s.Postgres.Slot.Lost, s.Postgres.Slot.Reason = true, "wal_removed" },
			Degraded, "The replication slot is lost", partPath, "Postgres has invalidated it (wal_removed)",
		},
		"slot lost, and nobody needs it": {func(s *Snapshot) {
			s.Postgres.Slot.Lost, s.Postgres.Mode, s.Postgres.Desired = true, outbox.ModePoll, outbox.ModePoll
		}, OK, fine, "", ""},
		"within the budget": {func(s *Snapshot) { s.Postgres.Slot.RetainedBytes = 800 }, OK, fine, "", ""},
		"much WAL": {
			func(s *Snapshot) { s.Postgres.Slot.RetainedBytes = 900 },
			Degraded, "The slot holds back much WAL", partPath, "900 B of the budget of 1000 B",
		},
		"budget not known": {func(s *Snapshot) {
			s.Postgres.Slot.RetainedBytes, s.WALBudget = 1<<40, 0
		}, OK, fine, "", ""},

		"poison": {
			func(s *Snapshot) { s.Dead = DeadCount{Relay: 2, First: "WRONGTYPE"} },
			Failing, "2 events are dead: Redis refuses them", partPath, "The oldest: WRONGTYPE",
		},
		"given up": {
			func(s *Snapshot) { s.Dead = DeadCount{Groups: 1} },
			Degraded, "1 event is dead: a consumer group gave it up", partGroups, "",
		},
		"on its way again": {func(s *Snapshot) { s.Dead = DeadCount{Retrying: 1} }, OK, fine, "", ""},
		"abandoned": {
			group(sink.Group{Name: "old", Lag: 5, Idle: 3 * time.Hour}),
			Degraded, "No consumer reads for group old on outbox.order", partGroups, "",
		},
		"behind": {
			group(sink.Group{Name: "g", Pending: 5, Idle: 2 * time.Minute}),
			Degraded, "Group g on outbox.order does not keep up", partGroups, "0 unread, 5 not acknowledged",
		},
		"read too slowly": {
			group(sink.Group{Name: "g", Lag: 5000, Pending: 1, Waits: time.Hour}),
			Degraded, "Group g on outbox.order does not keep up", partGroups, "",
		},
		"read by an unknown number": {
			group(sink.Group{Name: "g", Lag: -1, Idle: 2 * time.Minute}),
			Degraded, "Group g on outbox.order does not keep up", partGroups,
			"An unknown number unread, 0 not acknowledged, waiting for 2 min",
		},
		"reading":         {group(sink.Group{Name: "g", Lag: 5000, Waits: time.Minute}), OK, fine, "", ""},
		"read everything": {group(sink.Group{Name: "g"}), OK, fine, "", ""},
		"lost to one": {
			group(sink.Group{Name: "g", Lost: 12}),
			Broken, "Lost to group g on outbox.order: 12 events", partGroups, "",
		},

		"dead not known": {
			func(s *Snapshot) { fail(s, &s.Asked.Dead) },
			Degraded, "Dead events are not known", partPath, "",
		},
		"groups not known": {
			func(s *Snapshot) { fail(s, &s.Asked.Groups) },
			Degraded, "Consumer groups are not known", partGroups, "",
		},
		"feed not known": {
			func(s *Snapshot) { fail(s, &s.Asked.Streams) },
			Degraded, "The streams cannot be read", partRedis, "",
		},
		"not known for a moment": {func(s *Snapshot) {
			s.Asked.Dead.Error, s.Asked.Dead.Since = "no answer in time",
				&s.Now
		}, OK, fine, "", ""},
		"not known since its server was away": {func(s *Snapshot) {
			fail(s, &s.Asked.Dead)
			s.Asked.Redis.Well = s.Now.Add(-time.Second)
		}, OK, fine, "", ""},
		"old": {func(s *Snapshot) {
			then := s.Now.Add(-20 * time.Second)
			s.Asked.Postgres.AsOf = &then
		}, Degraded, "The figures of Postgres are 20 s old", partOutbox, ""},
		"not too many streams": {func(s *Snapshot) { s.Streams = 256 }, OK, fine, "", ""},
		"too many streams": {
			func(s *Snapshot) { s.Streams = 257 },
			Degraded, "256 of 257 streams are checked", partRedis, "",
		},

		"a group on several streams": {func(s *Snapshot) {
			for i := range 7 {
				s.Groups = append(s.Groups, sink.Group{
					Stream: "outbox.type" + strconv.Itoa(i), Name: "old", Lag: 5, Idle: 3 * time.Hour,
				})
			}
		}, Degraded, "No consumer reads for group old on 7 streams", partGroups, "outbox.type3, outbox.type4, 2 more"},
		"lost of several streams": {func(s *Snapshot) {
			s.Postgres.Compared = []Compared{
				{outbox.Report{Stream: "outbox.a", Missing: 1, Noticed: s.Now, Done: &s.Now}, "posthaste replay"},
				{outbox.Report{Stream: "outbox.b", Missing: 2, Noticed: s.Now, Done: &s.Now}, "posthaste replay"},
			}
		}, Broken, "Redis lost settled events of 2 streams", partRedis, "(posthaste status has the commands"},

		"flushed": {func(s *Snapshot) {
			lost := s.Now.Add(-4 * time.Minute)
			s.Lost = &lost
		}, Broken, "Redis has lost data", partRedis, ""},
		"lost to a restart": {func(s *Snapshot) {
			s.Lost = &s.Now // reported once
			s.Postgres.Compared = []Compared{{
				outbox.Report{Stream: "outbox.order", Missing: 1266, Noticed: s.Now, Done: &s.Now},
				"posthaste replay",
			}}
		}, Broken, "Redis lost 1,266 settled events of outbox.order", partRedis, "posthaste replay"},
		"failed over": {func(s *Snapshot) {
			s.Postgres.Compared = []Compared{{
				outbox.Report{Missing: -1, Noticed: s.Now, Done: &s.Now}, "see the page",
			}}
		}, Degraded, "Postgres has gone back in time, by a failover or a restore", partOutbox, "see the page"},
		"flushed, and put right": {func(s *Snapshot) {
			lost, done := s.Now.Add(-4*time.Minute), s.Now.Add(-4*time.Minute-5*time.Second)
			s.Lost, s.Postgres.Repaired = &lost, &done // noticed in Redis after the repair
		}, Degraded, "Redis had lost data, and has it again", partRedis, ""},
		"flushed again": {func(s *Snapshot) {
			lost, done := s.Now.Add(-4*time.Minute), s.Now.Add(-5*time.Minute)
			s.Lost, s.Postgres.Repaired = &lost, &done
		}, Broken, "Redis has lost data", partRedis, ""},
		"restoring": {
			func(s *Snapshot) {
				s.Postgres.Mode = outbox.ModeStandby
				s.Postgres.Compared = compared(
					outbox.Report{
						Stream: "outbox.order", Noticed: s.Now.Add(-time.Minute), Expected: 9000, Restored: 1200,
					},
					outbox.Report{Stream: "outbox.order", Noticed: s.Now, Done: &s.Now, Restored: 7})
			},
			Failing, "outbox.order is compared with what is settled", partRedis,
			"1,200 restored so far, about 9,000 to compare",
		},
		"restoring, and events wait": {func(s *Snapshot) {
			s.Postgres.Compared = compared(outbox.Report{Stream: "outbox.order", Noticed: s.Now},
				outbox.Report{Stream: "b", Noticed: s.Now})
			late(7, time.Second)(s)
		}, Broken, "2 streams are compared with what is settled", partRedis, "Noticed 0 ms ago: Redis"},
		"restored": {func(s *Snapshot) {
			s.Postgres.Compared = compared(outbox.Report{
				Stream: "outbox.order", Noticed: s.Now, Done: &s.Now, Restored: 7,
			})
		}, OK, fine, "", ""},
		"phantoms": {
			func(s *Snapshot) { s.Postgres.Phantoms = 2 },
			Failing, "2 events are in their streams and not in Postgres", partOutbox, "",
		},
		"eviction": {
			func(s *Snapshot) { s.Redis.Policy = "allkeys-lru" },
			Degraded, "Redis may delete events", partRedis, "maxmemory-policy is allkeys-lru",
		},
		"full": {
			func(s *Snapshot) { s.Redis = Memory{UsedBytes: 95, MaxBytes: 100, Policy: "noeviction"} },
			Degraded, "Redis is nearly full", partRedis, "95 B of 100 B.",
		},
	}
}
