package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/redis/go-redis/v9"

	"posthaste/internal/cli"
	"posthaste/internal/lab/local/natslog"
	"posthaste/internal/pause"
	"posthaste/sink/jetstream"
)

// bare is the name of the limit of the sink in measurements of latency, bareBatches that in measurements of a rate.
func (s Sink) bare() string {
	if s.nats() {
		return "publish"
	}
	return "xadd"
}

func (s Sink) bareBatches() string {
	if s.nats() {
		return "batches"
	}
	return s.bare()
}

// openNats connects to NATS. The settings of the session are without it: its client of Redis is for streams.
func (b *session) openNats() (err error) {
	b.sinkURL, b.config.SinkURL = b.config.SinkURL, ""
	if b.servers != nil {
		b.sinkURL = b.servers.Nats.URL()
	}
	if b.sinkURL == "" {
		return cli.Usage("--external --sink=nats needs --sink-url")
	}
	b.nats, err = natslog.Open(b.sinkURL)
	return err
}

// removeNats deletes a stream of NATS, if there is one.
func (b *session) removeNats(ctx context.Context, stream string) error {
	if b.nats == nil {
		return nil
	}
	err := b.nats.JS.DeleteStream(jetstream.StreamName(stream), nats.Context(ctx))
	if errors.Is(err, nats.ErrStreamNotFound) {
		return nil
	}
	return err
}

// length returns how many events a stream has.
func (s *scene) length(ctx context.Context, stream string) (int64, error) {
	if s.nats != nil {
		return s.nats.Len(ctx, stream)
	}
	return s.redis.XLen(ctx, stream).Result()
}

func (s *scene) page(ctx context.Context, stream, from string) ([]redis.XMessage, error) {
	if s.nats != nil {
		return s.nats.Range(ctx, stream, from, 1000)
	}
	return s.redis.XRangeN(ctx, stream, from, "+", 1000).Result()
}

// size returns the bytes of a stream: in Redis that of its memory, in NATS those in files, with its gate.
func (s *scene) size(ctx context.Context, stream string) (int64, error) {
	if s.nats == nil {
		return s.redis.MemoryUsage(ctx, stream, 0).Result()
	}
	info, err := s.nats.JS.StreamInfo(jetstream.StreamName(stream), nats.Context(ctx))
	if err != nil {
		return 0, err
	}
	return int64(info.State.Bytes), nil //nolint:gosec // of a benchmark
}

// bareMessage is a message as the relay publishes it.
func bareMessage(stream string, n int, payload string) *nats.Msg {
	subject := fmt.Sprint(n)
	return &nats.Msg{
		Subject: jetstream.EventSubject(stream, subject), Data: []byte(payload), Header: nats.Header{
			"ce-id": {eventID(n).String()}, "ce-type": {eventType}, "ce-source": {"/posthaste/bench"},
			"ce-subject": {subject}, "ce-time": {"2006-01-02T15:04:05.000000Z"}, "ce-specversion": {"1.0"},
			"content-type": {"application/json"},
		},
	}
}

// bareStream makes a stream without a gate. The caller removes it.
func (b *session) bareStream(ctx context.Context) (stream string, remove func(), err error) {
	stream = fmt.Sprintf("posthaste-bench-%s-bare", b.name)
	return stream, func() { _ = b.removeNats(context.WithoutCancel(ctx), stream) }, b.nats.Make(ctx, stream)
}

// natsLimit measures the same events without a gate, in batches of the size of a relay's.
func (d *drain) natsLimit(ctx context.Context) error {
	stream, remove, err := d.bareStream(ctx)
	defer remove()
	if err != nil {
		return err
	}
	payload := payloadOf(d.c.Size)
	const chunk = 999 // a relay sweeps so many at once
	what := fmt.Sprintf("the same events in atomic batches of %d without a gate, over 2 connections", chunk)
	return d.limit(ctx, d.sink.bareBatches(), what, func() error {
		logs := make([]*natslog.Log, 2)
		for i := range logs {
			var err error
			if logs[i], err = natslog.Open(d.sinkURL); err != nil {
				return err
			}
			defer logs[i].Close()
		}
		return inChunks(ctx, len(logs), d.c.Events, chunk, func(ctx context.Context, w, from, to int) error {
			var list []*nats.Msg
			for n := from; n < to; n++ {
				list = append(list, bareMessage(stream, n, payload))
			}
			if err := logs[w].Batch(ctx, list); err != nil {
				return fmt.Errorf("publish a batch: %w", err)
			}
			d.progress.add(len(list))
			return nil
		})
	})
}

// publish measures NATS alone: an acknowledged message per event, and a consumer.
func (l *latency) publish(ctx context.Context) error {
	stream, remove, err := l.bareStream(ctx)
	defer remove()
	if err != nil {
		return err
	}
	payload := payloadOf(l.c.Size)
	a := newArrivals(l, 0)
	return l.bare(ctx, a, "one acknowledged message per event, until a consumer has it",
		func(ctx context.Context) error { return l.arrive(ctx, stream, a) },
		func(ctx context.Context, n int) error {
			_, err := l.nats.JS.PublishMsg(bareMessage(stream, n, payload), nats.Context(ctx))
			return err
		})
}

// arrive records the events of a stream, once it exists, until ctx ends.
func (l *latency) arrive(ctx context.Context, stream string, a *arrivals) error {
	for {
		sub, err := l.nats.JS.Subscribe(jetstream.EventsFilter(stream), func(m *nats.Msg) {
			a.seen(m.Header.Get("ce-id"))
		}, nats.OrderedConsumer(), nats.BindStream(jetstream.StreamName(stream)))
		if err == nil {
			<-ctx.Done()
			return sub.Unsubscribe()
		}
		if !errors.Is(err, nats.ErrStreamNotFound) {
			return fmt.Errorf("read events: %w", err)
		}
		if pause.For(ctx, time.Millisecond) != nil {
			return nil
		}
	}
}
