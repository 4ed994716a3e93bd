package credits

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/statement"
)

// The events of the ledger.
const (
	eventAdded    = "credits.added"
	eventDeducted = "credits.deducted"
)

// ledger is one batch to be written to Postgres. It checks each entry against the account as the preceding entries
// leave it.
type ledger struct {
	rows     map[int16]*LedgerBucket
	accounts map[uuid.UUID]*LedgerAccount
	changed  map[uuid.UUID]bool
	// bySeq and byOp are the batch's entries that the ledger already has, by number and by operation. They are nil
	// until a conflict makes the second pass necessary.
	bySeq map[numbered]uuid.UUID
	byOp  map[operation]bool
	// events are the ids of operations that events in the outbox have already: another user's, or from deleted entries.
	events map[uuid.UUID]bool

	batch ledgerBatch
	// froze are the accounts frozen by this batch.
	froze map[uuid.UUID]string
	// moved is the total change of the accounts of a bucket, which is also the change of its counter-account.
	moved map[int16]int64
	// holes is how many numbers of a bucket are missing.
	holes map[int16]int64
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

// take writes entries in tx. Usually all entries directly follow what is in the ledger. If there is a conflict, or an
// entry is older than its account, a second pass reads which of the entries the ledger already has.
func (l *ledger) take(ctx context.Context, tx pgx.Tx, entries []*entry) error {
	if err := l.lock(ctx, tx, entries); err != nil {
		return err
	}
	if !l.check(entries) {
		if err := writeBatch(ctx, tx, &l.batch); err == nil || !errors.Is(err, errConflict) {
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
	return writeBatch(ctx, tx, &l.batch)
}

// lock reads and locks the accounts.
func (l *ledger) lock(ctx context.Context, tx pgx.Tx, entries []*entry) error {
	users := map[uuid.UUID]bool{}
	for _, e := range entries {
		users[e.UserID] = true
	}
	delete(users, uuid.Nil)
	list, err := statement.Structs[LedgerAccount](ctx, tx, "lock credit accounts", query("accounts_lock"),
		slices.Collect(maps.Keys(users)))
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
	list := make([]knownEntry, 0, len(entries))
	ids := make([]uuid.UUID, 0, len(entries))
	for _, e := range entries {
		if e.fault == nil {
			list, ids = append(list, knownEntry{e.UserID, e.Seq, e.OpID}), append(ids, e.OpID)
		}
	}
	have, err := statement.Structs[knownEntry](ctx, tx, "read credit entries", query("entries_known"),
		columns(list)...)
	if err != nil {
		return err
	}
	l.bySeq, l.byOp = map[numbered]uuid.UUID{}, map[operation]bool{}
	for _, e := range have {
		l.bySeq[numbered{e.UserID, e.Seq}], l.byOp[operation{e.UserID, e.OpID}] = e.OpID, true
	}
	taken, err := statement.Rows(ctx, tx, "read the events of credits", pgx.RowTo[uuid.UUID],
		query("events_taken"), ids)
	if err != nil {
		return err
	}
	l.events = map[uuid.UUID]bool{}
	for _, id := range taken {
		l.events[id] = true
	}
	return nil
}

// check builds the batch. It returns true, with the batch incomplete, if the ledger must be read for an entry first.
func (l *ledger) check(entries []*entry) (ask bool) {
	l.batch = ledgerBatch{}
	l.changed, l.froze, l.holes = map[uuid.UUID]bool{}, map[uuid.UUID]string{}, map[int16]int64{}
	l.moved = map[int16]int64{}
	marks := map[int16]int64{}
	for b, r := range l.rows {
		marks[b] = r.Mark
	}
	for _, e := range entries {
		if a := l.accounts[e.UserID]; e.fault == nil && l.bySeq == nil && a != nil && e.Seq <= a.LastSeq {
			return true
		}
		// If an entry cannot be parsed, its number is used only if it is the next one.
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
			l.batch.Marks = append(l.batch.Marks, bucketMark{b, m, l.rows[b].Issued + l.moved[b]})
		}
	}
	return false
}

// one applies an entry, recognizes it as a duplicate, or quarantines it and freezes its account.
func (l *ledger) one(e *entry) {
	if e.fault != nil {
		l.refuse(e, reasonMalformed)
		return
	}
	if op, ok := l.bySeq[numbered{e.UserID, e.Seq}]; ok && op == e.OpID {
		return // again, after the sync was interrupted
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

// next applies an entry to an account that is not frozen, if the entry follows the account's last one.
func (l *ledger) next(a *LedgerAccount, e *entry) {
	_, taken := l.bySeq[numbered{e.UserID, e.Seq}] // true if the account's row was changed or deleted
	switch {
	case e.Seq <= a.LastSeq || taken:
		l.refuse(e, reasonFork)
	case e.Seq > a.LastSeq+1:
		l.refuse(e, reasonGap)
	case l.byOp[operation{e.UserID, e.OpID}]:
		l.refuse(e, reasonDuplicate)
	case !e.follows(a.Balance):
		l.refuse(e, reasonBalance)
	default:
		l.moved[e.bucket] += e.BalanceAfter - a.Balance
		a.Balance, a.LastSeq, a.UpdatedAt = e.BalanceAfter, e.Seq, e.CreatedAt
		l.changed[a.UserID] = true
		if l.bySeq != nil {
			l.bySeq[numbered{e.UserID, e.Seq}], l.byOp[operation{e.UserID, e.OpID}] = e.OpID, true
		}
		l.batch.Entries = append(l.batch.Entries, e.LedgerEntry)
		if e.Outcome == string(OK) {
			l.batch.Events = append(l.batch.Events, l.eventOf(e))
		}
	}
}

// refuse quarantines e and freezes its account. Other accounts are not affected.
func (l *ledger) refuse(e *entry, reason string) {
	q := quarantined{Bucket: e.bucket, StreamID: e.StreamID, Reason: reason, Entry: string(rawEntry(e.raw))}
	if e.UserID != uuid.Nil && Bucket(e.UserID) == e.bucket {
		q.UserID = &e.UserID
		l.freeze(e, reason)
	}
	l.batch.Quarantined = append(l.batch.Quarantined, q)
}

// maxRaw is how many bytes of an entry the quarantine keeps. The entry is part of an index key there, and a key must
// fit into a third of a page.
const maxRaw = 1500

// rawEntry returns an entry's fields as JSON. If an entry is too long, it returns the beginning, the length and a hash.
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

// entryOverhead is the number of bytes that jsonb adds to the text of a name or a value.
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

// eventOf returns the event of an operation. Its id is the operation's id, unless another event has that.
func (l *ledger) eventOf(e *entry) ledgerEvent {
	r := resultOf(&e.LedgerEntry)
	id := r.OpID
	if l.events[id] {
		id = uuid.New()
	} else if l.events != nil {
		l.events[id] = true
	}
	typ := eventAdded
	if r.Kind == Deduct {
		typ = eventDeducted
	}
	return ledgerEvent{id, r.User.String(), typ, string(r.Body())}
}
