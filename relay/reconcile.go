package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

// reconciler restores streams before anything newer is published to them, where the sink or Postgres has lost data that
// the other one has. The adoption has written the work down, so that the next adoption continues it. reconciler
// compares the events in a stream with the settled events.
//
//   - An event that is settled but missing in its stream is published again, in the order of the log. Missing consumer
//     groups are recreated first, so that they receive the event and it is not trimmed.
//   - An event that is in the stream but not settled is put in doubt if the gate may not have it. It is not published
//     again.
//   - An event that is in the stream but not in a table that has gone back in time is reported as a phantom.
//   - Events that were settled too long ago to be restored are counted afterwards, because the history may be long.
type reconciler struct {
	*Relay
	// uncounted is set while missing events may not be counted. Any goroutine may set it.
	uncounted atomic.Bool
	// claim counts the attempts of owner. Both are the leadership's.
	owner outbox.Owner
	claim int64
}

// RestoreAll is Options.Restore without a bound.
const RestoreAll = time.Duration(math.MaxInt64)

// run makes all pending repairs, except of the streams that the adoption leaves out. If Postgres has gone back, it
// fails with these: marks that are written until they answer would hide which commits are lost. run calls owned about
// once a second. It returns, with an error, the streams that fail although others may not.
func (r *reconciler) run(ctx context.Context, o outbox.Owner, g *gates, owned func(ctx context.Context) error) (
	away map[string]error, first error,
) {
	list, err := r.o.Store.Repairs(ctx, r.o.Restore)
	if err != nil {
		return nil, err
	}
	var jobs []outbox.Repair
	for _, job := range list {
		switch away := g.away[job.Stream].why; {
		case away == nil:
			jobs = append(jobs, job)
		case job.Back:
			if err := g.back(ctx, job.Stream); finished(err) {
				return nil, err
			}
			return nil, fmt.Errorf("postgres has gone back, and a stream cannot be compared: %s", away.Error())
		}
	}
	if r.owner != o {
		r.owner, r.claim = o, 0
	}
	r.claim++ // what an earlier attempt of this owner has published is in doubt
	away = map[string]error{}
	places, still := make(chan struct{}, comparisons), &ownership{owned: owned, checked: time.Now()}
	group, gctx := errgroup.WithContext(ctx)
	var mu sync.Mutex
	for _, job := range jobs {
		lane := outbox.Lane{Part: outbox.RestoreLane, Claim: r.claim, Nonce: o.Nonce}
		c := &comparison{
			reconciler: r, ownership: still, job: job, lane: lane, publisher: r.o.Sink.Lane(job.Stream, o, lane),
		}
		group.Go(func() error {
			err := c.run(gctx, places)
			if err == nil || job.Back || !outbox.Alone(err) {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			away[job.Stream], first = err, cmp.Or(first, err)
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	return away, first
}

// comparisons is how many streams are compared at once: each comparison has the ids of the entries of its stream.
const comparisons = 4

// ownership checks, about once a second, whether this is the owner. It is safe for concurrent use.
type ownership struct {
	owned   func(ctx context.Context) error
	mu      sync.Mutex
	checked time.Time
}

// still ignores a check that fails for another reason.
func (o *ownership) still(ctx context.Context) error {
	if !o.mu.TryLock() { // another one checks
		return ctx.Err()
	}
	defer o.mu.Unlock()
	if time.Since(o.checked) < time.Second {
		return nil
	}
	o.checked = time.Now()
	if err := o.owned(ctx); superseded(err) {
		return err
	}
	return ctx.Err()
}

// watch counts and reports the events that were not restored, whenever uncounted is set, until ctx ends.
func (r *reconciler) watch(ctx context.Context) {
	for ctx.Err() == nil {
		if r.uncounted.Swap(false) {
			r.count(ctx)
		}
		pause.About(ctx, trimInterval)
	}
}

func (r *reconciler) count(ctx context.Context) {
	reports, err := r.o.Store.CountMissing(ctx, r.o.Sink.Tail)
	if err != nil {
		r.uncounted.Store(true)
		r.metrics.scrapeErrors.WithLabelValues("losses").Inc()
		r.log.Debug("count missing events", "err", err)
	}
	for _, report := range reports {
		if report.Stream == "" {
			r.metrics.failovers.Inc()
			r.log.Error("postgres has gone back in time, by a failover or a restore: what is in the " +
				"streams is not published again, and posthaste phantoms names the events whose commits are missing")
			continue
		}
		r.metrics.lostEvents.Add(float64(max(report.Missing, 1)))
		r.log.Error("the sink has lost events that were settled, and they were not restored", "stream",
			report.Stream, "events", report.Missing, "first", report.First, "last", report.Last, "remedy",
			report.Remedy())
	}
}

// comparison is the repair of one stream.
type comparison struct {
	*reconciler
	*ownership

	job       outbox.Repair
	lane      outbox.Lane
	publisher outbox.LanePublisher

	// tail lists the entries of the stream, ordered by id. isKnown records, for the entries compared so far, which ones
	// Postgres has.
	tail    []outbox.Entry
	isKnown []bool
	last    string // entry of the stream, before anything was published; "" for an empty stream
	done    outbox.Repaired
	// number is that of the last batch.
	number int64
	// row is how many events were refused one after the other.
	row int
	// noted is the time of the last note of the progress in the table, failing that of the first call that failed
	// although others need not wait.
	noted, failing time.Time
}

// run compares when it has one of places. The streams that wait for their durability afterwards do so together.
func (c *comparison) run(ctx context.Context, places chan struct{}) error {
	select {
	case places <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	err := c.restore(ctx)
	c.tail, c.isKnown = nil, nil
	<-places
	if err == nil {
		err = c.finish(ctx)
	}
	if err != nil && !c.noted.IsZero() {
		c.note(context.WithoutCancel(ctx))
	}
	return err
}

// restore publishes what is missing, and finds what is unsettled.
func (c *comparison) restore(ctx context.Context) error {
	job := c.job
	c.done.Restored = job.Restored
	if len(job.Groups) > 0 {
		actx, cancel := context.WithTimeout(ctx, publishTimeout)
		defer cancel()
		if err := c.o.Sink.Regroup(actx, job.Stream, job.Groups); err != nil {
			return err
		}
	}
	if job.To == 0 && !job.Recall && !job.Back {
		return nil
	}
	c.tell(true)
	var err error
	if c.tail, err = c.o.Sink.Tail(ctx, job.Stream, job.After); err != nil {
		return err
	}
	if n := len(c.tail); n > 0 {
		c.last = c.tail[n-1].String()
	}
	c.done.Last = c.last
	outbox.SortEntries(c.tail)
	c.isKnown = make([]bool, len(c.tail))
	if err := c.o.Store.Log(ctx, job, func(page []outbox.Logged) error { return c.compare(ctx, page) }); err != nil {
		return err
	}
	return c.unsettled(ctx)
}

// known notes that Postgres knows an event, and reports whether it is in the stream.
func (c *comparison) known(id uuid.UUID) bool {
	i, there := outbox.FindEntry(c.tail, id)
	for ; there && i < len(c.tail) && c.tail[i].ID == id; i++ {
		c.isKnown[i] = true
	}
	return there
}

// unknown lists the entries whose events Postgres is not known to have.
func (c *comparison) unknown() (list []outbox.Entry) {
	for i, e := range c.tail {
		if !c.isKnown[i] {
			list = append(list, e)
		}
	}
	return list
}

// compare republishes the events of a page of the log that the stream lacks.
func (c *comparison) compare(ctx context.Context, page []outbox.Logged) error {
	var missing []outbox.Logged
	for _, e := range page {
		if !c.known(e.ID) && e.Mark > c.job.Missing {
			missing = append(missing, e)
		}
	}
	if len(missing) > 0 && c.noted.IsZero() { // a relay that is killed from here on may have restored something
		if err := c.o.Store.Restoring(ctx, c.job, c.done.Restored); err != nil {
			return err
		}
		c.noted = time.Now()
	}
	for len(missing) > 0 && c.row < refusals {
		events, used, err := c.o.Store.Events(ctx, missing)
		if err != nil {
			return err
		}
		missing = missing[used:]
		if err := c.publish(ctx, events); err != nil {
			return err
		}
	}
	return c.still(ctx)
}

// refusals is the number of consecutive refused events after which the rest of the stream is skipped: its key probably
// holds another type.
const refusals = 100

// publish retries until the events are in the stream. An event that the sink accepted the first time and refuses now is
// left out and stays counted as missing.
func (c *comparison) publish(ctx context.Context, events []*outbox.Record) error {
	if len(events) == 0 {
		return nil
	}
	d := c.publisher.Deliver(events)
	refused := 0
	var receipt outbox.Receipt
	err := c.retry(ctx, publishTimeout, func(ctx context.Context) (err error) {
		for {
			var poison *outbox.PoisonError
			if receipt, err = d.Publish(ctx); !errors.As(err, &poison) {
				return err
			}
			refused++
			c.row++
			c.log.Error("an event that the sink has lost is refused now", "stream", c.job.Stream, "id", poison.ID,
				"class", poison.Class)
			refused += len(d.Skip(func(*outbox.Record) bool { return c.row >= refusals }))
		}
	})
	if err != nil {
		return err
	}
	restored := len(events) - refused - receipt.Suppressed
	if restored > 0 {
		c.row = 0
	}
	// The gate keeps them until the stream is recorded as whole, so that events which a consumer deletes or a trim
	// removes until then do not count as missing.
	c.number, c.done.Last = receipt.Number, receipt.Last
	c.done.Refused += int64(refused)
	c.done.Restored += int64(restored)
	c.metrics.restored.Add(float64(restored))
	c.progress(ctx)
	return c.still(ctx)
}

// retry repeats a call of the sink for as long as this is the owner. Where others need not wait, all calls of the
// comparison together have a while for that.
func (c *comparison) retry(ctx context.Context, timeout time.Duration, call func(ctx context.Context) error) error {
	bo := pause.Backoff{First: 50 * time.Millisecond, Most: 2 * time.Second}
	for began := time.Now(); ; {
		actx, cancel := context.WithTimeout(ctx, timeout)
		err := call(actx)
		cancel()
		if err == nil || finished(err) || ctx.Err() != nil {
			return err
		}
		if outbox.Alone(err) {
			if c.failing.IsZero() {
				c.failing = began
			}
			if time.Since(c.failing) >= blockedWait {
				return err
			}
		}
		c.health.fail(conditionRestore, fmt.Sprintf("%s: %v", c.job.Stream, err))
		bo.Wait(ctx)
		if err := c.still(ctx); err != nil {
			return err
		}
	}
}

// tell reports the progress in readiness, and in the log if it is due.
func (c *comparison) tell(due bool) {
	c.health.fail(conditionRestore, fmt.Sprintf("%s is compared with what is settled: of about %d events %d were "+
		"missing so far, and are published again", c.job.Stream, c.job.Expected, c.done.Restored))
	if due {
		c.log.Warn("comparing a stream with what is settled", "stream", c.job.Stream, "expected", c.job.Expected,
			"restored", c.done.Restored)
	}
}

// progress reports the progress after each publish: in readiness at once, in the log and the table from time to time.
func (c *comparison) progress(ctx context.Context) {
	due := time.Since(c.noted) > 5*time.Second
	c.tell(due)
	if !due {
		return
	}
	c.note(ctx)
}

func (c *comparison) note(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	c.noted = time.Now()
	if err := c.o.Store.Restoring(ctx, c.job, c.done.Restored); err != nil {
		c.log.Debug("note what is restored", "err", err)
	}
}

// unsettled handles the entries of the stream that are not settled.
func (c *comparison) unsettled(ctx context.Context) error {
	if !c.job.Recall && !c.job.Back {
		return nil
	}
	var ids []uuid.UUID
	for _, e := range c.unknown() {
		ids = append(ids, e.ID)
	}
	if err := c.o.Sink.Recall(ctx, c.owner, c.job.Stream, ids, c.last); err != nil {
		return err
	}
	c.done.Recalled = int64(len(ids))
	if !c.job.Back {
		return nil
	}
	if err := c.o.Store.Owed(ctx, c.job.Stream, func(id uuid.UUID) { c.known(id) }); err != nil {
		return err
	}
	c.done.Phantoms = c.unknown()
	slices.SortFunc(c.done.Phantoms, func(a, b outbox.Entry) int {
		return cmp.Or(cmp.Compare(a.Millis, b.Millis), cmp.Compare(a.Number, b.Number))
	})
	return nil
}

// finish waits until the published events have the configured durability, also those of an attempt that was ended, and
// records that the stream is whole.
func (c *comparison) finish(ctx context.Context) error {
	published := c.number > 0 || c.job.Begun
	if published {
		mark := outbox.Mark{Stream: c.job.Stream, Lane: c.lane, Number: c.number}
		err := c.retry(ctx, 2*publishTimeout, func(ctx context.Context) error {
			return c.o.Sink.Confirm(ctx, c.owner, []outbox.Mark{mark})
		})
		if err != nil {
			return err
		}
	}
	c.done.Whole = c.row < refusals
	if err := c.o.Store.Repaired(ctx, c.owner, c.job, c.done); err != nil {
		return err
	}
	if published {
		c.settled(ctx)
	}
	if c.job.To == 0 && !c.job.Recall {
		return nil
	}
	c.log.Warn("the stream is whole again", "stream", c.job.Stream, "restored", c.done.Restored, "refused",
		c.done.Refused, "in_doubt", c.done.Recalled)
	if n := len(c.done.Phantoms); n > 0 {
		c.log.Error("postgres has lost commits whose events are in the stream", "stream", c.job.Stream,
			"events", n, "remedy", "posthaste phantoms")
	}
	return nil
}

// settled reports to the gate what all attempts have published. If it fails, that stays in doubt until the next
// adoption.
func (c *comparison) settled(ctx context.Context) {
	var marks []outbox.Mark
	for claim := c.lane.Claim; claim > 0; claim-- {
		lane := outbox.Lane{Part: c.lane.Part, Claim: claim, Nonce: c.lane.Nonce}
		marks = append(marks, outbox.Mark{Stream: c.job.Stream, Lane: lane, Number: math.MaxInt32})
	}
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	if err := c.o.Sink.Settled(ctx, c.owner, marks); err != nil {
		c.log.Debug("report to the gate what is settled", "err", err)
	}
}
