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

// auditor checks a running stream against the table: it finds out whether the stream has stopped moving. One goroutine
// owns it.
type auditor struct {
	*reporter
	store Audits
	// progress is how far everything is routed; known is false while the router waits for a stream that is blocked.
	progress func() (passed outbox.LSN, known bool)

	// mark has the position that the stream has to reach. It was taken at since; zero: there is none.
	mark  outbox.AuditMark
	since time.Time
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
		a.since = time.Time{}
		return nil
	}
	behind := !a.since.IsZero() && passed < a.mark.LSN
	if behind && time.Since(a.since) < stallLimit {
		return nil // keep the old mark: it is the one that has to be reached
	}
	mark, err := a.store.Audit(ctx)
	a.answered(ctx, err)
	switch {
	case err != nil: // no answer is no finding
	case !behind:
		a.mark, a.since = mark, time.Now()
	case mark.Flushed >= a.mark.LSN: // or nobody can have read it: the WAL does not grow
		return &outbox.SlotError{
			Reason: outbox.ReasonStalled, Err: fmt.Errorf("the stream has not reached %s in %v; it is at %s",
				a.mark.LSN, stallLimit, passed),
			Remedy: "look at pg_stat_replication and synchronized_standby_slots; the relay polls until then",
		}
	}
	return nil
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
