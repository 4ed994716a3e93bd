package relay

import (
	"context"
	"time"

	"posthaste/internal/pause"
)

const (
	backlogInterval = 2 * time.Second
	trimInterval    = time.Second
	historyInterval = 10 * time.Minute
	// historyRetry is the interval after a failure. Until today's partition is made the default one takes its rows, and
	// then it keeps the whole day.
	historyRetry = 20 * time.Second
)

// keep does the leader's housekeeping until ctx ends: gauges, trimming, dead events, history partitions.
func (l *leadership) keep(ctx context.Context) {
	var history, backlog time.Time // of the next and of the last
	historyFailed := false
	for ctx.Err() == nil {
		if time.Now().After(history) {
			history = time.Now().Add(historyInterval)
			err := l.o.Store.KeepHistory(ctx)
			if err != nil && ctx.Err() == nil {
				history = time.Now().Add(historyRetry)
				if !historyFailed {
					l.log.Warn("keep history", "err", err)
				}
			}
			historyFailed = err != nil
		}
		if time.Since(backlog) > backlogInterval {
			backlog = time.Now()
			l.countBacklog(ctx)
		}
		l.countDead(ctx)
		l.keepStreams(ctx)
		pause.About(ctx, trimInterval)
	}
}

func (l *leadership) countBacklog(ctx context.Context) {
	rows, oldest, err := l.o.Store.Backlog(ctx)
	if err != nil {
		l.metrics.scrapeErrors.WithLabelValues("backlog").Inc()
		return
	}
	l.metrics.backlogRows.Set(float64(rows))
	l.metrics.backlogOldest.Set(oldest.Seconds())
	lost, err := l.o.Store.Lost(ctx)
	if err != nil {
		l.metrics.scrapeErrors.WithLabelValues("losses").Inc()
		return
	}
	l.metrics.lost.Set(float64(lost))
}

// keepLosses counts what adoptions note as perhaps lost, until ctx ends. History may be long: nothing else waits for it.
func (l *leadership) keepLosses(ctx context.Context) {
	for ctx.Err() == nil {
		if l.uncounted.Swap(false) {
			l.countLosses(ctx)
		}
		pause.About(ctx, trimInterval)
	}
}

// countLosses says what is lost.
func (l *leadership) countLosses(ctx context.Context) {
	losses, err := l.o.Store.CountLosses(ctx)
	if err != nil {
		l.uncounted.Store(true)
		l.metrics.scrapeErrors.WithLabelValues("losses").Inc()
		l.log.Debug("count losses", "err", err)
	}
	for _, loss := range losses {
		if loss.Stream == "" {
			l.metrics.failovers.Inc()
			l.log.Error("postgres has gone back in time, by a failover or a restore: it may have forgotten that events were settled, which are published twice then, and commits whose events are in their streams")
			continue
		}
		l.metrics.lostEvents.Add(float64(max(loss.Events, 1)))
		l.log.Error("the sink has lost events that were settled", "stream", loss.Stream, "events", loss.Events, "first", loss.First, "last", loss.Last,
			"remedy", loss.Remedy())
	}
}

func (l *leadership) countDead(ctx context.Context) {
	dead, err := l.o.Store.Housekeep(ctx)
	if err != nil {
		l.metrics.scrapeErrors.WithLabelValues("dead").Inc()
		return
	}
	l.metrics.dead.Set(float64(dead))
	if err := l.refreshBlocks(ctx); err != nil {
		l.metrics.scrapeErrors.WithLabelValues("dead").Inc()
	}
}

// keepStreams trims every known stream and refreshes the sink's gauges.
func (l *leadership) keepStreams(ctx context.Context) {
	streams, err := l.o.Store.Streams(ctx)
	if err == nil {
		for _, s := range streams {
			actx, cancel := context.WithTimeout(ctx, publishTimeout)
			err = l.o.Sink.Trim(actx, s)
			cancel()
			if err != nil {
				break // a Redis that is gone would hold up everything else here, stream by stream
			}
		}
		if err == nil && l.o.Observe != nil {
			actx, cancel := context.WithTimeout(ctx, publishTimeout)
			err = l.o.Observe(actx, streams[:min(len(streams), maxStreamLabels)])
			cancel()
		}
	}
	if err != nil && ctx.Err() == nil {
		l.metrics.scrapeErrors.WithLabelValues("streams").Inc()
	}
}
