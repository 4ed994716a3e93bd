package credits

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/statement"
	"posthaste/outbox"
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
	e, err := scanBucket(db.QueryRow(ctx, query("epoch_get"), bucket))
	if errors.Is(err, pgx.ErrNoRows) {
		err = errBucketUnused
	}
	if err != nil {
		return e, fmt.Errorf("read credit bucket %d: %w", bucket, err)
	}
	return e, nil
}

// addBucket makes sure that a bucket has a row.
func addBucket(ctx context.Context, db sql.DB, bucket int16) error {
	if _, err := db.Exec(ctx, query("epoch_add"), bucket); err != nil {
		return fmt.Errorf("add credit bucket %d: %w", bucket, err)
	}
	return nil
}

// ledgerOwner returns this database's source; "" if no relay has run on it since it was created or copied.
func ledgerOwner(ctx context.Context, db sql.DB) (string, error) {
	var source *string
	err := db.QueryRow(ctx, query("owner")).Scan(&source)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("read the database's source: %w", err)
	}
	if source == nil {
		return "", nil
	}
	return *source, nil
}

// LedgerBuckets returns every bucket that was ever used, ordered by number.
func LedgerBuckets(ctx context.Context, db sql.DB) ([]LedgerBucket, error) {
	return readBuckets(ctx, db, "epoch_list")
}

// lockBuckets locks and returns the rows of buckets until tx ends. It skips rows that another transaction has locked.
func lockBuckets(ctx context.Context, tx pgx.Tx, buckets []int16) ([]LedgerBucket, error) {
	return readBuckets(ctx, tx, "epoch_lock", buckets)
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

func readBuckets(ctx context.Context, db sql.DB, name string, args ...any) ([]LedgerBucket, error) {
	rows, err := db.Query(ctx, query(name), args...)
	if err != nil {
		return nil, fmt.Errorf("read the credit buckets: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (LedgerBucket, error) { return scanBucket(r) })
	if err != nil {
		return nil, fmt.Errorf("read the credit buckets: %w", err)
	}
	return list, nil
}

func scanBucket(r pgx.Row) (LedgerBucket, error) {
	var e LedgerBucket
	err := r.Scan(&e.Bucket, &e.Epoch, &e.Mark, &e.Issued, &e.BumpedAt)
	return e, err
}

// bumpEpoch raises a bucket's epoch, and its mark to mark: operations up to mark that the ledger does not have are
// given up. tx must hold the bucket's row.
func bumpEpoch(ctx context.Context, tx pgx.Tx, bucket int16, mark int64) (int64, error) {
	var epoch int64
	if err := tx.QueryRow(ctx, query("epoch_bump"), bucket, mark).Scan(&epoch); err != nil {
		return 0, fmt.Errorf("raise the epoch of credit bucket %d: %w", bucket, err)
	}
	return epoch, nil
}

// raiseEpoch sets a bucket's epoch to a higher one. tx must hold the bucket's row.
func raiseEpoch(ctx context.Context, tx pgx.Tx, bucket int16, epoch int64) error {
	if _, err := tx.Exec(ctx, query("epoch_raise"), bucket, epoch); err != nil {
		return fmt.Errorf("raise the epoch of credit bucket %d to %d: %w", bucket, epoch, err)
	}
	return nil
}

// accountAt returns a user's account (nil if it does not exist) and the epoch and mark of its bucket, from one
// snapshot. Errors: errBucketUnused.
func accountAt(ctx context.Context, db sql.DB, bucket int16, user uuid.UUID) (*LedgerAccount, LedgerBucket, error) {
	e := LedgerBucket{Bucket: bucket}
	var balance, seq *int64
	var frozen *string
	var updated *time.Time
	err := db.QueryRow(ctx, query("account_get"), bucket, user).Scan(&e.Epoch, &e.Mark, &balance, &seq, &frozen,
		&updated)
	if errors.Is(err, pgx.ErrNoRows) {
		err = errBucketUnused
	}
	if err != nil {
		return nil, e, fmt.Errorf("read a credit account: %w", err)
	}
	if balance == nil {
		return nil, e, nil
	}
	a := &LedgerAccount{UserID: user, Balance: *balance, LastSeq: *seq, UpdatedAt: updated.UTC()}
	if frozen != nil {
		a.Frozen = *frozen
	}
	return a, e, nil
}

// lockAccounts locks the users' existing accounts until tx ends, and returns them.
func lockAccounts(ctx context.Context, tx pgx.Tx, users []uuid.UUID) ([]LedgerAccount, error) {
	rows, err := tx.Query(ctx, query("accounts_lock"), users)
	if err != nil {
		return nil, fmt.Errorf("lock credit accounts: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (a LedgerAccount, err error) {
		err = r.Scan(&a.UserID, &a.Balance, &a.LastSeq, &a.Frozen, &a.UpdatedAt)
		return a, err
	})
	if err != nil {
		return nil, fmt.Errorf("lock credit accounts: %w", err)
	}
	return list, nil
}

// FrozenAccounts returns every frozen account; only UserID and Frozen are set.
func FrozenAccounts(ctx context.Context, db sql.DB) ([]LedgerAccount, error) {
	rows, err := db.Query(ctx, query("accounts_frozen"))
	if err != nil {
		return nil, fmt.Errorf("read the frozen credit accounts: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (a LedgerAccount, err error) {
		err = r.Scan(&a.UserID, &a.Frozen)
		return a, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the frozen credit accounts: %w", err)
	}
	return list, nil
}

// EntryByOp returns the user's entry with an operation's id. Errors: ErrEntryNotFound.
func EntryByOp(ctx context.Context, db sql.DB, user, op uuid.UUID) (*LedgerEntry, error) {
	e := &LedgerEntry{UserID: user, OpID: op}
	err := db.QueryRow(ctx, query("entry_get"), user, op).Scan(&e.Seq, &e.Fingerprint, &e.Kind, &e.Outcome, &e.Amount,
		&e.BalanceAfter, &e.Durability, &e.StreamID, &e.CreatedAt)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrEntryNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("look up a credit entry: %w", err)
	}
	e.CreatedAt = e.CreatedAt.UTC()
	return e, nil
}

// knownEntries returns the entries that the ledger already has, by number or by operation: UserID, Seq and OpID of
// each.
func knownEntries(ctx context.Context, tx pgx.Tx, entries []LedgerEntry) ([]LedgerEntry, error) {
	users, seqs, ops := make([]uuid.UUID, len(entries)), make([]int64, len(entries)), make([]uuid.UUID, len(entries))
	for i := range entries {
		users[i], seqs[i], ops[i] = entries[i].UserID, entries[i].Seq, entries[i].OpID
	}
	rows, err := tx.Query(ctx, query("entries_known"), users, seqs, ops)
	if err != nil {
		return nil, fmt.Errorf("look up credit entries: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (e LedgerEntry, err error) {
		err = r.Scan(&e.UserID, &e.Seq, &e.OpID)
		return e, err
	})
	if err != nil {
		return nil, fmt.Errorf("look up credit entries: %w", err)
	}
	return list, nil
}

// ledgerBatch is what one transaction writes into the ledger.
type ledgerBatch struct {
	// Entries are new. Those of a user are ordered by Seq.
	Entries []LedgerEntry
	// Accounts have their state after the entries.
	Accounts []LedgerAccount
	// Events are the events of the entries, in the same order.
	Events []outbox.Event
	// Quarantined are entries that were not applied.
	Quarantined []quarantined
	// Marks are the new marks and counter-accounts of the buckets: Bucket, Mark and Issued.
	Marks []LedgerBucket
}

// errConflict means that the ledger already has an entry of the batch, by number or by operation, or that an account
// has changed. The transaction must be rolled back.
var errConflict = errors.New("the ledger has one of the entries already")

// writeBatch writes b within tx, in one round trip. Errors: errConflict.
func writeBatch(ctx context.Context, tx pgx.Tx, b *ledgerBatch) error {
	batch := &pgx.Batch{}
	var want []int64
	queue := func(n int, name string, args ...any) {
		if n > 0 {
			batch.Queue(query(name), args...)
			want = append(want, int64(n))
		}
	}
	queue(len(b.Entries), "entries_put", entryColumns(b.Entries)...)
	queue(len(b.Accounts), "accounts_put", accountColumns(b.Accounts)...)
	queue(len(b.Events), "entries_events", eventColumns(b.Events)...)
	queue(len(b.Marks), "epoch_mark", markColumns(b.Marks)...)
	res := tx.SendBatch(ctx, batch)
	var err error
	for _, n := range want {
		tag, e := res.Exec()
		if err == nil && e == nil && tag.RowsAffected() != n {
			e = errConflict
		}
		err = errors.Join(err, e)
	}
	if err := errors.Join(err, res.Close()); err != nil {
		return fmt.Errorf("write credits: %w", err)
	}
	if len(b.Quarantined) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, query("quarantine"), quarantineColumns(b.Quarantined)...); err != nil {
		return fmt.Errorf("quarantine credit entries: %w", err)
	}
	return nil
}

// column returns one field of every element.
func column[T, V any](list []T, get func(*T) V) []V {
	out := make([]V, len(list))
	for i := range list {
		out[i] = get(&list[i])
	}
	return out
}

func entryColumns(l []LedgerEntry) []any {
	type e = LedgerEntry
	return []any{
		column(l, func(e *e) uuid.UUID { return e.UserID }), column(l, func(e *e) int64 { return e.Seq }),
		column(l, func(e *e) uuid.UUID { return e.OpID }), column(l, func(e *e) []byte { return e.Fingerprint }),
		column(l, func(e *e) string { return e.Kind }), column(l, func(e *e) string { return e.Outcome }),
		column(l, func(e *e) int64 { return e.Amount }), column(l, func(e *e) int64 { return e.BalanceAfter }),
		column(l, func(e *e) string { return e.Reference }), column(l, func(e *e) string { return e.Durability }),
		column(l, func(e *e) int64 { return e.Epoch }), column(l, func(e *e) string { return e.StreamID }),
		column(l, func(e *e) time.Time { return e.CreatedAt }),
	}
}

func accountColumns(l []LedgerAccount) []any {
	type a = LedgerAccount
	return []any{
		column(l, func(a *a) uuid.UUID { return a.UserID }), column(l, func(a *a) int64 { return a.Balance }),
		column(l, func(a *a) int64 { return a.LastSeq }), column(l, func(a *a) string { return a.Frozen }),
		column(l, func(a *a) time.Time { return a.UpdatedAt }),
	}
}

func eventColumns(l []outbox.Event) []any {
	return []any{
		column(l, func(e *outbox.Event) uuid.UUID { return e.ID }),
		column(l, func(e *outbox.Event) string { return e.AggregateID }),
		column(l, func(e *outbox.Event) string { return e.Type }),
		column(l, func(e *outbox.Event) string { return string(e.Payload) }),
	}
}

func markColumns(l []LedgerBucket) []any {
	return []any{
		column(l, func(e *LedgerBucket) int16 { return e.Bucket }),
		column(l, func(e *LedgerBucket) int64 { return e.Mark }),
		column(l, func(e *LedgerBucket) int64 { return e.Issued }),
	}
}

func quarantineColumns(l []quarantined) []any {
	type q = quarantined
	return []any{
		column(l, func(q *q) int16 { return q.Bucket }), column(l, func(q *q) string { return q.StreamID }),
		column(l, func(q *q) *uuid.UUID { return q.UserID }), column(l, func(q *q) string { return q.Reason }),
		column(l, func(q *q) string { return q.Entry }),
	}
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
func ledgerBalances(ctx context.Context, db sql.DB, after uuid.UUID, limit int,
	users []uuid.UUID,
) ([]ledgerBalance, error) {
	rows, err := db.Query(ctx, query("reconcile"), after, limit, users)
	if err != nil {
		return nil, fmt.Errorf("sum up the ledger: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (b ledgerBalance, err error) {
		err = r.Scan(&b.UserID, &b.Balance, &b.LastSeq, &b.Frozen, &b.Sum, &b.Entries, &b.LastBalance, &b.Quarantined)
		return b, err
	})
	if err != nil {
		return nil, fmt.Errorf("sum up the ledger: %w", err)
	}
	return list, nil
}

// bucketBalance is a bucket whose accounts do not add up to its counter-account.
type bucketBalance struct {
	Bucket int16
	// Issued is the counter-account, Accounts is the sum of the accounts.
	Issued, Accounts int64
}

// unbalancedBuckets returns the buckets whose counter-account and accounts differ. It reads every account.
func unbalancedBuckets(ctx context.Context, db sql.DB) ([]bucketBalance, error) {
	rows, err := db.Query(ctx, query("reconcile_buckets"))
	if err != nil {
		return nil, fmt.Errorf("sum up the buckets: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (b bucketBalance, err error) {
		err = r.Scan(&b.Bucket, &b.Issued, &b.Accounts)
		return b, err
	})
	if err != nil {
		return nil, fmt.Errorf("sum up the buckets: %w", err)
	}
	return list, nil
}

// countAccounts returns the approximate number of accounts, from the planner's statistics.
func countAccounts(ctx context.Context, db sql.DB) (int64, error) {
	var n int64
	if err := db.QueryRow(ctx, query("accounts_count")).Scan(&n); err != nil {
		return 0, fmt.Errorf("count the accounts: %w", err)
	}
	return n, nil
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

// quarantinedEntries returns up to limit entries of a user, oldest first.
func quarantinedEntries(ctx context.Context, db sql.DB, user uuid.UUID, limit int) ([]QuarantinedEntry, error) {
	rows, err := db.Query(ctx, query("quarantine_list"), user, limit)
	if err != nil {
		return nil, fmt.Errorf("read the quarantine: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (q QuarantinedEntry, err error) {
		err = r.Scan(&q.Reason, &q.StreamID, &q.Kind, &q.Amount, &q.Seq, &q.At)
		return q, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the quarantine: %w", err)
	}
	return list, nil
}

// thawAccount clears the frozen state of an account, and reports whether the account was frozen.
func thawAccount(ctx context.Context, db sql.DB, user uuid.UUID) (bool, error) {
	tag, err := db.Exec(ctx, query("account_thaw"), user)
	if err != nil {
		return false, fmt.Errorf("thaw a credit account: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}
