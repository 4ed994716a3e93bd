package testenv

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"posthaste/internal/lab/oracle"
	"posthaste/outbox"
)

// Load writes events at a rate, several to an aggregate, each aggregate's in order under a lock, and records which
// were committed. Its Check is the oracle of every end-to-end test.
type Load struct {
	tb     testing.TB
	pool   *pgxpool.Pool
	types  []string
	cancel context.CancelFunc
	group  errgroup.Group
	truth  *oracle.Truth
	// aggregates are those of each type.
	aggregates map[string][]*oracle.Aggregate
}

// LoadOptions describe a Load.
type LoadOptions struct {
	// Rate is events per second in all; 0 is no limit.
	Rate int
	// Writers is how many connections write. Default 4.
	Writers int
	// Aggregates is how many aggregates they write to. Default 20.
	Aggregates int
	// Types are the aggregate types. Default "order" alone.
	Types []string
	// Total ends the load after about so many events; with 0 it continues until Stop.
	Total int
	// Tolerant makes it continue when Postgres refuses or is unreachable.
	Tolerant bool
	// Pad is the number of incompressible bytes in each payload. Default 40.
	Pad int
	// Tag is prepended to the aggregates' names, to distinguish two databases on one Redis.
	Tag string
}

// StartLoad begins writing to d.
func StartLoad(tb testing.TB, d *Database, o LoadOptions) *Load {
	tb.Helper()
	o.Writers, o.Aggregates = cmp.Or(o.Writers, 4), cmp.Or(o.Aggregates, 20)
	if len(o.Types) == 0 {
		o.Types = []string{"order"}
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := newLoad(tb, d, o.Tag, o.Aggregates, o.Types)
	l.cancel = cancel
	for w := range o.Writers {
		l.group.Go(func() error { return l.write(ctx, w, o) })
	}
	tb.Cleanup(func() { cancel(); _ = l.group.Wait() })
	return l
}

// newLoad returns a load with n aggregates of each type.
func newLoad(tb testing.TB, d *Database, tag string, n int, types []string) *Load {
	truth := oracle.New(uint64(counter.Add(1)), time.Now())
	return &Load{
		tb: tb, pool: d.Pool, types: types, cancel: func() {}, truth: truth,
		aggregates: truth.NewAggregates(tag, n, types),
	}
}

func (l *Load) write(ctx context.Context, writer int, o LoadOptions) error {
	const perTx = 3
	var tick <-chan time.Time
	if o.Rate > 0 {
		t := time.NewTicker(time.Duration(perTx*o.Writers) * time.Second / time.Duration(o.Rate))
		defer t.Stop()
		tick = t.C
	}
	random, total := oracle.Random(1, uint64(writer)), 0
	for i := 0; o.Total == 0 || total < o.Total/o.Writers; i++ {
		if tick != nil {
			select {
			case <-ctx.Done():
			case <-tick:
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		a := l.aggregates[o.Types[i%len(o.Types)]][(i*o.Writers+writer*7)%o.Aggregates]
		err := l.transaction(a, perTx, oracle.Padding(random, max(40, o.Pad)))
		if err != nil && !o.Tolerant {
			return err
		}
		total += perTx
	}
	return nil
}

// transaction writes n events of one aggregate under its lock.
func (l *Load) transaction(a *oracle.Aggregate, n int, pad string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // a commit may be held back on purpose
	defer cancel()
	a.Lock()
	defer a.Unlock()
	job := &oracle.Job{Truth: l.truth, Pad: pad}
	return job.Run(ctx, l.pool, []*oracle.Aggregate{a}, n)
}

// Bulk writes n events in one transaction, over a hundred aggregates, each payload with pad incompressible bytes. It
// returns after the commit.
func Bulk(tb testing.TB, d *Database, n, pad int) *Load {
	tb.Helper()
	l := newLoad(tb, d, "bulk-", 100, []string{"order"})
	random := oracle.Random(1, 1)
	columns := []string{"id", "aggregate_type", "aggregate_id", "event_type", "payload"}
	_, err := d.Pool.CopyFrom(tb.Context(), pgx.Identifier{"outbox"}, columns,
		pgx.CopyFromSlice(n, func(i int) ([]any, error) {
			a := l.aggregates["order"][i%100]
			r := l.truth.Open(a, 1)
			l.truth.End(r, 1, oracle.Yes)
			payload := oracle.Payload(r, oracle.Padding(random, pad))
			return []any{l.truth.ID(r), a.Type, a.ID, a.Type + ".changed", string(payload)}, nil
		}))
	Must(tb, err)
	return l
}

// Stop ends the writing and waits for the last commit.
func (l *Load) Stop() {
	l.tb.Helper()
	l.cancel()
	l.Wait()
}

// Wait waits for a load with a Total.
func (l *Load) Wait() {
	l.tb.Helper()
	if err := l.group.Wait(); err != nil {
		l.tb.Errorf("load: %v", err)
	}
}

func (l *Load) Committed() int {
	n, _, _ := l.truth.Counts()
	return n
}

// Oracle compares what was committed with what is in the streams.
type Oracle struct {
	DB     *Database
	Redis  redis.UniversalClient
	Prefix string
	// Flushed allows settled events to be missing from the streams: Redis was emptied.
	Flushed bool
	// MayRepeat allows duplicates, for tests of the one case in which they can occur.
	MayRepeat bool
	// Others are loads whose events are in the same streams; a Check ignores them.
	Others []*Load
}

// foreign reports whether an event is of one of o.Others.
func (o Oracle) foreign(id uuid.UUID) bool {
	return slices.ContainsFunc(o.Others, func(l *Load) bool {
		_, theirs := l.truth.Of(id)
		return theirs
	})
}

// Entry is a stream entry.
type Entry struct {
	Stream, EntryID, ID, Subject, Data, Type, Time, Source string
}

// Streams returns the streams that a type has or had: one, and those that it is spread over.
func (o Oracle) Streams(tb testing.TB, typ string) []string {
	tb.Helper()
	names := []string{o.Prefix + typ}
	for n := range outbox.Partitions {
		name := outbox.ShardName(o.Prefix+typ, n)
		var there int64
		o.read(tb, func() (err error) {
			there, err = o.Redis.Exists(tb.Context(), name).Result()
			return err
		})
		if there > 0 {
			names = append(names, name)
		}
	}
	return names
}

// Entries reads every stream of the types. If a type has several streams, its entries are in the order of their ids,
// which is that of publishing.
func (o Oracle) Entries(tb testing.TB, types ...string) (out []Entry) {
	tb.Helper()
	const most = 5000
	for _, typ := range types {
		var list []Entry
		streams := o.Streams(tb, typ)
		for _, stream := range streams {
			for from, n := "-", most; n == most; {
				var page []redis.XMessage
				o.read(tb, func() (err error) {
					page, err = o.Redis.XRangeN(tb.Context(), stream, from, "+", most).Result()
					return err
				})
				for _, m := range page {
					get := func(k string) string { s, _ := m.Values[k].(string); return s }
					list = append(list, Entry{
						Stream: stream, EntryID: m.ID, ID: get("id"), Subject: get("subject"), Data: get("data"),
						Type: get("type"), Time: get("time"), Source: get("source"),
					})
					from = "(" + m.ID
				}
				n = len(page)
			}
		}
		if len(streams) > 1 {
			slices.SortStableFunc(list, func(a, b Entry) int { return outbox.CompareIDs(a.EntryID, b.EntryID) })
		}
		out = append(out, list...)
	}
	return out
}

// read calls Redis. If that fails on a cluster, it reloads the view of the slots and retries.
func (o Oracle) read(tb testing.TB, read func() error) {
	tb.Helper()
	many, cluster := o.Redis.(*redis.ClusterClient)
	if !cluster {
		if err := read(); err != nil {
			tb.Fatalf("read a stream: %v", err)
		}
		return
	}
	Eventually(tb, 30*time.Second, func() error {
		err := read()
		if err != nil {
			many.ReloadState(tb.Context())
		}
		return err
	})
}

// WaitEmpty waits until the whole outbox is settled. It fails if no progress is made within the given time; the total
// time depends on the machine.
func (o Oracle) WaitEmpty(tb testing.TB, within time.Duration) {
	tb.Helper()
	for n := math.MaxInt; n > 0; time.Sleep(50 * time.Millisecond) { // it counts every unsettled row
		Eventually(tb, within, func() error {
			var now int
			if err := o.DB.Pool.QueryRow(tb.Context(), "SELECT count(*) FROM outbox_backlog").Scan(&now); err != nil {
				return err
			}
			if now > 0 && now >= n {
				return fmt.Errorf("%d events wait in the outbox", now)
			}
			n = now
			return nil
		})
	}
}

// Check waits like WaitEmpty and then compares l's events with the streams: lost 0, duplicates 0, never committed 0,
// changed 0, order per aggregate kept, history complete.
func (o Oracle) Check(tb testing.TB, l *Load, within time.Duration) {
	tb.Helper()
	o.WaitEmpty(tb, within)
	pass, broken := oracle.NewPass(l.truth), map[string]int{}
	pass.Late = true
	for _, typ := range l.types {
		for _, e := range o.Entries(tb, typ) {
			id, err := uuid.Parse(e.ID)
			if err != nil {
				tb.Errorf("entry %s has id %q", e.EntryID, e.ID)
			}
			if err != nil || o.foreign(id) {
				continue
			}
			b := pass.See(oracle.Entry{ID: id, Stream: typ, Subject: e.Subject, Type: e.Type, Data: e.Data})
			if b == nil {
				continue
			}
			if broken[b.Promise]++; broken[b.Promise] == 1 {
				tb.Logf("%s: %+v: %s", b.Promise, e, b.What)
			}
		}
	}
	var committed []uuid.UUID
	l.truth.Each(func(r oracle.Ref, s oracle.State) {
		if s != oracle.StateCommitted {
			return
		}
		committed = append(committed, l.truth.ID(r))
		if !pass.Is(r, oracle.FlagSeen) {
			broken["lost"]++
		}
	})
	history := Value[int](tb, o.DB, `SELECT count(*) FROM unnest($1::uuid[]) id
		LEFT JOIN (SELECT id, count(*) AS n FROM outbox_history GROUP BY id) h USING (id)
		WHERE n IS DISTINCT FROM 1`, committed)
	seen, _, _ := pass.Counts()
	tb.Logf("committed %d, in the streams %d, broken %v", len(committed), seen, broken)
	if o.Flushed { // events settled before the flush may be missing
		delete(broken, "lost")
		delete(broken, "reordered")
	}
	if o.MayRepeat {
		delete(broken, "duplicated")
	}
	if len(broken) > 0 || history > 0 {
		tb.Errorf("broken: %v; not in history: %d", broken, history)
	}
}
