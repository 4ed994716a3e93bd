package relay

import (
	"context"
	"sync/atomic"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// lossCounter counts the events that adoptions have recorded as possibly lost. It runs separately because the history
// may be long. One goroutine owns it; suspect may be called from any.
type lossCounter struct {
	*reporter
	store outbox.Store
	sink  outbox.Sink

	// uncounted is set while something that may be lost is not counted.
	uncounted atomic.Bool
}

// suspect requests a count.
func (c *lossCounter) suspect() { c.uncounted.Store(true) }

// run counts the events that adoptions have recorded as possibly lost, until ctx ends.
func (c *lossCounter) run(ctx context.Context) {
	for ctx.Err() == nil {
		if c.uncounted.Swap(false) {
			c.count(ctx)
		}
		pause.About(ctx, trimInterval)
	}
}

// count counts the losses and reports them.
func (c *lossCounter) count(ctx context.Context) {
	losses, err := c.store.CountLosses(ctx, c.sink.Tail)
	if err != nil {
		c.uncounted.Store(true)
		c.metrics.scrapeErrors.WithLabelValues("losses").Inc()
		c.log.Debug("count losses", "err", err)
	}
	for _, loss := range losses {
		if loss.Stream == "" {
			c.metrics.failovers.Inc()
			c.log.Error("postgres has gone back in time, by a failover or a restore: what is in the " +
				"streams is not published again, and posthaste phantoms names the events whose commits are missing")
			continue
		}
		c.metrics.lostEvents.Add(float64(max(loss.Events, 1)))
		c.log.Error("the sink has lost events that were settled, and they were not restored", "stream",
			loss.Stream, "events", loss.Events, "first", loss.First, "last", loss.Last, "remedy", loss.Remedy())
	}
}
