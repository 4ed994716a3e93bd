package sql

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// relations are the views and tables that the migrations made, also those of earlier versions, dependants first; others
// are what else they made.
var (
	relations = []string{
		"outbox_history", "outbox_backlog", "outbox_settled",
		"order_payments", "credit_quarantine", "credit_entries", "credit_accounts", "credit_epoch",
		"relay_state", "outbox_repair", "outbox_phantom", "outbox_loss", "outbox_dead", "outbox_stream", "outbox_part",
		"outbox_layout", "outbox_mark", "outbox_history_old", "outbox", "inbox", "orders",
		"posthaste_audit", versionTable,
	}
	others = []string{
		"SEQUENCE outbox_claim", "FUNCTION outbox_guard()", "FUNCTION outbox_history_keep()",
		"FUNCTION posthaste_audit_guard()",
	}
)

// Uninstall drops the publication and, if asked, the tables with all that is in them.
func Uninstall(ctx context.Context, pool *pgxpool.Pool, publication string, dropTables bool) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "DROP PUBLICATION IF EXISTS "+pgx.Identifier{publication}.Sanitize()); err != nil {
			return fmt.Errorf("drop publication %q: %w", publication, err)
		}
		if !dropTables {
			return nil
		}
		drop := func(kind, name string) error {
			if _, err := tx.Exec(ctx, "DROP "+kind+" IF EXISTS "+name); err != nil {
				return fmt.Errorf("drop %s %s: %w", strings.ToLower(kind), name, err)
			}
			return nil
		}
		for _, r := range relations {
			var view bool
			if err := tx.QueryRow(ctx, query("uninstall_view"), r).Scan(&view); err != nil {
				return fmt.Errorf("look what %s is: %w", r, err)
			}
			kind := "TABLE"
			if view {
				kind = "VIEW"
			}
			if err := drop(kind, r); err != nil {
				return err
			}
		}
		for _, o := range others {
			kind, name, _ := strings.Cut(o, " ")
			if err := drop(kind, name); err != nil {
				return err
			}
		}
		return nil
	})
}

// KnownStreams lists every stream published to before, and those that what is owed will go to.
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
