package emit_test

import (
	"os"
	"sync"
	"testing"

	"posthaste/examples/emit"
	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// Concurrent deposits into one account: there is one event per deposit, and the balance grows in the order of the
// events.
func TestEventsFollowTheBalance(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	if err := emit.Setup(t.Context(), d.Pool); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 25 {
				if _, err := emit.Pay(t.Context(), d.Pool, "ann", 5); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	// The next deposit violates the table's constraint: there is neither a change nor an event.
	if _, err := emit.Pay(t.Context(), d.Pool, "ann", 5); err == nil {
		t.Error("a deposit beyond the limit was booked")
	}
	if n := testenv.Value[int](t, d, "SELECT count(DISTINCT id) FROM outbox WHERE aggregate_id = 'ann'"); n != 200 {
		t.Errorf("%d events for 200 deposits", n)
	}
	const inOrder = `SELECT coalesce(bool_and(balance = 5 * n), false) FROM (
		SELECT (payload->>'balance')::bigint balance, row_number() OVER (ORDER BY seq) n FROM outbox) e`
	if !testenv.Value[bool](t, d, inOrder) {
		t.Error("the events are not in the order of the deposits")
	}
}
