package app

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"posthaste/api/admin"
	"posthaste/consumer"
	"posthaste/internal/cli"
	"posthaste/internal/tlsfile"
)

// ConsumeOptions select what a consumer reads, and where it prints.
type ConsumeOptions struct {
	// Group is the consumer group, Consumer the name within it. If Consumer is empty, a unique name is made.
	Group, Consumer string
	// Streams are full names. Without any, every stream with the prefix of the settings is read.
	Streams []string
	// Ordered keeps the order per subject over all consumers of the group.
	Ordered bool
	// ClaimIdle is how long an entry may be pending before another consumer claims it.
	ClaimIdle time.Duration
	// Out receives one JSON line per event. An entry is acknowledged only after its line was written.
	Out io.Writer
}

// Consume prints events until ctx ends. With an admin address it serves its metrics there until it has drained.
func Consume(ctx context.Context, c Config, o ConsumeOptions, log *slog.Logger) error {
	client, err := c.ReaderClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	traces := setupTracing(ctx, "posthaste-consumer", c.Version, log)
	defer traces.shutdown()
	reg := newRegistry(c.Version)
	c.useTLS(log, reg, tlsfile.Collector{})
	refused := newRefusals(reg)
	options := consumer.Options{
		Client: client, Group: o.Group, Consumer: o.Consumer, Streams: o.Streams, ClaimIdle: o.ClaimIdle,
		Ordered:      o.Ordered,
		Handler:      traces.handler(o.Group, consumer.LineWriter(o.Out)),
		DrainTimeout: c.DrainTimeout, Registerer: reg, Logger: log,
	}
	if len(o.Streams) == 0 {
		options.Prefix = c.StreamPrefix
	}
	cons, err := consumer.New(options)
	if err != nil {
		return cli.Usage(err.Error())
	}
	if c.AdminAddr == "" {
		return cons.Run(ctx)
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
		done <- ServeHTTP(actx, c.adminServer(log, admin.Metrics(withRuntime(reg), cons.Stalled)), l, time.Second)
	}()
	err = cons.Run(ctx)
	stop()
	return errors.Join(err, <-done)
}
