package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"posthaste/outbox"
)

const (
	auditInterval = 5 * time.Second
	// stallLimit is how long the stream may lag behind a noted position, with the WAL growing, before it counts as stalled.
	stallLimit = 15 * time.Second
)

// audit finds out whether the doorbell still rings: whether rows that are in the table were passed by the stream without
// being delivered, or the stream has stopped moving.
type audit struct {
	last  outbox.AuditMark
	since time.Time // when last was taken
	taken bool
}

// check compares with the mark taken before. passed is how far the publisher is; inFlight tells whether a row is
// published or being published; again takes a new mark.
func (a *audit) check(passed outbox.LSN, inFlight func(seq int64) bool, again func() (outbox.AuditMark, error), now time.Time) error {
	if !a.taken {
		return a.renew(again, now)
	}
	if passed < a.last.LSN {
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
			Reason: outbox.ReasonStalled, Err: fmt.Errorf("the stream has not reached %s in %v; it is at %s", a.last.LSN, stallLimit, passed),
			Mend: "look at pg_stat_replication and synchronized_standby_slots; events are swept meanwhile",
		}
	}
	var suspects []int16
	for part, seq := range a.last.First {
		if !inFlight(seq) {
			suspects = append(suspects, part)
		}
	}
	before := a.last
	if err := a.renew(again, now); err != nil {
		return nil //nolint:nilerr // no answer is no finding
	}
	// Seen not in flight, and still there afterwards: nobody has it.
	for _, part := range suspects {
		if seq, ok := a.last.First[part]; ok && seq == before.First[part] {
			return &outbox.SlotError{
				Reason: outbox.ReasonMissed, Err: fmt.Errorf("the stream passed %s without delivering row %d of part %d", before.LSN, seq, part),
				Mend: "check that the publication has the outbox table and that nobody else moves the slot; events are swept meanwhile",
			}
		}
	}
	return nil
}

func (a *audit) renew(again func() (outbox.AuditMark, error), now time.Time) error {
	mark, err := again()
	if err != nil {
		return err
	}
	a.last, a.since, a.taken = mark, now, true
	return nil
}

// forget drops the mark, when the stream stood still for a known reason.
func (a *audit) forget() { a.taken = false }

// monitor watches the stream from outside: the state row, and the audit.
func (s *stream) monitor(ctx context.Context) {
	t := time.NewTicker(400 * time.Millisecond)
	defer t.Stop()
	a := &audit{}
	well := false
	next := time.Now().Add(auditInterval)
	var gate time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		// Also where nothing is published: a sink that has lost something is to be noticed before the next event.
		if _, err := s.l.watchGates(ctx, &gate); err != nil {
			s.fail(err)
			return
		}
		if !well && s.running.Load() && time.Since(s.since) > goodStream {
			s.wellAgain()
			// Until it is written, status tells the old reason. The look at the state below finds out the rest.
			well = s.l.record(ctx, outbox.ModeCDC) == nil
		}
		st, err := s.l.check(ctx)
		switch {
		case errors.Is(err, outbox.ErrSuperseded):
			s.fail(outbox.ErrSuperseded)
			return
		case err == nil && st.Desired == outbox.ModePoll:
			s.fail(errToggled)
			return
		}
		if time.Now().Before(next) {
			continue
		}
		next = time.Now().Add(auditInterval)
		if err := s.auditOnce(ctx, a); err != nil {
			s.l.metrics.auditFailures.WithLabelValues(slotReason(err)).Inc()
			s.fail(err)
			return
		}
	}
}

func (s *stream) auditOnce(ctx context.Context, a *audit) error {
	if s.sinkFailing.Load() || !s.running.Load() {
		a.forget()
		return nil
	}
	passed := outbox.LSN(s.passed.Load())
	return a.check(passed, func(seq int64) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		_, ok := s.seqs[seq]
		return ok
	}, func() (outbox.AuditMark, error) {
		mark, err := s.l.o.Store.Audit(ctx)
		s.audited(ctx, err)
		return mark, err
	}, time.Now())
}

// audited notes whether the table answered. One audit without an answer is no finding; a table that goes on not answering
// is not known to be empty.
func (s *stream) audited(ctx context.Context, err error) {
	switch {
	case err == nil:
		s.unanswered = 0
		s.l.log.Debug("the table is audited")
		if s.l.health.clear(conditionAudit) {
			s.l.log.Info("the table can be audited again")
		}
	case ctx.Err() != nil:
	default:
		if s.unanswered++; s.unanswered > 1 && s.l.health.fail(conditionAudit, err.Error()) {
			s.l.log.Warn("the table cannot be audited", "err", err)
		}
	}
}
