package console

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sink"
)

// well is a state in which all is well.
func well() *State {
	now := time.Unix(1_700_000_000, 0)
	s := &State{Now: now}
	s.Postgres = Look[Postgres]{AsOf: &now, Value: Postgres{
		Status: ops.Status{Mode: outbox.ModeCDC, Desired: outbox.ModeAuto, Owner: "host:1", Slot: ops.Slot{Exists: true, Active: true}}, Led: true, Relays: 1,
	}}
	s.Redis = Look[Redis]{AsOf: &now, Value: Redis{Policy: "noeviction"}}
	return s
}

// What an operator reads first, for everything that can be wrong.
func TestVerdicts(t *testing.T) {
	t.Parallel()
	fail := func(s *State) (string, *time.Time) {
		since := s.Now.Add(-time.Minute)
		return "dial tcp: refused", &since
	}
	for name, c := range map[string]struct {
		change             func(s *State)
		level, title, part string
	}{
		"all well":         {func(*State) {}, levelOK, "Nothing is lost, nothing is late", ""},
		"nothing known":    {func(s *State) { *s = State{} }, levelUnknown, "Looking…", ""},
		"postgres gone":    {func(s *State) { s.Postgres.Error, s.Postgres.Since = fail(s) }, levelBad, "Postgres does not answer", partOutbox},
		"no schema":        {func(s *State) { s.Postgres = Look[Postgres]{Error: "the schema is missing", Refused: true} }, levelBad, "Postgres refuses", partOutbox},
		"redis gone":       {func(s *State) { s.Redis.Error, s.Redis.Since = fail(s) }, levelBad, "Redis does not take events", partRedis},
		"redis never came": {func(s *State) { s.Redis = Look[Redis]{Error: "refused"} }, levelBad, "Redis does not take events", partRedis},
		"no relay":         {func(s *State) { s.Postgres.Value.Led, s.Postgres.Value.Relays = false, 0 }, levelBad, "No relay publishes", partPath},
		"relay takes over": {func(s *State) { s.Postgres.Value.Led = false }, levelWarn, "No relay publishes", partPath},
		"nobody takes over": {func(s *State) {
			s.Postgres.Value.Led, s.Postgres.Value.Backlog = false, ops.Backlog{Rows: 7, OldestSeconds: 300}
		}, levelBad, "No relay publishes", partPath},
		"late":      {func(s *State) { s.Postgres.Value.Backlog = ops.Backlog{Rows: 7, OldestSeconds: 6} }, levelWarn, "Events are late: the oldest waits 6 s", partOutbox},
		"very late": {func(s *State) { s.Postgres.Value.Backlog = ops.Backlog{Rows: 7, OldestSeconds: 300} }, levelBad, "Events are late: the oldest waits 5 min", partOutbox},
		"not ready": {func(s *State) { s.Relay = &Relay{Reasons: []string{"gap: redis lost data"}} }, levelBad, "This relay is not ready", partPath},
		"degraded": {func(s *State) {
			s.Postgres.Value.Mode, s.Postgres.Value.Degraded = outbox.ModePoll, "wal_level: not logical"
		}, levelWarn, "Events flow by sweeping, not by the WAL", partPath},
		"poll by choice": {func(s *State) {
			s.Postgres.Value.Mode, s.Postgres.Value.Desired = outbox.ModePoll, outbox.ModePoll
		}, levelOK, "Nothing is lost, nothing is late", ""},
		"slot lost": {func(s *State) { s.Postgres.Value.Slot.Lost = true }, levelWarn, "The replication slot is lost", partPath},
		"much WAL":  {func(s *State) { s.Postgres.Value.Slot.RetainedBytes = 900 }, levelWarn, "The slot holds much WAL", partPath},
		"poison":    {func(s *State) { s.Dead.Value = DeadCount{Relay: 2, First: "WRONGTYPE"} }, levelBad, "2 events are parked, not published", partPath},
		"given up":  {func(s *State) { s.Dead.Value = DeadCount{Groups: 1} }, levelWarn, "1 event is given up by a consumer group", partGroups},
		"abandoned": {func(s *State) {
			s.Groups.Value = []sink.Group{{Stream: "outbox.order", Name: "old", Lag: 5, Idle: 3 * time.Hour}}
		}, levelWarn, "Nobody reads for group old on outbox.order", partGroups},
		"dead not known":   {func(s *State) { s.Dead.Error, s.Dead.Since = fail(s) }, levelWarn, "Dead events are not known", partPath},
		"groups not known": {func(s *State) { s.Groups.Error, s.Groups.Since = fail(s) }, levelWarn, "Consumer groups are not known", partGroups},
		"feed not known":   {func(s *State) { s.Streams.Error, s.Streams.Since = fail(s) }, levelWarn, "The streams cannot be read", partRedis},
		"not known for a moment": {func(s *State) {
			s.Dead.Error, s.Dead.Since = "no answer in time", &s.Now
		}, levelOK, "Nothing is lost, nothing is late", ""},
		"not known since its server was away": {func(s *State) {
			s.Dead.Error, s.Dead.Since = fail(s)
			s.Redis.well = s.Now.Add(-time.Second)
		}, levelOK, "Nothing is lost, nothing is late", ""},
		"behind": {func(s *State) {
			s.Groups.Value = []sink.Group{{Stream: "outbox.order", Name: "g", Pending: 5, Idle: 2 * time.Minute}}
		}, levelWarn, "Group g on outbox.order does not keep up", partGroups},
		"read too slowly": {func(s *State) {
			s.Groups.Value = []sink.Group{{Stream: "outbox.order", Name: "g", Lag: 5000, Pending: 1, Waits: time.Hour}}
		}, levelWarn, "Group g on outbox.order does not keep up", partGroups},
		"lost to one": {func(s *State) { s.Groups.Value = []sink.Group{{Stream: "outbox.order", Name: "g", Lost: 12}} }, levelBad, "Lost to group g on outbox.order: 12 entries", partGroups},
		"old": {func(s *State) {
			then := s.Now.Add(-20 * time.Second)
			s.Postgres.AsOf = &then
		}, levelWarn, "What is shown of Postgres is 20 s old", partOutbox},
		"flushed": {func(s *State) {
			lost := s.Now.Add(-4 * time.Minute)
			s.Lost = &lost
		}, levelBad, "Redis has lost data", partRedis},
		"lost to a restart": {func(s *State) {
			s.Postgres.Value.Losses = []ops.Loss{{Stream: "outbox.order", Events: 1266, Noticed: s.Now, Remedy: "posthaste replay"}}
		}, levelBad, "Redis lost 1,266 settled events of outbox.order", partRedis},
		"failed over": {func(s *State) {
			s.Postgres.Value.Losses = []ops.Loss{{Events: -1, Noticed: s.Now, Remedy: "see the page"}}
		}, levelWarn, "Postgres has gone back in time: events settled shortly before may be published twice", partOutbox},
		"eviction": {func(s *State) { s.Redis.Value.Policy = "allkeys-lru" }, levelWarn, "Redis may delete events", partRedis},
		"full":     {func(s *State) { s.Redis.Value = Redis{UsedBytes: 95, MaxBytes: 100, Policy: "noeviction"} }, levelWarn, "Redis is nearly full", partRedis},
	} {
		s := well()
		c.change(s)
		v := judge(s, 1000)
		if v.Level != c.level || v.Title != c.title {
			t.Errorf("%s: %s %q, want %s %q", name, v.Level, v.Title, c.level, c.title)
		}
		if c.part != "" && v.Parts[c.part] != c.level || c.part == "" && len(v.Parts) > 0 {
			t.Errorf("%s: parts %v, want %s", name, v.Parts, c.part)
		}
		if c.level == levelWarn || c.level == levelBad {
			if v.Mend == "" || !strings.HasSuffix(v.Why, ".") {
				t.Errorf("%s: why %q, mend %q", name, v.Why, v.Mend)
			}
		}
	}
}

// With Redis down events are late because of it, and dead ones are less urgent: the gravest comes first, nothing twice.
func TestTheGravestComesFirst(t *testing.T) {
	t.Parallel()
	s := well()
	s.Redis.Error = "refused"
	s.Postgres.Value.Backlog = ops.Backlog{Rows: 1234, OldestSeconds: 100}
	s.Dead.Value = DeadCount{Groups: 1}
	v := judge(s, 0)
	if v.Title != "Redis does not take events" || !strings.Contains(v.Why, "1,234") || len(v.Also) != 1 || v.Also[0].Level != levelWarn {
		t.Errorf("%+v", v)
	}
}

// Without Redis the outbox grows until it takes too long to be counted. What to mend is Redis.
func TestTheCauseComesBeforeItsEffect(t *testing.T) {
	t.Parallel()
	s := well()
	s.Redis.Error = "refused"
	s.Postgres.Error, s.Postgres.Slow = "too slow", true
	if v := judge(s, 0); v.Title != "Redis does not take events" || len(v.Also) != 1 || v.Also[0].Title != "Postgres is too slow to be asked" {
		t.Errorf("%+v", v)
	}
}

// After an XDEL in the middle of a stream Redis does not know how much is unread, which is not nothing.
func TestAnUnknownLagIsNotNone(t *testing.T) {
	t.Parallel()
	s := well()
	s.Groups.Value = []sink.Group{{Stream: "outbox.order", Name: "g", Lag: -1, Idle: 2 * time.Minute}}
	if v := judge(s, 0); v.Why != "An unknown number unread, 0 not acknowledged, waiting for 2 min." {
		t.Errorf("%+v", v)
	}
}

// Anybody who may write to Redis can make thousands of groups; every viewer gets the state every second.
func TestManyProblemsAndGroupsAreBounded(t *testing.T) {
	t.Parallel()
	s := well()
	for i := range 1000 {
		s.Groups.Value = append(s.Groups.Value, sink.Group{Stream: "outbox.order", Name: strconv.Itoa(i), Lag: 5, Pending: 1, Idle: time.Duration(i) * time.Minute})
	}
	s.Groups.Value[999].Lost = 7
	v := judge(s, 0)
	if last := v.Also[len(v.Also)-1]; v.Title != "Lost to group 999 on outbox.order: 7 entries" || len(v.Also) != maxAlso+1 || last.Title != "And 979 more problems." {
		t.Errorf("%s, %d more, the last %+v", v.Title, len(v.Also), last)
	}
	list, sum := sumUp(s.Groups.Value)
	if len(list) != maxGroups || list[0].Name != "999" || !list[1].Abandoned() || sum != (GroupSum{Groups: 1000, Unread: 5000, Pending: 1000}) {
		t.Errorf("%d groups from %s, %+v", len(list), list[0].Name, sum)
	}
	s = well()
	s.Postgres.Value.Streams = maxStreams + 1
	if v := judge(s, 0); v.Level != levelWarn || v.Title != "256 of 257 streams are looked at" {
		t.Errorf("%+v", v)
	}
}

// The command that a problem names is pasted into a shell: it has to work, and a group's name, which anybody who may write
// to Redis chooses, must not become a command of its own.
func TestTheNamedCommandIsSafeToPaste(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"mail":             "posthaste groups drop --stream=outbox.order --group=mail",
		"a b; rm -rf ~":    "posthaste groups drop --stream=outbox.order --group='a b; rm -rf ~'",
		"it's":             `posthaste groups drop --stream=outbox.order --group='it'\''s'`,
		"$(id)\n\u202elia": `posthaste groups drop --stream=outbox.order --group='$(id)??lia'`,
	} {
		s := well()
		s.Groups.Value = []sink.Group{{Stream: "outbox.order", Name: name, Lag: 5, Idle: 3 * time.Hour}}
		v := judge(s, 0)
		if !strings.HasSuffix(v.Mend, ": "+want) {
			t.Errorf("group %q: %q, want %q", name, v.Mend, want)
		}
		if strings.ContainsAny(v.Title, "\n\u202e") {
			t.Errorf("group %q: the title is %q", name, v.Title)
		}
	}
}
