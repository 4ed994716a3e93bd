package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"posthaste/internal/outage"
	"posthaste/outbox"
)

// streamStands is how long a stream counts as blocked after a sweep has reported it. The sweep retries sooner.
const streamStands = 10 * time.Second

// reporter reports events in the log, in metrics and in health. All parts share it; it is safe for concurrent use.
type reporter struct {
	log     *slog.Logger
	metrics *metrics
	health  *health
	// onPublished is Options.OnPublished.
	onPublished func(mode outbox.Mode, stream string, events []*outbox.Record)
	// moved counts what was published, settled or parked, for the watchdog.
	moved  atomic.Int64
	labels sync.Mutex // of streams
	blocks *blocks    // nil unless block-key
	// sessions and phases are the runs of those that have ended with an error.
	sessions, phases outage.Run
}

// sessionEnded reports that there is no session with Postgres, and repeats that while it lasts.
func (r *reporter) sessionEnded(err error) {
	if attrs, say := r.sessions.Failed(err); say {
		r.log.Warn("relay session ended", attrs...)
	}
}

// sessionWorks reports that a session has read the relay's state. A connection alone does not prove that it works.
func (r *reporter) sessionWorks() {
	if attrs, say := r.sessions.Over(); say {
		r.log.Info("relay session works again", attrs...)
	}
}

// phaseEnded reports that a leader's phase has failed.
func (r *reporter) phaseEnded(p phase, err error) {
	if attrs, say := r.phases.Failed(err); say {
		r.log.Warn("phase ended", append(attrs, "phase", p)...)
	}
}

// phaseWorks reports that a phase of a leader has begun to work.
func (r *reporter) phaseWorks() {
	if attrs, say := r.phases.Over(); say {
		r.log.Info("phases work again", attrs...)
	}
}

// published reports events that a publish brought into a stream, of a type with so many streams. They are counted as
// those of the type.
func (r *reporter) published(mode outbox.Mode, stream string, shards int, events []*outbox.Record) {
	r.moved.Add(int64(len(events)))
	r.labels.Lock()
	label := r.metrics.streamLabel(outbox.BaseName(stream, shards))
	r.labels.Unlock()
	r.metrics.published.WithLabelValues(string(mode), label).Add(float64(len(events)))
	r.metrics.observe(mode, events, time.Now())
	if r.onPublished != nil {
		r.onPublished(mode, stream, events)
	}
}

// parked reports an event that is dead now.
func (r *reporter) parked(e *outbox.Record, err error) {
	r.blocks.add(e)
	r.moved.Add(1)
	r.metrics.parked.Inc()
	r.log.Error("event is dead", "event_id", e.ID, "aggregate_type", e.AggregateType, "seq", e.Seq, "err", err)
}

// settled reports rows that the mark now covers.
func (r *reporter) settled(rows int) {
	r.metrics.settled.Add(float64(rows))
	r.moved.Add(int64(rows))
}

// outcome turns the run of failed publishes into a readiness reason, and a success into its end.
func (r *reporter) outcome(err error) {
	var stream *outbox.StreamError
	switch {
	case err == nil || errors.As(err, new(*outbox.PoisonError)):
		if r.health.clear(conditionPublish) {
			r.log.Info("publishing again")
		}
		r.health.clear(conditionForeign)
	case errors.Is(err, context.Canceled):
	case errors.As(err, new(*outbox.ForeignError)):
		r.health.fail(conditionForeign, err.Error())
	case finished(err): // adopting anew fixes it
	default:
		if bad, _ := r.health.lists(); len(bad) == 0 {
			r.log.Warn("publishing fails; retrying", "err", err)
		}
		if !errors.As(err, &stream) {
			r.health.fail(conditionPublish, err.Error())
			return
		}
		r.health.clear(conditionPublish) // the sink answers
		// Followers may publish the remaining rows, and their failures do not appear here.
		r.health.lasts(conditionStreams, fmt.Sprintf("publishing to %s is blocked, other streams continue until "+
			"20,000 rows of a part of the table wait: %v", stream.Stream, err), false, time.Now().Add(streamStands))
	}
}

// switched logs and counts a change of the mode that events travel in.
func (r *reporter) switched(from, to outbox.Mode, reason string) {
	if from == to {
		return
	}
	r.metrics.switches.WithLabelValues(string(from), string(to), knownReason(reason)).Inc()
	r.log.Info("mode", "from", from, "to", to, "reason", reason)
}
