package poll_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"posthaste/internal/testenv"
	"posthaste/outbox"
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
	r.proxy.Toxic(`{"name":"lost","type":"timeout","stream":"downstream","attributes":{"timeout":0}}`)
	load := testenv.StartLoad(t, r.db, testenv.LoadOptions{Total: 300, Writers: 2})
	r.eventually(20*time.Second, "a publish without an answer",
		func() bool { r.mu.Lock(); defer r.mu.Unlock(); return r.failures > 0 })
	r.proxy.Remove("lost")
	load.Wait()
	r.oracle().Check(t, load, 30*time.Second)
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.suppressed == 0 {
		t.Error("nothing was published in doubt: the test is not what it says")
	}
}

// adoptDirectly raises the gate of a stream without the proxy.
func (r *rig) adoptDirectly(typ string) {
	r.tb.Helper()
	r.must(r.direct().Adopt(r.tb.Context(), prefix+typ, r.owner))
	r.adopted[prefix+typ] = true
}

func TestTheCommitFails(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.db.Exec(t, `CREATE TABLE broken ();
		CREATE FUNCTION break() RETURNS trigger LANGUAGE plpgsql AS
			$$ BEGIN IF EXISTS (SELECT FROM broken) THEN RAISE 'the commit fails'; END IF; RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER break AFTER DELETE ON outbox DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE `+
		`FUNCTION break();
		INSERT INTO broken DEFAULT VALUES`)
	load := testenv.StartLoad(t, r.db, testenv.LoadOptions{Total: 300})
	load.Wait() // before the sweep: a part's first batch is its largest while commits fail
	r.run(r.options(2, 50))
	r.eventually(20*time.Second, "entries", func() bool { return len(r.entries("order")) >= 50 })
	if n := testenv.Value[int](t, r.db, "SELECT count(*) FROM outbox"); n != load.Committed() {
		t.Errorf("%d rows left of %d: the commit does not fail", n, load.Committed())
	}
	r.db.Exec(t, "TRUNCATE broken")
	r.oracle().Check(t, load, 20*time.Second)
}

func TestBackendsEndBetweenPublishAndCommit(t *testing.T) {
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

// A worker's session is ended while it stands still, before it publishes and behind; another one does its work; then it
// wakes. Its late publish and its late commit must change nothing, and it must go on working.
func TestAZombieWakes(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before publishing", "before the commit"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			load := testenv.Bulk(t, r.db, 400, 10)
			asleep, wake := make(chan struct{}), make(chan struct{})
			var once sync.Once
			sleep := func() { once.Do(func() { close(asleep); <-wake }) }
			o := r.options(1, 30)
			if when == "before publishing" {
				r.ensure = func(string) { sleep() }
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
	r.proxy.Toxic(`{"name":"slow","type":"bandwidth","stream":"upstream","attributes":{"rate":300}}`)
	r.run(r.options(1, 500))
	r.oracle().WaitEmpty(t, 60*time.Second)
	if n := len(r.entries("order")); n != 200 {
		t.Errorf("%d entries, want 200", n)
	}
}

// Rows that another session holds delay their own part; the others are delayed once, not again and again.
func TestRowsHeldByAnotherSession(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	held := r.insert("order", "held", `{}`)
	tx := r.begin()
	_, err := tx.Exec(t.Context(), "SELECT FROM outbox WHERE id = $1 FOR UPDATE", held)
	r.must(err)
	const free = outbox.Partitions - 1
	r.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT DISTINCT ON (part) gen_random_uuid(), 'order', name, 'order.changed', '{}'
		FROM (SELECT name, hashtextextended(name, 0) & 15 AS part FROM (SELECT 'o-' || i FROM generate_series(1, `+
		`500) i) AS names (name)) AS parts
		WHERE part <> hashtextextended('held', 0) & 15`)
	var locked, others atomic.Int64
	r.published = func([]*outbox.Event) {
		r.mu.Lock()
		defer r.mu.Unlock()
		locked.Store(int64(r.locked))
		others.Store(int64(r.failures - r.locked))
	}
	r.run(r.options(1, 10))
	r.eventually(20*time.Second, "the other parts", func() bool { return len(r.entries("order")) == free })
	// A part that fails for the machine's sake waits for its next turn, and the held one may have another before it.
	if n, m := locked.Load(), others.Load(); n > 1+m {
		t.Errorf("the held row was met %d times before the others were published, beside %d other failures; want once",
			n, m)
	}
	r.must(tx.Rollback(t.Context()))
	r.oracle().WaitEmpty(t, 20*time.Second)
	r.eventually(20*time.Second, "the held one", func() bool { return len(r.entries("order")) == free+1 })
}
