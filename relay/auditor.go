package relay

import (
	"context"
	"fmt"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

const (
	auditInterval = 5 * time.Second
	// stallLimit is how long the stream may stay before a noted position, while the WAL grows, before it counts as
	// stalled.
	stallLimit = 15 * time.Second
)

// auditState finds out whether the stream has stopped moving.
type auditState struct {
	last  outbox.AuditMark
	since time.Time // when last was taken
	taken bool
}

// check compares with the mark taken before. passed is how far the router is; again takes a new mark.
func (a *auditState) check(passed outbox.LSN, again func() (outbox.AuditMark, error), now time.Time) error {
	if !a.taken || passed >= a.last.LSN {
		a.renew(again, now)
		return nil
	}
	if now.Sub(a.since) < stallLimit {
		return nil // keep the old mark: it is the one that has to be reached
	}
	mark, err := again()
	if err != nil {
		return nil //nolint:nilerr // no answer is no finding
	}
	if mark.Flushed < a.last.LSN {
		return nil // nobody can have read what is not on disk: the WAL does not grow
	}
	return &outbox.SlotError{
		Reason: outbox.ReasonStalled, Err: fmt.Errorf("the stream has not reached %s in %v; it is at %s",
			a.last.LSN, stallLimit, passed),
		Remedy: "look at pg_stat_replication and synchronized_standby_slots; events are swept meanwhile",
	}
}

// renew takes a new mark. If that fails, the old mark stays.
func (a *auditState) renew(again func() (outbox.AuditMark, error), now time.Time) {
	if mark, err := again(); err == nil {
		a.last, a.since, a.taken = mark, now, true
	}
}

// forget drops the mark. It is called while the stream is blocked for a known reason.
func (a *auditState) forget() { a.taken = false }

// auditor checks a running stream against the table. One goroutine owns it.
type auditor struct {
	*reporter
	store Audits
	// progress is how far everything is routed; known is false while the router waits for a stream that is blocked.
	progress func() (passed outbox.LSN, known bool)

	state auditState
	// unanswered is how many audits in a row the table did not answer.
	unanswered int
}

// run audits until ctx ends or there is a finding, which it returns.
func (a *auditor) run(ctx context.Context) error {
	for pause.Tick(ctx, auditInterval) == nil {
		if err := a.once(ctx); err != nil {
			a.metrics.auditFailures.WithLabelValues(slotReason(err)).Inc()
			return err
		}
	}
	return nil
}

func (a *auditor) once(ctx context.Context) error {
	passed, known := a.progress()
	if !known {
		a.state.forget()
		return nil
	}
	return a.state.check(passed, func() (outbox.AuditMark, error) {
		mark, err := a.store.Audit(ctx)
		a.answered(ctx, err)
		return mark, err
	}, time.Now())
}

// answered records whether the table could be audited. A single failed audit is ignored; from the second in a row,
// health reports it.
func (a *auditor) answered(ctx context.Context, err error) {
	switch {
	case err == nil:
		a.unanswered = 0
		a.log.Debug("the table is audited")
		if a.health.clear(conditionAudit) {
			a.log.Info("the table can be audited again")
		}
	case ctx.Err() != nil:
	default:
		if a.unanswered++; a.unanswered > 1 && a.health.fail(conditionAudit, err.Error()) {
			a.log.Warn("the table cannot be audited", "err", err)
		}
	}
}
