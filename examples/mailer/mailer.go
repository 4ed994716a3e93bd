// Package mailer is an example consumer: a confirmation mail for every order, exactly once.
//
// Its effect is a row in the table confirmation_mail, which stands for the queue of a mail server. The row and the
// record that the event was seen (package consumer/inbox) are written in one transaction, so there is one row however
// often the event is delivered. On purpose, the table has no unique key on the order: the inbox alone prevents a second
// mail.
package mailer

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/consumer/inbox"
)

// Group is the mailer's consumer group, and its name in the inbox.
const Group = "mailer"

// retention is how long the inbox keeps records: longer than events stay in the history, from which they can be
// replayed (72 h).
const retention = 7 * 24 * time.Hour

// Config configures the mailer.
type Config struct {
	// Pool is the database with posthaste's tables; the mailer creates its own table there.
	Pool *pgxpool.Pool
	// Redis has the streams. The caller closes both.
	Redis redis.UniversalClient
	// Stream is the stream of orders, outbox.order by default.
	Stream string
	// Logger and Registerer may be nil.
	Logger     *slog.Logger
	Registerer prometheus.Registerer
}

const createTable = `
CREATE TABLE IF NOT EXISTS confirmation_mail (
    order_id   uuid        NOT NULL,
    user_id    uuid        NOT NULL,
    subject    text        NOT NULL,
    body       text        NOT NULL,
    written_at timestamptz NOT NULL DEFAULT clock_timestamp()
)`

// Run writes mails until ctx ends. If the database is not reachable yet, it waits.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Stream == "" {
		cfg.Stream = "outbox.order"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c, err := consumer.New(consumer.Options{
		Client: cfg.Redis, Group: Group, Streams: []string{cfg.Stream}, Handler: Handler(cfg.Pool), Logger: cfg.Logger,
		Registerer: cfg.Registerer,
	})
	if err != nil {
		return err
	}
	if !prepare(ctx, cfg) {
		return nil
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { inbox.Keep(ctx, cfg.Pool, retention, cfg.Logger) })
	return c.Run(ctx)
}

// prepare creates the table, and retries until it succeeds. It returns false if ctx ended first.
func prepare(ctx context.Context, cfg Config) bool {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for failed := false; ctx.Err() == nil; {
		_, err := cfg.Pool.Exec(ctx, createTable)
		if err == nil {
			return true
		}
		if !failed {
			cfg.Logger.Warn("waiting for the database", "err", err)
			failed = true
		}
		select {
		case <-t.C:
		case <-ctx.Done():
		}
	}
	return false
}

// order is what the mailer needs of the payload of order.created.
type order struct {
	ID       string `json:"id"`
	UserID   string `json:"user_id"`
	Amount   int64  `json:"amount"`
	Currency string `json:"currency"`
}

// Handler writes one mail per order.created, and ignores every other event.
func Handler(pool *pgxpool.Pool) consumer.Handler {
	write := consumer.JSON(func(ctx context.Context, ev consumer.Event, o order) error {
		return classify(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			first, err := inbox.Once(ctx, tx, Group, ev.ID)
			if err != nil || !first {
				return err
			}
			_, err = tx.Exec(ctx,
				"INSERT INTO confirmation_mail (order_id, user_id, subject, body) VALUES ($1, $2, $3, $4)",
				o.ID, o.UserID, "Your order "+o.ID,
				fmt.Sprintf("Thank you. We have your order over %d %s (smallest units).", o.Amount, o.Currency))
			if err != nil {
				return fmt.Errorf("write the mail for order %s: %w", o.ID, err)
			}
			return nil
		}))
	})
	return func(ctx context.Context, ev consumer.Event) error {
		if ev.Type != "order.created" {
			return nil
		}
		return write(ctx, ev)
	}
}

// classify distinguishes a database that is unavailable, which is not the event's fault, from a statement that failed.
func classify(err error) error {
	var pe *pgconn.PgError
	switch {
	case err == nil:
		return nil
	case !errors.As(err, &pe):
		return consumer.Unavailable(err) // no answer at all
	case len(pe.Code) == 5 && pe.Code[:2] == "22":
		return consumer.Permanent(err) // data that no column takes
	case len(pe.Code) == 5 && (pe.Code[:2] == "57" || pe.Code[:2] == "53" || pe.Code[:2] == "08" ||
		pe.Code[:2] == "40"):
		return consumer.Unavailable(err) // shutting down, out of resources, connection, serialization
	}
	return err
}
