package prove

import (
	"context"
	"fmt"
	"math/rand/v2"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// Each sabotage breaks a promise from outside the product.
func loseEntry(ctx context.Context, c *campaign, stream string, m redis.XMessage) error {
	return c.stage.streams.Remove(ctx, stream, m.ID)
}

func repeatEntry(ctx context.Context, c *campaign, stream string, m redis.XMessage) error {
	return c.stage.streams.Add(ctx, stream, m)
}

func inventEntry(ctx context.Context, c *campaign, stream string, m redis.XMessage) error {
	m.Values["id"] = uuid.NewString()
	return repeatEntry(ctx, c, stream, m)
}

func moveGroup(ctx context.Context, c *campaign, stream string) error {
	if err := c.away(ctx, stream); err != nil {
		return err
	}
	return c.stage.client.XGroupSetID(ctx, stream, groupAway, "$").Err()
}

func changeBalance(ctx context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
	return "", nil, c.affect(ctx, "UPDATE credit_accounts SET balance = balance + 1 WHERE user_id = "+
		"(SELECT user_id FROM credit_accounts LIMIT 1)") // the first balance may not be synced yet
}

// spoiled returns an injection that calls do with an entry that was read some time ago.
func spoiled(do func(ctx context.Context, c *campaign, stream string, m redis.XMessage) error) injection {
	return func(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
		stream := c.config.StreamPrefix + types[r.IntN(len(types))]
		var m redis.XMessage
		err := repeat(ctx, func() (bool, error) {
			list, err := c.stage.streams.Newest(ctx, stream, "+", 30)
			if err != nil || len(list) < 30 {
				return false, nil
			}
			m = list[len(list)-1]
			return true, nil
		})
		if err == nil {
			err = do(ctx, c, stream, m)
		}
		return fmt.Sprintf("%s %s", stream, m.ID), nil, err
	}
}
