package prove

import (
	"context"
	"math/rand/v2"

	"github.com/nats-io/nats.go"

	"posthaste/internal/lab/local/natslog"
	"posthaste/sink/jetstream"
)

// natsKilled kills the server, which then starts again.
func natsKilled(_ context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
	server := c.stage.servers.Nats
	return "", server.Start, server.Kill()
}

// nats is the campaign's connection to NATS.
func (c *campaign) nats() *natslog.Log { return c.stage.streams.(*natslog.Log) }

func onNats(do func(js nats.JetStreamManager, name string, o nats.JSOpt) error) injection {
	return func(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
		name := jetstream.StreamName(c.config.StreamPrefix + types[r.IntN(len(types))])
		return name, nil, do(c.nats().JS, name, nats.Context(ctx))
	}
}

// natsConsumerDeleted deletes the state of a group: it gets all orders again.
func natsConsumerDeleted(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	group := []string{groupInbox, groupPlain}[r.IntN(2)]
	name := jetstream.StreamName(c.config.StreamPrefix + "order")
	return group, nil, c.nats().JS.DeleteConsumer(name, jetstream.ConsumerName(group), nats.Context(ctx))
}

// natsRefuses lets a stream refuse messages that exceed a bound below its size, and removes the bound.
func natsRefuses(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	stream := c.config.StreamPrefix + types[r.IntN(len(types))]
	limit := func(ctx context.Context, most int64, discard string) error {
		return c.nats().Set(ctx, stream, map[string]any{"max_msgs": most, "discard": discard})
	}
	err := limit(ctx, 1, "new")
	return jetstream.StreamName(stream), func(ctx context.Context) error {
		return repeat(ctx, func() (bool, error) { return limit(ctx, -1, "old") == nil, nil }) // it may be down
	}, err
}
