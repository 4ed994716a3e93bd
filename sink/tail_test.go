package sink_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"posthaste/outbox"
)

// Tail lists a relay's events in a stream, after an entry or all of them, in pages.
func TestTail(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if got, err := f.sink.Tail(t.Context(), stream, ""); err != nil || len(got) != 0 {
		t.Errorf("without a stream: %v, %v", got, err)
	}
	var all []outbox.Entry
	for n := range 1150 {
		values := []string{"id", uuid.NewString(), "data", "{}"}
		switch n % 50 {
		case 7:
			values = append(values, "replayed", "1")
		case 8:
			values[1] = "somebody else's"
		case 9:
			values[0] = "other"
		default:
			all = append(all, outbox.Entry{ID: uuid.MustParse(values[1]), Millis: uint64(n) + 1, Number: 1})
		}
		f.Must(f.client.XAdd(t.Context(), &redis.XAddArgs{
			Stream: stream, ID: fmt.Sprintf("%d-1", n+1), Values: values,
		}).Err())
	}
	for after, want := range map[string][]outbox.Entry{
		"": all, "50-0": all[46:], "50-1": all[47:], "449-1": all[422:],
	} {
		got, err := f.sink.Tail(t.Context(), stream, after)
		if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("behind %q: %d entries, %v; want %d", after, len(got), err, len(want))
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantErr(t, second(f.sink.Tail(ctx, stream, "")), context.Canceled)
}
