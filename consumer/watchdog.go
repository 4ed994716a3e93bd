package consumer

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"posthaste/internal/redisurl"
)

const (
	// stallAfter is how long nothing may progress, with work to do and idle workers, before the consumer counts as
	// stalled.
	stallAfter = time.Minute
	// hangAfter is the same if everything waits for running handlers, which may legitimately take long.
	hangAfter = 15 * time.Minute
	// watchEvery is how often the watchdog looks.
	watchEvery = 5 * time.Second
)

// watchdog compares the work to do with the progress. A stalled consumer must be reported as unhealthy even if the
// cause is unknown.
type watchdog struct {
	// stall and hang are stallAfter and hangAfter but in tests.
	stall, hang time.Duration

	mu sync.Mutex
	// deaf has the streams for which Redis does not answer; "" is the list of streams.
	deaf map[string]trouble
	// unread has the streams with entries that are not delivered to the group, where this process is to read them, from
	// when they are not read.
	unread map[string]trouble
	// cuts has, by the stream of a reader, why answers with entries do not arrive.
	cuts map[string]trouble
	// failing has the calls that Redis refuses, or that do not reach it, by operation and stream.
	failing map[string]trouble
	// moves is what the queues had moved when that last changed, or when there was last nothing to move, at since.
	moves int64
	since time.Time
	// why is empty while all is well.
	why string
}

// trouble is since when something is wrong, when that was last seen, and what it is.
type trouble struct {
	since, last time.Time
	what        string
}

func newWatchdog() *watchdog {
	return &watchdog{
		stall: stallAfter, hang: hangAfter,
		deaf: map[string]trouble{}, unread: map[string]trouble{}, cuts: map[string]trouble{},
		failing: map[string]trouble{},
	}
}

// note records what is wrong with a stream, in one of the maps; "" if it is well. It keeps since when.
func (w *watchdog) note(of map[string]trouble, stream, what string, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if what == "" {
		delete(of, stream)
		return
	}
	since := now
	if old, ok := of[stream]; ok {
		since = old.since
	}
	of[stream] = trouble{since, now, what}
}

// answered records whether Redis has answered for a stream, or for the list of streams with "".
func (w *watchdog) answered(stream string, err error, now time.Time) {
	what := "Redis has not answered"
	if err == nil || redisurl.IsReply(err) {
		what = ""
	}
	w.note(w.deaf, stream, what, now)
}

// told records how many entries of a stream this process has yet to read; below zero: unknown.
func (w *watchdog) told(stream string, lag int64, now time.Time) {
	what := ""
	if lag > 0 {
		what = fmt.Sprintf("%d entries of stream %s wait, and none was read", lag, stream)
	}
	w.note(w.unread, stream, what, now)
}

// read notes that entries of a stream were read.
func (w *watchdog) read(stream string, now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if u, ok := w.unread[stream]; ok {
		w.unread[stream] = trouble{now, now, u.what}
	}
}

// called notes the result of a call. Events are processed also while inspect and remove fail.
func (w *watchdog) called(op, stream string, err error, now time.Time) {
	what := ""
	if err != nil && op != "inspect" && op != "remove" {
		what = strings.TrimSuffix(op+" "+stream, " ") + " has failed (" + redisurl.WithAuthRemedy(err).Error() + ")"
	}
	w.note(w.failing, op+" "+stream, what, now)
}

// cut notes why answers with entries do not arrive; "" if they do.
func (w *watchdog) cut(stream, why string, now time.Time) { w.note(w.cuts, stream, why, now) }

// check compares, and returns why the consumer makes no progress, "" if it does not, and whether that is news.
func (w *watchdog) check(n queueCounts, workers int, now time.Time) (why string, news bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	// Entries that wait for a retry or for a running handler are not expected to progress.
	free := n.held - n.resting - n.behind
	if n.moves != w.moves || w.since.IsZero() || (free == 0 && n.running == 0) {
		w.moves, w.since = n.moves, now
	}
	busy := n.running >= workers
	still := now.Sub(w.since)
	switch {
	case still > w.stall && free > 0 && !busy, still > w.hang && n.running > 0:
		why = fmt.Sprintf("nothing has moved for %s: %d entries are held, %d not acknowledged, %d handlers run",
			still.Round(time.Second), n.held, n.unacked, n.running)
	default:
		why = w.waiting(busy, now)
	}
	for _, stream := range slices.Sorted(maps.Keys(w.cuts)) {
		c := w.cuts[stream]
		if why != "" {
			why += "; " + c.what
			break
		}
		if now.Sub(c.since) > w.stall { // these entries are pending, and no longer unread
			why = c.what
			break
		}
	}
	news = (why == "") != (w.why == "")
	w.why = why
	return why, news
}

// waiting returns which stream Redis does not answer for, or no reader reads, or which call fails; while every handler
// runs, reading is not expected.
func (w *watchdog) waiting(busy bool, now time.Time) (why string) {
	if busy {
		for stream, u := range w.unread {
			w.unread[stream] = trouble{now, now, u.what}
		}
	}
	// A call that was not repeated has become needless.
	maps.DeleteFunc(w.failing, func(_ string, t trouble) bool { return now.Sub(t.last) > w.stall })
	for _, of := range []map[string]trouble{w.failing, w.deaf, w.unread} {
		for _, stream := range slices.Sorted(maps.Keys(of)) {
			if still := now.Sub(of[stream].since); still > w.stall {
				why = fmt.Sprintf("%s for %s", of[stream].what, still.Round(time.Second))
			}
		}
	}
	return why
}

// watch looks until ctx ends.
func (c *Consumer) watch(ctx context.Context) {
	every(ctx, min(watchEvery, c.dog.stall/4), func(context.Context) {
		why, news := c.dog.check(c.queues.counts(), c.opt.Workers, time.Now())
		c.metrics.stalled.Set(0)
		if why != "" {
			c.metrics.stalled.Set(1)
		}
		switch {
		case news && why != "":
			c.log.Error("the consumer makes no progress", "why", why)
		case news:
			c.log.Info("the consumer makes progress again")
		}
	})
}

// Stalled returns why this consumer makes no progress although it has work to do, otherwise "". A readiness probe
// should use it. A wait for a retry does not count as a stall, nor does a running handler for a quarter of an hour.
func (c *Consumer) Stalled() string {
	c.dog.mu.Lock()
	defer c.dog.mu.Unlock()
	return c.dog.why
}
