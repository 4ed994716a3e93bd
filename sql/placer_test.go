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
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/testenv"
	"posthaste/sql"
)

// placer returns one with so many connections, and the sessions of the API.
func placer(tb testing.TB, url string, conns int32) *sql.Placer {
	tb.Helper()
	cfg, err := sql.OrderPoolConfig(url, "public")
	must(tb, err)
	cfg.MaxConns = conns
	pool, err := pgxpool.NewWithConfig(tb.Context(), cfg)
	must(tb, err)
	tb.Cleanup(pool.Close)
	return sql.NewPlacer(pool)
}

// pair is an order and its event.
type pair struct {
	o *sql.Order
	e *sql.Event
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

// gather has orders wait behind one that waits for its key, in this order, and returns what lets them go. That one
// announces nothing.
func gather(t *testing.T, d *testenv.Database, w *sql.Placer, list []pair) (results []<-chan result, free func()) {
	t.Helper()
	first, _ := newOrder(uuid.New(), 0)
	tx := holdKey(t, d, first)
	head := placing(t.Context(), w, pair{first, nil})
	testenv.Eventually(t, 20*time.Second, func() error {
		if testenv.Value[int](t, d, "SELECT count(*) FROM pg_stat_activity "+
			"WHERE datname = current_database() AND wait_event_type = 'Lock'") == 0 {
			return errors.New("the first does not wait")
		}
		return nil
	})
	for i, p := range list {
		results = append(results, placing(t.Context(), w, p))
		testenv.Eventually(t, 20*time.Second, func() error {
			if n := sql.Waiting(w); n != i+1 {
				return fmt.Errorf("%d wait, not %d", n, i+1)
			}
			return nil
		})
	}
	return results, func() {
		t.Helper()
		must(t, tx.Rollback(t.Context()))
		if r := <-head; !r.placed {
			t.Errorf("the first: %v, %v", r.placed, r.err)
		}
	}
}

func TestOrdersThatWaitAreInsertedTogether(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	w := placer(t, d.URL, 2)
	list := pairs(5)
	list[1].e.Headers = nil
	list[2].o.Fence, list[2].o.PayWith = 7, sql.PayCredits
	refused := list[3].o
	refused.Status, refused.RespStatus, refused.RespBody, list[3].e = sql.OrderRejected, 402, []byte("no"), nil
	results, free := gather(t, d, w, list)
	free()
	for i, r := range results {
		if r := <-r; !r.placed || r.err != nil {
			t.Errorf("order %d: %v, %v", i, r.placed, r.err)
		}
	}
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
	if got := counts(t, d); got != "6 orders, 4 events" {
		t.Error(got)
	}
	var transactions int
	must(t, d.Pool.QueryRow(t.Context(), `SELECT count(DISTINCT x) FROM (
		SELECT xmin::text FROM orders WHERE id = ANY($1) UNION ALL SELECT xmin::text FROM outbox) AS r (x)`,
		ids).Scan(&transactions))
	if transactions != 1 {
		t.Errorf("%d transactions", transactions)
	}
}

// Several attempts have one key, some even one id: one of them has placed the order, the others have not.
func TestOneKeyTwiceInAGroup(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	w := placer(t, d.URL, 2)
	list := pairs(6)
	list[1].o.UserID, list[1].o.Key = list[0].o.UserID, list[0].o.Key
	list[3], list[4] = list[2], list[2]
	results, free := gather(t, d, w, list)
	free()
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
	if got := counts(t, d); got != "4 orders, 3 events" {
		t.Error(got)
	}
}

// What one order is refused for costs the others of its group nothing, also when the answer comes with the commit.
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
			w := placer(t, d.URL, 2)
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
			results, free := gather(t, d, w, list)
			free()
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
			if got := counts(t, d); got != "4 orders, 3 events" {
				t.Error(got)
			}
		})
	}
}

// A group was sent, and something happens to its connection: nobody knows about any of it.
func TestWhatIsNotAnsweredOfAGroupIsUnknown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		happens func(u *unanswered)
		want    string
	}{
		"the backend is terminated": {func(u *unanswered) {
			u.d.Exec(u.t, `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
				WHERE datname = current_database() AND application_name = 'posthaste api'`)
		}, "1 orders, 0 events"},
		"the reply is lost": {func(u *unanswered) {
			u.p.Toxic(`{"name":"lost","type":"timeout","stream":"downstream","attributes":{"timeout":0}}`)
			u.g.Open()
			eventually(u.t, u.d, "4 orders, 3 events")
			u.p.Down()
		}, "4 orders, 3 events"},
		"the callers give up": {func(u *unanswered) { u.giveUp() }, "4 orders, 3 events"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := testenv.Postgres(t)
			p := testenv.NewProxy(t, fmt.Sprintf("127.0.0.1:%d", d.Pool.Config().ConnConfig.Port))
			w := placer(t, testenv.Through(d.URL, p.Addr()), 2)
			g := d.Gate(t, "outbox")
			list := pairs(3)
			results, free := gather(t, d, w, list[1:])
			ctx, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			// This one's caller may give up.
			results = append(results, placing(ctx, w, list[0]))
			testenv.Eventually(t, 20*time.Second, func() error {
				if n := sql.Waiting(w); n != 3 {
					return fmt.Errorf("%d wait", n)
				}
				return nil
			})
			free()
			g.Wait()
			c.happens(&unanswered{t, d, p, g, giveUp})
			if name == "the callers give up" {
				if r := <-results[2]; r.placed || !errors.Is(r.err, sql.ErrCommitUnknown) {
					t.Errorf("who gave up: %v, %v", r.placed, r.err)
				}
				g.Open()
				for i, r := range results[:2] { // the others are not concerned
					if r := <-r; !r.placed || r.err != nil {
						t.Errorf("order %d: %v, %v", i, r.placed, r.err)
					}
				}
			} else {
				for i, r := range results {
					if r := <-r; r.placed || !errors.Is(r.err, sql.ErrCommitUnknown) || sql.RetryOrder(r.err) {
						t.Errorf("order %d: %v, %v, want ErrCommitUnknown", i, r.placed, r.err)
					}
				}
			}
			eventually(t, d, c.want)
		})
	}
}

// Whose turn has not come may give up, and knows that nothing was written.
func TestWhoWaitsMayGiveUp(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	w := placer(t, d.URL, 2)
	list := pairs(3)
	results, free := gather(t, d, w, list[:2])
	ctx, giveUp := context.WithCancel(t.Context())
	third := placing(ctx, w, list[2])
	testenv.Eventually(t, 20*time.Second, func() error {
		if n := sql.Waiting(w); n != 3 {
			return fmt.Errorf("%d wait", n)
		}
		return nil
	})
	giveUp()
	if r := <-third; r.placed || !errors.Is(r.err, context.Canceled) || errors.Is(r.err, sql.ErrCommitUnknown) {
		t.Errorf("who gave up: %v, %v", r.placed, r.err)
	}
	free()
	for i, r := range results {
		if r := <-r; !r.placed || r.err != nil {
			t.Errorf("order %d: %v, %v", i, r.placed, r.err)
		}
	}
	if got := counts(t, d); got != "3 orders, 2 events" {
		t.Error(got)
	}
}

// Behind a group that takes long nobody waits while there are connections.
func TestAGroupThatTakesLongHoldsNobody(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	w := placer(t, d.URL, 4)
	first, e := newOrder(uuid.New(), 1)
	tx := holdKey(t, d, first)
	slow := placing(t.Context(), w, pair{first, e})
	for i, p := range pairs(10) {
		if placed, err := w.Place(t.Context(), p.o, p.e); !placed || err != nil {
			t.Fatalf("order %d: %v, %v", i, placed, err)
		}
	}
	select {
	case r := <-slow:
		t.Errorf("the key was not held: %v, %v", r.placed, r.err)
	default:
	}
	must(t, tx.Rollback(t.Context()))
	if r := <-slow; !r.placed || r.err != nil {
		t.Errorf("the first: %v, %v", r.placed, r.err)
	}
}

// A server that does not answer is waited for as long as for a connection, by those who have sent nothing.
func TestNobodyWaitsForItsTurnForLong(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	cfg := d.Pool.Config() // without limits of the server
	cfg.MaxConns = 2
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	t.Cleanup(pool.Close)
	list := pairs(2)
	results, _ := gather(t, d, sql.NewPlacer(pool), list)
	for i, r := range results {
		r := <-r
		if r.placed || !errors.Is(r.err, context.DeadlineExceeded) || errors.Is(r.err, sql.ErrCommitUnknown) {
			t.Errorf("order %d: %v, %v", i, r.placed, r.err)
		}
	}
}

// Two processes insert the same orders, in any order: one waits for the other, never both.
func TestGroupsOfTwoProcessesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	processes := []*sql.Placer{placer(t, d.URL, 2), placer(t, d.URL, 2)}
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

// A defect of ours is no other request's end, and nothing is claimed to be known.
func TestAPanicIsAnUnknownOutcome(t *testing.T) {
	t.Parallel()
	p := pairs(1)[0]
	if placed, err := sql.BrokenPlacer().Place(t.Context(), p.o, p.e); placed || !errors.Is(err, sql.ErrCommitUnknown) {
		t.Errorf("%v, %v", placed, err)
	}
}
