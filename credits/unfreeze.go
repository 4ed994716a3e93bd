package credits

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/statement"
	"posthaste/sql"
)

// Account is one account in the ledger and in Redis, for operators.
type Account struct {
	UserID uuid.UUID `json:"user_id"`
	// Frozen is why the account is stopped in the ledger, RedisFrozen why in Redis; "" if it is not.
	Frozen      string `json:"frozen"`
	RedisFrozen string `json:"redis_frozen"`
	// Ledger is the balance in the ledger after operation Seq.
	Ledger int64 `json:"ledger"`
	Seq    int64 `json:"seq"`
	// Redis is the balance in Redis after operation RedisSeq; nil if the account is not in Redis.
	Redis    *int64 `json:"redis"`
	RedisSeq *int64 `json:"redis_seq"`
	// Waiting is how many of its operations are in the stream.
	Waiting int64 `json:"waiting"`
	// Difference explains why the balances do not agree; "" if they agree, or will agree once the waiting operations
	// are in the ledger.
	Difference string `json:"difference"`
	// Quarantined is the number of stream entries in quarantine, Quarantine has the first of them.
	Quarantined int64              `json:"quarantined"`
	Quarantine  []QuarantinedEntry `json:"quarantine"`

	// damaged is set if the ledger contradicts itself.
	damaged bool
}

const quarantineShown = 20

// Inspect reads an account. Errors: ErrUnknownUser.
func Inspect(ctx context.Context, c redis.UniversalClient, pool *sql.Pool, user uuid.UUID) (*Account, error) {
	r := reconciliation{redis: c, pool: pool}
	b := ledgerBalance{LedgerAccount: LedgerAccount{UserID: user}}
	cached, err := r.read(ctx, &b)
	if err != nil {
		return nil, err
	}
	if b.UpdatedAt.IsZero() && !cached.there {
		return nil, ErrUnknownUser
	}
	waiting, err := r.waiting(ctx, user)
	if err != nil {
		return nil, err
	}
	quarantine, err := statement.Structs[QuarantinedEntry](ctx, pool, "read the quarantine", query("quarantine_list"),
		user, quarantineShown)
	if err != nil {
		return nil, err
	}
	a := &Account{
		UserID: user, Frozen: b.Frozen, Ledger: b.Balance, Seq: b.LastSeq, Waiting: int64(len(waiting)),
		Quarantined: b.Quarantined, Quarantine: append([]QuarantinedEntry{}, quarantine...),
	}
	if cached.there {
		a.Redis, a.RedisSeq = &cached.balance, &cached.seq
		if a.RedisFrozen, err = c.HGet(ctx, accountKey(user), "f").Result(); err != nil && !errors.Is(err, redis.Nil) {
			return nil, fmt.Errorf("read the account from Redis: %w", err)
		}
	}
	b.Frozen = "" // otherwise the frozen state would be reported as the difference
	d, _, err := r.look(ctx, &b, cached)
	if err != nil {
		return nil, err
	}
	if d != nil {
		a.Difference, a.damaged = d.Explanation, d.Cause == causeSum || d.Cause == causeGap
	}
	return a, nil
}

// Settlement selects the balance to keep when an account is released whose balances do not agree.
type Settlement string

// The settlements.
const (
	// SettleNone releases an account only if there is nothing to settle.
	SettleNone Settlement = ""
	// SettleLedger keeps the ledger's balance and gives up the operations in quarantine.
	SettleLedger Settlement = "ledger"
	// SettleRedis keeps the balance in Redis; the difference becomes an operation of its own.
	SettleRedis Settlement = "redis"
)

// Errors of Unfreeze.
var (
	// ErrNotFrozen means that the account is not frozen.
	ErrNotFrozen = errors.New("the account is not frozen")
	// ErrUnsettled means that the balances do not agree, or that operations in quarantine would be given up, and the
	// caller did not choose a balance.
	ErrUnsettled = errors.New("the balances do not agree, or operations are in quarantine: choose which balance to " +
		"keep")
	// ErrNotInRedis means that the caller chose the balance in Redis, but Redis does not have the account.
	ErrNotInRedis = errors.New("redis does not have the account: only the ledger's balance can be kept")
	// ErrUnfit means that the caller chose the balance in Redis, but one operation cannot settle it.
	ErrUnfit = errors.New("the balance in Redis is no number, or differs by more than one operation can move: keep " +
		"the ledger's balance, and correct it by operations")
	// ErrDamaged means that the ledger contradicts itself. Only an operator can fix that.
	ErrDamaged = errors.New("the entries of the ledger do not add up to its balance: fix that first")
	// ErrWaiting means that operations of the account wait for the ledger, or that a sync is working on its bucket.
	ErrWaiting = errors.New("operations of the account are on their way into the ledger: try again in a moment")
)

// Unfreeze releases a frozen account and returns its state before the release. Errors: ErrUnknownUser, ErrNotFrozen,
// ErrUnsettled, ErrNotInRedis, ErrUnfit, ErrDamaged, ErrWaiting, and those of Apply. After an error of Apply, the
// account is released with the ledger's balance, and the difference must be settled by an operation.
func (b *Bank) Unfreeze(ctx context.Context, user uuid.UUID, s Settlement) (*Account, error) {
	var a *Account
	err := pgx.BeginFunc(ctx, b.o.Pool, func(tx pgx.Tx) error {
		// The lock keeps syncs from working on the bucket.
		rows, err := lockBuckets(ctx, tx, []int16{Bucket(user)})
		if err != nil {
			return err
		}
		if a, err = Inspect(ctx, b.o.Redis, b.o.Pool, user); err != nil {
			return err
		}
		if err := a.Releasable(s); err != nil {
			return err
		}
		if len(rows) == 0 {
			return ErrWaiting
		}
		if _, err := tx.Exec(ctx, query("account_thaw"), user); err != nil {
			return fmt.Errorf("thaw the account: %w", err)
		}
		return nil
	})
	if err != nil {
		return a, err
	}
	// Redis comes second: until then the account stays frozen in Redis, and the next request loads it from the released
	// account in the ledger.
	if err := b.o.Redis.Del(ctx, accountKey(user)).Err(); err != nil {
		return a, fmt.Errorf("drop the account from Redis, so that it is loaded again: %w", err)
	}
	if s != SettleRedis || a.Redis == nil || *a.Redis == a.Ledger {
		return a, nil
	}
	return a, b.settle(ctx, a)
}

// Releasable returns nil if Unfreeze would release the account. Errors: ErrNotFrozen, ErrDamaged, ErrWaiting,
// ErrUnsettled, ErrNotInRedis, ErrUnfit.
func (a *Account) Releasable(s Settlement) error {
	switch {
	case a.Frozen == "" && a.RedisFrozen == "":
		return ErrNotFrozen
	case a.damaged:
		return ErrDamaged
	case a.Waiting > 0:
		return ErrWaiting
	case s == SettleNone && (a.Quarantined > 0 || a.Difference != "" || a.Redis != nil && *a.Redis != a.Ledger):
		// Equal balances prove nothing if operations are in quarantine: after a rebuild, Redis has no balance or one
		// loaded from the ledger.
		return ErrUnsettled
	case s == SettleRedis && a.Redis == nil:
		return ErrNotInRedis
	case s == SettleRedis && (*a.Redis < 0 || max(*a.Redis-a.Ledger, a.Ledger-*a.Redis) > MaxAmount):
		return ErrUnfit
	}
	return nil
}

// settle applies the difference as an operation. Its id depends only on the user, the ledger's sequence number and the
// number of operations in quarantine, so it cannot be applied twice. A settlement that was quarantined itself does not
// count.
func (b *Bank) settle(ctx context.Context, a *Account) error {
	sum := sha256.Sum256(fmt.Appendf(nil, "settle %s %d %d", a.UserID, a.Seq, a.Quarantined))
	op := Op{
		User: a.UserID, ID: OpID([16]byte(sum[:16])), Kind: Add, Amount: *a.Redis - a.Ledger,
		Reference: "settlement of a frozen account",
	}
	if op.Amount < 0 {
		op.Kind, op.Amount = Deduct, -op.Amount
	}
	copy(op.Fingerprint[1:], sum[16:])
	res, err := b.Apply(ctx, op)
	if err == nil && res.Outcome != OK {
		err = fmt.Errorf("the settlement was refused: %s", res.Outcome)
	}
	return err
}
