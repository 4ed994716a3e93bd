package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"posthaste/consumer"
	"posthaste/examples/mailer"
	"posthaste/examples/pubsub"
	"posthaste/examples/webhook"
	"posthaste/internal/app"
)

// neighbours are the example consumers that the demo runs beside its own: what the rest of the company might do with an
// order.
type neighbours struct {
	mu        sync.Mutex
	shipped   map[string]int // event id -> times the warehouse accepted it
	overheard atomic.Int64   // Pub/Sub messages
}

// start runs a mailer whose effect is a Postgres table, a warehouse behind a signed webhook, and a Pub/Sub listener.
func (n *neighbours) start(ctx context.Context, g *errgroup.Group, d *demo) error {
	stream := d.config.StreamPrefix + "order"
	g.Go(func() error {
		return mailer.Run(ctx, mailer.Config{Pool: d.pool, Redis: d.client, Stream: stream, Log: d.log})
	})
	g.Go(func() error {
		return pubsub.Run(ctx, pubsub.Config{
			Client: d.client, Patterns: []string{"order.*"}, Announced: func(string, string) { n.overheard.Add(1) },
			Missed: func() {}, Log: d.log, // best effort: what is announced while the connection is down is not heard
		})
	})
	secret := make([]byte, 32)
	_, _ = rand.Read(secret) // never fails
	l, err := app.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		return err
	}
	n.shipped = map[string]int{}
	receiver := &http.Server{ReadHeaderTimeout: 5 * time.Second, Handler: webhook.Receiver(secret, n.accept)}
	g.Go(func() error { return app.ServeHTTP(ctx, receiver, l, time.Second) })
	handler, err := webhook.Handler("http://"+l.Addr().String()+"/", secret, nil)
	if err != nil {
		return err
	}
	c, err := consumer.New(consumer.Options{
		Client: d.client, Group: webhook.Group, Streams: []string{stream}, Handler: handler, DrainTimeout: time.Second, Log: d.log,
	})
	if err != nil {
		return err
	}
	g.Go(func() error { return c.Run(ctx) })
	return nil
}

// report says what they did with so many orders, waiting a little for the last.
func (n *neighbours) report(ctx context.Context, d *demo, orders int) error {
	var mails, twice int
	err := d.until(ctx, 30*time.Second, "the mailer and the warehouse", func() bool {
		// An order has one mail, or the inbox has failed.
		err := d.pool.QueryRow(ctx, `SELECT count(*), count(*) - count(DISTINCT order_id) FROM confirmation_mail`).Scan(&mails, &twice)
		n.mu.Lock()
		defer n.mu.Unlock()
		return err == nil && mails >= orders && len(n.shipped) >= orders
	})
	n.mu.Lock()
	defer n.mu.Unlock()
	fmt.Fprintf(d.out, "The mailer wrote %d mails (%d twice); the warehouse accepted %d orders; %d were overheard on Pub/Sub\n",
		mails, twice, len(n.shipped), n.overheard.Load())
	return err
}

// accept is the warehouse's own work.
func (n *neighbours) accept(_ context.Context, d webhook.Delivery) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.shipped[d.ID]++
	return nil
}
