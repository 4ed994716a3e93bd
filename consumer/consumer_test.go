package consumer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

func TestEveryEventOnceAndAcknowledged(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ids := fill(t, r.Client, "outbox.order", 3000, 100)
	var rec record
	c := start(t, consumer.Options{Client: r.Client, Handler: rec.handle})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	ids = append(ids, fill(t, r.Client, "outbox.order", 500, 7)...)
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	must(t, c.stop())
	allOnce(t, ids, rec.times())
	list, err := r.Client.XInfoConsumers(t.Context(), "outbox.order", "g").Result()
	if err != nil || len(list) != 0 {
		t.Errorf("consumers after an orderly stop: %v, %v; want none", list, err)
	}
}

func TestEventCarriesWhatTheEntrySays(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	entry := add(t, r.Client, "outbox.order", event{"id-1", "s", 7})
	got := make(chan consumer.Event, 1)
	trace := make(chan string, 1)
	var order []string
	mw := func(name string) consumer.Middleware {
		return func(next consumer.Handler) consumer.Handler {
			return func(ctx context.Context, ev consumer.Event) error {
				order = append(order, name)
				return next(ctx, ev)
			}
		}
	}
	start(t, consumer.Options{
		Client:     r.Client,
		Middleware: []consumer.Middleware{mw("outer"), mw("inner")},
		Handler: consumer.JSON(func(ctx context.Context, ev consumer.Event, body struct{ N int }) error {
			testenv.Equal(t, "decoded", body.N, 7)
			trace <- consumer.TraceParent(ctx)
			got <- ev
			return nil
		}),
	})
	tp := "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	testenv.Equal(t, "trace context", <-trace, tp)
	ev := <-got
	if ev.ID != "id-1" || ev.Type != "order.created" || ev.Source != "/posthaste/default" || ev.Subject != "s" ||
		ev.Stream != "outbox.order" || ev.EntryID != entry || ev.Attempt != 1 || ev.Replayed || ev.TraceParent != tp ||
		!maps.Equal(ev.Headers, map[string]string{"tenant": "<a>", "n": "5", "z": "null"}) ||
		time.Since(ev.Time) > time.Minute {
		t.Errorf("got %+v", ev)
	}
	testenv.Equal(t, "middleware", strings.Join(order, " "), "outer inner")
}

func TestPrefixFindsNewStreamsAndSkipsOthers(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	add(t, r.Client, "outbox.order", event{"a", "s", 1})
	add(t, r.Client, "dead.outbox.order", event{"d", "s", 1})
	must(t, r.Client.HSet(t.Context(), "outbox.hash", "k", "v").Err())
	var rec record
	start(t, consumer.Options{Client: r.Client, Prefix: "outbox.", Handler: rec.handle})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	add(t, r.Client, "outbox.user", event{"b", "s", 1})
	eventuallyRan(t, &rec, 20*time.Second, 2)
	allOnce(t, []string{"a", "b"}, rec.times())
}

// A stream that cannot be read does not keep the others from being read, and is read once it can.
func TestWrongTypeStopsNobodyElse(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	must(t, r.Client.Set(t.Context(), "bad", "x", 0).Err())
	var rec record
	start(t, consumer.Options{Client: r.Client, Streams: []string{"bad", "good"}, Handler: rec.handle})
	add(t, r.Client, "good", event{"a", "s", 1})
	settled(t, r.Client, 20*time.Second, "g", "good")
	must(t, r.Client.Del(t.Context(), "bad").Err())
	add(t, r.Client, "bad", event{"b", "s", 1})
	eventuallyRan(t, &rec, 20*time.Second, 2)
}

// syncBuffer is a writer whose lines a test can look at meanwhile.
type syncBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *syncBuffer) lines() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Split(strings.TrimSuffix(b.buf.String(), "\n"), "\n")
}

// wait waits until there is a line with text.
func (b *syncBuffer) wait(tb testing.TB, text string) {
	tb.Helper()
	testenv.Eventually(tb, 20*time.Second, func() error {
		all := strings.Join(b.lines(), "\n")
		return testenv.FailIf(!strings.Contains(all, text), "nothing is logged of %q: %s", text, all)
	})
}

// logTo returns a logger that writes to b.
func logTo(b *syncBuffer) *slog.Logger { return slog.New(slog.NewTextHandler(b, nil)) }

func TestLineWriter(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	entry := add(t, r.Client, "outbox.order", event{"id-1", "s-1", 5})
	// Malformed entries: no event at all, and a payload that is not JSON.
	for _, values := range [][]any{{"foo", "bar"}, {"id", "x", "data", "{"}} {
		must(t, r.Client.Do(t.Context(), append([]any{"XADD", "outbox.order", "*"}, values...)...).Err())
	}
	last := add(t, r.Client, "outbox.order", event{"id-2", "s-2", 6})
	var out syncBuffer
	start(t, consumer.Options{Client: r.Client, Prefix: "outbox.", Workers: 1, Handler: consumer.LineWriter(&out)})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	lines := out.lines()
	if len(lines) != 2 {
		t.Fatalf("lines %q, want 2", lines)
	}
	var got map[string]any
	must(t, json.Unmarshal([]byte(lines[0]), &got))
	for k, want := range map[string]string{
		"id": "id-1", "type": "order.created", "subject": "s-1",
		"stream": "outbox.order", "entry_id": entry,
	} {
		testenv.Equal[any](t, k, got[k], want)
	}
	if data, _ := got["data"].(map[string]any); len(got) != 8 || data["n"] != 5.0 || data["note"] != "<a>" {
		t.Errorf("got %v", got)
	}
	if headers, _ := got["headers"].(map[string]any); headers["tenant"] != "<a>" || headers["n"] != 5.0 {
		t.Errorf("headers %v", got["headers"])
	}
	testenv.Contains(t, "the second line", lines[1], last)
	testenv.Equal(t, "dead entries, the malformed ones", r.Client.XLen(t.Context(), "dead.outbox.order").Val(), 2)
}

func TestOptionsAreChecked(t *testing.T) {
	t.Parallel()
	_, err := consumer.New(consumer.Options{Streams: []string{"a"}, Prefix: "b", Workers: -1})
	for _, want := range []string{
		"no Redis client", "no group", "no handler", "either streams or a prefix",
		"negative",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
	}
}

func TestMetricsAtStart(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	client := redis.NewClient(&redis.Options{})
	defer client.Close()
	for _, group := range []string{"a", "b"} { // two in one process share the collectors
		_, err := consumer.New(consumer.Options{
			Client: client, Group: group, Streams: []string{"s"}, Handler: (&record{}).handle, Registerer: reg,
		})
		must(t, err)
	}
	for _, name := range []string{
		"outbox_consumer_dead_total", "outbox_consumer_claimed_total",
		"outbox_consumer_inflight_events", "outbox_consumer_redis_errors_total", "outbox_consumer_handle_seconds",
	} {
		testenv.Equal(t, name, sample(t, reg, name), 0)
	}
}

// An orderly stop lets the running event end and acknowledges it; another consumer takes waiting events at once, not
// after the claim time.
func TestOrderlyStop(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ids := fill(t, r.Client, "outbox.order", 50, 1)
	var rec record
	begun, end := make(chan struct{}, 1), make(chan struct{})
	logs := &syncBuffer{}
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", Logger: logTo(logs),
		Handler: func(ctx context.Context, ev consumer.Event) error {
			begun <- struct{}{}
			<-end
			return rec.handle(ctx, ev)
		},
	})
	<-begun
	c.cancel()
	logs.wait(t, "consumer stopping")
	close(end)
	must(t, c.stop())
	testenv.Equal(t, "events that ran", len(rec.list()), 1)
	if st, err := consumer.Inspect(t.Context(), r.Client, "outbox.order", "g"); err != nil || st.Pending+st.Lag != 49 ||
		st.Pending == 0 {
		t.Errorf("after the stop: %+v, %v; want 49 pending or unread", st, err)
	}
	start(t, consumer.Options{Client: r.Client, Prefix: "outbox.", ClaimIdle: time.Hour, Handler: rec.handle})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	allOnce(t, ids, rec.times())
	evs := rec.list()
	for i, ev := range evs {
		if number(t, ev) != i {
			t.Fatalf("event %d ran in place %d", number(t, ev), i)
		}
	}
}

// A handler that does not end in time is left behind, and its event is not acknowledged.
func TestDrainTimeout(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	add(t, r.Client, "outbox.order", event{"a", "s", 1})
	begun := make(chan struct{})
	c := start(t, consumer.Options{
		Client: r.Client, Prefix: "outbox.", DrainTimeout: 50 * time.Millisecond,
		Handler: func(ctx context.Context, _ consumer.Event) error {
			close(begun)
			<-ctx.Done()
			return nil // wrongly: but it has ended, and says that it is done
		},
	})
	<-begun
	testenv.ErrorIs(t, "Run", c.stop(), consumer.ErrDrain)
}

// Acknowledgements are refused while events run that had waited without their payloads. None of the workers waits for
// that, so the consumer stops in order.
func TestAStopWithoutAcknowledgements(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	const n = 500
	for i := range n {
		add(t, r.Client, "outbox.order", event{uuid.NewString(), "one", i})
	}
	fill(t, r.Client, "outbox.order", 300, 300)
	gate := make(chan struct{})
	var one, others record
	run := start(t, consumer.Options{
		Client: r.Client, Window: 64, Workers: 4, DrainTimeout: 3 * time.Second,
		Handler: func(ctx context.Context, ev consumer.Event) error {
			if ev.Subject != "one" {
				return others.handle(ctx, ev)
			}
			<-gate
			return one.handle(ctx, ev)
		},
	})
	eventuallyRan(t, &others, 20*time.Second, 300)
	must(t, r.Client.Do(t.Context(), "acl", "setuser", "default", "-xack").Err())
	close(gate)
	eventuallyRan(t, &one, 20*time.Second, n)
	must(t, run.stop())
}

// A consumer that names a type's only stream reads those that the type is spread over, once a relay has marked it, but
// not the stream of another type whose name only looks like one of them.
func TestShardsOfANamedStream(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	var f failing
	add(t, r.Client, "outbox.user.1", event{"another type", "s", 1})
	add(t, r.Client, "outbox.order", event{"before", "s", 1})
	start(t, consumer.Options{Client: r.Client, Streams: []string{"outbox.order", "outbox.user"}, Handler: f.run})
	settled(t, r.Client, 20*time.Second, "g", "outbox.order")
	streams := []string{"outbox.order"}
	for _, n := range []int{0, 3, 15} {
		name := fmt.Sprintf("outbox.order.%d", n)
		streams = append(streams, name)
		add(t, r.Client, name, event{name, "s", 2 + n})
	}
	must(t, r.Client.Set(t.Context(), "outbox.order#sharded", 1, 0).Err())
	testenv.Eventually(t, 30*time.Second, func() error {
		n := len(f.times())
		return testenv.FailIf(n < len(streams), "%d events, want %d", n, len(streams))
	})
	settled(t, r.Client, 20*time.Second, "g", streams...)
	testenv.Equal(t, "events of another type", f.times()["another type"], 0)
	found, err := consumer.Streams(t.Context(), r.Client, "outbox.")
	if err != nil || !slices.Contains(found, "outbox.order.3") || slices.Contains(found, "outbox.order#sharded") {
		t.Errorf("streams %q, %v", found, err)
	}
	bases, err := consumer.Bases(t.Context(), r.Client,
		append(streams, "outbox.user.1", "outbox.order.16", "outbox.order.03"))
	if want := map[string]string{
		"outbox.order.0": "outbox.order", "outbox.order.3": "outbox.order", "outbox.order.15": "outbox.order",
	}; err != nil || !maps.Equal(bases, want) {
		t.Errorf("bases %v, %v", bases, err)
	}
	if n := r.Client.Exists(t.Context(), "outbox.order.1", "outbox.user").Val(); n > 1 {
		t.Error("a stream was made that nobody publishes to")
	}
}

// In a cluster every stream is read by itself, and a dead event stays in its stream's slot, so that the move is atomic
// there too. One node with all slots refuses what crosses slots just as several would.
func TestCluster(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "cluster-enabled yes")
	must(t, r.Client.Do(t.Context(), "CLUSTER", "ADDSLOTSRANGE", 0, 16383).Err())
	testenv.Eventually(t, 20*time.Second, func() error { return r.Client.Set(t.Context(), "probe", 1, 0).Err() })
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{r.Addr()}})
	defer client.Close()
	for _, ordered := range []bool{false, true} {
		var want []string
		for i := range 60 {
			ev := event{fmt.Sprintf("%v-%d", ordered, i), fmt.Sprintf("s%d", i%5), i}
			want = append(want, ev.id)
			add(t, client, []string{"outbox.order", "outbox.user", "outbox.order.3"}[i%3], ev)
		}
		group := fmt.Sprintf("g-%v", ordered)
		var f failing
		f.ids.Store(want[0], consumer.Permanent(errBoom))
		c := start(t, consumer.Options{
			Client: client, Group: group, Prefix: "outbox.", Ordered: ordered, Handler: f.run,
		})
		settled(t, client, 20*time.Second, group, "outbox.order", "outbox.user", "outbox.order.3")
		must(t, c.stop())
		got := f.times()
		for _, id := range want[1:] {
			testenv.Equal(t, "runs of event "+id, got[id], 1)
		}
		list := dead(t, client)
		i := slices.IndexFunc(list, func(d consumer.DeadEntry) bool { return d.Group == group && d.EventID == want[0] })
		if i < 0 || list[i].DeadStream != "dead.{outbox.order}" || list[i].Stream != "outbox.order" {
			t.Fatalf("dead: %+v", list)
		}
		must(t, consumer.Retry(t.Context(), client, list[i]))
	}
}
