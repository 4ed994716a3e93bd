package ops

import (
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/relay"
	"posthaste/sink"
)

// Every situation has the expected first text, once, with a command and the section of the runbook.
func TestVerdicts(t *testing.T) {
	t.Parallel()
	runbook, err := os.ReadFile("../../docs/runbook.md")
	testenv.Must(t, err)
	command := regexp.MustCompile(`\bposthaste [a-z]|\bredis-cli [A-Z]`)
	for name, c := range situations() {
		s := well()
		c.change(s)
		verdict := Assess(s)
		v, b := verdict.Page(), verdict.Brief()
		if verdict.Level != c.level || v.Level != c.level.Tone() || v.Title != c.title {
			t.Errorf("%s: %s %q, want %s %q", name, v.Level, v.Title, c.level.Tone(), c.title)
		}
		if c.part != "" && v.Parts[c.part] != c.level.Tone() || c.part == "" && len(v.Parts) > 0 {
			t.Errorf("%s: parts %v, want %s", name, v.Parts, c.part)
		}
		if c.level > OK {
			if !strings.HasSuffix(v.Why, ".") || !command.MatchString(v.Remedy) && name != "failed over" {
				t.Errorf("%s: why %q; the remedy %q names no command", name, v.Why, v.Remedy)
			}
			if !strings.Contains(string(runbook), "\n### "+v.Runbook+"\n") {
				t.Errorf("%s: the runbook has no section %q", name, v.Runbook)
			}
			if len(v.Also) > 0 && name != "late, and why" || len(v.Also) > 1 {
				t.Errorf("%s: it is said more than once: %+v", name, v.Also)
			}
		}
		if b.Word != c.level.Word() || c.level > OK && !strings.HasPrefix(b.Why, c.title+": ") ||
			!strings.Contains(b.Why+". "+b.Remedy, c.detail) {
			t.Errorf("%s: %+v; want %s and %q", name, b, c.level.Word(), c.detail)
		}
	}
}

// A snapshot has the same meaning on a page, in a terminal, and for a script.
func TestAllRenderingsAgree(t *testing.T) {
	t.Parallel()
	const slot = "slot: wal_level: not logical"
	for name, h := range map[string]*relay.Health{
		"no relay":               nil,
		"a relay":                {Role: "leader", Ready: true},
		"a degraded relay":       {Role: "leader", Ready: true, Degraded: []string{slot, "wal: it cannot be dropped"}},
		"a relay without a slot": {Role: "leader", Reasons: []string{slot}},
		"an unready relay": {
			Role: "standby", Reasons: []string{"postgres: gone", slot},
			Degraded: []string{"wal: too much"},
		},
	} {
		for what, c := range situations() {
			s := well()
			c.change(s)
			if s.Relay == nil {
				s.Relay = h
			}
			v := Assess(s)
			page, brief, report := v.Page(), v.Brief(), s.Report()
			if !reflect.DeepEqual(report.Verdict, brief) {
				t.Errorf("%s, %s: a script reads %+v, a terminal shows %+v", name, what, report.Verdict, brief)
			}
			tones := map[string][]string{
				"ok": {"ok"}, "degraded": {"warn", "bad"}, "broken": {"bad"},
				"unknown": {"unknown"},
			}
			if !slices.Contains(tones[brief.Word], page.Level) {
				t.Errorf("%s, %s: %s in a terminal, %s on a page", name, what, brief.Word, page.Level)
			}
			if page.Level != "ok" && page.Level != "unknown" && page.Title != v.Problems[0].Title {
				t.Errorf("%s, %s: the page begins with %q, the gravest is %q", name, what, page.Title,
					v.Problems[0].Title)
			}
			testenv.Equal(t, name+", "+what+": what stands beside it", len(brief.Also), len(page.Also))
			if r := s.Relay; r != nil && (len(r.Reasons) > 0 && page.Level != "bad" ||
				len(r.Degraded) > 0 && page.Level == "ok") {
				t.Errorf("%s, %s: the relay reports %+v, and the page is %s", name, what, r, page.Level)
			}
		}
	}
}

// Postgres and the relay that wrote it there both report the slot's problem: it is shown once.
func TestNothingIsSaidTwice(t *testing.T) {
	t.Parallel()
	s := well()
	s.Postgres.Mode, s.Postgres.Degraded = outbox.ModePoll, "wal_level: not logical"
	s.Relay = &relay.Health{Role: "leader", Degraded: []string{"slot: wal_level: not logical"}}
	if p := Assess(s).Page(); p.Title != "Events flow in mode poll, not cdc" || len(p.Also) != 0 {
		t.Errorf("%+v", p)
	}
}

// The same holds for a repair: the relay's report is newer, and is shown.
func TestARepairIsSaidOnce(t *testing.T) {
	t.Parallel()
	s := well()
	s.Postgres.Compared = compared(outbox.Report{Stream: "outbox.order", Noticed: s.Now, Expected: 9000})
	s.Relay = &relay.Health{Role: "leader", Reasons: []string{"restore: outbox.order: READONLY"}}
	if p := Assess(s).Page(); p.Title != "outbox.order is compared with what is settled" || len(p.Also) != 0 ||
		!strings.HasSuffix(p.Why, "outbox.order: READONLY.") {
		t.Errorf("%+v", p)
	}
	s.Postgres.Compared = nil // read just before it was noted
	testenv.Equal(t, "the title", Assess(s).Page().Title, "This relay is not ready")
}

// A relay queries Redis all the time, so the snapshot uses its state.
func TestARelayKnowsOfRedis(t *testing.T) {
	t.Parallel()
	now := time.Now()
	if a := redisOf(relay.Health{Reasons: []string{"postgres: gone"}}, now); !a.known() {
		t.Errorf("%+v", a)
	}
	for _, name := range []string{"redis", "nats"} {
		a := redisOf(relay.Health{Reasons: []string{"postgres: gone", name + ": unreachable: refused"}}, now)
		if a.known() || a.Error != "unreachable: refused" {
			t.Errorf("%s: %+v", name, a)
		}
	}
}

// Events that wait for an operator are counted apart from those that are being retried.
func TestCountDead(t *testing.T) {
	t.Parallel()
	list := []Dead{{Retrying: true, Error: "a"}, {Error: "b"}, {Error: "c"}}
	testenv.Equal(t, "the dead", CountDead(list, 7, 2), DeadCount{Relay: 6, Groups: 2, Retrying: 1, First: "b"})
}

// With Redis down, late events follow from it and dead events are less urgent. Without Redis the outbox grows until
// counting is too slow, too: the cause comes before its effects, without repeats.
func TestTheGravestComesFirst(t *testing.T) {
	t.Parallel()
	for also, change := range map[string]func(s *Snapshot){
		"1 event is dead: a consumer group gave it up": func(s *Snapshot) {
			late(1234, 100*time.Second)(s)
			s.Dead = DeadCount{Groups: 1}
		},
		"Postgres is too slow to answer": func(s *Snapshot) {
			s.Asked.Postgres.Error, s.Asked.Postgres.Slow = "too slow", true
		},
	} {
		s := well()
		s.Asked.Redis.Error = "refused"
		change(s)
		v := Assess(s).Page()
		if v.Title != "Redis does not take events" || len(v.Also) != 1 || v.Also[0].Title != also {
			t.Errorf("%+v", v)
		}
	}
}

// The command is for the key that has the wrong type.
func TestTheRemedyNamesTheKey(t *testing.T) {
	t.Parallel()
	s := well()
	s.Dead = DeadCount{Relay: 600, First: "WRONGTYPE the key outbox.bill.0 holds a string"}
	const want = "Rename or delete that key: redis-cli RENAMENX outbox.bill.0 outbox.bill.0:aside, then press Retry " +
		"all, or run posthaste dead retry --all."
	testenv.Equal(t, "the remedy", Assess(s).Page().Remedy, want)
}

// Any writer to Redis can make thousands of groups, and every viewer gets the verdict every second.
func TestManyProblemsAreBounded(t *testing.T) {
	t.Parallel()
	s := well()
	for i := range 1000 {
		s.Groups = append(s.Groups,
			sink.Group{
				Stream: "outbox.order", Name: strconv.Itoa(i), Lag: 5, Pending: 1,
				Idle: time.Duration(i) * time.Minute,
			})
	}
	s.Groups[999].Lost = 7
	v := Assess(s).Page()
	if last := v.Also[len(v.Also)-1]; v.Title != "Lost to group 999 on outbox.order: 7 events" ||
		len(v.Also) != maxAlso+1 || last.Title != "And 979 more problems." {
		t.Errorf("%s, %d more, the last %+v", v.Title, len(v.Also), last)
	}
}

// The command in a problem is pasted into a shell. It must work, and a group's name, which any writer to Redis can
// choose, must not become a command.
func TestTheNamedCommandIsSafeToPaste(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"mail":             "posthaste groups drop --stream=outbox.order --group=mail",
		"a b; rm -rf ~":    "posthaste groups drop --stream=outbox.order --group='a b; rm -rf ~'",
		"it's":             `posthaste groups drop --stream=outbox.order --group='it'\''s'`,
		"$(id)\n\u202elia": `posthaste groups drop --stream=outbox.order --group='$(id)??lia'`,
	} {
		s := well()
		s.Groups = []sink.Group{{Stream: "outbox.order", Name: name, Lag: 5, Idle: 3 * time.Hour}}
		v := Assess(s).Page()
		if !strings.HasSuffix(v.Remedy, ": "+want) {
			t.Errorf("group %q: %q, want %q", name, v.Remedy, want)
		}
		if strings.ContainsAny(v.Title, "\n\u202e") {
			t.Errorf("group %q: the title is %q", name, v.Title)
		}
	}
}

// compared are reports without missing events.
func compared(list ...outbox.Report) (all []Compared) {
	for _, r := range list {
		all = append(all, Compared{Report: r})
	}
	return all
}
