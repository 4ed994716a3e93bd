package consumer_test

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
	"posthaste/internal/pause"
)

// addLarge adds n events with payloads of the given size, each of a subject of its own, and returns their ids.
func addLarge(tb testing.TB, client *redis.Client, stream string, n, size int) []string {
	tb.Helper()
	data := `"` + strings.Repeat("x", size) + `"`
	ids := make([]string, n)
	for i := range ids {
		ids[i] = fmt.Sprintf("%s-large-%d", stream, i)
		err := client.XAdd(tb.Context(), &redis.XAddArgs{
			Stream: stream, Values: []any{"id", ids[i], "subject", ids[i], "data", data},
		}).Err()
		must(tb, err)
	}
	return ids
}

// The server closes a connection whose answer is larger than its limit, or the network is too slow for it. The consumer
// reads less at once, and handles all of the events; also those that were delivered to it, or to a consumer that has
// gone, in an answer that was too large.
func TestLargeEventsArriveInSmallAnswers(t *testing.T) {
	t.Parallel()
	const size = 3 << 19
	for name, c := range map[string]struct {
		events  int
		config  []string
		rate    int // KB/s
		timeout time.Duration
	}{
		"an output limit":                       {20, []string{"client-output-buffer-limit normal 4mb 4mb 0"}, 0, 0},
		"a limit that one event just fits into": {20, []string{"client-output-buffer-limit normal 2mb 2mb 0"}, 0, 0},
		"40 Mbit/s":                             {6, nil, 5000, 1500 * time.Millisecond},
		"a link on which one event takes longer than the timeout": {3, nil, 1000, time.Second},
	} {
		for _, ordered := range []bool{false, true} {
			for _, taken := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, ordered %v, taken over %v", name, ordered, taken), func(t *testing.T) {
					t.Parallel()
					r := testenv.Redis(t, c.config...)
					m := meter{rate: c.rate, timeout: c.timeout}
					ids := addLarge(t, r.Client, "outbox.order", c.events, size)
					if taken {
						readAsGone(t, r.Client, "outbox.order", c.events)
					}
					var rec record
					run := start(t, consumer.Options{
						Client: m.client(t, r.Addr()), Ordered: ordered, Handler: rec.handle,
					})
					eventuallyRan(t, &rec, 90*time.Second, len(ids))
					settled(t, r.Client, 20*time.Second, "g", "outbox.order")
					must(t, run.stop())
				})
			}
		}
	}
}

// readAsGone delivers n entries to a consumer that has been silent for an hour.
func readAsGone(tb testing.TB, client *redis.Client, stream string, n int) {
	tb.Helper()
	ctx := tb.Context()
	must(tb, client.XGroupCreate(ctx, stream, "g", "0").Err())
	for ; n > 0; n -= 20 { // a few at a time: an answer may be larger than the server allows
		err := client.Do(ctx, "eval", `
			local r = redis.call('XREADGROUP', 'GROUP', 'g', 'gone', 'COUNT', 20, 'STREAMS', KEYS[1], '>')
			for _, e in ipairs(r and r[1][2] or {}) do -- a repeated call may find none
				redis.call('XCLAIM', KEYS[1], 'g', 'gone', 0, e[1], 'IDLE', 3600000, 'JUSTID')
			end
			return 1`, 1, stream).Err()
		must(tb, err)
	}
}

// An event that is larger than the server's limit can never be delivered. The log names the reason.
func TestAnEventThatCannotBeDeliveredIsNamed(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "client-output-buffer-limit normal 1mb 1mb 0")
	addLarge(t, r.Client, "outbox.order", 1, 3<<19)
	logs := &syncBuffer{}
	var rec record
	c := create(t, consumer.Options{Client: r.Client, Handler: rec.handle, Logger: logTo(logs)})
	consumer.StallAfter(c, time.Second)
	run(t, c)
	logs.wait(t, "client-output-buffer-limit")
	testenv.Eventually(t, 20*time.Second, func() error {
		why := c.Stalled()
		return testenv.FailIf(!strings.Contains(why, "client-output-buffer-limit"), "stalled: %q", why)
	})
	must(t, r.Client.ConfigSet(t.Context(), "client-output-buffer-limit", "normal 0 0 0").Err())
	eventuallyRan(t, &rec, 20*time.Second, 1)
	testenv.Becomes(t, "stalled", "", c.Stalled)
}

// meter measures the largest answer on any of its connections. With a rate, in KB/s, each of them is slow.
type meter struct {
	largest atomic.Int64
	rate    int
	timeout time.Duration
}

// measured is a connection of a meter. Everything that is received between two commands is one answer.
type measured struct {
	net.Conn
	m   *meter
	now atomic.Int64
}

func (c *measured) Write(b []byte) (int, error) {
	c.now.Store(0)
	return c.Conn.Write(b)
}

func (c *measured) Read(b []byte) (int, error) {
	if c.m.rate > 0 {
		b = b[:min(len(b), 16<<10)]
	}
	n, err := c.Conn.Read(b)
	if c.m.rate > 0 {
		_ = pause.For(context.Background(), time.Duration(n)*time.Millisecond/time.Duration(c.m.rate)) // it is the link
	}
	for now := c.now.Add(int64(n)); ; {
		old := c.m.largest.Load()
		if now <= old || c.m.largest.CompareAndSwap(old, now) {
			return n, err
		}
	}
}

func (m *meter) atMost(tb testing.TB, most int64) {
	tb.Helper()
	if n := m.largest.Load(); n > most {
		tb.Errorf("an answer has %d MiB, want at most %d", n>>20, most>>20)
	}
}

func (m *meter) client(tb testing.TB, addr string) *redis.Client {
	tb.Helper()
	client := redis.NewClient(&redis.Options{
		Addr: addr, ReadTimeout: m.timeout,
		Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
			return &measured{Conn: c, m: m}, err
		},
	})
	tb.Cleanup(func() { _ = client.Close() })
	return client
}

// Large events come after many small ones, from one stream or from many, new or from a consumer that has gone. Each
// answer is bounded by bytes, and so is the memory for the events that wait.
func TestAnswersAreBoundedByBytes(t *testing.T) {
	t.Parallel()
	const small, large, size = 3000, 120, 1 << 20
	const most, mostHeld = 24 << 20, 90 // the bounds are 4 MiB and 64 MiB, and a few entries more
	for name, c := range map[string]struct {
		streams        int
		ordered, taken bool
	}{
		"one stream": {streams: 1}, "ordered": {streams: 1, ordered: true}, "many streams": {streams: 20},
		"taken over": {streams: 1, taken: true}, "taken over, ordered": {streams: 1, ordered: true, taken: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := testenv.Redis(t)
			var m meter
			var streams, ids, first []string
			for i := range c.streams {
				streams = append(streams, fmt.Sprintf("outbox.t%d", i))
				ids = append(ids, fill(t, r.Client, streams[i], small/c.streams, 500)...)
				first = append(first, r.Client.XInfoStream(t.Context(), streams[i]).Val().LastGeneratedID)
				ids = append(ids, addLarge(t, r.Client, streams[i], large/c.streams, size)...)
			}
			if c.taken {
				readAsGone(t, r.Client, streams[0], small+large)
			}
			var rec record
			var held atomic.Int64
			start(t, consumer.Options{
				Client: m.client(t, r.Addr()), Consumer: "me", Streams: streams, Ordered: c.ordered,
				Handler: func(ctx context.Context, ev consumer.Event) error {
					if len(ev.Data) > size { // and so is the memory, of which this is a sample
						n := int64(0)
						for i, s := range streams {
							n += int64(len(r.Client.XPendingExt(ctx, &redis.XPendingExtArgs{
								Stream: s, Group: "g", Consumer: "me", Start: first[i], End: "+", Count: large,
							}).Val()))
						}
						for old := held.Load(); n > old && !held.CompareAndSwap(old, n); old = held.Load() {
						}
					}
					return rec.handle(ctx, ev)
				},
			})
			eventuallyRan(t, &rec, 60*time.Second, len(ids))
			settled(t, r.Client, 20*time.Second, "g", streams...)
			m.atMost(t, most)
			if n := held.Load(); n > mostHeld {
				t.Errorf("%d large events are held, want at most %d", n, mostHeld)
			}
		})
	}
}

// Large events of one subject wait for the first of them, without their payloads. These are read back in answers that
// are bounded by bytes, and in smaller ones after a failure.
func TestParkedPayloadsAreBoundedByBytes(t *testing.T) {
	t.Parallel()
	const n, size, most = 80, 1 << 20, 8 << 20
	for name, config := range map[string]string{
		"no limit": "hz 10", "an output limit": "client-output-buffer-limit normal 3mb 3mb 0",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := testenv.Redis(t, config)
			var m meter
			data := strings.Repeat("x", size)
			for i := range n {
				must(t, r.Client.XAdd(t.Context(), &redis.XAddArgs{
					Stream: "outbox.order", Values: []any{"id", fmt.Sprint(i), "subject", "one", "data", data},
				}).Err())
			}
			add(t, r.Client, "outbox.order", event{"other", "two", 1})
			var rec record
			other := make(chan struct{})
			start(t, consumer.Options{
				Client: m.client(t, r.Addr()),
				Handler: func(ctx context.Context, ev consumer.Event) error {
					switch ev.ID {
					case "other":
						close(other)
					case "0":
						<-other // it is read only when others are parked
					}
					return rec.handle(ctx, ev)
				},
			})
			eventuallyRan(t, &rec, 60*time.Second, n+1)
			settled(t, r.Client, 20*time.Second, "g", "outbox.order")
			last := -1
			for _, ev := range rec.list() {
				if i, err := strconv.Atoi(ev.ID); err == nil && i != last+1 {
					t.Fatalf("event %d ran after %d", i, last)
				} else if err == nil {
					last = i
				}
			}
			m.atMost(t, most)
		})
	}
}

// The list of dead events, with their payloads, is read in answers that are bounded by bytes.
func TestDeadEventsAreReadInSmallAnswers(t *testing.T) {
	t.Parallel()
	const n, size, most = 60, 1 << 20, 8 << 20
	r := testenv.Redis(t)
	addLarge(t, r.Client, "dead.outbox.order", n, size)
	var m meter
	list, err := consumer.Dead(t.Context(), m.client(t, r.Addr()), "outbox.")
	if err != nil || len(list) != n || len(list[n-1].Data) != size+2 || list[n-1].EventID == "" {
		t.Errorf("%d dead events, %v", len(list), err)
	}
	m.atMost(t, most)
}
