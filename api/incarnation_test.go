package api

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"posthaste/idem"
	"posthaste/internal/lab/testenv"
)

// placesAnew posts an order whose key is new to the database, and repeats it.
func (w *world) placesAnew(key, body string) reply {
	w.tb.Helper()
	r := w.post(key, body)
	want(w.tb, r, 201, "")
	r.has(w.tb, "Idempotent-Replayed", "false")
	w.repeats(key, body, r)
	return r
}

// repeats posts an existing order again. The answer is the same, also from a process that must read it from Redis.
func (w *world) repeats(key, body string, first reply) {
	w.tb.Helper()
	for _, p := range []*world{w, w.again()} {
		p.post(key, body).replays(w.tb, "again", first)
	}
	want(w.tb, w.again().do("GET", "/orders/"+first.order(w.tb).ID.String(), ""), 200, "")
}

// again is another process on the same servers, at the addresses of w.
func (w *world) again(edit ...func(*Options)) *world {
	w.tb.Helper()
	o := &world{tb: w.tb, db: w.db, redis: w.redis}
	o.start(w.s.o.Pool.Config().ConnString(), w.redis.URL(), edit...)
	return o
}

// on is the world's database on another server.
func on(t *testing.T, d *testenv.Database, s *testenv.Server) *testenv.Database {
	t.Helper()
	c := *d
	c.URL = s.URL(d.Name)
	var err error
	c.Pool, err = pgxpool.New(t.Context(), c.URL)
	must(t, err)
	t.Cleanup(c.Pool.Close)
	return &c
}

// Two databases share one Redis. The same key places an order in each, and neither answers with the other's order.
func TestAKeyIsOfOneDatabase(t *testing.T) {
	t.Parallel()
	for name, databases := range map[string]func(t *testing.T) [2]*testenv.Database{
		"of one server": func(t *testing.T) [2]*testenv.Database {
			return [2]*testenv.Database{testenv.Postgres(t), testenv.Postgres(t)}
		},
		// Name, oids, system identifier and source are the same.
		"a copy on another server": func(t *testing.T) [2]*testenv.Database {
			server := testenv.NewServer(t)
			d := server.Database(t)
			c := server.Snapshot(t)
			must(t, c.Start(t.Context()))
			t.Cleanup(func() { _ = c.Stop("immediate") })
			return [2]*testenv.Database{d, on(t, d, c)}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rdb := testenv.Redis(t)
			var worlds [2]*world
			reg := prometheus.NewRegistry()
			for i, d := range databases(t) {
				worlds[i] = &world{tb: t, db: d, redis: rdb}
				worlds[i].start(d.URL, rdb.URL(), func(o *Options) {
					if i == 1 {
						o.Registerer = reg
					}
				})
			}
			key, other := newKey(), newKey()
			first := worlds[0].placesAnew(key, orderJSON(1))
			second := worlds[1].placesAnew(key, orderJSON(1))
			if first.order(t).ID == second.order(t).ID {
				t.Error("both have one order")
			}
			worlds[0].placesAnew(other, orderJSON(1))
			worlds[1].placesAnew(other, orderJSON(2))
			want(t, worlds[1].post(other, orderJSON(1)), 422, "idempotency_key_reused")
			for i, r := range []reply{first, second} {
				worlds[i].repeats(key, orderJSON(1), r)
				worlds[i].checkInvariants(2)
			}
			testenv.Equal(t, "replays from Redis", counted(t, reg, idem.OutcomeReplayRedis), 3)
		})
	}
}

// wentBack is an API whose database can be replaced, behind one address, by an earlier state.
type wentBack struct {
	*world
	server *testenv.Server
	front  *testenv.Link
}

func hostPort(url string) string {
	_, rest, _ := strings.Cut(url, "@")
	host, _, _ := strings.Cut(rest, "/")
	return host
}

func newWentBack(t *testing.T) *wentBack {
	t.Helper()
	server := testenv.NewServer(t)
	w := &wentBack{world: &world{tb: t, db: server.Database(t), redis: testenv.Redis(t)}, server: server}
	w.front = testenv.NewLink(t, hostPort(server.URL("")))
	return w
}

// check places orders before and after the point in time that the database goes back to.
func (w *wentBack) check(t *testing.T, before func() (back func() *testenv.Server)) {
	t.Helper()
	front := testenv.Through(w.db.URL, w.front.Addr())
	w.start(front, w.redis.URL())
	kept, lost, reused := newKey(), newKey(), newKey()
	first := w.placesAnew(kept, orderJSON(1))
	back := before()
	w.start(front, w.redis.URL()) // the server may have been restarted
	was := map[string]reply{lost: w.placesAnew(lost, orderJSON(1)), reused: w.placesAnew(reused, orderJSON(1))}
	w.published()
	reg := prometheus.NewRegistry()
	idle := w.again(func(o *Options) { o.Registerer = reg })
	idle.s.database.Confirmed(t.Context())
	// As after a second: the database is unconfirmed, and connections need a ping.
	forget := func() {
		for _, p := range []*world{w.world, idle} {
			p.s.database.Forget()
			p.s.o.Probe.Reset()
		}
	}
	must(t, w.server.Stop("immediate"))
	// Until the new server is up, the process answers from the records.
	idle.post(lost, orderJSON(1)).same(t, "without Postgres", was[lost])
	s := back()
	w.front.To(hostPort(s.URL("")))
	w.db = on(t, w.db, s)
	forget()
	testenv.Equal(t, "orders that are left", w.rows(), 1)
	idle.db = w.db
	idle.repeats(kept, orderJSON(1), first)
	testenv.Equal(t, "replays from Postgres", counted(t, reg, idem.OutcomeReplayPG), 1)
	for key, amount := range map[string]int{lost: 1, reused: 2} {
		if r := idle.placesAnew(key, orderJSON(amount)); r.body == was[key].body {
			t.Errorf("%v was lost", r)
		}
	}
	w.repeats(kept, orderJSON(1), first)
	w.checkInvariants(3)
	w.published()
	forget()
	redis := counted(t, reg, idem.OutcomeReplayRedis)
	idle.repeats(kept, orderJSON(1), first)
	// The record was made again.
	testenv.Equal(t, "replays from Redis", counted(t, reg, idem.OutcomeReplayRedis), redis+1)
}

// A standby that is behind is promoted. A retry places an order that it lacks, even if Redis has its record. An order
// that it has is answered again.
func TestAGuardOutlivesAPromotionOfAStandbyThatIsBehind(t *testing.T) {
	t.Parallel()
	w := newWentBack(t)
	l := testenv.NewLink(t, hostPort(w.server.URL("")))
	standby := w.server.Standby(t, l.Addr())
	w.check(t, func() func() *testenv.Server {
		d := on(t, w.db, standby)
		orders := "SELECT count(*) FROM orders"
		testenv.Becomes(t, "orders of the standby", 1, func() int { return testenv.Value[int](t, d, orders) })
		l.To("127.0.0.1:1")
		return func() *testenv.Server {
			d.Exec(t, "SELECT pg_promote()")
			return standby
		}
	})
}

// A copy of the data folder is restored. It has the timeline of the orders that it lacks.
func TestAGuardOutlivesARestore(t *testing.T) {
	t.Parallel()
	w := newWentBack(t)
	w.check(t, func() func() *testenv.Server {
		c := w.server.Snapshot(t)
		return func() *testenv.Server {
			must(t, c.Start(t.Context()))
			t.Cleanup(func() { _ = c.Stop("immediate") })
			return c
		}
	})
}

// An order is committed over an old connection to a server that was replaced: its record belongs to neither server.
func TestAnOrderOfAServerThatWasReplaced(t *testing.T) {
	t.Parallel()
	w := newWentBack(t)
	c := w.server.Snapshot(t)
	must(t, c.Start(t.Context()))
	t.Cleanup(func() { _ = c.Stop("immediate") })
	there := on(t, w.db, c)
	// Orders go to one server, and the probe reaches the other.
	w.start(w.db.URL, w.redis.URL(), func(o *Options) { o.Probe = there.Pool })
	there.Exec(t, "SELECT 1")
	key := newKey()
	want(t, w.post(key, orderJSON(1)), 201, "")
	testenv.Becomes(t, "records", 0, func() int { return len(w.redis.Client.Keys(t.Context(), "i:*").Val()) })
	other := &world{tb: t, db: there, redis: w.redis}
	other.start(there.URL, w.redis.URL())
	other.placesAnew(key, orderJSON(1))
}
