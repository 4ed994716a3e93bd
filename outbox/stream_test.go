package outbox_test

import (
	"fmt"
	"testing"

	"posthaste/internal/testenv"
	"posthaste/outbox"
)

func TestStreamNames(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		aggregate string
		shards    int
		want      string
	}{
		{"a", 0, "outbox.order"},
		{"a", 1, "outbox.order"},
		{"a", 16, "outbox.order.1"},
		{"", 16, "outbox.order.13"},
		{"", 8, "outbox.order.5"},
		{"", 4, "outbox.order.1"},
		{"", 2, "outbox.order.1"},
	} {
		got := outbox.Layout{Prefix: "outbox.", Shards: c.shards}.Stream("order", c.aggregate)
		testenv.Equal(t, "the stream of "+c.aggregate, got, c.want)
		testenv.Equal(t, "the base of "+got, outbox.BaseName(got, c.shards), "outbox.order")
	}
}

// Each number of streams divides the parts, and so whatever is together with more streams is together with fewer.
func TestShardCounts(t *testing.T) {
	t.Parallel()
	for i, n := range outbox.ShardCounts {
		testenv.Equal(t, "parts that are left over", outbox.Partitions%n, 0)
		used := map[string]bool{}
		for a := range 1000 {
			id := fmt.Sprint(a)
			used[outbox.Layout{Shards: n}.Stream("t", id)] = true
			if i > 0 && outbox.PartOf(id)%n%outbox.ShardCounts[i-1] != outbox.PartOf(id)%outbox.ShardCounts[i-1] {
				t.Errorf("%s changes its place", id)
			}
		}
		testenv.Equal(t, "streams that are used", len(used), n)
	}
}

// Naming a stream costs the name, and nothing else, whatever the aggregate is called.
//
//nolint:paralleltest // it counts what the whole process allocates
func TestStreamNameAllocates(t *testing.T) {
	id := "018f3a52-7c1e-7b9a-8d4e-1f2a3b4c5d6e and more than thirty-two bytes"
	for _, shards := range outbox.ShardCounts {
		l := outbox.Layout{Prefix: "outbox.", Shards: shards}
		if n := testing.AllocsPerRun(100, func() { _ = l.Stream("order", id) }); n > 1 {
			t.Errorf("with %d streams: %v allocations", shards, n)
		}
	}
}
