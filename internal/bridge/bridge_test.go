package bridge_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/bridge"
	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

var must = testenv.Must

// debezium is the table that Debezium's outbox event router documents.
const debezium = `CREATE TABLE outboxevent (id uuid PRIMARY KEY, aggregatetype varchar(255) NOT NULL,
	aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb)`

func ofDebezium() bridge.Config {
	return bridge.Config{
		Table: "public.outboxevent", ID: "id", AggregateType: "aggregatetype", AggregateID: "aggregateid",
		EventType: "type", Payload: "payload",
	}
}

// prepared returns a database after some statements.
func prepared(t testing.TB, statements ...string) *testenv.Database {
	t.Helper()
	d := testenv.Postgres(t)
	for _, s := range statements {
		d.Exec(t, s)
	}
	return d
}

func create(t testing.TB, d *testenv.Database, c bridge.Config) int64 {
	t.Helper()
	plan, err := bridge.New(t.Context(), d.Pool, c)
	must(t, err)
	n, err := plan.Create(t.Context(), d.Pool)
	must(t, err)
	return n
}

// copies returns a column of outbox in the order of events.
func copies(t testing.TB, d *testenv.Database, column string) string {
	t.Helper()
	return testenv.Value[string](t, d, "SELECT coalesce(string_agg(("+column+
		")::text, ' ' ORDER BY seq), '') FROM outbox")
}

func want(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

// row is an event of Debezium's table.
func row(aggregate string) string {
	return "(gen_random_uuid(), 'order', '" + aggregate + "', 'made', '{}')"
}

// as connects as a new role that has some rights.
func as(t *testing.T, d *testenv.Database, suffix string, rights ...string) *pgx.Conn {
	t.Helper()
	role := d.Name + "_" + suffix
	d.Exec(t, "CREATE ROLE "+role+" "+testenv.Login(d.URL))
	for _, r := range rights {
		d.Exec(t, "GRANT "+r+" TO "+role)
	}
	c, err := pgx.Connect(t.Context(), testenv.As(d.URL, role))
	must(t, err)
	t.Cleanup(func() {
		_ = c.Close(context.Background())
		_, _ = d.Pool.Exec(context.Background(), "DROP OWNED BY "+role+" CASCADE; DROP ROLE "+role)
	})
	return c
}

// A writer with rights on its own table alone has each way of inserting copied, in order, when it commits.
func TestInsertsAreCopied(t *testing.T) {
	t.Parallel()
	d := prepared(t, debezium)
	create(t, d, ofDebezium())
	c := as(t, d, "app", "INSERT, SELECT, UPDATE, DELETE ON outboxevent")
	run := func(stmt string) {
		t.Helper()
		_, err := c.Exec(t.Context(), stmt)
		must(t, err)
	}
	run("INSERT INTO outboxevent VALUES " + row("1"))
	run("BEGIN; INSERT INTO outboxevent VALUES " + row("2") +
		"; DELETE FROM outboxevent WHERE aggregateid = '2'; COMMIT")
	run("INSERT INTO outboxevent VALUES " + row("3") + "," + row("4") + "," + row("5"))
	run("BEGIN; INSERT INTO outboxevent VALUES " + row("lost") + "; ROLLBACK")
	run("BEGIN; INSERT INTO outboxevent VALUES " + row("6") + "; SAVEPOINT s; INSERT INTO outboxevent VALUES " +
		row("lost") + "; ROLLBACK TO s; INSERT INTO outboxevent VALUES " + row("7") + "; COMMIT")
	copied := [][]any{{uuid.NewString(), "order", "8", "made", "{}"}, {uuid.NewString(), "order", "9", "made", nil}}
	_, err := c.CopyFrom(t.Context(), pgx.Identifier{"outboxevent"},
		[]string{"id", "aggregatetype", "aggregateid", "type", "payload"}, pgx.CopyFromRows(copied))
	must(t, err)
	run("WITH one AS (INSERT INTO outboxevent VALUES " + row("10") + ") INSERT INTO outboxevent VALUES " + row("11"))
	run("INSERT INTO outboxevent SELECT * FROM outboxevent WHERE aggregateid = '1' " +
		"ON CONFLICT (id) DO UPDATE SET type = 'x'")
	run("UPDATE outboxevent SET type = 'changed'")
	want(t, "outbox", copies(t, d, "aggregate_id"), "1 2 3 4 5 6 7 8 9 11 10")
	want(t, "types", testenv.Value[string](t, d, "SELECT string_agg(DISTINCT event_type, ' ') FROM outbox"), "made")
	if n := testenv.Value[int](t, d, `SELECT count(*) FROM outbox WHERE aggregate_type <> 'order'
		OR payload <> CASE aggregate_id WHEN '9' THEN 'null'::jsonb ELSE '{}' END`); n != 0 {
		t.Errorf("%d copies differ from their rows", n)
	}
	list, err := bridge.List(t.Context(), d.Pool)
	must(t, err)
	if len(list) != 1 || list[0].Fault != "" || list[0].Copied < 11 {
		t.Errorf("the list: %+v", list)
	}
	// The function is of no use to another table's owner.
	d.Exec(t, "GRANT CREATE ON SCHEMA public TO "+d.Name+"_app")
	run("CREATE TABLE mine (LIKE outboxevent)")
	name := testenv.Value[string](t, d, "SELECT tgfoid::regproc::text FROM pg_trigger "+
		"WHERE tgname = 'posthaste_bridge'")
	if _, err := c.Exec(t.Context(), "CREATE TRIGGER x AFTER INSERT ON mine EXECUTE FUNCTION "+name+"()"); err == nil {
		t.Error("another table has the trigger")
	}
}

// Rows of a partitioned table are copied once, however they get into which partition.
func TestPartitionsAreCopied(t *testing.T) {
	t.Parallel()
	d := prepared(t, `CREATE TABLE ev (id uuid, done boolean DEFAULT false, kind text, key int, body json)
		PARTITION BY LIST (done)`, "CREATE TABLE ev_new PARTITION OF ev FOR VALUES IN (false)")
	create(t, d, bridge.Config{
		Table: "public.ev", ID: "id", AggregateType: "=order", AggregateID: "key", EventType: "kind", Payload: "body",
	})
	add := func(table, key string) {
		t.Helper()
		d.Exec(t, "INSERT INTO "+table+" (id, kind, key, body) "+
			"VALUES (gen_random_uuid(), 'made', "+key+", '{\"a\": 1}')")
	}
	add("ev", "1")
	add("ev_new", "2")
	d.Exec(t, "CREATE TABLE ev_done PARTITION OF ev FOR VALUES IN (true)")
	d.Exec(t, "INSERT INTO ev_done SELECT gen_random_uuid(), true, 'made', g, '{}' FROM generate_series(3, 4) g")
	d.Exec(t, "UPDATE ev SET done = true")
	want(t, "outbox", copies(t, d, "aggregate_id"), "1 2 3 4")
	// The same id with other content is refused, not lost.
	_, err := d.Pool.Exec(t.Context(), "INSERT INTO ev SELECT id, false, 'other', 5, '{}' FROM ev WHERE key = 1")
	refused(t, err, "column id of public.ev", "unique", "posthaste's bridge", "posthaste replay --id=")
	for table, text := range map[string]string{"public.ev_new": "is a partition: use --table=ev"} {
		_, err := bridge.New(t.Context(), d.Pool, bridge.Config{
			Table: table, ID: "id", AggregateType: "=order", AggregateID: "key", EventType: "kind", Payload: "body",
		})
		oneLine(t, err, text)
	}
}

func refused(t *testing.T, err error, texts ...string) {
	t.Helper()
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		t.Errorf("not refused: %v", err)
		return
	}
	for _, text := range texts {
		testenv.Contains(t, "the refusal", pg.Message, text)
	}
}

func oneLine(t *testing.T, err error, text string) {
	t.Helper()
	if err == nil || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), text) {
		t.Errorf("error %v, want one line with %q", err, text)
	}
}

// A bridge that is created under load copies each row once: those that wait, in order, and those inserted later.
func TestWaitingRowsAreCopiedOnce(t *testing.T) {
	t.Parallel()
	d := prepared(t, debezium, "ALTER TABLE outboxevent ADD at bigserial, ADD sent boolean NOT NULL DEFAULT false",
		`INSERT INTO outboxevent
		SELECT gen_random_uuid(), 'order', 'old', 'made', to_jsonb(g), -g FROM generate_series(1, 500) g`,
		`INSERT INTO outboxevent
		SELECT gen_random_uuid(), 'order', 'sent', 'made', '{}', g, true FROM generate_series(1, 9) g`)
	// An open transaction has inserted a row: the bridge waits for it.
	tx, err := d.Pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), "INSERT INTO outboxevent VALUES "+row("open"))
	must(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	for range 3 {
		c, err := pgx.Connect(t.Context(), d.URL)
		must(t, err)
		writers.Go(func() {
			defer c.Close(context.WithoutCancel(ctx))
			for ctx.Err() == nil {
				if _, err := c.Exec(t.Context(), "INSERT INTO outboxevent VALUES "+row("new")); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	c := ofDebezium()
	c.Pending, c.OrderBy = "NOT sent -- not yet", "at"
	plan, err := bridge.New(t.Context(), d.Pool, c)
	must(t, err)
	if plan.Waiting < 500 {
		t.Errorf("%d rows wait, want at least 500", plan.Waiting)
	}
	done := make(chan error, 1)
	go func() {
		_, err := plan.Create(t.Context(), d.Pool)
		done <- err
	}()
	testenv.Eventually(t, 20*time.Second, func() error {
		n := testenv.Value[int](t, d, "SELECT count(*) FROM pg_locks "+
			"WHERE NOT granted AND mode = 'ShareRowExclusiveLock'")
		return testenv.FailIf(n == 0, "the bridge does not wait for the open transaction")
	})
	must(t, tx.Commit(t.Context()))
	must(t, <-done)
	at := testenv.Value[int](t, d, "SELECT count(*) FROM outboxevent")
	testenv.Eventually(t, 20*time.Second, func() error {
		n := testenv.Value[int](t, d, "SELECT count(*) FROM outboxevent")
		return testenv.FailIf(n < at+50, "the writers have written %d rows", n-at)
	})
	stop()
	writers.Wait()
	if n := testenv.Value[int](t, d, `SELECT count(*) FROM (SELECT id FROM outboxevent WHERE NOT sent) a
		FULL JOIN (SELECT id FROM outbox) b USING (id) WHERE a.id IS NULL OR b.id IS NULL`); n != 0 {
		t.Errorf("%d rows without a copy, or copies without a row", n)
	}
	want(t, "the order of old rows", testenv.Value[string](t, d, `SELECT bool_and(payload::int = 501 - n)::text FROM
		(SELECT payload, row_number() OVER (ORDER BY seq) AS n FROM outbox WHERE aggregate_id = 'old') x`), "true")
	list, err := bridge.List(t.Context(), d.Pool)
	must(t, err)
	if n := testenv.Value[int64](t, d, "SELECT count(*) FROM outbox"); len(list) != 1 || list[0].Waiting != 0 ||
		list[0].Copied != n || list[0].Fault != "" {
		t.Errorf("the list: %+v; %d rows are copied", list, n)
	}
	// Rows that have a copy are not copied by a second bridge.
	must(t, bridge.Drop(t.Context(), d.Pool, c.Table))
	d.Exec(t, "INSERT INTO outboxevent VALUES "+row("between"))
	testenv.Equal(t, "rows that the second bridge has copied", create(t, d, c), 1)
}

// A row that is no event is refused in the writer's transaction, with the column and the table.
func TestBadRowsAreRefused(t *testing.T) {
	t.Parallel()
	d := prepared(t, "CREATE TABLE t (key bigint, typ text, agg text, ev text, body text, head text)")
	c := bridge.Config{
		Table: "public.t", ID: "key", AggregateType: "typ", AggregateID: "agg", EventType: "ev", Payload: "body",
		Headers: "head",
	}
	create(t, d, c)
	for _, bad := range []struct{ column, value string }{
		{"key", "NULL"},
		{"typ", "NULL"},
		{"typ", "''"},
		{"typ", "'a b'"},
		{"typ", "repeat('x', 65)"},
		{"agg", "NULL"},
		{"agg", "repeat('x', 1025)"},
		{"ev", "NULL"},
		{"ev", "repeat('x', 256)"},
		{"body", "'no'"},
		{"body", "''"},
		{"body", `'"\u0000"'`},
		{"head", "'{'"},
	} {
		values := map[string]string{"key": "7", "typ": "'a'", "agg": "'b'", "ev": "'c'", "body": "'{}'", "head": "'{}'"}
		values[bad.column] = bad.value
		_, err := d.Pool.Exec(t.Context(), fmt.Sprintf("INSERT INTO t VALUES (%s, %s, %s, %s, %s, %s)", values["key"],
			values["typ"], values["agg"], values["ev"], values["body"], values["head"]))
		refused(t, err, "column "+bad.column+" of public.t must be ")
	}
	d.Exec(t, "INSERT INTO t VALUES (42, 'a', 'b', 'c', NULL, NULL)")
	// The id is one that a program in another language can compute.
	want(t, "id", copies(t, d, "id"), uuid.NewMD5(uuid.NameSpaceURL, []byte("public.t:42")).String())
	want(t, "payload", copies(t, d, "payload"), "null")
	// A bad row that waits keeps the bridge from being created; the error names it.
	must(t, bridge.Drop(t.Context(), d.Pool, c.Table))
	d.Exec(t, "INSERT INTO t VALUES (43, 'a', 'b', 'c', 'no', NULL)")
	c.Pending, c.OrderBy = "true", "key"
	plan, err := bridge.New(t.Context(), d.Pool, c)
	must(t, err)
	_, err = plan.Create(t.Context(), d.Pool)
	oneLine(t, err, `row with the id "43"`)
	d.Exec(t, "INSERT INTO t VALUES (44, 'a', 'b', 'c', 'no', NULL)") // there is no trigger
	noneLeft(t, d)
}

// A row with the id of an event in outbox is refused with the constraint's SQLSTATE. The error names the bridge, the
// column, the row and the remedy. No other row of the statement is copied.
func TestTakenIDsAreNamed(t *testing.T) {
	t.Parallel()
	d := prepared(t, "CREATE TABLE t (key bigint, agg text)")
	create(t, d, bridge.Config{
		Table: "public.t", ID: "key", AggregateType: "=a", AggregateID: "agg", EventType: "=b", Payload: "agg",
	})
	d.Exec(t, "INSERT INTO t VALUES (1, '1'), (2, '2'); DELETE FROM t")
	event := uuid.NewMD5(uuid.NameSpaceURL, []byte("public.t:2")).String()
	for insert, detail := range map[string]string{
		"INSERT INTO t VALUES (2, '2')":                                `The id "2" is that of event ` + event,
		"INSERT INTO t VALUES (3, '3'), (2, '2'), (4, '4')":            `The id "2" is that of event ` + event,
		"INSERT INTO t VALUES (3, '3'), (3, '4')":                      "This transaction",
		"INSERT INTO t VALUES (3, '3'); INSERT INTO t VALUES (3, '3')": "This transaction",
	} {
		_, err := d.Pool.Exec(t.Context(), insert)
		refused(t, err, "posthaste's bridge", "column key of public.t must be unique", "another id",
			"posthaste replay --id=")
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != pgerrcode.UniqueViolation || !strings.HasPrefix(pg.Detail, detail) {
			t.Errorf("%s: %+v, want the detail %q", insert, pg, detail)
		}
		want(t, "outbox", copies(t, d, "aggregate_id"), "1 2")
	}
}

// A waiting row whose id another waiting row has, or a transaction that commits during the copy, is named, and nothing
// is copied.
func TestTakenIDsOfWaitingRowsAreNamed(t *testing.T) {
	t.Parallel()
	d := prepared(t, "CREATE TABLE t (key bigint, agg text)", "INSERT INTO t VALUES (1, '1'), (2, '2')")
	c := bridge.Config{
		Table: "public.t", ID: "key", AggregateType: "=a", AggregateID: "agg", EventType: "=b", Payload: "agg",
		Pending: "true", OrderBy: "agg",
	}
	event := uuid.NewMD5(uuid.NameSpaceURL, []byte("public.t:2")).String()
	taken := func(err error, detail string) {
		t.Helper()
		for _, text := range []string{
			"column key of public.t must be unique", "posthaste's bridge", "another id", detail,
		} {
			oneLine(t, err, text)
		}
		noneLeft(t, d)
		want(t, "outbox", copies(t, d, "aggregate_id"), "")
	}
	plan, err := bridge.New(t.Context(), d.Pool, c)
	must(t, err)
	tx, err := d.Pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		VALUES ($1, 'a', 'other', 'b', '{}')`, event)
	must(t, err)
	done := make(chan error, 1)
	go func() {
		_, err := plan.Create(t.Context(), d.Pool)
		done <- err
	}()
	testenv.Eventually(t, 20*time.Second, func() error {
		n := testenv.Value[int](t, d, "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'")
		return testenv.FailIf(n == 0, "the copy does not wait for the open transaction")
	})
	must(t, tx.Commit(t.Context()))
	err = <-done
	d.Exec(t, "DELETE FROM outbox")
	taken(err, `The id "2" is that of event `+event)

	d.Exec(t, "INSERT INTO t VALUES (2, '3')")
	_, err = plan.Create(t.Context(), d.Pool)
	taken(err, `2 waiting rows have the id "2", for event `+event)
	d.Exec(t, "UPDATE t SET key = 3 WHERE agg = '3'")
	testenv.Equal(t, "copied rows", create(t, d, c), 3)
}

func noneLeft(t *testing.T, d *testenv.Database) {
	t.Helper()
	if n := testenv.Value[int](t, d,
		"SELECT count(*) FROM pg_proc WHERE proname ~ '^outbox_bridge_[0-9a-f]{8}$'"); n != 0 {
		t.Errorf("%d bridges are left", n)
	}
}

// Each mistake is one line, and leaves nothing.
func TestMistakes(t *testing.T) {
	t.Parallel()
	d := prepared(t, debezium, "CREATE VIEW v AS SELECT * FROM outboxevent",
		"CREATE TABLE child () INHERITS (outboxevent)", "CREATE TABLE taken (LIKE outboxevent)",
		"ALTER TABLE taken ADD raw bytea")
	taken := ofDebezium()
	taken.Table = "public.taken"
	create(t, d, taken)
	for _, m := range []struct {
		change func(c *bridge.Config)
		text   string
	}{
		{func(c *bridge.Config) { c.Table = "taken" }, "want SCHEMA.NAME"},
		{func(c *bridge.Config) { c.Table = "public.nowhere" }, "public.nowhere does not exist"},
		{func(c *bridge.Config) { c.Table = "public.v" }, "public.v is a view"},
		{func(c *bridge.Config) { c.Table = "public.outbox" }, "posthaste's own"},
		{func(c *bridge.Config) { c.Table = "public.outboxevent" }, "other tables inherit"},
		{func(*bridge.Config) {}, "posthaste bridge drop --table=public.taken"},
		{func(c *bridge.Config) { c.Payload = "data" }, `no column "data" (--payload)`},
		{func(c *bridge.Config) { c.AggregateID = "=1" }, `no column "=1" (--aggregate-id)`},
		{func(c *bridge.Config) { c.Payload = "raw" }, "is bytea: --payload needs jsonb"},
		{func(c *bridge.Config) { c.AggregateType = "=a b" }, "--aggregate-type"},
		{func(c *bridge.Config) { c.EventType = "=" + strings.Repeat("x", 256) }, "--event-type"},
		{func(c *bridge.Config) { c.Pending = "true" }, "--pending and --order-by need each other"},
		{func(c *bridge.Config) { c.OrderBy = "id" }, "--pending and --order-by need each other"},
		{func(c *bridge.Config) { c.Pending, c.OrderBy = "sent IS", "at" }, `no column "at" (--order-by)`},
	} {
		c := taken
		m.change(&c)
		_, err := bridge.New(t.Context(), d.Pool, c)
		oneLine(t, err, m.text)
	}
	must(t, bridge.Drop(t.Context(), d.Pool, taken.Table))
	for _, pending := range []string{"id IS", "sent", "true) OR (", "true); DROP TABLE taken; --", "'x'"} {
		c := taken
		c.Pending, c.OrderBy = pending, "id"
		_, err := bridge.New(t.Context(), d.Pool, c)
		oneLine(t, err, "")
	}
	oneLine(t, bridge.Drop(t.Context(), d.Pool, taken.Table), "has no bridge")
	c := as(t, d, "weak", "SELECT ON ALL TABLES IN SCHEMA public")
	_, err := bridge.New(t.Context(), c, taken)
	oneLine(t, err, "GRANT TRIGGER ON taken TO ")
	oneLine(t, err, "GRANT INSERT ON outbox TO ")
	noneLeft(t, d)
}

// Rights to use the table and to create in posthaste's schema are enough to create and drop a bridge.
func TestRoleOfARelayCreatesABridge(t *testing.T) {
	t.Parallel()
	d := prepared(t, debezium)
	c := as(t, d, "relay", "TRIGGER, SELECT ON outboxevent", "SELECT, INSERT ON outbox", "CREATE ON SCHEMA public")
	pool, err := pgxpool.New(t.Context(), c.Config().ConnString())
	must(t, err)
	t.Cleanup(pool.Close)
	relay := testenv.Database{Pool: pool}
	config := ofDebezium()
	config.Pending, config.OrderBy = "true", "id"
	d.Exec(t, "INSERT INTO outboxevent VALUES "+row("1"))
	create(t, &relay, config)
	d.Exec(t, "INSERT INTO outboxevent VALUES "+row("2"))
	want(t, "outbox", copies(t, d, "aggregate_id"), "1 2")
	must(t, bridge.Drop(t.Context(), relay.Pool, config.Table))
	d.Exec(t, "INSERT INTO outboxevent VALUES "+row("3"))
	want(t, "outbox", copies(t, d, "aggregate_id"), "1 2")
}

// A change of the table that breaks its bridge is found and named.
func TestFaultsAreNamed(t *testing.T) {
	t.Parallel()
	for _, f := range []struct{ change, text string }{
		{"ALTER TABLE outboxevent RENAME payload TO body", `no column "payload" (--payload)`},
		{"ALTER TABLE outboxevent DROP aggregateid", `no column "aggregateid" (--aggregate-id)`},
		{"ALTER TABLE outboxevent DISABLE TRIGGER posthaste_bridge", "ENABLE TRIGGER posthaste_bridge"},
		{"ALTER TABLE outboxevent DISABLE TRIGGER ALL", "ENABLE TRIGGER posthaste_bridge"},
		{"ALTER TABLE outboxevent ALTER payload TYPE text", "other types"},
		{"ALTER TABLE outboxevent ALTER payload TYPE bytea USING NULL", "is bytea"},
		{"DROP TABLE outboxevent", "is gone"},
		{"DROP TRIGGER posthaste_bridge ON outboxevent", "is gone, or has lost its trigger"},
		{"ALTER TABLE outboxevent RENAME TO other", ""},
	} {
		t.Run(f.change, func(t *testing.T) {
			t.Parallel()
			d := prepared(t, debezium)
			create(t, d, ofDebezium())
			d.Exec(t, f.change)
			list, err := bridge.List(t.Context(), d.Pool)
			must(t, err)
			if len(list) != 1 || !strings.Contains(list[0].Fault, f.text) || (f.text == "") != (list[0].Fault == "") {
				t.Errorf("the list: %+v, want %q", list, f.text)
			}
			tables, err := bridge.DropAll(t.Context(), d.Pool)
			must(t, err)
			list, err = bridge.List(t.Context(), d.Pool)
			must(t, err)
			if !slices.Equal(tables, []string{"public.outboxevent"}) || len(list) != 0 {
				t.Errorf("dropped %v, left %+v", tables, list)
			}
		})
	}
}

// The owner of the table cannot run code with the rights of the bridge: a column's new type brings its own casts.
func TestCastsAreNotCalled(t *testing.T) {
	t.Parallel()
	for column, target := range map[string]string{"payload": "jsonb", "type": "text", "id": "uuid"} {
		t.Run(column, func(t *testing.T) {
			t.Parallel()
			d := prepared(t, debezium)
			create(t, d, ofDebezium())
			for _, s := range []string{
				"CREATE TYPE evil AS ENUM ('{}')",
				"CREATE FUNCTION steal(evil) RETURNS " + target + ` LANGUAGE plpgsql AS $$ BEGIN
					RAISE EXCEPTION 'called as %', current_user; END $$`,
				"CREATE CAST (evil AS " + target + ") WITH FUNCTION steal(evil) AS IMPLICIT",
				"ALTER TABLE outboxevent DROP CONSTRAINT outboxevent_pkey",
				"ALTER TABLE outboxevent ALTER " + column + " TYPE evil USING NULL",
			} {
				d.Exec(t, s)
			}
			values := map[string]string{"payload": "'{}'", "type": "'made'", "id": "gen_random_uuid()"}
			values[column] = "'{}'"
			_, err := d.Pool.Exec(t.Context(), "INSERT INTO outboxevent VALUES ("+values["id"]+", 'order', '1', "+
				values["type"]+", "+values["payload"]+")")
			if err != nil && strings.Contains(err.Error(), "called as") {
				t.Error(err)
			}
		})
	}
}

// Several bridges, of tables and columns with odd names, and of columns with other types.
func TestOddNames(t *testing.T) {
	t.Parallel()
	odd := `it's "%s" \ $1 $$`
	quoted := pgx.Identifier{odd}.Sanitize()
	d := prepared(t, "CREATE SCHEMA a", "CREATE TYPE kind AS ENUM ('made')", "CREATE DOMAIN doc AS jsonb",
		"CREATE TABLE a."+quoted+" ("+quoted+` char(9), "KIND" kind, n serial)`,
		"CREATE TABLE a.other (id uuid, body doc, n serial)", "INSERT INTO a."+quoted+" VALUES ('\"a\"', 'made')")
	first := bridge.Config{
		Table: "a." + odd, ID: odd, AggregateType: "=it.s", AggregateID: odd, EventType: "KIND", Payload: odd,
		Pending: "true", OrderBy: odd,
	}
	testenv.Equal(t, "waiting rows that are copied", create(t, d, first), 1)
	create(t, d, bridge.Config{
		Table: "a.other", ID: "id", AggregateType: "=o", AggregateID: "n", EventType: "='%s'", Payload: "body",
		Headers: "body",
	})
	for _, setting := range []string{"on", "off"} {
		must(t, pgx.BeginFunc(t.Context(), d.Pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), "SET LOCAL standard_conforming_strings = "+setting)
			must(t, err)
			_, err = tx.Exec(t.Context(), "INSERT INTO a."+quoted+" VALUES ('\""+setting+"\"', 'made')")
			return err
		}))
	}
	d.Exec(t, "INSERT INTO a.other VALUES (gen_random_uuid(), '{\"k\": \"v\"}')")
	want(t, "payloads", copies(t, d, "payload"), `"a" "on" "off" {"k": "v"}`)
	want(t, "event types", copies(t, d, "event_type"), "made made made '%s'")
	want(t, "an id", testenv.Value[string](t, d, "SELECT id::text FROM outbox ORDER BY seq LIMIT 1"),
		uuid.NewMD5(uuid.NameSpaceURL, []byte("a."+odd+`:"a"`)).String())
	list, err := bridge.List(t.Context(), d.Pool)
	must(t, err)
	if len(list) != 2 || list[0].Fault+list[1].Fault != "" {
		t.Errorf("the list: %+v", list)
	}
	must(t, bridge.Drop(t.Context(), d.Pool, "a.other"))
	list, err = bridge.List(t.Context(), d.Pool)
	must(t, err)
	if len(list) != 1 || list[0].Table != first.Table {
		t.Errorf("the list: %+v", list)
	}
}

// A table is dropped and created again, and gets a bridge again: drop removes what is left of the first bridge.
func TestTheBridgeOfADroppedTable(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	const table = "CREATE TABLE t (id uuid PRIMARY KEY, payload jsonb)"
	c := bridge.Config{
		Table: "public.t", ID: "id", AggregateType: "=order", AggregateID: "id", EventType: "=made", Payload: "payload",
	}
	for range 2 {
		d.Exec(t, "DROP TABLE IF EXISTS t")
		d.Exec(t, table)
		create(t, d, c)
	}
	must(t, bridge.Drop(t.Context(), d.Pool, c.Table))
	d.Exec(t, "INSERT INTO t VALUES (gen_random_uuid(), '{}')")
	want(t, "event types", copies(t, d, "event_type"), "made")
	list, err := bridge.List(t.Context(), d.Pool)
	must(t, err)
	if len(list) != 1 || list[0].Fault != "" {
		t.Errorf("the list: %+v", list)
	}
}

// BenchmarkInsert compares inserts into Debezium's table without a bridge, with one, and with an INSERT into outbox in
// the same transaction instead; one row at a time, and 1,000.
func BenchmarkInsert(b *testing.B) {
	const outbox = "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) "
	const rows = `SELECT gen_random_uuid(), 'order', 'o' || g, 'order.created', jsonb_build_object('id', g, 'pad',
		repeat('x', 300)) FROM generate_series(1, $1::int) g`
	for _, n := range []int{1, 1000} {
		for _, way := range []string{"alone", "bridge", "both"} {
			b.Run(fmt.Sprintf("%d/%s", n, way), func(b *testing.B) {
				d := prepared(b, debezium)
				if way == "bridge" {
					create(b, d, ofDebezium())
				}
				c, err := pgx.Connect(b.Context(), d.URL)
				must(b, err)
				defer func() { _ = c.Close(context.Background()) }()
				for b.Loop() {
					must(b, pgx.BeginFunc(b.Context(), c, func(tx pgx.Tx) error {
						_, err := tx.Exec(b.Context(), "INSERT INTO outboxevent "+rows, n)
						if err == nil && way == "both" {
							_, err = tx.Exec(b.Context(), outbox+rows, n)
						}
						return err
					}))
				}
			})
		}
	}
}
