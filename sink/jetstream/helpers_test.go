package jetstream_test

import (
	"crypto/rand"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"

	"posthaste/outbox"
)

const order = "outbox.order"

var source = uuid.New()

func (f *fixture) owner(epoch int64) outbox.Owner {
	o := outbox.Owner{Source: source, Epoch: epoch}
	_, _ = rand.Read(o.Nonce[:])
	return o
}

func streamLane(o outbox.Owner) outbox.Lane {
	return outbox.Lane{Part: outbox.StreamLane, Nonce: o.Nonce}
}

func makeEvents(n int) []*outbox.Record {
	events := make([]*outbox.Record, n)
	for i := range events {
		events[i] = &outbox.Record{
			ID: uuid.Must(uuid.NewV7()), Seq: int64(i + 1), AggregateType: "order", AggregateID: fmt.Sprint("o-", i%7),
			Type: "order.created", Payload: []byte(`{"text":"` + strings.Repeat("x", 200) + `"}`), Time: time.Now(),
		}
	}
	return events
}

func ids(events []*outbox.Record) []uuid.UUID {
	list := make([]uuid.UUID, len(events))
	for i, e := range events {
		list[i] = e.ID
	}
	return list
}
