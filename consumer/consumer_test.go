package consumer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"posthaste/consumer"
	"posthaste/internal/testenv"
)

func TestEveryEventOnceAndAcknowledged(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t)
	ids := fill(t, r.Client, "outbox.order", 3000, 100)
	var rec record
	c := start(t, consumer.Options{Client: r.Client, Streams: []string{"outbox.order"}, Handler: rec.handle})
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
		Client: r.Client, Streams: []string{"outbox.order"},
		Middleware: []consumer.Middleware{mw("outer"), mw("inner")},
		Handler: consumer.JSON(func(ctx context.Context, ev consumer.Event, body struct{ N int }) error {
			if body.N != 7 {
				t.Errorf("decoded %d, want 7", body.N)
			}
			trace <- consumer.TraceParent(ctx)
			got <- ev
			return nil
		}),
	})
	tp := "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	if s := <-trace; s != tp {
		t.Errorf("trace context %q, want %q", s, tp)
	}
	ev := <-got
	if ev.ID != "id-1" || ev.Type != "order.created" || ev.Source != "/posthaste/default" || ev.Subject != "s" ||
		ev.Stream != "outbox.order" || ev.EntryID != entry || ev.Attempt != 1 || ev.Replayed || ev.TraceParent != tp ||
		!maps.Equal(ev.Headers, map[string]string{"tenant": "<a>", "n": "5", "z": "null"}) ||
		time.Since(ev.Time) > time.Minute {
		t.Errorf("got %+v", ev)
	}
	if strings.Join(order, " ") != "outer inner" {
		t.Errorf("middleware ran as %v", order)
	}
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
	testenv.Eventually(t, 20*time.Second, func() error {
		n := len(rec.list())
		return testenv.FailIf(n != 2, "%d events", n)
	})
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
	testenv.Eventually(t, 20*time.Second, func() error {
		n := len(rec.list())
		return testenv.FailIf(n != 2, "%d events", n)
	})
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
		if got[k] != want {
			t.Errorf("%s = %v, want %s", k, got[k], want)
		}
	}
	if data, _ := got["data"].(map[string]any); len(got) != 8 || data["n"] != 5.0 || data["note"] != "<a>" {
		t.Errorf("got %v", got)
	}
	if headers, _ := got["headers"].(map[string]any); headers["tenant"] != "<a>" || headers["n"] != 5.0 {
		t.Errorf("headers %v", got["headers"])
	}
	if !strings.Contains(lines[1], last) {
		t.Errorf("second line %s, want entry %s", lines[1], last)
	}
	if n := r.Client.XLen(t.Context(), "dead.outbox.order").Val(); n != 2 {
		t.Errorf("%d dead entries, want the 2 malformed ones", n)
	}
}
