// Package shared lets everybody who asks at about the same time have one answer, so that what a question costs does not
// depend on how many ask it.
package shared

import (
	"context"
	"sync"
	"time"
)

// How long an answer is good: so many times as long as it took to get, within bounds. Reading takes a tenth of the time
// at most, and an answer that was cheap is as good as new.
const (
	share    = 10
	shortest = 50 * time.Millisecond
	longest  = 2 * time.Second
)

// Look is a question that is asked once at a time. It is safe for concurrent use.
type Look[T any] struct {
	// Read asks. It is called by whoever finds no good answer, but its context does not end with that caller's, because
	// others may wait for it as well.
	Read func(ctx context.Context) (T, error)
	// Timeout bounds Read.
	Timeout time.Duration

	mu sync.Mutex
	// last is the newest question, or nil.
	last *asked[T]
}

// asked is one question. Its fields may be read once done is closed.
type asked[T any] struct {
	done  chan struct{}
	value T
	err   error
	until time.Time
}

// Get returns an answer that was asked for at most two seconds ago, or is on its way. Its error is Read's, or ctx's.
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

// Forget has the next Get ask again: the caller has just changed what the answer tells.
func (l *Look[T]) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = nil
}

// join returns the question to wait for, and whether the caller has to ask it.
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
