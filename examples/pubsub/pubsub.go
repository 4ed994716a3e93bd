// Package pubsub is an example of what best effort means: it listens to the Pub/Sub channels on which the relay announces
// events, one channel per event type.
//
// Redis keeps nothing for a subscriber. What is announced while it is not connected, or while it is so slow that Redis
// closes its connection, is gone, and nothing tells how much it was: an announcement has no number. So Pub/Sub is right
// for what may be missed, refreshing a screen or dropping a cache entry, and streams (package consumer) for everything
// else. What Run can do, and does, is to say when something may have been missed, so that the screen is read anew.
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

// Config is what Run works with.
type Config struct {
	// Client is the connection to Redis; the caller closes it.
	Client redis.UniversalClient
	// Patterns select the channels, for example "order.*".
	Patterns []string
	// Announced is called for every announcement, with the channel (the event type) and the event's payload.
	Announced func(channel, payload string)
	// Missed is called whenever announcements may have been missed: at each (re)connection, after it is made. Whoever
	// shows state reads it anew then.
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
			cfg.Logger.Warn("connection lost: what is announced now is missed", "err", err)
			down = true
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
		}
	}
	return nil
}

// listen subscribes once and passes on what it hears until the connection breaks. It does not use the client's own
// reconnection, which would hide the gap.
func listen(ctx context.Context, cfg Config, connected func()) error {
	ps := cfg.Client.PSubscribe(ctx, cfg.Patterns...)
	defer ps.Close()
	stop := context.AfterFunc(ctx, func() { _ = ps.Close() }) // ends a receive that waits
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
