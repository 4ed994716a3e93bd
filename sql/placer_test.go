package sql_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"

	"posthaste/internal/lab/testenv"
	"posthaste/internal/pause"
	"posthaste/outbox"
	"posthaste/sql"
)

// pair is an order and its event.
type pair struct {
	o *sql.Order
	e *outbox.Event
}

func pairs(n int) []pair {
	list := make([]pair, n)
	for i := range list {
		list[i].o, list[i].e = newOrder(uuid.New(), byte(i))
	}
	return list
}

func placing(ctx context.Context, w *sql.Placer, p pair) <-chan result {
	done := make(chan result, 1)
	go func() {
		placed, err := w.Place(ctx, p.o, p.e)
		done <- result{placed, err}
	}()
	return done
}

// gathering is a Placer whose only connection is in use.
type gathering struct {
	t    *testing.T
	pool *sql.Pool
	w    *sql.Placer
	// free returns the connection.
	free func()
	n    int
}

func gather(t *testing.T, url string) *gathering {
	t.Helper()
	pool := orderPool(t, url, 1)
	conn, err := pool.Acquire(t.Context())
	must(t, err)
	g := &gathering{t: t, pool: pool, w: sql.NewPlacer(pool), free: sync.OnceFunc(conn.Release)}
	t.Cleanup(g.free)
	sql.Patient(g.w)
	return g
}

// add enqueues p after the earlier ones.
func (g *gathering) add(ctx context.Context, p pair) <-chan result {
	g.t.Helper()
	done := placing(ctx, g.w, p)
	g.n++
	testenv.Eventually(g.t, 20*time.Second, func() error {
		n := sql.Waiting(g.w)
		return testenv.FailIf(n != g.n, "%d wait, not %d", n, g.n)
	})
	return done
}

func (g *gathering) addAll(list []pair) (results []<-chan result) {
	g.t.Helper()
	for _, p := range list {
		results = append(results, g.add(g.t.Context(), p))
	}
	return results
}

func wantPlaced(t *testing.T, results []<-chan result) {
	t.Helper()
	for i, r := range results {
		if r := <-r; !r.placed || r.err != nil {
			t.Errorf("order %d: %v, %v", i, r.placed, r.err)
		}
	}
}

func TestOrdersThatWaitAreInsertedTogether(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	g := gather(t, d.URL)
	list := pairs(5)
	list[1].e.Headers = nil
	list[2].o.Fence, list[2].o.PayWith = 7, sql.PayCredits
	refused := list[3].o
	refused.Status, refused.RespStatus, refused.RespBody, list[3].e = sql.OrderRejected, 402, []byte("no"), nil
	results := g.addAll(list)
	g.free()
	wantPlaced(t, results)
	var ids []uuid.UUID
	for i, p := range list {
		ids = append(ids, p.o.ID)
		got, err := sql.OrderByID(t.Context(), d.Pool, p.o.ID)
		if err != nil || fmt.Sprint(*got) != fmt.Sprint(*p.o) {
			t.Errorf("order %d: %v, %v, want %v", i, got, err, p.o)
		}
		if p.e == nil {
			continue
		}
		const same = `SELECT aggregate_type = $2 AND aggregate_id = $3 AND event_type = $4 AND payload = $5::text::jsonb
			AND (headers->>'traceparent') IS NOT DISTINCT FROM $6 FROM outbox WHERE id = $1`
		var header *string
		if h, ok := p.e.Headers["traceparent"]; ok {
			header = &h
		}
		var is bool
		e := p.e
		err = d.Pool.QueryRow(t.Context(), same, e.ID, e.AggregateType, e.AggregateID, e.Type, string(e.Payload),
			header).Scan(&is)
		if err != nil || !is {
			t.Errorf("the event of order %d: %v, %v", i, is, err)
		}
	}
	wantCounts(t, d, "5 orders, 4 events")
	var transactions int
	must(t, d.Pool.QueryRow(t.Context(), `SELECT count(DISTINCT x) FROM (
		SELECT xmin::text FROM orders WHERE id = ANY($1) UNION ALL SELECT xmin::text FROM outbox) AS r (x)`,
		ids).Scan(&transactions))
	if transactions != 1 {
		t.Errorf("%d transactions", transactions)
	}
}

// Several attempts have the same key, some the same id: one of them places the order, the others do not.
func TestOneKeyTwiceInAGroup(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	g := gather(t, d.URL)
	list := pairs(6)
	list[1].o.UserID, list[1].o.Key = list[0].o.UserID, list[0].o.Key
	list[3].o, list[4].o = list[2].o, list[2].o
	results := g.addAll(list)
	g.free()
	placed := make([]int, len(list))
	for i, r := range results {
		r := <-r
		if r.err != nil {
			t.Errorf("order %d: %v", i, r.err)
		}
		if r.placed {
			placed[i]++
		}
	}
	if placed[0]+placed[1] != 1 || placed[2]+placed[3]+placed[4] != 1 || placed[5] != 1 {
		t.Errorf("placed %v", placed)
	}
	wantCounts(t, d, "3 orders, 3 events")
}

// If the server refuses one order of a group, even by an error of the commit, nothing of it is written, and the others
// are still placed.
func TestWhatIsRefusedOfAGroup(t *testing.T) {
	t.Parallel()
	for name, trigger := range map[string]string{
		"at the order": "CREATE TRIGGER refuse BEFORE INSERT ON orders FOR EACH ROW",
		"at the event": "CREATE TRIGGER refuse BEFORE INSERT ON outbox FOR EACH ROW",
		"at the commit": "CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED " +
			"FOR EACH ROW",
		"by a lock": "",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := testenv.Postgres(t)
			g := gather(t, d.URL)
			list := pairs(4)
			bad := list[2]
			if trigger == "" {
				holdKey(t, d, bad.o)
			} else {
				d.Exec(t, fmt.Sprintf(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					IF NEW.id IN ('%s', '%s') THEN RAISE check_violation; END IF; RETURN NEW; END $$`,
					bad.o.ID, bad.e.ID))
				d.Exec(t, trigger+" EXECUTE FUNCTION refuse()")
			}
			results := g.addAll(list)
			g.free()
			for i, r := range results {
				r := <-r
				switch {
				case i != 2 && (!r.placed || r.err != nil):
					t.Errorf("order %d: %v, %v", i, r.placed, r.err)
				case i != 2:
				case name == "by a lock" && !errors.Is(r.err, sql.ErrOrderLocked),
					name != "by a lock" && sql.SQLState(r.err) != pgerrcode.CheckViolation,
					r.placed, errors.Is(r.err, sql.ErrCommitUnknown):
					t.Errorf("the bad one: %v, %v", r.placed, r.err)
				}
			}
			wantCounts(t, d, "3 orders, 3 events")
			wantIdle(t, g.pool)
		})
	}
}

// A caller whose order was not sent may give up: nothing was written and nothing will be.
func TestWhoWaitsMayGiveUp(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	g := gather(t, d.URL)
	list := pairs(3)
	ctx, giveUp := context.WithCancel(t.Context())
	first := g.add(ctx, list[0])
	results := g.addAll(list[1:])
	giveUp()
	if r := <-first; r.placed || !errors.Is(r.err, context.Canceled) || errors.Is(r.err, sql.ErrCommitUnknown) {
		t.Errorf("who gave up: %v, %v", r.placed, r.err)
	}
	g.free()
	wantPlaced(t, results)
	wantCounts(t, d, "2 orders, 2 events")
}

// Orders do not wait for a slow group while connections are free.
func TestAGroupThatTakesLongHoldsNobody(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	// Only the client's limit of five seconds ends the wait.
	w := sql.NewPlacer(orderPool(t, d.URL, 2, "lock_timeout = '60s'", "statement_timeout = 0"))
	first := pairs(1)[0]
	tx := holdKey(t, d, first.o)
	slow := placing(t.Context(), w, first)
	waiting(t, d, 1)
	for i, p := range pairs(10) {
		if placed, err := w.Place(t.Context(), p.o, p.e); !placed || err != nil {
			t.Fatalf("order %d: %v, %v", i, placed, err)
		}
	}
	select {
	case r := <-slow:
		t.Fatalf("the first was waited for: %v, %v", r.placed, r.err)
	default:
	}
	must(t, tx.Rollback(t.Context()))
	if r := <-slow; !r.placed || r.err != nil {
		t.Errorf("the first: %v, %v", r.placed, r.err)
	}
}

// While the table is locked, for example by the creation of an index, every order gets a definite error, whether it
// waited for its group, a connection or the lock.
func TestALockedTableLeavesNothingUnknown(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	w := sql.NewPlacer(orderPool(t, d.URL, 3))
	tx := begin(t, d)
	run(t, tx, "LOCK TABLE orders IN SHARE MODE")
	var wg sync.WaitGroup
	for range 10 {
		for _, p := range pairs(4) {
			wg.Go(func() {
				placed, err := w.Place(t.Context(), p.o, p.e)
				if placed || err == nil || errors.Is(err, sql.ErrCommitUnknown) {
					t.Errorf("%v, %v", placed, err)
				}
			})
		}
		must(t, pause.For(t.Context(), 100*time.Millisecond))
	}
	wg.Wait()
	must(t, tx.Rollback(t.Context()))
	wantCounts(t, d, "0 orders, 0 events")
}

// Without a free connection, an order waits no longer than the limit for a connection.
func TestNobodyWaitsForItsTurnForLong(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	pool := orderPool(t, d.URL, 1)
	conn, err := pool.Acquire(t.Context())
	must(t, err)
	w := sql.NewPlacer(pool)
	var results []<-chan result
	for _, p := range pairs(3) {
		results = append(results, placing(t.Context(), w, p))
	}
	for i, r := range results {
		r := <-r
		if r.placed || !errors.Is(r.err, context.DeadlineExceeded) || errors.Is(r.err, sql.ErrCommitUnknown) {
			t.Errorf("order %d: %v, %v", i, r.placed, r.err)
		}
	}
	conn.Release()
	p := pairs(1)[0]
	if placed, err := w.Place(t.Context(), p.o, p.e); !placed || err != nil {
		t.Errorf("the next: %v, %v", placed, err)
	}
	wantCounts(t, d, "1 orders, 1 events")
}

// Two processes insert the same orders in any order: one waits for the other, and they do not deadlock.
func TestGroupsOfTwoProcessesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	processes := []*sql.Placer{sql.NewPlacer(orderPool(t, d.URL, 2)), sql.NewPlacer(orderPool(t, d.URL, 2))}
	const orders = 40
	for range 25 {
		one := pairs(orders)
		var mu sync.Mutex
		placed := map[[16]byte]int{}
		var wg sync.WaitGroup
		for _, w := range processes {
			list := slices.Clone(one)
			rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
			for _, p := range list {
				o, e := newOrder(p.o.UserID, p.o.Key[0])
				wg.Go(func() {
					is, err := w.Place(t.Context(), o, e)
					if err != nil {
						t.Error(err)
					}
					mu.Lock()
					defer mu.Unlock()
					if is {
						placed[o.UserID]++
					}
				})
			}
		}
		wg.Wait()
		for _, p := range one {
			if n := placed[p.o.UserID]; n != 1 {
				t.Errorf("an order was placed %d times", n)
			}
		}
	}
	const deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
	if n := testenv.Value[int](t, d, deadlocks); n != 0 {
		t.Errorf("%d deadlocks", n)
	}
}

// A panic only fails its own group, with an unknown outcome.
func TestAPanicIsAnUnknownOutcome(t *testing.T) {
	t.Parallel()
	p := pairs(1)[0]
	if placed, err := sql.NewPlacer(nil).Place(t.Context(), p.o, p.e); placed || !errors.Is(err, sql.ErrCommitUnknown) {
		t.Errorf("%v, %v", placed, err)
	}
}
