package sink_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
)

// The ids of what a relay has put into a stream are listed, behind an entry or all of them, in pages.
func TestIDs(t *testing.T) {
	t.Parallel()
	f := newFixture(t)
	if got, err := f.sink.IDs(t.Context(), stream, ""); err != nil || len(got) != 0 {
		t.Errorf("without a stream: %v, %v", got, err)
	}
	var ids []uuid.UUID
	for n := range 450 {
		values := []string{"id", uuid.NewString(), "data", "{}"}
		switch n % 50 {
		case 7:
			values = append(values, "replayed", "1")
		case 8:
			values[1] = "somebody else's"
		case 9:
			values[0] = "other"
		default:
			ids = append(ids, uuid.MustParse(values[1]))
		}
		f.must(f.client.XAdd(t.Context(), &redis.XAddArgs{
			Stream: stream, ID: fmt.Sprintf("%d-1", n+1), Values: values,
		}).Err())
	}
	for after, want := range map[string][]uuid.UUID{"": ids, "50-0": ids[46:], "50-1": ids[47:], "449-1": ids[422:]} {
		got, err := f.sink.IDs(t.Context(), stream, after)
		if err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("behind %q: %d ids, %v; want %d", after, len(got), err, len(want))
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.sink.IDs(ctx, stream, ""); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want that it was interrupted", err)
	}
}
