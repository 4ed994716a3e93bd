package ops

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"posthaste/outbox"
)

// Parts of the pipeline, as the console draws it.
const (
	partOutbox = "outbox"
	partPath   = "path"
	partRedis  = "redis"
	partGroups = "groups"
)

// Sections of the console where something is done about a problem.
const (
	actionDoctor = "doctor"
	actionMode   = "mode"
	actionDead   = "dead"
	actionGroups = "groups"
)

// The thresholds, each of them once: who shows a problem does not ask again whether it is one.
const (
	// lateAfter and veryLateAfter are from when on a waiting event is called late, and very late.
	lateAfter     = 5 * time.Second
	veryLateAfter = 30 * time.Second
	// repairedBefore is how long before somebody sees a loss it may have been put right: a watch is a few seconds late.
	repairedBefore = 15 * time.Second
	// unknownAfter is from when on it is said that something cannot be read.
	unknownAfter = 10 * time.Second
	// fullAt is the part of its memory from which on Redis is called nearly full.
	fullAt = 0.9
)

// muchWAL reports whether a slot holds back nearly all the WAL it may, or more. Before that the relay acts by itself.
func muchWAL(retained, budget int64) bool { return budget > 0 && retained > budget/5*4 }

// unsafePolicy reports whether Redis may delete what nobody has read. "" is a policy that is not known.
func unsafePolicy(policy string) bool { return policy != "" && policy != "noeviction" }

const (
	// slotCondition begins the condition of a relay that cannot use its slot. What follows, Postgres tells as well.
	slotCondition = "slot: "
	// restoreCondition begins that of a relay that makes a stream whole, or tries to.
	restoreCondition = "restore: "
	// layoutCondition begins that of a relay that changes how many streams a type has, foreignCondition that of one
	// whose stream is another database's. Postgres tells them as well.
	layoutCondition  = "layout: "
	foreignCondition = "foreign_stream: "
	// copyCondition begins that of one whose database has a copy, or is one, that another relay leads.
	copyCondition = "copy: "
)

// Problem is one thing that is wrong.
type Problem struct {
	Level Level
	// Part is the part of the pipeline: "outbox", "path", "redis" or "groups".
	Part string
	// Title, Why and Remedy are for a page: a headline, sentences that explain it, and what to do.
	Title, Why, Remedy string
	// Action names the section of the console where to do it; empty if it is not done there.
	Action string
	// Follows tells that another problem explains this one. It then counts for nothing but a relay's readiness.
	Follows bool

	// line says the same in one line of a terminal; empty for Title and Why.
	line string
	// condition is the relay's own word, if it is its readiness that is judged.
	condition string
}

// Verdict is what is wrong with a pipeline, how badly, and what to do.
type Verdict struct {
	// Level is that of the gravest problem.
	Level Level
	// Problems are what is wrong, the gravest first.
	Problems []Problem

	// well says how things go where nothing is wrong, in a sentence and in a line.
	well, wellLine string
	role           string
}

// Assess says what is wrong in a snapshot. It is the only place that decides so: readiness, status and console differ
// in what they know and in how they show it, not in what they make of it.
func Assess(s *Snapshot) Verdict {
	a := &assessment{s: s}
	a.reachable = s.Asked.Postgres.Error == "" && s.Asked.Redis.Error == ""
	a.servers()
	if s.Asked.Postgres.known() {
		a.held()
		a.flow()
		a.slot()
		a.repairs()
	}
	a.relay()
	if a.reachable {
		a.old()
		a.unknown()
	}
	a.dead()
	a.groups()
	a.losses()
	a.memory()
	a.limits()
	return a.verdict()
}

func (a *assessment) verdict() Verdict {
	// What follows from something else goes last: nobody reads it there who does not want to.
	slices.SortStableFunc(a.problems, func(x, y Problem) int {
		return cmp.Compare(y.weight(), x.weight())
	})
	v := Verdict{Level: OK, Problems: a.problems}
	if a.s.Asked.Postgres.open() || a.s.Asked.Redis.open() {
		v.Level = Unknown
	}
	if len(v.Problems) > 0 && !v.Problems[0].Follows {
		v.Level = v.Problems[0].Level
	}
	if a.s.Relay != nil {
		v.role = a.s.Relay.Role
	}
	v.well, v.wellLine = a.well()
	return v
}

// weight orders problems.
func (p Problem) weight() Level {
	if p.Follows {
		return Unknown
	}
	return p.Level
}

// well says how things go when nothing is wrong.
func (a *assessment) well() (sentence, line string) {
	p := a.s.Postgres
	sentence = "The table is swept"
	switch {
	case p.Mode == outbox.ModeCDC:
		sentence, line = "The WAL is streamed", "events are streamed"
	case p.Desired == outbox.ModePoll:
		line = "events are swept, as desired"
	case p.Mode == outbox.ModePoll:
		line = "events are swept; the stream follows when the backlog is drained"
	default:
		line = "a relay is starting"
	}
	if p.Backlog.Rows == 0 {
		return sentence + "; no event is waiting.", line
	}
	on := count(p.Backlog.Rows, "event")
	if p.Backlog.AtLeast {
		on = "at least " + on
	}
	return fmt.Sprintf("%s; %s on the way, the oldest for %s.", sentence, on,
		span(seconds(p.Backlog.OldestSeconds))), line
}
