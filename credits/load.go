package credits

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
)

const (
	// loadLock is how long a load may take before another process may start one.
	loadLock = 3 * time.Second
	// absentFor is how long Redis caches that a user has no account.
	absentFor = 5 * time.Second
)

// errLoading means that the account is not in Redis yet, or has just been loaded.
var errLoading error = retryable{fmt.Errorf("%w: an account is being loaded from the ledger", ErrUnavailable)}

// load copies a user's account from the ledger into Redis. At most one load per user runs in a process, and one in all
// processes. If create is set, load makes an empty account for a user without one. It always returns an error:
// errLoading, after which the function may be called again, or another one.
func (b *Bank) load(ctx context.Context, user uuid.UUID, create bool) error {
	key := user.String()
	if create {
		key += "+"
	}
	_, err, _ := b.loads.Do(key, func() (any, error) {
		// Other callers wait for this load, so it must not end when the first caller's client disconnects.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), loadLock)
		defer cancel()
		return nil, b.loadOnce(ctx, user, create)
	})
	return err
}

// loadOnce is load without the limit to one call per process.
func (b *Bank) loadOnce(ctx context.Context, user uuid.UUID, create bool) error {
	bkt := Bucket(user)
	v, err := b.view(ctx, bkt)
	if err != nil {
		return err
	}
	token, force := rand.Text(), 0
	if create {
		force = 1
	}
	keys := []string{accountKey(user), epochKey(bkt), lockKey(user)}
	r, err := call(ctx, b.o.Redis, fnLock, keys, v.epoch, v.floor, token, loadLock.Milliseconds(), force)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	case r[0] == "ABSENT":
		return ErrUnknownUser
	case r[0] == "LOCKED":
		return b.install(ctx, user, token, create)
	default: // LOADED, BUSY, EPOCH
		return errLoading
	}
}

// install loads the account while this process has the lock.
func (b *Bank) install(ctx context.Context, user uuid.UUID, token string, create bool) error {
	bkt := Bucket(user)
	b.metrics.loads.Inc()
	acct, row, err := accountAt(ctx, b.o.Pool, user)
	if err != nil {
		b.unlock(ctx, user, token)
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	b.learn(row)
	var absent time.Duration
	if acct == nil {
		acct = &LedgerAccount{UserID: user}
		if !create {
			absent = absentFor
		}
	}
	v := b.known(bkt)
	keys := []string{accountKey(user), epochKey(bkt), streamKey(bkt), lockKey(user)}
	r, err := call(ctx, b.o.Redis, fnLoad, keys, acct.Balance, acct.LastSeq, acct.Frozen, row.Epoch, v.floor, row.Mark,
		user.String(), token, absent.Milliseconds())
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", ErrUnavailable, err)
	case r[0] == "ABSENT":
		return ErrUnknownUser
	case r[0] != string(OK): // EXISTS, BEHIND, EPOCH: the next call of the function decides
		b.unlock(ctx, user, token)
	}
	return errLoading
}

func (b *Bank) unlock(ctx context.Context, user uuid.UUID, token string) {
	if _, err := call(ctx, b.o.Redis, fnUnlock, []string{lockKey(user)}, token); err != nil {
		b.log.Debug("lock of a load not released; it expires", "err", err)
	}
}

// Balance is a user's balance and its source.
type Balance struct {
	Balance int64
	// Seq is the number of the last operation; SyncedSeq the number of the last one in the ledger.
	Seq, SyncedSeq int64
	// Source is "cache" for Redis, "db" for the ledger.
	Source string
	// AsOf is the time of the read from Redis, or of the ledger's last entry.
	AsOf time.Time
}

// Balance returns the balance in Redis, loading the account if needed. Errors: ErrUnknownUser, ErrRecovering,
// ErrUnavailable.
func (b *Bank) Balance(ctx context.Context, user uuid.UUID) (Balance, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	if err := b.check(ctx); err != nil {
		return Balance{}, err
	}
	return insist(ctx, func() (Balance, error) { return b.get(ctx, user) })
}

func (b *Bank) get(ctx context.Context, user uuid.UUID) (Balance, error) {
	bkt := Bucket(user)
	v, err := b.view(ctx, bkt)
	if err != nil {
		return Balance{}, err
	}
	r, err := call(ctx, b.o.Redis, fnGet, []string{accountKey(user), epochKey(bkt)}, v.epoch, v.floor)
	if err != nil {
		return Balance{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	switch r[0] {
	case "MISS":
		return Balance{}, b.load(ctx, user, false)
	case "EPOCH":
		return Balance{}, b.reopen(ctx, bkt, v)
	case "UNKNOWN":
		return Balance{}, ErrUnknownUser
	}
	b.told(bkt, v.epoch, r[5])
	bal := Balance{Source: "cache", AsOf: time.Now().UTC()}
	if !parseInts(r[1:], &bal.Balance, &bal.Seq, &bal.SyncedSeq) {
		return Balance{}, fmt.Errorf("%w: %w", ErrUnavailable, errCorrupt)
	}
	return bal, nil
}

// DurableBalance returns the balance in the ledger, which may be behind the balance in Redis. It does not need Redis.
// Errors: ErrUnknownUser, ErrUnavailable.
func (b *Bank) DurableBalance(ctx context.Context, user uuid.UUID) (Balance, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	acct, _, err := accountAt(ctx, b.o.Pool, user)
	switch {
	case errors.Is(err, errBucketUnused), err == nil && acct == nil:
		return Balance{}, ErrUnknownUser
	case err != nil:
		return Balance{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return Balance{
		Balance: acct.Balance, Seq: acct.LastSeq, SyncedSeq: acct.LastSeq, Source: "db", AsOf: acct.UpdatedAt,
	}, nil
}
