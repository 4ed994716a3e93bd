// Package shared gives concurrent callers one shared answer, so that the cost of a query does not depend on their
// number.
package shared

import (
	"context"
	"sync"
	"time"
)

// An answer is reused for a multiple of the time that it took, within bounds: so reading takes a tenth of the time at
// most, and cheap answers are nearly new.
const (
	share    = 10
	shortest = 50 * time.Millisecond
	longest  = 2 * time.Second
)

// Look is a query of which one runs at a time. It is safe for concurrent use.
type Look[T any] struct {
	// Read runs the query. The caller that finds no valid answer calls it, but its context does not end with that
	// caller's, because others may wait for it as well.
	Read func(ctx context.Context) (T, error)
	// Timeout bounds Read.
	Timeout time.Duration

	mu sync.Mutex
	// last is the newest query, or nil.
	last *asked[T]
}

// asked is one query. Its fields may be read once done is closed.
type asked[T any] struct {
	done  chan struct{}
	value T
	err   error
	until time.Time
}

// Get returns an answer to a query made at most two seconds ago, or still running. Its error is Read's, or ctx's.
func (l *Look[T]) Get(ctx context.Context) (T, error) {
	a, mine := l.join()
	if mine {
		l.ask(ctx, a)
	}
	select {
	case <-a.done:
		return a.value, a.err
	case <-ctx.Done():
		var none T
		return none, context.Cause(ctx)
	}
}

// Forget makes the next Get run the query: the caller has just changed the state that it reads.
func (l *Look[T]) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = nil
}

// join returns the query to wait for, and whether the caller must run it.
func (l *Look[T]) join() (*asked[T], bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last != nil {
		select {
		case <-l.last.done:
			if time.Now().Before(l.last.until) {
				return l.last, false
			}
		default:
			return l.last, false
		}
	}
	l.last = &asked[T]{done: make(chan struct{})}
	return l.last, true
}

func (l *Look[T]) ask(ctx context.Context, a *asked[T]) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.Timeout)
	defer cancel()
	defer close(a.done)
	began := time.Now()
	a.value, a.err = l.Read(ctx)
	now := time.Now()
	a.until = now.Add(min(max(share*now.Sub(began), shortest), longest))
}
