package relay

import (
	"context"
	"time"

	"posthaste/internal/pause"
)

// oversee runs while another session holds the leader's lock, and checks that events make progress. A session that is
// not a relay's (one that a pooler has kept, a psql) could hold the lock forever while every relay is a ready standby.
// oversee ends that session if it has the right to. Of relays it ends only the session of one that does not reach the
// sink, and only while this instance does.
func (r *Relay) oversee(ctx context.Context) {
	var w *watchdog
	for ctx.Err() == nil {
		if r.activity.leading.Load() {
			w = nil
			r.health.clear(conditionLeader)
		} else {
			if w == nil {
				w = &watchdog{reporter: r.reporter, store: r.o.Store}
			}
			r.overseen(ctx, w)
		}
		pause.Tick(ctx, watchInterval)
	}
}

// overseen makes one check.
func (r *Relay) overseen(ctx context.Context, w *watchdog) {
	mark, err := w.store.Audit(ctx)
	if err != nil {
		return // the relay's own session says so
	}
	f := w.check(mark.First, w.moved.Load(), time.Now())
	if !f.all {
		if r.health.clear(conditionLeader) {
			r.log.Info("the leader makes progress again")
		}
		return
	}
	holder, err := w.store.LeaderSession(ctx)
	if err != nil || holder.PID == 0 {
		return
	}
	text := f.text + "; the leader's lock is held by " + holder.String()
	replace := !holder.Relay
	switch {
	case replace:
		text += ", which is no relay"
	case holder.Sinkless && !r.health.failing(conditionRedis):
		replace = true
		text += ", whose relay does not reach the sink, as this one does"
	}
	if replace {
		if err := w.store.EndSession(ctx, holder.PID); err != nil {
			text += " and cannot be ended: " + err.Error()
		}
	}
	if r.health.fail(conditionLeader, text) {
		r.log.Error("the leader makes no progress", "why", text)
	}
}

// tellSink shows the other instances whether this leader reaches the sink, until ctx ends. If it does not, and one of
// them does, that one leads instead.
func (l *leadership) tellSink(ctx context.Context) {
	told := true
	for pause.For(ctx, time.Second) == nil {
		reached := !l.health.failing(conditionRedis)
		if reached != told && l.locks.TellSink(ctx, reached) == nil {
			told = reached
		}
	}
}
