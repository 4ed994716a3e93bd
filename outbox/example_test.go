package outbox_test

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/outbox"
)

func ExampleInsert() {
	send := func(ctx context.Context, pool *pgxpool.Pool, number string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "UPDATE invoice SET sent = true WHERE number = $1", number); err != nil {
				return err
			}
			_, err := outbox.Insert(ctx, tx, outbox.Event{
				AggregateType: "invoice", AggregateID: number, Type: "invoice.sent", Payload: []byte(`{"total": 1200}`),
				Headers: map[string]string{"tenant": "acme"},
			})
			return err
		})
	}
	_ = send
}

func ExampleInsertSQL() {
	send := func(ctx context.Context, db *sql.DB, number string) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }() // without effect after the commit
		if _, err := tx.ExecContext(ctx, "UPDATE invoice SET sent = true WHERE number = $1", number); err != nil {
			return err
		}
		_, err = outbox.InsertSQL(ctx, tx, outbox.Event{
			AggregateType: "invoice", AggregateID: number, Type: "invoice.sent", Payload: []byte(`{"total": 1200}`),
		})
		if err != nil {
			return fmt.Errorf("publish that invoice %s was sent: %w", number, err)
		}
		return tx.Commit()
	}
	_ = send
}
