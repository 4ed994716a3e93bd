package ops

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"posthaste/outbox"
)

// Parts of the pipeline, as the console draws them.
const (
	partOutbox = "outbox"
	partPath   = "path"
	partRedis  = "redis"
	partGroups = "groups"
)

// Sections of the console where a problem can be fixed.
const (
	actionDoctor = "doctor"
	actionMode   = "mode"
	actionDead   = "dead"
	actionGroups = "groups"
)

// All thresholds: the callers that show a problem do not check them again.
const (
	// lateAfter and veryLateAfter are the ages from which a waiting event is reported as late, and as very late.
	lateAfter     = 5 * time.Second
	veryLateAfter = 30 * time.Second
	// repairedBefore is how long before its report a loss may have been repaired: the console notices losses seconds
	// late.
	repairedBefore = 15 * time.Second
	// unknownAfter is how long a source may fail before that is reported.
	unknownAfter = 10 * time.Second
	// fullAt is the share of memory from which Redis is nearly full.
	fullAt = 0.9
)

// muchWAL reports whether a slot holds back more than 80 % of its WAL budget. A relay acts before that.
func muchWAL(retained, budget int64) bool { return budget > 0 && retained > budget/5*4 }

// unsafePolicy reports whether Redis may delete unread entries. The policy "" is unknown.
func unsafePolicy(policy string) bool { return policy != "" && policy != "noeviction" }

const (
	// slotCondition begins the condition of a relay that cannot use its slot. Postgres has the reason, too.
	slotCondition = "slot: "
	// restoreCondition begins the condition of a relay that repairs a stream, or tries to.
	restoreCondition = "restore: "
	// layoutCondition begins the condition of a relay that changes how many streams a type has, foreignCondition that
	// of a relay whose stream belongs to another database. Postgres has both, too.
	layoutCondition  = "layout: "
	foreignCondition = "foreign_stream: "
	// copyCondition begins the condition of a relay whose database is a copy, or has one, that another relay leads.
	copyCondition = "copy: "
)

type Problem struct {
	Level Level
	// Part is a part of the pipeline: "outbox", "path", "redis" or "groups".
	Part string
	// Title, Why and Remedy are a headline, sentences that explain it, and what to do.
	Title, Why, Remedy string
	// Action is the section of the console where to fix it; may be empty.
	Action string
	// Runbook is the section of docs/runbook.md.
	Runbook string
	// Follows marks a problem that another one explains. It then counts only for a relay's readiness.
	Follows bool
}

// Verdict has the problems of a pipeline, their severity and remedies.
type Verdict struct {
	// Level is that of the gravest problem.
	Level Level
	// Problems are sorted, the gravest first.
	Problems []Problem

	// well describes the state without problems, waiting the events on their way.
	well, waiting string
}

// Assess judges a snapshot. Readiness, status and console all use it: they differ in what they know and how they show
// it.
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
	a.losses()
	if s.Asked.Redis.Error == "" { // otherwise the figures of Redis are old
		a.groups()
		a.memory()
	}
	a.limits()
	return a.verdict()
}

func (a *assessment) verdict() Verdict {
	// Problems that follow from others go last.
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
	v.well, v.waiting = a.well()
	return v
}

// weight is the sort key of a problem.
func (p Problem) weight() Level {
	if p.Follows {
		return Unknown
	}
	return p.Level
}

// well describes the state without problems, and how many events are on their way.
func (a *assessment) well() (state, waiting string) {
	p := a.s.Postgres
	switch {
	case p.Mode == outbox.ModeCDC:
		state = "events flow in mode cdc"
	case p.Desired == outbox.ModePoll:
		state = "events flow in mode poll, as desired"
	case p.Mode == outbox.ModePoll:
		state = "events flow in mode poll; cdc follows when the backlog is drained"
	default:
		state = "a relay is starting"
	}
	if p.Backlog.Rows == 0 {
		return state, "no event is waiting"
	}
	on := CountOf(p.Backlog.Rows, "event")
	if p.Backlog.AtLeast {
		on = "at least " + on
	}
	return state, fmt.Sprintf("%s on the way, the oldest for %s", on, span(seconds(p.Backlog.OldestSeconds)))
}
