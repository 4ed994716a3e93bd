package sql

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

var (
	// ErrCreditEntryNotFound means that the ledger has no entry under the operation's id.
	ErrCreditEntryNotFound = errors.New("no such credit entry")
	// ErrCreditBucketUnused means that the ledger has no row for the bucket yet.
	ErrCreditBucketUnused = errors.New("the bucket of accounts was never used")
)

// Tx is a transaction.
type Tx = pgx.Tx

// InTx runs f in a transaction, which commits if and only if f returns nil. Within another transaction it is a savepoint.
func InTx(ctx context.Context, db interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}, f func(tx Tx) error,
) error {
	return pgx.BeginFunc(ctx, db, f)
}

// CreditEpoch is a row of credit_epoch.
type CreditEpoch struct {
	// Bucket is 0 … 255.
	Bucket int16
	// Epoch is the number under which Redis may change the bucket's balances.
	Epoch int64
	// Mark is the number of the bucket's last operation that was taken out of its stream.
	Mark int64
	// Issued is the bucket's counter-account: what was added to its accounts less what was deducted.
	Issued int64
	// BumpedAt is when Epoch was last raised; nil for never.
	BumpedAt *time.Time
}

// CreditAccount is an account as the ledger has it.
type CreditAccount struct {
	UserID uuid.UUID
	// Balance is in credits, never negative.
	Balance int64
	// LastSeq is the number of the account's last entry.
	LastSeq int64
	// Frozen says why the account was stopped; "" for an account in use.
	Frozen string
	// UpdatedAt is when Redis took the last entry.
	UpdatedAt time.Time
}

// CreditEntry is one operation on an account, a refused one included.
type CreditEntry struct {
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
	// Reference is the client's own text, at most 255 bytes.
	Reference string
	// Durability is memory, replicated or fsynced.
	Durability string
	Epoch      int64
	StreamID   string
	CreatedAt  time.Time
}

// CreditQuarantined is a stream entry that contradicts the ledger.
type CreditQuarantined struct {
	Bucket   int16
	StreamID string
	// UserID is nil if the entry names none.
	UserID *uuid.UUID
	Reason string
	// Entry is the stream entry's fields as a JSON object.
	Entry string
}

// CreditBucket returns the row of a bucket. Errors: ErrCreditBucketUnused.
func CreditBucket(ctx context.Context, db DB, bucket int16) (CreditEpoch, error) {
	e, err := scanCreditEpoch(db.QueryRow(ctx, query("credit_epoch_get"), bucket))
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrCreditBucketUnused
	}
	if err != nil {
		return e, fmt.Errorf("read credit bucket %d: %w", bucket, err)
	}
	return e, nil
}

// AddCreditBucket makes sure that a bucket has a row.
func AddCreditBucket(ctx context.Context, db DB, bucket int16) error {
	if _, err := db.Exec(ctx, query("credit_epoch_add"), bucket); err != nil {
		return fmt.Errorf("add credit bucket %d: %w", bucket, err)
	}
	return nil
}

// CreditOwner returns this database's source; "" if it has none, because no relay has worked on it where it is now.
func CreditOwner(ctx context.Context, db DB) (string, error) {
	var source *string
	err := db.QueryRow(ctx, query("credit_owner")).Scan(&source)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("read the database's source: %w", err)
	}
	if source == nil {
		return "", nil
	}
	return *source, nil
}

// CreditBuckets returns every bucket that was ever used, by number.
func CreditBuckets(ctx context.Context, db DB) ([]CreditEpoch, error) {
	return creditEpochs(ctx, db, "credit_epoch_list")
}

// LockCreditBuckets locks the rows of those buckets that nobody else works on, until tx ends, and returns them.
func LockCreditBuckets(ctx context.Context, tx pgx.Tx, buckets []int16) ([]CreditEpoch, error) {
	return creditEpochs(ctx, tx, "credit_epoch_lock", buckets)
}

func creditEpochs(ctx context.Context, db DB, name string, args ...any) ([]CreditEpoch, error) {
	rows, err := db.Query(ctx, query(name), args...)
	if err != nil {
		return nil, fmt.Errorf("read the credit buckets: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (CreditEpoch, error) { return scanCreditEpoch(r) })
	if err != nil {
		return nil, fmt.Errorf("read the credit buckets: %w", err)
	}
	return list, nil
}

func scanCreditEpoch(r pgx.Row) (CreditEpoch, error) {
	var e CreditEpoch
	err := r.Scan(&e.Bucket, &e.Epoch, &e.Mark, &e.Issued, &e.BumpedAt)
	return e, err
}

// BumpCreditEpoch raises a bucket's epoch, and its mark to mark: operations up to there that the ledger does not have are
// given up. tx must hold the bucket's row.
func BumpCreditEpoch(ctx context.Context, tx pgx.Tx, bucket int16, mark int64) (int64, error) {
	var epoch int64
	if err := tx.QueryRow(ctx, query("credit_epoch_bump"), bucket, mark).Scan(&epoch); err != nil {
		return 0, fmt.Errorf("raise the epoch of credit bucket %d: %w", bucket, err)
	}
	return epoch, nil
}

// RaiseCreditEpoch sets a bucket's epoch to a higher one. tx must hold the bucket's row.
func RaiseCreditEpoch(ctx context.Context, tx pgx.Tx, bucket int16, epoch int64) error {
	if _, err := tx.Exec(ctx, query("credit_epoch_raise"), bucket, epoch); err != nil {
		return fmt.Errorf("raise the epoch of credit bucket %d to %d: %w", bucket, epoch, err)
	}
	return nil
}

// CreditAccountAt returns a user's account (nil if there is none) together with the epoch and mark of its bucket, all of
// one moment. Errors: ErrCreditBucketUnused.
func CreditAccountAt(ctx context.Context, db DB, bucket int16, user uuid.UUID) (*CreditAccount, CreditEpoch, error) {
	e := CreditEpoch{Bucket: bucket}
	var balance, seq *int64
	var frozen *string
	var updated *time.Time
	err := db.QueryRow(ctx, query("credit_account_get"), bucket, user).Scan(&e.Epoch, &e.Mark, &balance, &seq, &frozen, &updated)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrCreditBucketUnused
	}
	if err != nil {
		return nil, e, fmt.Errorf("read a credit account: %w", err)
	}
	if balance == nil {
		return nil, e, nil
	}
	a := &CreditAccount{UserID: user, Balance: *balance, LastSeq: *seq, UpdatedAt: updated.UTC()}
	if frozen != nil {
		a.Frozen = *frozen
	}
	return a, e, nil
}

// LockCreditAccounts returns those of the users' accounts that exist, locked until tx ends.
func LockCreditAccounts(ctx context.Context, tx pgx.Tx, users []uuid.UUID) ([]CreditAccount, error) {
	rows, err := tx.Query(ctx, query("credit_accounts_lock"), users)
	if err != nil {
		return nil, fmt.Errorf("lock credit accounts: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (a CreditAccount, err error) {
		err = r.Scan(&a.UserID, &a.Balance, &a.LastSeq, &a.Frozen, &a.UpdatedAt)
		return a, err
	})
	if err != nil {
		return nil, fmt.Errorf("lock credit accounts: %w", err)
	}
	return list, nil
}

// FrozenCreditAccounts returns every frozen account; only UserID and Frozen are set.
func FrozenCreditAccounts(ctx context.Context, db DB) ([]CreditAccount, error) {
	rows, err := db.Query(ctx, query("credit_accounts_frozen"))
	if err != nil {
		return nil, fmt.Errorf("read the frozen credit accounts: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (a CreditAccount, err error) {
		err = r.Scan(&a.UserID, &a.Frozen)
		return a, err
	})
	if err != nil {
		return nil, fmt.Errorf("read the frozen credit accounts: %w", err)
	}
	return list, nil
}

// CreditEntryByOp returns the user's entry under an operation's id. Errors: ErrCreditEntryNotFound.
func CreditEntryByOp(ctx context.Context, db DB, user, op uuid.UUID) (*CreditEntry, error) {
	e := &CreditEntry{UserID: user, OpID: op}
	err := db.QueryRow(ctx, query("credit_entry_get"), user, op).Scan(&e.Seq, &e.Fingerprint, &e.Kind, &e.Outcome, &e.Amount,
		&e.BalanceAfter, &e.Durability, &e.StreamID, &e.CreatedAt)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrCreditEntryNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("look up a credit entry: %w", err)
	}
	e.CreatedAt = e.CreatedAt.UTC()
	return e, nil
}

// KnownCreditEntries returns which of the entries, by number or by operation, the ledger has: UserID, Seq and OpID of each.
func KnownCreditEntries(ctx context.Context, tx pgx.Tx, entries []CreditEntry) ([]CreditEntry, error) {
	users, seqs, ops := make([]uuid.UUID, len(entries)), make([]int64, len(entries)), make([]uuid.UUID, len(entries))
	for i := range entries {
		users[i], seqs[i], ops[i] = entries[i].UserID, entries[i].Seq, entries[i].OpID
	}
	rows, err := tx.Query(ctx, query("credit_entries_known"), users, seqs, ops)
	if err != nil {
		return nil, fmt.Errorf("look up credit entries: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (e CreditEntry, err error) {
		err = r.Scan(&e.UserID, &e.Seq, &e.OpID)
		return e, err
	})
	if err != nil {
		return nil, fmt.Errorf("look up credit entries: %w", err)
	}
	return list, nil
}

// CreditBatch is what one transaction writes into the ledger.
type CreditBatch struct {
	// Entries are new, those of one user in the order of Seq.
	Entries []CreditEntry
	// Accounts are as they are after the entries.
	Accounts []CreditAccount
	// Events belong to the entries, in their order.
	Events []Event
	// Quarantined are entries that were not applied.
	Quarantined []CreditQuarantined
	// Marks are the new marks and counter-accounts of the buckets: Bucket, Mark and Issued.
	Marks []CreditEpoch
}

// ErrCreditConflict means that an entry of a batch is in the ledger already, by number or by operation, or that an
// account has moved on. The transaction must be rolled back.
var ErrCreditConflict = errors.New("the ledger has one of the entries already")

// WriteCredits writes b within tx, in one round trip. Errors: ErrCreditConflict.
func WriteCredits(ctx context.Context, tx pgx.Tx, b *CreditBatch) error {
	batch := &pgx.Batch{}
	var want []int64
	queue := func(n int, name string, args ...any) {
		if n > 0 {
			batch.Queue(query(name), args...)
			want = append(want, int64(n))
		}
	}
	queue(len(b.Entries), "credit_entries_put", entryColumns(b.Entries)...)
	queue(len(b.Accounts), "credit_accounts_put", accountColumns(b.Accounts)...)
	queue(len(b.Events), "credit_entries_events", eventColumns(b.Events)...)
	queue(len(b.Marks), "credit_epoch_mark", markColumns(b.Marks)...)
	res := tx.SendBatch(ctx, batch)
	var err error
	for _, n := range want {
		tag, e := res.Exec()
		if err == nil && e == nil && tag.RowsAffected() != n {
			e = ErrCreditConflict
		}
		err = errors.Join(err, e)
	}
	if err := errors.Join(err, res.Close()); err != nil {
		return fmt.Errorf("write credits: %w", err)
	}
	if len(b.Quarantined) == 0 {
		return nil
	}
	if _, err := tx.Exec(ctx, query("credit_quarantine"), quarantineColumns(b.Quarantined)...); err != nil {
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

func entryColumns(l []CreditEntry) []any {
	type e = CreditEntry
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

func accountColumns(l []CreditAccount) []any {
	type a = CreditAccount
	return []any{
		column(l, func(a *a) uuid.UUID { return a.UserID }), column(l, func(a *a) int64 { return a.Balance }),
		column(l, func(a *a) int64 { return a.LastSeq }), column(l, func(a *a) string { return a.Frozen }),
		column(l, func(a *a) time.Time { return a.UpdatedAt }),
	}
}

func eventColumns(l []Event) []any {
	return []any{
		column(l, func(e *Event) uuid.UUID { return e.ID }), column(l, func(e *Event) string { return e.AggregateID }),
		column(l, func(e *Event) string { return e.Type }), column(l, func(e *Event) string { return string(e.Payload) }),
	}
}

func markColumns(l []CreditEpoch) []any {
	return []any{
		column(l, func(e *CreditEpoch) int16 { return e.Bucket }), column(l, func(e *CreditEpoch) int64 { return e.Mark }),
		column(l, func(e *CreditEpoch) int64 { return e.Issued }),
	}
}

func quarantineColumns(l []CreditQuarantined) []any {
	type q = CreditQuarantined
	return []any{
		column(l, func(q *q) int16 { return q.Bucket }), column(l, func(q *q) string { return q.StreamID }),
		column(l, func(q *q) *uuid.UUID { return q.UserID }), column(l, func(q *q) string { return q.Reason }),
		column(l, func(q *q) string { return q.Entry }),
	}
}

// CreditBalance is what the ledger says of one account, for a reconciliation.
type CreditBalance struct {
	CreditAccount
	// Sum is the sum of the entries, Entries their count, LastBalance the balance after the last of them.
	Sum, Entries, LastBalance int64
	// Quarantined is how many stream entries were not applied.
	Quarantined int64
}

// CreditBalances returns up to limit accounts after a user's, by user id; users, if not nil, restricts them.
func CreditBalances(ctx context.Context, db DB, after uuid.UUID, limit int, users []uuid.UUID) ([]CreditBalance, error) {
	rows, err := db.Query(ctx, query("credit_reconcile"), after, limit, users)
	if err != nil {
		return nil, fmt.Errorf("sum up the ledger: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (b CreditBalance, err error) {
		err = r.Scan(&b.UserID, &b.Balance, &b.LastSeq, &b.Frozen, &b.Sum, &b.Entries, &b.LastBalance, &b.Quarantined)
		return b, err
	})
	if err != nil {
		return nil, fmt.Errorf("sum up the ledger: %w", err)
	}
	return list, nil
}

// CreditBucketBalance is a bucket whose accounts do not add up to its counter-account.
type CreditBucketBalance struct {
	Bucket int16
	// Issued is the counter-account, Accounts the sum of the accounts.
	Issued, Accounts int64
}

// UnbalancedCreditBuckets returns the buckets whose two sides differ. It reads every account.
func UnbalancedCreditBuckets(ctx context.Context, db DB) ([]CreditBucketBalance, error) {
	rows, err := db.Query(ctx, query("credit_reconcile_buckets"))
	if err != nil {
		return nil, fmt.Errorf("sum up the buckets: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (b CreditBucketBalance, err error) {
		err = r.Scan(&b.Bucket, &b.Issued, &b.Accounts)
		return b, err
	})
	if err != nil {
		return nil, fmt.Errorf("sum up the buckets: %w", err)
	}
	return list, nil
}

// CreditAccountsCount returns about how many accounts there are, from the planner's statistics.
func CreditAccountsCount(ctx context.Context, db DB) (int64, error) {
	var n int64
	if err := db.QueryRow(ctx, query("credit_accounts_count")).Scan(&n); err != nil {
		return 0, fmt.Errorf("count the accounts: %w", err)
	}
	return n, nil
}

// QuarantinedEntry is a stream entry of a frozen account, as far as people need it.
type QuarantinedEntry struct {
	Reason   string `json:"reason"`
	StreamID string `json:"stream_id"`
	// Kind, Amount and Seq are as the entry had them, which may be nonsense.
	Kind   string    `json:"kind"`
	Amount string    `json:"amount"`
	Seq    string    `json:"seq"`
	At     time.Time `json:"at"`
}

// QuarantinedEntries returns up to limit of a user's, oldest first.
func QuarantinedEntries(ctx context.Context, db DB, user uuid.UUID, limit int) ([]QuarantinedEntry, error) {
	rows, err := db.Query(ctx, query("credit_quarantine_list"), user, limit)
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

// ThawCreditAccount takes the mark of a frozen account away, and reports whether there was one.
func ThawCreditAccount(ctx context.Context, db DB, user uuid.UUID) (bool, error) {
	tag, err := db.Exec(ctx, query("credit_account_thaw"), user)
	if err != nil {
		return false, fmt.Errorf("thaw a credit account: %w", err)
	}
	return tag.RowsAffected() == 1, nil
}
