package prove

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"

	"posthaste/internal/local/natslog"
	"posthaste/internal/pause"
	"posthaste/sink/jetstream"
)

// natsKilled kills the server, which then starts again.
func natsKilled(_ context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
	server := c.stage.servers.Nats
	return "", server.Start, server.Kill()
}

func natsFrozen(_ context.Context, c *campaign, _ *rand.Rand) (string, healing, error) {
	server := c.stage.servers.Nats
	return "", func(context.Context) error { return server.Signal(syscall.SIGCONT) }, server.Signal(syscall.SIGSTOP)
}

// nats is the campaign's connection to NATS.
func (c *campaign) nats() *natslog.Log { return c.stage.streams.(*natslog.Log) }

// onNats returns an injection that calls do with one of the streams.
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

// natsRefuses bounds a stream to the messages that it has, and removes the bound.
func natsRefuses(ctx context.Context, c *campaign, r *rand.Rand) (string, healing, error) {
	name := jetstream.StreamName(c.config.StreamPrefix + types[r.IntN(len(types))])
	limit := func(ctx context.Context, most int64, discard string) error {
		var info struct{ Config map[string]any }
		reply, err := c.nats().RequestWithContext(ctx, c.nats().API+"STREAM.INFO."+name, nil)
		if err == nil {
			err = json.Unmarshal(reply.Data, &info)
		}
		if err != nil || info.Config == nil {
			return errors.Join(err, fmt.Errorf("there is no stream %s", name))
		}
		info.Config["max_msgs"], info.Config["discard"] = most, discard
		body, err := json.Marshal(info.Config)
		if err == nil {
			reply, err = c.nats().RequestWithContext(ctx, c.nats().API+"STREAM.UPDATE."+name, body)
		}
		var refused struct{ Error *nats.APIError }
		if err == nil && json.Unmarshal(reply.Data, &refused) == nil && refused.Error != nil {
			err = refused.Error
		}
		return err
	}
	err := limit(ctx, 1, "new")
	return name, func(ctx context.Context) error {
		for limit(ctx, -1, "old") != nil { // the server may be down
			if err := pause.For(ctx, 200*time.Millisecond); err != nil {
				return err
			}
		}
		return nil
	}, err
}
