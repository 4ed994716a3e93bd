// Package pubsub is an example of what best effort means: it listens to the Pub/Sub channels on which the relay
// announces events, one channel per event type.
//
// Redis stores nothing for a subscriber. Announcements are lost while it is not connected, or while it is so slow that
// Redis closes its connection, and it cannot tell how many, because announcements are not numbered. So use Pub/Sub for
// what may be missed, such as refreshing a screen or dropping a cache entry, and streams (package consumer) for
// everything else. Run reports when announcements may have been missed, so that the screen can be read again.
package pubsub

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/redis/go-redis/v9"
)

// Config configures Run.
type Config struct {
	// Client is the connection to Redis; the caller closes it.
	Client redis.UniversalClient
	// Patterns select the channels, for example "order.*".
	Patterns []string
	// Announced is called for every announcement, with the channel (the event type) and the event's payload.
	Announced func(channel, payload string)
	// Missed is called whenever announcements may have been missed: after each connection and reconnection. A program
	// that shows state reads it again then.
	Missed func()
	// Logger may be nil.
	Logger *slog.Logger
}

// quiet is how long the connection may be silent before it is checked.
const quiet = 5 * time.Second

// Run listens until ctx ends.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Client == nil || len(cfg.Patterns) == 0 || cfg.Announced == nil || cfg.Missed == nil {
		return errors.New("pubsub: client, patterns, Announced and Missed are needed")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	down := false
	for ctx.Err() == nil {
		err := listen(ctx, cfg, func() {
			if down {
				cfg.Logger.Info("connected again")
			}
			down = false
			cfg.Missed()
		})
		if ctx.Err() == nil && !down {
			cfg.Logger.Warn("connection lost: announcements are missed until it is restored", "err", err)
			down = true
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return nil
}

// listen subscribes once and forwards announcements until the connection breaks. It does not use the client's automatic
// reconnection, which would hide the gap.
func listen(ctx context.Context, cfg Config, connected func()) error {
	ps := cfg.Client.PSubscribe(ctx, cfg.Patterns...)
	defer ps.Close()
	stop := context.AfterFunc(ctx, func() { _ = ps.Close() }) // ends a blocked receive
	defer stop()
	confirmed, pinged := 0, false
	for {
		msg, err := ps.ReceiveTimeout(ctx, quiet)
		var ne net.Error
		switch {
		case errors.As(err, &ne) && ne.Timeout() && !pinged:
			if err := ps.Ping(ctx); err != nil {
				return fmt.Errorf("check the connection: %w", err)
			}
			pinged = true
			continue
		case err != nil:
			return fmt.Errorf("receive: %w", err)
		}
		pinged = false
		switch m := msg.(type) {
		case *redis.Subscription:
			if confirmed++; confirmed == len(cfg.Patterns) {
				connected()
			}
		case *redis.Message:
			cfg.Announced(m.Channel, m.Payload)
		}
	}
}
