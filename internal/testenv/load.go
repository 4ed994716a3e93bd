package testenv

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
)

// Load writes events at a rate, several to an aggregate, each aggregate's in order under a lock, and records which
// were committed. Its Check is the oracle of every end-to-end test.
type Load struct {
	tb     testing.TB
	pool   *pgxpool.Pool
	types  []string
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu        sync.Mutex
	next      map[string]int
	committed map[uuid.UUID]bool
	// unclear are events whose commit has no answer, or an error that leaves its outcome open.
	unclear map[uuid.UUID]bool
	failed  error
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
	// Pad is the number of incompressible bytes in each payload. The default is 40 compressible ones.
	Pad int
	// Tag is prepended to the aggregates' names, to distinguish two databases on one Redis.
	Tag string
}

// StartLoad begins writing to d.
func StartLoad(tb testing.TB, d *Database, o LoadOptions) *Load {
	tb.Helper()
	if o.Writers == 0 {
		o.Writers = 4
	}
	if o.Aggregates == 0 {
		o.Aggregates = 20
	}
	if len(o.Types) == 0 {
		o.Types = []string{"order"}
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &Load{
		tb: tb, pool: d.Pool, types: o.Types, cancel: cancel, next: map[string]int{},
		committed: map[uuid.UUID]bool{}, unclear: map[uuid.UUID]bool{},
	}
	for w := range o.Writers {
		l.wg.Go(func() { l.write(ctx, w, o) })
	}
	tb.Cleanup(func() { cancel(); l.wg.Wait() })
	return l
}

func (l *Load) write(ctx context.Context, writer int, o LoadOptions) {
	const perTx = 3
	var tick <-chan time.Time
	if o.Rate > 0 {
		t := time.NewTicker(time.Duration(perTx*o.Writers) * time.Second / time.Duration(o.Rate))
		defer t.Stop()
		tick = t.C
	}
	total := 0
	for i := 0; o.Total == 0 || total < o.Total/o.Writers; i++ {
		if tick != nil {
			select {
			case <-ctx.Done():
			case <-tick:
			}
		}
		if ctx.Err() != nil {
			return
		}
		typ := o.Types[i%len(o.Types)]
		aggregate := fmt.Sprintf("%s%s-%d", o.Tag, typ, (i*o.Writers+writer*7)%o.Aggregates)
		n, err := l.transaction(typ, aggregate, perTx, padding(o.Pad))
		total += n
		if err != nil && !o.Tolerant {
			l.mu.Lock()
			l.failed = err
			l.mu.Unlock()
			return
		}
	}
}

// padding returns n bytes of text that hardly compresses.
func padding(n int) string {
	if n == 0 {
		return "0123456789012345678901234567890123456789"
	}
	b := make([]byte, (n+1)/2)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)[:n]
}

// transaction writes n events of one aggregate under its lock.
func (l *Load) transaction(typ, aggregate string, n int, pad string) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // a commit may be held back on purpose
	defer cancel()
	ids := make([]uuid.UUID, n)
	tx, err := l.pool.Begin(ctx)
	if err != nil {
		time.Sleep(20 * time.Millisecond)
		return 0, err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	// The lock precedes the INSERT: the order of an aggregate's events is only guaranteed to writers that take it.
	if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtextextended($1, 7))", aggregate); err != nil {
		return 0, err
	}
	l.mu.Lock()
	first := l.next[aggregate]
	l.mu.Unlock()
	for i := range ids {
		payload := fmt.Appendf(nil, `{"n":%d,"pad":%q}`, first+i+1, pad)
		id, err := outbox.Insert(ctx, tx, outbox.Event{
			AggregateType: typ, AggregateID: aggregate, Type: typ + ".changed", Payload: payload,
		})
		if err != nil {
			return 0, err
		}
		ids[i] = id[0]
	}
	// Numbers are used up before the commit: if its outcome is unclear there is a gap, which keeps the order.
	l.mu.Lock()
	l.next[aggregate] = first + n
	for _, id := range ids {
		l.unclear[id] = true // it may be in a stream before the commit is answered
	}
	l.mu.Unlock()
	err = tx.Commit(ctx)
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		if err == nil {
			delete(l.unclear, id)
			l.committed[id] = true
		}
	}
	return n, err
}

// Bulk writes n events in one transaction, over a hundred aggregates, each payload with pad incompressible bytes. It
// returns after the commit.
func Bulk(tb testing.TB, d *Database, n, pad int) *Load {
	tb.Helper()
	l := &Load{
		tb: tb, pool: d.Pool, types: []string{"order"}, cancel: func() {},
		committed: make(map[uuid.UUID]bool, n),
	}
	columns := []string{"id", "aggregate_type", "aggregate_id", "event_type", "payload"}
	_, err := d.Pool.CopyFrom(tb.Context(), pgx.Identifier{"outbox"}, columns,
		pgx.CopyFromSlice(n, func(i int) ([]any, error) {
			id := uuid.New()
			l.committed[id] = true
			payload := fmt.Sprintf(`{"n":%d,"pad":%q}`, i+1, padding(pad))
			return []any{id, "order", fmt.Sprintf("bulk-%d", i%100), "order.changed", payload}, nil
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
	l.wg.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.failed != nil {
		l.tb.Errorf("load: %v", l.failed)
	}
}

func (l *Load) Committed() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.committed)
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

// others returns the ids of the events of o.Others.
func (o Oracle) others() map[uuid.UUID]bool {
	ids := map[uuid.UUID]bool{}
	for _, l := range o.Others {
		l.mu.Lock()
		maps.Copy(ids, l.committed)
		maps.Copy(ids, l.unclear)
		l.mu.Unlock()
	}
	return ids
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
	for _, typ := range types {
		streams := o.Streams(tb, typ)
		list := o.entries(tb, streams)
		if len(streams) > 1 {
			slices.SortStableFunc(list, func(a, b Entry) int { return outbox.CompareIDs(a.EntryID, b.EntryID) })
		}
		out = append(out, list...)
	}
	return out
}

func (o Oracle) entries(tb testing.TB, streams []string) (out []Entry) {
	tb.Helper()
	const most = 5000
	for _, stream := range streams {
		for from, n := "-", most; n == most; {
			var page []redis.XMessage
			o.read(tb, func() (err error) {
				page, err = o.Redis.XRangeN(tb.Context(), stream, from, "+", most).Result()
				return err
			})
			for _, m := range page {
				get := func(k string) string { s, _ := m.Values[k].(string); return s }
				out = append(out, Entry{
					Stream: stream, EntryID: m.ID, ID: get("id"), Subject: get("subject"), Data: get("data"),
					Type: get("type"), Time: get("time"), Source: get("source"),
				})
				from = "(" + m.ID
			}
			n = len(page)
		}
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

// Check waits like WaitEmpty and then compares l's committed events with the streams: lost 0, duplicates 0, order per
// aggregate kept, history complete.
func (o Oracle) Check(tb testing.TB, l *Load, within time.Duration) {
	tb.Helper()
	o.WaitEmpty(tb, within)
	l.mu.Lock()
	defer l.mu.Unlock()
	entries := o.Entries(tb, l.types...)
	seen := make(map[uuid.UUID]int, len(entries))
	last := map[string]int{}
	reordered, unknown := 0, 0
	foreign := o.others() // they may still be written
	for _, e := range entries {
		id, err := uuid.Parse(e.ID)
		if err != nil {
			tb.Errorf("entry %s has id %q", e.EntryID, e.ID)
			continue
		}
		if foreign[id] {
			continue
		}
		seen[id]++
		if !l.committed[id] && !l.unclear[id] {
			unknown++
		}
		var body struct{ N int }
		if err := json.Unmarshal([]byte(e.Data), &body); err != nil {
			tb.Errorf("entry %s: data: %v", e.EntryID, err)
		}
		if body.N <= last[e.Subject] && seen[id] == 1 {
			reordered++
		}
		last[e.Subject] = max(last[e.Subject], body.N)
	}
	lost, dup := 0, 0
	for id := range l.committed {
		if seen[id] == 0 {
			lost++
		}
	}
	for _, n := range seen {
		dup += n - 1
	}
	history := Value[int](tb, o.DB, `SELECT count(*) FROM unnest($1::uuid[]) id
		LEFT JOIN (SELECT id, count(*) AS n FROM outbox_history GROUP BY id) h USING (id)
		WHERE n IS DISTINCT FROM 1`, slices.Collect(maps.Keys(l.committed)))
	tb.Logf("committed %d, in the streams %d, lost %d, duplicates %d, reordered %d", len(l.committed), len(seen), lost,
		dup, reordered)
	if o.Flushed {
		lost, reordered = 0, 0 // events settled before the flush may be missing
	}
	if o.MayRepeat {
		dup = 0
	}
	if lost > 0 || dup > 0 || reordered > 0 || unknown > 0 || history > 0 {
		tb.Errorf("lost %d, duplicates %d, reordered %d, never committed %d, not in history %d", lost, dup, reordered,
			unknown, history)
	}
}
