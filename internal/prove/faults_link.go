package prove

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"posthaste/internal/lab/link"
	"posthaste/internal/lab/oracle"
)

// chooseLink chooses a link: a relay's in half of the cases, the writers' in a quarter.
func chooseLink(names []string, r *rand.Rand) string {
	who := []string{"relay-", "relay-", "writers", ""}[r.IntN(4)]
	names = slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, who) })
	return names[r.IntN(len(names))]
}

// troubled returns an injection that disturbs one link.
func troubled(t link.Trouble) injection {
	return func(_ context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
		name := chooseLink(slices.Sorted(maps.Keys(c.stage.links)), r)
		l := c.stage.links[name]
		l.Set(t)
		return name, func(context.Context) error {
			l.Set(link.Trouble{})
			return nil
		}, nil
	}
}

func slowed(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	return troubled(link.Trouble{Delay: time.Duration(5+r.IntN(245)) * time.Millisecond})(ctx, c, r)
}

// largeTransaction writes one with 2,000 to 50,000 events.
func largeTransaction(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	n := min(2_000+r.IntN(48_000), 30*c.options.Rate)
	return fmt.Sprintf("%d events", n), nil, c.writers.one(ctx, types[r.IntN(len(types))], n, oracle.Padding(r, 40))
}

func largeEvents(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	return "", nil, c.writers.one(ctx, types[r.IntN(len(types))], 10, oracle.Padding(r, largePayload))
}
