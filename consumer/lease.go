package consumer

import (
	"context"
	"errors"
	"sync"
	"time"
)

// errNoLease means that somebody else may read the stream by now.
var errNoLease = errors.New("the lease of the stream is over")

// leasePause is how long a reader without a lease waits before it looks again.
const leasePause = 10 * time.Millisecond

// leases are the streams that this process may read in ordered mode, and until when.
//
// A lease is no fence: a process that is stopped in the middle of a handler may go on with it after somebody else has
// taken over. It begins no further event, though, because it looks at its own clock first; and what the running handler
// does a second time is what an inbox is for.
type leases struct {
	mu    sync.Mutex
	until map[string]time.Time
}

func (l *leases) set(stream string, until time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.until == nil {
		l.until = map[string]time.Time{}
	}
	l.until[stream] = until
}

func (l *leases) valid(stream string) bool { return l.left(stream) > 0 }

// left is how long the lease of stream lasts; not above zero: there is none.
func (l *leases) left(stream string) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Until(l.until[stream])
}

// leaseKey is in the stream's slot.
func leaseKey(stream, group string) string { return "{" + stream + "}:lease:" + group }

// lease takes or renews the lease of stream and notes how long it lasts by our own clock, counted from before the call.
func (c *Consumer) lease(ctx context.Context, stream string) (string, error) {
	ttl := c.opt.ClaimIdle
	began := time.Now()
	got, err := leaseScript.Run(ctx, c.client, []string{leaseKey(stream, c.opt.Group)}, c.opt.Consumer, ttl.Milliseconds()).Text()
	if ctx.Err() == nil {
		c.outages.note("lease", stream, err)
	}
	if err == nil && got != "held" {
		c.leases.set(stream, began.Add(ttl-ttl/10))
	}
	return got, err
}

// readOrdered reads stream whenever it has the lease, until ctx ends.
func (c *Consumer) readOrdered(ctx context.Context, stream string) {
	for ctx.Err() == nil {
		got, err := c.lease(ctx, stream)
		if err != nil || got == "held" {
			pause(ctx, min(c.opt.ClaimIdle/10, 500*time.Millisecond))
			continue
		}
		c.log.Info("lease taken", "stream", stream)
		c.term(ctx, stream)
		if ctx.Err() == nil {
			c.log.Warn("lease lost", "stream", stream)
		}
	}
}

// term reads stream while the lease can be renewed.
func (c *Consumer) term(ctx context.Context, stream string) {
	ctx, end := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer end()
	only := []string{stream}
	wg.Go(func() { newReader(c, func() []string { return only }).run(ctx) })
	for {
		pause(ctx, c.opt.ClaimIdle/5)
		if ctx.Err() != nil {
			return
		}
		got, err := c.lease(ctx, stream)
		// A lease that had to be taken anew may have been somebody else's meanwhile: begin again with what is pending.
		if (err == nil && got != "renewed") || !c.leases.valid(stream) {
			c.leases.set(stream, time.Time{})
			return
		}
	}
}

// mayRun reports whether an event of stream may begin.
func (c *Consumer) mayRun(stream string) bool { return !c.opt.Ordered || c.leases.valid(stream) }
