package cdc

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"

	"posthaste/outbox"
)

// remedies are what an operator can do, by reason.
var remedies = map[string]string{
	outbox.ReasonWALLevel: "set wal_level = logical and restart Postgres",
	outbox.ReasonNoRight: "give the role the right: ALTER ROLE ... REPLICATION (and a pg_hba.conf entry for it), or " +
		"EXECUTE on the function that is named; or: posthaste mode poll",
	outbox.ReasonPooler:      "give the relay a direct connection, or: posthaste mode poll",
	outbox.ReasonSlotsFull:   "raise max_replication_slots, or drop an unused slot",
	outbox.ReasonSendersFull: "raise max_wal_senders",
	outbox.ReasonPublication: "run posthaste migrate as the owner of the table, or: CREATE PUBLICATION ... FOR TABLE " +
		"outbox WITH (publish = 'insert')",
	outbox.ReasonSlotMissing: "nothing to do: the relay creates a new slot",
	outbox.ReasonSlotLost: "nothing to do: the relay creates a new slot; raise " +
		"max_slot_wal_keep_size if it happens again",
	outbox.ReasonSlotActive: "another connection streams the slot; stop it, or let the relay terminate it",
	outbox.ReasonDecode: "the slot is kept; polling delivers the row from the table, or moves it to outbox_dead, " +
		"after which the slot is moved past it",
	outbox.ReasonSlotForeign: "use another relay name, or drop the slot",
	outbox.ReasonSilent:      "check the server and the network; the relay reconnects",
	outbox.ReasonConnection:  "check the server and the network; the relay reconnects",
	outbox.ReasonTransactionHeld: "end the oldest open transaction (pg_stat_activity, " +
		"pg_prepared_xacts); it is tried again",
}

func slotError(reason string, err error) *outbox.SlotError {
	return &outbox.SlotError{Reason: reason, Remedy: remedies[reason], Err: err}
}

func sqlState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// explain turns what ended a Run into what Run returns.
func (r *Reader) explain(ctx context.Context, step string, err error) error {
	var (
		st   startedError
		slot *outbox.SlotError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &st):
		return st.error
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &slot):
		return err
	}
	err = fmt.Errorf("%s on slot %q: %w", step, r.opt.Slot, err)
	if errors.Is(err, errSilent) {
		return slotError(outbox.ReasonSilent, err)
	}
	if sqlState(err) == "" {
		return slotError(outbox.ReasonConnection, err)
	}
	return slotError(r.reason(ctx, err), err)
}

// reason returns the condition behind an error of the server. If one SQLSTATE has several meanings it reads the
// catalog, not the text, because texts are translated and change between versions, and an invalidated slot appears in
// the middle of a stream only as "terminating connection" (57P01).
func (r *Reader) reason(ctx context.Context, err error) string {
	state := sqlState(err)
	switch state {
	case pgerrcode.ObjectInUse:
		return outbox.ReasonSlotActive
	case pgerrcode.TooManyConnections: // walsenders have places of their own
		return outbox.ReasonSendersFull
	case pgerrcode.InsufficientPrivilege, pgerrcode.InvalidAuthorizationSpecification:
		return outbox.ReasonNoRight
	case pgerrcode.UntranslatableCharacter, pgerrcode.CharacterNotInRepertoire:
		return outbox.ReasonDecode
	}
	found, lookErr := r.look(ctx)
	switch {
	case lookErr != nil:
		r.log.WarnContext(ctx, "the state of the slot cannot be read", "err", lookErr)
	case found != "":
		return found
	case state == pgerrcode.UndefinedObject:
		// Slot and publication are there: the slot is older than the publication.
		return outbox.ReasonPublication
	}
	if state == pgerrcode.UndefinedObject {
		return outbox.ReasonSlotMissing
	}
	return outbox.ReasonConnection
}

// look reads the fault from the catalog; "" if it finds no fault.
func (r *Reader) look(ctx context.Context) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, quickTimeout)
	defer cancel()
	st, err := readState(ctx, r.opt.Pool, r.opt.Slot)
	if err != nil {
		return "", err
	}
	if reason := st.fault(); reason != "" {
		return reason, nil
	}
	pub, err := r.published(ctx)
	if err != nil {
		return "", err
	}
	if !pub.delivers() {
		return outbox.ReasonPublication, nil
	}
	return "", nil
}

// published reads the current publication.
func (r *Reader) published(ctx context.Context) (publication, error) {
	ctx, cancel := context.WithTimeout(ctx, quickTimeout)
	defer cancel()
	p, err := readPublication(ctx, r.opt.Pool, r.opt.Publication, r.opt.Schema)
	if err != nil {
		err = slotError(outbox.ReasonConnection, err) // an error of the pool does not concern the slot
	}
	return p, err
}
