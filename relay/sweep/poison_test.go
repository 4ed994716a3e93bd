package sweep_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/link"
	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/relay/stream"
	"posthaste/relay/sweep"
	"posthaste/sink"
	"posthaste/sql"
)

// parks checks which events are parked.
func (r *rig) parks(want ...uuid.UUID) {
	r.tb.Helper()
	ids, err := sql.DeadIDs(r.tb.Context(), r.db.Pool)
	r.must(err)
	if !slices.Equal(ids, want) {
		r.tb.Errorf("parked %v, want %v", ids, want)
	}
}

// Events of many aggregates go to a key of another type. The sweep tries that stream a few times rather than once for
// each event, and the claim does not end, so the events of other streams do not wait.
func TestAStreamThatRefusesEndsNoClaim(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.must(r.redis.Client.Set(t.Context(), prefix+"broken", "not a stream", 0).Err())
	r.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
		SELECT gen_random_uuid(), CASE WHEN n % 7 = 0 THEN 'order' ELSE 'broken' END, 'o-' || n, 'changed', '{}'
		FROM generate_series(1, 350) n`)
	refused := 0
	r.failed = func(err error) {
		if poison := (*outbox.PoisonError)(nil); errors.As(err, &poison) {
			refused++
		}
	}
	const workers = 2
	r.run(r.options(workers, 500))
	r.oracle().WaitEmpty(t, 20*time.Second)
	dead := testenv.Value[int](t, r.db, "SELECT count(*) FROM outbox_dead")
	if n := len(r.entries("order")); n != 50 || dead != 300 {
		t.Errorf("%d events published and %d parked, want 50 and 300", n, dead)
	}
	told := func() int { r.mu.Lock(); defer r.mu.Unlock(); return len(r.parked) }
	r.eventually(20*time.Second, "told of all", func() bool { return told() >= 300 }) // told behind the commit
	if n := told(); n != 300 {
		t.Errorf("told of %d parked events, want 300", n)
	}
	// Once for each part; each worker may be the first.
	n := testenv.Value[int](t, r.db, "SELECT sum(attempts) FROM outbox_dead")
	if most := outbox.Partitions + workers*stream.Attempts; n > most {
		t.Errorf("the stream has refused %d times, want %d at most", n, most)
	}
	if n := testenv.Value[int](t, r.db, `SELECT count(*) FROM outbox_dead
		WHERE class <> 'wrongtype' OR error NOT LIKE '%WRONGTYPE%'`); n != 0 {
		t.Errorf("%d events are parked for another reason", n)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if refused > 0 {
		t.Errorf("%d claims have ended because an event was refused", refused)
	}
}

// Parking may fail. The attempts made before that still count.
func TestAttemptsOutliveAFailure(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.must(r.redis.Client.Set(t.Context(), prefix+"broken", "not a stream", 0).Err())
	r.insert("broken", "o-1", `{}`)
	r.db.Exec(t, `CREATE TABLE broken ();
		CREATE FUNCTION break() RETURNS trigger LANGUAGE plpgsql AS
			$$ BEGIN IF EXISTS (SELECT FROM broken) THEN RAISE 'not now'; END IF; RETURN NEW; END $$;
		CREATE TRIGGER break BEFORE INSERT ON outbox_dead FOR EACH ROW EXECUTE FUNCTION break();
		INSERT INTO broken DEFAULT VALUES`)
	failed := make(chan struct{})
	var once sync.Once
	r.failed = func(err error) {
		if sql.SQLState(err) == "P0001" {
			once.Do(func() { close(failed) })
		}
	}
	r.run(r.options(1, 10))
	r.await(failed)
	r.db.Exec(t, "TRUNCATE broken")
	r.oracle().WaitEmpty(t, 20*time.Second)
	dead, err := sql.ListDead(t.Context(), r.db.Pool, 1)
	r.must(err)
	if len(dead) != 1 || dead[0].Attempts < 4 {
		t.Errorf("parked: %+v, want 3 attempts before the failure and one behind it", dead)
	}
}

// unreadable makes reading the row fail for the sake of its data.
func (r *rig) unreadable(id uuid.UUID) {
	r.tb.Helper()
	r.db.Exec(r.tb, `UPDATE outbox SET payload = '{"spoilt": true}' WHERE id = $1`, id)
	r.db.Exec(r.tb, `CREATE FUNCTION spoil(jsonb) RETURNS text IMMUTABLE STRICT LANGUAGE plpgsql AS $$
		BEGIN
			IF $1 ? 'spoilt' THEN RAISE 'spoilt' USING ERRCODE = '22P05'; END IF;
			RETURN textin(jsonb_out($1));
		END $$;
		CREATE CAST (jsonb AS text) WITH FUNCTION spoil(jsonb)`)
}

// A row that cannot be read is parked, and its neighbours in the batch are published. The same for an event larger than
// what Redis takes: that breaks the connection, and says nothing, and is found within the contract's 20 s.
func TestAnUnreadableRowIsParkedAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t, "client-query-buffer-limit 1mb")
	aggregates := inPart(t, r, 3)
	var fine []uuid.UUID
	var spoilt, large uuid.UUID
	for i := range 60 {
		switch i {
		case 20:
			large = r.insert("order", aggregates[0], fmt.Sprintf(`{"pad":%q}`, strings.Repeat("y", 2<<20)))
		case 37:
			spoilt = r.insert("order", aggregates[1], `{}`)
		default:
			fine = append(fine, r.insert("order", aggregates[i%3], `{}`))
		}
	}
	r.unreadable(spoilt)
	r.run(r.options(2, 500))
	r.oracle().WaitEmpty(t, 20*time.Second)
	r.streamed("order", fine...)
	dead, err := sql.ListDead(t.Context(), r.db.Pool, 10)
	r.must(err)
	at := slices.IndexFunc(dead, func(d outbox.Dead) bool { return d.ID == spoilt })
	if len(dead) != 2 || at < 0 || dead[1-at].ID != large {
		t.Fatalf("parked: %+v", dead)
	}
	if d := dead[at]; d.Class != "unreadable" || !strings.Contains(d.Error, "spoilt") || d.Attempts != 1 {
		t.Errorf("parked: %+v", d)
	}
	r.mu.Lock()
	if len(r.parked) != 2 || !slices.ContainsFunc(r.parked, func(e *outbox.Record) bool {
		return e.ID == spoilt && e.AggregateID == dead[at].AggregateID && e.AggregateType == "order"
	}) {
		t.Errorf("told of %+v", r.parked)
	}
	r.mu.Unlock()
	// The server could copy the payload, so nothing is lost.
	r.db.Exec(t, "DROP CAST (jsonb AS text)")
	r.must(sql.RetryDead(t.Context(), r.db.Pool, spoilt))
	r.eventually(20*time.Second, "the retried event", func() bool {
		return slices.Equal(r.entries("order"),
			append(slices.Clone(fine), spoilt))
	})
}

func TestInfiniteTimes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for _, at := range []string{"infinity", "-infinity", "294276-12-31", "4713-01-01 BC"} {
		r.db.Exec(t, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload, created_at)
			VALUES (gen_random_uuid(), 'order', 'o-1', 'order.changed', '{}', $1::text::timestamptz)`, at)
	}
	if n, _, err := r.store.Backlog(t.Context()); err != nil || n != 4 {
		t.Errorf("backlog %d, %v", n, err)
	}
	r.run(r.options(1, 10))
	r.oracle().WaitEmpty(t, 20*time.Second)
	if n := testenv.Value[int](t, r.db, "SELECT count(*) FROM outbox_history WHERE isfinite(created_at)"); n != 4 ||
		len(r.entries("order")) != 4 {
		t.Errorf("%d rows of history, %d entries; want 4", n, len(r.entries("order")))
	}
}

func TestBatchesAreBoundedByBytes(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	aggregates := inPart(t, r, 1)
	for i := range 12 {
		size := 1 << 20
		if i < 3 {
			size = 8<<20 - 16 // the largest there may be
		}
		r.insert("order", aggregates[0], fmt.Sprintf(`{"p": %q}`, strings.Repeat("z", size-8)))
	}
	r.run(r.options(1, 500))
	r.oracle().WaitEmpty(t, 30*time.Second)
	r.eventually(20*time.Second, "all told",
		func() bool { r.mu.Lock(); defer r.mu.Unlock(); return len(r.batches) >= 6 })
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, b := range r.batches {
		if i < 3 && len(b) != 1 || len(b) > 5 {
			t.Errorf("batch %d has %d events", i, len(b))
		}
	}
}

// Redis refuses one event, and any call with many arguments, with words that no class describes. The batches get
// smaller, that event is parked, and the others are published in order.
func TestUnknownRepliesToASweep(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	proxy := testenv.Strange(t, r.redis, link.Oddities{MaxArgs: 400, Judge: func(args [][]byte) string {
		for _, a := range args {
			if bytes.Contains(a, []byte("unbearable")) && len(a) < 100 {
				return "ERR the policy of this service forbids it"
			}
		}
		return ""
	}})
	client, err := sink.NewClient("redis://" + proxy.Addr())
	r.must(err)
	t.Cleanup(func() { _ = client.Close() })
	r.sink = sink.New(sink.Options{Client: client, Source: "/posthaste/test", Logger: testenv.Logger(t)})
	aggregate := inPart(t, r, 1)[0]
	var want, bad []uuid.UUID
	for i := range 300 {
		if i == 150 {
			bad = append(bad, r.insert("order", aggregate, `"unbearable"`))
		}
		want = append(want, r.insert("order", aggregate, `{}`))
	}
	r.run(r.options(1, 500))
	r.oracle().WaitEmpty(t, 60*time.Second)
	r.streamed("order", want...)
	r.parks(bad...)
}

// A stream that cannot be published to delays only its own events, although those of other streams in the same part are
// behind them. When it can be published to again, each event is there once, in order.
func TestABlockedStreamDelaysOnlyItself(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cured := r.stuck()
	var named atomic.Bool
	r.failed = func(err error) { named.Store(named.Load() || errors.Is(err, errStuck)) }
	aggregates := inPart(t, r, 3)
	want := map[string][]uuid.UUID{}
	write := func() {
		for i := range 30 {
			for _, typ := range []string{"stuck", "order", "user"} {
				want[typ] = append(want[typ], r.insert(typ, aggregates[i%3], `{}`))
			}
		}
	}
	write()
	run := r.run(r.options(2, 10))
	flows := func() {
		t.Helper()
		for _, typ := range []string{"order", "user"} {
			r.eventually(20*time.Second, "the events of "+typ, func() bool {
				return len(r.entries(typ)) == len(want[typ])
			})
		}
	}
	flows()
	write() // the pass has begun without these
	flows()
	if n := len(r.entries("stuck")); n > 0 || !named.Load() || r.owed() != 180 {
		t.Errorf("%d events in the blocked stream, named %v, %d unsettled", n, named.Load(), r.owed())
	}
	if r.terminate() == 0 {
		t.Error("there is no worker")
	}
	write()
	flows()
	run.stop()
	r.must(r.end(run))
	r.run(r.options(2, 10)) // another process, which does not know what is published
	write()
	flows()
	cured.Store(true)
	r.oracle().WaitEmpty(t, 20*time.Second)
	for typ, ids := range want {
		r.streamed(typ, ids...)
	}
	if n := testenv.Value[int](t, r.db, "SELECT count(*) FROM outbox_dead"); n != 0 {
		t.Errorf("%d dead events", n)
	}
}

// stuck makes the stream of the type "stuck" one that cannot be published to, until it is cured.
func (r *rig) stuck() (cured *atomic.Bool) {
	cured = &atomic.Bool{}
	r.ensure = func(stream string) error {
		if stream == prefix+"stuck" && !cured.Load() {
			return &outbox.StreamError{Stream: stream, Err: errStuck}
		}
		return nil
	}
	return cured
}

// A stream that is blocked for a moment, while the sweep is ahead of the mark, gets its events in order.
func TestAStreamIsBlockedForAMoment(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cured := r.stuck()
	stuck, failed := r.ensure, false
	r.ensure = func(stream string) error {
		if stream == prefix+"slow" {
			time.Sleep(150 * time.Millisecond) // the stream may be tried again in a later page
		}
		if stream == prefix+"order" && !failed {
			failed = true
			return &outbox.StreamError{Stream: stream, Err: errStuck}
		}
		return stuck(stream)
	}
	aggregate := inPart(t, r, 1)[0]
	r.insert("stuck", aggregate, `{}`)
	for range 9 { // the rest of the page
		r.insert("slow", aggregate, `{}`)
	}
	var want []uuid.UUID
	for range 25 {
		r.insert("slow", aggregate, `{}`)
		want = append(want, r.insert("order", aggregate, `{}`))
	}
	r.run(r.options(1, 10))
	r.eventually(20*time.Second, "all events", func() bool { return len(r.entries("order")) == len(want) })
	cured.Store(true)
	r.oracle().WaitEmpty(t, 20*time.Second)
	r.streamed("order", want...)
}

// A drain ends with one mark of its pass, and the stream then publishes what is newer. So a drain must not.
func TestADrainPublishesNothingNewer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cured := r.stuck()
	aggregate := inPart(t, r, 1)[0]
	r.insert("stuck", aggregate, `{}`)
	before := r.insert("order", aggregate, `{}`)
	pass := r.pass()
	r.insert("order", aggregate, `{}`)
	var failures atomic.Int64
	r.failed = func(error) { failures.Add(1) }
	done := make(chan error, 1)
	go func() { done <- sweep.New(r.options(2, 10)).Drain(t.Context(), r.scope(), pass) }()
	r.eventually(20*time.Second, "some turns", func() bool { return failures.Load() > 5 })
	cured.Store(true)
	r.must(<-done)
	r.streamed("order", before)
}

// With block-key, events wait for one that the same claim parks, also ahead of a blocked stream; and for one that
// another relay has parked since the page before.
func TestBlockKeyHoldsInEveryPage(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"ahead", "another relay"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, "client-query-buffer-limit 1mb")
			aggregate := inPart(t, r, 1)[0]
			var want []uuid.UUID
			if name == "ahead" {
				r.stuck()
				r.insert("stuck", aggregate, `{}`)
				r.insert("order", aggregate, `"`+strings.Repeat("x", 2<<20)+`"`)
			} else {
				want = append(want, r.insert("order", aggregate, `{}`))
				r.insert("order", aggregate, `{}`)
				var once sync.Once
				r.published = func([]*outbox.Record) { once.Do(func() { r.parkNext() }) }
			}
			for range 4 {
				r.insert("order", aggregate, `{}`)
			}
			scope := r.scope()
			h := scope.Host.(*host)
			var dead atomic.Pointer[string]
			scope.BlockKey = true
			h.refresh = func(ctx context.Context) error {
				list, err := r.store.Parked(ctx)
				if len(list) > 0 {
					id := list[0].ID.String()
					dead.Store(&id)
				}
				return err
			}
			h.blocker = func(e *outbox.Record) string {
				if id := dead.Load(); id != nil && e.AggregateType == "order" {
					return *id
				}
				return ""
			}
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- sweep.New(r.options(1, max(1, 3*(1-len(want))))).Run(ctx, scope) }()
			r.eventually(20*time.Second, "five dead events", func() bool {
				return testenv.Value[int](t, r.db, "SELECT count(*) FROM outbox_dead") == 5
			})
			cancel()
			r.must(<-done)
			r.streamed("order", want...)
		})
	}
}

// parkNext parks the next row of part 3, as another relay does.
func (r *rig) parkNext() {
	r.tb.Helper()
	ctx := r.tb.Context()
	s, err := sql.OpenSweep(ctx, r.db.URL, "public", "test")
	r.must(err)
	defer s.Close()
	if _, _, ok, err := s.Claim(ctx, []int{3}, r.owner); err != nil || !ok {
		r.tb.Errorf("the part is not free between two pages: %v", err)
		return
	}
	p, err := s.Begin(ctx, 3, nil)
	r.must(err)
	events, err := s.Page(ctx, p, 1, 1<<20)
	r.must(err)
	refused := outbox.Refused{Event: events[0], Err: errStuck, Class: "too_large", Attempts: 3}
	r.must(s.Park(ctx, p, r.owner, []outbox.Refused{refused}))
	r.must(s.Drop(ctx))
}

// When everything is settled, the gate has nothing in doubt, although workers take turns with a part.
func TestNoDoubtIsLeft(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	aggregates := inPart(t, r, 3)
	for i := range 600 {
		r.insert("order", aggregates[i%3], `{}`)
	}
	run := r.run(r.options(6, 2))
	r.oracle().WaitEmpty(t, 20*time.Second)
	run.stop()
	r.must(r.end(run))
	gates, err := r.redis.Client.Keys(t.Context(), "{"+prefix+"order}:gate:*").Result()
	r.must(err)
	if len(gates) != 1 {
		t.Fatalf("gates %v", gates)
	}
	if n, _ := r.redis.Client.HGet(t.Context(), gates[0], "doubt").Int(); n != 0 {
		t.Errorf("%d events are in doubt", n)
	}
}
