package sql_test

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

// Sessions have the same settings in every database: text is UTF-8, and a commit is on disk.
func TestSessionsInADatabaseOfAnotherKind(t *testing.T) {
	t.Parallel()
	d := testenv.Encoded(t, "LATIN1")
	ctx, url := t.Context(), d.URL
	d.Exec(t, "ALTER DATABASE "+d.Name+" SET synchronous_commit = off")
	pool := relayPool(t, url)
	writer := connect(t, url+"&client_encoding=UTF8")
	run(t, writer, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'order', $1, 'order.changed', jsonb_build_object('id', $1::text)`, "größe")
	sweep := openSweep(t, url)
	parts, err := sweep.Partitions(ctx)
	must(t, err)
	s := sql.NewStore(pool, "test", 0)
	must(t, s.Register(ctx))
	claim(t, sweep, parts[0], succeed(t, s))
	pass, err := sweep.Begin(ctx, parts[0], nil)
	must(t, err)
	events, err := sweep.Page(ctx, pass, 10, 1<<20)
	must(t, err)
	if len(events) != 1 || events[0].AggregateID != "größe" || !utf8.Valid(events[0].Payload) ||
		string(events[0].Payload) != `{"id": "größe"}` {
		t.Errorf("swept %+v", events)
	}
	// Comments must be convertible to the database's encoding as well.
	files, err := filepath.Glob("*/*.sql")
	must(t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(t, err)
		if i := bytes.IndexFunc(text, func(r rune) bool { return r > 127 }); i >= 0 {
			t.Errorf("%s: %q is not ASCII", file, text[i:min(i+10, len(text))])
		}
	}
	for name, db := range map[string]sql.DB{"pool": pool, "sweep": sql.SessionOf(sweep)} {
		var commit string
		must(t, db.QueryRow(ctx, "SHOW synchronous_commit").Scan(&commit))
		if commit != "local" {
			t.Errorf("%s: synchronous_commit is %s, want local", name, commit)
		}
	}
}

// Limits of a role or a database do not end a session of posthaste or its statements. Its transactions are read
// committed, whatever the default of the database. No statement is compiled: for a few rows of many parts that takes
// far longer than running it.
func TestSettingsOfARoleDoNotCount(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	ctx := t.Context()
	names := testenv.Value[[]string](t, d, `SELECT array_agg(name) FROM pg_settings WHERE name IN ('statement_timeout',
		'lock_timeout', 'idle_in_transaction_session_timeout', 'idle_session_timeout', 'transaction_timeout')`)
	pool := func(cfg *pgxpool.Config, err error) sql.DB {
		t.Helper()
		must(t, err)
		p, err := pgxpool.NewWithConfig(ctx, cfg)
		must(t, err)
		t.Cleanup(p.Close)
		return p
	}
	const theirs = "59999ms" // none of posthaste's, and none that ends anything here
	for _, name := range names {
		d.Exec(t, "ALTER DATABASE "+d.Name+" SET "+name+" = '"+theirs+"'")
	}
	d.Exec(t, "ALTER DATABASE "+d.Name+" SET default_transaction_isolation = serializable")
	sweep := openSweep(t, d.URL)
	for session, db := range map[string]sql.DB{
		"admin": pool(sql.PoolConfig(d.URL+"&statement_timeout=1", "public", "admin")), "sweep": sql.SessionOf(sweep),
		"relay": pool(sql.RelayPoolConfig(d.URL, "public")), "replay": pool(sql.ReplayConfig(d.URL, "public")),
		"orders": pool(sql.OrderPoolConfig(d.URL, "public")),
	} {
		for _, name := range names {
			var limit string
			must(t, db.QueryRow(ctx, "SHOW "+name).Scan(&limit))
			if limit == theirs {
				t.Errorf("%s: %s is %s", session, name, limit)
			}
		}
		for name, want := range map[string]string{"transaction_isolation": "read committed", "jit": "off"} {
			var got string
			must(t, db.QueryRow(ctx, "SHOW "+name).Scan(&got))
			if got != want {
				t.Errorf("%s: %s is %s", session, name, got)
			}
		}
	}
}

// A session keeps waiting for commits, and for a standby if it did, after a reload that changes the setting.
func TestAReloadChangesNoSession(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t).Database(t)
	ctx := t.Context()
	plain := connect(t, d.URL)
	show := func(db sql.DB) (v string) {
		t.Helper()
		must(t, db.QueryRow(ctx, "SHOW synchronous_commit").Scan(&v))
		return v
	}
	system := func(value string) {
		t.Helper()
		d.Exec(t, "ALTER SYSTEM SET synchronous_commit = "+value)
		d.Exec(t, "SELECT pg_reload_conf()")
		testenv.Eventually(t, 20*time.Second, func() error {
			v := show(plain)
			return testenv.FailIf(v != value, "synchronous_commit is %s, want %s", v, value)
		})
	}
	for _, before := range []string{"on", "local", "remote_apply"} {
		system(before)
		one, err := relayPool(t, d.URL).Acquire(ctx) // the same session before and after
		must(t, err)
		sweep, err := sql.OpenSweep(ctx, d.URL, "public", "test")
		must(t, err)
		system("off")
		for name, db := range map[string]sql.DB{"pool": one, "sweep": sql.SessionOf(sweep)} {
			if v := show(db); v != before {
				t.Errorf("%s: synchronous_commit was %s and is %s after the reload", name, before, v)
			}
		}
		sweep.Close()
		one.Release()
	}
}

// A row security policy that hides rows never makes the table look empty: a statement on the table fails, and views
// show all rows.
func TestHiddenRowsAreAnError(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	ctx := t.Context()
	_, url := role(t, d, "hidden", "SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public")
	insert(t, d, "a")
	s := sql.NewStore(relayPool(t, url), "test", time.Hour)
	must(t, s.Register(ctx))
	sweep := openSweep(t, url)
	if parts, err := sweep.Partitions(ctx); err != nil || len(parts) != 1 {
		t.Fatalf("parts %v, %v", parts, err)
	}
	d.Exec(t, "ALTER TABLE outbox ENABLE ROW LEVEL SECURITY")
	if parts, err := sweep.Partitions(ctx); err != nil || len(parts) != 1 {
		t.Errorf("parts %v, %v", parts, err)
	}
	if n, _, err := s.Backlog(ctx); err != nil || n != 1 {
		t.Errorf("a backlog of %d, %v", n, err)
	}
	if mark, err := s.Audit(ctx); err != nil || len(mark.First) != 1 {
		t.Errorf("the audit: %v, %v", mark, err)
	}
	m := newMarker(t, s)
	if _, err := m.Look(ctx, outbox.Settled{}, math.MaxInt64); err != nil {
		t.Errorf("a look: %v", err)
	}
	_, err := relayPool(t, url).Exec(ctx, "SELECT FROM outbox")
	if sql.SQLState(err) != pgerrcode.InsufficientPrivilege {
		t.Errorf("a statement of the table: %v", err)
	}
	// With FORCE ROW LEVEL SECURITY the owner, and so the views, are subject to policies as well.
	owner := "owner_" + d.Name
	d.Exec(t, "CREATE ROLE "+owner)
	d.Exec(t, "ALTER TABLE outbox OWNER TO "+owner)
	d.Exec(t, "ALTER VIEW outbox_rows OWNER TO "+owner)
	d.Exec(t, "GRANT USAGE ON SCHEMA public TO "+owner)
	d.Exec(t, "ALTER TABLE outbox FORCE ROW LEVEL SECURITY")
	if _, _, err := s.Backlog(ctx); sql.SQLState(err) != pgerrcode.InsufficientPrivilege {
		t.Errorf("the backlog where policies are forced: %v", err)
	}
}

// The pool of a relay leaves the sessions of a server that takes no writes any more: another one may be the primary.
func TestAPoolLeavesAServerWithoutWrites(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t).Empty(t)
	cfg, err := sql.RelayPoolConfig(d.URL, "public")
	must(t, err)
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	defer pool.Close()
	session := func() (pid int) {
		t.Helper()
		must(t, pool.QueryRow(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
		return pid
	}
	first := session()
	testenv.Equal(t, "session while writes work", session(), first)
	d.Exec(t, "ALTER SYSTEM SET default_transaction_read_only = on")
	d.Exec(t, "SELECT pg_reload_conf()")
	testenv.Eventually(t, 5*time.Second, func() error {
		return testenv.FailIf(session() == first, "the session is the same")
	})
}
