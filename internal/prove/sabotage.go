package prove

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
)

// sabotages break promises from outside the product, to show that a campaign detects it. They must be chosen by name:
// all does not include them.
func sabotages() []*fault {
	return []*fault{
		{
			name: "sabotage-lose", about: "an entry is deleted from a stream", touches: touchesRedis,
			inject: spoiled(func(ctx context.Context, c *campaign, stream string, m redis.XMessage) error {
				return c.stage.client.XDel(ctx, stream, m.ID).Err()
			}),
		},
		{
			name: "sabotage-duplicate", about: "an entry is added to a stream again", touches: touchesRedis,
			inject: spoiled(func(ctx context.Context, c *campaign, stream string, m redis.XMessage) error {
				return c.stage.client.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: m.Values}).Err()
			}),
		},
		{
			name: "sabotage-phantom", about: "an event that no writer wrote is added to a stream",
			touches: touchesRedis,
			inject: spoiled(func(ctx context.Context, c *campaign, stream string, m redis.XMessage) error {
				m.Values["id"] = uuid.NewString()
				return c.stage.client.XAdd(ctx, &redis.XAddArgs{Stream: stream, Values: m.Values}).Err()
			}),
		},
		{
			name: "sabotage-group", about: "a group that never reads is moved to the end of its stream",
			touches: touchesRedis,
			inject: onStream(func(ctx context.Context, c *campaign, stream string) error {
				if err := c.away(ctx, stream); err != nil {
					return err
				}
				return c.stage.client.XGroupSetID(ctx, stream, groupAway, "$").Err()
			}),
		},
		{
			name: "sabotage-history", about: "a settled event is deleted from Postgres", touches: touchesPostgres,
			inject: statement("DELETE FROM outbox WHERE id IN (SELECT id FROM outbox o WHERE " +
				"aggregate_type = 'cart' AND NOT EXISTS (SELECT FROM outbox_backlog b WHERE b.id = o.id) LIMIT 1)"),
		},
		{
			name: "sabotage-effect", about: "an effect happens twice", touches: touchesPostgres,
			inject: statement("INSERT INTO prove_effect SELECT event FROM prove_effect LIMIT 1"),
		},
		{
			name: "sabotage-balance", about: "a balance in Postgres is changed by hand", touches: touchesPostgres,
			inject: func(ctx context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
				return "", nil, c.affect(ctx, "UPDATE credit_accounts SET balance = balance + 1 WHERE user_id = "+
					"(SELECT user_id FROM credit_accounts LIMIT 1)") // the first balance may not be synced yet
			},
		},
	}
}

// spoiled returns an injection that calls do with an entry that was read some time ago.
func spoiled(do func(ctx context.Context, c *campaign, stream string, m redis.XMessage) error) injection {
	return func(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
		stream := c.config.StreamPrefix + types[r.IntN(len(types))]
		for {
			list, err := c.stage.client.XRevRangeN(ctx, stream, "+", "-", 30).Result()
			if err == nil && len(list) == 30 {
				m := list[len(list)-1]
				return fmt.Sprintf("%s %s", stream, m.ID), nil, do(ctx, c, stream, m)
			}
			if perr := pause.For(ctx, 200*time.Millisecond); perr != nil {
				return "", nil, errors.Join(err, perr)
			}
		}
	}
}
