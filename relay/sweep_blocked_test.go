package relay

import (
	"fmt"
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
		tx := w.begin()
		tx.insert("user", "late", "done")
		tx.write()
		w.start("one")
		w.event("order", "a")
		w.event("user", "a")
		elapse(5 * time.Second)
		w.do(func() { w.rd.away["outbox.order"] = true })
		w.event("order", "a")
		tx.show()
		elapse(10 * time.Second)
		var rows []*tableRow
		for n := range 2 * outbox.Partitions {
			rows = append(rows, w.event("user", fmt.Sprint("u-", n)))
		}
		elapse(20 * time.Second)
		w.do(func() {
			for _, row := range rows {
				if !w.rd.has("outbox.user", row.ID) {
					t.Errorf("event %d of part %d is not published", row.Seq, row.part)
				}
			}
			w.rd.away["outbox.order"] = false
		})
		w.settles(outbox.ModePoll)
		w.judge()
	})
}
