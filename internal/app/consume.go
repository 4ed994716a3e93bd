package app

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/api/admin"
	"posthaste/consumer"
	"posthaste/internal/cli"
	"posthaste/internal/tlsfile"
)

// Consume is the command that prints events, and what selects them for other commands.
type Consume struct {
	Group     string        `help:"Consumer group; a new one starts at the first entry." required:""`
	Stream    []string      `help:"Full stream name; may be repeated. Default: all streams with the prefix." sep:"none"`
	Consumer  string        `help:"Name of this consumer within the group. Default: a unique name."`
	Ordered   bool          `help:"Keep the order per subject over all consumers: one at a time reads a stream."`
	ClaimIdle time.Duration `help:"Silence after which another consumer's entries are taken over." default:"15s"`
}

// Run prints one JSON line per event until ctx ends. It acknowledges an entry only after its line was written.
func (o Consume) Run(ctx context.Context, c Config, streams cli.IO) error {
	if o.ClaimIdle <= 0 {
		return cli.Usage("--claim-idle must be positive")
	}
	m := member{newRegistry(c.Version), consumer.LineWriter(streams.Stdout), tlsfile.Collector{}}
	return c.consume(ctx, o, m, c.Logger())
}

// member is what differs between the processes that are members of a consumer group.
type member struct {
	registry *prometheus.Registry
	handler  consumer.Handler
	files    tlsfile.Collector
}

// consume handles events until ctx ends. With an admin address it serves its metrics there until it has drained.
func (c Config) consume(ctx context.Context, o Consume, m member, log *slog.Logger) error {
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
		Client: client, Group: o.Group, Consumer: o.Consumer, Streams: o.Stream, ClaimIdle: o.ClaimIdle,
		Ordered: o.Ordered, Handler: traces.handler(o.Group, m.handler),
		DrainTimeout: c.DrainTimeout, Registerer: m.registry, Logger: log,
	}
	if len(o.Stream) == 0 {
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
			awaitStream(ctx, client, o.Stream)
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
