package shadow

import (
	"context"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// observed is a table and a stream that a test fills as a relay of its own.
type observed struct {
	t     *testing.T
	db    *testenv.Database
	redis *redis.Client
	o     Options
}

func observe(t *testing.T) *observed {
	t.Helper()
	w := &observed{t: t, db: testenv.Empty(t), redis: testenv.Redis(t).Client}
	w.db.Exec(t, "CREATE TABLE outboxevent (id uuid PRIMARY KEY, aggregateid text, n bigserial, "+
		"computed text GENERATED ALWAYS AS (upper(aggregateid)) STORED)")
	w.o = Options{
		URL: w.db.URL, Schema: "public", Redis: w.redis, Table: "public.outboxevent", ID: "id", Key: "aggregateid",
		OrderBy: "n", Streams: []string{"events"}, Field: "payload.event.id", Grace: time.Second,
		Progress: func(Report) {}, Say: t.Logf,
	}
	return w
}

// run compares while do runs.
func (w *observed) run(do func()) Report {
	w.t.Helper()
	ctx, end := context.WithCancel(w.t.Context())
	began := make(chan struct{})
	var first sync.Once
	w.o.Say = func(string, ...any) { first.Do(func() { close(began) }) }
	type result struct {
		r   Report
		err error
	}
	done := make(chan result)
	go func() {
		r, err := Run(ctx, w.o)
		done <- result{r, err}
	}()
	select {
	case <-began:
	case r := <-done:
		w.t.Fatal(r.err)
	}
	do()
	end()
	r := <-done
	testenv.Must(w.t, r.err)
	return r.r
}

// insert commits rows of an aggregate, each in its own transaction.
func (w *observed) insert(aggregate string, n int) (ids []string) {
	for range n {
		id := uuid.NewString()
		w.db.Exec(w.t, "INSERT INTO outboxevent (id, aggregateid) VALUES ($1, $2)", id, aggregate)
		ids = append(ids, id)
	}
	return ids
}

func (w *observed) publish(ids ...string) {
	for _, id := range ids {
		testenv.Must(w.t, w.redis.XAdd(w.t.Context(), &redis.XAddArgs{
			Stream: "events", Values: []any{"payload", `{"event": {"id": "` + strings.ToUpper(id) + `"}}`},
		}).Err())
	}
}

func TestARelayThatKeepsItsPromises(t *testing.T) {
	t.Parallel()
	for _, poll := range []bool{false, true} {
		w := observe(t)
		w.o.Poll = poll
		before := w.insert("old", 1)
		r := w.run(func() {
			w.publish(w.insert("a", 20)...)
			b := w.insert("b", 10)
			w.publish(b[:5]...)
			w.publish(w.insert("c", 5)...)
			w.publish(b[5:]...)
			w.publish(before...)
		})
		if r.Broken() || r.Committed != 35 || r.Published != 35 || r.Unknown != 1 || len(r.Findings) > 0 {
			t.Errorf("poll %v: %+v", poll, r)
		}
		if r.P99 < r.P50 || r.Longest < r.P99 || poll && r.Longest > 0 {
			t.Errorf("poll %v: latencies %v, %v, %v", poll, r.P50, r.P99, r.Longest)
		}
	}
}

func TestARelayThatBreaksThem(t *testing.T) {
	t.Parallel()
	for _, poll := range []bool{false, true} {
		w := observe(t)
		w.o.Poll = poll
		var a []string
		r := w.run(func() {
			a = w.insert("a", 10)
			w.publish(a[0], a[1], a[3], a[2], a[4], a[4]) // 5 to 9 are lost
			w.publish(w.insert("b", 3)...)
			testenv.Must(t, w.redis.XAdd(t.Context(), &redis.XAddArgs{Stream: "events", Values: []any{"x", "y"}}).Err())
		})
		if r.Lost != 5 || r.Repeated != 1 || r.Reordered != 1 || r.Unreadable != 1 || r.Published != 8 || !r.Broken() {
			t.Errorf("poll %v: %+v", poll, r)
		}
		want := map[string][]string{"repeated": {a[4]}, "reordered": {a[2], a[3]}, "lost": a[5:]}
		for _, f := range r.Findings {
			if len(r.Findings) != 7 || !slices.Contains(want[f.What], f.Event) {
				t.Errorf("poll %v: of %d findings: %+v", poll, len(r.Findings), f)
			}
		}
	}
}

// Debezium's outbox deletes a row in the transaction that inserts it, and only the WAL has it. An event that was rolled
// back is in no stream, and not lost.
func TestRowsThatNoStatementSees(t *testing.T) {
	t.Parallel()
	w := observe(t)
	id := uuid.New()
	r := w.run(func() {
		w.db.Exec(t, "WITH i AS (INSERT INTO outboxevent (id, aggregateid) VALUES ('"+id.String()+"', 'a')) SELECT 1")
		w.db.Exec(t, "DO $$BEGIN INSERT INTO outboxevent (id, aggregateid) VALUES (gen_random_uuid(), 'b'); "+
			"DELETE FROM outboxevent; END$$")
		w.db.Exec(t, "DO $$BEGIN INSERT INTO outboxevent (id, aggregateid) VALUES (gen_random_uuid(), 'b'); "+
			"RAISE EXCEPTION 'no'; EXCEPTION WHEN raise_exception THEN END$$")
		w.publish(id.String())
	})
	if r.Committed != 2 || r.Published != 1 || r.Lost != 1 {
		t.Errorf("%+v", r)
	}
	if n := testenv.Value[int](t, w.db, "SELECT count(*) FROM pg_publication"); n != 0 {
		t.Errorf("%d publications are left", n)
	}
	testenv.Eventually(t, 10*time.Second, func() error {
		n := testenv.Value[int](t, w.db, "SELECT count(*) FROM pg_replication_slots "+
			"WHERE database = current_database()")
		return testenv.FailIf(n != 0, "%d slots are left", n)
	})
}

func TestWhatIsWrongWithTheOptions(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(o *Options)
		want   string
	}{
		"schema":    {func(o *Options) { o.Table = "outboxevent" }, "want SCHEMA.NAME"},
		"table":     {func(o *Options) { o.Table = "public.none" }, "does not exist"},
		"column":    {func(o *Options) { o.Key = "none" }, "does not exist"},
		"order":     {func(o *Options) { o.Poll, o.OrderBy = true, "" }, "--order-by"},
		"generated": {func(o *Options) { o.Key = "computed" }, "generated"},
		"no Redis": {func(o *Options) {
			o.Redis = redis.NewClient(&redis.Options{Addr: "127.0.0.1:1", MaxRetries: -1})
		}, "Redis"},
	} {
		w := observe(t)
		c.change(&w.o)
		w.o.Say = func(string, ...any) { w.insert("a", 1) }
		if _, err := Run(t.Context(), w.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Without a key nothing is reordered, and an event may be in several streams.
func TestLedgerWithoutKeys(t *testing.T) {
	t.Parallel()
	l, at := newLedger(), time.Now()
	for _, id := range []string{"1", "2"} {
		l.row(id, "", at)
	}
	for _, id := range []string{"2", "1"} {
		l.entry(id, "s", "1-1", at)
		l.entry(id, "other", "1-1", at)
	}
	if got, _ := l.result(at, 0); got != (Counts{Committed: 2, Published: 2}) {
		t.Errorf("%+v", got)
	}
}

// Its connections are cut: the comparison ends with an error, and leaves nothing in the database.
func TestConnectionsAreCut(t *testing.T) {
	t.Parallel()
	w := observe(t)
	cut := func(string, ...any) {
		w.db.Exec(t, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "+
			"AND datname = current_database() AND application_name LIKE 'posthaste%shadow%'")
	}
	w.o.Say = cut
	if r, err := Run(t.Context(), w.o); err == nil || r.Table == "" {
		t.Errorf("%+v, %v", r, err)
	}
	n := testenv.Value[int](t, w.db, "SELECT (SELECT count(*) FROM pg_publication) + (SELECT count(*) "+
		"FROM pg_replication_slots WHERE database = current_database())")
	if n != 0 {
		t.Errorf("%d publications and slots are left", n)
	}
}

// If a stream cannot be read, its events are not lost: they are not known.
func TestAStreamThatCannotBeRead(t *testing.T) {
	t.Parallel()
	w := observe(t)
	l := newLedger()
	s := &stream{name: "events", field: "id", client: w.redis, ledger: l}
	r := &run{o: w.o, ledger: l, streams: []*stream{s}}
	l.row("a", "", time.Now().Add(-time.Hour))
	if got := r.report(); got.Lost != 0 || got.Waiting != 1 {
		t.Errorf("before it was read: %+v", got)
	}
	if _, err := s.next(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := r.report(); got.Lost != 1 || got.Waiting != 0 {
		t.Errorf("after it was read: %+v", got)
	}
}

// The report is not made before every stream was read to its end, even if no event waits.
func TestTheLastEntriesAreRead(t *testing.T) {
	t.Parallel()
	w := observe(t)
	l := newLedger()
	s := &stream{name: "events", field: "id", client: w.redis, ledger: l}
	r := &run{o: w.o, ledger: l, streams: []*stream{s}}
	done := make(chan struct{})
	go func() { defer close(done); r.wait() }()
	select {
	case <-done:
		t.Fatal("it does not wait for the stream")
	case <-time.After(200 * time.Millisecond): // it has looked several times
	}
	if _, err := s.next(t.Context()); err != nil {
		t.Fatal(err)
	}
	<-done
}

// Rows and entries are seen in any order, and the result is the same.
func TestLedger(t *testing.T) {
	t.Parallel()
	at := time.Unix(1_700_000_000, 0)
	rows := func(l *ledger) {
		for _, id := range []string{"a1", "a2", "a3", "b1", "b2"} {
			l.row(id, id[:1], at)
			l.row(id, id[:1], at)
		}
	}
	entries := func(l *ledger) {
		for _, id := range []string{"a1", "b1", "a3", "a2", "a2", "z", ""} {
			l.entry(id, "s", "1-1", at.Add(10*time.Millisecond))
		}
	}
	want := Counts{
		Committed: 5, Published: 4, Waiting: 1, Repeated: 1, Reordered: 1, Unknown: 1, Unreadable: 1,
	}
	for name, do := range map[string]func(l *ledger){
		"rows first":    func(l *ledger) { rows(l); entries(l) },
		"entries first": func(l *ledger) { entries(l); rows(l) },
	} {
		l := newLedger()
		do(l)
		if got, _ := l.result(at, time.Minute); got != want {
			t.Errorf("%s: %+v", name, got)
		}
		if got, found := l.result(at.Add(time.Minute), time.Minute); got.Lost != 1 || len(found) != 3 {
			t.Errorf("%s, later: %+v, %+v", name, got, found)
		}
		if d := l.percentile(0.5); d < 10*time.Millisecond || d > 11*time.Millisecond {
			t.Errorf("%s: %v", name, d)
		}
	}
}
