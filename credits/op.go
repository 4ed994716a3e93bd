package credits

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// Limits of one operation and of a balance.
const (
	MaxAmount    = 999_999_999_999
	MaxBalance   = 999_999_999_999_999
	MaxReference = 255
)

// Kind is what an operation does.
type Kind string

// The kinds of operations.
const (
	Add    Kind = "add"
	Deduct Kind = "deduct"
)

// Outcome is the outcome of an operation. It never changes.
type Outcome string

// The outcomes of operations. A refused operation stays refused, even if the balance changes later.
const (
	OK           Outcome = "OK"
	Insufficient Outcome = "INSUFFICIENT"
	Overflow     Outcome = "OVERFLOW"
)

// Op is one change of a balance.
type Op struct {
	User uuid.UUID
	// ID identifies the operation; see OpID. Two operations of one user must have different ids.
	ID uuid.UUID
	// Fingerprint identifies the command. A different command with the same ID is refused.
	Fingerprint [17]byte
	Kind        Kind
	// Amount is 1 … MaxAmount.
	Amount int64
	// Reference is text of the client, at most MaxReference bytes of UTF-8 without zero bytes. The ledger keeps it.
	Reference string
	// MintedAt is the time at which the idempotency key was created, if the key contains it (UUIDv7), otherwise zero.
	// For a young key, the ledger need not be read: Redis still has the outcome of every operation of that age.
	MintedAt time.Time
}

func (o *Op) fp() string { return base64.RawURLEncoding.EncodeToString(o.Fingerprint[:]) }

// Result is an operation and its outcome.
type Result struct {
	OpID   uuid.UUID `json:"op_id"`
	User   uuid.UUID `json:"user_id"`
	Kind   Kind      `json:"kind"`
	Amount int64     `json:"amount"`
	// Balance is the balance after the operation. A refused operation does not change it.
	Balance int64 `json:"balance"`
	// Seq is the operation's number in the account.
	Seq int64 `json:"seq"`
	// Durability is memory, replicated or fsynced.
	Durability string  `json:"durability"`
	Outcome    Outcome `json:"-"`
	// At is when Redis carried out the operation.
	At time.Time `json:"-"`
	// Replayed is set when the operation had been carried out, or refused, before this call.
	Replayed bool `json:"-"`
}

// Body returns the response to a successful operation, which is also the payload of its event. Every call returns the
// same bytes.
func (r *Result) Body() []byte {
	b, err := json.Marshal(r)
	if err != nil {
		panic(err) // strings and integers
	}
	return b
}

func resultOf(e *LedgerEntry) Result {
	return Result{
		OpID: e.OpID, User: e.UserID, Kind: Kind(e.Kind), Outcome: Outcome(e.Outcome), Amount: e.Amount,
		Balance: e.BalanceAfter, Seq: e.Seq, Durability: e.Durability, At: e.CreatedAt,
	}
}

// streamTime returns the time in the id of a stream entry. Ids only increase: after an entry that was added by hand
// with a far future time, all later ids have that time. streamTime refuses times that Postgres cannot store.
func streamTime(id string) (time.Time, bool) {
	const most = 253_402_300_799_000 // the end of the year 9999
	ms, _, ok := strings.Cut(id, "-")
	n, err := strconv.ParseUint(ms, 10, 64)
	return time.UnixMilli(int64(min(n, most))).UTC(), ok && err == nil
}

var errMalformed = errors.New("malformed")

// entry is a stream entry to be written to the ledger.
type entry struct {
	LedgerEntry
	bucket int16
	// fault is why the entry cannot be parsed, or nil.
	fault error
	// n is the operation's number in the bucket.
	n int64
	// raw are the fields of the stream entry.
	raw map[string]any
}

// parseEntry parses a stream entry. If it returns an error, the entry has the fields that could be parsed.
func parseEntry(bucket int16, streamID string, values map[string]any) (*entry, error) {
	e := &entry{bucket: bucket, raw: values}
	e.StreamID = streamID
	var errs []error
	check := func(name string, ok bool) {
		if !ok {
			errs = append(errs, fmt.Errorf("%s: %w", name, errMalformed))
		}
	}
	str := func(name string) string { s, _ := values[name].(string); return s }
	num := func(name string, least, most int64) int64 {
		n, err := strconv.ParseInt(str(name), 10, 64)
		check("field "+name, err == nil && n >= least && n <= most)
		return n
	}
	id := func(name string) uuid.UUID {
		u, err := uuid.Parse(str(name))
		check("field "+name, err == nil)
		return u
	}
	const most = 1 << 53
	e.n = num("n", 1, most)
	e.UserID, e.OpID = id("u"), id("o")
	e.Seq, e.Epoch = num("q", 1, most), num("e", 1, most)
	e.Amount, e.BalanceAfter = num("a", 1, MaxAmount), num("b", 0, MaxBalance)
	e.Kind, e.Outcome, e.Durability, e.Reference = str("k"), str("c"), str("d"), str("r")
	var err error
	e.Fingerprint, err = base64.RawURLEncoding.DecodeString(str("f"))
	check("field f", err == nil && len(e.Fingerprint) > 0 && len(e.Fingerprint) <= 33)
	var ok bool
	e.CreatedAt, ok = streamTime(e.StreamID)
	check("id", ok)
	if !storable(e.Reference) {
		e.Reference = ""
		check("field r", false)
	}
	check("fields k, c, d", e.closed())
	return e, errors.Join(errs...)
}

// storable reports whether the ledger can store a reference.
func storable(reference string) bool {
	return len(reference) <= MaxReference && utf8.ValidString(reference) && !strings.ContainsRune(reference, 0)
}

// closed checks the fields that have a fixed set of values.
func (e *entry) closed() bool {
	return slices.Contains([]Outcome{OK, Insufficient, Overflow}, Outcome(e.Outcome)) &&
		slices.Contains([]Kind{Add, Deduct}, Kind(e.Kind)) &&
		slices.Contains([]string{durMemory, durReplicated, durFsynced}, e.Durability) &&
		(e.UserID == uuid.Nil || Bucket(e.UserID) == e.bucket)
}

// follows reports whether the entry's balance is right if the balance before it was balance.
func (e *entry) follows(balance int64) bool {
	after := balance + e.Amount
	if e.Kind == string(Deduct) {
		after = balance - e.Amount
	}
	switch Outcome(e.Outcome) {
	case Insufficient:
		return after < 0 && e.BalanceAfter == balance
	case Overflow:
		return after > MaxBalance && e.BalanceAfter == balance
	default:
		return after == e.BalanceAfter && after >= 0 && after <= MaxBalance
	}
}
