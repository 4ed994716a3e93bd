package cdc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

const (
	// quickTimeout bounds statements that only read or change the catalog.
	quickTimeout = 5 * time.Second
	// createTimeout bounds the first attempt to create a slot. Creation waits for all open transactions of the server,
	// and twice more for those begun since, so overlapping transactions triple it. Each attempt therefore gets twice
	// the time of the last, up to createMost.
	createTimeout = 3 * time.Second
	createMost    = time.Minute
	// advanceTimeout bounds an advance, which reads the WAL in between (about 1 GB/s).
	advanceTimeout = 30 * time.Second
	// nudgeTimeout bounds the creation of a temporary slot; the record is written long before.
	nudgeTimeout = 500 * time.Millisecond
	// evictTimeout bounds the wait for a terminated walsender.
	evictTimeout = 5 * time.Second
)

// SlotsOptions configures NewSlots.
type SlotsOptions struct {
	// Pool connects to the database of the outbox. Required. It is used for single short transactions.
	Pool *pgxpool.Pool
	// Schema is where the outbox table is. Default: public.
	Schema string
	// Slot is the slot's name. Required.
	Slot string
	// Publication is the publication's name. Default: posthaste.
	Publication string
	// Logger may be nil.
	Logger *slog.Logger
}

// Slots keeps the slot and its publication. It implements outbox.Slots and is safe for concurrent use.
type Slots struct {
	opt SlotsOptions
	log *slog.Logger
	// creating is how long the next creation of a slot may take, in nanoseconds.
	creating atomic.Int64
}

var _ outbox.Slots = (*Slots)(nil)

// NewSlots checks o; it does no I/O.
func NewSlots(o SlotsOptions) (*Slots, error) {
	if o.Schema == "" {
		o.Schema = DefaultSchema
	}
	if o.Publication == "" {
		o.Publication = DefaultPublication
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Pool == nil {
		return nil, errors.New("slots need a pool")
	}
	if !slotName.MatchString(o.Slot) {
		return nil, fmt.Errorf("slot name %q: lower-case letters, digits and underscores, at most 63", o.Slot)
	}
	s := &Slots{opt: o, log: o.Logger.With("component", "cdc", "slot", o.Slot)}
	s.creating.Store(int64(createTimeout))
	return s, nil
}

// bounded runs do in a transaction with a statement timeout, and bounds the whole a little above, because a server that
// has stopped answering does not enforce its own timeouts.
func (s *Slots) bounded(ctx context.Context, timeout time.Duration,
	do func(ctx context.Context, tx pgx.Tx) error,
) error {
	ctx, cancel := context.WithTimeout(ctx, timeout+5*time.Second)
	defer cancel()
	return pgx.BeginFunc(ctx, s.opt.Pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "SELECT pg_catalog.set_config('statement_timeout', $1, true), "+
			"pg_catalog.set_config('lock_timeout', $1, true)",
			fmt.Sprint(timeout.Milliseconds()))
		if err != nil {
			return fmt.Errorf("set the statement timeout: %w", err)
		}
		return do(ctx, tx)
	})
}

// state is asked several times a second, so it is one statement.
func (s *Slots) state(ctx context.Context) (state, error) {
	ctx, cancel := context.WithTimeout(ctx, quickTimeout)
	defer cancel()
	return readState(ctx, s.opt.Pool, s.opt.Slot)
}

// position returns the end of the WAL.
func (s *Slots) position(ctx context.Context) (wal int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, quickTimeout)
	defer cancel()
	if err := s.opt.Pool.QueryRow(ctx, query("position")).Scan(&wal); err != nil {
		return 0, fmt.Errorf("read the position of the WAL: %w", err)
	}
	return wal, nil
}

// Status implements outbox.Slots.
func (s *Slots) Status(ctx context.Context) (outbox.SlotStatus, error) {
	st, err := s.state(ctx)
	if sql.Withheld(err) {
		return outbox.SlotStatus{}, nil // Ensure reports it
	}
	if err != nil {
		return outbox.SlotStatus{}, err
	}
	out := outbox.SlotStatus{
		Exists: st.present, Active: st.active, ActivePID: st.activePID, Lost: st.lost(), Reason: st.invalidation,
		Confirmed: outbox.LSN(st.confirmed), Restart: outbox.LSN(st.restart), //nolint:gosec // never negative
		MaxKeepBytes: st.maxKeep,
	}
	if out.Lost && out.Reason == "" {
		out.Reason = "wal_removed" // before Postgres 17 the only one there is
	}
	if st.present && !st.ours {
		return out, nil // WAL held back by another database's slot is not the relay's concern
	}
	if !st.present {
		return out, nil
	}
	wal, err := s.position(ctx)
	switch {
	case sql.Withheld(err):
		return out, nil
	case err != nil:
		return out, err
	}
	if st.restart > 0 {
		out.RetainedBytes = wal - st.restart
	}
	if st.confirmed > 0 {
		out.ConfirmedLagBytes = wal - st.confirmed
	}
	return out, nil
}

func (s *Slots) foreign() error {
	return slotError(outbox.ReasonSlotForeign,
		fmt.Errorf("slot %q belongs to another database or another plugin, or is temporary", s.opt.Slot))
}

// Drop implements outbox.Slots.
func (s *Slots) Drop(ctx context.Context) error {
	// A walsender may come back between the eviction and the drop.
	for range 5 {
		if err := s.Evict(ctx); err != nil {
			return err
		}
		err := s.bounded(ctx, quickTimeout, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx,
				"SELECT pg_catalog.pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = $1",
				s.opt.Slot)
			return err
		})
		switch sqlState(err) {
		case pgerrcode.ObjectInUse:
			continue
		case pgerrcode.UndefinedObject:
			return nil
		case "":
			if err == nil {
				s.log.InfoContext(ctx, "slot dropped")
				return nil
			}
		}
		return s.named(fmt.Errorf("drop slot %q: %w", s.opt.Slot, err))
	}
	return slotError(outbox.ReasonSlotActive, fmt.Errorf("drop slot %q: other connections keep acquiring it",
		s.opt.Slot))
}

// Evict implements outbox.Slots.
func (s *Slots) Evict(ctx context.Context) error {
	// Slot names are server-wide: a walsender of another database must not be terminated.
	st, err := s.state(ctx)
	if err != nil {
		return err
	}
	if st.present && !st.ours {
		return s.foreign()
	}
	deadline := time.Now().Add(evictTimeout)
	for evicted := 0; ; {
		pid, err := s.terminate(ctx)
		if err != nil {
			return s.named(fmt.Errorf("terminate the walsender of slot %q: %w", s.opt.Slot, err))
		}
		switch {
		case pid == 0:
			return nil
		case time.Now().After(deadline):
			return slotError(outbox.ReasonSlotActive, fmt.Errorf("process %d still holds slot %q after %v", pid,
				s.opt.Slot,
				evictTimeout))
		case pid != evicted:
			s.log.WarnContext(ctx, "walsender terminated", "pid", pid)
			evicted = pid
		}
		if err := pause.For(ctx, 20*time.Millisecond); err != nil {
			return err
		}
	}
}

// terminate signals the walsender that holds the slot and returns its process id, 0 if the slot is free.
func (s *Slots) terminate(ctx context.Context) (pid int, err error) {
	err = s.bounded(ctx, quickTimeout, func(ctx context.Context, tx pgx.Tx) error {
		// A WHERE clause evaluates its conditions in any order and could terminate other walsenders.
		err := tx.QueryRow(ctx, `SELECT active_pid, pg_catalog.pg_terminate_backend(active_pid)
			FROM pg_replication_slots WHERE slot_name = $1 AND active_pid IS NOT NULL`, s.opt.Slot).Scan(&pid, nil)
		if errors.Is(err, pgx.ErrNoRows) {
			pid, err = 0, nil
		}
		return err
	})
	return pid, err
}

// named wraps an error in the reason that its SQLSTATE determines.
func (s *Slots) named(err error) error {
	switch sqlState(err) {
	case pgerrcode.ObjectInUse:
		return slotError(outbox.ReasonSlotActive, err)
	case pgerrcode.UndefinedObject:
		return slotError(outbox.ReasonSlotMissing, err)
	case pgerrcode.InsufficientPrivilege:
		return slotError(outbox.ReasonNoRight, err)
	case pgerrcode.ConfigurationLimitExceeded:
		return slotError(outbox.ReasonSlotsFull, err)
	}
	return err
}
