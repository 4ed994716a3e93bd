package prove

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"posthaste/internal/link"
)

// linkFaults are faults of the network between one process and one server.
func linkFaults() []*fault {
	return []*fault{
		{
			name: "link-cut", about: "connections are cut, and new ones refused", touches: touchesLinks,
			least: 200 * time.Millisecond, most: 8 * time.Second, inject: troubled(link.Trouble{Refuse: true}),
		},
		{
			name: "link-hang", about: "nothing passes; data sent meanwhile is delivered afterwards",
			touches: touchesLinks, least: time.Second, most: 15 * time.Second,
			inject: troubled(link.Trouble{Stall: true}),
		},
		{
			name: "link-slow", about: "everything arrives 5 to 250 ms later", touches: touchesLinks,
			least: 3 * time.Second, most: 10 * time.Second,
			inject: func(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
				t := link.Trouble{Delay: time.Duration(5+r.IntN(245)) * time.Millisecond}
				return troubled(t)(ctx, c, r)
			},
		},
		{
			name: "link-limited", about: "each connection carries 64 kB/s", touches: touchesLinks,
			least: 3 * time.Second, most: 10 * time.Second,
			inject: troubled(link.Trouble{BytesPerSecond: 64 << 10}),
		},
		{
			name: "link-lose-replies", about: "requests arrive, the answers do not", touches: touchesLinks,
			least: 500 * time.Millisecond, most: 6 * time.Second,
			inject: troubled(link.Trouble{LoseReplies: true}),
		},
	}
}

// chooseLink chooses a link: a relay's in half of the cases, the writers' in a quarter.
func chooseLink(names []string, r *rand.Rand) string {
	who := []string{"relay-", "relay-", "writers", ""}[r.IntN(4)]
	names = slices.DeleteFunc(names, func(name string) bool { return !strings.HasPrefix(name, who) })
	return names[r.IntN(len(names))]
}

// troubled returns an injection that disturbs one link.
func troubled(t link.Trouble) injection {
	return func(_ context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
		name := chooseLink(c.stage.linkNames(), r)
		l := c.stage.links[name]
		l.Set(t)
		return name, func(context.Context) error {
			l.Set(link.Trouble{})
			return nil
		}, nil
	}
}
