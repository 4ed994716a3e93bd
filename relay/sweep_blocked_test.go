package relay

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"posthaste/outbox"
)

// A leader that polls clears its doubt when all transactions from before its adoption have ended. A stream that cannot
// be published to then does not delay the others.
func TestOthersGoOnInASweepBesideABlockedStream(t *testing.T) {
	t.Parallel()
	inWorld(t, Options{}, func(w *world) {
		w.pg.state.Desired = outbox.ModePoll
		tx := w.writes("user late")
		w.start("one")
		w.event("order", "a")
		w.event("user", "a")
		elapse(5 * time.Second)
		w.away(true, "outbox.order")
		w.event("order", "a")
		tx.show()
		elapse(10 * time.Second)
		var rows []*tableRow
		for n := range 2 * outbox.Partitions {
			rows = append(rows, w.event("user", fmt.Sprint("u-", n)))
		}
		elapse(20 * time.Second)
		for _, row := range rows {
			w.arrives(row, true)
		}
		w.away(false, "outbox.order")
		w.ends(outbox.ModePoll)
	})
}

// A node has lost its replica: what a sweep publishes to its streams is not confirmed. The others go on, also before
// the hand-over.
func TestOthersGoOnInASweepBesideAStreamWithoutDurability(t *testing.T) {
	t.Parallel()
	for _, mode := range []outbox.Mode{outbox.ModePoll, outbox.ModeCDC} {
		inWorld(t, Options{}, func(w *world) {
			w.wants(mode)
			i, refusing := w.instance("one"), &atomic.Bool{}
			refusing.Store(true)
			names := map[string]bool{"outbox.order": true, "outbox.b": true, "outbox.c": true, "outbox.d": true}
			s := unrepairable{i.relay.o.Sink, "Confirm", names, true, refusing}
			sweeper := i.sweeper(s)
			i.relay.o.Sink, i.relay.o.Sweeper, i.relay.sweeps.sweeper = s, sweeper, sweeper
			for n := range 8 * outbox.Partitions {
				w.event([]string{"order", "b", "c", "d"}[n%4], fmt.Sprint("o-", n))
			}
			w.event("user", "a")
			w.launch(i)
			elapse(time.Minute)
			var rows []*tableRow
			for n := range 2 * outbox.Partitions {
				rows = append(rows, w.event("user", fmt.Sprint("u-", n)))
			}
			elapse(15 * time.Second)
			for _, row := range rows {
				w.arrives(row, true)
			}
			refusing.Store(false)
			w.ends(mode)
		})
	}
}
