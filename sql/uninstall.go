package sql

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/outbox"
)

// objects are what the migrations create, dependent objects first. The audit and the version table come last.
var objects = []string{
	"VIEW outbox_history", "VIEW outbox_backlog", "VIEW outbox_settled", "VIEW outbox_layout", "VIEW outbox_high",
	"VIEW outbox_live", "VIEW outbox_rows", "VIEW outbox_leader", "FUNCTION outbox_settling",
	"FUNCTION outbox_mark_until", "FUNCTION outbox_owned", "FUNCTION outbox_timeline", "FUNCTION outbox_stream_name",
	"FUNCTION outbox_holds", "FUNCTION outbox_publish", "FUNCTION inbox_once",
	"FUNCTION outbox_retry", "FUNCTION outbox_readable", "FUNCTION outbox_time",
	"FUNCTION outbox_bridge_refuse", "FUNCTION outbox_bridge_json", "FUNCTION outbox_bridge_id",
	"TABLE order_payments", "TABLE credit_quarantine", "TABLE credit_entries", "TABLE credit_accounts",
	"TABLE credit_epoch", "TABLE orders", "TABLE inbox",
	"TABLE outbox", "DOMAIN outbox_xid", "FUNCTION outbox_copying", "FUNCTION outbox_copy_key",
	"FUNCTION outbox_copied", "VIEW outbox_place", "FUNCTION outbox_system",
	"TABLE relay_state", "TABLE outbox_reconcile", "TABLE outbox_phantom", "TABLE outbox_dead",
	"TABLE outbox_stream", "TABLE outbox_part", "TABLE outbox_mark",
	"SEQUENCE outbox_claim", "FUNCTION outbox_guard", "FUNCTION outbox_part",
	"DOMAIN outbox_aggregate_type", "DOMAIN outbox_aggregate_id", "DOMAIN outbox_payload", "DOMAIN outbox_headers",
	"TABLE posthaste_audit", "FUNCTION posthaste_audit_guard", "TABLE " + versionTable,
}

// relations are the names of the tables and views.
func relations() (names []string) {
	for _, o := range objects {
		if kind, name, _ := strings.Cut(o, " "); kind == "TABLE" || kind == "VIEW" {
			names = append(names, name)
		}
	}
	return names
}

// Uninstall drops the publication and, if dropTables is set, the tables with their content. check may prevent the
// latter: it runs when every transaction that has written an event has ended. It may be nil.
func Uninstall(ctx context.Context, pool *pgxpool.Pool, publication string, dropTables bool,
	check func(ctx context.Context, db DB) error,
) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "DROP PUBLICATION IF EXISTS "+pgx.Identifier{publication}.Sanitize()); err != nil {
			return fmt.Errorf("drop publication %q: %w", publication, err)
		}
		if !dropTables {
			return nil
		}
		if check != nil {
			if _, err := tx.Exec(ctx, "LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE"); err != nil {
				return fmt.Errorf("lock the table outbox: %w", err)
			}
			if err := check(ctx, tx); err != nil {
				return err
			}
		}
		for _, o := range objects {
			kind, name, _ := strings.Cut(o, " ")
			if _, err := tx.Exec(ctx, "DROP "+kind+" IF EXISTS "+name); err != nil {
				return fmt.Errorf("drop %s %s: %w", strings.ToLower(kind), name, err)
			}
		}
		return nil
	})
}

// NoteTaken records streams that are about to be taken over from another database, for the owner of epoch.
func NoteTaken(ctx context.Context, db DB, streams []outbox.Stream, epoch int64) error {
	bases := make([]string, len(streams))
	for i, s := range streams {
		bases[i] = s.Base
	}
	_, err := exec(ctx, db, "note the streams that are taken over", "stream_taken", outbox.StreamNames(streams), bases,
		epoch)
	return err
}

// KnownStreams lists every stream that was published to or has unsettled events.
func KnownStreams(ctx context.Context, db DB) ([]string, error) {
	return collect(ctx, db, "list streams", pgx.RowTo[string], "stream_known")
}
