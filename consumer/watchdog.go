package consumer

import (
	"context"
	"fmt"
	"sync"
	"time"
)

const (
	// stallAfter is how long nothing may move, while there is something to do and somebody to do it, until that is said.
	stallAfter = time.Minute
	// hangAfter is the same where everything waits for handlers that run: how long those take is not ours to judge.
	hangAfter = 15 * time.Minute
	// watchEvery is how often the watchdog looks.
	watchEvery = 5 * time.Second
)

// watchdog compares what there is to do with whether anything moves. It knows no causes: a consumer that stands still, for
// a reason that nobody has thought of, must not look well.
type watchdog struct {
	// stall and hang are stallAfter and hangAfter but in tests.
	stall, hang time.Duration

	mu sync.Mutex
	// lags are the entries of each stream not delivered to the group, where this process is to read them; deaf is since
	// when Redis has not told, zero if it has.
	lags map[string]int64
	deaf time.Time
	// moves is what the lanes had moved when that last changed, at since.
	moves int64
	since time.Time
	// why is empty while all is well.
	why string
}

// told takes what Redis tells of a stream; mine is false if it is not this process that is to read it.
func (w *watchdog) told(stream string, lag int64, mine bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deaf = time.Time{}
	if w.lags == nil {
		w.lags = map[string]int64{}
	}
	if !mine {
		lag = 0
	}
	w.lags[stream] = lag
}

// untold notes that Redis does not tell.
func (w *watchdog) untold(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.deaf.IsZero() {
		w.deaf = now
	}
}

// check compares, and returns why the consumer stands still, "" if it does not, and whether that is news.
func (w *watchdog) check(n laneCounts, workers int, now time.Time) (why string, news bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if n.moves != w.moves || w.since.IsZero() {
		w.moves, w.since = n.moves, now
	}
	still := now.Sub(w.since)
	unread := int64(0)
	for _, lag := range w.lags {
		unread += max(lag, 0)
	}
	// What waits for a retry, or behind a handler, is not to move.
	free := n.held - n.resting - n.behind
	busy := n.running >= workers
	switch {
	case !w.deaf.IsZero() && now.Sub(w.deaf) > w.stall && still > w.stall:
		why = fmt.Sprintf("Redis has not answered for %s", now.Sub(w.deaf).Round(time.Second))
	case still > w.stall && (free > 0 || unread > 0) && !busy,
		still > w.hang && n.running > 0:
		why = fmt.Sprintf("nothing has moved for %s: %d entries are unread, %d are held, %d not acknowledged, %d handlers run",
			still.Round(time.Second), unread, n.held, n.unacked, n.running)
	}
	news = (why == "") != (w.why == "")
	w.why = why
	return why, news
}

// watch looks until ctx ends.
func (c *Consumer) watch(ctx context.Context) {
	every(ctx, min(watchEvery, c.dog.stall/4), func(context.Context) {
		why, news := c.dog.check(c.lanes.counts(), c.opt.Lanes, time.Now())
		c.metrics.stalled.Set(0)
		if why != "" {
			c.metrics.stalled.Set(1)
		}
		switch {
		case news && why != "":
			c.log.Error("the consumer stands still", "why", why)
		case news:
			c.log.Info("the consumer moves again")
		}
	})
}

// Stalled says why this consumer stands still although there is something to do; "" while it moves or has nothing to do.
// It is what a readiness probe should ask. A wait for a retry is not standing still, nor is a handler that runs, for a
// quarter of an hour.
func (c *Consumer) Stalled() string {
	c.dog.mu.Lock()
	defer c.dog.mu.Unlock()
	return c.dog.why
}
