package relay

import (
	"context"
	"errors"
	"testing"

	"posthaste/outbox"
	"posthaste/relay/sweep"
)

// stumbling is a Sweeper that fails once and then finds nothing to sweep.
type stumbling struct{ Sweeper }

func (stumbling) Drain(_ context.Context, s sweep.Scope, _ outbox.Pass) error {
	s.Outcome(errors.New("postgres hiccups"))
	return nil
}

// A pass that failed on the way and then reached its end with nothing to publish leaves no reason behind: nothing else
// would take it back before the next event.
func TestADrainThatReachesItsEndIsWell(t *testing.T) {
	t.Parallel()
	r := New(Options{Sweeper: stumbling{}})
	r.health.clear(conditionPostgres)
	g := newGates(outbox.Owner{}, outbox.Layout{Prefix: "outbox.", Shards: 1}, nil, nil)
	if err := r.sweeps.drain(t.Context(), g, outbox.Pass{}, false); err != nil {
		t.Fatal(err)
	}
	if h := r.Health(); !h.Ready {
		t.Errorf("not ready: %v", h.Reasons)
	}
}
