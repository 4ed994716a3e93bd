package app

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"posthaste/consumer"
	"posthaste/internal/deliver"
	"posthaste/internal/tlsfile"
)

// EachRegistry builds every process without connecting, as in a database with a shop, and calls do with the name of its
// command and its registry.
func EachRegistry(ctx context.Context, c Config, do func(process string, reg *prometheus.Registry) error) error {
	c.HTTPAddr, c.AdminAddr = "127.0.0.1:0", "127.0.0.1:0"
	log := slog.New(slog.DiscardHandler)
	api, err := NewServe(ctx, c, log)
	if err != nil {
		return err
	}
	defer api.Close()
	relay, err := NewRelay(ctx, c, log)
	if err != nil {
		return err
	}
	defer relay.Close()
	if err := relay.buildCredits(ctx); err != nil {
		return err
	}
	client, err := c.ReaderClient(ctx)
	if err != nil {
		return err
	}
	defer client.Close()
	delivering := newRegistry(c.Version)
	sender, err := deliver.New(deliver.Options{
		Group: "group", To: "http://localhost", Timeout: time.Second, Registerer: delivering,
	})
	if err != nil {
		return err
	}
	err = errors.Join(do("serve", api.registry), do("relay", relay.registry))
	for _, p := range []struct {
		name string
		member
	}{
		{"consume", member{newRegistry(c.Version), consumer.LineWriter(io.Discard), tlsfile.Collector{}}},
		{"deliver", member{delivering, sender.Handle, tlsfile.Collector{"receiver": nil}}},
	} {
		c.useTLS(log, p.registry, p.files)
		newRefusals(p.registry)
		if _, err := consumer.New(consumer.Options{
			Client: client, Group: "group", Prefix: c.StreamPrefix, Handler: p.handler, Registerer: p.registry,
		}); err != nil {
			return err
		}
		err = errors.Join(err, do(p.name, p.registry))
	}
	return err
}
