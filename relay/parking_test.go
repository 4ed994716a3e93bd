package relay

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"posthaste/outbox"
)

// An event that the sink refuses is tried three times and then parked. The others continue, and in the end all are
// settled.
func TestPublisherParksWhatIsRefused(t *testing.T) {
	t.Parallel()
	for policy, want := range map[Poison]struct {
		published []int
		parked    []int
	}{
		PoisonSkip:     {[]int{0, 2, 3}, []int{1}},
		PoisonBlockKey: {[]int{0}, []int{1, 2, 3}},
	} {
		inRig(t, Options{Poison: policy}, func(r *rig) {
			rows := r.commit("done", "poison", "done")
			r.goPublish()
			r.s.chunks <- chunk(rows...)
			first := r.landed()
			rows = append(rows, r.commit("done")...)
			r.s.chunks <- chunk(rows[3])
			second := r.landed()
			var published, parked []int64
			for _, n := range want.published {
				published = append(published, rows[n].Seq)
			}
			for _, d := range r.pg.dead {
				parked = append(parked, d.Seq)
			}
			wantSeqs(t, r.published("outbox.order"), published...)
			if n := first.published + second.published; n != len(published) || len(first.ids) != 3 ||
				len(second.ids) != 1 {
				t.Errorf("%s: %d are published, want %d; %d and %d rows are to be settled, want 3 and 1", policy, n,
					len(published), len(first.ids), len(second.ids))
			}
			if len(parked) != len(want.parked) || parked[0] != rows[1].Seq || r.pg.dead[0].Attempts != 3 {
				t.Errorf("%s: parked %+v, want the rows %v, after three attempts", policy, r.pg.dead, want.parked)
			}
			for _, d := range r.pg.dead[1:] {
				if d.Class != "blocked" || d.Error != "waits for dead event "+rows[1].ID.String() {
					t.Errorf("parked behind it: %+v", d)
				}
			}
		})
	}
}

// A stream that refuses every event is tried a few times before the first event is parked, and once for each later
// delivery.
func TestAStreamThatRefusesIsNotTriedAgainAndAgain(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		r.goPublish()
		r.rd.wrongType["outbox.order"] = true
		for range 3 {
			r.s.chunks <- chunk(r.commit("done", "done")...)
			r.landed()
		}
		var attempts []int
		for _, d := range r.pg.dead {
			attempts = append(attempts, d.Attempts)
		}
		if !slices.Equal(attempts, []int{3, 0, 1, 0, 1, 0}) {
			r.t.Errorf("parked after %v attempts, want 3, 1 and 1 for the first of each two", attempts)
		}
	})
}

// A row is parked when it is visible: before that it is not there to be parked, and must not be passed by.
func TestParkingWaitsUntilTheRowIsVisible(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		tx := r.writes("order a poison")
		r.goPublish()
		r.s.chunks <- chunk(tx.delivered()...)
		pass(10 * time.Second)
		if r.s.router.tracker.portions[0].done || len(r.pg.dead) > 0 {
			r.t.Fatal("it is passed by, or parked, before anybody sees it")
		}
		tx.show()
		r.landed()
		if len(r.pg.dead) != 1 {
			r.t.Errorf("%d are parked", len(r.pg.dead))
		}
	})
}

// hanging is a Store that cannot park events, of a type or of all, while it is broken.
type hanging struct {
	DeadEvents
	typ    string
	broken atomic.Bool
}

func (h *hanging) Park(
	ctx context.Context, o outbox.Owner, row *outbox.Row, class, reason string, attempts int,
) (bool, error) {
	if h.broken.Load() && (h.typ == "" || h.typ == row.AggregateType) {
		return false, errors.New("the dead table is gone")
	}
	return h.DeadEvents.Park(ctx, o, row, class, reason, attempts)
}

// A stream that waits because it cannot park is reported after a while, and the report is cleared when parking works.
func TestAParkThatFailsIsSaid(t *testing.T) {
	t.Parallel()
	inRig(t, Options{}, func(r *rig) {
		h := &hanging{DeadEvents: r.s.router.dead}
		h.broken.Store(true)
		r.s.router.dead = h
		r.goPublish()
		r.s.chunks <- chunk(r.commit("poison")...)
		pass(patience - time.Second)
		r.i.says(r.t)
		pass(3 * time.Second)
		r.i.says(r.t, "park: the dead table is gone")
		h.broken.Store(false)
		r.landed()
		r.i.says(r.t)
	})
}
