package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/cli"
	"posthaste/internal/deliver"
	"posthaste/internal/pause"
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
	err = c.consume(ctx, o, member{reg, sender.Handle, tlsfile.Collector{"receiver": d.TLS}}, log)
	select {
	case why := <-gone:
		return errors.Join(why, err)
	default:
		return err
	}
}

// checkStreams returns an error for a named stream that does not exist. While no stream exists, a name that has the
// prefix is probably right: it is only logged, and early is true if there is no other name. If Redis does not answer,
// checkStreams returns nil, because the consumer waits for Redis.
func (c Config) checkStreams(
	ctx context.Context, client redis.UniversalClient, o ConsumeOptions, log *slog.Logger,
) (early bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, OneShotTimeout)
	defer cancel()
	expected := 0
	for _, name := range o.Streams {
		if there, err := streamExists(ctx, client, name); err != nil || there {
			continue
		}
		others, err := consumer.Streams(ctx, client, c.StreamPrefix)
		if err != nil {
			continue
		}
		others = slices.DeleteFunc(others, func(s string) bool { return !strings.HasPrefix(s, c.StreamPrefix) })
		if len(others) == 0 && strings.HasPrefix(name, c.StreamPrefix) {
			log.Warn("the stream does not exist yet: it appears with its first event", "stream", name)
			expected++
			continue
		}
		found := strings.Join(others[:min(len(others), 10)], ", ")
		return false, cli.Usage(fmt.Sprintf("--stream=%s: no such stream; there are %s. A stream appears with its "+
			"first event; without --stream, every stream that begins with %s is read", name, cmp.Or(found, "none yet"),
			c.StreamPrefix))
	}
	return expected > 0 && expected == len(o.Streams), nil
}

// streamExists reports whether a type has a stream of this name, or several that share it.
func streamExists(ctx context.Context, client redis.UniversalClient, name string) (bool, error) {
	n, err := client.Exists(ctx, name).Result()
	if err != nil || n > 0 {
		return n > 0, err
	}
	several, err := consumer.Bases(ctx, client, []string{name + ".0"})
	return len(several) > 0, err
}

// awaitStream waits until one of the streams exists, or ctx ends. The consumer would create it with its group.
func awaitStream(ctx context.Context, client redis.UniversalClient, names []string) {
	for pause.For(ctx, time.Second) == nil {
		for _, name := range names {
			if there, err := streamExists(ctx, client, name); err == nil && there {
				return
			}
		}
	}
}
