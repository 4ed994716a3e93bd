package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
)

// errNoLease means that another consumer may be reading the stream.
var errNoLease = errors.New("the lease of the stream is over")

// leasePause is how long a reader without a lease waits before it checks again.
const leasePause = 10 * time.Millisecond

// leases are the streams that this process may read in ordered mode, and until when.
//
// The lease fences the delivery of entries: Redis checks it atomically, so a read or a claim is refused if it is
// executed late, when another consumer has the stream or this one uses another connection. It does not fence handlers:
// a process that was paused in a handler may continue it after another consumer has taken over. It starts no further
// event, because it checks its own clock first. An inbox makes the repeated effect of the running handler harmless.
type leases struct {
	mu sync.Mutex
	of map[string]lease
}

// lease is the state of one stream's lease in this process. The zero value is an expired lease.
type lease struct {
	until time.Time
	turn  int  // the present one
	other bool // another consumer had the stream when Redis last answered
}

func newLeases() *leases { return &leases{of: map[string]lease{}} }

func (l *leases) get(stream string) lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.of[stream]
}

func (l *leases) change(stream string, f func(*lease)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	one := l.of[stream]
	f(&one)
	l.of[stream] = one
}

// begin records a lease until then, from when on events of stream may run; the zero time ends it.
func (l *leases) begin(stream string, until time.Time) {
	l.change(stream, func(one *lease) { one.until = until })
}

// extend extends the lease to until. It returns false and changes nothing if the lease has expired: the expiry may have
// been noticed, and a new lease begins with all pending entries.
func (l *leases) extend(stream string, until time.Time) (ok bool) {
	l.change(stream, func(one *lease) {
		if ok = time.Until(one.until) > 0; ok {
			one.until = until
		}
	})
	return ok
}

func (l *leases) valid(stream string) bool { return time.Until(l.get(stream).until) > 0 }

// leaseKey is in the stream's slot.
func leaseKey(stream, group string) string { return "{" + stream + "}:lease:" + group }

// fence returns the keys of a script that delivers entries of stream, and the required value of the lease; without
// ordered mode only the stream and "".
func (c *Consumer) fence(stream string) (keys []string, token string) {
	if !c.opt.Ordered {
		return []string{stream}, ""
	}
	return []string{stream, leaseKey(stream, c.opt.Group)},
		fmt.Sprintf("%s|%s|%d", c.opt.Consumer, c.self, c.leases.get(stream).turn)
}

// fenced returns the answer of such a script; errNoLease if it was refused.
func fenced(cmd *redis.Cmd) ([]any, error) {
	if s, err := cmd.Text(); err == nil && s == "held" {
		return nil, errNoLease
	}
	return cmd.Slice()
}

// lease takes or renews the lease of stream in Redis, and returns until when it lasts by our own clock, counted from
// before the call.
func (c *Consumer) lease(ctx context.Context, stream string) (got string, until time.Time, err error) {
	ttl := c.opt.ClaimIdle
	began := time.Now()
	got, err = c.callLease(ctx, stream, ttl)
	if ctx.Err() == nil {
		c.outages.note("lease", stream, err)
	}
	if err == nil {
		c.leases.change(stream, func(one *lease) { one.other = got == "held" })
	}
	return got, began.Add(ttl - ttl/10), err
}

// renew extends the lease. errNoLease: it has ended, or had ended for a moment in which another consumer may have had
// it.
func (c *Consumer) renew(ctx context.Context, stream string) error {
	turn := c.leases.get(stream).turn
	got, until, err := c.lease(ctx, stream)
	switch {
	case err != nil:
		return err
	case turn != c.leases.get(stream).turn: // the reader has taken a later one since, which counts
		return nil
	case got != "renewed":
		c.leases.begin(stream, time.Time{})
		return errNoLease
	case !c.leases.extend(stream, until):
		return errNoLease
	}
	return nil
}

// callLease takes or renews the lease for ttl; 0 gives it up.
func (c *Consumer) callLease(ctx context.Context, stream string, ttl time.Duration) (string, error) {
	return leaseScript.Run(ctx, c.client, []string{leaseKey(stream, c.opt.Group)},
		c.opt.Consumer, c.self, c.leases.get(stream).turn, ttl.Milliseconds()).Text()
}

// takeTurn begins a new turn, so that Redis refuses this process's earlier requests that it has not executed yet.
func (c *Consumer) takeTurn(ctx context.Context, stream string) error {
	c.leases.change(stream, func(one *lease) { one.turn++ })
	return c.renew(ctx, stream)
}

// leaseWait is how long something that needs the lease waits until it looks again.
func (c *Consumer) leaseWait() time.Duration { return min(c.opt.ClaimIdle/10, 500*time.Millisecond) }

// readOrdered reads stream whenever it has the lease, until ctx ends.
func (c *Consumer) readOrdered(ctx context.Context, stream string) {
	for ctx.Err() == nil {
		got, until, err := c.lease(ctx, stream)
		if err != nil || got == "held" {
			pause.For(ctx, c.leaseWait())
			continue
		}
		c.leases.begin(stream, until)
		c.log.Info("lease taken", "stream", stream)
		c.term(ctx, stream)
		if ctx.Err() == nil { // else what waits is given back
			c.log.Warn("lease lost", "stream", stream)
			c.leases.begin(stream, time.Time{})
			c.queues.drop(stream)
		}
	}
}

// term reads stream while it can renew the lease. It returns when the lease has ended and no more entries of the stream
// are queued. The queued ones must be dropped before the next lease, because dropped events, or events that another
// consumer had in between, may come before them.
func (c *Consumer) term(ctx context.Context, stream string) {
	ctx, end := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer end()
	r := newReader(c, stream)
	r.over = end
	wg.Go(func() { r.run(ctx) })
	for ctx.Err() == nil && c.leases.valid(stream) {
		pause.For(ctx, c.opt.ClaimIdle/5)
		if err := c.renew(ctx, stream); errors.Is(err, errNoLease) {
			return
		}
	}
}

// mayRun reports whether an event of stream may begin.
func (c *Consumer) mayRun(stream string) bool { return !c.opt.Ordered || c.leases.valid(stream) }

// readLeased reads up to n new entries if the lease is valid, and waits if the stream has no new entries.
func (r *reader) readLeased(ctx context.Context, stream string, n int) error {
	if !r.c.leases.valid(stream) { // this process may have been paused
		pause.For(ctx, leasePause)
		return nil
	}
	once, err := r.scripter(ctx, stream)
	if err != nil {
		return err
	}
	keys, token := r.c.fence(stream)
	last, err := r.readBytes(ctx, once, keys, token, n)
	if errors.Is(err, errNoLease) {
		clear(r.prepared) // another consumer may have had it since
		pause.For(ctx, leasePause)
		return nil
	}
	if err != nil || last == "" {
		return err
	}
	// Wait for an entry after last. This delivers none, because only a script can check the lease, and scripts cannot
	// wait.
	err = r.c.client.XRead(ctx, &redis.XReadArgs{Streams: []string{stream, last}, Count: 1, Block: block}).Err()
	if errors.Is(err, redis.Nil) {
		return nil
	}
	return err
}
