package prove

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/internal/lab/oracle"
	"posthaste/internal/pause"
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
	truth *oracle.Truth
	pool  *pgxpool.Pool
	rate  int
	// mine are the aggregates of the writers, by type.
	mine map[string][]*oracle.Aggregate
}

func newWriters(ctx context.Context, t *oracle.Truth, url string, rate int) (*writers, error) {
	pool, err := openPool(ctx, url, writerCount+4, map[string]string{
		"application_name": "prove writer",
		// Postgres ends the session of a disconnected writer, and so releases its locks.
		"idle_in_transaction_session_timeout": "20s",
		"lock_timeout":                        "10s",
	})
	if err != nil {
		return nil, err
	}
	return &writers{truth: t, pool: pool, rate: rate, mine: t.NewAggregates("", aggregatesEach, types)}, nil
}

// run writes until ctx ends, and returns when the last transaction has ended.
func (w *writers) run(ctx context.Context, seed uint64) {
	var all sync.WaitGroup
	for i := range writerCount {
		r := oracle.Random(seed, uint64(i))
		all.Go(func() { w.write(ctx, r) })
	}
	all.Wait()
}

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
	var chosen []*oracle.Aggregate
	for range s.aggregates {
		list := w.mine[types[r.IntN(len(types))]]
		if a := list[r.IntN(len(list))]; !slices.Contains(chosen, a) {
			chosen = append(chosen, a)
		}
	}
	// All writers lock in the same order, which prevents deadlocks.
	slices.SortFunc(chosen, func(a, b *oracle.Aggregate) int { return int(a.Number) - int(b.Number) })
	for _, a := range chosen {
		a.Lock()
		defer a.Unlock()
	}
	ctx, cancel := context.WithTimeout(context.Background(), writeTimeout)
	defer cancel()
	job := &oracle.Job{Truth: w.truth, Pad: oracle.Padding(r, s.size), Savepoint: s.savepoint, Rollback: s.rollback}
	return s.events * len(chosen), job.Run(ctx, w.pool, chosen, s.events)
}

// one writes n events of a new aggregate in one transaction, for faults that need them.
func (w *writers) one(ctx context.Context, typ string, n int, pad string) error {
	a := w.truth.NewAggregate("", typ)
	job := &oracle.Job{Truth: w.truth, Pad: pad}
	return job.Run(ctx, w.pool, []*oracle.Aggregate{a}, n)
}
