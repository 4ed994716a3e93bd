// Package consumer reads posthaste's streams through a Redis consumer group and hands each event to a handler.
//
//	c, err := consumer.New(consumer.Options{
//		Client:  redis.NewClient(&redis.Options{Addr: "localhost:6379"}),
//		Group:   "mailer",
//		Prefix:  "outbox.", // every stream with the prefix; or Streams: []string{"outbox.order"}
//		Handler: func(ctx context.Context, ev consumer.Event) error { return send(ctx, ev) },
//	})
//	if err != nil { … }           // a bad option
//	err = c.Run(ctx)              // until ctx ends, even if Redis is unreachable
//
// What a handler may rely on:
//
//   - An event is acknowledged after the handler returned nil for it, never before. A crash therefore repeats events
//     and never skips one: delivery is at least once. package consumer/inbox turns that into an effect exactly once.
//   - Events of one subject (in one stream) run one after the other, in the order of the stream, and an event does not
//     start while its predecessor waits for a retry. Events of different subjects run concurrently,
//     Options.Workers at a time. This order holds within one process; Options.Ordered extends it over all processes of
//     the group.
//   - An event that keeps failing is moved to the dead stream (DeadStream), atomically with its acknowledgement, after
//     Options.MaxAttempts attempts; crashes of the process count as attempts. It holds up its own subject only. While
//     nearly all events fail, no attempt is counted.
//   - An error wrapped with Permanent goes to the dead stream at once. One wrapped with Unavailable ("the database is
//     down") is retried for as long as it takes and uses up no attempts.
//
// Every connection error is retried with backoff. A flushed Redis, a lost consumer group and a trimmed stream are
// survived and counted.
package consumer
