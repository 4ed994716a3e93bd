package sql_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

// A writer calls outbox_publish by its schema and with the rights of an INSERT alone.
func TestOutboxPublish(t *testing.T) {
	t.Parallel()
	ctx, d := t.Context(), testenv.Postgres(t)
	writer, url := role(t, d, "writer")
	c := connect(t, url)
	const call = "SELECT public.outbox_publish('order', 'o-1', 'order.created', "
	if _, err := c.Exec(ctx, call+"'{}')"); sql.SQLState(err) != pgerrcode.InsufficientPrivilege {
		t.Errorf("without the right: %v", err)
	}
	d.Exec(t, "GRANT INSERT (id, aggregate_type, aggregate_id, event_type, payload, headers) ON outbox TO "+writer)
	var id, other string
	must(t, pgx.BeginFunc(ctx, c, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL search_path = pg_catalog"); err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, call+`'{"n": 1}')::text`).Scan(&id); err != nil {
			return err
		}
		return tx.QueryRow(ctx, call+`'2', headers => '{"tenant": "acme"}')::text`).Scan(&other)
	}))
	rows := testenv.Value[[]string](t, d, `SELECT array_agg(concat_ws(' ', id, aggregate_type, aggregate_id, event_type,
		payload, headers) ORDER BY seq) FROM outbox`)
	want := id + ` order o-1 order.created {"n": 1}|` + other + ` order o-1 order.created 2 {"tenant": "acme"}`
	if strings.Join(rows, "|") != want {
		t.Errorf("rows %q, want %q", rows, want)
	}
	for args, want := range map[string]string{
		"'', 'a', 'e', '{}'":                                    "1 to 64 of A-Z a-z 0-9 _ . : -",
		"'order', repeat('x', 1025), 'e', '{}'":                 "at most 1024 bytes",
		"'order', 'a', repeat('x', 256), '{}'":                  "character varying(255)",
		"'order', 'a', 'e', NULL":                               `null value in column "payload"`,
		"'order', 'a', 'e', '{}', to_jsonb(repeat('x', 65535))": "at most 65536 bytes as text",
	} {
		_, err := c.Exec(ctx, "SELECT public.outbox_publish("+args+")")
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("outbox_publish(%s): %v, want %q", args, err, want)
		}
	}
	run(t, c, "BEGIN; "+call+"'3'); ROLLBACK", pgx.QueryExecModeSimpleProtocol)
	wantRows(t, d, 2, "outbox")
}
