package cdc

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/pause"
	"posthaste/internal/statement"
	"posthaste/outbox"
	"posthaste/sql"
)

//go:embed queries/*.sql
var queryFiles embed.FS

var query = statement.In(queryFiles)

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

// Slots keeps the slot and its publication. It implements outbox.Slots and is safe for concurrent use.
type Slots struct {
	opt Options
	log *slog.Logger
	// creating is how long the next creation of a slot may take, in nanoseconds.
	creating atomic.Int64
}

var _ outbox.Slots = (*Slots)(nil)

// NewSlots checks o; it does no I/O.
func NewSlots(o Options) (*Slots, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	s := &Slots{opt: o, log: o.Logger}
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

// state is the slot's state in the catalog.
type state struct {
	walLevel string
	version  int // server_version_num
	maxKeep  int64

	present, ours, active   bool
	activePID               int
	walStatus, invalidation string
	confirmed, restart      int64
}

func readState(ctx context.Context, db sql.DB, slot string) (state, error) {
	var s state
	err := db.QueryRow(ctx, query("state"), slot).Scan(&s.walLevel, &s.version, &s.maxKeep,
		&s.present, &s.ours, &s.active, &s.activePID, &s.walStatus, &s.invalidation, &s.confirmed, &s.restart)
	if err != nil {
		return state{}, fmt.Errorf("read the state of slot %q: %w", slot, err)
	}
	return s, nil
}

func (s *state) lost() bool { return s.present && (s.walStatus == "lost" || s.invalidation != "") }

// fault returns the reason why the slot cannot be streamed; "" if it can.
func (s *state) fault() string {
	switch {
	case !s.present && s.walLevel != "logical":
		return outbox.ReasonWALLevel
	case !s.present:
		return outbox.ReasonSlotMissing
	case !s.ours:
		return outbox.ReasonSlotForeign
	case s.lost():
		return outbox.ReasonSlotLost
	}
	return ""
}

// publication is the publication's state in the catalog.
type publication struct {
	present, inserts, others, listed, whole bool
	// version differs after each change.
	version string
}

func readPublication(ctx context.Context, db sql.DB, name, schema string) (publication, error) {
	var p publication
	err := db.QueryRow(ctx, query("publication"), name, schema, table, columnNames[:colHeaders]).
		Scan(&p.present, &p.inserts, &p.others, &p.listed, &p.whole, &p.version)
	if err != nil {
		return publication{}, fmt.Errorf("read the state of publication %q: %w", name, err)
	}
	return p, nil
}

// delivers reports whether every insert into the outbox is published with all its columns.
func (p *publication) delivers() bool { return p.present && p.inserts && p.listed && p.whole }
