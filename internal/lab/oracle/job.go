package oracle

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/outbox"
)

// Job is one transaction.
type Job struct {
	Truth *Truth
	// Pad is in the payload of each event.
	Pad string
	// Savepoint rolls back a part of the transaction, Rollback all of it.
	Savepoint, Rollback bool

	parts []part
}

// part has the events of one aggregate that a job has begun.
type part struct {
	first  Ref
	n      int
	undone bool // by a savepoint
}

// Run writes n events of each aggregate, whose locks the caller holds.
func (j *Job) Run(ctx context.Context, pool *pgxpool.Pool, list []*Aggregate, n int) (err error) {
	tx, err := pool.Begin(ctx)
	if err != nil {
		return err
	}
	result := No // until the commit is sent, nothing is committed
	defer func() {
		_ = tx.Rollback(context.WithoutCancel(ctx)) // after a commit, this has no effect
		j.End(result)
	}()
	for _, a := range list {
		// The lock comes first: the order of an aggregate's events is guaranteed only to writers that take it.
		_, err = tx.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtextextended($1, 7))", a.ID)
		if err != nil {
			return err
		}
		if err = j.Insert(ctx, tx, a, n); err != nil {
			return err
		}
		if !j.Savepoint {
			continue
		}
		sub, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if err = j.Insert(ctx, sub, a, 2); err != nil {
			return err
		}
		if err = sub.Rollback(ctx); err != nil {
			return err
		}
		j.parts[len(j.parts)-1].undone = true
		if err = j.Insert(ctx, tx, a, 1); err != nil {
			return err
		}
	}
	if j.Rollback {
		return tx.Rollback(ctx)
	}
	result = Unknown
	switch err = tx.Commit(ctx); {
	case err == nil:
		result = Yes
	case errors.Is(err, pgx.ErrTxCommitRollback):
		result = No
	}
	return err
}

// End records the outcome of the transaction.
func (j *Job) End(o Outcome) {
	for _, p := range j.parts {
		if p.undone {
			j.Truth.End(p.first, p.n, No)
		} else {
			j.Truth.End(p.first, p.n, o)
		}
	}
}

// copyFrom is the number of events from which on COPY replaces INSERT.
const copyFrom = 50

// Insert writes n events of an aggregate.
func (j *Job) Insert(ctx context.Context, tx pgx.Tx, a *Aggregate, n int) error {
	first := j.Truth.Open(a, n)
	j.parts = append(j.parts, part{first: first, n: n})
	at := func(i int) Ref { return Ref{first.Aggregate, first.N + uint32(i)} } //nolint:gosec // see Ref
	if n >= copyFrom {
		columns := []string{"id", "aggregate_type", "aggregate_id", "event_type", "payload"}
		_, err := tx.CopyFrom(ctx, pgx.Identifier{"outbox"}, columns, pgx.CopyFromSlice(n, func(i int) ([]any, error) {
			return []any{j.Truth.ID(at(i)), a.Type, a.ID, a.Type + ".changed", string(Payload(at(i), j.Pad))}, nil
		}))
		return err
	}
	for i := range n {
		if _, err := outbox.Insert(ctx, tx, outbox.Event{
			ID: j.Truth.ID(at(i)), AggregateType: a.Type, AggregateID: a.ID, Type: a.Type + ".changed",
			Payload: Payload(at(i), j.Pad),
		}); err != nil {
			return err
		}
	}
	return nil
}

// Padding returns n bytes of text that hardly compresses.
func Padding(r *rand.Rand, n int) string {
	var b strings.Builder
	for b.Len() < n {
		fmt.Fprintf(&b, "%016x", r.Uint64())
	}
	return b.String()[:n]
}

// Random returns a random source. The same seed and number give the same choices.
func Random(seed, number uint64) *rand.Rand {
	return rand.New(rand.NewPCG(seed, number)) //nolint:gosec // choices, no secrets
}
