package sql_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/sql"
)

func newOrder(user uuid.UUID, key byte) (*sql.Order, *outbox.Event) {
	id := uuid.Must(uuid.NewV7())
	o := &sql.Order{
		ID: id, UserID: user, Key: [16]byte{key}, Fingerprint: []byte{1, 2}, Amount: 5, Currency: "USD",
		Status: sql.OrderPending, CreatedAt: time.Now().UTC().Truncate(time.Microsecond),
	}
	return o, &outbox.Event{
		ID: uuid.Must(uuid.NewV7()), AggregateType: "order", AggregateID: id.String(), Type: "order.created",
		Payload: []byte(`{"id":"` + id.String() + `"}`), Headers: map[string]string{"traceparent": "x"},
	}
}

func place(tb testing.TB, d *testenv.Database, o *sql.Order, e *outbox.Event) bool {
	tb.Helper()
	placed, err := sql.PlaceOrder(tb.Context(), d.Pool, o, e)
	must(tb, err)
	return placed
}

// holdKey inserts o in another transaction and leaves it open.
func holdKey(tb testing.TB, d *testenv.Database, o *sql.Order) pgx.Tx {
	tb.Helper()
	tx := begin(tb, d)
	run(tb, tx, `INSERT INTO orders
		(id, user_id, idem_key, idem_fp, amount, currency, status, created_at)
		VALUES ($1, $2, $3, $4, $5, $6, $7, now())`,
		o.ID, o.UserID, o.Key[:], o.Fingerprint, o.Amount, o.Currency, o.Status)
	return tx
}

func counts(tb testing.TB, d *testenv.Database) string {
	tb.Helper()
	return testenv.Value[string](tb, d,
		"SELECT (SELECT count(*) FROM orders) || ' orders, ' || (SELECT count(*) FROM outbox) || ' events'")
}

func wantCounts(tb testing.TB, d *testenv.Database, want string) {
	tb.Helper()
	if got := counts(tb, d); got != want {
		tb.Errorf("%s, want %s", got, want)
	}
}

func TestOrderAndEventAreWrittenTogetherOnce(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	user := uuid.New()
	o, e := newOrder(user, 1)
	if !place(t, d, o, e) {
		t.Fatal("not inserted")
	}
	again, e2 := newOrder(user, 1)
	if place(t, d, again, e2) {
		t.Error("a second order under one key")
	}
	wantCounts(t, d, "1 orders, 1 events")
	got, err := sql.OrderByKey(t.Context(), d.Pool, user, o.Key)
	if err != nil || fmt.Sprint(*got) != fmt.Sprint(*o) {
		t.Errorf("by key: %v, %v, want %v", got, err, o)
	}
	if got, err = sql.OrderByID(t.Context(), d.Pool, o.ID); err != nil || fmt.Sprint(*got) != fmt.Sprint(*o) {
		t.Errorf("by id: %v, %v", got, err)
	}
	wantErr(t, fails(sql.OrderByID(t.Context(), d.Pool, again.ID)), sql.ErrOrderNotFound)
	// A rejected order holds its key, and announces nothing.
	user = uuid.New()
	no, _ := newOrder(user, 1)
	no.Status, no.RespStatus, no.RespBody = sql.OrderRejected, 402, []byte("no")
	place(t, d, no, nil)
	if good, e := newOrder(user, 1); place(t, d, good, e) {
		t.Error("an order beside its own refusal")
	}
	wantCounts(t, d, "2 orders, 1 events")
	if l, err := sql.ListOrders(t.Context(), d.Pool, user, uuid.Max, 10); err != nil || len(l) != 0 {
		t.Errorf("listed %v, %v", l, err)
	}
	if n := d.Pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections were not given back", n)
	}
}

func TestRetryOrder(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{&pgconn.PgError{Code: pgerrcode.DeadlockDetected}, true},
		{&pgconn.PgError{Code: pgerrcode.SerializationFailure}, true},
		{&pgconn.PgError{Code: pgerrcode.AdminShutdown}, true},
		{&pgconn.PgError{Code: pgerrcode.UndefinedTable}, false},
		{&pgconn.PgError{Code: pgerrcode.QueryCanceled}, false},
		{&pgconn.PgError{Code: pgerrcode.IdleInTransactionSessionTimeout}, true},
		{errors.New("broken pipe"), true},
		{context.DeadlineExceeded, false},
		{context.Canceled, false},
		{fmt.Errorf("x: %w", sql.ErrCommitUnknown), false},
		{sql.ErrOrderLocked, false},
		{sql.ErrOrderNotFound, false},
	} {
		if got := sql.RetryOrder(c.err); got != c.want {
			t.Errorf("%v: %v", c.err, got)
		}
	}
}

func TestOnlyOldRefusalsArePurged(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	user := uuid.New()
	for i, c := range []struct {
		rejected bool
		age      time.Duration
	}{{true, 48 * time.Hour}, {true, 47 * time.Hour}, {true, time.Hour}, {false, 48 * time.Hour}} {
		o, e := newOrder(user, byte(i))
		o.CreatedAt = time.Now().Add(-c.age)
		if c.rejected {
			o.Status, o.RespStatus, o.RespBody, e = sql.OrderRejected, 402, []byte("no"), nil
		}
		place(t, d, o, e)
	}
	before := time.Now().Add(-24 * time.Hour)
	for _, want := range []int64{1, 1, 0} {
		is(t, want)(sql.PurgeRejected(t.Context(), d.Pool, before, 1))
	}
	if got := testenv.Value[string](t, d,
		"SELECT string_agg(status, ',' ORDER BY created_at) FROM orders"); got != "PENDING,REJECTED" {
		t.Errorf("left: %s", got)
	}
}
