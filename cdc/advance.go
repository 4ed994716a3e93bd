package cdc

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
)

// advanceRounds is how often an advance is repeated while it still frees WAL: one round lets restart_lsn jump to the
// first running-transactions record it meets, the next one to the last.
const advanceRounds = 3

// Advance implements outbox.Slots. A target at or below the confirmed position confirms nothing new.
//
// WAL is freed up to the last running-transactions record at or below target, but not beyond the first record of the
// oldest open transaction. The server writes such a record every 15 s, and Nudge writes one at once. To free WAL
// immediately, call Nudge, read the current position, and advance to it. Advance itself writes a record for the next
// call.
func (s *Slots) Advance(ctx context.Context, target outbox.LSN) error {
	var before, after state
	for round := range advanceRounds {
		err := s.bounded(ctx, advanceTimeout, func(ctx context.Context, tx pgx.Tx) (err error) {
			if before, err = readState(ctx, tx, s.opt.Slot); err != nil {
				return err
			}
			if reason := before.fault(); reason != "" {
				return slotError(reason, fmt.Errorf("slot %q cannot be advanced", s.opt.Slot))
			}
			confirmed := outbox.LSN(before.confirmed) //nolint:gosec // never negative
			if target < confirmed || round == 0 && target == confirmed {
				after = before
				return nil
			}
			if _, err = tx.Exec(ctx, "SELECT pg_catalog.pg_replication_slot_advance($1, $2::pg_lsn)",
				s.opt.Slot, target.String()); err != nil {
				return err
			}
			after, err = readState(ctx, tx, s.opt.Slot)
			return err
		})
		if err != nil {
			return s.named(fmt.Errorf("advance slot %q to %s: %w", s.opt.Slot, target, err))
		}
		if after.restart == before.restart {
			break
		}
	}
	// The advance has succeeded; without the record restart_lsn only follows some seconds later.
	if err := s.Nudge(ctx); err != nil {
		s.log.DebugContext(ctx, "no running-transactions record", "err", err)
	}
	return nil
}

// Nudge implements outbox.Slots. The record is written and flushed when it returns.
func (s *Slots) Nudge(ctx context.Context) error {
	done, err := s.logSnapshot(ctx)
	if err != nil || done {
		return err
	}
	// Creating a logical slot writes the record first and then waits for older transactions, so the wait may be cut
	// off. The name must be short enough and unique.
	name := fmt.Sprintf("%.40s_nudge_%08x", s.opt.Slot, rand.Uint32()) //nolint:gosec // a name, not a secret
	err = s.bounded(ctx, nudgeTimeout, func(ctx context.Context, tx pgx.Tx) error {
		// Temporary: an error or the end of the session removes it.
		if _, err := tx.Exec(ctx, "SELECT pg_catalog.pg_create_logical_replication_slot($1, 'pgoutput', true)",
			name); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "SELECT pg_catalog.pg_drop_replication_slot($1)", name)
		return err
	})
	if err == nil || sqlState(err) == pgerrcode.QueryCanceled {
		return nil
	}
	return s.named(fmt.Errorf("provoke a running-transactions record: %w", err))
}

// logSnapshot writes the record with pg_log_standby_snapshot, where the server has it (16) and the role may call it.
func (s *Slots) logSnapshot(ctx context.Context) (done bool, err error) {
	err = s.bounded(ctx, quickTimeout, func(ctx context.Context, tx pgx.Tx) error {
		const allowed = "SELECT coalesce(" +
			"pg_catalog.has_function_privilege(" +
			"pg_catalog.to_regprocedure('pg_catalog.pg_log_standby_snapshot()'), 'EXECUTE'), false)"
		if err := tx.QueryRow(ctx, allowed).Scan(&done); err != nil || !done {
			return err
		}
		if _, err := tx.Exec(ctx, "SELECT pg_catalog.pg_log_standby_snapshot()"); err != nil {
			return err
		}
		// The record is not flushed by itself, and decoding ends at what is flushed. A commit with a transaction id is.
		_, err := tx.Exec(ctx,
			"SELECT pg_current_xact_id(), pg_catalog.set_config('synchronous_commit', 'local', true)")
		return err
	})
	if err != nil {
		return false, fmt.Errorf("log a standby snapshot: %w", err)
	}
	return done, nil
}
