package demo

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/consumer"
	"posthaste/consumer/inbox"
	"posthaste/internal/app"
)

// neighbours are further consumers, like those of other teams in a company. They are short forms of the programs in
// the folder examples, which a product does not import.
type neighbours struct {
	mu        sync.Mutex
	shipped   map[string]int // event id -> times the warehouse accepted it
	overheard atomic.Int64   // Pub/Sub messages
}

// start runs a mailer whose effect is a Postgres table, a warehouse behind HTTP, and a Pub/Sub listener.
func (n *neighbours) start(ctx context.Context, g *errgroup.Group, d *demo) error {
	if err := n.mailer(ctx, g, d); err != nil {
		return fmt.Errorf("start the mailer: %w", err)
	}
	if err := n.warehouse(ctx, g, d); err != nil {
		return fmt.Errorf("start the warehouse: %w", err)
	}
	g.Go(func() error { n.overhear(ctx, d.client); return nil })
	return nil
}

// consume runs a consumer group on the stream of orders.
func (d *demo) consume(ctx context.Context, g *errgroup.Group, group string, handle consumer.Handler) error {
	c, err := consumer.New(consumer.Options{
		Client: d.client, Group: group, Streams: []string{d.config.StreamPrefix + "order"}, Handler: handle,
		DrainTimeout: time.Second, Logger: d.log,
	})
	if err != nil {
		return err
	}
	g.Go(func() error { return c.Run(ctx) })
	return nil
}

const (
	mailerGroup = "mailer"
	// inboxRetention is longer than the history, which bounds replays.
	inboxRetention = 7 * 24 * time.Hour

	// The table has no unique key on the order on purpose: the inbox alone prevents a second mail.
	createMails = `CREATE TABLE IF NOT EXISTS confirmation_mail (
    order_id   uuid        NOT NULL,
    subject    text        NOT NULL,
    written_at timestamptz NOT NULL DEFAULT clock_timestamp()
)`
)

// mailer writes one mail per order, however often the event is delivered.
func (n *neighbours) mailer(ctx context.Context, g *errgroup.Group, d *demo) error {
	if _, err := d.pool.Exec(ctx, createMails); err != nil {
		return err
	}
	g.Go(func() error { inbox.Keep(ctx, d.pool, inboxRetention, d.log); return nil })
	return d.consume(ctx, g, mailerGroup, func(ctx context.Context, ev consumer.Event) error {
		err := pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
			first, err := inbox.Once(ctx, tx, mailerGroup, ev.ID)
			if err != nil || !first {
				return err
			}
			_, err = tx.Exec(ctx, "INSERT INTO confirmation_mail (order_id, subject) VALUES ($1, $2)",
				ev.Subject, "Your order "+ev.Subject)
			return err
		})
		if err != nil {
			// the demo's database failed or is stopping; the event is not the cause
			return consumer.Unavailable(err)
		}
		return nil
	})
}

// warehouse posts every order to a server that represents an external one.
func (n *neighbours) warehouse(ctx context.Context, g *errgroup.Group, d *demo) error {
	l, err := app.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		return err
	}
	n.shipped = map[string]int{}
	srv := &http.Server{ReadHeaderTimeout: 5 * time.Second, Handler: http.HandlerFunc(n.accept)}
	g.Go(func() error { return app.ServeHTTP(ctx, srv, l, time.Second) })
	url := "http://" + l.Addr().String() + "/"
	return d.consume(ctx, g, "webhook", func(ctx context.Context, ev consumer.Event) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(ev.Data))
		if err != nil {
			return consumer.Permanent(err)
		}
		req.Header.Set(eventHeader, ev.ID)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return consumer.Unavailable(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusNoContent {
			return consumer.Unavailable(fmt.Errorf("the warehouse answers %d", resp.StatusCode))
		}
		return nil
	})
}

// eventHeader has the event's id, the same in every delivery.
const eventHeader = "Webhook-Id"

// accept is the warehouse's handler.
func (n *neighbours) accept(w http.ResponseWriter, r *http.Request) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.shipped[r.Header.Get(eventHeader)]++
	w.WriteHeader(http.StatusNoContent)
}

// overhear counts Pub/Sub messages. They are best effort: messages sent while the connection is down are lost.
func (n *neighbours) overhear(ctx context.Context, client redis.UniversalClient) {
	ps := client.PSubscribe(ctx, "order.*")
	defer ps.Close()
	heard := ps.Channel()
	for {
		select {
		case <-ctx.Done():
			return
		case _, ok := <-heard:
			if !ok {
				return
			}
			n.overheard.Add(1)
		}
	}
}

// report waits a little for the last of the orders and prints the results of the consumers.
func (n *neighbours) report(ctx context.Context, d *demo, orders int) error {
	var mails, twice int
	err := d.until(ctx, 30*time.Second, "the mailer and the warehouse", func() bool {
		// An order has one mail, unless the inbox has failed.
		err := d.pool.QueryRow(ctx,
			"SELECT count(*), count(*) - count(DISTINCT order_id) FROM confirmation_mail").Scan(&mails, &twice)
		n.mu.Lock()
		defer n.mu.Unlock()
		return err == nil && mails >= orders && len(n.shipped) >= orders
	})
	n.mu.Lock()
	defer n.mu.Unlock()
	fmt.Fprintf(d.out, "The mailer wrote %d mails (%d twice); the warehouse accepted %d orders; %d were overheard on "+
		"Pub/Sub\n",
		mails, twice, len(n.shipped), n.overheard.Load())
	return err
}
