package prove

import (
	"context"
	"fmt"
	"math/rand/v2"
)

// loadFaults are loads that writers may cause at any time, but rarely do.
func loadFaults() []*fault {
	return []*fault{
		{
			name: "large-transaction", about: "one transaction with 2,000 to 50,000 events", touches: touchesLoad,
			inject: func(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
				n := min(2_000+r.IntN(48_000), 30*c.options.Rate)
				return fmt.Sprintf("%d events", n), nil,
					c.writers.one(ctx, types[r.IntN(len(types))], n, padding(r, 40))
			},
		},
		{
			name: "large-events", about: "ten events of 1 MB in one transaction", touches: touchesLoad,
			inject: func(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
				return "", nil, c.writers.one(ctx, types[r.IntN(len(types))], 10, padding(r, largePayload))
			},
		},
	}
}
