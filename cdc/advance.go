package cdc

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// Advance implements outbox.Slots. A target at or below the confirmed position moves nothing.
func (s *Slots) Advance(ctx context.Context, target outbox.LSN) error {
	err := s.bounded(ctx, advanceTimeout, func(ctx context.Context, tx pgx.Tx) error {
		st, err := readState(ctx, tx, s.opt.Slot)
		if err != nil {
			return err
		}
		if reason := st.fault(); reason != "" {
			return slotError(reason, fmt.Errorf("slot %q cannot be advanced", s.opt.Slot))
		}
		if target <= outbox.LSN(st.confirmed) { //nolint:gosec // never negative
			return nil
		}
		_, err = tx.Exec(ctx, "SELECT pg_replication_slot_advance($1, $2::pg_lsn)", s.opt.Slot, target.String())
		return err
	})
	if err != nil {
		return s.named(fmt.Errorf("advance slot %q to %s: %w", s.opt.Slot, target, err))
	}
	return s.Nudge(ctx)
}

// Nudge implements outbox.Slots.
func (s *Slots) Nudge(ctx context.Context) error {
	name := fmt.Sprintf("%.40s_nudge_%08x", s.opt.Slot, rand.Uint32()) //nolint:gosec // a name, not a secret
	err := s.bounded(ctx, nudgeTimeout, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'pgoutput', true)", name)
		if err != nil {
			return err
		}
		_, err = tx.Exec(ctx, "SELECT pg_drop_replication_slot($1)", name)
		return err
	})
	if sqlState(err) == stateQueryCanceled {
		return nil
	}
	if err != nil {
		return s.named(fmt.Errorf("nudge slot %q: %w", s.opt.Slot, err))
	}
	return nil
}
