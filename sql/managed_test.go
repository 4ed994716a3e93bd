package sql_test

import (
	"log/slog"
	"testing"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// managed returns a store whose role owns the tables, on a server that refuses its timeline and its identifier.
func managed(t *testing.T, d *testenv.Database) (*sql.Store, string) {
	t.Helper()
	d.Exec(t, "REVOKE EXECUTE ON FUNCTION pg_walfile_name(pg_lsn), pg_control_system() FROM PUBLIC")
	_, url := role(t, d, "managed", "CREATE ON DATABASE "+d.Name, "CREATE ON SCHEMA public")
	must(t, fails(sql.Migrate(t.Context(), url, "public", slog.New(slog.DiscardHandler))))
	s := sql.NewStore(relayPool(t, url), "test", 0)
	must(t, s.Register(t.Context()))
	return s, url
}

// Where the server refuses its timeline, a restart ends the ownership, and the next owner compares the streams.
func TestAnUnknownTimelineEndsWithTheServer(t *testing.T) {
	t.Parallel()
	server := testenv.NewServer(t)
	d := server.Empty(t)
	s, url := managed(t, d)
	o := succeed(t, s)
	must(t, fails(s.NoteStream(t.Context(), "outbox.order", "outbox.order", o.Epoch)))
	must(t, fails(s.BeginPass(t.Context(), o)))
	compared := func() int {
		return testenv.Value[int](t, d, "SELECT count(*) FROM outbox_reconcile WHERE recall AND NOT back")
	}
	if o = succeed(t, s); compared() != 0 {
		t.Errorf("%d streams are compared after an adoption without a restart", compared())
	}
	must(t, server.Stop("fast"))
	must(t, server.Start(t.Context()))
	d.Pool.Reset()
	s = sql.NewStore(relayPool(t, url), "test", 0)
	wantErr(t, fails(s.BeginPass(t.Context(), o)), outbox.ErrSuperseded)
	succeed(t, s)
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM outbox_reconcile"); compared() != 1 || n != 1 {
		t.Errorf("%d of %d notes are comparisons, want 1 of 1", compared(), n)
	}
}

// Where the server refuses its identifier, data of another server are a copy, even under the same oid.
func TestACopyWithoutAnIdentifier(t *testing.T) {
	t.Parallel()
	var to [2]*testenv.Database
	for i := range to {
		to[i] = testenv.NewServer(t).Empty(t)
	}
	s, _ := managed(t, to[0])
	succeed(t, s)
	_, url := managed(t, to[1])
	const place = "SELECT oid FROM pg_database WHERE datname = current_database()"
	if a, b := testenv.Value[uint32](t, to[0], place), testenv.Value[uint32](t, to[1], place); a != b {
		t.Fatalf("the databases have the oids %d and %d: this test needs the same", a, b)
	}
	row := testenv.Value[string](t, to[0], "SELECT relay_state::text FROM relay_state")
	to[1].Exec(t, "DELETE FROM relay_state")
	to[1].Exec(t, "INSERT INTO relay_state SELECT ($1::text::relay_state).*", row)
	source := testenv.Value[string](t, to[1], "SELECT source::text FROM relay_state")
	must(t, sql.NewStore(relayPool(t, url), "test", 0).Register(t.Context()))
	if after := testenv.Value[string](t, to[1], "SELECT source::text FROM relay_state"); after == source {
		t.Error("the copy has the source of the original")
	}
	if after := testenv.Value[string](t, to[0], "SELECT source::text FROM relay_state"); after != source {
		t.Error("the original has another source")
	}
}
