package sweep_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
	"posthaste/outbox"
	"posthaste/relay/stream"
	"posthaste/relay/sweep"
)

// Every test here ends with the oracle: nothing lost, nothing twice, every aggregate in order.

func TestRedisIsGoneForAWhile(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.run(r.options(2, 50))
	load := testenv.StartLoad(t, r.db, testenv.LoadOptions{Total: 600, Rate: 1200})
	seen := 0
	for range 2 {
		r.eventually(20*time.Second, "progress", func() bool { return len(r.entries("order")) > seen })
		r.proxy.Down()
		seen = len(r.entries("order"))
		n := load.Committed()
		r.eventually(20*time.Second, "a backlog", func() bool { return load.Committed() >= min(n+100, 600) })
		r.proxy.Up()
	}
	load.Wait()
	r.oracle().Check(t, load, 20*time.Second)
}

func TestRepliesOfRedisAreLost(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.adoptDirectly("order") // the first call whose reply is lost should be a publish
	r.insert("credits", "u-1", `{}`)
	r.run(r.options(1, 50))
	r.oracle().WaitEmpty(t, 20*time.Second) // and Redis should know its script
	r.proxy.Set(testenv.Trouble{LoseReplies: true})
	load := testenv.StartLoad(t, r.db, testenv.LoadOptions{Total: 300, Writers: 2})
	r.eventually(20*time.Second, "a publish without an answer",
		func() bool { r.mu.Lock(); defer r.mu.Unlock(); return r.failures > 0 })
	r.proxy.Set(testenv.Trouble{})
	load.Wait()
	r.oracle().Check(t, load, 30*time.Second)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.suppressed() == 0 {
		t.Error("nothing was published in doubt: the test is not what it says")
	}
}

// adoptDirectly raises the gate of a stream without the proxy.
func (r *rig) adoptDirectly(typ string) {
	r.tb.Helper()
	r.must(r.direct().Adopt(r.tb.Context(), prefix+typ, r.owner, false))
	r.adopted[prefix+typ] = true
}

func TestTheMarkFails(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.db.Exec(t, `CREATE TABLE broken ();
		CREATE FUNCTION break() RETURNS trigger LANGUAGE plpgsql AS
			$$ BEGIN IF EXISTS (SELECT FROM broken) THEN RAISE 'the commit fails'; END IF; RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER break AFTER INSERT ON outbox_mark DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION break();
		INSERT INTO broken DEFAULT VALUES`)
	load := testenv.StartLoad(t, r.db, testenv.LoadOptions{Total: 300})
	load.Wait() // before the sweep: a part's first batch is its largest while marks fail
	r.run(r.options(2, 50))
	r.eventually(20*time.Second, "entries", func() bool { return len(r.entries("order")) >= 50 })
	if n := r.owed(); n != load.Committed() {
		t.Errorf("%d rows are owed of %d: the mark does not fail", n, load.Committed())
	}
	r.db.Exec(t, "TRUNCATE broken")
	r.oracle().Check(t, load, 20*time.Second)
}

func TestBackendsEndBetweenPublishAndMark(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	o := r.options(2, 50)
	var mu sync.Mutex
	left, ended := 5, 0
	o.Sink = hooked{r.sink, func() {
		mu.Lock()
		defer mu.Unlock()
		if left--; left >= 0 {
			ended += r.terminate()
		}
	}}
	load := testenv.StartLoad(t, r.db, testenv.LoadOptions{Total: 600})
	r.run(o)
	load.Wait()
	r.oracle().Check(t, load, 20*time.Second)
	mu.Lock()
	defer mu.Unlock()
	if ended < 5 {
		t.Errorf("%d backends ended, want 5 at least", ended)
	}
}

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

// The answer to the write of a mark is lost. The next claim reads the new mark, or finds the events in doubt.
func TestTheAnswerToAMarkIsLost(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	load := testenv.Bulk(t, r.db, 300, 10)
	pg := testenv.NewLink(t, r.db.Pool.Config().ConnConfig.Host+":"+portOf(r))
	o := r.options(1, 5)
	o.Open = open(testenv.Through(r.db.URL, pg.Addr()))
	var lost, marks atomic.Int64
	marks.Store(math.MaxInt64)
	count := func() int64 { return testenv.Value[int64](t, r.db, "SELECT count(*) FROM outbox_mark WHERE part >= 0") }
	o.Sink = hooked{r.sink, func() {
		if n := lost.Add(1); n == 3 {
			marks.Store(count())
			pg.Set(testenv.Trouble{LoseReplies: true})
		}
	}}
	r.run(o)
	r.eventually(20*time.Second, "a mark without an answer",
		func() bool { return lost.Load() == 3 && count() > marks.Load() })
	pg.Down() // or it would take as long as a call may
	pg.Set(testenv.Trouble{})
	pg.Up()
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
	var later uuid.UUID
	if n := r.owed(); n != 8 || len(r.entries("order")) != 6 {
		t.Fatalf("%d rows are owed and %d entries published, want 8 and 6", n, len(r.entries("order")))
	}
	later = r.insert("order", aggregates[0], "{}")
	r.run(r.options(1, 3))
	r.oracle().WaitEmpty(t, 20*time.Second)
	if got := r.entries("order"); !slices.Equal(got, append(want, later)) {
		t.Errorf("published %v, want %v", got, append(want, later))
	}
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
			asleep, wake := make(chan struct{}), make(chan struct{})
			var once sync.Once
			sleep := func() { once.Do(func() { close(asleep); <-wake }) }
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
	r.adoptDirectly("order")
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
	asleep, wake := make(chan struct{}), make(chan struct{})
	var once sync.Once
	o := r.options(1, 10)
	o.Sink = hooked{r.sink, func() { once.Do(func() { close(asleep); <-wake }) }}
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
	if got := r.entries("order"); !slices.Equal(got, []uuid.UUID{held}) {
		t.Errorf("published %v, want %v", got, held)
	}
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

// An event that is parked in a page whose mark is not written is parked again, once.
func TestACrashBetweenParkAndMark(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.must(r.redis.Client.Set(t.Context(), prefix+"broken", "not a stream", 0).Err())
	aggregates := inPart(t, r, 2)
	var fine []uuid.UUID
	refused := r.insert("broken", aggregates[0], `{}`)
	for i := range 5 {
		fine = append(fine, r.insert("order", aggregates[i%2], `{}`))
	}
	o := r.options(1, 10)
	var crashed atomic.Int64
	o.Sink = hooked{r.sink, func() {
		if crashed.Add(1) == 1 {
			r.terminate()
		}
	}}
	r.run(o)
	r.oracle().WaitEmpty(t, 20*time.Second)
	if got := r.entries("order"); !slices.Equal(got, fine) {
		t.Errorf("published %v, want %v", got, fine)
	}
	n := testenv.Value[int](t, r.db, "SELECT attempts FROM outbox_dead WHERE id = $1", refused)
	if n <= stream.Attempts {
		t.Errorf("parked after %d attempts, want more than %d", n, stream.Attempts)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if crashed.Load() < 1 || len(r.parked) != 1 || r.parked[0].ID != refused {
		t.Errorf("%d crashes; told of %v", crashed.Load(), r.parked)
	}
}

// Another relay has adopted and the gates have not been raised yet. Events published now are not settled, and the sweep
// ends.
func TestASupersededSweepEnds(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.insert("order", "o-1", `{}`)
	run := r.run(r.options(2, 10))
	r.oracle().WaitEmpty(t, 20*time.Second)
	marks := testenv.Value[int](t, r.db, "SELECT count(*) FROM outbox_mark")
	old := r.owner
	r.owner.Epoch, r.owner.Nonce = 2, nonce()
	ok, err := r.store.Adopt(t.Context(), outbox.Adoption{From: 1, To: r.owner, Holder: "test"})
	if err != nil || !ok {
		t.Fatalf("adopt: %v, %v", ok, err)
	}
	id := r.insert("order", "o-1", `{}`)
	if err := r.end(run); !errors.Is(err, outbox.ErrSuperseded) {
		t.Errorf("Run: %v", err)
	}
	scope := r.scope()
	scope.Owner = old
	if err := sweep.New(r.options(2, 10)).Drain(t.Context(), scope, r.pass()); !errors.Is(err, outbox.ErrSuperseded) {
		t.Errorf("Drain: %v", err)
	}
	now := testenv.Value[int](t, r.db, "SELECT count(*) FROM outbox_mark WHERE settled IS NOT NULL")
	if owed := r.owed(); now != marks || owed != 1 {
		t.Errorf("%d marks were %d, and %d rows are owed", now, marks, owed)
	}
	r.adopted = map[string]bool{}
	r.run(r.options(2, 10))
	r.oracle().WaitEmpty(t, 20*time.Second)
	if got := r.entries("order"); len(got) != 2 || got[1] != id {
		t.Errorf("published %v, want each once", got)
	}
}
