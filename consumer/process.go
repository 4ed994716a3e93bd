package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/exemplar"
	"posthaste/internal/redisurl"
	"posthaste/internal/traceparent"
)

// work runs entries until the queues are stopped.
func (c *Consumer) work(ctx context.Context) {
	normal := false
	defer func() {
		if !normal {
			c.workers.Go(func() { c.work(ctx) }) // the handler has ended this goroutine: another one takes its place
		}
	}()
	for {
		e, ok := c.queues.next()
		if !ok {
			normal = true
			return
		}
		c.process(ctx, e)
	}
}

// process runs one entry until it is acknowledged, waits for a retry, is dead, or belongs to another consumer.
func (c *Consumer) process(ctx context.Context, e *entry) {
	if !c.mayRun(e.stream) {
		c.queues.retry(e, c.leaseWait()) // it is dropped with all that waits before the lease is had again
		return
	}
	if e.values == nil && !c.reload(ctx, e) {
		return
	}
	if e.cause != nil {
		c.die(ctx, e, e.tried, e.cause)
		return
	}
	if e.suspect {
		if !c.suspect.enter(e) {
			c.queues.retry(e, suspectPause)
			return
		}
		defer func() {
			if !e.acking {
				c.suspect.leave(e)
			}
		}()
	}
	// The first attempt of a new entry needs no note, and the entry is certainly this process's. An entry that was held
	// for long without a renewal (the process was paused) must be checked.
	if (e.attempt > 1 || e.stale) && !c.begin(ctx, e) {
		return
	}
	if g, _ := e.values["for_group"].(string); g != "" && g != c.opt.Group {
		c.finish(e) // given back from a dead stream to another group
		return
	}
	ev, err := decode(e.stream, redis.XMessage{ID: e.id, Values: e.values}, e.attempt)
	switch {
	case err != nil:
		c.die(ctx, e, 0, err)
		return
	case e.attempt > max(c.opt.MaxAttempts, suspectAfter):
		// It was begun often enough, and no end of it was ever seen: it may be what kills the process. The first
		// beginning may have been only a delivery.
		c.die(ctx, e, e.attempt-1, errors.New("no attempt finished: the process died or was stopped each time"))
		return
	}
	began := time.Now()
	err = errGoexit
	defer func() {
		exemplar.Observe(c.metrics.handleSeconds, time.Since(began).Seconds(), ev.TraceParent)
		c.settle(ctx, e, &ev, err)
	}()
	err = c.call(ctx, ev)
}

// call runs the handler; a panic becomes an error.
func (c *Consumer) call(ctx context.Context, ev Event) (err error) {
	defer func() {
		if v := recover(); v != nil {
			c.log.Error("handler panicked", "event_id", ev.ID, "stream", ev.Stream, "entry_id", ev.EntryID, "stack",
				string(debug.Stack()))
			err = fmt.Errorf("panic: %v", v) // without the stack: it may go into the dead stream
		}
	}()
	if traceparent.Valid(ev.TraceParent) {
		ctx = context.WithValue(ctx, traceKey{}, ev.TraceParent)
	}
	if err = c.handler(ctx, ev); err != nil {
		_ = err.Error() // that of a nil pointer panics, here where a panic is a failure
	}
	return err
}

// settle draws the consequence of an attempt.
func (c *Consumer) settle(ctx context.Context, e *entry, ev *Event, err error) {
	switch {
	case err == nil:
		if !ev.Time.IsZero() {
			exemplar.Observe(c.metrics.delaySeconds, time.Since(ev.Time).Seconds(), ev.TraceParent)
		}
		c.finish(e)
	case isUnavailable(err) || ctx.Err() != nil:
		// The event is not the cause; and a handler whose context was canceled has not failed.
		c.queues.fail(e)
		c.wait(e, ev, err)
	case isPermanent(err):
		c.die(ctx, e, e.attempt, err)
	case c.queues.fail(e):
		c.logOutage(err)
		e.attempt = 1
		c.wait(e, ev, err)
	case e.attempt >= c.opt.MaxAttempts:
		c.die(ctx, e, e.attempt, err)
	default:
		c.log.Debug("event failed", "event_id", ev.ID, "stream", e.stream, "attempt", e.attempt, "err", err)
		wait := c.opt.Backoff(e.attempt)
		e.attempt++
		e.suspect = false
		c.queues.retry(e, wait)
	}
}

// wait runs e again later, without counting the attempt.
func (c *Consumer) wait(e *entry, ev *Event, err error) {
	c.log.Debug("event waits", "event_id", ev.ID, "stream", e.stream, "attempt", e.attempt, "err", err)
	e.waits++
	e.suspect = false
	c.queues.retry(e, max(c.opt.Backoff(e.waits), retryAfter(err)))
}

// finish hands e to the acknowledger and lets its queue go on: in this order, so that acknowledgements of a subject are
// in the order of its events.
func (c *Consumer) finish(e *entry) {
	e.acking = true
	c.acks <- e
	c.queues.done(e, true)
}

// again puts e back because Redis does not answer.
func (c *Consumer) again(e *entry, op string, err error) {
	c.queues.retry(e, reconnect(c.outages.note(op, e.stream, err)))
}

// deliveryPause is how long an entry waits whose group is behind.
const deliveryPause = 100 * time.Millisecond

// begin notes the attempt in Redis. It returns false if e is not to run now.
func (c *Consumer) begin(ctx context.Context, e *entry) bool {
	owned, err := beginScript.Run(ctx, c.client, []string{e.stream}, c.opt.Group, c.opt.Consumer, e.id, e.attempt).Int()
	switch {
	case noGroup(err): // flushed: there is nothing to note it in, and this copy is the last one
	case err != nil:
		c.again(e, "begin", err)
		return false
	case owned == 0:
		c.queues.leave(e)
		return false
	case owned == 2: // the reader delivers it; its successors must not pass it
		c.queues.retry(e, deliveryPause)
		return false
	}
	c.outages.note("begin", e.stream, nil)
	return true
}

// reload reads the payload of a parked entry back, and those of the entries behind it. It returns false if e is not to
// run now.
func (c *Consumer) reload(ctx context.Context, e *entry) bool {
	es := c.queues.parked(e)
	cmds := make([]*redis.XMessageSliceCmd, len(es))
	client := c.client
	if e.reloads > 0 {
		node, err := redisurl.Holder(ctx, client, e.stream)
		if err != nil {
			c.again(e, "reload", err)
			return false
		}
		client = waits(node, e.reloads)
	}
	_, err := client.Pipelined(ctx, func(p redis.Pipeliner) error {
		for i, f := range es {
			cmds[i] = p.XRange(ctx, f.stream, f.id, f.id)
		}
		return nil
	})
	if err != nil && !errors.Is(err, redis.Nil) {
		if !redisurl.IsReply(err) {
			e.reloads++
		}
		c.again(e, "reload", err)
		return false
	}
	e.reloads = 0
	c.outages.note("reload", e.stream, nil)
	values := make([]map[string]any, len(es))
	for i, cmd := range cmds {
		if m := cmd.Val(); len(m) == 1 {
			values[i] = m[0].Values
		}
	}
	c.queues.unpark(es, values)
	if values[0] == nil { // trimmed while it waited
		c.lost(e.stream, 1)
		c.finish(e)
		return false
	}
	return true
}
