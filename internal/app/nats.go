package app

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/internal/cli"
	"posthaste/relay/stream"
	"posthaste/sink"
	"posthaste/sink/jetstream"
)

// errNotRedis ends a command that knows the streams of Redis only.
var errNotRedis = cli.Usage("this command reads streams of Redis, and --sink-url is set: " +
	"use the nats command for those of JetStream")

// sinks publishes to the servers that the settings name.
type sinks struct {
	stream.Sink
	// ready reports why no event is taken.
	ready func(ctx context.Context) error
	// observe and unobserve are relay.Options.Observe and Unobserve.
	observe   func(ctx context.Context, streams []string) error
	unobserve func()
	close     func()
}

// natsSink returns the sink of --sink-url, which connects at its first use. reg may be nil.
func (c Config) natsSink(reg prometheus.Registerer) (sinks, error) {
	o, err := jetstream.ParseURL(c.SinkURL)
	if err != nil {
		return sinks{}, err
	}
	o.Source, o.Fsync, o.Replicas = c.EntrySource(), c.SinkDurability == "fsync", c.SinkReplicas
	o.MaxLen, o.TrimForce, o.Registerer = c.StreamMaxlen, c.Trim == "force", reg
	js := jetstream.New(o)
	return sinks{
		Sink: js, ready: js.Ready, observe: js.Observe, unobserve: js.Unobserve, close: js.Close,
	}, nil
}

// sinkName is the name of the system that events are published to.
func (c Config) sinkName() string {
	if c.SinkURL != "" {
		return "nats"
	}
	return "redis"
}

// natsReady returns why JetStream takes no events from this machine.
func (c Config) natsReady(ctx context.Context) error {
	s, err := c.natsSink(nil)
	if err != nil {
		return err
	}
	defer s.close()
	return s.ready(ctx)
}

// sinkPermits returns what Redis refuses to the configured user although publishing to streams needs it.
func (c Config) sinkPermits(ctx context.Context, streams []string) error {
	if c.SinkURL != "" {
		return nil
	}
	client, err := c.RedisClient(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	return sink.New(sink.Options{Client: client}).Permitted(ctx, streams)
}

// sinkReady returns why the servers take no events from this machine, or what they keep unknown. The check is necessary
// because Postgres has no record of an unreachable server until events are late.
func (c Config) sinkReady(ctx context.Context) (unknown []string, err error) {
	if c.SinkURL != "" {
		return nil, c.natsReady(ctx)
	}
	client, err := c.RedisClient(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = client.Close() }()
	s := sink.New(sink.Options{Client: client, Durability: c.RedisDurability})
	if err := s.Ready(ctx); err != nil {
		return nil, err
	}
	unknown, _ = s.Unknown(ctx) // events flow even if this fails
	return unknown, nil
}
