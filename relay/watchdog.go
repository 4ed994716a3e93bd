package relay

import (
	"context"
	"fmt"
	"time"

	"posthaste/internal/pause"
)

const (
	// stallAfter is how long rows may wait without any progress before that is reported.
	stallAfter = 30 * time.Second
	// partStallAfter is the same for one part while others move: it may merely wait for its turn.
	partStallAfter = 2 * time.Minute
	// watchInterval is the interval of the watchdog's checks.
	watchInterval = 5 * time.Second
	// sinkPatience is how long a leader may miss the sink before it shows that. Probes may fail once.
	sinkPatience = 10 * time.Second
)

// watchdog checks whether events make progress while rows wait in the table. It does not consider causes, so it also
// reports a pipeline that is stalled for an unknown reason as unhealthy. One goroutine owns it.
//
// On a standby it watches the leader. A session that is not a relay's (one that a pooler has kept, a psql) could hold
// the leader's lock forever while every relay is a ready standby. The watchdog ends that session if it has the right
// to. Of relays it ends only the session of one that does not reach the sink, and only if this instance has reached the
// sink for two checks.
type watchdog struct {
	*reporter
	store    Audits
	activity *activity
	// leads is whether this instance may lead instead of another relay.
	leads bool

	// first is the first row of each part and since when it has been that.
	first map[int16]standing
	// moves is how much had moved when that last changed, at since.
	moves int64
	since time.Time
	// deaf is the time since which audits of the table fail, zero if they succeed.
	deaf time.Time
	// sinkless is the session of a leader that did not reach the sink at the last check, when this instance did.
	sinkless int
}

type standing struct {
	seq   int64
	since time.Time
}

// finding describes a stall of the whole table or of a part of it.
type finding struct {
	text string
	all  bool
}

// untold handles a failed audit. If this instance still moves rows, the finding is not about the whole table.
func (w *watchdog) untold(moves int64, now time.Time) finding {
	if w.deaf.IsZero() {
		w.deaf = now
	}
	w.note(moves, now)
	still := now.Sub(w.deaf)
	text := fmt.Sprintf("the table has not answered for %s", still.Round(time.Second))
	switch {
	case still > stallAfter && now.Sub(w.since) > stallAfter:
		return finding{text, true}
	case still > partStallAfter:
		return finding{text + ", while events move", false}
	}
	return finding{}
}

// note updates how much has moved.
func (w *watchdog) note(moves int64, now time.Time) {
	if moves != w.moves || w.since.IsZero() {
		w.moves, w.since = moves, now
	}
}

// check compares the first row of each part, and how much has moved, with the previous check. The zero finding means
// that all is well.
func (w *watchdog) check(first map[int16]int64, moves int64, now time.Time) finding {
	w.deaf = time.Time{}
	before := w.first
	w.note(moves, now)
	for part, s := range before { // another instance may have moved it
		if seq, ok := first[part]; !ok || seq != s.seq {
			w.since = now
		}
	}
	w.first = make(map[int16]standing, len(first))
	var worst int16
	oldest := now
	for part, seq := range first {
		s, ok := before[part]
		if !ok || s.seq != seq {
			s = standing{seq, now}
		}
		w.first[part] = s
		if s.since.Before(oldest) {
			worst, oldest = part, s.since
		}
	}
	where := func() string {
		return fmt.Sprintf("part %d stands at row %d for %s", worst, w.first[worst].seq,
			now.Sub(oldest).Round(time.Second))
	}
	switch {
	case now.Sub(oldest) > stallAfter && now.Sub(w.since) > stallAfter:
		return finding{fmt.Sprintf("rows wait in %d parts, and nothing has moved for %s; %s", len(first),
			now.Sub(w.since).Round(time.Second), where()), true}
	case now.Sub(oldest) > partStallAfter:
		return finding{where() + ", while others move", false}
	}
	return finding{}
}

// run checks until ctx ends.
func (w *watchdog) run(ctx context.Context) {
	for led := false; ctx.Err() == nil; pause.Tick(ctx, watchInterval) {
		if leads := w.activity.leading.Load(); leads != led { // what was seen in the other role does not count
			*w = watchdog{reporter: w.reporter, store: w.store, activity: w.activity, leads: w.leads}
			w.health.clear(conditionStalled)
			w.health.clear(conditionLeader)
			w.metrics.stalled.Set(0)
			led = leads
		}
		var f finding
		mark, err := w.store.Audit(ctx)
		switch {
		case w.activity.leading.Load() != led:
			continue // a leader that has ended shows nothing any more
		case err == nil:
			f = w.check(mark.First, w.moved.Load(), time.Now())
		case !led || ctx.Err() != nil:
			continue // the relay's own session reports it
		default:
			f = w.untold(w.moved.Load(), time.Now())
		}
		if !led {
			w.oversee(ctx, f)
			continue
		}
		if err == nil && w.activity.current() == phaseLayout { // it stands still on purpose, and says so
			w.since, w.first, f = time.Now(), nil, finding{}
		}
		boolGauge(w.metrics.stalled, f.text != "")
		w.report(conditionStalled, f)
	}
}

// oversee reports on a standby that no event makes progress, and which session holds the leader's lock.
func (w *watchdog) oversee(ctx context.Context, f finding) {
	before := w.sinkless
	w.sinkless = 0
	if !f.all {
		w.report(conditionLeader, finding{})
		return
	}
	holder, err := w.store.LeaderSession(ctx)
	if err != nil || holder.PID == 0 {
		return
	}
	f.text += "; the leader's lock is held by " + holder.String()
	switch {
	case !holder.Relay:
		f.text += ", which is no relay"
	case holder.Sinkless && w.leads && !w.health.failing(w.health.sink):
		f.text += ", whose relay does not reach the sink, as this one does"
		w.sinkless = holder.PID
	}
	if !holder.Relay || w.sinkless != 0 && w.sinkless == before {
		w.log.Warn("ending the session that holds the leader's lock", "pid", holder.PID, "why", f.text)
		if err := w.store.EndSession(ctx, holder.PID); err != nil {
			f.text += " and cannot be ended: " + err.Error()
		}
	}
	w.report(conditionLeader, f)
}

func (w *watchdog) report(condition string, f finding) {
	known := w.health.clear(condition)
	switch {
	case f.text == "":
		if known {
			w.log.Info("events make progress again")
		}
		return
	case f.all:
		w.health.fail(condition, f.text)
	default:
		w.health.degrade(condition, f.text)
	}
	if !known {
		w.log.Error("no event makes progress", "why", f.text)
	}
}

// tellSink shows the other instances whether this leader reaches the sink, until ctx ends. If it does not for a while,
// and one of them does, that one leads instead.
func (l *leadership) tellSink(ctx context.Context) {
	told, last := true, time.Now()
	for pause.For(ctx, time.Second) == nil {
		if !l.health.failing(l.health.sink) {
			last = time.Now()
		}
		reached := time.Since(last) < sinkPatience
		if reached != told && l.locks.TellSink(ctx, reached) == nil {
			told = reached
		}
	}
}
