package sql_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

// orderPool connects as the API does, with conns connections, and changes settings, such as "lock_timeout = '60s'".
func orderPool(tb testing.TB, url string, conns int32, settings ...string) *pgxpool.Pool {
	tb.Helper()
	cfg, err := sql.OrderPoolConfig(url, "public")
	must(tb, err)
	cfg.MaxConns = conns
	cfg.AfterConnect = func(ctx context.Context, c *pgx.Conn) error {
		for _, s := range settings {
			if _, err := c.Exec(ctx, "SET "+s); err != nil {
				return err
			}
		}
		return nil
	}
	pool, err := pgxpool.NewWithConfig(tb.Context(), cfg)
	must(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}

// result is what PlaceOrder returns.
type result struct {
	placed bool
	err    error
}

// send places a new order in the background.
func send(ctx context.Context, pool *pgxpool.Pool) <-chan result {
	o, e := newOrder(uuid.New(), 1)
	done := make(chan result, 1)
	go func() {
		placed, err := sql.PlaceOrder(ctx, pool, o, e)
		done <- result{placed, err}
	}()
	return done
}

// The sessions' limits override all other settings.
func TestTheServerLimitsOrders(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	pool := orderPool(t, d.URL+"&statement_timeout=0&lock_timeout=0", 1)
	for name, want := range map[string]string{
		"statement_timeout": "4500ms", "lock_timeout": "2s", "idle_in_transaction_session_timeout": "5s",
	} {
		var got string
		must(t, pool.QueryRow(t.Context(), "SHOW "+name).Scan(&got))
		if got != want {
			t.Errorf("%s is %s, want %s", name, got, want)
		}
	}
}

func TestTheAPIHasConnectionsForCommitsThatWait(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]int32{
		"postgres://localhost/db":                                  max(8, int32(runtime.NumCPU())),
		"postgres://localhost/db?pool_max_conns=3":                 3,
		"host=localhost dbname=db pool_max_conns=30":               30,
		"host=localhost dbname=db application_name=pool_max_conns": max(8, int32(runtime.NumCPU())),
	} {
		cfg, err := sql.OrderPoolConfig(url, "public")
		must(t, err)
		if cfg.MaxConns != want {
			t.Errorf("%s: %d connections, want %d", url, cfg.MaxConns, want)
		}
	}
}

// unanswered is an order that was sent to Postgres and is blocked at a gate.
type unanswered struct {
	t      *testing.T
	d      *testenv.Database
	p      *testenv.Link
	g      *testenv.Gate
	giveUp func()
}

// loseReply unblocks the order, waits until it has the outcome want, and drops the reply.
func (u *unanswered) loseReply(want string) {
	u.p.Set(testenv.Trouble{LoseReplies: true})
	u.g.Open()
	eventually(u.t, u.d, want)
	u.p.Down()
}

// terminate ends the sessions of the API.
func terminate(tb testing.TB, d *testenv.Database) {
	tb.Helper()
	d.Exec(tb, `SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'posthaste api'`)
}

// After orders were sent, their connection breaks or a client gives up: the outcome of all that were sent together is
// unknown. If only the first caller of a group gives up, the others get their results.
func TestWhatIsNotAnsweredIsUnknown(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		orders, unknown int
		happens         func(u *unanswered)
		want            string
	}{
		"the backend is terminated": {1, 1, func(u *unanswered) { terminate(u.t, u.d) }, "0 orders, 0 events"},
		"the connection is cut before the commit": {1, 1, func(u *unanswered) {
			u.p.Down()
			u.g.Open()
		}, "1 orders, 1 events"},
		"the reply is lost": {1, 1, func(u *unanswered) { u.loseReply("1 orders, 1 events") }, "1 orders, 1 events"},
		// pgx requests a cancel
		"the client gives up":    {1, 1, func(u *unanswered) { u.giveUp() }, "0 orders, 0 events"},
		"the backend of a group": {3, 3, func(u *unanswered) { terminate(u.t, u.d) }, "0 orders, 0 events"},
		"the reply to a group": {3, 3, func(u *unanswered) {
			u.loseReply("3 orders, 3 events")
		}, "3 orders, 3 events"},
		"the first of a group gives up": {3, 1, func(u *unanswered) { u.giveUp() }, "3 orders, 3 events"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := testenv.Postgres(t)
			p := testenv.NewLink(t, fmt.Sprintf("127.0.0.1:%d", d.Pool.Config().ConnConfig.Port))
			url, gate := testenv.Through(d.URL, p.Addr()), d.Gate(t, "outbox")
			ctx, giveUp := context.WithCancel(t.Context())
			defer giveUp()
			var results []<-chan result
			if c.orders == 1 {
				results = append(results, send(ctx, orderPool(t, url, 1)))
			} else {
				g, list := gather(t, url), pairs(c.orders)
				results = append(append(results, g.add(ctx, list[0])), g.addAll(list[1:])...)
				g.free()
			}
			gate.Wait()
			c.happens(&unanswered{t, d, p, gate, giveUp})
			for i, done := range results {
				if i == c.unknown { // earlier callers have their results
					gate.Open()
				}
				r := <-done
				switch {
				case i >= c.unknown && (!r.placed || r.err != nil):
					t.Errorf("order %d: %v, %v", i, r.placed, r.err)
				case i < c.unknown && (r.placed || !errors.Is(r.err, sql.ErrCommitUnknown) || sql.RetryOrder(r.err)):
					t.Errorf("order %d: %v, %v, want ErrCommitUnknown", i, r.placed, r.err)
				}
			}
			eventually(t, d, c.want)
		})
	}
}

// eventually waits until the database has so many orders and events.
func eventually(tb testing.TB, d *testenv.Database, want string) {
	tb.Helper()
	testenv.Eventually(tb, 20*time.Second, func() error {
		got := counts(tb, d)
		return testenv.FailIf(got != want, "%s, want %s", got, want)
	})
}

// An error reply means that nothing was written. It comes long before the client gives up, however slow the machine is.
// TestWhatIsRefusedOfAGroup has the other errors.
func TestWhatIsRefusedWasNotWritten(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	pool := orderPool(t, d.URL, 1, "statement_timeout = '1500ms'")
	d.Gate(t, "outbox") // for longer than a statement may take
	r := <-send(t.Context(), pool)
	if r.placed || sql.SQLState(r.err) != pgerrcode.QueryCanceled || errors.Is(r.err, sql.ErrCommitUnknown) {
		t.Errorf("got %v, %v, want that the statement was cancelled", r.placed, r.err)
	}
	wantCounts(t, d, "0 orders, 0 events")
	wantIdle(t, pool)
}

// wantIdle checks that the only connection of a pool was given back.
func wantIdle(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	if s := pool.Stat(); s.AcquiredConns() != 0 || s.IdleConns() != 1 {
		t.Errorf("%d connections in use, %d idle", s.AcquiredConns(), s.IdleConns())
	}
}

// A pooled connection that was closed is noticed before anything is sent over it, so the outcome is known.
func TestAConnectionThatDiedInThePool(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	pool := orderPool(t, d.URL, 1)
	if r := <-send(t.Context(), pool); !r.placed || r.err != nil {
		t.Fatal(r.err)
	}
	terminate(t, d)
	r := <-send(t.Context(), pool)
	switch {
	case r.err == nil && r.placed: // the pool itself checks a connection that was idle for long
	case errors.Is(r.err, sql.ErrCommitUnknown) || !sql.BrokenConnection(r.err):
		t.Errorf("got %v, want a broken connection, and nothing unknown", r.err)
	default:
		if r = <-send(t.Context(), pool); !r.placed || r.err != nil {
			t.Errorf("the next: %v", r.err)
		}
	}
	wantCounts(t, d, "2 orders, 2 events")
}

// The check of a connection does not wait for other readers: pgx leaves one after a slow write.
func TestAConnectionThatIsBeingRead(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	conn, err := orderPool(t, d.URL, 1).Acquire(t.Context())
	must(t, err)
	defer conn.Release()
	reads, idle := conn.Conn().PgConn().Conn(), make(chan error)
	go func() {
		_, err := reads.Read(make([]byte, 1))
		idle <- err
	}()
	stuck := time.AfterFunc(10*time.Second, func() { _ = reads.Close() }) // ends every wait
	defer stuck.Stop()
	for since := time.Now(); time.Since(since) < 100*time.Millisecond; { // the reader has started
		must(t, sql.Awaits(t.Context(), conn.Conn()))
	}
	must(t, reads.Close())
	if <-idle == nil || sql.Awaits(t.Context(), conn.Conn()) == nil {
		t.Error("a closed connection is taken for one that awaits a statement")
	}
}

// A commit waits for an unreachable standby. It is durable here, so a success is true; without a reply the outcome is
// unknown.
func TestAnOrderThatWaitsForAStandby(t *testing.T) {
	t.Parallel()
	d := testenv.NewServer(t).Database(t)
	pool := orderPool(t, d.URL, 1)
	hold(t, d)
	for i, c := range []struct {
		ends    string
		unknown bool
	}{{"pg_cancel_backend(pid)", false}, {"pg_terminate_backend(pid)", true}} {
		done := send(t.Context(), pool)
		testenv.Eventually(t, 4*time.Second, func() error {
			if testenv.Value[int](t, d, "SELECT count(*) FROM (SELECT "+c.ends+` FROM pg_stat_activity
				WHERE application_name = 'posthaste api' AND wait_event = 'SyncRep') AS ended`) == 0 {
				return errors.New("it does not wait")
			}
			return nil
		})
		r := <-done
		if r.placed == c.unknown || errors.Is(r.err, sql.ErrCommitUnknown) != c.unknown {
			t.Errorf("%s: %v, %v", c.ends, r.placed, r.err)
		}
		if got := counts(t, d); got != fmt.Sprintf("%d orders, %d events", i+1, i+1) {
			t.Errorf("%s: %s", c.ends, got)
		}
	}
}
