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

// ownership knows whose balances these are. The keys of balances are the same for every database: a second one on the same
// Redis would take the first's operations into its own ledger.
type ownership struct {
	redis  redis.UniversalClient
	pool   *sql.Pool
	source atomic.Pointer[string] // does not change while a process lives
}

// reason says why the balances are not this database's; "" if they are, if that is not known, or if they are nobody's, and then
// they are claimed.
func (o *ownership) reason(ctx context.Context) (string, error) {
	theirs, err := Owner(ctx, o.redis)
	if err != nil {
		return "", err
	}
	mine, known := o.mine(ctx)
	if !known {
		return "", nil
	}
	if theirs == "" && mine != "" {
		// A Redis that is full refuses it, and is asked again with the next look. Who came first in between, as well.
		if err := o.redis.SetNX(ctx, ownerKey, mine, 0).Err(); err != nil && !isReply(err) {
			return "", fmt.Errorf("claim the balances: %w", err)
		}
		return "", nil
	}
	if theirs == mine {
		return "", nil
	}
	return fmt.Sprintf("the balances in this Redis are those of another database (%s): use another Redis, or run posthaste adopt if they are this one's now", theirs), nil
}

func isReply(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply)
}

// mine returns "" for a database that no relay has worked on yet. It is not known while Postgres does not answer, nor to a role
// that may not look: operations go on then, as they do without Postgres.
func (o *ownership) mine(ctx context.Context) (source string, known bool) {
	if s := o.source.Load(); s != nil {
		return *s, true
	}
	ctx, cancel := context.WithTimeout(ctx, 250*time.Millisecond) // operations wait for it
	defer cancel()
	source, err := sql.CreditOwner(ctx, o.pool)
	if err != nil {
		return "", false
	}
	if source != "" {
		o.source.Store(&source)
	}
	return source, true
}

// Owner returns the source of the database that the balances in Redis are of; "" if there is none.
func Owner(ctx context.Context, client redis.UniversalClient) (string, error) {
	s, err := client.Get(ctx, ownerKey).Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		return "", fmt.Errorf("ask whose the balances are: %w", err)
	}
	return s, nil
}

// TakeOver makes the balances in Redis those of the database with this source. What its ledger does not have of them freezes
// accounts.
func TakeOver(ctx context.Context, client redis.UniversalClient, source string) error {
	if err := client.Set(ctx, ownerKey, source, 0).Err(); err != nil {
		return fmt.Errorf("take over the balances: %w", err)
	}
	return nil
}
