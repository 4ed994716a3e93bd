package ops

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/outbox"
	"posthaste/sink"
)

// assessment is a verdict that is being made.
type assessment struct {
	s *Snapshot
	// reachable: neither server has failed to answer.
	reachable bool
	// slotTold is the level at which the unusable slot was reported; Unknown if it was not.
	slotTold Level
	// heldTold is the prefix of the reported condition that keeps a relay from publishing; otherwise "".
	heldTold string
	// repairTold reports whether an incomplete stream was reported.
	repairTold bool
	problems   []Problem
}

// add appends a problem. Its names and errors come from any writer to Redis: characters that change the direction of
// writing would change the sentence around them, so they are replaced.
func (a *assessment) add(p Problem) {
	p.Title, p.Why, p.Remedy, p.line = Printable(p.Title), Printable(p.Why), Printable(p.Remedy), Printable(p.line)
	a.problems = append(a.problems, p)
}

// blocked is the level of what stops events: it depends on whether any wait.
func (a *assessment) blocked() Level {
	if a.s.Asked.Postgres.known() && a.s.Postgres.Backlog.Rows == 0 {
		return Failing
	}
	return Broken
}

// waiting describes the events that wait in the outbox; "" without any, or if that is unknown.
func (a *assessment) waiting() string {
	b := a.s.Postgres.Backlog
	if !a.s.Asked.Postgres.known() || b.Rows == 0 {
		return ""
	}
	return fmt.Sprintf("%s events wait, the oldest for %s", b.Size(), Rough(seconds(b.OldestSeconds)))
}

// servers checks whether both servers answer.
func (a *assessment) servers() {
	pg, rd := a.s.Asked.Postgres, a.s.Asked.Redis
	line := "Postgres does not answer: " + pg.Error
	switch {
	case pg.Refused:
		line = "Postgres refuses: " + pg.Error
	case pg.Slow:
		line = "Postgres is too slow to answer: " + pg.Error
	}
	switch {
	case pg.Slow: // said below
	case pg.Error != "" && pg.Refused:
		a.add(Problem{
			Level: Broken, Part: partOutbox, Title: "Postgres refuses", line: line, Action: actionDoctor,
			Why:    "Committed events are safe. " + sentence(pg.Error),
			Remedy: "Fix what it reports; posthaste doctor names the command.",
		})
	case pg.Error != "":
		a.add(Problem{
			Level: Broken, Part: partOutbox, Title: "Postgres does not answer", line: line, Action: actionDoctor,
			Why:    "Nothing can be ordered and nothing moves; committed events are safe. " + sentence(pg.Error),
			Remedy: "Start Postgres, or fix the network to it. Everything continues automatically.",
		})
	}
	if rd.Error != "" {
		why := "Events are late, none is lost: they wait in Postgres"
		if pg.known() {
			why += fmt.Sprintf(" (%s now)", a.s.Postgres.Backlog.Size())
		}
		a.add(Problem{
			Level: a.blocked(), Part: partRedis, Title: "Redis does not take events", Action: actionDoctor,
			Why:    why + ". " + sentence(rd.Error),
			Remedy: "Start Redis, or fix what it reports. Everything continues automatically.",
			line:   join(rd.Error, a.waiting()),
		})
	}
	if pg.Slow {
		// After Redis: without Redis the outbox grows until counting is too slow, and the cause comes first.
		a.add(Problem{
			Level: Broken, Part: partOutbox, Title: "Postgres is too slow to answer", line: line,
			Action: actionDoctor,
			Why:    "Committed events are safe; the number of waiting ones is unknown. " + sentence(pg.Error),
			Remedy: "Check that a relay is running, its log, locks on outbox, and the load of Postgres.",
		})
	}
}

// held checks whether a relay publishes nothing until an operator acts.
func (a *assessment) held() {
	p := a.s.Postgres
	if !p.Led || p.Mode != outbox.ModeStandby {
		return
	}
	add := func(condition string, problem Problem) {
		what, held := strings.CutPrefix(p.Degraded, condition)
		if !held {
			return
		}
		why, remedy, _ := strings.Cut(what, outbox.RemedyMark)
		problem.Level, problem.Why, problem.line = a.blocked(), sentence(why), join(what, a.waiting())
		problem.Remedy = cmp.Or(problem.Remedy, sentence(remedy))
		a.heldTold = condition
		a.add(problem)
	}
	add(layoutCondition, Problem{
		Part: partPath, Title: "The number of streams per type is being changed", Action: actionGroups,
		Remedy: "It continues when every consumer group has read everything. Drop the groups that have no consumers, " +
			"or end posthaste streams spread and start the relays.",
	})
	add(foreignCondition, Problem{
		Part: partRedis, Title: "A stream belongs to another database", Action: actionDoctor,
	})
	add(copyCondition, Problem{
		Part: partRedis, Title: "A copy of this database is at work, or its original", Action: actionDoctor,
	})
}

// flow checks whether events move.
func (a *assessment) flow() {
	p := a.s.Postgres
	oldest := seconds(p.Backlog.OldestSeconds)
	if !p.Led {
		why := "Events wait in Postgres and none is lost"
		if p.Owner != "" {
			why += "; " + p.Owner + " led last"
		}
		problem := Problem{
			Level: Broken, Part: partPath, Title: "No relay publishes", Why: why + ".",
			Remedy: "Start posthaste relay. If it is running, its log says why it does not lead.",
			line:   join("no relay runs", a.waiting()),
		}
		if p.Relays > 0 {
			problem.line = join(fmt.Sprintf("no relay leads, %d connected", p.Relays), a.waiting())
		}
		if p.Relays > 0 && oldest < veryLateAfter {
			problem.Level = Degraded
			problem.Remedy = "Wait a few seconds: a relay is connected and takes over. If it does not, its log says " +
				"why."
		}
		a.add(problem)
		return
	}
	if oldest < lateAfter {
		return
	}
	level := Degraded
	if oldest >= veryLateAfter {
		level = Broken
	}
	why := fmt.Sprintf("%s events wait in the outbox, none is lost.", p.Backlog.Size())
	if p.Degraded != "" {
		why += " " + sentence(p.Degraded)
	}
	a.add(Problem{
		Level: level, Part: partOutbox, Title: "Events are late: the oldest waits " + span(oldest), Why: why,
		Remedy: "If the backlog shrinks, wait. Otherwise check the doctor's findings and the relay's log.",
		Action: actionDoctor, Follows: !a.reachable || a.heldTold != "", line: join(a.waiting(), p.Degraded),
	})
}

// slot checks the slot and the WAL it holds back.
func (a *assessment) slot() {
	p := a.s.Postgres
	wanted := p.Desired != outbox.ModePoll
	unusable := Degraded
	if p.Desired == outbox.ModeCDC {
		unusable = Failing // in mode cdc, sweeping is a failure
	}
	switch {
	case !p.Led || p.Degraded == "" || a.heldTold != "":
	case p.Mode == outbox.ModeCDC:
		a.slotTold = unusable
		a.add(Problem{
			Level: unusable, Part: partPath, Title: "Events are streamed again, for a moment only so far",
			Why:    "Before: " + sentence(p.Degraded),
			Remedy: "Wait some seconds: this is taken back when the stream lasts.",
			line:   "events are streamed again, but only since a moment ago; before: " + p.Degraded,
		})
	case wanted:
		a.slotTold = unusable
		a.add(Problem{
			Level: unusable, Part: partPath, Title: "Events flow by sweeping, not by the WAL",
			Why: sentence(p.Degraded), Action: actionMode,
			Remedy: "Nothing is lost, and the relay retries automatically. To stop that for now, choose poll.",
			line:   "events are swept although the stream is wanted: " + p.Degraded,
		})
	}
	if p.Slot.Lost && wanted { // otherwise the slot is unused, and it holds nothing back
		reason := because(p.Slot.Reason)
		a.add(Problem{
			Level: Degraded, Part: partPath, Title: "The replication slot is lost", Action: actionDoctor,
			Why:    "Postgres has invalidated it" + reason + "; the table is swept meanwhile.",
			Remedy: "The relay creates a new one automatically. If it does not, check the doctor's findings.",
			line:   "the slot is lost" + reason,
		})
	}
	if muchWAL(p.Slot.RetainedBytes, a.s.WALBudget) {
		a.add(Problem{
			Level: Degraded, Part: partPath, Title: "The slot holds back much WAL",
			Why:    Size(p.Slot.RetainedBytes) + " of the budget of " + Size(a.s.WALBudget) + ".",
			Remedy: "The relay acts on it automatically. If no relay is running, start one.",
			line:   "the slot holds " + Size(p.Slot.RetainedBytes) + " of WAL; the budget is " + Size(a.s.WALBudget),
		})
	}
}

// relay ranks the conditions that the relay of this process reports.
func (a *assessment) relay() {
	if a.s.Relay == nil {
		return
	}
	// The slot's state in Postgres comes from the same relay.
	told := func(level Level, condition string) bool {
		if a.repairTold && strings.HasPrefix(condition, restoreCondition) ||
			a.heldTold != "" && strings.HasPrefix(condition, a.heldTold) {
			return true
		}
		return a.slotTold != Unknown && a.slotTold.Ready() == level.Ready() &&
			condition == slotCondition+a.s.Postgres.Degraded
	}
	add := func(level Level, title, condition string) {
		a.add(Problem{
			Level: level, Part: partPath, Title: title, Why: sentence(condition),
			Remedy: "The doctor names the remedy.",
			Action: actionDoctor, line: "this relay: " + condition, condition: condition,
			Follows: !a.reachable || told(level, condition),
		})
	}
	for _, condition := range a.s.Relay.Reasons {
		add(a.blocked(), "This relay is not ready", condition)
	}
	for _, condition := range a.s.Relay.Degraded {
		add(Degraded, "This relay is degraded", condition)
	}
}

// old reports that a server's answer is out of date: this process was stopped, or it queries less often because
// answers were slow.
func (a *assessment) old() {
	for _, l := range []struct {
		name, part string
		asOf       *time.Time
	}{{"Postgres", partOutbox, a.s.Asked.Postgres.AsOf}, {"Redis", partRedis, a.s.Asked.Redis.AsOf}} {
		if a.s.Fresh == 0 || l.asOf == nil || a.s.Now.Sub(*l.asOf) < a.s.Fresh {
			continue
		}
		a.add(Problem{
			Level: Degraded, Part: l.part,
			Title: "The figures of " + l.name + " are " + span(a.s.Now.Sub(*l.asOf)) + " old",
			Why:   "It takes long to answer, or this process was suspended.",
			Remedy: "Wait a few seconds. If it persists, check the load of both servers; posthaste status queries " +
				"them again.",
		})
	}
}

// unknown reports what could not be read although both servers answer: a problem there would go unnoticed.
func (a *assessment) unknown() {
	// Parts that failed together with their server are read again within that time.
	asked, now := a.s.Asked, a.s.Now
	back := asked.Postgres.Well
	if asked.Redis.Well.After(back) {
		back = asked.Redis.Well
	}
	for _, l := range []struct {
		part, title string
		Answer
	}{
		{partPath, "Dead events are not known", asked.Dead},
		{partGroups, "Consumer groups are not known", asked.Groups},
		{partRedis, "The streams cannot be read", asked.Streams},
	} {
		if l.Error == "" || l.Since == nil || now.Sub(*l.Since) < unknownAfter || now.Sub(back) < unknownAfter {
			continue
		}
		a.add(Problem{
			Level: Degraded, Part: l.part, Title: l.title, Action: actionDoctor,
			Why:    "Problems with them would not show here. " + sentence(l.Error),
			Remedy: "Check that this process may read them, and that the server is not slow.",
		})
	}
}

func (a *assessment) dead() {
	d := a.s.Dead
	if d.Relay > 0 {
		a.add(Problem{
			Level: Failing, Part: partPath, Title: are(d.Relay) + " parked, not published",
			Why: "Redis rejected it: " + sentence(d.First), Remedy: "Fix the cause, then press Retry.",
			Action: actionDead,
			line:   are(d.Relay) + " parked (posthaste dead list)",
		})
	}
	if d.Groups > 0 {
		a.add(Problem{
			Level: Degraded, Part: partGroups, Title: are(d.Groups) + " given up by a consumer group",
			Why: "Its consumers failed repeatedly.", Remedy: "Fix the consumer, then press Retry.",
			Action: actionDead,
		})
	}
}

// are counts events, with the verb.
func are(events int) string {
	if events == 1 {
		return "1 event is"
	}
	return humanize.Comma(int64(events)) + " events are"
}

// owed describes what is pending for a group. After a deletion in the stream, Redis cannot count unread entries.
func owed(g sink.Group) string {
	unread := humanize.Comma(g.Lag)
	if g.Lag < 0 {
		unread = "An unknown number"
	}
	return fmt.Sprintf("%s unread, %s not acknowledged", unread, humanize.Comma(g.Pending))
}

func (a *assessment) groups() {
	for _, g := range a.s.Groups {
		on := g.Name + " on " + g.Stream
		switch StateOf(g) {
		case Abandoned:
			a.add(Problem{
				Level: Degraded, Part: partGroups, Title: "No consumer reads for group " + on, Action: actionGroups,
				Why: fmt.Sprintf("%s, waiting for %s. The stream is not trimmed beyond them and fills Redis.",
					owed(g), span(g.Idle)),
				Remedy: "Start its consumers, or, if it is no longer needed: " + DropGroupCommand(g.Stream, g.Name),
			})
		case Slow:
			a.add(Problem{
				Level: Degraded, Part: partGroups, Title: "Group " + on + " does not keep up", Action: actionGroups,
				Why:    fmt.Sprintf("%s, waiting for %s.", owed(g), span(max(g.Idle, g.Waits))),
				Remedy: "Check that its consumers are running, and their logs.",
			})
		case UpToDate, Behind:
		}
		if g.Lost > 0 {
			a.add(Problem{
				Level: Broken, Part: partGroups,
				Title:  "Lost to group " + on + ": " + humanize.Comma(g.Lost) + " entries",
				Why:    "They were trimmed from the stream before the group had read them.",
				Remedy: "posthaste replay publishes them again from the history.", Action: actionGroups,
			})
		}
	}
}

// repairs reports the repairs under way, and those that failed.
func (a *assessment) repairs() {
	p := a.s.Postgres
	if open := p.open(); len(open) > 0 {
		a.repairTold = true
		title, progress := open[0].Stream+" is compared with what is settled", open[0].progress()
		if n := len(open); n > 1 {
			title, progress = fmt.Sprintf("%d streams are compared with what is settled", n), open[0].Found()
		}
		far := sentence(open[0].Found())
		if a.s.Relay != nil { // the relay knows the progress and the obstacle better
			for _, condition := range a.s.Relay.Reasons {
				if strings.HasPrefix(condition, restoreCondition) {
					far = sentence(condition[len(restoreCondition):])
				}
			}
		}
		oldest := slices.MinFunc(open, func(x, y Compared) int { return x.Noticed.Compare(y.Noticed) }).Noticed
		a.add(Problem{
			Level: a.blocked(), Part: partRedis, Title: title, Follows: !a.reachable || a.heldTold != "",
			Why: "Redis or Postgres may have lost data. Nothing newer is published until the streams are complete. " +
				far,
			Remedy: "Wait: the relay publishes the missing events again, and continues. docs/recovery.md has the " +
				"duration.",
			line: join(title+", for "+Rough(a.s.Now.Sub(oldest)), progress, a.waiting()),
		})
	}
	if p.Phantoms > 0 {
		what := are(int(p.Phantoms)) + " in a stream and not in Postgres"
		if p.Phantoms > 1 {
			what = are(int(p.Phantoms)) + " in their streams and not in Postgres"
		}
		a.add(Problem{
			Level: Failing, Part: partOutbox, Title: what,
			Why: "Postgres has gone back in time, by a failover or a restore. Either it has lost their commits, and " +
				"consumers may have acted on them; or their rows were deleted before.",
			Remedy: "posthaste phantoms names them; docs/recovery.md says what to do. posthaste phantoms --ack ends " +
				"this notice.",
			line: what + " (posthaste phantoms)",
		})
	}
}

// losses reports what Redis or Postgres has lost.
func (a *assessment) losses() {
	noticed := func(at time.Time) string { return "Noticed " + span(a.s.Now.Sub(at)) + " ago" }
	var lost bool
	for _, l := range a.s.Postgres.Compared {
		if l.Missing == 0 {
			continue
		}
		lost = true
		p := Problem{
			Level: Broken, Part: partRedis, Title: l.Lost(), Remedy: l.Remedy,
			Why: noticed(l.Noticed) + ". They had been acknowledged, and were not restored: they were settled longer " +
				"ago than --restore reaches, or there is no history of them.",
			line: l.Lost() + "; to restore them: " + l.Remedy,
		}
		if l.Stream == "" {
			p.Level, p.Part = Degraded, partOutbox
			p.Why = noticed(l.Noticed) + ". The new server lacks what it had not received. Events in the streams are " +
				"not published again; commits may be missing."
			p.line = l.Lost() + "; " + l.Remedy
		}
		a.add(p)
	}
	if at := a.s.Lost; at != nil && !lost {
		a.add(a.seen(*at, noticed(*at)))
	}
}

// seen is the problem of a loss that was noticed in Redis and that Postgres does not list.
func (a *assessment) seen(lost time.Time, noticed string) Problem {
	if at := a.s.Postgres.Repaired; at != nil && at.After(lost.Add(-repairedBefore)) && !a.repairTold {
		return Problem{
			Level: Degraded, Part: partRedis, Title: "Redis had lost data, and has it again", Action: actionGroups,
			Why: noticed + ": streams or gates had disappeared. The relay has published the missing settled events " +
				"again, as far back as --restore reaches.",
			Remedy: "Find out why it was flushed, restarted without its data, or failed over. This stays for 15 " +
				"minutes.",
		}
	}
	return Problem{
		Level: Broken, Part: partRedis, Title: "Redis has lost data", Action: actionGroups,
		Why: noticed + ": streams or gates have disappeared. The relay publishes the waiting events, and the " +
			"missing settled events as far back as --restore reaches.",
		Remedy: "Check that a relay runs. Find out why it was flushed, restarted without its data, or failed over. " +
			"This stays for 15 minutes.",
	}
}

func (a *assessment) memory() {
	m := a.s.Redis
	if unsafePolicy(m.Policy) {
		a.add(Problem{
			Level: Degraded, Part: partRedis, Title: "Redis may delete events", Action: actionDoctor,
			Why:    "Its maxmemory-policy is " + m.Policy + ": when memory is short, streams and gates go.",
			Remedy: "CONFIG SET maxmemory-policy noeviction",
		})
	}
	if m.MaxBytes > 0 && float64(m.UsedBytes) > fullAt*float64(m.MaxBytes) {
		a.add(Problem{
			Level: Degraded, Part: partRedis, Title: "Redis is nearly full", Action: actionGroups,
			Why: Size(m.UsedBytes) + " of " + Size(m.MaxBytes) + ". " +
				"At the limit publishing stops, and events wait in Postgres.",
			Remedy: "Raise maxmemory, or shorten the streams. A group without consumers holds trimming.",
		})
	}
}

// limits reports what is not checked.
func (a *assessment) limits() {
	if n := a.s.Streams; a.s.Looked > 0 && n > a.s.Looked {
		a.add(Problem{
			Level: Degraded, Part: partRedis,
			Title:  fmt.Sprintf("%d of %s streams are checked", a.s.Looked, humanize.Comma(int64(n))),
			Why:    "Problems with the groups of the others do not show here.",
			Remedy: "posthaste groups list shows all of them.",
		})
	}
}
