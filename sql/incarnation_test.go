package sql_test

import (
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

func incarnation(tb testing.TB, d *testenv.Database) string {
	tb.Helper()
	name, _, err := sql.ReadIncarnation(tb.Context(), orderPool(tb, d.URL, 1))
	must(tb, err)
	return name
}

// Each database has a name of its own, and a new one for each server process that runs it.
func TestIncarnationsDiffer(t *testing.T) {
	t.Parallel()
	s := testenv.NewServer(t)
	one, two := s.Database(t), s.Database(t)
	seen := map[string]string{}
	note := func(what, name string) {
		if was, ok := seen[name]; ok {
			t.Errorf("%s is %q, like %s", what, name, was)
		}
		seen[name] = what
	}
	first := incarnation(t, one)
	note("one", first)
	note("another database", incarnation(t, two))
	if again := incarnation(t, one); again != first {
		t.Errorf("%q, then %q", first, again)
	}
	one.Exec(t, "DROP PUBLICATION posthaste") // its name is the same in all schemas
	must(t, fails(sql.Migrate(t.Context(), one.URL, "other", testenv.Logger(t))))
	cfg, err := sql.PoolConfig(one.URL, "other", "test")
	must(t, err)
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	other, _, err := sql.ReadIncarnation(t.Context(), pool)
	must(t, err)
	note("another schema", other)
	c := s.Snapshot(t)
	note("a restarted server", incarnation(t, one))
	must(t, c.Start(t.Context()))
	t.Cleanup(func() { _ = c.Stop("immediate") })
	copied := *one
	copied.URL = c.URL(one.Name)
	note("a copy", incarnation(t, &copied))
}

func TestTheIncarnationIsAskedForOnceASecond(t *testing.T) {
	t.Parallel()
	s := testenv.NewServer(t)
	d := s.Database(t)
	known := incarnation(t, d)
	placed := func(key byte) *sql.Order {
		t.Helper()
		o, e := newOrder(uuid.New(), key)
		if _, err := sql.PlaceOrder(t.Context(), orderPool(t, d.URL, 1), o, e); err != nil {
			t.Fatal(err)
		}
		return o
	}
	before := placed(1)
	pool := orderPool(t, d.URL, 2)
	must(t, pool.Ping(t.Context())) // the limit of a second is for an answer, not for a connection
	i := sql.NewIncarnation(pool)
	is := func(what, got, want string) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	is("first", i.Last(t.Context()), known)
	must(t, s.Stop("fast"))
	is("a server that is gone", i.Confirmed(t.Context()), known)
	i.Forget()
	is("one that does not answer", i.Confirmed(t.Context()), known)
	is("one that was never seen", sql.NewIncarnation(orderPool(t, d.URL, 1)).Last(t.Context()), "")
	must(t, s.Start(t.Context()))
	now := incarnation(t, d)
	testenv.Eventually(t, 20*time.Second, func() error { return pool.Ping(t.Context()) })
	is("last", i.Last(t.Context()), known)
	is("an order of it", i.Of(before), known) // replaces the query
	is("confirmed by an answer", i.Confirmed(t.Context()), known)
	after := placed(2)
	if name := i.Of(after); name == known || name == now || name == "" { // the next Confirmed must query
		t.Errorf("an order of another is in %q", name)
	}
	is("contradicted by an answer", i.Confirmed(t.Context()), now)
	is("an order of that", i.Of(after), now)
}
