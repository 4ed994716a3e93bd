package sql

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// tables are everything the migrations made, dependants first.
var tables = []string{
	"order_payments", "credit_quarantine", "credit_entries", "credit_accounts", "credit_epoch",
	"relay_state", "outbox_loss", "outbox_dead", "outbox_stream", "outbox_part", "outbox_history", "outbox", "inbox",
	"orders", versionTable,
}

// Uninstall drops the publication and, if asked, the tables with all that is in them.
func Uninstall(ctx context.Context, pool *pgxpool.Pool, publication string, dropTables bool) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "DROP PUBLICATION IF EXISTS "+pgx.Identifier{publication}.Sanitize()); err != nil {
			return fmt.Errorf("drop publication %q: %w", publication, err)
		}
		if !dropTables {
			return nil
		}
		for _, t := range tables {
			if _, err := tx.Exec(ctx, "DROP TABLE IF EXISTS "+pgx.Identifier{t}.Sanitize()); err != nil {
				return fmt.Errorf("drop table %s: %w", t, err)
			}
		}
		return nil
	})
}

// KnownStreams lists every stream published to before, and those that the rows waiting in the outbox will go to.
func KnownStreams(ctx context.Context, db DB, prefix string) ([]string, error) {
	rows, err := db.Query(ctx, query("stream_known"), prefix)
	if err != nil {
		return nil, fmt.Errorf("list streams: %w", err)
	}
	streams, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list streams: %w", err)
	}
	return streams, nil
}
