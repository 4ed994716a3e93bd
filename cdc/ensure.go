package cdc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"posthaste/outbox"
	"posthaste/sql"
)

// Ensure implements outbox.Slots. It creates the publication first, because a slot that is older than its publication
// cannot be decoded (Postgres 15 ends the stream with 42704, later ones skip the older rows silently). For the same
// reason it replaces the slot after a repair of the publication that may have hidden inserts.
func (s *Slots) Ensure(ctx context.Context, making func(ctx context.Context) error) (created bool, err error) {
	// A pooler refuses the replication protocol, and a slot that is not read holds back WAL.
	pooled, err := sql.Pooled(ctx, s.opt.Pool)
	if err != nil {
		return false, err
	}
	if pooled {
		return false, slotError(outbox.ReasonPooler,
			errors.New("cdc needs a direct connection to Postgres, and this one goes through a pooler"))
	}
	repaired, err := s.ensurePublication(ctx)
	if err != nil {
		return false, err
	}
	st, err := s.state(ctx)
	if err != nil {
		return false, s.named(err)
	}
	if st.present && !st.ours {
		return false, s.foreign()
	}
	if err := s.readable(ctx, st); err != nil {
		return false, err
	}
	switch {
	case st.present && (st.lost() || repaired):
		s.log.WarnContext(ctx, "slot is replaced", "lost", st.lost(), "publication_repaired", repaired)
		if err := s.Drop(ctx); err != nil {
			return false, err
		}
	case st.present:
		return false, nil
	}
	if making != nil {
		if err := making(ctx); err != nil {
			return false, err
		}
	}
	if err := s.create(ctx, st.version); err != nil {
		return false, err
	}
	s.log.InfoContext(ctx, "slot created")
	return true, nil
}

// readable returns an error if the server refuses the position of the WAL: a stream needs it, and without it no relay
// knows how much WAL a slot holds back. So an existing slot is dropped.
func (s *Slots) readable(ctx context.Context, st state) error {
	_, err := s.position(ctx)
	if !sql.Withheld(err) {
		return err
	}
	if st.present {
		if err := s.Drop(ctx); err != nil {
			return err
		}
	}
	if st.walLevel != "logical" {
		return slotError(outbox.ReasonWALLevel, err)
	}
	return slotError(outbox.ReasonNoRight, err)
}

// create makes the slot. The transaction has written nothing, as logical slots demand.
func (s *Slots) create(ctx context.Context, version int) error {
	stmt := "SELECT pg_catalog.pg_create_logical_replication_slot($1, 'pgoutput', false, false)"
	if version >= 170000 {
		// temporary, two-phase, failover
		stmt = "SELECT pg_catalog.pg_create_logical_replication_slot($1, 'pgoutput', false, false, true)"
	}
	within := time.Duration(s.creating.Load())
	err := s.bounded(ctx, within, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, stmt, s.opt.Slot)
		return err
	})
	if err == nil {
		s.creating.Store(int64(createTimeout))
		return nil
	}
	err = fmt.Errorf("create slot %q: %w", s.opt.Slot, err)
	switch sqlState(err) {
	case pgerrcode.QueryCanceled:
		s.creating.Store(int64(min(2*within, createMost)))
		return slotError(outbox.ReasonTransactionHeld, err)
	case pgerrcode.ObjectNotInPrerequisiteState:
		return slotError(outbox.ReasonWALLevel, err)
	case pgerrcode.DuplicateObject: // another process created it first
		return slotError(outbox.ReasonSlotActive, err)
	}
	return s.named(err)
}

// ensurePublication creates or repairs the publication. repaired reports that inserts may have gone unpublished before.
func (s *Slots) ensurePublication(ctx context.Context) (repaired bool, err error) {
	err = s.bounded(ctx, quickTimeout, func(ctx context.Context, tx pgx.Tx) error {
		p, err := readPublication(ctx, tx, s.opt.Publication, s.opt.Schema)
		if err != nil {
			return err
		}
		repaired = !p.delivers()
		for _, stmt := range s.repairPublication(p) {
			if _, err := tx.Exec(ctx, stmt); err != nil {
				return publicationError(fmt.Errorf("publication %q: %w", s.opt.Publication, err))
			}
			s.log.WarnContext(ctx, "publication repaired", "publication", s.opt.Publication, "statement", stmt)
		}
		return nil
	})
	var slot *outbox.SlotError
	if err != nil && !errors.As(err, &slot) && sqlState(err) == pgerrcode.DuplicateObject {
		err = publicationError(err)
	}
	return repaired, err
}

// repairPublication returns the statements that make the publication what it must be.
func (s *Slots) repairPublication(p publication) []string {
	pub := pgx.Identifier{s.opt.Publication}.Sanitize()
	tab := pgx.Identifier{s.opt.Schema, table}.Sanitize()
	if !p.present {
		return []string{"CREATE PUBLICATION " + pub + " FOR TABLE " + tab + " WITH (publish = 'insert')"}
	}
	var stmts []string
	if p.listed && !p.whole {
		stmts = append(stmts, "ALTER PUBLICATION "+pub+" DROP TABLE "+tab)
	}
	if !p.listed || !p.whole {
		stmts = append(stmts, "ALTER PUBLICATION "+pub+" ADD TABLE "+tab)
	}
	if !p.inserts || p.others {
		stmts = append(stmts, "ALTER PUBLICATION "+pub+" SET (publish = 'insert')")
	}
	return stmts
}

func publicationError(err error) error { return slotError(outbox.ReasonPublication, err) }
