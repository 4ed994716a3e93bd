package consumer

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
)

const (
	// ackLinger is how long a lone acknowledgement waits for company: one call for many costs Redis, and us, far less.
	ackLinger = time.Millisecond
	// ackEnough is how many go at once.
	ackEnough = 128
	// ackMax bounds one call.
	ackMax = 2000
)

// acks is the queue between the workers and the one goroutine that acknowledges. It is first in, first out, and the
// entries of one stream go in one command, so that no acknowledgement of a subject overtakes an earlier one.
type acks struct {
	mu     sync.Mutex
	queue  []*entry
	closed bool
	wake   chan struct{}
	enough chan struct{}
}

func newAcks() *acks {
	return &acks{wake: make(chan struct{}, 1), enough: make(chan struct{}, 1)}
}

func (a *acks) push(e *entry) {
	a.mu.Lock()
	a.queue = append(a.queue, e)
	n := len(a.queue)
	a.mu.Unlock()
	if n == 1 {
		signal(a.wake)
	}
	if n == ackEnough {
		signal(a.enough)
	}
}

func signal(ch chan struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

func (a *acks) close() {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
	signal(a.wake)
	signal(a.enough)
}

func (a *acks) len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.queue)
}

// next returns a copy of the front of the queue, waiting for one; nil when closed and empty, or when ctx has ended.
func (a *acks) next(ctx context.Context) []*entry {
	for ctx.Err() == nil {
		a.mu.Lock()
		n, closed := len(a.queue), a.closed
		a.mu.Unlock()
		switch {
		case n == 0 && closed:
			return nil
		case n == 0:
			select {
			case <-a.wake:
			case <-ctx.Done():
			}
			continue
		case n < ackEnough && !closed:
			select {
			case <-a.enough:
			default:
				a.linger(ctx)
			}
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		return append([]*entry(nil), a.queue[:min(len(a.queue), ackMax)]...)
	}
	return nil
}

func (a *acks) linger(ctx context.Context) {
	t := time.NewTimer(ackLinger)
	defer t.Stop()
	select {
	case <-a.enough:
	case <-t.C:
	case <-ctx.Done():
	}
}

// drop removes the first n, which are acknowledged.
func (a *acks) drop(n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	rest := copy(a.queue, a.queue[n:])
	clear(a.queue[rest:])
	a.queue = a.queue[:rest]
}

// run acknowledges until the queue is closed and empty, or ctx ends.
func (a *acks) run(ctx context.Context, flush func(ctx context.Context, es []*entry) error) {
	for {
		es := a.next(ctx)
		if es == nil {
			return
		}
		if flush(ctx, es) == nil {
			a.drop(len(es))
		}
	}
}

// flush acknowledges es, in one round trip. An error means that some may not be; all are tried again, which is
// harmless.
func (c *Consumer) flush(ctx context.Context, es []*entry) error {
	args := map[string][]any{}
	for _, e := range es {
		a := args[e.stream]
		if a == nil {
			a = make([]any, 3, 3+len(es))
			a[0], a[1], a[2] = "xack", e.stream, c.opt.Group
		}
		args[e.stream] = append(a, e.id)
	}
	cmds, err := c.client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for _, a := range args {
			p.Do(ctx, a...)
		}
		return nil
	})
	// A connection that the server refuses is an error of the pipeline and of none of its commands.
	for _, cmd := range cmds {
		e := cmd.Err()
		if e == nil {
			continue
		}
		err = e
		if !strings.HasPrefix(e.Error(), "WRONGTYPE") {
			break
		}
		// A key of another type stands in place of the stream: nothing is pending there any more, and holding on to the
		// acknowledgement would stop all others.
		err = nil
	}
	if n := c.outages.note("ack", "", err); n > 0 {
		pause.For(ctx, reconnect(n))
		return err
	}
	c.queues.acked(es)
	for _, e := range es {
		if e.suspect {
			c.suspect.leave(e)
		}
	}
	return nil
}
