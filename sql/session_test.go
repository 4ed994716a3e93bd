package sql_test

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"posthaste/internal/testenv"
	"posthaste/sql"
)

// Sessions are the same whatever the database was made with: what is read is UTF-8, and a commit is on disk.
func TestSessionsInADatabaseOfAnotherKind(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t, "synchronous_commit=off")
	ctx := t.Context()
	conn, err := pgx.Connect(ctx, server.URL("postgres"))
	must(t, err)
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, "CREATE DATABASE latin ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
	must(t, err)
	url := server.URL("latin")
	_, err = sql.Migrate(ctx, url, "public", slog.New(slog.DiscardHandler))
	must(t, err)

	pool := relayPool(t, url)
	writer, err := pgx.Connect(ctx, url+"&client_encoding=UTF8")
	must(t, err)
	defer writer.Close(ctx)
	_, err = writer.Exec(ctx, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'order', $1, 'order.changed', jsonb_build_object('id', $1::text)`, "größe")
	must(t, err)
	sweep, err := sql.OpenSweep(ctx, url, "public", false)
	must(t, err)
	defer sweep.Close()
	parts, err := sweep.Parts(ctx)
	must(t, err)
	tx, err := sweep.Begin(ctx)
	must(t, err)
	defer tx.Rollback(ctx) //nolint:errcheck // it ends with the test
	events, err := sweep.Take(ctx, tx, parts[0], 10, 1<<20)
	must(t, err)
	if len(events) != 1 || events[0].AggregateID != "größe" || !utf8.Valid(events[0].Payload) || string(events[0].Payload) != `{"id": "größe"}` {
		t.Errorf("swept %+v", events)
	}
	// Comments are text too: what the database has no letter for, it refuses.
	files, err := filepath.Glob("*/*.sql")
	must(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(t, err)
		if i := bytes.IndexFunc(text, func(r rune) bool { return r > 127 }); i >= 0 {
			t.Errorf("%s: %q is not ASCII", file, text[i:min(i+10, len(text))])
		}
	}
	for name, db := range map[string]sql.DB{"pool": pool, "sweep": tx} {
		var commit string
		must(t, db.QueryRow(ctx, "SHOW synchronous_commit").Scan(&commit))
		if commit != "local" {
			t.Errorf("%s: synchronous_commit is %s, want local", name, commit)
		}
	}
}
