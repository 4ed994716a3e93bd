package sweep_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
	"posthaste/relay/stream"
	"posthaste/relay/sweep"
	"posthaste/sink"
	"posthaste/sql"
)

func TestMain(m *testing.M) {
	code := testenv.Main(m)
	err := goleak.Find()
	if err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

const prefix = "outbox."

// rig is a table, a Redis, and an adopted owner over both.
type rig struct {
	tb    testing.TB
	db    *testenv.Database
	redis *testenv.RedisServer
	proxy *testenv.Link
	store *sql.Store
	sink  stream.Sink
	owner outbox.Owner

	mu       sync.Mutex
	adopted  map[string]bool
	parked   []*outbox.Record
	metrics  *prometheus.Registry
	failures int
	failed   func(err error) // if set, is told of failures
	// batches has the ids of each group that was published and committed.
	batches [][]uuid.UUID
	// published, if set, is called with the events that were published.
	published func(events []*outbox.Record)
	// ensure, if set, is called before a stream is published to.
	ensure func(stream string) error
}

func newRig(tb testing.TB, redisConfig ...string) *rig {
	tb.Helper()
	r := &rig{
		tb: tb, db: testenv.Postgres(tb), redis: testenv.Redis(tb, redisConfig...), adopted: map[string]bool{},
		metrics: prometheus.NewRegistry(),
	}
	r.proxy = testenv.NewLink(tb, r.redis.Addr())
	client, err := sink.NewClient("redis://" + r.proxy.Addr())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = client.Close() })
	r.sink = sink.New(sink.Options{
		Client: client, Source: "/posthaste/test", Registerer: r.metrics, Logger: testenv.Logger(tb),
	})
	r.store = sql.NewStore(r.db.Pool, "test", time.Hour)
	r.must(r.store.Register(tb.Context()))
	st, err := r.store.State(tb.Context())
	r.must(err)
	r.owner = outbox.Owner{Source: st.Owner.Source, Epoch: 1, Nonce: nonce()}
	ok, err := r.store.Adopt(tb.Context(), outbox.Adoption{From: 0, To: r.owner, Holder: "test"})
	if err != nil || !ok {
		tb.Fatalf("adopt: %v, %v", ok, err)
	}
	return r
}

func nonce() (n outbox.Nonce) {
	_, _ = rand.Read(n[:]) // never fails
	return n
}

func (r *rig) must(err error) {
	r.tb.Helper()
	if err != nil {
		r.tb.Fatal(err)
	}
}

func (r *rig) scope() sweep.Scope {
	owner := r.owner // a sweep that runs keeps it when the rig gets another
	return sweep.Scope{
		Host: &host{rig: r, owner: owner}, Owner: owner, Layout: outbox.Layout{Prefix: prefix, Shards: 1},
	}
}

// host is the rig as a relay.
type host struct {
	*rig
	owner outbox.Owner
	// refresh and blocker, if set, are called for block-key.
	refresh func(ctx context.Context) error
	blocker func(e *outbox.Record) string
}

func (h *host) Ensure(ctx context.Context, stream string) error {
	if h.ensure != nil {
		if err := h.ensure(stream); err != nil {
			return err
		}
	}
	h.mu.Lock()
	done := h.adopted[stream]
	h.mu.Unlock()
	if done {
		return nil
	}
	if err := h.sink.Adopt(ctx, stream, h.owner, false); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.adopted[stream] = true
	return nil
}

func (h *host) Refresh(ctx context.Context) error {
	if h.refresh == nil {
		return nil
	}
	return h.refresh(ctx)
}

func (h *host) Blockers(events []*outbox.Record) []string {
	ids := make([]string, len(events))
	for i, e := range events {
		if h.blocker != nil {
			ids[i] = h.blocker(e)
		}
	}
	return ids
}

func (h *host) Published(_ string, events []*outbox.Record) {
	ids := make([]uuid.UUID, len(events))
	for i, e := range events {
		ids[i] = e.ID
	}
	h.mu.Lock()
	h.batches = append(h.batches, ids)
	h.mu.Unlock()
	if h.published != nil {
		h.published(events)
	}
}

func (h *host) Parked(e *outbox.Record, _ error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.parked = append(h.parked, e)
}

func (h *host) Outcome(err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		return
	}
	h.failures++
	if h.failed != nil {
		h.failed(err)
	}
}

// suppressed is how many events the sink has not published a second time.
func (r *rig) suppressed() int {
	r.tb.Helper()
	families, err := r.metrics.Gather()
	r.must(err)
	for _, f := range families {
		if f.GetName() == "outbox_suppressed_total" {
			return int(f.GetMetric()[0].GetCounter().GetValue())
		}
	}
	r.tb.Fatal("the metric is missing")
	return 0
}

// options are those of a sweeper over the rig.
func (r *rig) options(workers, rows int) sweep.Options {
	return sweep.Options{
		Open: open(r.db.URL), Workers: workers, BatchRows: rows, Sink: r.sink, Logger: testenv.Logger(r.tb),
	}
}

// open opens connections to a database.
func open(url string) func(ctx context.Context) (sweep.Conn, error) {
	return func(ctx context.Context) (sweep.Conn, error) { return sql.OpenSweep(ctx, url, "public", "test") }
}

// running is a Run in the background.
type running struct {
	stop context.CancelFunc
	done chan error
}

func (r *rig) run(o sweep.Options) *running {
	ctx, cancel := context.WithCancel(context.Background())
	run := &running{stop: cancel, done: make(chan error, 1)}
	s, scope := sweep.New(o), r.scope()
	go func() { run.done <- s.Run(ctx, scope) }()
	r.tb.Cleanup(func() {
		cancel()
		select {
		case err := <-run.done:
			if err != nil {
				r.tb.Errorf("Run: %v", err)
			}
		case <-time.After(15 * time.Second):
			r.tb.Error("Run does not end")
		}
	})
	return run
}

// end waits for Run to end by itself.
func (r *rig) end(run *running) error {
	r.tb.Helper()
	select {
	case err := <-run.done:
		run.done <- nil // for the cleanup
		return err
	case <-time.After(15 * time.Second):
		r.tb.Fatal("Run does not end")
		return nil
	}
}

func (r *rig) oracle() testenv.Oracle {
	return testenv.Oracle{DB: r.db, Redis: r.redis.Client, Prefix: prefix}
}

// insert writes one committed event.
func (r *rig) insert(typ, aggregate, payload string) uuid.UUID {
	r.tb.Helper()
	var id uuid.UUID
	r.must(pgx.BeginFunc(r.tb.Context(), r.db.Pool, func(tx pgx.Tx) (err error) {
		id, err = insertIn(r.tb.Context(), tx, typ, aggregate, payload)
		return err
	}))
	return id
}

func insertIn(ctx context.Context, tx pgx.Tx, typ, aggregate, payload string) (uuid.UUID, error) {
	ids, err := outbox.Insert(ctx, tx, outbox.Event{
		AggregateType: typ, AggregateID: aggregate, Type: typ + ".changed", Payload: []byte(payload),
	})
	if err != nil {
		return uuid.Nil, err
	}
	return ids[0], nil
}

// entries are the ids in the stream of typ.
func (r *rig) entries(typ string) []uuid.UUID {
	r.tb.Helper()
	msgs, err := r.redis.Client.XRange(context.WithoutCancel(r.tb.Context()), prefix+typ, "-", "+").Result()
	if err != nil && !errors.Is(err, redis.Nil) {
		r.tb.Fatal(err)
	}
	ids := make([]uuid.UUID, len(msgs))
	for i, m := range msgs {
		ids[i] = uuid.MustParse(m.Values["id"].(string))
	}
	return ids
}

// streamed checks which entries are in the stream of typ.
func (r *rig) streamed(typ string, want ...uuid.UUID) {
	r.tb.Helper()
	if got := r.entries(typ); !slices.Equal(got, want) {
		r.tb.Errorf("%s: %d entries, want %d in order: %v, want %v", typ, len(got), len(want), got, want)
	}
}

// eventually waits for what, by the condition.
func (r *rig) eventually(within time.Duration, what string, cond func() bool) {
	r.tb.Helper()
	testenv.Eventually(r.tb, within, func() error {
		if !cond() {
			return errors.New(what)
		}
		return nil
	})
}

// terminate ends the backends of sweep workers in the rig's database and returns how many there were.
func (r *rig) terminate() int {
	var n int
	err := r.db.Pool.QueryRow(context.Background(), `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'posthaste sweep'`).Scan(&n)
	if err != nil {
		r.tb.Errorf("terminate: %v", err)
	}
	return n
}

// hooked is the real sink with something that happens between publishing and parking, and the mark.
type hooked struct {
	stream.Sink
	confirm func()
}

func (h hooked) Confirm(ctx context.Context, o outbox.Owner, marks []outbox.Mark) error {
	h.confirm()
	return h.Sink.Confirm(ctx, o, marks)
}

// direct is a sink without the proxy.
func (r *rig) direct() *sink.Sink {
	return sink.New(sink.Options{Client: r.redis.Client, Source: "/posthaste/test"})
}

func (r *rig) owed() int {
	r.tb.Helper()
	return testenv.Value[int](r.tb, r.db, "SELECT count(*) FROM outbox_backlog")
}

// pass is a pass that was written down.
func (r *rig) pass() outbox.Pass {
	r.tb.Helper()
	p, err := r.store.BeginPass(r.tb.Context(), r.owner)
	r.must(err)
	return p
}

// pauses returns a function that sleeps when it is called for the first time, until wake is closed.
func pauses() (sleep func(), asleep, wake chan struct{}) {
	asleep, wake = make(chan struct{}), make(chan struct{})
	var once sync.Once
	return func() { once.Do(func() { close(asleep); <-wake }) }, asleep, wake
}

// begin opens a transaction that ends with the test at the latest.
func (r *rig) begin() pgx.Tx {
	r.tb.Helper()
	tx, err := r.db.Pool.Begin(r.tb.Context())
	r.must(err)
	r.tb.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// await waits for c to be closed.
func (r *rig) await(c <-chan struct{}) {
	r.tb.Helper()
	select {
	case <-c:
	case <-time.After(15 * time.Second):
		r.tb.Fatal("it does not come to that")
	}
}
