package outboxtest_test

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/outboxtest"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// fatal is a testing.TB that records a failure instead of ending the test.
type fatal struct {
	testing.TB

	failed bool
}

func (f *fatal) Fatalf(string, ...any) { f.failed = true; panic(f) }

func fails(t *testing.T, check func(tb testing.TB)) (failed bool) {
	t.Helper()
	f := &fatal{TB: t}
	defer func() {
		if r := recover(); r != nil && r != f {
			panic(r)
		}
		failed = f.failed
	}()
	check(f)
	return f.failed
}

func TestInserted(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	tx, err := d.Pool.Begin(t.Context())
	testenv.Must(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	sent := outbox.Event{
		ID: uuid.New(), AggregateType: "invoice", AggregateID: "1", Type: "invoice.sent",
		Payload: []byte(`{"a": 1, "b": [2]}`), Headers: map[string]string{"tenant": "acme"},
	}
	_, err = outbox.Insert(t.Context(), tx, sent)
	testenv.Must(t, err)
	got := outboxtest.Inserted(t, tx, outbox.Event{
		AggregateType: "invoice", AggregateID: "1", Type: "invoice.sent", Payload: []byte(`{"b":[2],"a":1}`),
	})
	if got.ID != sent.ID || got.Headers["tenant"] != "acme" {
		t.Errorf("found %+v", got)
	}
	for name, want := range map[string]outbox.Event{
		"another type":      {AggregateType: "invoice", AggregateID: "1", Type: "invoice.paid"},
		"another aggregate": {AggregateType: "invoice", AggregateID: "2", Type: "invoice.sent"},
		"another payload": {
			AggregateType: "invoice", AggregateID: "1", Type: "invoice.sent", Payload: []byte(`{"a": 2}`),
		},
	} {
		if !fails(t, func(tb testing.TB) { outboxtest.Inserted(tb, tx, want) }) {
			t.Errorf("%s was found", name)
		}
	}
	var outside outboxtest.Querier = d.Pool
	if !fails(t, func(tb testing.TB) { outboxtest.Inserted(tb, outside, sent) }) {
		t.Error("an event that is not committed was found from outside")
	}
	_, err = outbox.Insert(t.Context(), tx, outbox.Event{
		AggregateType: "invoice", AggregateID: "1", Type: "invoice.sent", Payload: sent.Payload,
	})
	testenv.Must(t, err)
	if !fails(t, func(tb testing.TB) { outboxtest.Inserted(tb, tx, sent) }) {
		t.Error("two events were taken for one")
	}
	var _ outboxtest.Querier = (*pgx.Conn)(nil)
}

func TestDeliver(t *testing.T) {
	t.Parallel()
	var got []consumer.Event
	refused := errors.New("refused")
	handler := func(_ context.Context, e consumer.Event) error {
		got = append(got, e)
		if e.Subject == "bad" {
			return refused
		}
		return nil
	}
	err := outboxtest.Deliver(t.Context(), handler,
		outbox.Event{
			AggregateType: "order", AggregateID: "1", Type: "order.made", Payload: []byte(`{}`),
			Headers: map[string]string{"traceparent": "00-x", "tenant": "acme"},
		},
		outbox.Event{AggregateType: "order", AggregateID: "bad"}, outbox.Event{AggregateID: "never"})
	if !errors.Is(err, refused) || len(got) != 2 {
		t.Fatalf("%d deliveries, %v", len(got), err)
	}
	if e := got[0]; e.ID == "" || e.Type != "order.made" || e.Subject != "1" || string(e.Data) != "{}" ||
		e.Stream != "outbox.order" || e.TraceParent != "00-x" || len(e.Headers) != 1 || e.Headers["tenant"] != "acme" {
		t.Errorf("delivered %+v", e)
	}
}
