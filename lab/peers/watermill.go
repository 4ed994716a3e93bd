package main

import (
	"context"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/components/forwarder"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
)

// topic is the one that watermill's forwarder reads.
const topic = "events_to_forward"

// subscriber is watermill-sql's, as its documentation has it.
func subscriber(pool *pgxpool.Pool) (*watermillsql.Subscriber, error) {
	return watermillsql.NewSubscriber(watermillsql.BeginnerFromPgx(pool), watermillsql.SubscriberConfig{
		SchemaAdapter:    watermillsql.DefaultPostgreSQLSchema{},
		OffsetsAdapter:   watermillsql.DefaultPostgreSQLOffsetsAdapter{},
		InitializeSchema: true,
	}, watermill.NopLogger{})
}

// forward is watermill's forwarder, from its table to the stream.
func forward(ctx context.Context, postgres, redisURL string) error {
	pool, err := pgxpool.New(ctx, postgres)
	if err != nil {
		return err
	}
	defer pool.Close()
	from, err := subscriber(pool)
	if err != nil {
		return err
	}
	opt, err := redis.ParseURL(redisURL)
	if err != nil {
		return err
	}
	to, err := redisstream.NewPublisher(redisstream.PublisherConfig{Client: redis.NewClient(opt)},
		watermill.NopLogger{})
	if err != nil {
		return err
	}
	defer func() { _ = to.Close() }()
	f, err := forwarder.NewForwarder(from, to, watermill.NopLogger{}, forwarder.Config{ForwarderTopic: topic})
	if err != nil {
		return err
	}
	return f.Run(ctx)
}
