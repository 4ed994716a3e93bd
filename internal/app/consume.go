package app

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/api/admin"
	"posthaste/consumer"
	"posthaste/internal/cli"
	"posthaste/internal/tlsfile"
)

// ConsumeOptions select what a consumer reads.
type ConsumeOptions struct {
	// Group is the consumer group, Consumer the name within it. If Consumer is empty, a unique name is made.
	Group, Consumer string
	// Streams are full names. Without any, every stream with the prefix of the settings is read.
	Streams []string
	// Ordered keeps the order per subject over all consumers of the group.
	Ordered bool
	// ClaimIdle is how long an entry may be pending before another consumer claims it. 0: as the library.
	ClaimIdle time.Duration
}

// Consume prints one JSON line per event to out until ctx ends. It acknowledges an entry only after its line was
// written.
func Consume(ctx context.Context, c Config, o ConsumeOptions, out io.Writer, log *slog.Logger) error {
	return c.consume(ctx, o, member{newRegistry(c.Version), consumer.LineWriter(out), tlsfile.Collector{}}, log)
}

// member is what differs between the processes that are members of a consumer group.
type member struct {
	registry *prometheus.Registry
	handler  consumer.Handler
	files    tlsfile.Collector
}

// consume handles events until ctx ends. With an admin address it serves its metrics there until it has drained.
func (c Config) consume(ctx context.Context, o ConsumeOptions, m member, log *slog.Logger) error {
	if o.Group == "" {
		return cli.Usage("--group is empty: want the name of a consumer group")
	}
	client, err := c.ReaderClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	traces := setupTracing(ctx, "posthaste-consumer", c.Version, log)
	defer traces.shutdown()
	c.useTLS(log, m.registry, m.files)
	refused := newRefusals(m.registry)
	options := consumer.Options{
		Client: client, Group: o.Group, Consumer: o.Consumer, Streams: o.Streams, ClaimIdle: o.ClaimIdle,
		Ordered: o.Ordered, Handler: traces.handler(o.Group, m.handler),
		DrainTimeout: c.DrainTimeout, Registerer: m.registry, Logger: log,
	}
	if len(o.Streams) == 0 {
		options.Prefix = c.StreamPrefix
	}
	cons, err := consumer.New(options)
	if err != nil {
		return cli.Usage(err.Error())
	}
	early, err := c.checkStreams(ctx, client, o, log)
	if err != nil {
		return err
	}
	run := func() error {
		if early {
			awaitStream(ctx, client, o.Streams)
		}
		return cons.Run(ctx)
	}
	if c.AdminAddr == "" {
		return run()
	}
	l, err := Listen(ctx, c.AdminAddr)
	if err != nil {
		return err
	}
	l = boundAdmin(l, refused)
	log.Info("consuming", "version", c.Version, "group", o.Group, "admin", l.Addr().String())
	actx, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() {
		server := c.adminServer(log, admin.Metrics(withRuntime(m.registry), cons.Stalled))
		done <- ServeHTTP(actx, server, l, time.Second)
	}()
	err = run()
	stop()
	return errors.Join(err, <-done)
}
