package consumer_test

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
)

func ExampleNew() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	c, err := consumer.New(consumer.Options{
		Client: client, Group: "mailer", Streams: []string{"outbox.invoice"},
		Handler: func(_ context.Context, e consumer.Event) error {
			fmt.Printf("invoice %s: %s\n", e.Subject, e.Data)
			return nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	_ = c.Run // runs until its context ends
}

func ExampleJSON() {
	type sent struct{ Total int }
	handler := consumer.JSON(func(_ context.Context, e consumer.Event, body sent) error {
		fmt.Printf("invoice %s: %d\n", e.Subject, body.Total)
		return nil
	})
	_ = handler
}
