package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

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
	if err := c.checkStreams(ctx, o.Streams, log); err != nil {
		return err
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

// checkStreams returns an error for a named stream that does not exist, while other streams do, or that lacks the
// prefix: its name is probably wrong. If Redis does not answer, it returns nil, because the consumer waits for Redis.
func (c Config) checkStreams(ctx context.Context, names []string, log *slog.Logger) error {
	if len(names) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, OneShotTimeout)
	defer cancel()
	client, err := c.ReaderClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	for _, name := range names {
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
		if len(others) > 0 || !strings.HasPrefix(name, c.StreamPrefix) {
			found := strings.Join(others[:min(len(others), 10)], ", ")
			return cli.Usage(fmt.Sprintf("--stream=%s: no such stream; there are %s. A stream appears with its first "+
				"event; without --stream, every stream that begins with %s is read", name,
				cmp.Or(found, "none yet"), c.StreamPrefix))
		}
		log.Warn("the stream does not exist yet: it appears with its first event", "stream", name)
	}
	return nil
}
