package ops_test

import (
	"testing"

	"posthaste/internal/ops"
	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/sink"
)

// A relay of this database adopts while posthaste adopt waits for its confirmation. The gate then has a later epoch,
// and the adoption succeeds because the stream is this database's already.
func TestAdoptBesideARelay(t *testing.T) {
	t.Parallel()
	d, r := testenv.Postgres(t), testenv.Redis(t)
	d.Exec(t, "INSERT INTO outbox_stream (stream, base, adopted_epoch) VALUES ('outbox.order', 'outbox.order', 1)")
	a, err := ops.FindAdoption(t.Context(), d.Pool, "default", false)
	must(t, err)
	owner := outbox.Owner{Epoch: 7, Nonce: outbox.Nonce{1}}
	must(t, d.Pool.QueryRow(t.Context(), "SELECT source FROM relay_state").Scan(&owner.Source))
	relay := sink.New(sink.Options{Client: r.Client, Source: outbox.EntrySource("default")})
	must(t, relay.Adopt(t.Context(), "outbox.order", owner, false))
	if err := a.TakeOver(t.Context(), d.Pool, r.Client); err != nil {
		t.Errorf("take over beside a relay: %v", err)
	}
	if err := relay.Check(t.Context(), owner, []string{"outbox.order"}); err != nil {
		t.Errorf("the relay has lost its gate: %v", err)
	}
}
