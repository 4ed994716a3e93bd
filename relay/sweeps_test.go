package relay

import (
	"context"
	"testing"
)

// A pass that failed on the way and then reached its end with nothing to publish leaves no reason behind: nothing else
// would take it back before the next event.
func TestADrainThatReachesItsEndIsWell(t *testing.T) {
	t.Parallel()
	inLeadership(t, Options{}, func(w *world, l *leadership) {
		if _, err := l.adopt(context.Background()); err != nil {
			w.t.Fatal(err)
		}
		l.outcome(errRefused)
		if _, err := l.drain(context.Background(), false); err != nil {
			t.Error(err)
		}
		if bad, _ := l.health.lists(); len(bad) > 0 {
			t.Errorf("not ready: %v", bad)
		}
	})
}
