package relay

import (
	"context"
	"errors"
	"time"

	"posthaste/outbox"
)

// stream streams until it is ended, and then settles the published events as far as possible.
func (l *leadership) stream(ctx context.Context) (transition, error) {
	began := time.Now()
	s := l.newStream(l.gates, l.endHandOver, l.guard())
	l.gates.fresh = s.router.meet
	err := s.run(ctx)
	l.gates.fresh = nil
	l.health.clear(conditionSettle)
	l.health.clear(conditionPark)
	l.health.clear(conditionAudit)
	if time.Since(began) < goodStream {
		l.failures++
	} else {
		l.failures = 0
	}
	l.reason = slotReason(err)
	if fenced := (*outbox.FencedError)(nil); errors.As(err, &fenced) {
		l.fence = fenced.Epoch
	}
	switch {
	case errors.Is(err, errToggled):
		l.reason, l.failures = outbox.ReasonToggle, 0
		return onOver, nil
	case superseded(err):
		return onLost, err
	case ctx.Err() != nil:
		return onOver, nil // run knows better
	}
	l.log.Warn("the stream ended; polling", "reason", l.reason, "err", err)
	if l.reason == outbox.ReasonPublication { // it may have left out rows of transactions that are still open
		if err := l.keeper.moved(ctx); err != nil {
			return onOver, err
		}
	}
	var se *outbox.SlotError
	if errors.As(err, &se) {
		l.unusable(ctx, err)
	}
	return onOver, nil
}

// guard returns a function that checks whether this leadership may continue to stream, and returns an error if not.
func (l *leadership) guard() func(ctx context.Context, well bool) error {
	noted := false // that all is well
	return func(ctx context.Context, well bool) error {
		if well && !noted {
			l.recovered()
			// Until it is written, status shows the old reason. The check below finds any other problem.
			noted = l.record(ctx, outbox.ModeCDC) == nil
		}
		// This checks the gates also while nothing is published, so that a loss in the sink is noticed before the next
		// event.
		return l.rightful(ctx, toggled(false))
	}
}
