package inbox

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"posthaste/consumer"
	"posthaste/internal/statement"
)

//go:embed queries/*.sql
var queryFiles embed.FS

var query = statement.In(queryFiles)

// idleLimit bounds the idle time of a transaction with a note. Without it, a process that is paused in a handler would
// block the consumers that have its events now.
const idleLimit = "60s"

// Once notes within tx that group has seen the event, and reports whether it is the first time: if not, the effect
// exists and the handler should do nothing more. While another transaction that has noted the same event is open, Once
// waits for its end. Under REPEATABLE READ and above it may end with a serialization failure (40001) instead of false;
// the retry of the event then finds the note.
//
// So that a paused process does not block the others forever, tx may be idle between two statements for a minute at
// most, unless its session sets idle_in_transaction_session_timeout itself; a value near the consumer's ClaimIdle is
// good.
//
// An error that is not the event's fault (no right, no table, a lost connection, a standby) is unavailable to the
// consumer: it retries the event without counting attempts.
//
// eventID is an event's ID, usually a UUID; any other text is as good. The table inbox (posthaste migrate makes it)
// must be in tx's search path.
func Once(ctx context.Context, tx pgx.Tx, group, eventID string) (first bool, err error) {
	id, day := locate(eventID)
	tag, err := tx.Exec(ctx, query("once"), day, group, pgtype.UUID{Bytes: id, Valid: true}, idleLimit)
	if err != nil {
		err = fmt.Errorf("note event %s for group %q: %w", eventID, group, err)
		if databaseFails(err) {
			err = consumer.Unavailable(err)
		}
		return false, err
	}
	return tag.RowsAffected() == 1, nil
}

// databaseFails reports whether no event can be noted: the server has not answered, or refuses them all.
func databaseFails(err error) bool {
	refused, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return !errors.Is(err, pgx.ErrTxClosed)
	}
	switch refused.Code {
	case pgerrcode.InsufficientPrivilege, pgerrcode.UndefinedTable, pgerrcode.ReadOnlySQLTransaction,
		pgerrcode.AdminShutdown, pgerrcode.CrashShutdown, pgerrcode.CannotConnectNow:
		return true
	}
	return pgerrcode.IsConnectionException(refused.Code) || pgerrcode.IsInsufficientResources(refused.Code)
}

// noDay is where ids without a time in them go.
var noDay = time.Date(1970, 1, 1, 0, 0, 0, 0, time.UTC)

// foreign is the name space of ids that are no UUIDs.
var foreign = uuid.MustParse("6f1d2c52-9c3b-5d0e-8d5f-6a0a1f6c7b11")

// locate returns the key and the partition of an event's note. Both depend only on the id, because otherwise the unique
// key would not be unique.
func locate(eventID string) (uuid.UUID, time.Time) {
	id, err := uuid.Parse(eventID)
	if err != nil {
		return uuid.NewSHA1(foreign, []byte(eventID)), noDay
	}
	if id.Version() != 7 {
		return id, noDay
	}
	ms := int64(id[0])<<40 | int64(id[1])<<32 | int64(id[2])<<24 | int64(id[3])<<16 | int64(id[4])<<8 | int64(id[5])
	return id, dayOf(time.UnixMilli(ms))
}

func dayOf(t time.Time) time.Time { return t.UTC().Truncate(24 * time.Hour) }
