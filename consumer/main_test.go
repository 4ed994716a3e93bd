package consumer_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"posthaste/consumer"
	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		os.Exit(child())
	}
	code := testenv.Main(m)
	err := goleak.Find()
	if err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// full reports whether the large counts are requested.
func full() bool { return os.Getenv("POSTHASTE_TEST_FULL") == "1" }

// scale is n in full mode, less otherwise.
func scale(n, less int) int {
	if full() {
		return n
	}
	return less
}

// event is what a test adds to a stream.
type event struct {
	id, subject string
	n           int
}

// add writes one entry as the relay does and returns its entry id.
func add(tb testing.TB, client redis.Cmdable, stream string, ev event) string {
	tb.Helper()
	id, err := client.XAdd(tb.Context(), &redis.XAddArgs{Stream: stream, Values: fields(ev)}).Result()
	if err != nil {
		tb.Fatalf("XADD: %v", err)
	}
	return id
}

func fields(ev event) []any {
	return []any{
		"id", ev.id, "type", "order.created", "source", "/posthaste/default", "subject", ev.subject,
		"time", time.Now().UTC().Format("2006-01-02T15:04:05.000000Z"), "data",
		fmt.Sprintf(`{"n": %d, "note": "<a>"}`, ev.n), "specversion", "1.0",
		"traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
		"headers", `{"tenant": "<a>", "n": 5, "z": null}`,
	}
}

// fill adds n events, spread over the given number of subjects in turn, and returns their ids.
func fill(tb testing.TB, client *redis.Client, stream string, n, subjects int) []string {
	tb.Helper()
	ids := make([]string, n)
	for i := 0; i < n; {
		_, err := client.Pipelined(tb.Context(), func(p redis.Pipeliner) error {
			for end := min(n, i+1000); i < end; i++ {
				ids[i] = uuid.NewString()
				p.XAdd(tb.Context(),
					&redis.XAddArgs{Stream: stream, Values: fields(event{ids[i], fmt.Sprintf("s%d", i%subjects), i})})
			}
			return nil
		})
		if err != nil {
			tb.Fatalf("fill: %v", err)
		}
	}
	return ids
}

// running is a consumer in its goroutine.
type running struct {
	*consumer.Consumer
	cancel context.CancelFunc
	done   chan error
}

// start runs a consumer until the test ends or stop is called.
func start(tb testing.TB, opt consumer.Options) *running {
	tb.Helper()
	return run(tb, create(tb, opt))
}

// create makes a consumer. Quick defaults stand in for those that a test does not set.
func create(tb testing.TB, opt consumer.Options) *consumer.Consumer {
	tb.Helper()
	if opt.Group == "" {
		opt.Group = "g"
	}
	if opt.Prefix == "" && opt.Streams == nil {
		opt.Streams = []string{"outbox.order"}
	}
	if opt.Backoff == nil {
		opt.Backoff = func(int) time.Duration { return 5 * time.Millisecond }
	}
	if opt.Logger == nil {
		opt.Logger = testenv.Logger(tb)
	}
	c, err := consumer.New(opt)
	must(tb, err)
	return c
}

// run is start for a consumer that is made already.
func run(tb testing.TB, c *consumer.Consumer) *running {
	tb.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	r := &running{Consumer: c, cancel: cancel, done: make(chan error, 1)}
	go func() { r.done <- c.Run(ctx) }()
	tb.Cleanup(func() { _ = r.stop() })
	return r
}

// stop ends the consumer in order and returns what Run returned.
func (r *running) stop() error {
	r.cancel()
	err := <-r.done
	r.done <- err
	return err
}

// record collects events.
type record struct {
	mu     sync.Mutex
	events []consumer.Event
}

func (r *record) handle(_ context.Context, ev consumer.Event) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, ev)
	return nil
}

func (r *record) list() []consumer.Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.events)
}

// times counts the events by id.
func (r *record) times() map[string]int {
	out := map[string]int{}
	for _, ev := range r.list() {
		out[ev.ID]++
	}
	return out
}

// number is the n in an event's payload.
func number(tb testing.TB, ev consumer.Event) int {
	tb.Helper()
	var body struct{ N int }
	if err := json.Unmarshal(ev.Data, &body); err != nil {
		tb.Fatalf("payload of %s: %v", ev.ID, err)
	}
	return body.N
}

// settled waits until the group has read everything and nothing is pending.
func settled(tb testing.TB, client redis.UniversalClient, within time.Duration, group string, streams ...string) {
	tb.Helper()
	testenv.Eventually(tb, within, func() error {
		for _, s := range streams {
			st, err := consumer.Inspect(tb.Context(), client, s, group)
			if err != nil {
				return err
			}
			if st.Pending != 0 || st.Lag != 0 {
				return fmt.Errorf("stream %s: %d pending, lag %d", s, st.Pending, st.Lag)
			}
		}
		return nil
	})
}

// allOnce expects each id exactly once.
func allOnce(tb testing.TB, ids []string, got map[string]int) {
	tb.Helper()
	wrong := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return got[id] == 1 })
	if len(wrong) > 0 || len(got) != len(ids) {
		tb.Fatalf("%d of %d events missing or repeated, %d different ids", len(wrong), len(ids), len(got))
	}
}

var errBoom = errors.New("boom")

func goexit() { runtime.Goexit() }

var must = testenv.Must
