package sink_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/sink"
)

const nodeEntries = 10

// trimming makes a fixture with small nodes, and a stream of n entries with the ids 1-0 … n-0.
func trimming(t *testing.T, o sink.Options, n int) *fixture {
	t.Helper()
	f := on(t, testenv.Redis(t, fmt.Sprintf("stream-node-max-entries %d", nodeEntries)), o)
	pipe := f.server.Client.Pipeline()
	for i := range n {
		pipe.XAdd(t.Context(), &redis.XAddArgs{Stream: stream, ID: fmt.Sprintf("%d-0", i+1), Values: []any{"a", "b"}})
	}
	_, err := pipe.Exec(t.Context())
	f.Must(err)
	return f
}

func (f *fixture) group(name, start string) {
	f.Helper()
	f.Must(f.server.Client.XGroupCreate(f.Context(), stream, name, start).Err())
}

// read delivers n entries to the group and returns their ids.
func (f *fixture) read(group string, n int64) []string {
	f.Helper()
	r, err := f.server.Client.XReadGroup(f.Context(), &redis.XReadGroupArgs{
		Group: group, Consumer: "c", Streams: []string{stream, ">"}, Count: n, Block: -1,
	}).Result()
	f.Must(err)
	var ids []string
	for _, m := range r[0].Messages {
		ids = append(ids, m.ID)
	}
	return ids
}

func (f *fixture) ack(group string, ids ...string) {
	f.Helper()
	f.Must(f.server.Client.XAck(f.Context(), stream, group, ids...).Err())
}

// wantTrimmed trims and checks the first entry left, which may be earlier by less than a node, never later.
func (f *fixture) wantTrimmed(first int) {
	f.Helper()
	f.Must(f.sink.Trim(f.Context(), stream))
	entries, err := f.server.Client.XRangeN(f.Context(), stream, "-", "+", 1).Result()
	f.Must(err)
	var got int
	_, err = fmt.Sscanf(entries[0].ID, "%d-0", &got)
	f.Must(err)
	if got > first || got <= first-nodeEntries {
		f.Fatalf("the first entry is %d, want %d or a little earlier", got, first)
	}
}

// Trimming keeps the configured length, and what a group has not acknowledged.
func TestTrim(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		o      sink.Options
		n      int
		before func(f *fixture)
		first  int
		after  func(f *fixture) // nil: nothing changes
		then   int
	}{
		// More than a trim without a limit of its own would remove.
		"no group": {o: sink.Options{MaxLen: 100}, n: 30000, first: 29901, then: 29901},
		"a pending entry": {
			o: sink.Options{MaxLen: 100}, n: 1000, first: 400, then: 901,
			before: func(f *fixture) {
				f.group("g", "0")
				ids := f.read("g", 1000)
				f.ack("g", slices.Delete(ids, 399, 400)...)
			},
			after: func(f *fixture) { f.ack("g", "400-0") },
		},
		"a new group": {
			o: sink.Options{MaxLen: 100}, n: 500, first: 1, then: 401,
			before: func(f *fixture) {
				f.group("new", "0")
				f.group("latest", "$")
			},
			after: func(f *fixture) { f.do("XGROUP", "DESTROY", stream, "new") },
		},
		"by force": {
			o: sink.Options{MaxLen: 100, TrimForce: true}, n: 1000, first: 901, then: 901,
			before: func(f *fixture) { f.group("slow", "0") },
		},
		"no length": {n: 300, first: 1, then: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := trimming(t, c.o, c.n)
			f.Must(f.sink.Trim(t.Context(), "missing"))
			if c.before != nil {
				c.before(f)
			}
			f.wantTrimmed(c.first)
			if c.after != nil {
				c.after(f)
			}
			f.wantTrimmed(c.then)
		})
	}
}

func TestObserve(t *testing.T) {
	t.Parallel()
	f := trimming(t, sink.Options{MaxLen: 100}, 0)
	ctx := t.Context()
	now := time.Now().Add(-90 * time.Second).UnixMilli()
	for i := range 10 {
		f.do("XADD", stream, fmt.Sprintf("%d-%d", now, i), "a", "b")
	}
	f.group("g", "0")
	f.read("g", 4)
	streams := []string{stream, "outbox.missing"}
	f.Must(f.sink.Observe(ctx, streams))
	f.wantMetric("outbox_stream_length", 10, "stream", stream)
	f.wantMetric("outbox_stream_length", 0, "stream", "outbox.missing")
	f.wantMetric("outbox_group_pending", 4, "stream", stream, "group", "g")
	f.wantMetric("outbox_group_lag", 6, "stream", stream, "group", "g")
	f.wantMetric("outbox_trim_lost_total", 0, "stream", stream, "group", "g")
	if age := f.metric("outbox_group_oldest_pending_seconds", "group", "g"); age < 89 || age > 120 {
		t.Errorf("the oldest pending entry is %v s old, want about 90", age)
	}
	f.wantMetric("redis_memory_ratio", 0)
	f.wantMetric("redis_eviction_unsafe", 0)

	// Three entries that the group has not read go.
	f.do("XTRIM", stream, "MAXLEN", "3")
	for range 2 {
		f.Must(f.sink.Observe(ctx, streams))
		f.wantMetric("outbox_trim_lost_total", 3, "group", "g")
	}
	f.do("CONFIG", "SET", "maxmemory", "100mb")
	f.do("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
	f.Must(f.sink.Observe(ctx, streams))
	f.wantMetric("redis_eviction_unsafe", 1)
	if r := f.metric("redis_memory_ratio"); r <= 0 || r > 0.5 {
		t.Errorf("memory ratio %v", r)
	}
	// Another instance exports the series from now on, except for counters.
	f.sink.Unobserve()
	for _, name := range []string{
		"outbox_stream_length", "outbox_group_pending", "outbox_group_lag", "outbox_group_oldest_pending_seconds",
		"outbox_group_idle_seconds",
	} {
		if _, ok := lookup(t, f.reg, name); ok {
			t.Errorf("%s is still there", name)
		}
	}
	f.wantMetric("redis_memory_ratio", 0)
	f.wantMetric("redis_eviction_unsafe", 0)
	f.wantMetric("outbox_trim_lost_total", 3)
	// This one exports them again, and counts no loss twice.
	f.Must(f.sink.Observe(ctx, streams))
	f.wantMetric("outbox_stream_length", 3, "stream", stream)
	f.wantMetric("outbox_trim_lost_total", 3)
	f.Must(f.server.Client.XGroupDestroy(ctx, stream, "g").Err())
	f.Must(f.sink.Observe(ctx, streams[:1]))
	for name, labels := range map[string][]string{
		"outbox_group_pending": {"group", "g"}, "outbox_group_lag": {"group", "g"},
		"outbox_trim_lost_total":              {"group", "g"},
		"outbox_group_oldest_pending_seconds": {"group", "g"}, "outbox_stream_length": {"stream", "outbox.missing"},
	} {
		if _, ok := lookup(t, f.reg, name, labels...); ok {
			t.Errorf("%s%v is still there", name, labels)
		}
	}
}

// A server that was restarted has a group's position and an old count of what it read: that is no loss.
func TestObserveAfterARestartOfRedis(t *testing.T) {
	t.Parallel()
	f := trimming(t, sink.Options{}, 10)
	ctx := t.Context()
	f.group("g", "0")
	f.read("g", 2)
	f.do("BGREWRITEAOF") // the file's count of entries read is 2 from now on
	testenv.Eventually(t, 20*time.Second, func() error {
		if info := f.server.Client.Info(ctx, "persistence").Val(); !strings.Contains(info,
			"aof_rewrite_in_progress:0") ||
			strings.Contains(info, "aof_rewrite_scheduled:1") {
			return errors.New("still rewriting")
		}
		return nil
	})
	f.read("g", 2)
	f.do("XTRIM", stream, "MAXLEN", "6")
	wantLost := func(n float64) {
		t.Helper()
		f.Must(f.sink.Observe(ctx, []string{stream}))
		f.wantMetric("outbox_trim_lost_total", n, "group", "g")
	}
	wantLost(0)
	f.Must(f.server.Kill())
	f.Must(f.server.Start(ctx))
	wantLost(0)
	f.do("XTRIM", stream, "MAXLEN", "4")
	wantLost(2) // they were trimmed unread
}

// A group that has never read misses trimmed entries as well; entries that left the stream before the group existed do
// not count.
func TestObserveCountsWhatAGroupThatNeverReadMisses(t *testing.T) {
	t.Parallel()
	f := trimming(t, sink.Options{}, 20)
	ctx := t.Context()
	f.do("XTRIM", stream, "MAXLEN", "15")
	f.group("g", "0")
	for _, c := range []struct {
		length int
		want   float64
	}{{15, 0}, {12, 3}, {12, 3}, {5, 10}} {
		f.do("XTRIM", stream, "MAXLEN", strconv.Itoa(c.length))
		f.Must(f.sink.Observe(ctx, []string{stream}))
		f.wantMetric("outbox_trim_lost_total", c.want, "group", "g")
	}
	f.read("g", 1)
	f.Must(f.sink.Observe(ctx, []string{stream}))
	if got := f.metric("outbox_trim_lost_total", "group", "g"); got < 10 {
		t.Errorf("%v entries lost after the first read, want at least 10", got)
	}
}

func TestObserveCannotTellTheLag(t *testing.T) {
	t.Parallel()
	f := trimming(t, sink.Options{}, 10)
	f.group("g", "0")
	f.read("g", 2)
	f.do("XDEL", stream, "5-0")
	f.Must(f.sink.Observe(t.Context(), []string{stream}))
	f.wantMetric("outbox_group_lag", -1, "group", "g") // unknown
}

func TestObserveBoundsTheGroups(t *testing.T) {
	t.Parallel()
	f := trimming(t, sink.Options{}, 1)
	for i := range 80 {
		f.group(fmt.Sprintf("g%d", i), "0")
	}
	f.Must(f.sink.Observe(t.Context(), []string{stream}))
	f.wantMetric("outbox_group_lag", 50, "stream", stream) // each has a lag of one
}

// A stream's key of another type only affects its events and must not look like an unreachable Redis.
func TestAKeyOfAnotherKindStopsNoHousekeeping(t *testing.T) {
	t.Parallel()
	f := trimming(t, sink.Options{MaxLen: 100}, 50)
	f.do("SET", "outbox.wrong", "not a stream")
	f.Must(f.sink.Trim(t.Context(), "outbox.wrong"))
	f.Must(f.sink.Observe(t.Context(), []string{"outbox.wrong", stream}))
	f.wantMetric("outbox_stream_length", 50, "stream", stream)
}
