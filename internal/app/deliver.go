package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/cli"
	"posthaste/internal/deliver"
	"posthaste/internal/tlsfile"
)

// Deliver sends events to a receiver until ctx ends, or the receiver wants no more, which is an error. It sets
// d.Group, d.TLS, from files, d.Gone, d.Logger and d.Registerer.
func Deliver(ctx context.Context, c Config, o ConsumeOptions, d deliver.Options, files tlsfile.Names,
	log *slog.Logger,
) error {
	if (files.Cert == "") != (files.Key == "") {
		return cli.Usage("--cert and --key need each other")
	}
	var err error
	if d.TLS, err = tlsfile.Load(files); err != nil {
		return cli.Usage("--ca, --cert: " + err.Error())
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	gone := make(chan error, 1)
	d.Gone = func(err error) {
		select {
		case gone <- err:
			stop()
		default: // stopping
		}
	}
	reg := newRegistry(c.Version)
	d.Group, d.Logger, d.Registerer = o.Group, log, reg
	sender, err := deliver.New(d)
	if err != nil {
		return cli.Usage(err.Error())
	}
	if d.SecretFile == "" {
		log.Warn("requests are not signed: the receiver cannot verify them", "remedy", "set --secret-file")
	}
	o.waits = true
	err = c.consume(ctx, o, member{reg, sender.Handle, tlsfile.Collector{"receiver": d.TLS}}, log)
	select {
	case why := <-gone:
		return errors.Join(why, err)
	default:
		return err
	}
}

// checkStreams returns an error for a named stream that does not exist. If o.waits, it only logs a name that has the
// prefix while no stream exists: the name is probably right. If Redis does not answer, it returns nil, because the
// consumer waits for Redis.
func (c Config) checkStreams(
	ctx context.Context, client redis.UniversalClient, o ConsumeOptions, log *slog.Logger,
) error {
	ctx, cancel := context.WithTimeout(ctx, OneShotTimeout)
	defer cancel()
	for _, name := range o.Streams {
		n, err := client.Exists(ctx, name).Result()
		spread, spreadErr := consumer.Bases(ctx, client, []string{name + ".0"})
		if err != nil || spreadErr != nil || n > 0 || len(spread) > 0 {
			continue
		}
		others, err := consumer.Streams(ctx, client, c.StreamPrefix)
		if err != nil {
			continue
		}
		others = slices.DeleteFunc(others, func(s string) bool { return !strings.HasPrefix(s, c.StreamPrefix) })
		if o.waits && len(others) == 0 && strings.HasPrefix(name, c.StreamPrefix) {
			log.Warn("the stream does not exist yet: it appears with its first event", "stream", name)
			continue
		}
		found := strings.Join(others[:min(len(others), 10)], ", ")
		return cli.Usage(fmt.Sprintf("--stream=%s: no such stream; there are %s. A stream appears with its first "+
			"event; without --stream, every stream that begins with %s is read", name, cmp.Or(found, "none yet"),
			c.StreamPrefix))
	}
	return nil
}
