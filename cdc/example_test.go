package cdc_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"posthaste/cdc"
	"posthaste/outbox"
)

// A program that prints every event once it is committed.
func Example() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	const url, slot = "postgres://localhost:5432/app", "app_events"

	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		panic(err)
	}
	slots, err := cdc.NewSlots(cdc.Options{Pool: pool, Slot: slot})
	if err != nil {
		panic(err)
	}
	var trouble *outbox.SlotError
	if _, err := slots.Ensure(ctx, nil); errors.As(err, &trouble) {
		panic(trouble.Reason + ": " + trouble.Remedy)
	} else if err != nil {
		panic(err)
	}
	reader, err := cdc.NewReader(cdc.Options{URL: url, Pool: pool, Slot: slot})
	if err != nil {
		panic(err)
	}
	out := make(chan outbox.Chunk, 4)
	go func() {
		defer close(out)
		fmt.Println(reader.Run(ctx, func(context.Context) error { return nil }, out))
	}()
	for chunk := range out {
		for _, row := range chunk.Rows {
			if !row.Marker() {
				fmt.Println(row.Type, row.AggregateID)
			}
			if row.End != 0 {
				reader.Settled(row.End) // printed: the server may forget the transaction
			}
		}
	}
}
