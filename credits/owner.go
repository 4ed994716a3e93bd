package credits

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/sql"
)

// ownership knows whose balances these are. The keys of balances are the same for every database: a second one on the
// same Redis would take the first's operations into its own ledger.
type ownership struct {
	redis redis.UniversalClient
	pool  *sql.Pool
	// source is what Postgres last said. It may change: another server may come under the same address.
	source atomic.Pointer[string]
	// ours is our source, if the balances were last seen to be of it, or of nobody.
	ours atomic.Pointer[string]
}

// errOwnerUnknown means that Postgres does not say who this database is.
var errOwnerUnknown = errors.New("the owner of the balances is not known")

// ErrForeign means that the balances are another database's, until a person decides otherwise. It is an ErrUnavailable.
var ErrForeign = fmt.Errorf("%w: the balances in this Redis are those of another database", ErrUnavailable)

// ForeignRemedy is what to do about ErrForeign.
const ForeignRemedy = "posthaste adopt, if the balances are this database's now; else another Redis"

// check returns nil if the balances are this database's, or if they are nobody's, and then they are claimed. Without
// Postgres, and for a role that may not look, what was last known counts if trust is set, and nothing is a reason not
// to go on; otherwise that is an error. Without an answer of Redis, what it last said of this database counts: in a
// cluster the others do not wait for the one node that knows. Errors: ErrForeign, and those of the servers.
func (o *ownership) check(ctx context.Context, trust bool) error {
	mine, known := o.mine(ctx, trust)
	switch {
	case !known && trust:
		return nil
	case !known:
		return errOwnerUnknown
	}
	theirs, err := Owner(ctx, o.redis)
	if err == nil && theirs == "" && mine != "" {
		// A Redis that is full refuses it, and is asked again with the next look.
		if err := o.redis.SetNX(ctx, ownerKey, mine, 0).Err(); err != nil && !isReply(err) {
			return fmt.Errorf("claim the balances: %w", err)
		}
		theirs, err = Owner(ctx, o.redis) // somebody else's claim may have come first
	}
	switch last := o.ours.Load(); {
	case err != nil && last != nil && *last == mine:
		return nil
	case err != nil:
		return err
	case theirs == "" || theirs == mine:
		o.ours.Store(&mine)
		return nil
	}
	return fmt.Errorf("%w (%s); remedy: %s", ErrForeign, theirs, ForeignRemedy)
}

func isReply(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply)
}

// mine returns "" for a database that no relay has worked on yet.
func (o *ownership) mine(ctx context.Context, trust bool) (source string, known bool) {
	if trust { // operations wait for it, and do without Postgres otherwise; not before they have known, though
		most := time.Second
		if o.source.Load() != nil {
			most = 100 * time.Millisecond
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, most)
		defer cancel()
	}
	source, err := ledgerOwner(ctx, o.pool)
	if err == nil {
		o.source.Store(&source)
		return source, true
	}
	if last := o.source.Load(); trust && last != nil {
		return *last, true
	}
	return "", false
}

// Owner returns the source of the database that the balances in Redis are of; "" if there is none.
func Owner(ctx context.Context, client redis.UniversalClient) (string, error) {
	s, err := client.Get(ctx, ownerKey).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return "", fmt.Errorf("read the owner of the balances: %w", err)
	}
	return s, nil
}

// TakeOver makes the balances in Redis those of the database with this source. What its ledger does not have of them
// freezes accounts.
func TakeOver(ctx context.Context, client redis.UniversalClient, source string) error {
	if err := client.Set(ctx, ownerKey, source, 0).Err(); err != nil {
		return fmt.Errorf("take over the balances: %w", err)
	}
	return nil
}
