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

// Deliver is the command that sends events to a receiver.
type Deliver struct {
	Group      string   `help:"Consumer group; a new one starts at the first entry." required:""`
	To         string   `help:"URL to which each event is POSTed." required:"" placeholder:"https://HOST/PATH"`
	Stream     []string `help:"Full stream name; may be repeated. Default: all streams with the prefix." sep:"none"`
	SecretFile string
	Ordered    bool          `help:"Keep the order per subject over all processes: one at a time reads a stream."`
	Timeout    time.Duration `help:"How long the receiver may take to answer." default:"10s"`
	CA         string        `name:"ca"`
	Cert       string        `help:"PEM file with the certificate to show to the receiver."`
	Key        string        `help:"PEM file with its key."`
}

// Run delivers events until ctx ends, or until the receiver wants no more (410), which is an error.
func (o Deliver) Run(ctx context.Context, c Config) error {
	files, err := tlsfile.Load(tlsfile.Names{Cert: o.Cert, Key: o.Key, CA: o.CA})
	if err != nil {
		return cli.Usage("--ca, --cert, --key: " + err.Error())
	}
	running, gone := context.WithCancelCause(ctx)
	defer gone(nil)
	log, reg := c.Logger(), newRegistry(c.Version)
	sender, err := deliver.New(deliver.Options{
		Group: o.Group, To: o.To, SecretFile: o.SecretFile, Timeout: o.Timeout, TLS: files, Gone: gone, Logger: log,
		Registerer: reg,
	})
	if err != nil {
		return cli.Usage(err.Error())
	}
	if o.SecretFile == "" {
		log.Warn("requests are not signed: the receiver cannot verify them", "remedy", "set --secret-file")
	}
	err = c.consume(running, Consume{Group: o.Group, Stream: o.Stream, Ordered: o.Ordered},
		member{reg, sender.Handle, tlsfile.Collector{"receiver": files}}, log)
	if why := context.Cause(running); !errors.Is(why, context.Cause(ctx)) {
		return errors.Join(why, err)
	}
	return err
}

// checkStreams returns an error for a named stream that does not exist. While no stream exists, a name that has the
// prefix is probably right: it is only logged, and early is true if there is no other name. If Redis does not answer,
// checkStreams returns nil, because the consumer waits for Redis.
func (c Config) checkStreams(
	ctx context.Context, client redis.UniversalClient, o Consume, log *slog.Logger,
) (early bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, OneShotTimeout)
	defer cancel()
	expected := 0
	for _, name := range o.Stream {
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
	return expected > 0 && expected == len(o.Stream), nil
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
