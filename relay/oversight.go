package relay

import (
	"context"
	"time"

	"posthaste/internal/pause"
)

// oversee runs while another session holds the leader's lock, and checks that events make progress. A session that is
// not a relay's (one that a pooler has kept, a psql) could hold the lock forever while every relay is a ready standby.
// oversee ends that session if it has the right to. It never ends the session of a relay: Postgres ends it when the
// relay stops responding.
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
	if !holder.Relay {
		text += ", which is no relay"
		if err := w.store.EndSession(ctx, holder.PID); err != nil {
			text += " and cannot be ended: " + err.Error()
		}
	}
	if r.health.fail(conditionLeader, text) {
		r.log.Error("the leader makes no progress", "why", text)
	}
}
