package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/testenv"
)

// placed is an answer to POST /orders.
type placed struct {
	status int
	body   []byte
	trace  string
}

// placeOrder posts one order under a key of its own, and repeats it when it is told to, as a client does: of many
// orders at once some wait too long for a connection where the machine is slow.
func placeOrder(ctx context.Context, base string, amount int) (placed, error) {
	body := fmt.Sprintf(`{"user_id":%q,"amount":%d,"currency":"USD"}`, uuid.NewString(), amount)
	trace := fmt.Sprintf("00-%s-00f067aa0ba902b7-01", strings.ReplaceAll(uuid.NewString(), "-", ""))
	key := strconv.Quote(uuid.NewString())
	for until := time.Now().Add(20 * time.Second); ; {
		a, err := postOrder(ctx, base, body, key, trace)
		again := a.status == http.StatusServiceUnavailable || a.status == http.StatusConflict
		if err != nil || !again || time.Now().After(until) {
			return a, err
		}
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func postOrder(ctx context.Context, base, body, key, trace string) (placed, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/orders", strings.NewReader(body))
	if err != nil {
		return placed{}, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Idempotency-Key", key)
	req.Header.Set("Traceparent", trace)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return placed{}, err
	}
	defer resp.Body.Close()
	var b bytes.Buffer
	if _, err := b.ReadFrom(resp.Body); err != nil {
		return placed{}, err
	}
	return placed{resp.StatusCode, b.Bytes(), trace}, nil
}

func TestConcurrentOrdersBecomeEventsExactlyOnce(t *testing.T) {
	t.Parallel()
	const orders = 200
	w := newWorld(t)
	w.spawn("relay")
	api := w.spawn("serve")
	heard := w.redis.Client.Subscribe(t.Context(), "order.created")
	defer heard.Close()
	if _, err := heard.Receive(t.Context()); err != nil {
		t.Fatal(err)
	}
	messages := heard.Channel()
	began := time.Now()
	answers := map[string]placed{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range orders {
		wg.Go(func() {
			a, err := placeOrder(t.Context(), api.http, i+1)
			var order struct{ ID string }
			if err != nil || a.status != http.StatusCreated || json.Unmarshal(a.body, &order) != nil {
				t.Errorf("order %d: status %d, %v: %s", i, a.status, err, a.body)
				return
			}
			mu.Lock()
			answers[order.ID] = a
			mu.Unlock()
		})
	}
	wg.Wait()
	w.oracle.WaitEmpty(t, 20*time.Second)
	if len(answers) != orders {
		t.Fatalf("%d orders, want %d", len(answers), orders)
	}
	ids := map[string]bool{}
	for _, m := range rawEntries(t, w, "outbox.order") {
		subject := m["subject"]
		a, ok := answers[subject]
		if !ok {
			t.Fatalf("event for order %q, which nobody placed, or its second", subject)
		}
		checkOrderEvent(t, w, m, a)
		delete(answers, subject)
		ids[m["id"]] = true
	}
	if len(answers) > 0 || len(ids) != orders {
		t.Errorf("%d orders without event, %d event ids", len(answers), len(ids))
	}
	if n := testenv.Value[int](t, w.db,
		"SELECT count(DISTINCT id) FROM outbox_history WHERE entry_id IS NOT NULL"); n != orders {
		t.Errorf("%d events in history, want %d", n, orders)
	}
	for range orders {
		select {
		case m := <-messages:
			if !json.Valid([]byte(m.Payload)) {
				t.Fatalf("message %q", m.Payload)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("not every event was heard on its channel")
		}
	}
	t.Logf("%d orders placed, streamed and settled in %v", orders, time.Since(began).Round(time.Millisecond))
}

// rawEntries returns the fields of a stream's entries.
func rawEntries(t *testing.T, w *world, stream string) []map[string]string {
	t.Helper()
	list, err := w.redis.Client.XRange(t.Context(), stream, "-", "+").Result()
	if err != nil {
		t.Fatal(err)
	}
	out := make([]map[string]string, len(list))
	for i, m := range list {
		out[i] = map[string]string{}
		for k, v := range m.Values {
			out[i][k], _ = v.(string)
		}
	}
	return out
}

var eventTime = regexp.MustCompile(`^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$`)

// checkOrderEvent holds an entry's fields against the contract and the answer the client got.
func checkOrderEvent(t *testing.T, w *world, m map[string]string, a placed) {
	t.Helper()
	if len(m) != 7 {
		t.Errorf("fields %v, want id, type, source, subject, time, data, traceparent", m)
	}
	if _, err := uuid.Parse(m["id"]); err != nil {
		t.Errorf("id %q", m["id"])
	}
	if m["type"] != "order.created" || m["source"] != "/posthaste/"+w.db.Relay {
		t.Errorf("type %q, source %q", m["type"], m["source"])
	}
	at, err := time.Parse(time.RFC3339, m["time"])
	if err != nil || !eventTime.MatchString(m["time"]) || time.Since(at).Abs() > 10*time.Minute {
		t.Errorf("time %q", m["time"])
	}
	// The span is the server's, the trace is the client's.
	if !strings.HasPrefix(m["traceparent"], a.trace[:36]) {
		t.Errorf("traceparent %q, the client's was %q", m["traceparent"], a.trace)
	}
	var data, body map[string]any
	if json.Unmarshal([]byte(m["data"]), &data) != nil || json.Unmarshal(a.body, &body) != nil ||
		fmt.Sprint(data) != fmt.Sprint(body) {
		t.Errorf("data %s, the answer was %s", m["data"], a.body)
	}
}

func TestOneLargeTransaction(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode, "--log-level=info")
		peak := r.peakGauge(t, "outbox_inflight_events")
		load := testenv.Bulk(t, w.db, 15_000, 40)
		w.oracle.Check(t, load, 60*time.Second)
		if n := peak(); n > 10_000 {
			t.Errorf("%v events in flight, the window is 10,000", n)
		}
	})
}

func TestLargeEventsAreBoundedByBytes(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		r := w.relayIn(mode, "--window-bytes=8MiB", "--log-level=info")
		peak := r.peakGauge(t, "outbox_inflight_events")
		events := 24
		if full() {
			events = 64
		}
		if mode == "poll" {
			load := testenv.Bulk(t, w.db, events, 1<<20)
			w.oracle.Check(t, load, 60*time.Second)
		} else {
			w.bulkWhilePaused(r, events)
		}
		// An event of 1 MiB is counted with some 300 bytes more, so seven fit.
		if n := peak(); n > 7 {
			t.Errorf("%v events of 1 MiB in flight, the window is 8 MiB", n)
		}
	})
}

// bulkWhilePaused writes events of 1 MiB, and Redis takes none until some are seen in flight.
func (w *world) bulkWhilePaused(r *child, events int) {
	w.t.Helper()
	client := func(args ...any) {
		w.t.Helper()
		if err := w.redis.Client.Do(w.t.Context(), append([]any{"CLIENT"}, args...)...).Err(); err != nil {
			w.t.Fatal(err)
		}
	}
	client("PAUSE", 60_000, "WRITE")
	load := testenv.Bulk(w.t, w.db, events, 1<<20)
	testenv.Eventually(w.t, 20*time.Second, func() error {
		text, err := r.metrics()
		if n, ok := sample(text, "outbox_inflight_events"); n == 0 || !ok {
			return fmt.Errorf("no event is in flight, %w", err)
		}
		return nil
	})
	client("UNPAUSE")
	w.oracle.Check(w.t, load, 60*time.Second)
}

// peakGauge samples a gauge of the child as fast as it answers, until the returned function is called.
func (c *child) peakGauge(t *testing.T, name string) func() float64 {
	t.Helper()
	stop, done := make(chan struct{}), make(chan float64, 1)
	go func() {
		peak := 0.0
		for {
			select {
			case <-stop:
				done <- peak
				return
			case <-time.After(5 * time.Millisecond):
			}
			text, err := c.metrics()
			if v, ok := sample(text, name); ok && err == nil {
				peak = max(peak, v)
			}
		}
	}()
	return func() float64 { close(stop); return <-done }
}

// retained samples, every 100 ms, the WAL that the slot holds back, until the returned function is called.
func (w *world) retained() func() (peak int64) {
	w.t.Helper()
	ctx, cancel := context.WithCancel(w.t.Context())
	done := make(chan int64, 1)
	go func() {
		peak := int64(0)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				done <- peak
				return
			case <-tick.C:
			}
			var n int64
			err := w.db.Pool.QueryRow(ctx,
				"SELECT coalesce(max(pg_current_wal_lsn() - restart_lsn), 0)::bigint FROM pg_replication_slots WHERE "+
					"slot_name = $1",
				"posthaste_"+w.db.Relay).Scan(&n)
			if err == nil {
				peak = max(peak, n)
			}
		}
	}()
	return func() int64 { cancel(); return <-done }
}

// churn writes WAL that has nothing to do with the outbox, at a rate in bytes per second, until the test ends. It
// counts what it has written.
func churn(t *testing.T, url string, rate int) *atomic.Int64 {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	c, err := pgx.Connect(ctx, url)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Exec(ctx,
		"CREATE TABLE churn (b bytea); ALTER TABLE churn ALTER b SET STORAGE EXTERNAL"); err != nil {
		t.Fatal(err)
	}
	written, done := &atomic.Int64{}, make(chan struct{})
	t.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		defer func() { _ = c.Close(context.Background()) }()
		const each = 50 * time.Millisecond
		block := make([]byte, rate/int(time.Second/each))
		tick := time.NewTicker(each)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if _, err := c.Exec(ctx, "INSERT INTO churn VALUES ($1)", block); err == nil {
				written.Add(int64(len(block)))
			}
		}
	}()
	return written
}

// settleSlack is what may be written in one settle interval, here a second, beyond the budget: the relay looks at the
// slot four times a second and needs the rest to leave the stream and to move or drop the slot. The tests write at most
// 12 MB/s of events, and the WAL of an event with its index entry and page headers is about a quarter more.
const settleSlack = 16 << 20

// walBudget writes total bytes of events while Redis is down and holds the slot against the budget.
func walBudget(t *testing.T, budget, total int) {
	t.Helper()
	server := testenv.NewServer(t)
	w := worldOf(t, server.Database(t), testenv.Redis(t))
	r := w.relayIn("cdc", fmt.Sprintf("--wal-budget=%d", budget), "--log-level=info")
	warm := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: 60})
	warm.Wait()
	w.oracle.WaitEmpty(t, 20*time.Second)
	if err := w.redis.Kill(); err != nil {
		t.Fatal(err)
	}
	w.oracle.Others = []*testenv.Load{warm}
	peak := w.retained()
	const pad = 30_000
	began := time.Now()
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Total: total / pad, Rate: 400, Pad: pad, Tag: "down-"})
	load.Wait()
	rate := float64(total) / time.Since(began).Seconds() / 1e6
	wait(t, time.Second)
	held := peak()
	t.Logf("retained at most %.1f MiB of a budget of %d MiB while %d MB of events were written at %.1f MB/s with "+
		"Redis down", float64(held)/(1<<20), budget>>20, total/1e6, rate)
	if held > int64(budget+settleSlack) {
		t.Errorf("the slot held back %d bytes", held)
	}
	if held < int64(budget)/4 {
		t.Errorf("the slot held back only %d bytes: nothing was tested", held)
	}
	if !r.logged(`"reason":"budget"`) {
		t.Error("the relay did not leave the stream because of its budget")
	}
	if err := w.redis.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.oracle.Check(t, load, 60*time.Second)
	w.waitMode("cdc", 30*time.Second)
}

func TestWALBudgetWithRedisDown(t *testing.T) {
	t.Parallel()
	walBudget(t, 16<<20, 36_000_000)
}

// idleBeside lets other tables write while the outbox is idle and the relay in the mode, and holds the slot against
// bound.
func idleBeside(t *testing.T, mode string, rate int, lasting time.Duration, bound int64) {
	t.Helper()
	server := testenv.NewServer(t)
	w := worldOf(t, server.Database(t), testenv.Redis(t))
	w.relayIn("cdc", "--log-level=info") // in poll mode too, so that there is a slot
	if mode == "poll" {
		w.desire("poll")
		w.waitMode("poll", 20*time.Second)
	}
	written := churn(t, w.db.URL, rate)
	peak := w.retained()
	began := time.Now()
	testenv.Eventually(t, lasting+2*time.Minute, func() error {
		if n := written.Load(); n < 60<<20 || time.Since(began) < lasting {
			return fmt.Errorf("%d bytes are written", n)
		}
		return nil
	})
	held := peak()
	t.Logf("%s: retained at most %.1f MiB while other tables wrote %.1f MiB in %v", mode, float64(held)/(1<<20),
		float64(written.Load())/(1<<20), time.Since(began).Round(time.Second))
	if held > bound {
		t.Errorf("an idle outbox holds back %d bytes", held)
	}
}

func TestIdleOutboxBesideABusyTable(t *testing.T) {
	t.Parallel()
	// The bound leaves the other tables three seconds more than the relay needs: other tests run beside, at full counts
	// too.
	inModes(t, func(t *testing.T, mode string) { idleBeside(t, mode, 8<<20, 5*time.Second, 45<<20) })
}

func TestOpenTransactionElsewhereCostsTheSlotNotTheDisk(t *testing.T) {
	t.Parallel()
	const budget = 16 << 20
	server := testenv.NewServer(t)
	w := worldOf(t, server.Database(t), testenv.Redis(t))
	other := server.Database(t)
	r := w.relayIn("cdc", fmt.Sprintf("--wal-budget=%d", budget), "--log-level=info")
	tx, err := other.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	// It must have written something: the decoder knows of no other transactions.
	if _, err := tx.Exec(t.Context(), "CREATE TABLE held ()"); err != nil {
		t.Fatal(err)
	}
	peak := w.retained()
	written := churn(t, other.URL, 4<<20)
	load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 200})
	testenv.Eventually(t, time.Minute, func() error {
		if !r.logged("dropping it") {
			return fmt.Errorf("the slot was not dropped")
		}
		return nil
	})
	// Without the slot the events go on.
	want := load.Committed() + 200
	testenv.Eventually(t, 20*time.Second, func() error {
		n, err := w.redis.Client.XLen(t.Context(), "outbox.order").Result()
		if err != nil || int(n) < want {
			return fmt.Errorf("%d of %d events, %w", n, want, err)
		}
		return nil
	})
	held := peak()
	t.Logf("retained at most %.1f MiB beside an open transaction and %.1f MiB of other WAL", float64(held)/(1<<20),
		float64(written.Load())/(1<<20))
	if held > budget+settleSlack {
		t.Errorf("the slot held back %d bytes", held)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	w.waitMode("cdc", 40*time.Second)
	load.Stop()
	w.oracle.Check(t, load, 20*time.Second)
}

// deadEvent is one element of `dead list --json`.
type deadEvent struct {
	Source        string
	ID            string
	AggregateType string `json:"aggregate_type"`
	AggregateID   string `json:"aggregate_id"`
	Class         string
	Error         string
	Attempts      int
}

// dead waits until n events are parked.
func (w *world) dead(n int, within time.Duration) (list []deadEvent) {
	w.t.Helper()
	testenv.Eventually(w.t, within, func() error {
		if have := testenv.Value[int](w.t, w.db, "SELECT count(*) FROM outbox_dead"); have != n {
			return fmt.Errorf("%d events are parked, want %d", have, n)
		}
		return nil
	})
	r := w.once("dead", "list", "--json")
	if err := json.Unmarshal([]byte(r.out), &list); err != nil || r.code != 0 || len(list) != n {
		w.t.Fatalf("dead list --json: exit %d, %v: %s%s", r.code, err, r.out, r.errOut)
	}
	return list
}

// insert writes one event and returns its id.
func (w *world) insert(typ, aggregate string, n int) string {
	w.t.Helper()
	id := uuid.NewString()
	w.db.Exec(w.t, "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES ($1, $2, $3, "+
		"$4, jsonb_build_object('n', $5::int))",
		id, typ, aggregate, typ+".changed", n)
	return id
}

// waitIDs waits until a stream has exactly these events, in this order.
func (w *world) waitIDs(stream string, ids ...string) {
	w.t.Helper()
	testenv.Eventually(w.t, 20*time.Second, func() error {
		var have []string
		if w.redis.Client.Type(w.t.Context(), stream).Val() == "stream" {
			for _, m := range rawEntries(w.t, w, stream) {
				have = append(have, m["id"])
			}
		}
		if strings.Join(have, " ") != strings.Join(ids, " ") {
			return fmt.Errorf("%s has %v, want %v", stream, have, ids)
		}
		return nil
	})
}

func TestPoisonIsParkedRetriedAndDropped(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		if err := w.redis.Client.Set(t.Context(), "outbox.bad", "x", 0).Err(); err != nil {
			t.Fatal(err)
		}
		w.relayIn(mode)
		load := testenv.StartLoad(t, w.db, testenv.LoadOptions{Rate: 200})
		first, second := w.insert("bad", "a", 1), w.insert("bad", "b", 1)
		at := time.Now()
		list := w.dead(2, 20*time.Second)
		t.Logf("parked after %v", time.Since(at).Round(time.Millisecond))
		for _, d := range list {
			if d.Source != "relay" || d.AggregateType != "bad" || d.Class == "" || d.Error == "" ||
				(d.ID != first && d.ID != second) {
				t.Errorf("parked event %+v", d)
			}
		}
		if r := w.once("dead", "drop", second); r.code != 0 || !strings.HasPrefix(r.out, second) {
			t.Errorf("dead drop: exit %d: %s%s", r.code, r.out, r.errOut)
		}
		w.dead(1, 20*time.Second)
		if err := w.redis.Client.Del(t.Context(), "outbox.bad").Err(); err != nil {
			t.Fatal(err)
		}
		if r := w.once("dead", "retry", "--json", first); r.code != 0 ||
			!strings.Contains(r.out, `"id": "`+first+`"`) || !strings.Contains(r.out, `"ok": true`) {
			t.Errorf("dead retry: exit %d: %s%s", r.code, r.out, r.errOut)
		}
		w.waitIDs("outbox.bad", first)
		w.dead(0, 20*time.Second)
		load.Stop()
		w.oracle.Check(t, load, 20*time.Second)
	})
}

func TestPoisonBlocksItsAggregate(t *testing.T) {
	t.Parallel()
	inModes(t, func(t *testing.T, mode string) {
		w := newWorld(t)
		if err := w.redis.Client.Set(t.Context(), "outbox.bad", "x", 0).Err(); err != nil {
			t.Fatal(err)
		}
		w.relayIn(mode, "--poison=block-key")
		ids := []string{w.insert("bad", "a", 1)}
		w.dead(1, 20*time.Second)
		if err := w.redis.Client.Del(t.Context(), "outbox.bad").Err(); err != nil {
			t.Fatal(err)
		}
		// The stream would take them now; the aggregate waits all the same, others do not.
		ids = append(ids, w.insert("bad", "a", 2), w.insert("bad", "a", 3))
		free := w.insert("bad", "b", 1)
		w.waitIDs("outbox.bad", free)
		w.dead(3, 20*time.Second)
		if r := w.once("dead", "retry", "--all"); r.code != 0 || strings.Count(r.out, "\n") != 3 {
			t.Errorf("dead retry --all: exit %d: %s%s", r.code, r.out, r.errOut)
		}
		w.waitIDs("outbox.bad", append([]string{free}, ids...)...)
		w.dead(0, 20*time.Second)
		ids = append(ids, w.insert("bad", "a", 4))
		w.waitIDs("outbox.bad", append([]string{free}, ids...)...)
	})
}

// memory reads a line of /proc/PID/status in bytes: VmRSS, or VmHWM, its highest value so far.
func (c *child) memory(t *testing.T, line string) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(b), line+":")
	if !ok {
		t.Fatalf("no %s", line)
	}
	kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kb << 10
}
