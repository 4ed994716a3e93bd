package console

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/dustin/go-humanize"

	"posthaste/internal/ops"
	"posthaste/outbox"
	"posthaste/sink"
)

// Levels, in the order of gravity.
const (
	levelUnknown = "unknown"
	levelOK      = "ok"
	levelWarn    = "warn"
	levelBad     = "bad"
)

// Parts of the pipeline picture.
const (
	partOutbox = "outbox"
	partPath   = "path"
	partRedis  = "redis"
	partGroups = "groups"
)

// Verdict says in words how the pipeline is.
type Verdict struct {
	Level string `json:"level"`
	Title string `json:"title"`
	Why   string `json:"why"`
	// Mend says what to do; empty if there is nothing.
	Mend string `json:"mend"`
	// Action names the section of the page where to do it; empty if it is not done there.
	Action string `json:"action"`
	// Also are the other problems, the gravest first.
	Also []Problem `json:"also"`
	// Parts are the levels of the parts of the picture that are not ok.
	Parts map[string]string `json:"parts"`
}

// Problem is one thing that is wrong.
type Problem struct {
	Level  string `json:"level"`
	Part   string `json:"part"`
	Title  string `json:"title"`
	Why    string `json:"why"`
	Mend   string `json:"mend"`
	Action string `json:"action"`
}

// From when on a waiting event is called late, and very late.
const (
	lateAfter     = 5.0
	veryLateAfter = 30.0
	// unknownAfter is from when on it is said that something cannot be read.
	unknownAfter = 10 * time.Second
	// oldAfter is from when on an answer is not taken for the present.
	oldAfter = longestGap + sourceTimeout + 3*time.Second
	// unreadAfter is how long a group may leave an entry lying.
	unreadAfter = time.Minute
	// behindAfter is the same for a group whose consumers are at work, which may try an entry again for some minutes.
	behindAfter = 5 * time.Minute
)

type court struct {
	s        *State
	problems []Problem
}

// judge finds out what is wrong, and says the gravest first.
func judge(s *State, walBudget int64) Verdict {
	j := &court{s: s}
	reachable := j.servers()
	if s.Postgres.AsOf == nil && s.Postgres.Error == "" || s.Redis.AsOf == nil && s.Redis.Error == "" {
		if reachable {
			return Verdict{Level: levelUnknown, Title: "Looking…", Why: "Postgres and Redis are being asked.", Also: []Problem{}, Parts: map[string]string{}}
		}
	}
	if s.Postgres.Error == "" && s.Postgres.AsOf != nil {
		j.flow(reachable)
		j.slot(walBudget)
	}
	if reachable {
		j.old()
		j.unknown()
	}
	j.dead()
	j.groups()
	j.memory()
	j.limits()
	return j.verdict()
}

// add takes a problem. Names and errors in it are anybody's who may write to Redis: a character that turns the direction of
// writing would make something else of the sentence around it.
func (j *court) add(p Problem) {
	p.Title, p.Why, p.Mend = printable(p.Title), printable(p.Why), printable(p.Mend)
	j.problems = append(j.problems, p)
}

func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return '?'
	}, s)
}

// servers looks whether both servers answer.
func (j *court) servers() bool {
	s := j.s
	switch {
	case s.Postgres.Slow: // said below
	case s.Postgres.Error != "" && s.Postgres.Refused:
		j.add(Problem{
			Level: levelBad, Part: partOutbox, Title: "Postgres refuses", Why: "What was committed is safe. " + sentence(s.Postgres.Error),
			Mend: "Mend what it complains of; the doctor names the command.", Action: "doctor",
		})
	case s.Postgres.Error != "":
		j.add(Problem{
			Level: levelBad, Part: partOutbox, Title: "Postgres does not answer",
			Why:  "Nothing can be ordered and nothing moves; what was committed is safe. " + sentence(s.Postgres.Error),
			Mend: "Start Postgres, or mend the way to it. Everything goes on by itself.", Action: "doctor",
		})
	}
	if s.Redis.Error != "" {
		why := "Events are late, none is lost: they wait in Postgres"
		if s.Postgres.Error == "" && s.Postgres.AsOf != nil {
			why += fmt.Sprintf(" (%s now)", humanize.Comma(s.Postgres.Value.Backlog.Rows))
		}
		j.add(Problem{
			Level: levelBad, Part: partRedis, Title: "Redis does not take events", Why: why + ". " + sentence(s.Redis.Error),
			Mend: "Start Redis, or mend what it complains of. Everything goes on by itself.", Action: "doctor",
		})
	}
	if s.Postgres.Slow {
		// After Redis: without it the outbox grows until counting takes too long, and the cause comes first.
		j.add(Problem{
			Level: levelBad, Part: partOutbox, Title: "Postgres is too slow to be asked",
			Why:  "What was committed is safe; how much of it waits is not known. " + sentence(s.Postgres.Error),
			Mend: "Look whether a relay runs and at its log, for locks on outbox, and at the load of Postgres.", Action: "doctor",
		})
	}
	return s.Postgres.Error == "" && s.Redis.Error == ""
}

// old says that what a server answered is not from now: this process was stopped, or asks less often because it took long.
func (j *court) old() {
	for _, l := range []struct {
		name, part string
		asOf       *time.Time
	}{{"Postgres", partOutbox, j.s.Postgres.AsOf}, {"Redis", partRedis, j.s.Redis.AsOf}} {
		if l.asOf == nil || j.s.Now.Sub(*l.asOf) < oldAfter {
			continue
		}
		j.add(Problem{
			Level: levelWarn, Part: l.part, Title: "What is shown of " + l.name + " is " + span(j.s.Now.Sub(*l.asOf).Seconds()) + " old",
			Why:  "It takes long to answer, or this process was stopped for a while.",
			Mend: "Wait some seconds. If it stays, look at the load of both; posthaste status asks anew.",
		})
	}
}

// unknown says what could not be looked at although both servers answer: not to know of a problem is not to have none.
func (j *court) unknown() {
	// What failed together with its server is looked at again within that time.
	now, back := j.s.Now, j.s.Postgres.well
	if j.s.Redis.well.After(back) {
		back = j.s.Redis.well
	}
	cannot := func(part, title, err string, since *time.Time) {
		if err == "" || since == nil || now.Sub(*since) < unknownAfter || now.Sub(back) < unknownAfter {
			return
		}
		j.add(Problem{
			Level: levelWarn, Part: part, Title: title, Why: "What is wrong with them would not show here. " + sentence(err),
			Mend: "Look whether this process may read them and whether the server is slow.", Action: "doctor",
		})
	}
	cannot(partPath, "Dead events are not known", j.s.Dead.Error, j.s.Dead.Since)
	cannot(partGroups, "Consumer groups are not known", j.s.Groups.Error, j.s.Groups.Since)
	cannot(partRedis, "The streams cannot be read", j.s.Streams.Error, j.s.Streams.Since)
}

// flow looks whether events move.
func (j *court) flow(reachable bool) {
	p := j.s.Postgres.Value
	if !p.Led {
		why := "Events wait in Postgres and none is lost"
		if p.Owner != "" {
			why += "; " + p.Owner + " led last"
		}
		mend := "Start posthaste relay. If it runs, its log says why it does not lead."
		level := levelBad
		if p.Relays > 0 && p.Backlog.OldestSeconds < veryLateAfter {
			mend, level = "Wait some seconds: a relay is connected and takes over. If it does not, its log says why.", levelWarn
		}
		j.add(Problem{Level: level, Part: partPath, Title: "No relay publishes", Why: why + ".", Mend: mend})
	}
	oldest := p.Backlog.OldestSeconds
	if reachable && p.Led && oldest >= lateAfter {
		level := levelWarn
		if oldest >= veryLateAfter {
			level = levelBad
		}
		why := fmt.Sprintf("%s events wait in the outbox, none is lost.", humanize.Comma(p.Backlog.Rows))
		if p.Degraded != "" {
			why += " " + sentence(p.Degraded)
		}
		j.add(Problem{
			Level: level, Part: partOutbox, Title: "Events are late: the oldest waits " + span(oldest), Why: why,
			Mend: "If the backlog falls, wait. If it does not: look at the doctor's findings and at the relay's log.", Action: "doctor",
		})
	}
	if r := j.s.Relay; r != nil && reachable {
		for _, reason := range r.Reasons {
			j.add(Problem{
				Level: levelBad, Part: partPath, Title: "This relay is not ready", Why: sentence(reason), Mend: "The doctor names the mend.", Action: "doctor",
			})
		}
	}
}

// slot looks at the stream and the WAL it holds.
func (j *court) slot(budget int64) {
	p := j.s.Postgres.Value
	streams := p.Mode == outbox.ModeCDC
	if p.Desired != outbox.ModePoll && p.Led && !streams && p.Degraded != "" {
		j.add(Problem{
			Level: levelWarn, Part: partPath, Title: "Events flow by sweeping, not by the WAL", Why: sentence(p.Degraded),
			Mend: "Nothing is lost and the relay tries again by itself. To end it for now, choose poll.", Action: "mode",
		})
	}
	if p.Slot.Lost {
		j.add(Problem{
			Level: levelWarn, Part: partPath, Title: "The replication slot is lost", Why: "Postgres has given it up" + because(p.Slot.Reason) + "; the table is swept meanwhile.",
			Mend: "The relay makes a new one by itself. Look at the doctor's findings if it does not.", Action: "doctor",
		})
	}
	if budget > 0 && p.Slot.RetainedBytes > budget/5*4 {
		j.add(Problem{
			Level: levelWarn, Part: partPath, Title: "The slot holds much WAL", Mend: "The relay acts on it by itself. If no relay runs, start one.",
			Why: fmt.Sprintf("%s of the budget of %s.", humanize.IBytes(uint64(p.Slot.RetainedBytes)), humanize.IBytes(uint64(budget))),
		})
	}
}

func (j *court) dead() {
	d := j.s.Dead.Value
	if d.Relay > 0 {
		j.add(Problem{
			Level: levelBad, Part: partPath, Title: parked(d.Relay) + " parked, not published", Why: "Redis refused: " + sentence(d.First),
			Mend: "Mend the cause, then press Retry.", Action: "dead",
		})
	}
	if d.Groups > 0 {
		j.add(Problem{
			Level: levelWarn, Part: partGroups, Title: parked(d.Groups) + " given up by a consumer group", Why: "Its consumers failed again and again.",
			Mend: "Mend the consumer, then press Retry.", Action: "dead",
		})
	}
}

func parked(n int) string {
	if n == 1 {
		return "1 event is"
	}
	return humanize.Comma(int64(n)) + " events are"
}

// owed says what waits for a group; after a deletion in the stream Redis cannot tell how much of it is unread.
func owed(g sink.Group) string {
	unread := humanize.Comma(g.Lag)
	if g.Lag < 0 {
		unread = "An unknown number"
	}
	return fmt.Sprintf("%s unread, %s not acknowledged", unread, humanize.Comma(g.Pending))
}

// behind reports whether a group does not keep up.
func behind(g sink.Group) bool { return g.Owes() && (g.Idle >= unreadAfter || g.Waits >= behindAfter) }

func (j *court) groups() {
	for _, g := range j.s.Groups.Value {
		on := g.Name + " on " + g.Stream
		switch {
		case g.Abandoned():
			j.add(Problem{
				Level: levelWarn, Part: partGroups, Title: "Nobody reads for group " + on, Action: "groups",
				Why:  fmt.Sprintf("%s, waiting for %s. The stream is not trimmed beyond them and fills Redis.", owed(g), span(g.Idle.Seconds())),
				Mend: "Start its consumers, or, if it is not needed any more: " + ops.DropGroupCommand(g.Stream, g.Name),
			})
		case behind(g):
			j.add(Problem{
				Level: levelWarn, Part: partGroups, Title: "Group " + on + " does not keep up", Action: "groups",
				Why:  fmt.Sprintf("%s, waiting for %s.", owed(g), span(max(g.Idle, g.Waits).Seconds())),
				Mend: "Look whether its consumers run, and at their logs.",
			})
		}
		if g.Lost > 0 {
			j.add(Problem{
				Level: levelBad, Part: partGroups, Title: "Lost to group " + on + ": " + humanize.Comma(g.Lost) + " entries", Action: "groups",
				Why: "They were trimmed from the stream before the group had read them.", Mend: "posthaste replay publishes them again from the history.",
			})
		}
	}
}

func (j *court) memory() {
	r := j.s.Redis.Value
	for _, l := range j.s.Postgres.Value.Losses {
		p := Problem{
			Level: levelBad, Part: partRedis, Title: l.Text(), Why: "Noticed " + span(j.s.Now.Sub(l.Noticed).Seconds()) + " ago. " +
				"They had been acknowledged, and are in the history; what waited in Postgres is published again by itself.",
			Mend: l.Remedy,
		}
		if l.Stream == "" {
			p.Level, p.Part, p.Why = levelWarn, partOutbox, "Noticed "+span(j.s.Now.Sub(l.Noticed).Seconds())+" ago. What the new primary had not received is forgotten: that events were settled, and commits whose events are in their streams."
		}
		j.add(p)
	}
	if lost := j.s.Lost; lost != nil && len(j.s.Postgres.Value.Losses) == 0 {
		j.add(Problem{
			Level: levelBad, Part: partRedis, Title: "Redis has lost data", Action: "groups",
			Why: "Noticed " + span(j.s.Now.Sub(*lost).Seconds()) + " ago: streams or gates that were there are gone. What waited in Postgres is published again; " +
				"what was settled before, and a group had not read, is only in the history.",
			Mend: "Find out who flushed it, restarted it without its data, or failed it over; posthaste replay publishes again what consumers miss. This stays for 15 minutes.",
		})
	}
	if j.s.Redis.AsOf == nil {
		return
	}
	if r.Policy != "" && r.Policy != "noeviction" {
		j.add(Problem{
			Level: levelWarn, Part: partRedis, Title: "Redis may delete events", Why: "Its maxmemory-policy is " + r.Policy + ": when memory is short, streams and gates go.",
			Mend: "CONFIG SET maxmemory-policy noeviction", Action: "doctor",
		})
	}
	if r.MaxBytes > 0 && float64(r.UsedBytes) > 0.9*float64(r.MaxBytes) {
		j.add(Problem{
			Level: levelWarn, Part: partRedis, Title: "Redis is nearly full", Mend: "Raise maxmemory, or shorten the streams. A group that nobody reads holds trimming.",
			Why: fmt.Sprintf("%s of %s. At the limit publishing stops, and events wait in Postgres.", humanize.IBytes(uint64(r.UsedBytes)), humanize.IBytes(uint64(r.MaxBytes))), Action: "groups",
		})
	}
}

// limits says what is not looked at.
func (j *court) limits() {
	if n := j.s.Postgres.Value.Streams; n > maxStreams {
		j.add(Problem{
			Level: levelWarn, Part: partRedis, Title: fmt.Sprintf("%d of %s streams are looked at", maxStreams, humanize.Comma(int64(n))),
			Why: "What is wrong with the groups of the others does not show here.", Mend: "posthaste groups list shows all of them.",
		})
	}
}

func (j *court) verdict() Verdict {
	gravity := func(level string) int {
		return slices.Index([]string{levelUnknown, levelOK, levelWarn, levelBad}, level)
	}
	slices.SortStableFunc(j.problems, func(a, b Problem) int { return cmp.Compare(gravity(b.Level), gravity(a.Level)) })
	v := Verdict{Level: levelOK, Title: "Nothing is lost, nothing is late", Why: j.well(), Also: []Problem{}, Parts: map[string]string{}}
	for i, p := range j.problems {
		if gravity(p.Level) > gravity(v.Parts[p.Part]) {
			v.Parts[p.Part] = p.Level
		}
		if i == 0 {
			v.Level, v.Title, v.Why, v.Mend, v.Action = p.Level, p.Title, p.Why, p.Mend, p.Action
		} else {
			v.Also = append(v.Also, p)
		}
	}
	if more := len(v.Also) - maxAlso; more > 0 {
		rest := v.Also[maxAlso]
		v.Also = append(v.Also[:maxAlso], Problem{Level: rest.Level, Title: "And " + count(int64(more), "more problem") + ".", Why: "See the tables below."})
	}
	return v
}

// well says how things go when nothing is wrong.
func (j *court) well() string {
	p := j.s.Postgres.Value
	how := "The table is swept"
	if p.Mode == outbox.ModeCDC {
		how = "The WAL is streamed"
	}
	if p.Backlog.Rows == 0 {
		return how + "; no event waits."
	}
	return fmt.Sprintf("%s; %s on the way, the oldest for %s.", how, count(p.Backlog.Rows, "event"), span(p.Backlog.OldestSeconds))
}

func count(n int64, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return humanize.Comma(n) + " " + what + "s"
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return " (" + reason + ")"
}

// sentence makes a sentence of an error's text.
func sentence(s string) string {
	s = strings.TrimSpace(s)
	if s == "" {
		return ""
	}
	s = strings.ToUpper(s[:1]) + s[1:]
	if !strings.HasSuffix(s, ".") {
		s += "."
	}
	return s
}

// span says how long seconds are.
func span(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 2*time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	case d < 2*time.Hour:
		return fmt.Sprintf("%.0f min", d.Minutes())
	case d < 48*time.Hour:
		return fmt.Sprintf("%.0f h", d.Hours())
	default:
		return fmt.Sprintf("%.0f days", d.Hours()/24)
	}
}
