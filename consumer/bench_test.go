package consumer_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

// bare reads and acknowledges everything in the stream, in the plainest way.
func bare(tb testing.TB, client *redis.Client, stream, group string, n int) time.Duration {
	tb.Helper()
	ctx := tb.Context()
	must(tb, client.XGroupCreateMkStream(ctx, stream, group, "0").Err())
	began := time.Now()
	for got := 0; got < n; {
		res, err := client.XReadGroup(ctx, &redis.XReadGroupArgs{
			Group: group, Consumer: "c", Streams: []string{stream, ">"}, Count: 500,
		}).Result()
		must(tb, err)
		ids := make([]string, 0, 500)
		for _, m := range res[0].Messages {
			ids = append(ids, m.ID)
		}
		got += len(ids)
		must(tb, client.XAck(ctx, stream, group, ids...).Err())
	}
	return time.Since(began)
}

// library reads and acknowledges everything in the stream through a Consumer with a handler that does nothing.
func library(tb testing.TB, client *redis.Client, stream, group string, n int) time.Duration {
	tb.Helper()
	var handled atomic.Int64
	all := make(chan struct{})
	c, err := consumer.New(consumer.Options{
		Client: client, Group: group, Streams: []string{stream}, Logger: slog.New(slog.DiscardHandler),
		Handler: func(context.Context, consumer.Event) error {
			if handled.Add(1) == int64(n) {
				close(all)
			}
			return nil
		},
	})
	must(tb, err)
	ctx, cancel := context.WithCancel(tb.Context())
	done := make(chan error, 1)
	began := time.Now()
	go func() { done <- c.Run(ctx) }()
	<-all
	for client.XPending(tb.Context(), stream, group).Val().Count > 0 {
	}
	took := time.Since(began)
	cancel()
	must(tb, <-done)
	return took
}

// BenchmarkAgainstBareLoop compares the library with a loop of XREADGROUP and XACK on the same stream in the same run.
func BenchmarkAgainstBareLoop(b *testing.B) {
	r := testenv.Redis(b)
	const n = 100_000
	fill(b, r.Client, "outbox.order", n, 5000)
	var tBare, tLib time.Duration
	i := 0
	for b.Loop() {
		i++
		tBare += bare(b, r.Client, "outbox.order", fmt.Sprintf("bare%d", i), n)
		tLib += library(b, r.Client, "outbox.order", fmt.Sprintf("lib%d", i), n)
	}
	b.ReportMetric(float64(n*i)/tBare.Seconds(), "bare_events/s")
	b.ReportMetric(float64(n*i)/tLib.Seconds(), "library_events/s")
	b.ReportMetric(100*tBare.Seconds()/tLib.Seconds(), "%_of_bare")
}
