package sweep_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/relay/stream"
	"posthaste/relay/sweep"
	"posthaste/sql"
)

func TestRunEndsWhenTheScopeDoes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		change func(r *rig)
		want   func(err error) bool
	}{
		{"gap", func(*rig) {}, is(outbox.ErrGap)},
		{"fenced by a later epoch", func(r *rig) { r.adoptAs(r.owner.Source, 2) }, fencedBy(2)},
		{"fenced by another holder of the epoch", func(r *rig) { r.adoptAs(r.owner.Source, 1) }, fencedBy(1)},
		{"superseded, and the gates are not raised yet", func(r *rig) {
			ok, err := r.store.Adopt(r.tb.Context(), outbox.Adoption{
				From: 1, To: outbox.Owner{Source: r.owner.Source, Epoch: 2, Nonce: nonce()}, Holder: "test",
			})
			if err != nil || !ok {
				r.tb.Fatalf("adopt: %v, %v", ok, err)
			}
		}, is(outbox.ErrSuperseded)},
		{"another database", func(r *rig) { r.adoptAs(uuid.New(), 1) }, is(outbox.ErrGap)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.insert("order", "o-1", `{}`)
			run := r.run(r.options(2, 10))
			r.oracle().WaitEmpty(t, 20*time.Second)
			r.must(r.redis.Client.FlushAll(t.Context()).Err())
			c.change(r)
			r.insert("order", "o-1", `{}`)
			if err := r.end(run); !c.want(err) {
				t.Errorf("Run: %v", err)
			}
			now := testenv.Value[string](t, r.db, "SELECT pg_current_snapshot()::text")
			snapshot, err := outbox.ParseSnapshot(now)
			r.must(err)
			pass := outbox.Pass{Settled: outbox.Settled{Snapshot: snapshot, High: math.MaxInt64}}
			err = sweep.New(r.options(2, 10)).Drain(t.Context(), r.scope(), pass)
			if !c.want(err) {
				t.Errorf("Drain: %v", err)
			}
			if n := r.owed(); n != 1 {
				t.Errorf("%d rows are owed, want 1", n)
			}
		})
	}
}

func fencedBy(epoch int64) func(err error) bool {
	return func(err error) bool {
		var fenced *outbox.FencedError
		return errors.As(err, &fenced) && fenced.Epoch == epoch
	}
}

func is(want error) func(err error) bool { return func(err error) bool { return errors.Is(err, want) } }

func (r *rig) adoptAs(source uuid.UUID, epoch int64) {
	r.tb.Helper()
	o := outbox.Owner{Source: source, Epoch: epoch, Nonce: nonce()}
	r.must(r.direct().Adopt(r.tb.Context(), prefix+"order", o, false))
}

// forgetful is a sink for one worker that loses the first reports of settled batches.
type forgetful struct {
	stream.Publisher
	losses     int
	lost, told []outbox.Mark
}

func (f *forgetful) Settled(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	if f.losses--; f.losses >= 0 {
		f.lost = append(f.lost, marks...)
		return errors.New("lost by the test")
	}
	f.told = append(f.told, marks...)
	return f.Publisher.Settled(ctx, o, marks)
}

// A report of settled batches that fails is repeated: until it arrives, the gate keeps their events in doubt, and a
// stream cannot be trimmed.
func TestLostReportsAreRepeated(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.insert("order", "a", `{}`)
	f := &forgetful{Publisher: r.sink, losses: 1}
	o := r.options(1, 50)
	o.Sink = f
	r.must(sweep.New(o).Drain(t.Context(), r.scope(), r.pass()))
	if len(f.lost) != 1 || !slices.Contains(f.told, f.lost[0]) {
		t.Errorf("the reports %+v are lost, and then there were %+v", f.lost, f.told)
	}
}

func TestDrainReachesWhatWasThere(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	load := testenv.Bulk(t, r.db, 2000, 10)
	o := r.options(3, 50)
	// A drain that is cancelled is no success.
	ctx, cancel := context.WithCancel(t.Context())
	r.ensure = func(string) error { cancel(); return nil }
	if err := sweep.New(o).Drain(ctx, r.scope(), r.pass()); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	r.ensure = nil
	more := 0
	r.published = func([]*outbox.Record) {
		// The table never becomes empty, and the pass ends nevertheless.
		r.mu.Lock()
		defer r.mu.Unlock()
		if more < 3000 {
			more++
			r.insert("credits", uuid.NewString(), `{}`)
		}
	}
	pass := r.pass()
	r.insert("credits", "behind the pass", `{}`)
	r.must(sweep.New(o).Drain(t.Context(), r.scope(), pass))
	if n := testenv.Value[int](t, r.db, "SELECT count(*) FROM outbox_backlog WHERE aggregate_type = 'order'"); n != 0 {
		t.Errorf("%d rows left", n)
	}
	r.published = nil
	r.must(sweep.New(o).Drain(t.Context(), r.scope(), r.pass()))
	r.oracle().Check(t, load, time.Second)
	r.must(sweep.New(o).Drain(t.Context(), r.scope(), r.pass())) // of nothing
}

// The connections of a sweep are those of the next one, until they are closed.
func TestConnectionsAreKept(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	o := r.options(1, 5)
	opened := 0
	o.Open = func(ctx context.Context) (sweep.Conn, error) {
		opened++
		return open(r.db.URL)(ctx)
	}
	s := sweep.New(o)
	for range 3 {
		r.insert("order", "a", `{}`)
		r.must(s.Drain(t.Context(), r.scope(), r.pass()))
	}
	testenv.Equal(t, "opened connections", opened, 1)
	s.Rest()
	testenv.Eventually(t, 5*time.Second, func() error {
		n := testenv.Value[int](t, r.db, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'posthaste sweep'`)
		if n > 0 {
			return fmt.Errorf("%d connections are open", n)
		}
		return nil
	})
	r.insert("order", "a", `{}`)
	r.must(s.Drain(t.Context(), r.scope(), r.pass()))
	testenv.Equal(t, "opened connections", opened, 2)
}

// Another session holds a part. The part has reached the pass when its rows are settled, no matter which session
// published them.
func TestDrainWaitsForPartsOfOthers(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	mine := inPart(t, r, 1)[0]
	held := r.insert("order", mine, `{}`)
	r.insert("order", "elsewhere", `{}`)
	other, err := sql.OpenSweep(t.Context(), r.db.URL, "public", "test")
	r.must(err)
	defer other.Close()
	if _, _, ok, err := other.Claim(t.Context(), []int{3}, r.owner); err != nil || !ok {
		t.Fatalf("claim: %v, %v", ok, err)
	}
	done := make(chan error, 1)
	pass := r.pass()
	go func() { done <- sweep.New(r.options(2, 10)).Drain(t.Context(), r.scope(), pass) }()
	r.eventually(20*time.Second, "the other row published", func() bool { return len(r.entries("order")) == 1 })
	select {
	case err := <-done:
		t.Fatalf("Drain ended before the part was free: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	// The other worker settles the row and keeps the part; one that comes later is not waited for.
	p, err := other.Begin(t.Context(), 3, nil)
	r.must(err)
	if events, err := other.Page(t.Context(), p, 1, 1<<20); err != nil || len(events) != 1 || events[0].ID != held {
		t.Fatalf("page %v, %v", events, err)
	}
	r.insert("order", mine, `{}`)
	r.must(other.Settle(t.Context(), p, r.owner, nil))
	select {
	case err := <-done:
		r.must(err)
	case <-time.After(20 * time.Second):
		t.Fatal("Drain waits for a part that is done")
	}
}

// Idle workers ask less and less often, and are there within a second.
func TestIdleWorkersBackOff(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.run(r.options(1, 10))
	asked := map[time.Time]bool{}
	slow := func() bool {
		var at time.Time
		err := r.db.Pool.QueryRow(t.Context(), `SELECT query_start FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'posthaste sweep'`).Scan(&at)
		if err != nil {
			return false // not connected yet
		}
		asked[at] = true
		return len(asked) > 6 && time.Since(at) > 350*time.Millisecond
	}
	r.eventually(20*time.Second, "a pause of 350 ms", slow)
	start := time.Now()
	r.insert("order", "o-1", `{}`)
	r.oracle().WaitEmpty(t, 20*time.Second)
	t.Logf("%d questions before, found after %v", len(asked), time.Since(start))
}

// A server that is not there, or does not answer, neither ends Run nor holds up its end.
func TestPostgresIsGoneForAWhile(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	pg := testenv.NewLink(t, r.db.Pool.Config().ConnConfig.Host+":"+fmt.Sprint(r.db.Pool.Config().ConnConfig.Port))
	o := r.options(2, 50)
	o.Open = open(testenv.Through(r.db.URL, pg.Addr()))
	run := r.run(o)
	load := testenv.StartLoad(t, r.db, testenv.LoadOptions{Total: 300, Rate: 1000})
	r.eventually(20*time.Second, "progress", func() bool { return len(r.entries("order")) > 20 })
	pg.Down()
	load.Wait()
	pg.Up()
	r.oracle().Check(t, load, 20*time.Second)
	pg.Set(testenv.Trouble{LoseReplies: true})
	r.insert("order", "o-1", `{}`)
	run.stop()
	r.must(r.end(run))
}
