package ops

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"posthaste/outbox"
	"posthaste/sink"
	"posthaste/sql"
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
	p.Title, p.Why, p.Remedy = Printable(p.Title), Printable(p.Why), Printable(p.Remedy)
	a.problems = append(a.problems, p)
}

// blocked is the level of what stops events: it depends on whether any wait.
func (a *assessment) blocked() Level {
	if a.s.Asked.Postgres.known() && a.s.Postgres.Backlog.Rows == 0 {
		return Failing
	}
	return Broken
}

// servers checks whether both servers answer.
func (a *assessment) servers() {
	pg, rd := a.s.Asked.Postgres, a.s.Asked.Redis
	switch {
	case pg.Slow: // said below
	case pg.Error != "" && pg.Refused:
		a.add(Problem{
			Level: Broken, Part: partOutbox, Title: "Postgres refuses", Action: actionDoctor,
			Why: sentence(pg.Error) + " Committed events are safe.", Runbook: "OutboxNoLeader",
			Remedy: "Fix what it reports: posthaste doctor names the command.",
		})
	case pg.Error != "":
		a.add(Problem{
			Level: Broken, Part: partOutbox, Title: "Postgres does not answer", Action: actionDoctor,
			Why: sentence(pg.Error) + " Nothing can be ordered and nothing moves; committed events are safe.",
			Remedy: "Start Postgres, or fix what keeps posthaste doctor from reaching it. Everything continues " +
				"automatically.",
			Runbook: "OutboxNoLeader",
		})
	}
	if rd.Error != "" {
		name, why := "Redis", " Events are late, none is lost: they wait in Postgres"
		if a.s.NATS {
			name = "NATS"
		}
		if pg.known() {
			why += fmt.Sprintf(" (%s now)", a.s.Postgres.Backlog.Size())
		}
		a.add(Problem{
			Level: a.blocked(), Part: partRedis, Title: name + " does not take events", Action: actionDoctor,
			Why: sentence(rd.Error) + why + ".", Runbook: "OutboxPublishFailing",
			Remedy: "Start " + name + ", or fix what it reports: posthaste doctor names the setting. Everything " +
				"continues automatically.",
		})
	}
	if pg.Slow {
		// After Redis: without Redis the outbox grows until counting is too slow, and the cause comes first.
		a.add(Problem{
			Level: Broken, Part: partOutbox, Title: "Postgres is too slow to answer", Action: actionDoctor,
			Why: sentence(pg.Error) + " Committed events are safe; the number of waiting ones is unknown.",
			Remedy: "Check the relay's log, locks on the table outbox, and the load of Postgres; posthaste status " +
				"counts without a limit of time.",
			Runbook: "OutboxSlotScrapeFailing",
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
		problem.Level, problem.Why = a.blocked(), sentence(why)
		problem.Remedy = cmp.Or(problem.Remedy, sentence(remedy))
		a.heldTold = condition
		a.add(problem)
	}
	add(layoutCondition, Problem{
		Part: partPath, Title: "The number of streams per type is being changed", Action: actionGroups,
		Runbook: "OutboxRelayNotPublishing",
		Remedy: "It continues when every consumer group has read everything. Drop the groups that have no consumers, " +
			"or end posthaste streams spread and start the relays.",
	})
	add(foreignCondition, Problem{
		Part: partRedis, Title: "A stream belongs to another database", Action: actionDoctor,
		Runbook: "OutboxPublishFailing",
	})
	add(copyCondition, Problem{
		Part: partRedis, Title: "A copy of this database is at work, or its original", Action: actionDoctor,
		Runbook: "OutboxRelayNotPublishing",
	})
}

// flow checks whether events move.
func (a *assessment) flow() {
	p := a.s.Postgres
	oldest := seconds(p.Backlog.OldestSeconds)
	if p.Hung {
		a.add(Problem{
			Level: Broken, Part: partOutbox, Title: "Commits wait for a synchronous standby", Action: actionDoctor,
			Why:    "Writers hang, and what they wrote is not published before their commits end.",
			Remedy: sentence(sql.StandbyRemedy + ": posthaste doctor shows it"), Runbook: "OutboxRelayNotPublishing",
		})
	}
	if !p.Led {
		why := "Events wait in Postgres and none is lost"
		if p.Backlog.Rows > 0 {
			why = p.Backlog.wait() + " in Postgres and none is lost"
		}
		if p.Owner != "" {
			why += "; " + p.Owner + " led last"
		}
		problem := Problem{
			Level: Broken, Part: partPath, Title: "No relay publishes", Why: why + ".", Runbook: "OutboxNoLeader",
			Remedy: "Start one: posthaste relay. If it is running, its log says why it does not lead.",
		}
		if p.Relays > 0 && oldest < veryLateAfter {
			problem.Level = Degraded
			problem.Remedy = "Wait a few seconds: a relay is connected and takes over. If it does not, its log and " +
				"posthaste doctor say why."
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
	problem := Problem{
		Level: level, Part: partOutbox, Title: "Events are late: the oldest waits " + span(oldest),
		Why:     p.Backlog.wait() + " in the outbox, none is lost.",
		Remedy:  "If the backlog shrinks, wait. Otherwise run posthaste doctor, and check the relay's log.",
		Runbook: "OutboxOldestPendingTooOld", Action: actionDoctor,
		Follows: !a.reachable || a.heldTold != "",
	}
	if a.s.Refused != "" {
		problem.Why += " Redis refuses what publishing needs, at least to the user of this command: " +
			sentence(a.s.Refused)
		problem.Remedy = "If the relay has the same user, " + sink.Remedy("noperm") + ". posthaste doctor verifies it."
	}
	a.add(problem)
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
			Level: unusable, Part: partPath, Title: "Events flow in mode cdc again, since a moment ago",
			Why: "Before: " + sentence(p.Degraded), Runbook: "OutboxRelayFallbackActive",
			Remedy: "Wait some seconds: this notice ends when the stream lasts. posthaste status shows it, too.",
		})
	case wanted:
		a.slotTold = unusable
		a.add(Problem{
			Level: unusable, Part: partPath, Title: "Events flow in mode poll, not cdc",
			Why: sentence(p.Degraded), Action: actionMode, Runbook: "OutboxRelayFallbackActive",
			Remedy: "Nothing is lost, and the relay retries automatically. posthaste doctor names the remedy; " +
				"posthaste mode poll stops the retries.",
		})
	}
	if p.Slot.Lost && wanted { // otherwise the slot is unused, and it holds nothing back
		reason := ""
		if p.Slot.Reason != "" {
			reason = " (" + p.Slot.Reason + ")"
		}
		a.add(Problem{
			Level: Degraded, Part: partPath, Title: "The replication slot is lost", Action: actionDoctor,
			Why:     "Postgres has invalidated it" + reason + "; until there is another one, events flow in mode poll.",
			Remedy:  "The relay creates a new one automatically. If it does not, posthaste doctor says why.",
			Runbook: "OutboxRelayFallbackActive",
		})
	}
	if muchWAL(p.Slot.RetainedBytes, a.s.WALBudget) {
		a.add(Problem{
			Level: Degraded, Part: partPath, Title: "The slot holds back much WAL",
			Why:     Size(p.Slot.RetainedBytes) + " of the budget of " + Size(a.s.WALBudget) + ".",
			Remedy:  "The relay acts on it automatically. If no relay is running, start one: posthaste relay.",
			Runbook: "OutboxSlotRetainedWALCritical",
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
			Remedy: "posthaste doctor names the remedy.", Runbook: "OutboxRelayNotPublishing",
			Action: actionDoctor, Follows: !a.reachable || told(level, condition),
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
			Runbook: "OutboxSlotScrapeFailing",
		})
	}
}

// unknown reports what could not be read although both servers answer: a problem there would go unnoticed.
func (a *assessment) unknown() {
	// Parts that failed together with their server are read again within that time.
	asked, now := a.s.Asked, a.s.Now
	back := slices.MaxFunc([]time.Time{asked.Postgres.Well, asked.Redis.Well}, time.Time.Compare)
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
			Why:     "Problems with them would not show here. " + sentence(l.Error),
			Remedy:  "Check that this process may read them (posthaste doctor), and that the server is not slow.",
			Runbook: "OutboxSlotScrapeFailing",
		})
	}
}

// wrongKey matches the reason of an event whose stream has a key of another type, and finds the key.
var wrongKey = regexp.MustCompile(`the key (\S+) holds a `)

func (a *assessment) dead() {
	d := a.s.Dead
	const press = ", then press Retry all, or run posthaste dead retry --all."
	if d.Relay > 0 {
		cure := "Remove the cause"
		if key := wrongKey.FindStringSubmatch(d.First); key != nil {
			cure = "Rename or delete that key: redis-cli RENAMENX " + Quoted(key[1]) + " " + Quoted(key[1]+":aside")
		}
		a.add(Problem{
			Level: Failing, Part: partPath, Title: are(d.Relay) + " dead: Redis refuses " + them(d.Relay),
			Why: "The oldest: " + sentence(d.First), Remedy: cure + press, Runbook: "OutboxDeadEvents",
			Action: actionDead,
		})
	}
	if d.Groups > 0 {
		a.add(Problem{
			Level: Degraded, Part: partGroups, Title: are(d.Groups) + " dead: a consumer group gave " +
				them(d.Groups) + " up",
			Why: "Its consumers failed repeatedly.", Remedy: "Fix the consumer" + press,
			Runbook: "OutboxConsumerDead", Action: actionDead,
		})
	}
}

func them(n int) string {
	if n == 1 {
		return "it"
	}
	return "them"
}

// are counts events, with the verb.
func are(events int) string {
	if events == 1 {
		return "1 event is"
	}
	return humanize.Comma(int64(events)) + " events are"
}

// groups reports the groups that have a problem. A group that has the same one on several streams is one problem.
func (a *assessment) groups() {
	type cause struct {
		name string
		GroupState
		lost bool
	}
	var causes []cause
	on := map[cause][]sink.Group{}
	note := func(c cause, g sink.Group) {
		if on[c] == nil {
			causes = append(causes, c)
		}
		on[c] = append(on[c], g)
	}
	for _, g := range a.s.Groups {
		if state := StateOf(g); state >= Slow {
			note(cause{g.Name, state, false}, g)
		}
		if g.Lost > 0 {
			note(cause{g.Name, UpToDate, true}, g)
		}
	}
	for _, c := range causes {
		groups := on[c]
		place, which := onStreams(groups)
		p := Problem{Level: Degraded, Part: partGroups, Action: actionGroups, Runbook: "OutboxConsumerStuck"}
		switch {
		case c.lost:
			var lost int64
			for _, g := range groups {
				lost += g.Lost
			}
			p.Level, p.Runbook = Broken, "OutboxStreamTrimLoss"
			p.Title = "Lost to group " + c.name + " on " + place + ": " + CountOf(lost, "event")
			p.Why = "They were trimmed from the stream before the group had read them." + which
			p.Remedy = "posthaste replay --stream=" + Quoted(groups[0].Stream) +
				" --since=… publishes them again from the history."
		case c.GroupState == Abandoned:
			p.Title = "No consumer reads for group " + c.name + " on " + place
			p.Why = pending(groups) + " The stream is not trimmed beyond them and fills Redis." + which
			p.Remedy = "Start its consumers, or, if it is no longer needed: " +
				DropGroupCommand(groups[0].Stream, c.name)
		default:
			p.Title = "Group " + c.name + " on " + place + " does not keep up"
			p.Why = pending(groups) + which
			p.Remedy = "Check that its consumers are running, and their logs; posthaste groups list shows the progress."
		}
		a.add(p)
	}
}

// onStreams names the stream of groups, or counts their streams and lists the first of them in a sentence.
func onStreams(groups []sink.Group) (place, list string) {
	if len(groups) == 1 {
		return groups[0].Stream, ""
	}
	const most = 5
	var names []string
	for _, g := range groups[:min(len(groups), most)] {
		names = append(names, g.Stream)
	}
	if more := len(groups) - most; more > 0 {
		names = append(names, humanize.Comma(int64(more))+" more")
	}
	return CountOf(int64(len(groups)), "stream"), " Streams: " + strings.Join(names, ", ") + "."
}

// pending describes what groups have not read or not acknowledged. After a deletion in the stream, Redis cannot count
// unread entries.
func pending(groups []sink.Group) string {
	var lag, acks int64
	var waits time.Duration
	for _, g := range groups {
		lag, acks, waits = lag+g.Lag, acks+g.Pending, max(waits, g.Idle, g.Waits)
	}
	unread := humanize.Comma(lag)
	if slices.ContainsFunc(groups, func(g sink.Group) bool { return g.Lag < 0 }) {
		unread = "An unknown number"
	}
	return fmt.Sprintf("%s unread, %s not acknowledged, waiting for %s.", unread, humanize.Comma(acks), span(waits))
}

// repairs reports the repairs under way, and those that failed.
func (a *assessment) repairs() {
	p := a.s.Postgres
	if open := p.open(); len(open) > 0 {
		a.repairTold = true
		title := open[0].Stream + " is compared with what is settled"
		if n := len(open); n > 1 {
			title = fmt.Sprintf("%d streams are compared with what is settled", n)
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
			Why: a.noticed(oldest) + ": Redis or Postgres may have lost data. Nothing newer is published until the " +
				"streams are complete. " + far,
			Remedy: "Wait: the relay publishes the missing events again, and continues. posthaste status shows the " +
				"progress.",
			Runbook: "OutboxRedisLostData",
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
			Remedy: "posthaste phantoms names them; the runbook says what to do. posthaste phantoms --ack ends " +
				"this notice.",
			Runbook: "OutboxPhantomEvents",
		})
	}
}

func (a *assessment) noticed(at time.Time) string { return "Noticed " + span(a.s.Now.Sub(at)) + " ago" }

// losses reports what Redis or Postgres has lost.
func (a *assessment) losses() {
	var lost []Compared
	for _, l := range a.s.Postgres.Compared {
		switch {
		case l.Missing == 0:
		case l.Stream != "":
			lost = append(lost, l)
		default:
			a.add(Problem{
				Level: Degraded, Part: partOutbox, Title: l.Lost(), Remedy: l.Remedy, Runbook: "OutboxPhantomEvents",
				Why: a.noticed(l.Noticed) + ". The new server lacks what it had not received. Events in the streams " +
					"are not published again; commits may be missing.",
			})
		}
	}
	if len(lost) > 0 {
		title, remedy, which := lost[0].Lost(), lost[0].Remedy, ""
		if n := len(lost); n > 1 {
			title = fmt.Sprintf("Redis lost settled events of %d streams", n)
			remedy += " (posthaste status has the commands of all streams)"
			for _, l := range lost[:min(n, 5)] {
				which += " " + sentence(l.Lost())
			}
		}
		a.add(Problem{
			Level: Broken, Part: partRedis, Title: title, Remedy: remedy, Runbook: "OutboxRedisLostData",
			Why: a.noticed(lost[0].Noticed) + ". They had been acknowledged, and were not restored: they were " +
				"settled longer ago than --restore reaches, or there is no history of them." + which,
		})
	}
	if at := a.s.Lost; at != nil && len(lost) == 0 {
		a.add(a.seen(*at))
	}
}

// seen is the problem of a loss that was noticed in Redis and that Postgres does not list.
func (a *assessment) seen(lost time.Time) Problem {
	if at := a.s.Postgres.Repaired; at != nil && at.After(lost.Add(-repairedBefore)) && !a.repairTold {
		return Problem{
			Level: Degraded, Part: partRedis, Title: "Redis had lost data, and has it again", Action: actionGroups,
			Why: a.noticed(lost) + ": streams or gates had disappeared. The relay has published the missing settled " +
				"events again, as far back as --restore reaches.",
			Remedy: "Find out why it was flushed, restarted without its data, or failed over: redis-cli INFO server. " +
				"This stays for 15 minutes.",
			Runbook: "OutboxRedisLostData",
		}
	}
	return Problem{
		Level: Broken, Part: partRedis, Title: "Redis has lost data", Action: actionGroups,
		Why: a.noticed(lost) + ": streams or gates have disappeared. The relay publishes the waiting events, and the " +
			"missing settled events as far back as --restore reaches.",
		Remedy: "Check that a relay runs: posthaste status. Find out why Redis was flushed, restarted without its " +
			"data, or failed over. This stays for 15 minutes.",
		Runbook: "OutboxRedisLostData",
	}
}

func (a *assessment) memory() {
	m := a.s.Redis
	if unsafePolicy(m.Policy) {
		a.add(Problem{
			Level: Degraded, Part: partRedis, Title: "Redis may delete events", Action: actionDoctor,
			Why:    "Its maxmemory-policy is " + m.Policy + ": when memory is short, streams and gates go.",
			Remedy: "redis-cli CONFIG SET maxmemory-policy noeviction", Runbook: "PosthasteRedisMemoryHigh",
		})
	}
	if m.MaxBytes > 0 && float64(m.UsedBytes) > fullAt*float64(m.MaxBytes) {
		a.add(Problem{
			Level: Degraded, Part: partRedis, Title: "Redis is nearly full", Action: actionGroups,
			Why: Size(m.UsedBytes) + " of " + Size(m.MaxBytes) + ". " +
				"At the limit publishing stops, and events wait in Postgres.",
			Remedy: "Raise maxmemory (redis-cli CONFIG SET maxmemory SIZE), or lower --stream-maxlen. A group " +
				"without consumers holds trimming: posthaste groups list shows it.",
			Runbook: "PosthasteRedisMemoryHigh",
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
			Remedy: "posthaste groups list shows all of them.", Runbook: "OutboxConsumerStuck",
		})
	}
}
