package credits

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"posthaste/internal/statement"
	"posthaste/sql"
)

var (
	// ErrEntryNotFound means that the ledger has no entry with the operation's id.
	ErrEntryNotFound = errors.New("no such credit entry")
	// errBucketUnused means that the ledger has no row for the bucket yet.
	errBucketUnused = errors.New("the bucket of accounts was never used")
)

//go:embed queries/*.sql
var queryFiles embed.FS

// query returns the text of queries/<name>.sql.
var query = statement.In(queryFiles)

// LedgerBucket is a row of credit_epoch.
type LedgerBucket struct {
	// Bucket is 0 … 255.
	Bucket int16
	// Epoch is the epoch in which Redis may change the bucket's balances.
	Epoch int64
	// Mark is the number of the bucket's last operation that was taken from its stream or given up.
	Mark int64
	// Issued is the bucket's counter-account: all additions to its accounts minus all deductions.
	Issued int64
	// BumpedAt is when Epoch was last raised; nil for never.
	BumpedAt *time.Time
}

// LedgerAccount is an account in the ledger.
type LedgerAccount struct {
	UserID uuid.UUID
	// Balance is in credits, never negative.
	Balance int64
	// LastSeq is the number of the account's last entry.
	LastSeq int64
	// Frozen is why the account is stopped; "" if it is not.
	Frozen string
	// UpdatedAt is when Redis carried out the last entry.
	UpdatedAt time.Time
}

// LedgerEntry is one operation on an account. Refused operations also have entries.
type LedgerEntry struct {
	UserID uuid.UUID
	// Seq counts the user's operations from 1, without gaps.
	Seq  int64
	OpID uuid.UUID
	// Fingerprint identifies the command.
	Fingerprint []byte
	// Kind is add or deduct; Outcome OK, INSUFFICIENT or OVERFLOW.
	Kind, Outcome string
	// Amount is positive for both kinds.
	Amount       int64
	BalanceAfter int64
	// Reference is text of the client, at most 255 bytes.
	Reference string
	// Durability is memory, replicated or fsynced.
	Durability string
	Epoch      int64
	StreamID   string
	CreatedAt  time.Time
}

// quarantined is a stream entry that contradicts the ledger.
type quarantined struct {
	Bucket   int16
	StreamID string
	// UserID is nil if the entry names none.
	UserID *uuid.UUID
	Reason string
	// Entry is the stream entry's fields as a JSON object.
	Entry string
}

// readBucket returns the row of a bucket. Errors: errBucketUnused.
func readBucket(ctx context.Context, db sql.DB, bucket int16) (LedgerBucket, error) {
	list, err := statement.Structs[LedgerBucket](ctx, db, "read a credit bucket", query("epoch_get"), bucket)
	if err == nil && len(list) == 0 {
		err = fmt.Errorf("read credit bucket %d: %w", bucket, errBucketUnused)
	}
	if err != nil {
		return LedgerBucket{}, err
	}
	return list[0], nil
}

// ledgerOwner returns this database's source; "" if no relay has run on it since it was created or copied.
func ledgerOwner(ctx context.Context, db sql.DB) (string, error) {
	var source string
	err := db.QueryRow(ctx, query("owner")).Scan(&source)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("read the database's source: %w", err)
	}
	return source, nil
}

// LedgerBuckets returns every bucket that was ever used, ordered by number.
func LedgerBuckets(ctx context.Context, db sql.DB) ([]LedgerBucket, error) {
	return statement.Structs[LedgerBucket](ctx, db, "read the credit buckets", query("epoch_list"))
}

// lockBuckets locks and returns the rows of buckets until tx ends. It skips rows that another transaction has locked.
func lockBuckets(ctx context.Context, tx pgx.Tx, buckets []int16) ([]LedgerBucket, error) {
	return statement.Structs[LedgerBucket](ctx, tx, "read the credit buckets", query("epoch_lock"), buckets)
}

// settledBuckets returns the buckets, like LedgerBuckets, after it has waited for every sync transaction that may
// already have read a stream. Each of them has committed or rolled back by then.
func settledBuckets(ctx context.Context, pool *sql.Pool) (rows []LedgerBucket, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, query("epoch_settle")); err != nil {
			return fmt.Errorf("wait for the sync: %w", err)
		}
		rows, err = LedgerBuckets(ctx, tx)
		return err
	})
	return rows, err
}

// accountAt returns a user's account (nil if it does not exist) and the row of its bucket without Issued, from one
// snapshot. Errors: errBucketUnused.
func accountAt(ctx context.Context, db sql.DB, user uuid.UUID) (*LedgerAccount, LedgerBucket, error) {
	e, a := LedgerBucket{Bucket: Bucket(user)}, &LedgerAccount{UserID: user}
	var exists bool
	err := db.QueryRow(ctx, query("account_get"), e.Bucket, user).Scan(&e.Epoch, &e.Mark, &e.BumpedAt, &exists,
		&a.Balance, &a.LastSeq, &a.Frozen, &a.UpdatedAt)
	if errors.Is(err, pgx.ErrNoRows) {
		err = errBucketUnused
	}
	if err != nil {
		return nil, e, fmt.Errorf("read a credit account: %w", err)
	}
	if !exists {
		return nil, e, nil
	}
	a.UpdatedAt = a.UpdatedAt.UTC()
	return a, e, nil
}

// FrozenAccounts returns every frozen account.
func FrozenAccounts(ctx context.Context, db sql.DB) ([]LedgerAccount, error) {
	return statement.Structs[LedgerAccount](ctx, db, "read the frozen credit accounts", query("accounts_frozen"))
}

// EntryByOp returns the user's entry with an operation's id. Errors: ErrEntryNotFound.
func EntryByOp(ctx context.Context, db sql.DB, user, op uuid.UUID) (*LedgerEntry, error) {
	list, err := statement.Structs[LedgerEntry](ctx, db, "read a credit entry", query("entry_get"), user, op)
	if err == nil && len(list) == 0 {
		err = fmt.Errorf("look up a credit entry: %w", ErrEntryNotFound)
	}
	if err != nil {
		return nil, err
	}
	list[0].CreatedAt = list[0].CreatedAt.UTC()
	return &list[0], nil
}

// knownEntry identifies an entry, by number and by operation.
type knownEntry struct {
	UserID uuid.UUID
	Seq    int64
	OpID   uuid.UUID
}

// ledgerEvent is an event of type credits.
type ledgerEvent struct {
	ID                         uuid.UUID
	AggregateID, Type, Payload string
}

// bucketMark is the new mark and counter-account of a bucket.
type bucketMark struct {
	Bucket       int16
	Mark, Issued int64
}

// ledgerBatch is what one transaction writes into the ledger.
type ledgerBatch struct {
	// Entries are new. Those of a user are ordered by Seq.
	Entries []LedgerEntry
	// Accounts have their state after the entries.
	Accounts []LedgerAccount
	// Events are the events of the entries, in the same order.
	Events []ledgerEvent
	// Quarantined are entries that were not applied.
	Quarantined []quarantined
	Marks       []bucketMark
}

// errConflict means that the ledger already has an entry of the batch, by number or by operation, that an account has
// changed, or that the outbox has an event with an operation's id.
var errConflict = errors.New("the ledger has one of the entries already")

// writeBatch writes b in a savepoint of tx, so that tx remains usable after an errConflict.
func writeBatch(ctx context.Context, tx pgx.Tx, b *ledgerBatch) error {
	batch := &pgx.Batch{}
	queue := func(name string, rows int, args []any) {
		if rows > 0 {
			batch.Queue(query(name), args...).Exec(func(tag pgconn.CommandTag) error {
				if tag.RowsAffected() != int64(rows) {
					return errConflict
				}
				return nil
			})
		}
	}
	queue("entries_put", len(b.Entries), columns(b.Entries))
	queue("accounts_put", len(b.Accounts), columns(b.Accounts))
	queue("entries_events", len(b.Events), columns(b.Events))
	queue("epoch_mark", len(b.Marks), columns(b.Marks))
	if len(b.Quarantined) > 0 {
		batch.Queue(query("quarantine"), columns(b.Quarantined)...) // may be there already
	}
	return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		if err := tx.SendBatch(ctx, batch).Close(); err != nil {
			return fmt.Errorf("write credits: %w", err)
		}
		return nil
	})
}

// columns returns the fields of structs as arrays for unnest, one for each field.
func columns[T any](list []T) []any {
	rows, fields := reflect.ValueOf(list), reflect.TypeFor[T]()
	out := make([]any, fields.NumField())
	for i := range out {
		column := reflect.MakeSlice(reflect.SliceOf(fields.Field(i).Type), len(list), len(list))
		for j := range list {
			column.Index(j).Set(rows.Index(j).Field(i))
		}
		out[i] = column.Interface()
	}
	return out
}

// ledgerBalance is the ledger's data about one account, for a reconciliation.
type ledgerBalance struct {
	LedgerAccount
	// Sum is the sum of the entries, Entries is their number, LastBalance is the balance after the last entry.
	Sum, Entries, LastBalance int64
	// Quarantined is how many stream entries were not applied.
	Quarantined int64
}

// ledgerBalances returns up to limit accounts after the user after, ordered by user id. If users is not nil, it returns
// only those users' accounts.
func ledgerBalances(
	ctx context.Context, db sql.DB, after uuid.UUID, limit int, users []uuid.UUID,
) ([]ledgerBalance, error) {
	return statement.Structs[ledgerBalance](ctx, db, "read the sums of the ledger", query("reconcile"), after, limit,
		users)
}

// unbalancedBuckets returns the buckets whose counter-account and accounts differ. It reads every account.
func unbalancedBuckets(ctx context.Context, db sql.DB) ([]Unbalanced, error) {
	return statement.Structs[Unbalanced](ctx, db, "read the sums of the buckets", query("reconcile_buckets"))
}

// QuarantinedEntry is the readable part of a stream entry of a frozen account.
type QuarantinedEntry struct {
	Reason   string `json:"reason"`
	StreamID string `json:"stream_id"`
	// Kind, Amount and Seq are copied from the entry and may be invalid.
	Kind   string    `json:"kind"`
	Amount string    `json:"amount"`
	Seq    string    `json:"seq"`
	At     time.Time `json:"at"`
}
