package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/pause"
	"posthaste/internal/redisurl"
)

const (
	// block is how long a read waits for entries. An orderly stop waits for it, so it is short; it must also stay below
	// any sensible read timeout of the client.
	block = 500 * time.Millisecond
	// holdFor is how long a reader keeps a connection of the pool to itself.
	holdFor = time.Second
	// claimFor is how long a reader looks for idle entries before it reads again.
	claimFor = 20 * time.Millisecond
	// roomFor is how long a read waits for room for as many entries as it may have.
	roomFor = 100 * time.Millisecond
	// badStreamRetry is the wait before a stream that cannot be prepared (another type of key, no right) is tried
	// again.
	badStreamRetry = 5 * time.Second
)

// readers reads all streams until ctx ends: with one call for all of them; or with one reader each in a cluster, where
// streams live on different servers, and in ordered mode, where streams are leased one by one.
func (c *Consumer) readers(ctx context.Context) {
	if !c.cluster && !c.opt.Ordered {
		newReader(c, "").run(ctx)
		return
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	started := map[string]bool{}
	for ctx.Err() == nil {
		names, changed := c.streams.watch()
		for _, name := range names {
			if !started[name] {
				started[name] = true
				read := newReader(c, name).run
				if c.opt.Ordered {
					read = func(ctx context.Context) { c.readOrdered(ctx, name) }
				}
				wg.Go(func() { read(ctx) })
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// reader is one goroutine that reads some streams.
type reader struct {
	c *Consumer
	// stream is the only one to read; "" for all of them.
	stream string
	// prepared are the streams whose group exists and whose entries already delivered to this consumer are in the
	// queues.
	prepared map[string]bool
	// later are the streams that could not be prepared, and when to try again.
	later map[string]time.Time
	// claimed is when it last began to look for idle entries; unclaimed are the streams that it has still to look at.
	claimed   time.Time
	unclaimed []string
	// over is called when the lease turns out to be over, in ordered mode.
	over func()
	size readSize
	conn readConn
	// more is set while there may be more entries than a read that waits should return; turn counts the reads then.
	more bool
	turn int
	// part counts the turns of streams that do not fit into one call.
	part int
}

func newReader(c *Consumer, stream string) *reader {
	r := &reader{
		c: c, stream: stream, prepared: map[string]bool{}, later: map[string]time.Time{},
		size: newReadSize(c.opt.Window, c.client), claimed: time.Now(), over: func() {}, more: true,
	}
	r.conn = readConn{c: c, size: &r.size}
	return r
}

func (r *reader) list() []string {
	if r.stream != "" {
		return []string{r.stream}
	}
	return r.c.streams.list()
}

// run reads until ctx ends.
func (r *reader) run(ctx context.Context) {
	for ctx.Err() == nil {
		err := r.loop(ctx)
		if ctx.Err() != nil {
			return
		}
		if n := r.c.outages.note("read", r.stream, err); n > 0 {
			pause.For(ctx, reconnect(n))
		}
		// A reply may be lost with entries in it; they are ours then, and come before anything newer.
		clear(r.prepared)
		r.more = true
	}
}

// loop reads until an error or the end of ctx.
func (r *reader) loop(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := r.conn.settled(ctx); err != nil {
			return err
		}
		names, err := r.ready(ctx)
		if err != nil {
			return err
		}
		if len(names) == 0 {
			r.c.outages.note("read", r.stream, nil)
			r.idle(ctx)
			continue
		}
		if err := r.claimIdle(ctx, names); err != nil {
			return err
		}
		if n := r.room(ctx); n > 0 {
			if err := r.read(ctx, r.some(names), n); err != nil {
				return err
			}
		}
		r.c.outages.note("read", r.stream, nil)
	}
	return nil
}

// some returns as many streams as one call may have, in turns. A reader has more of them hardly ever.
func (r *reader) some(names []string) []string {
	most := redisurl.Fit(9, 2)
	if len(names) <= most {
		return names
	}
	r.more = true // each turn begins with a read that does not wait
	r.part++
	parts := slices.Collect(slices.Chunk(names, most))
	return parts[r.part%len(parts)]
}

// room waits until there is room for the next read and returns how many entries it may request; 0 if it is time to
// check for idle entries first. Large reads are cheaper, so room waits a while for more, but not longer, because the
// rest of the window may stay in use for long.
func (r *reader) room(ctx context.Context) int {
	want := r.size.entries
	if n, _ := r.c.queues.tryCapacity(want); n >= want || len(r.unclaimed) > 0 {
		return max(0, min(n, want))
	}
	if r.wait(ctx, time.Now().Add(roomFor), want) > 0 {
		return want
	}
	return min(want, r.wait(ctx, r.claimed.Add(r.c.opt.ClaimIdle/3), r.size.least()))
}

// wait waits for room for n entries until then, and returns how much there is; 0 if there is less.
func (r *reader) wait(ctx context.Context, until time.Time, n int) int {
	ctx, cancel := context.WithDeadline(ctx, until)
	defer cancel()
	return r.c.queues.capacity(ctx, n)
}

// claimIdle periodically takes over entries that have been idle for too long; with many streams, some before each read.
// The reader does this itself because its streams are prepared: during a preparation, newer idle entries could overtake
// older ones that are not idle.
func (r *reader) claimIdle(ctx context.Context, names []string) error {
	began := time.Now()
	if began.Sub(r.claimed) >= r.c.opt.ClaimIdle/3 {
		r.claimed = began
		if len(r.unclaimed) == 0 {
			r.unclaimed = slices.Clone(names)
		}
	}
	for len(r.unclaimed) > 0 && time.Since(began) < claimFor {
		name := r.unclaimed[0]
		r.unclaimed = r.unclaimed[1:]
		if !r.prepared[name] {
			continue
		}
		switch err := r.claim(ctx, name, r.c.opt.ClaimIdle); {
		case ctx.Err() != nil:
			return ctx.Err()
		case noGroup(err), errors.Is(err, errNoLease):
		case err != nil && !isServerError(err):
			return err // what it has taken over without an answer is ours, and comes before anything newer
		default:
			r.c.outages.note("claim", name, err)
		}
	}
	return nil
}

// idle waits until there may be something to read.
func (r *reader) idle(ctx context.Context) {
	t := time.NewTimer(block)
	defer t.Stop()
	_, changed := r.c.streams.watch()
	select {
	case <-changed:
	case <-t.C:
	case <-ctx.Done():
	}
}

// ready returns the streams that can be read, preparing those that are not yet. One that cannot be prepared is left out
// and does not stop the others.
func (r *reader) ready(ctx context.Context) ([]string, error) {
	var names []string
	for _, name := range r.list() {
		if !r.prepared[name] && time.Now().After(r.later[name]) {
			switch err := r.prepare(ctx, name); {
			case errors.Is(err, errNoLease):
				r.over()
			case err != nil && !isServerError(err):
				return nil, err
			case r.c.outages.note("prepare", name, err) > 0:
				r.later[name] = time.Now().Add(badStreamRetry)
			default:
				r.prepared[name] = true
			}
		}
		if r.prepared[name] {
			names = append(names, name)
		}
	}
	return names, nil
}

// prepare makes sure the group exists, and reads the entries that were delivered to this consumer's name before; in
// ordered mode those that were delivered to any consumer, because it may not read the stream any more.
func (r *reader) prepare(ctx context.Context, stream string) error {
	created, err := groupScript.Run(ctx, r.c.client, []string{stream}, r.c.opt.Group).Int()
	if err != nil && !strings.HasPrefix(err.Error(), "BUSYGROUP") {
		return err
	}
	if created == 1 {
		r.c.log.Info("group created", "stream", stream)
	}
	r.c.metrics.stream(stream)
	if r.c.opt.Ordered {
		if err = r.c.takeTurn(ctx, stream); err == nil {
			err = r.claim(ctx, stream, 0)
		}
	} else if err = r.takeAll(ctx, stream, modeOwn, "-"); err == nil {
		// Idle entries are older than new ones and must run before them.
		err = r.claim(ctx, stream, r.c.opt.ClaimIdle)
	}
	return errors.Join(err, ctx.Err())
}

// read waits for new entries of the streams and puts them into the queues, once or a few times.
func (r *reader) read(ctx context.Context, names []string, n int) error {
	var err error
	if r.c.opt.Ordered { // the lease says which of its holder's reads count
		err = r.readLeased(ctx, names[0], n)
	} else {
		err = r.conn.with(ctx, names[0], func() error { return r.readOn(ctx, names, n) })
	}
	if noGroup(err) {
		r.c.log.Warn("group lost: a flush, or it was dropped; creating it again")
		clear(r.prepared)
		return nil
	}
	return err
}

// readOn reads on the connection that this reader holds, and releases it after a while or when other work comes first:
// the pool may have no other connection for acknowledgements.
func (r *reader) readOn(ctx context.Context, names []string, n int) error {
	began, known := time.Now(), len(r.list())
	for ctx.Err() == nil && time.Since(began) < holdFor && len(r.list()) == known {
		read := r.readGroup
		if r.more {
			read = r.readMore
		}
		if err := read(ctx, names, n); err != nil {
			return err
		}
		n = r.size.entries
		if free, _ := r.c.queues.tryCapacity(n); free < n {
			return nil
		}
	}
	return nil
}

// readMore reads up to n new entries, in all, that are there already.
func (r *reader) readMore(ctx context.Context, names []string, n int) error {
	// The streams at the end are the first to get nothing when a bound is reached.
	first := r.turn % len(names)
	r.turn++
	keys := slices.Concat(names[first:], names[:first])
	_, err := r.readBytes(ctx, onceScripter{r.conn.tx, r.conn.read}, keys, "", n)
	return err
}

// readBytes runs the script that bounds its answer by bytes. It returns the id of the last entry that the group has
// read, if lease is set and there is no entry after it.
func (r *reader) readBytes(ctx context.Context, once onceScripter, keys []string, lease string, n int) (
	last string, err error,
) {
	began := time.Now()
	reply, err := fenced(readScript.Run(ctx, once, keys, r.c.opt.Group, r.c.opt.Consumer, lease, n, r.size.bytes))
	if err != nil {
		return "", r.failed(ctx, err)
	}
	took := time.Since(began)
	var all []*entry
	list, _ := reply[0].([]any)
	for _, item := range list {
		if it, _ := item.([]any); len(it) == 2 {
			es := entriesOf(text(it[0]), it[1])
			r.took(text(it[0]), es)
			all = append(all, es...)
		}
	}
	r.received(all, took)
	full, _ := reply[1].(int64)
	r.more = full == 1 || len(all) >= fewEntries
	if len(reply) == 3 {
		last = text(reply[2])
	}
	return last, nil
}

// readGroup waits for a few new entries of each stream. It is for when there is no backlog: Redis bounds the answer by
// entries only.
func (r *reader) readGroup(ctx context.Context, names []string, n int) error {
	few := min(n, r.size.few(len(names)))
	args := []any{
		"xreadgroup", "group", r.c.opt.Group, r.c.opt.Consumer, "count", few, "block", block.Milliseconds(), "streams",
	}
	for _, name := range names {
		args = append(args, name)
	}
	for range names {
		args = append(args, ">")
	}
	cmd := redis.NewXStreamSliceCmd(ctx, args...)
	cmd.SetFirstKeyPos(9)
	err := r.conn.read(ctx, once{cmd})
	if err != nil && !errors.Is(err, redis.Nil) {
		return r.failed(ctx, err)
	}
	now := time.Now()
	r.received(nil, 0)
	for _, s := range cmd.Val() {
		es := make([]*entry, 0, len(s.Messages))
		for _, m := range s.Messages {
			es = append(es, newEntry(s.Stream, m, 1, now))
		}
		r.took(s.Stream, es)
		r.received(es, 0)
		r.more = r.more || len(es) == few
	}
	return nil
}

// took puts the new entries of stream into the queues.
func (r *reader) took(stream string, es []*entry) {
	if len(es) > 0 {
		r.c.dog.read(stream, time.Now())
	}
	r.c.queues.add(es)
}

// received learns from an answer. One without entries says as well that none is cut off: those that were would come
// first.
func (r *reader) received(es []*entry, took time.Duration) {
	if r.size.failures >= cutAfter {
		r.c.log.Info("answers with entries arrive again", "stream", r.stream)
		r.c.dog.cut(r.stream, "", time.Now())
	}
	r.size.received(es, took)
}

// failed learns from the error of a request for entries, and returns it.
func (r *reader) failed(ctx context.Context, err error) error {
	if redisurl.IsReply(err) || ctx.Err() != nil || errors.Is(err, errNoLease) {
		return err
	}
	r.size.failed(err)
	if r.size.failures == cutAfter {
		r.c.log.Warn("answers with entries do not arrive; requesting less at once", "stream", r.stream, "remedy",
			cutRemedy, "err", err)
	}
	if r.size.failures >= cutAfter {
		why := fmt.Sprintf("answers with entries do not arrive: %s: %s", err, cutRemedy)
		r.c.dog.cut(r.stream, why, time.Now())
	}
	return err
}

// cutRemedy names why answers do not arrive although Redis can be reached.
const cutRemedy = "if Redis can be reached, its client-output-buffer-limit is too small for an event, " +
	"or the network is too slow"

// scripter returns a client for a script that hands out entries of stream.
func (r *reader) scripter(ctx context.Context, stream string) (onceScripter, error) {
	if r.size.patience == 0 {
		return onceScripter{r.c.client, r.c.client.Process}, nil
	}
	node, err := redisurl.Holder(ctx, r.c.client, stream)
	if err != nil {
		return onceScripter{}, err
	}
	node = waits(node, r.size.patience)
	return onceScripter{node, node.Process}, nil
}

func newEntry(stream string, m redis.XMessage, attempt int, now time.Time) *entry {
	e := &entry{
		stream: stream, id: m.ID, at: parseEntryID(m.ID), values: m.Values, attempt: attempt, seen: now, size: 256,
	}
	for k, v := range m.Values {
		s, _ := v.(string)
		e.size += len(k) + len(s)
	}
	return e
}

// isServerError reports whether Redis answered, with an error that waiting for a connection does not fix.
func isServerError(err error) bool {
	if !redisurl.IsReply(err) || errors.Is(err, redis.Nil) {
		return false
	}
	temporary := []string{
		"LOADING", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "READONLY", "BUSY ", "ERR max number of clients",
	}
	return !slices.ContainsFunc(temporary, func(p string) bool { return strings.HasPrefix(err.Error(), p) })
}
