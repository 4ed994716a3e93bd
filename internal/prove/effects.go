package prove

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"posthaste/consumer"
	"posthaste/consumer/inbox"
	"posthaste/internal/app"
	"posthaste/internal/lab/local/natslog"
	"posthaste/internal/pause"
	"posthaste/sql"
)

// The consumer groups. Each one stores its effects in its own table.
const (
	groupInbox = "prove-inbox"
	groupPlain = "prove-plain"
	// groupAway has no consumer.
	groupAway = "prove-away"

	// The tables deliberately have no unique keys: only the inbox prevents a second effect. Without the inbox, a second
	// effect is allowed.
	createEffects = `CREATE TABLE IF NOT EXISTS prove_effect (event uuid NOT NULL);
CREATE TABLE IF NOT EXISTS prove_delivery (event uuid NOT NULL);`
)

// Consume runs in each consumer process of a campaign: it is a member of both groups until ctx ends.
func Consume(ctx context.Context, c app.Config) error {
	config, err := sql.PoolConfig(c.PostgresURL, c.Schema, "prove consumer")
	if err != nil {
		return err
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	handlers := map[string]consumer.Handler{
		groupInbox: func(ctx context.Context, ev consumer.Event) error {
			err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				first, err := inbox.Once(ctx, tx, groupInbox, ev.ID)
				if err != nil || !first {
					return err
				}
				_, err = tx.Exec(ctx, "INSERT INTO prove_effect (event) VALUES ($1)", ev.ID)
				return err
			})
			return unavailable(err)
		},
		groupPlain: func(ctx context.Context, ev consumer.Event) error {
			_, err := pool.Exec(ctx, "INSERT INTO prove_delivery (event) VALUES ($1)", ev.ID)
			return unavailable(err)
		},
	}
	if c.SinkURL != "" {
		return consumeNats(ctx, c, handlers)
	}
	client, err := c.ReaderClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	g, gctx := errgroup.WithContext(ctx)
	for group, handler := range handlers {
		cons, err := consumer.New(consumer.Options{
			Client: client, Group: group, Streams: []string{c.StreamPrefix + "order"}, Handler: handler,
			DrainTimeout: c.DrainTimeout, Logger: c.Logger(),
		})
		if err != nil {
			return err
		}
		g.Go(func() error { return cons.Run(gctx) })
	}
	if err := g.Wait(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// consumeNats is a member of groups of the stream of orders in JetStream.
func consumeNats(ctx context.Context, c app.Config, handlers map[string]consumer.Handler) error {
	log, err := natslog.Open(c.SinkURL)
	if err != nil {
		return err
	}
	defer log.Close()
	var members sync.WaitGroup
	for group, handler := range handlers {
		members.Go(func() {
			for ctx.Err() == nil { // a stream or a group that was deleted is there again later
				err := log.Consume(ctx, c.StreamPrefix+"order", group, func(ctx context.Context, id string) error {
					return handler(ctx, consumer.Event{ID: id})
				})
				c.Logger().Error("consuming ended", "group", group, "err", err)
				pause.For(ctx, 200*time.Millisecond)
			}
		})
	}
	members.Wait()
	return nil
}

// unavailable marks an error that the event did not cause.
func unavailable(err error) error {
	if err == nil {
		return nil
	}
	return consumer.Unavailable(err)
}
