package sweep_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/relay/sweep"
)

// Every test here ends with the oracle: nothing lost, nothing twice, every aggregate in order.

// Workers die again and again, while others sweep the same parts, and writers hold transactions open.
func TestManySweepersAndKills(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	load := testenv.StartLoad(t, r.db, testenv.LoadOptions{
		Total: 1500, Writers: 6, Rate: 1500,
		Types: []string{"order", "credits"},
	})
	for range 3 {
		o := r.options(2, 5)
		var n atomic.Int64
		o.Sink = hooked{r.sink, func() {
			if n.Add(1)%20 == 0 {
				r.terminate()
			}
		}}
		r.run(o)
	}
	load.Wait()
	r.oracle().Check(t, load, 20*time.Second)
}

// A worker is killed during a pass. Another worker resumes it after the cursor, with the same snapshot.
func TestAPassGoesOnAfterAKill(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	aggregates := inPart(t, r, 3)
	var want []uuid.UUID
	for i := range 12 {
		want = append(want, r.insert("order", aggregates[i%3], "{}"))
	}
	first := r.options(1, 2)
	pages := make(chan struct{}, 100)
	ctx, kill := context.WithCancel(t.Context())
	first.Sink = hooked{r.sink, func() {
		if pages <- struct{}{}; len(pages) == 3 {
			kill() // the third page is published; its mark cannot be written
			r.terminate()
		}
	}}
	r.must(sweep.New(first).Run(ctx, r.scope()))
	if n := r.owed(); n != 8 || len(r.entries("order")) != 6 {
		t.Fatalf("%d rows are owed and %d entries published, want 8 and 6", n, len(r.entries("order")))
	}
	later := r.insert("order", aggregates[0], "{}")
	r.run(r.options(1, 3))
	r.oracle().WaitEmpty(t, 20*time.Second)
	r.streamed("order", append(want, later)...)
	if n := testenv.Value[int](t, r.db, "SELECT count(DISTINCT pass::text) FROM outbox_mark WHERE part = 3"); n != 1 {
		t.Errorf("%d passes of several pages, want the one that was killed", n)
	}
	if n := testenv.Value[int](t, r.db, `SELECT count(*) FROM outbox_mark
		WHERE part = 3 AND pass IS NULL
		  AND settled::text IN (SELECT pass::text FROM outbox_mark WHERE part = 3)`); n != 1 {
		t.Errorf("%d marks settle that pass, want 1", n)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.suppressed(); n != 2 {
		t.Errorf("%d events were in doubt, want the 2 of the page without a mark", n)
	}
}

// A worker's session is ended while the worker is paused, before it publishes or before it writes the mark. Another
// worker does its work, and then the first one resumes. Its late publish and its late mark must change nothing, and it
// must continue to work.
func TestAZombieWakes(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before publishing", "before the mark"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			load := testenv.Bulk(t, r.db, 400, 10)
			sleep, asleep, wake := pauses()
			o := r.options(1, 30)
			if when == "before publishing" {
				r.ensure = func(string) error { sleep(); return nil }
			} else {
				o.Sink = hooked{r.sink, sleep}
			}
			r.run(o)
			r.await(asleep)
			if n := r.terminate(); n != 1 {
				t.Errorf("%d backends ended, want 1", n)
			}
			r.ensure = nil
			other := r.run(r.options(2, 30))
			r.oracle().WaitEmpty(t, 20*time.Second)
			close(wake)
			other.stop()
			r.must(r.end(other))
			r.oracle().Check(t, load, 10*time.Second)
			more := testenv.StartLoad(t, r.db, testenv.LoadOptions{Total: 60})
			more.Wait()
			oracle := r.oracle()
			oracle.Others = []*testenv.Load{load}
			oracle.Check(t, more, 20*time.Second)
		})
	}
}

// A publish that takes longer than a batch may is repeated in smaller pieces, not forever.
func TestASlowLinkGetsSmallerBatches(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.must(r.direct().Adopt(t.Context(), prefix+"order", r.owner, false)) // without the proxy
	r.adopted[prefix+"order"] = true
	r.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), 'order', 'o-1', 'order.changed', to_jsonb(repeat('x', 8000)) FROM `+
		`generate_series(1, 200)`)
	// 1.6 MB take three times as long as a publish may.
	r.proxy.Set(testenv.Trouble{BytesPerSecond: 300_000})
	r.run(r.options(1, 500))
	r.oracle().WaitEmpty(t, 60*time.Second)
	if n := len(r.entries("order")); n != 200 {
		t.Errorf("%d entries, want 200", n)
	}
}

// Row locks of another session do not delay the sweep, and the sweep does not delay that session.
func TestRowsHeldByAnotherSession(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	held := r.insert("order", "held", `{}`)
	tx := r.begin()
	_, err := tx.Exec(t.Context(), "SELECT FROM outbox WHERE id = $1 FOR UPDATE", held)
	r.must(err)
	o := r.options(1, 10)
	sleep, asleep, wake := pauses()
	o.Sink = hooked{r.sink, sleep}
	r.run(o)
	r.await(asleep)
	// In the middle of a page the worker has locked no row of the table, and keeps no snapshot.
	_, err = tx.Exec(t.Context(), "UPDATE outbox SET headers = '{}' WHERE id = $1", held)
	r.must(err)
	if n := testenv.Value[int](t, r.db, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
		AND application_name = 'posthaste sweep'
		AND (state <> 'idle in transaction' OR backend_xmin IS NOT NULL)`); n != 0 {
		t.Errorf("%d workers have a snapshot", n)
	}
	close(wake)
	r.oracle().WaitEmpty(t, 20*time.Second)
	r.streamed("order", held)
	r.must(tx.Commit(t.Context()))
}

// A part that fails delays the others once, not again and again.
func TestAPartThatFails(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.insert("stuck", "held", `{}`)
	const free = outbox.Partitions - 1
	r.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT DISTINCT ON (part) gen_random_uuid(), 'order', name, 'order.changed', '{}'
		FROM (SELECT name, hashtextextended(name, 0) & 15 AS part FROM (SELECT 'o-' || i FROM generate_series(1, `+
		`500) i) AS names (name)) AS parts
		WHERE part <> hashtextextended('held', 0) & 15`)
	var stuck atomic.Bool
	var met, others, before, beside int
	stuck.Store(true)
	r.ensure = func(stream string) error {
		if stream == prefix+"stuck" && stuck.Load() {
			return errStuck
		}
		return nil
	}
	r.failed = func(err error) {
		if errors.Is(err, errStuck) {
			met++
		} else {
			others++
		}
	}
	r.published = func([]*outbox.Record) {
		r.mu.Lock()
		defer r.mu.Unlock()
		before, beside = met, others
	}
	r.run(r.options(1, 10))
	r.eventually(20*time.Second, "the other parts", func() bool { return len(r.entries("order")) == free })
	r.eventually(20*time.Second, "all told",
		func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.batches) == free })
	r.mu.Lock()
	// A part that fails for the machine's sake waits for its next turn, and the stuck one may have another before it.
	if before > 1+beside {
		t.Errorf("the stuck part was met %d times before the others were done, beside %d other failures; want once",
			before, beside)
	}
	r.mu.Unlock()
	stuck.Store(false)
	r.oracle().WaitEmpty(t, 20*time.Second)
}

var errStuck = errors.New("stuck")
