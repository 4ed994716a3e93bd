package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// holdBatch bounds the entries of one call to the scripts that take a list of ids.
const holdBatch = 500

// Modes of take: this consumer's own pending entries, those of all consumers, or those that have been idle for the
// given ms.
const (
	modeOwn = "own"
	modeAll = "0"
)

// take reads a page of pending entries into the queues and returns the cursor of the next page, "" at the end.
func (r *reader) take(ctx context.Context, stream, mode, cursor string) (string, error) {
	c := r.c
	n := c.queues.capacity(ctx, r.size.least())
	if n == 0 {
		return "", ctx.Err()
	}
	if !c.mayRun(stream) { // it would take entries that another consumer works on
		return "", errNoLease
	}
	// Held entries are not read again: if an answer is lost, all that have arrived before count.
	if mode == modeOwn || mode == modeAll {
		var err error
		if cursor, err = c.skipHeld(ctx, stream, mode, cursor); err != nil || cursor == "" {
			return "", err
		}
	}
	defer c.queues.taking(stream)()
	once, err := r.scripter(ctx, stream)
	if err != nil {
		return "", err
	}
	keys, token := c.fence(stream)
	began := time.Now()
	reply, err := fenced(takeScript.Run(ctx, once, keys, c.opt.Group, c.opt.Consumer, mode, cursor,
		min(n, r.size.entries), token, r.size.bytes))
	if err != nil {
		return "", r.failed(ctx, err)
	}
	if len(reply) != 3 {
		return "", fmt.Errorf("unexpected reply to the take script on stream %q", stream)
	}
	es := entriesOf(stream, reply[1])
	if gone, _ := reply[2].([]any); len(gone) > 0 {
		c.lost(stream, len(gone))
	}
	r.received(es, time.Since(began))
	if n := c.queues.add(es); n > 0 && mode != modeOwn {
		c.metrics.claimed.Add(float64(n))
		c.log.Info("entries taken over", "stream", stream, "entries", n)
	}
	return text(reply[0]), nil
}

// skipHeld returns the id of the first pending entry from cursor on that this consumer does not own and hold, "" if it
// holds all.
func (c *Consumer) skipHeld(ctx context.Context, stream, mode, cursor string) (string, error) {
	args := redis.XPendingExtArgs{Stream: stream, Group: c.opt.Group, Start: cursor, End: "+", Count: holdBatch}
	if mode == modeOwn {
		args.Consumer = c.opt.Consumer
	}
	for {
		page, err := c.client.XPendingExt(ctx, &args).Result()
		if err != nil && !errors.Is(err, redis.Nil) {
			return "", err
		}
		for _, p := range page {
			if p.Consumer != c.opt.Consumer || !c.queues.holds(entryRef{stream, parseEntryID(p.ID)}) {
				return p.ID, nil
			}
		}
		if len(page) < holdBatch {
			return "", nil
		}
		args.Start = "(" + page[len(page)-1].ID
	}
}

// entriesOf reads entries of a stream as the scripts answer them: {id, {field, value, …}}, and how often it was
// delivered if it is pending.
func entriesOf(stream string, list any) []*entry {
	items, _ := list.([]any)
	es, now := make([]*entry, 0, len(items)), time.Now()
	for _, item := range items {
		it, _ := item.([]any)
		if len(it) < 2 {
			continue
		}
		deliveries := int64(0)
		if len(it) == 3 {
			deliveries, _ = it[2].(int64)
		}
		e := newEntry(stream, redis.XMessage{ID: text(it[0]), Values: fieldMap(it[1])}, int(deliveries)+1, now)
		e.suspect = deliveries >= suspectAfter
		es = append(es, e)
	}
	return es
}

func text(v any) string { s, _ := v.(string); return s }

// fieldMap reads the fields of an entry as a script answers them.
func fieldMap(v any) map[string]any {
	fields, _ := v.([]any)
	values := make(map[string]any, len(fields)/2)
	for i := 0; i+1 < len(fields); i += 2 {
		values[text(fields[i])] = fields[i+1]
	}
	return values
}

// lost counts pending entries that were trimmed before they were acknowledged.
func (c *Consumer) lost(stream string, n int) {
	c.metrics.trimLost.WithLabelValues(stream, c.opt.Group).Add(float64(n))
	c.log.Error("pending entries were trimmed from the stream: events lost", "stream", stream, "entries", n)
}

// claim takes over what has been idle for at least the given time.
func (r *reader) claim(ctx context.Context, stream string, idle time.Duration) error {
	return r.takeAll(ctx, stream, strconv.FormatInt(idle.Milliseconds(), 10), "0-0")
}

// takeAll takes every page from cursor on.
func (r *reader) takeAll(ctx context.Context, stream, mode, cursor string) (err error) {
	for cursor != "" {
		if cursor, err = r.take(ctx, stream, mode, cursor); err != nil {
			return err
		}
	}
	return nil
}

// noGroup reports an error that the reader repairs by creating the group.
func noGroup(err error) bool { return err != nil && strings.Contains(err.Error(), "NOGROUP") }

// removeAll removes consumers that are gone.
func (c *Consumer) removeAll(ctx context.Context) {
	for _, stream := range c.streams.list() {
		if ctx.Err() != nil {
			return
		}
		if err := c.removeIdle(ctx, stream); ctx.Err() == nil && !noGroup(err) {
			c.outages.note("remove", stream, err)
		}
	}
}

// removeIdle removes consumers of the group that have nothing pending and have given no sign of life for long. Removing
// one that lives after all does no harm: its next read brings it back.
func (c *Consumer) removeIdle(ctx context.Context, stream string) error {
	list, err := c.client.XInfoConsumers(ctx, stream, c.opt.Group).Result()
	if err != nil && !isMissing(err) {
		return err
	}
	for _, m := range list {
		if m.Name == c.opt.Consumer || m.Pending > 0 || m.Idle < 20*c.opt.ClaimIdle {
			continue
		}
		n, err := leaveScript.Run(ctx, c.client, []string{stream}, c.opt.Group, m.Name).Int()
		if err != nil {
			return err
		}
		if n == 1 {
			c.log.Info("dead consumer removed", "stream", stream, "consumer", m.Name)
		}
	}
	return nil
}

// holdAll renews, until ctx ends, every entry in memory that needs it, so that no consumer claims entries that run or
// wait for a retry here. It drops entries that another consumer has claimed anyway, because this process was paused. No
// stream waits for another one, whose node of a cluster may not answer.
func (c *Consumer) holdAll(ctx context.Context) {
	var calls sync.WaitGroup
	defer calls.Wait()
	var busy sync.Map
	every(ctx, c.opt.ClaimIdle/3, func(ctx context.Context) {
		for stream, es := range c.queues.heldSince(time.Now().Add(-c.opt.ClaimIdle / 4)) {
			if _, is := busy.LoadOrStore(stream, true); is {
				continue
			}
			calls.Go(func() {
				defer busy.Delete(stream)
				began := time.Now()
				err := c.hold(ctx, stream, es, 0, -1)
				if err == nil {
					c.queues.renewed(es, began)
				}
				if ctx.Err() == nil && !noGroup(err) {
					c.outages.note("hold", stream, err)
				}
			})
		}
	})
}

// hold sets the idle time of entries and, unless it is below zero, their delivery count.
func (c *Consumer) hold(ctx context.Context, stream string, es []*entry, idle time.Duration, deliveries int) error {
	for batch := range slices.Chunk(es, holdBatch) {
		args := []any{c.opt.Group, c.opt.Consumer, idle.Milliseconds(), deliveries}
		for _, e := range batch {
			args = append(args, e.id)
		}
		lost, err := holdScript.Run(ctx, c.client, []string{stream}, args...).StringSlice()
		if err != nil {
			return err
		}
		for _, id := range lost {
			c.queues.lose(entryRef{stream, parseEntryID(id)})
		}
		if len(lost) > 0 {
			c.log.Warn("another consumer has taken entries over", "stream", stream, "entries", len(lost))
		}
	}
	return nil
}

// giveBack ends an orderly stop: entries that were not begun become claimable at once, and the consumer's name is
// removed if nothing is pending under it. It only helps the other consumers, so an error just ends it.
func (c *Consumer) giveBack() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	var errs []error
	for stream, es := range c.queues.waiting() {
		byAttempt := map[int][]*entry{}
		for _, e := range es {
			byAttempt[e.attempt] = append(byAttempt[e.attempt], e)
		}
		// A stop is no attempt. The count stays above 0: a crash in a first attempt, which is not noted, must count.
		for attempt, es := range byAttempt {
			errs = append(errs, c.hold(ctx, stream, es, 24*time.Hour, max(1, attempt-1)))
		}
	}
	for _, stream := range c.streams.list() {
		if c.opt.Ordered {
			_, err := c.callLease(ctx, stream, 0)
			errs = append(errs, err)
		}
		if err := leaveScript.Run(ctx, c.client, []string{stream}, c.opt.Group, c.opt.Consumer).Err(); !noGroup(err) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		c.log.Warn("waiting entries not given back; they will be claimed later", "err", err)
	}
}
