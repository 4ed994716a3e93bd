package credits

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/sql"
)

// The events of the ledger.
const (
	eventAdded    = "credits.added"
	eventDeducted = "credits.deducted"
)

// ledger is one batch on its way into Postgres: each entry is checked against the account as the entries before it left
// it.
type ledger struct {
	rows     map[int16]*LedgerBucket
	accounts map[uuid.UUID]*LedgerAccount
	changed  map[uuid.UUID]bool
	// known are the entries that the ledger has, by number and by operation; nil unless a conflict made us look.
	known *known

	batch      ledgerBatch
	duplicates int
	// froze are the accounts frozen by this batch.
	froze map[uuid.UUID]string
	// moved is by how much the accounts of a bucket changed together: what its counter-account moves by.
	moved map[int16]int64
	// holes is how many numbers of a bucket are missing.
	holes map[int16]int64
}

type known struct {
	bySeq map[numbered]uuid.UUID
	byOp  map[operation]int64
}

type numbered struct {
	user uuid.UUID
	seq  int64
}

type operation struct{ user, op uuid.UUID }

func newLedger(rows []LedgerBucket) *ledger {
	l := &ledger{rows: map[int16]*LedgerBucket{}}
	for i := range rows {
		l.rows[rows[i].Bucket] = &rows[i]
	}
	return l
}

// take writes entries within tx. Nearly always they simply follow what is there; if the ledger objects, or an entry is
// older than its account, the second try looks at what the ledger has of each of them.
func (l *ledger) take(ctx context.Context, tx pgx.Tx, entries []*entry) error {
	if err := l.lock(ctx, tx, entries); err != nil {
		return err
	}
	if !l.check(entries) {
		if err := l.write(ctx, tx); err == nil || !errors.Is(err, errConflict) {
			return err
		}
	}
	if err := l.lookUp(ctx, tx, entries); err != nil {
		return err
	}
	if err := l.lock(ctx, tx, entries); err != nil {
		return err
	}
	l.check(entries)
	return l.write(ctx, tx)
}

// write writes the batch behind a savepoint, so that a conflict leaves the transaction usable.
func (l *ledger) write(ctx context.Context, tx pgx.Tx) error {
	return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return writeBatch(ctx, tx, &l.batch) })
}

// lock reads and locks the accounts.
func (l *ledger) lock(ctx context.Context, tx pgx.Tx, entries []*entry) error {
	seen := map[uuid.UUID]bool{}
	var users []uuid.UUID
	for _, e := range entries {
		if e.UserID != uuid.Nil && !seen[e.UserID] {
			seen[e.UserID] = true
			users = append(users, e.UserID)
		}
	}
	list, err := lockAccounts(ctx, tx, users)
	if err != nil {
		return err
	}
	l.accounts = make(map[uuid.UUID]*LedgerAccount, len(users))
	for i := range list {
		l.accounts[list[i].UserID] = &list[i]
	}
	return nil
}

func (l *ledger) lookUp(ctx context.Context, tx pgx.Tx, entries []*entry) error {
	list := make([]LedgerEntry, 0, len(entries))
	for _, e := range entries {
		if e.fault == nil {
			list = append(list, e.LedgerEntry)
		}
	}
	have, err := knownEntries(ctx, tx, list)
	if err != nil {
		return err
	}
	l.known = &known{bySeq: map[numbered]uuid.UUID{}, byOp: map[operation]int64{}}
	for i := range have {
		l.known.bySeq[numbered{have[i].UserID, have[i].Seq}] = have[i].OpID
		l.known.byOp[operation{have[i].UserID, have[i].OpID}] = have[i].Seq
	}
	return nil
}

// check makes the batch. It reports whether it met an entry about which the ledger must be asked first; the batch is
// not complete then.
func (l *ledger) check(entries []*entry) (ask bool) {
	l.batch, l.duplicates = ledgerBatch{}, 0
	l.changed, l.froze, l.holes = map[uuid.UUID]bool{}, map[uuid.UUID]string{}, map[int16]int64{}
	l.moved = map[int16]int64{}
	marks := map[int16]int64{}
	for b, r := range l.rows {
		marks[b] = r.Mark
	}
	for _, e := range entries {
		if e.fault == nil && l.known == nil && l.stale(e) {
			return true
		}
		// The number of an entry that cannot be read is believed only if it is the next.
		if e.n > marks[e.bucket] && (e.fault == nil || e.n == marks[e.bucket]+1) {
			if hole := e.n - marks[e.bucket] - 1; hole > 0 {
				l.holes[e.bucket] += hole
			}
			marks[e.bucket] = e.n
		}
		l.one(e)
	}
	for user := range l.changed {
		l.batch.Accounts = append(l.batch.Accounts, *l.accounts[user])
	}
	for b, m := range marks {
		if m != l.rows[b].Mark || l.moved[b] != 0 {
			l.batch.Marks = append(l.batch.Marks, LedgerBucket{Bucket: b, Mark: m, Issued: l.rows[b].Issued +
				l.moved[b]})
		}
	}
	return false
}

// stale reports whether e is older than its account.
func (l *ledger) stale(e *entry) bool {
	a := l.accounts[e.UserID]
	return a != nil && e.Seq <= a.LastSeq
}

// one applies an entry, recognizes it, or puts it aside with its account.
func (l *ledger) one(e *entry) {
	if e.fault != nil {
		l.refuse(e, reasonMalformed)
		return
	}
	if op, ok := l.numbered(e); ok && op == e.OpID {
		l.duplicates++
		return
	}
	a := l.accounts[e.UserID]
	switch {
	case a != nil && a.Frozen != "":
		l.refuse(e, a.Frozen)
	case a == nil && e.Seq == 1:
		a = &LedgerAccount{UserID: e.UserID, UpdatedAt: e.CreatedAt}
		l.accounts[e.UserID] = a
		l.next(a, e)
	case a == nil:
		l.refuse(e, reasonGap)
	default:
		l.next(a, e)
	}
}

// next applies an entry to an account in use, if it follows.
func (l *ledger) next(a *LedgerAccount, e *entry) {
	_, taken := l.numbered(e) // although the account is not there yet: its row was changed, or deleted
	switch {
	case e.Seq <= a.LastSeq || taken:
		l.refuse(e, reasonFork)
	case e.Seq > a.LastSeq+1:
		l.refuse(e, reasonGap)
	case l.knows(e):
		l.refuse(e, reasonDuplicate)
	case !e.follows(a.Balance):
		l.refuse(e, reasonBalance)
	default:
		l.moved[e.bucket] += e.BalanceAfter - a.Balance
		a.Balance, a.LastSeq, a.UpdatedAt = e.BalanceAfter, e.Seq, e.CreatedAt
		l.changed[a.UserID] = true
		if l.known != nil {
			l.known.byOp[operation{e.UserID, e.OpID}] = e.Seq
			l.known.bySeq[numbered{e.UserID, e.Seq}] = e.OpID
		}
		l.batch.Entries = append(l.batch.Entries, e.LedgerEntry)
		if e.Outcome == string(OK) {
			l.batch.Events = append(l.batch.Events, eventOf(e))
		}
	}
}

// numbered returns the operation that the ledger has under the entry's number.
func (l *ledger) numbered(e *entry) (op uuid.UUID, ok bool) {
	if l.known != nil {
		op, ok = l.known.bySeq[numbered{e.UserID, e.Seq}]
	}
	return op, ok
}

func (l *ledger) knows(e *entry) bool {
	if l.known == nil {
		return false
	}
	_, ok := l.known.byOp[operation{e.UserID, e.OpID}]
	return ok
}

// refuse puts e aside and freezes its account: only its own, and nothing is lost.
func (l *ledger) refuse(e *entry, reason string) {
	q := quarantined{Bucket: e.bucket, StreamID: e.StreamID, Reason: reason, Entry: string(rawEntry(e.raw))}
	if e.UserID != uuid.Nil && Bucket(e.UserID) == e.bucket {
		q.UserID = &e.UserID
		l.freeze(e, reason)
	}
	l.batch.Quarantined = append(l.batch.Quarantined, q)
}

// maxRaw is how much of an entry the quarantine keeps: it is part of a key there, and a key fits into a third of a
// page.
const maxRaw = 1500

// rawEntry returns an entry's fields as JSON. Of one that is too long to be an operation, it tells how it begins.
func rawEntry(fields map[string]any) []byte {
	size := 0
	for name, v := range fields {
		s, _ := v.(string)
		size += len(name) + len(s) + 2*entryOverhead
	}
	raw := encodeRaw(fields)
	if max(size, len(raw)) <= maxRaw {
		return raw
	}
	sum := sha256.Sum256(raw)
	return encodeRaw(map[string]any{
		"begins": strings.ToValidUTF8(string(raw[:maxRaw/2]), ""), "bytes": len(raw),
		"sha256": hex.EncodeToString(sum[:]),
	})
}

// entryOverhead is what jsonb needs for a name or a value beside its text.
const entryOverhead = 4

func encodeRaw(fields map[string]any) []byte {
	raw, err := json.Marshal(fields)
	if err != nil {
		return []byte("{}") // strings and numbers always encode
	}
	return bytes.ReplaceAll(raw, []byte(`\u0000`), []byte(`\ufffd`)) // jsonb cannot hold it
}

func (l *ledger) freeze(e *entry, reason string) {
	a := l.accounts[e.UserID]
	if a == nil {
		a = &LedgerAccount{UserID: e.UserID, UpdatedAt: e.CreatedAt}
		if a.UpdatedAt.IsZero() {
			a.UpdatedAt = time.Now().UTC()
		}
		l.accounts[e.UserID] = a
	}
	if a.Frozen == "" {
		a.Frozen = reason
		l.froze[e.UserID] = reason
	}
	l.changed[e.UserID] = true
}

// eventOf announces an operation. Its id is the operation's: the same event, however often it is made.
func eventOf(e *entry) sql.Event {
	r := resultOf(&e.LedgerEntry)
	typ := eventAdded
	if r.Kind == Deduct {
		typ = eventDeducted
	}
	return sql.Event{ID: r.OpID, AggregateType: "credits", AggregateID: r.User.String(), Type: typ, Payload: r.Body()}
}
