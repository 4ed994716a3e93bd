package credits

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/redisurl"
	"posthaste/sql"
)

// ownership determines which database the balances belong to. The keys of balances are the same for every database: a
// second database on the same Redis would write the first one's operations into its own ledger.
type ownership struct {
	redis redis.UniversalClient
	pool  *sql.Pool
	// source is the last source that Postgres returned. It may change if another server gets the same address.
	source atomic.Pointer[string]
	// ours is the database's source, if at the last check the balances belonged to it or had no owner.
	ours atomic.Pointer[string]
}

// errOwnerUnknown means that Postgres did not return the database's source.
var errOwnerUnknown = errors.New("the owner of the balances is not known")

// ErrForeign means that the balances belong to another database. An operator must decide. It is an ErrUnavailable.
var ErrForeign = fmt.Errorf("%w: the balances in this Redis are those of another database", ErrUnavailable)

// ForeignRemedy is the remedy for ErrForeign.
const ForeignRemedy = "posthaste adopt, if the balances are this database's now; else another Redis"

// check returns nil if the balances belong to this database, or if they had no owner and have been claimed.
//
// If Postgres does not return the source, and trust is set, check uses the last known source, and returns nil if no
// source is known. Without trust, that is an error.
//
// If Redis does not answer, check returns nil if its last answer was that the balances belong to this database: in a
// cluster, operations on other nodes need not wait for the node that has the owner key. Errors: ErrForeign, and those
// of the servers.
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
		// If Redis is out of memory, it refuses the claim. The next check repeats it.
		if err := o.redis.SetNX(ctx, ownerKey, mine, 0).Err(); err != nil && !redisurl.IsReply(err) {
			return fmt.Errorf("claim the balances: %w", err)
		}
		theirs, err = Owner(ctx, o.redis) // another database may have claimed them first
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

// mine returns the source of this database, "" if no relay has run on it yet.
func (o *ownership) mine(ctx context.Context, trust bool) (source string, known bool) {
	if trust { // operations wait for this query; the limit is longer until Postgres has answered once
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

// Owner returns the source of the database that the balances in Redis belong to; "" if they have no owner.
func Owner(ctx context.Context, client redis.UniversalClient) (string, error) {
	s, err := client.Get(ctx, ownerKey).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return "", fmt.Errorf("read the owner of the balances: %w", err)
	}
	return s, nil
}

// TakeOver assigns the balances in Redis to the database with this source. Operations that its ledger does not have
// freeze their accounts.
func TakeOver(ctx context.Context, client redis.UniversalClient, source string) error {
	if err := client.Set(ctx, ownerKey, source, 0).Err(); err != nil {
		return fmt.Errorf("take over the balances: %w", err)
	}
	return nil
}
