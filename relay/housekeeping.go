package relay

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"posthaste/internal/pause"
	"posthaste/outbox"
)

const (
	backlogInterval = 2 * time.Second
	trimInterval    = time.Second
	// historyInterval bounds how much there is to delete at once.
	historyInterval = 10 * time.Second
)

// housekeeper updates gauges, trims streams, removes retried dead events and keeps history. One goroutine owns it.
type housekeeper struct {
	*Relay
	// backlog is when to count the backlog next. A leader that begins with a large one is not slowed down by that.
	backlog time.Time
	// next is the index of the stream to trim first. It follows a stream that could not be trimmed.
	next int
	// whole has the owner under which the repairs are complete, and the streams that its adoption has left out.
	whole atomic.Pointer[gates]
	// noted are the groups of streams that Postgres knows since the owner notedBy.
	noted   map[string][]string
	notedBy outbox.Owner
}

// run does the leader's housekeeping until ctx ends: gauges, trimming, dead events, retention.
func (h *housekeeper) run(ctx context.Context) {
	var history time.Time // of the next
	for ctx.Err() == nil {
		if time.Now().After(history) {
			history = time.Now().Add(historyInterval)
			h.done(ctx, conditionTable, h.o.Store.Sound(ctx))
			h.done(ctx, conditionHistory, h.o.Store.KeepHistory(ctx))
		}
		if began := time.Now(); began.After(h.backlog) {
			h.countBacklog(ctx)
			// Counting reads every unsettled row, which may be millions. The wait keeps it below a tenth of the
			// session's time.
			h.backlog = time.Now().Add(max(backlogInterval-time.Since(began), 9*time.Since(began)))
		}
		h.countDead(ctx)
		h.keepStreams(ctx)
		pause.Tick(ctx, trimInterval)
	}
}

// done records the result of an errand: it counts and reports a failure, and a success ends a run of failures.
func (h *housekeeper) done(ctx context.Context, condition string, err error) {
	if err == nil {
		h.health.recovered(condition)
	} else if ctx.Err() == nil {
		h.metrics.scrapeErrors.WithLabelValues(condition).Inc()
		if h.recurs(condition, err, true) {
			h.log.Warn("housekeeping fails; trying again", "what", condition, "err", err)
		}
	}
}

func (h *housekeeper) countBacklog(ctx context.Context) {
	rows, oldest, err := h.o.Store.Backlog(ctx)
	if err != nil {
		h.metrics.scrapeErrors.WithLabelValues("backlog").Inc()
		return
	}
	if rows = max(rows-int64(h.window.behind()), 0); rows == 0 {
		oldest = 0
	}
	h.metrics.backlogRows.Set(float64(rows))
	h.metrics.backlogOldest.Set(oldest.Seconds())
	lost, phantoms, err := h.o.Store.Missing(ctx)
	if err != nil {
		h.metrics.scrapeErrors.WithLabelValues("losses").Inc()
		return
	}
	h.metrics.lost.Set(float64(lost))
	h.metrics.phantoms.Set(float64(phantoms))
}

func (h *housekeeper) countDead(ctx context.Context) {
	dead, err := h.o.Store.Housekeep(ctx)
	if err != nil {
		h.metrics.scrapeErrors.WithLabelValues("dead").Inc()
		return
	}
	h.metrics.dead.Set(float64(dead))
	if err := h.sweeps.Refresh(ctx); err != nil {
		h.metrics.scrapeErrors.WithLabelValues("dead").Inc()
	}
}

// keepStreams trims every known stream and refreshes the sink's gauges.
func (h *housekeeper) keepStreams(ctx context.Context) {
	list, err := h.o.Store.Streams(ctx)
	if err == nil {
		streams := outbox.StreamNames(list)
		for _, s := range list[:min(len(list), maxStreamLabels)] {
			h.metrics.streamInfo.WithLabelValues(s.Name, s.Base).Set(1)
		}
		first, failed := h.next, error(nil)
		for i := range streams {
			at := (first + i) % len(streams)
			actx, cancel := context.WithTimeout(ctx, publishTimeout)
			failed = h.o.Sink.Trim(actx, streams[at])
			cancel()
			if failed != nil {
				h.next = at + 1
				break // a Redis that is gone would hold up everything else here, stream by stream
			}
			h.next = 0
		}
		h.done(ctx, conditionTrim, failed)
		if h.o.Observe != nil {
			actx, cancel := context.WithTimeout(ctx, publishTimeout)
			err = h.o.Observe(actx, streams[:min(len(streams), maxStreamLabels)])
			cancel()
		}
		err = errors.Join(err, h.noteGroups(ctx, streams))
	}
	if err != nil && ctx.Err() == nil {
		h.metrics.scrapeErrors.WithLabelValues("streams").Inc()
	}
}

// noteGroups records the consumer groups of streams in Postgres, for repairs. It reads them only from streams that
// their owner has repaired, and that have lost nothing since. If a group is missing there, it was destroyed on purpose.
// The streams that the adoption left out are not read: with one that hangs, the others might not answer either.
func (h *housekeeper) noteGroups(ctx context.Context, streams []string) error {
	g := h.whole.Load()
	if g == nil {
		return nil
	}
	streams = slices.DeleteFunc(streams, func(s string) bool { return g.away[s].why != nil })
	if len(streams) == 0 {
		return nil
	}
	o := g.owner
	actx, cancel := context.WithTimeout(ctx, publishTimeout)
	groups, err := h.o.Sink.Groups(actx, o, streams)
	cancel()
	if len(groups) == 0 || h.notedBy == o && maps.EqualFunc(groups, h.noted, slices.Equal) {
		return err
	}
	if nerr := h.o.Store.NoteGroups(ctx, o.Epoch, groups); nerr != nil {
		return nerr
	}
	h.noted, h.notedBy = groups, o
	return err
}
