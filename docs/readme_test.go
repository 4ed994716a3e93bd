package docs_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/outbox"
)

// The bodies of insertInvoice and mailInvoices are the Go code of the README.

func insertInvoice(ctx context.Context, pool *pgxpool.Pool) error {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "INSERT INTO invoice (number, total) VALUES ($1, $2)", "inv-7", 1200); err != nil {
			return err
		}
		_, err := outbox.Insert(ctx, tx, outbox.Event{
			AggregateType: "invoice", AggregateID: "inv-7", Type: "invoice.sent", Payload: []byte(`{"total": 1200}`),
		})
		return err
	})
	return err
}

func mailInvoices(
	ctx context.Context, client *redis.Client, send func(context.Context, string, json.RawMessage) error,
) error {
	c, err := consumer.New(consumer.Options{
		Client: client, Group: "mailer", Streams: []string{"outbox.invoice"},
		Handler: func(ctx context.Context, e consumer.Event) error { return send(ctx, e.Subject, e.Data) },
	})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// TestReadmeCode runs the Go code of the README, and compares it with the README.
func TestReadmeCode(t *testing.T) {
	t.Parallel()
	source := strings.ReplaceAll(read(t, "docs/readme_test.go"), "\n\t", "\n")
	n := 0
	for _, b := range (page{text: read(t, "README.md")}).blocks() {
		if b.lang == "go" {
			if n++; !strings.Contains(source, "\n"+b.text) {
				t.Errorf("README.md:%d is no part of docs/readme_test.go", b.line)
			}
		}
	}
	if n != 2 {
		t.Errorf("the README has %d blocks of Go, want 2", n)
	}
	g := newGuide(t)
	must(t, insertInvoice(t.Context(), g.db.Pool))
	ctx, cancel := context.WithCancel(t.Context())
	err := mailInvoices(ctx, g.redis.Client, func(_ context.Context, subject string, data json.RawMessage) error {
		defer cancel()
		if subject != "inv-7" || string(data) != `{"total": 1200}` {
			t.Errorf("mailed %s, %s", subject, data)
		}
		return nil
	})
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}
