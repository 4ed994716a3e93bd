package prove

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// types are the aggregate types of the writers' events. Each has its own stream.
var types = []string{"cart", "parcel", "invoice"}

const (
	// aggregatesEach is the number of aggregates of each type.
	aggregatesEach = 100
	// writerCount is the number of concurrent writers.
	writerCount = 6
	// writeTimeout bounds a transaction: a commit may be delayed, and a connection may not answer.
	writeTimeout = 15 * time.Second
	// largePayload is the size of a large event.
	largePayload = 1 << 20
)

// writers commit events at a rate, in transactions of every kind, and record the outcomes in truth.
type writers struct {
	truth *truth
	pool  *pgxpool.Pool
	rate  int
	// mine are the aggregates of the writers, by type.
	mine map[string][]*aggregate
}

func newWriters(ctx context.Context, t *truth, url string, rate int) (*writers, error) {
	pool, err := openPool(ctx, url, writerCount+4, map[string]string{
		"application_name": "prove writer",
		// Postgres ends the session of a disconnected writer, and so releases its locks.
		"idle_in_transaction_session_timeout": "20s",
		"lock_timeout":                        "10s",
	})
	if err != nil {
		return nil, err
	}
	w := &writers{truth: t, pool: pool, rate: rate, mine: map[string][]*aggregate{}}
	for _, typ := range types {
		for range aggregatesEach {
			w.mine[typ] = append(w.mine[typ], t.newAggregate(typ))
		}
	}
	return w, nil
}

// run writes until ctx ends, and returns when the last transaction has ended.
func (w *writers) run(ctx context.Context, seed uint64) {
	var all sync.WaitGroup
	for i := range writerCount {
		r := newRandom(seed, uint64(i))
		all.Go(func() { w.write(ctx, r) })
	}
	all.Wait()
}

// write runs one writer.
func (w *writers) write(ctx context.Context, r *rand.Rand) {
	perEvent := time.Duration(writerCount) * time.Second / time.Duration(w.rate)
	due := time.Now()
	for ctx.Err() == nil {
		n, err := w.transaction(r)
		if err != nil {
			pause.For(ctx, 50*time.Millisecond)
		}
		// A writer that is late does not catch up: a burst would be a different load.
		if due = due.Add(time.Duration(n) * perEvent); due.Before(time.Now().Add(-time.Second)) {
			due = time.Now()
		}
		pause.For(ctx, time.Until(due))
	}
}

// shape describes a transaction.
type shape struct {
	aggregates, events int
	size               int
	// savepoint rolls back a part of the transaction, rollback all of it.
	savepoint, rollback bool
}

// shapeOf chooses a random shape.
func shapeOf(r *rand.Rand) shape {
	s := shape{aggregates: 1, events: 1 + r.IntN(5), size: 20 + r.IntN(200)}
	switch k := r.IntN(1000); {
	case k < 1:
		s.events, s.size = 1, largePayload
	case k < 4:
		s.events = 200 + r.IntN(800)
	case k < 80:
		s.rollback = true
	case k < 160:
		s.savepoint = true
	case k < 240:
		s.aggregates = 2 + r.IntN(3)
	}
	return s
}

// transaction writes one transaction and returns the number of its events.
func (w *writers) transaction(r *rand.Rand) (int, error) {
	s := shapeOf(r)
	var chosen []*aggregate
	for range s.aggregates {
		list := w.mine[types[r.IntN(len(types))]]
		if a := list[r.IntN(len(list))]; !slices.Contains(chosen, a) {
			chosen = append(chosen, a)
		}
	}
	// All writers lock in the same order, which prevents deadlocks.
	slices.SortFunc(chosen, func(a, b *aggregate) int { return int(a.number) - int(b.number) })
	for _, a := range chosen {
		a.lock.Lock()
		defer a.lock.Unlock()
	}
	ctx, cancel := context.WithTimeout(context.Background(), writeTimeout)
	defer cancel()
	pad := padding(r, s.size)
	job := &job{truth: w.truth, pad: pad, savepoint: s.savepoint, rollback: s.rollback}
	return s.events * len(chosen), job.run(ctx, w.pool, chosen, s.events)
}

// one writes n events of a new aggregate in one transaction, for faults that need them.
func (w *writers) one(ctx context.Context, typ string, n int, pad string) error {
	a := w.truth.newAggregate(typ)
	job := &job{truth: w.truth, pad: pad}
	return job.run(ctx, w.pool, []*aggregate{a}, n)
}

// job is one transaction.
type job struct {
	truth     *truth
	pad       string
	savepoint bool
	rollback  bool

	parts []part
}

// part has the events of one aggregate that a job has begun.
type part struct {
	first  ref
	n      int
	undone bool // by a savepoint
}

// run writes n events of each aggregate, whose locks the caller holds.
func (j *job) run(ctx context.Context, pool *pgxpool.Pool, list []*aggregate, n int) (err error) {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return err
	}
	result := no // until the commit is sent, nothing is committed
	defer func() {
		_ = tx.Rollback(context.WithoutCancel(ctx)) // after a commit, this has no effect
		for _, p := range j.parts {
			o := result
			if p.undone {
				o = no
			}
			j.truth.end(p.first, p.n, o)
		}
	}()
	for _, a := range list {
		// The lock comes first: the order of an aggregate's events is guaranteed only to writers that take it.
		_, err = tx.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended($1, 7))", a.id)
		if err != nil {
			return err
		}
		if err = j.insert(ctx, tx, a, n); err != nil {
			return err
		}
		if !j.savepoint {
			continue
		}
		sub, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if err = j.insert(ctx, sub, a, 2); err != nil {
			return err
		}
		if err = sub.Rollback(ctx); err != nil {
			return err
		}
		j.parts[len(j.parts)-1].undone = true
		if err = j.insert(ctx, tx, a, 1); err != nil {
			return err
		}
	}
	if j.rollback {
		return tx.Rollback(ctx)
	}
	result = unknown
	switch err = tx.Commit(ctx); {
	case err == nil:
		result = yes
	case errors.Is(err, pgx.ErrTxCommitRollback):
		result = no
	}
	return err
}

// copyFrom is the number of events from which on COPY replaces INSERT.
const copyFrom = 50

// insert writes n events of an aggregate.
func (j *job) insert(ctx context.Context, tx pgx.Tx, a *aggregate, n int) error {
	first := j.truth.open(a, n)
	j.parts = append(j.parts, part{first: first, n: n})
	at := func(i int) ref { return ref{first.aggregate, first.n + uint32(i)} } //nolint:gosec // see ref
	if n >= copyFrom {
		columns := []string{"id", "aggregate_type", "aggregate_id", "event_type", "payload"}
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"outbox"}, columns, pgx.CopyFromSlice(n, func(i int) ([]any, error) {
			return []any{j.truth.id(at(i)), a.typ, a.id, a.typ + ".changed", string(payload(at(i), j.pad))}, nil
		}))
		return err
	}
	for i := range n {
		if _, err := outbox.Insert(ctx, tx, outbox.Event{
			ID: j.truth.id(at(i)), AggregateType: a.typ, AggregateID: a.id, Type: a.typ + ".changed",
			Payload: payload(at(i), j.pad),
		}); err != nil {
			return err
		}
	}
	return nil
}

// padding returns n bytes of text that hardly compresses.
func padding(r *rand.Rand, n int) string {
	var b strings.Builder
	for b.Len() < n {
		fmt.Fprintf(&b, "%016x", r.Uint64())
	}
	return b.String()[:n]
}

// newRandom returns a random source. The same seed and number give the same choices.
func newRandom(seed, number uint64) *rand.Rand {
	return rand.New(rand.NewPCG(seed, number)) //nolint:gosec // choices, no secrets
}
